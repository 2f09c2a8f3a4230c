"""The explorer: a local page on which to look at the guarantee."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from keepcover.cli.console import (
    DataDir,
    Device,
    Fingerprint,
    Json,
    ModelOutput,
    Part,
    ScoreName,
    Seed,
    Weights,
    app,
    err,
    print_json,
)
from keepcover.errors import InputError

if TYPE_CHECKING:
    from keepcover.explore.answers import Explorer


@app.command()
def explore(
    saved: Annotated[
        Path | None,
        typer.Argument(help="A predictor of yours, as `keepcover calibrate` wrote it; needs --model, --data."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A model as for `keepcover calibrate`; the digits demo by default.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Labelled images as for `keepcover calibrate`, never seen in training.")
    ] = None,
    sigma: Annotated[
        float | None, typer.Option(help="Noise that the model was trained for; a saved predictor knows its own.")
    ] = None,
    weights: Weights = None,
    model_output: ModelOutput = "logits",
    data_dir: DataDir = None,
    part: Part = None,
    score: Annotated[ScoreName, typer.Option(help="Non-conformity score.")] = "hps",
    alpha: Annotated[list[float] | None, typer.Option(help="Miscoverage to offer; repeat for several.")] = None,
    draws: Annotated[
        list[int] | None,
        typer.Option(help="Model evaluations per query to offer; repeat for several. 1, 4, 16, 64, 256 by default."),
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="The largest radius of the slider; 1.5 sigma by default.")
    ] = None,
    calibration: Annotated[
        int | None, typer.Option(help="Calibration points; 9/20 of the data, at most 2000, by default.")
    ] = None,
    gallery: Annotated[int | None, typer.Option(help="Test images on show, 500 at most by default.")] = None,
    fingerprint: Fingerprint = None,
    device: Device = None,
    seed: Seed = 0,
    host: Annotated[str, typer.Option(help="Address to listen on; this machine only by default.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one and prints it.")] = 7860,
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Open a browser.")] = True,
    as_json: Json = False,
) -> None:
    """A page in your browser: pick an image, move epsilon, alpha and draws, see the sets grow, attack, see what is lost.

    Without arguments it trains a small network on handwritten digits first, in seconds. Vanilla CP, RSCP+ with PTT and the
    exact certificate stand side by side, with curves of size and coverage. Nothing leaves this machine.

    A model of yours: `keepcover explore --model ... --data ... --sigma 0.25`; for a slow one, offer fewer `--draws` and
    `--calibration` points. A saved predictor is shown at its own levels. `--json` prints the address as JSON once it answers.
    """
    from keepcover.web import require

    require("the explorer", "explore")
    import torch

    from keepcover.explore.answers import Explorer
    from keepcover.explore.lineup import ALPHAS, DRAWS, Lineup, radii
    from keepcover.explore.server import run
    from keepcover.explore.subject import digits_subject, own_subject, saved_subject
    from keepcover.specs import MODELS, load_data, load_model, load_predictor, take_part

    start = time.monotonic()
    if saved is not None and any(given is not None for given in (sigma, alpha, draws, epsilon)):
        raise InputError("a saved predictor has its own sigma, alphas, epsilons and draws; leave those options out")
    if saved is None and model is None and data is None:
        if any(given is not None for given in (weights, sigma, data_dir, part, calibration, gallery)):
            raise InputError(
                "expected --model and --data with those options; without arguments the digits demo is shown"
            )
        torch.set_num_threads(1)  # tensors this small cost more to share among threads than to compute
        subject = digits_subject(seed, _say)
    elif model is None or data is None:
        raise InputError("expected both --model and --data; without arguments the digits demo is shown")
    elif model in MODELS and weights is None:
        raise InputError(f"{model} needs --weights FILE: a network that was not trained has nothing to show")
    elif saved is not None:
        points = take_part(load_data(data, data_dir), part)
        predictor = load_predictor(saved, model, weights, device, model_output, fingerprint=fingerprint)
        subject = saved_subject(predictor, points, calibration=calibration, gallery=gallery, seed=seed)
    elif sigma is None or not sigma > 0:
        raise InputError("expected --sigma above 0, the noise that the model was trained for")
    else:
        points = take_part(load_data(data, data_dir), part)
        network = load_model(model, weights, len(points.class_names), device, model_output)
        sizes = {"calibration": calibration, "gallery": gallery}
        subject = own_subject(network, points, sigma, score=score, device=device, seed=seed, **sizes)
    explorer = Explorer(
        Lineup(
            subject,
            alphas=alpha or ALPHAS,
            draws=draws or DRAWS,
            epsilons=None if epsilon is None else radii(epsilon),
            seed=seed,
        )
    )
    _prepare(explorer)
    seconds = time.monotonic() - start

    def tell(address: str) -> None:
        if as_json:
            print_json({"address": address, "seconds": round(seconds, 1)})
            sys.stdout.flush()
        else:
            _say(f"ready after {seconds:.0f} s")
            _say(f"the explorer is at {address} (end it with Ctrl-C)")

    run(explorer, tell=tell, host=host, port=port, open_page=open_page)


def _say(text: str) -> None:
    err.print(text, highlight=False, markup=False, soft_wrap=True)


def _prepare(explorer: Explorer) -> None:
    """Calibrate for the first view, with a bar on a terminal."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    with Progress(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=err, transient=True
    ) as progress:
        task = progress.add_task("calibrating", total=None)

        def show() -> None:
            state = explorer.lineup.progress
            if state:
                progress.update(task, description=state["what"], completed=state["done"], total=state["total"])

        explorer.lineup.watch = show
        explorer.prepare()
        explorer.lineup.watch = None
