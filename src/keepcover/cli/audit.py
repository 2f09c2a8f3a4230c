"""``keepcover audit``: calibrate methods side by side on part of the data, attack them all on the rest."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keepcover.cli import console as ui
from keepcover.errors import InputError

if TYPE_CHECKING:
    from keepcover.data import Labelled
    from keepcover.engine.smoother import Classifier
    from keepcover.noise import Noise


@ui.app.command()
def audit(
    model: ui.ModelSpec = "small-cnn",
    weights: ui.Weights = None,
    model_output: ui.ModelOutput = "logits",
    data: ui.DataSpec = "digits",
    data_dir: ui.DataDir = None,
    part: ui.Part = None,
    predictor: Annotated[
        Path | None, typer.Option(help="Audit this saved predictor on the data, instead of calibrating.")
    ] = None,
    sigma: ui.MaybeSigma = None,
    noise: ui.NoiseSpec = None,
    norm: ui.NormName = None,
    epsilon: ui.Epsilon = 0.5,
    alpha: ui.Alpha = 0.1,
    method: Annotated[list[str] | None, typer.Option(help="Methods to calibrate and attack side by side.")] = None,
    score: ui.Score = "hps",
    draws: Annotated[int, typer.Option(help="Draws per query of the exact certificates.")] = 16,
    mean_draws: Annotated[int, typer.Option(help="Draws per query of methods that average scores.")] = 256,
    images: Annotated[int, typer.Option(help="Test images to attack.")] = 250,
    radius: Annotated[
        list[float] | None, typer.Option(help="Attack radii, repeat for a curve; epsilon by default.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Gradient steps.")] = 20,
    attack_draws: Annotated[int, typer.Option(help="Noise draws inside the attacker's gradient.")] = 32,
    restarts: Annotated[int, typer.Option(help="Attack restarts; all but the first start at random.")] = 1,
    clip: Annotated[bool, typer.Option(help="Keep attacked pixels in [0, 1].")] = False,
    folder: Annotated[Path | None, typer.Option("--out", help="Write an HTML report and JSON there.")] = None,
    figures: ui.Figures = None,
    attack: Annotated[
        list[str] | None,
        typer.Option(
            help="`softmax`, `margin` (both by default) or `random`, which needs no gradients; repeat for more."
        ),
    ] = None,
    surrogate: Annotated[
        str | None, typer.Option(help="Transfer attacks from this PyTorch model, for a model without gradients.")
    ] = None,
    surrogate_weights: Annotated[
        Path | None, typer.Option(help="Its checkpoint, where it is a built-in model.")
    ] = None,
    fingerprint: ui.Fingerprint = None,
    device: ui.Device = None,
    seed: ui.Seed = 0,
    as_json: ui.Json = False,
) -> None:
    """Attack predictors and compare what they promise with what is observed.

    Calibrates the methods side by side on part of the data, under noise of sigma 0.5 unless said otherwise, and attacks them
    all on the rest, with SmoothAdv and with an attack on each method's own rule. With no options it trains a small network on
    digits and audits that. A model without gradients (ONNX, scikit-learn) is attacked with `--attack random` or through a
    `--surrogate`.
    """
    asked = {name: value.name if isinstance(value, Path) else value for name, value in locals().items()}

    from keepcover.attacks import audit as attack_predictors
    from keepcover.attacks import transfer
    from keepcover.evaluation.manifest import manifest
    from keepcover.files import check_folder, write_file
    from keepcover.pages.audit_page import audit_page
    from keepcover.pages.sections import audit_table
    from keepcover.specs import load_data, load_model, load_predictor, take_part

    start = time.monotonic()
    if figures is not None and folder is None:
        raise InputError("--figures are those of the page: say where it goes with --out FOLDER")
    if folder is not None:
        check_folder(folder, "audit.html", "audit.json")
    if figures is not None:
        check_folder(figures)
    added = ui.some_noise(sigma, noise, 0.5)
    with ui.err.status("starting") as status:
        say = ui.told(status)
        points = take_part(load_data(data, data_dir), part)
        if predictor is not None:
            loaded = load_predictor(predictor, model, weights, device, model_output, fingerprint=fingerprint)
            (test,) = points.split(-1, seed=seed)  # files are often sorted by class; a prefix of them is no sample
            predictors, added = {predictor.stem: loaded}, loaded.noise
        else:
            if model == "small-cnn" and weights is None:
                network, points = _trained(points, added, device, seed, say)
            else:
                network = load_model(model, weights, len(points.class_names), device, model_output)
            held, calibration, test = points.split(min(500, len(points) // 10), len(points) * 9 // 20, -1, seed=seed)
            shared = {"alpha": alpha, "epsilon": epsilon, "norm": norm, "score": score, "seed": seed + 1}
            predictors = {}
            for name in method or ("cp", "rscp", "rscp_plus_hoeffding", "rcp1", "auto"):
                made = _calibrated(name, network, added, device, calibration, held, (draws, mean_draws), say, shared)
                predictors[f"{name} ({made.draws})"] = made
        test = test[:images]
        options: dict[str, Any] = {"steps": steps, "restarts": restarts, "clip": (0.0, 1.0) if clip else None}
        options |= {"seed": seed + 2, "progress": False}
        attacks: dict[str, Any] = {name: name for name in attack or (() if surrogate else ("softmax", "margin"))}
        if surrogate is not None:
            first = next(iter(predictors.values()))
            similar = load_model(surrogate, surrogate_weights, first.classes, device)
            attacks["transfer"] = transfer(similar, added, attack_draws, norm=first.guarantee.threat.norm, **options)
        say(f"attacking {len(test)} images, {steps} steps, {attack_draws} draws")
        result = attack_predictors(
            predictors, test.pair, attacks=attacks, radii=radius or None, draws=attack_draws, **options
        )
    page = None
    if folder is not None:
        seconds = time.monotonic() - start
        about = (
            f"{Path(data).name}, {len(test)} attacked images, {steps} steps, {attack_draws} attacker draws, seed {seed}"
        )
        facts = {
            "model": Path(model).name,
            "weights": Path(weights).name if weights else "the model's own",
            "data": Path(data).name + (f", part {part}" if part else ""),
            "predictor": predictor.name if predictor else "calibrated for this audit",
            "attacker": f"{steps} steps, {attack_draws} draws, restarts {restarts}"
            + (", pixels kept in [0, 1]" if clip else ""),
            "seed": f"{seed}, of splits, attack and defence, in separate streams: for an audit; a deployed predictor draws "
            "fresh noise",
            "wall-clock": f"{seconds:.0f} s",
        }
        page = audit_page(result, about, origin=facts).write(folder / "audit.html", figures)
        written = {**result.to_dict(), "manifest": manifest(ui.command_line(), {**asked, "noise": added.spec}, seconds)}
        write_file(folder / "audit.json", json.dumps(written, indent=1).encode())
    if as_json:
        ui.print_json({**result.to_dict(), "report": str(page) if page else None})
        return
    table = audit_table(result)
    ui.print_table(
        f"Audit: alpha {result.rows[0].alpha:g}, epsilon {result.rows[0].epsilon:g}, {len(result.images)} images",
        table.head,
        table.texts,
        "p-value: chance of covering this few or fewer if the promise held, calibration luck included; violated below 0.001",
    )
    if page:
        ui.out.print(f"report  {page}")


def _trained(
    data: Labelled, noise: Noise, device: str | None, seed: int, say: Callable[[str], None]
) -> tuple[Classifier, Labelled]:
    """A small CNN trained on two fifths of the data, and the data it has not seen."""
    import torch

    from keepcover.specs import load_model
    from keepcover.training import fit_under_noise

    sigma = getattr(noise, "sigma", None)
    if data.images.shape[1] != 1 or sigma is None:
        raise InputError(
            "small-cnn without weights is trained on the spot, on images of one channel under Gaussian noise; give a model"
        )
    train, rest = data.split(2 * len(data) // 5, -1, seed=seed)
    say(f"training a small CNN on {len(train)} images under {noise}")
    torch.manual_seed(seed)
    model = load_model("small-cnn", None, len(data.class_names), device)
    assert isinstance(model, torch.nn.Module)
    return fit_under_noise(model, *train.pair, sigma, epochs=60, seed=seed, progress=False), rest


def _calibrated(
    name: str,
    model: Classifier,
    noise: Noise,
    device: str | None,
    calibration: Labelled,
    holdout: Labelled,
    draws: tuple[int, int],
    say: Callable[[str], None],
    shared: dict[str, Any],
) -> Any:
    """A predictor with the draws that its kind of method needs: (those that compare scores, those that average them)."""
    from keepcover.engine.smoother import Smoother
    from keepcover.methods import get_method
    from keepcover.noise import Gaussian
    from keepcover.prediction.calibration import calibrate

    method = get_method(name)
    # One draw that certifies nothing needs no noise, where its absence is attacked in the same norm.
    clean = method.draw_rule == "one" and not method.certified and noise.check_norm(shared["norm"]) in Gaussian.norms
    spent = 1 if clean else draws[0] if method.compares_only else draws[1]
    say(f"calibrating {name} ({method.draws_used(spent, spent)[0]} draws)")
    return calibrate(
        Smoother(model, Gaussian(0.0) if clean else noise, device=device),
        calibration.pair,
        method=method,
        draws=spent,
        holdout=holdout.pair if method.needs_holdout else None,
        class_names=calibration.class_names,
        **shared,
    )
