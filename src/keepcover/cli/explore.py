"""The explorer: a local page on which to look at the guarantee."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from keepcover.cli import console as ui
from keepcover.cli import options as opt
from keepcover.errors import InputError
from keepcover.web import require

MODEL, DATA = opt.Model(""), opt.Data("")


@opt.command
def explore(
    saved: Annotated[Path | None, typer.Argument()] = None,
    using: opt.Model = MODEL,
    given: opt.Data = DATA,
    *,
    asked: opt.Asked,
    score: opt.Score = "hps",
    alpha: list[float] | None = None,
    draws: list[int] | None = None,
    epsilon: float | None = None,
    calibration: int | None = None,
    gallery: int | None = None,
    seed: opt.Seed = 0,
    host: str = "127.0.0.1",
    port: int = 7860,
    open_page: Annotated[bool, "--open/--no-open"] = True,
    as_json: opt.Json = False,
) -> None:
    """A page in your browser: pick an image, move epsilon, alpha and draws, see the sets grow, attack, see what is lost.

    Without arguments it trains a small network on handwritten digits first, in seconds. Vanilla CP, RSCP+ with PTT and the
    exact certificate stand side by side, with curves of size and coverage. Nothing leaves this machine.

    A promise other than the marginal one, `--per class` or `--delta 0.05`, is made by every method that can make it.

    A model of yours: `keepcover explore --model ... --data ... --sigma 0.25`; for a slow one, offer fewer `--draws` and
    `--calibration` points. A saved predictor is shown at its own levels. `--json` prints the address as JSON once it answers.

    Args:
        saved: A predictor of yours, as `keepcover calibrate` wrote it; needs --model, --data.
        alpha: Miscoverage to offer; repeat for several.
        draws: Model evaluations per query to offer; repeat for several. 1, 4, 16, 64, 256 by default.
        epsilon: The largest radius of the slider; 1.5 sigma by default under Gaussian noise.
        calibration: Calibration points; 9/20 of the data, at most 2000, by default.
        gallery: Test images on show, 500 at most by default.
        host: Address to listen on; this machine only by default.
        port: Port; 0 takes a free one and prints it.
        open_page: Open a browser.
    """
    require("the explorer", "explore")
    from keepcover.explore.answers import Explorer
    from keepcover.explore.app import run
    from keepcover.explore.lineup import ALPHAS, DRAWS, Lineup, radii
    from keepcover.explore.subject import digits_subject, own_subject, saved_subject

    start = time.monotonic()
    sizes = {"calibration": calibration, "gallery": gallery, "seed": seed}
    noise, norm, promise = asked.optional(), asked.norm, asked.promise()
    if saved is not None and (promise.clauses or any(one is not None for one in (noise, norm, alpha, draws, epsilon))):
        raise InputError("a saved predictor has its own noise, promise, alphas, epsilons and draws; leave those out")
    if saved is None and not using.model and not given.data:
        theirs = (using.weights, noise, norm, given.data_dir, given.part, calibration, gallery)
        if any(one is not None for one in theirs):
            raise InputError("expected --model and --data with those; without arguments the digits demo is shown")
        torch.set_num_threads(1)  # tensors this small cost more to share among threads than to compute
        subject = digits_subject(seed, ui.err.print)
    elif not using.model or not given.data:
        raise InputError("expected both --model and --data; without arguments the digits demo is shown")
    elif saved is not None:
        subject = saved_subject(using.predictor(saved), given.labelled(), **sizes)
    elif noise is None or not noise.certifies:
        raise InputError("expected --sigma above 0 or --noise, the noise that the model was trained for")
    else:
        points = given.labelled()
        how = {"norm": norm, "reach": epsilon, "score": score or "hps", "device": using.device}
        subject = own_subject(using.load(len(points.class_names)), points, noise, **how, **sizes)
    offered = {"alphas": alpha or ALPHAS, "draws": draws or DRAWS, "seed": seed}
    epsilons = None if epsilon is None else radii(epsilon, subject.norm)
    explorer = Explorer(Lineup(replace(subject, promise=promise), epsilons=epsilons, **offered))
    with ui.bar("calibrating") as progress:
        explorer.lineup.watch = lambda what, done, total: progress(done, total, what)
        explorer.prepare()
        explorer.lineup.watch = None
    seconds = time.monotonic() - start

    def tell(address: str) -> None:
        if as_json:
            ui.print_json({"address": address, "seconds": round(seconds, 1)})
            sys.stdout.flush()
        else:
            ui.err.print(f"ready after {seconds:.0f} s\nthe explorer is at {address} (end it with Ctrl-C)")

    run(explorer, tell=tell, host=host, port=port, open_page=open_page)
