"""One's own model from the command line: calibrate it, predict with it, report on it, show what was saved."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from keepcover.cli import console as ui
from keepcover.cli.rows import format_of, write_rows
from keepcover.errors import InputError
from keepcover.methods import METHODS, get_method

Saved = Annotated[Path, typer.Argument(help="What `keepcover calibrate` wrote.")]
LevelAlpha = Annotated[float | None, typer.Option(help="One of the predictor's alphas; its first by default.")]
LevelEpsilon = Annotated[float | None, typer.Option(help="One of the predictor's epsilons; its first by default.")]
ESTIMATED = 200  # images whose sets give an estimate of the size


@ui.app.command()
def calibrate(
    model: ui.ModelSpec,
    data: ui.DataSpec,
    epsilon: Annotated[
        list[float], typer.Option(help="Radius of the attack, in the units of the inputs; repeat for several.")
    ],
    save: Annotated[Path, typer.Option("--out", help="Where the predictor goes (safetensors).")],
    sigma: ui.MaybeSigma = None,
    noise: ui.NoiseSpec = None,
    norm: ui.NormName = None,
    weights: ui.Weights = None,
    model_output: ui.ModelOutput = "logits",
    data_dir: ui.DataDir = None,
    part: ui.Part = None,
    alpha: Annotated[list[float] | None, typer.Option(help="Miscoverage, 0.1 by default; repeat for several.")] = None,
    method: Annotated[str, typer.Option(help=f"`auto` or one of {', '.join(METHODS)}.")] = "auto",
    score: ui.Score = "hps",
    transform: Annotated[
        Literal["none", "ptt"] | None, typer.Option(help="PTT by default for methods that average scores.")
    ] = None,
    draws: Annotated[int, typer.Option(help="Model evaluations per query.")] = 16,
    calibration_draws: Annotated[
        int | None,
        typer.Option(
            help="Model evaluations per calibration point, paid once; by default 64 for `auto` and `exact_asymmetric`, as "
            "many as per query for others."
        ),
    ] = None,
    beta: Annotated[float | None, typer.Option(help="Monte Carlo budget of RSCP+, 0.001 by default.")] = None,
    holdout: Annotated[
        int | None, typer.Option(help="Points set aside for tuning; a tenth, at most 500, by default.")
    ] = None,
    randomize: Annotated[bool, typer.Option("--randomize", help="Let exact rules randomise their boundary.")] = False,
    classes: Annotated[
        int | None, typer.Option(help="Outputs of a built-in model; as many as the data have by default.")
    ] = None,
    class_names: ui.ClassNames = None,
    fingerprint: ui.Fingerprint = None,
    batch_size: ui.BatchSize = None,
    device: ui.Device = None,
    autocast: ui.Autocast = None,
    channels_last: ui.ChannelsLast = False,
    compile: ui.Compile = False,
    seed: ui.Secret = None,
    as_json: ui.Json = False,
) -> None:
    """Calibrate a model of your own on labelled data and save the predictor.

    The data must not have been used in training. Use one `--part` of them here (`1/2`) and another (`2/2`) for `predict`,
    `report` and `audit`.
    """
    import torch

    from keepcover.engine.fingerprint import identifier
    from keepcover.engine.smoother import Smoother
    from keepcover.files import check_place
    from keepcover.prediction.calibration import calibrate as run
    from keepcover.scores import PTT
    from keepcover.specs import MODELS, load_inputs, load_model

    start = time.monotonic()
    check_place(save)
    points = load_inputs(data, data_dir, part, labelled=True)
    assert points.labels is not None
    names = ui.read_names(class_names) or points.class_names
    if model in MODELS and weights is None:
        raise InputError(f"{model} needs --weights FILE: a network that was not trained has nothing to calibrate")
    outputs = classes or (len(names) if names else int(points.labels.max()) + 1 if len(points) else 0)
    network = load_model(model, weights, outputs, device, model_output)
    identifier(network, fingerprint)  # a model that could not be saved is not calibrated either
    given = {"beta": beta, "randomize": randomize or None, "transform": transform}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if transform is not None:
        options["transform"] = PTT() if transform == "ptt" else None
    smoother = Smoother(
        network,
        ui.some_noise(sigma, noise),
        batch_size=batch_size,
        device=device,
        autocast=getattr(torch, autocast) if autocast else None,
        channels_last=channels_last,
        compile=compile,
    )
    predictor = run(
        smoother,
        (points.images, points.labels),
        epsilon=epsilon,
        norm=norm,
        alpha=alpha or 0.1,
        score=score,
        method=get_method(method, **options),
        draws=draws,
        calibration_draws=calibration_draws,
        holdout=holdout,
        class_names=names,
        seed=seed,
        fingerprint=fingerprint,
    )
    where = points.name if part is None else f"{points.name}, part {part}"
    predictor.provenance.update(model=Path(model).name, data=where)  # without the folders of this machine
    predictor.save(save)
    # Sizes do not depend on labels, so calibration points will do to estimate them.
    some = torch.randperm(len(points), generator=torch.Generator().manual_seed(0))[:ESTIMATED]
    levels = [
        {"alpha": a, "epsilon": e, "guarantee": str(sets.guarantee), "estimated_size": float(sets.size.double().mean())}
        for (a, e), sets in predictor.predict_all(points.images[some]).items()
    ]
    if as_json:
        facts = {
            "predictor": str(save),
            "classes": predictor.classes,
            "model_fingerprint": predictor.identity.fingerprint if predictor.identity else None,
            "holdout_size": predictor.holdout_size,
            "levels": levels,
            "seconds": round(time.monotonic() - start, 1),
        }
        ui.print_json(facts)
        return
    for level in levels:
        ui.out.print(level["guarantee"])
        size = f"{level['estimated_size']:.2f} of {predictor.classes} labels"
        ui.out.print(f"estimated size  {size}, on {min(ESTIMATED, len(points))} of these inputs\n")
    ui.out.print(f"predictor       {save}")
    same = f"--model {model}" + (f" --weights {weights}" if weights else "")
    same += f" --model-output {model_output}" if model_output != "logits" else ""
    same += f" --fingerprint {fingerprint}" if fingerprint else ""
    for command in (
        f"predict {save} {same} --data NEW",
        f"report {save} {same} --data LABELLED",
        f"audit --predictor {save} {same} --data LABELLED",
    ):
        ui.out.print(f"next            keepcover {command}")


@ui.app.command()
def predict(
    saved: Saved,
    model: ui.ModelSpec,
    data: Annotated[
        str, typer.Option(help="A built-in dataset, or a .npz or .safetensors file with `images`; labels are optional.")
    ],
    weights: ui.Weights = None,
    model_output: ui.ModelOutput = "logits",
    data_dir: ui.DataDir = None,
    part: ui.Part = None,
    alpha: LevelAlpha = None,
    epsilon: LevelEpsilon = None,
    nested: Annotated[bool, typer.Option("--nested", help="Unite with the sets of all smaller epsilons.")] = False,
    early_exit: Annotated[
        bool, typer.Option("--early-exit", help="Stop drawing for an input once its set is decided (exact rules only).")
    ] = False,
    to: Annotated[Path | None, typer.Option("--out", help="Write the rows to this file instead of the screen.")] = None,
    form: Annotated[
        Literal["jsonl", "csv"] | None,
        typer.Option("--format", help="By the ending of the file: .jsonl or .csv; jsonl on the screen."),
    ] = None,
    fingerprint: ui.Fingerprint = None,
    device: ui.Device = None,
    batch_size: ui.BatchSize = None,
    seed: ui.Secret = None,
    as_json: ui.Json = False,
) -> None:
    """Prediction sets for new data: one row per input with index, labels, size and whether the set is trivial.

    Rows go to the screen, or to `--out` as a whole. Where the data have labels, coverage is measured too. The summary goes
    to stderr when the rows are on the screen; `--json` prints it, rows included unless they went to a file.
    """
    from keepcover.files import check_place, write_file
    from keepcover.specs import load_inputs, load_predictor

    if to is not None:
        check_place(to)
    rows_as = form or format_of(to)
    predictor = load_predictor(saved, model, weights, device, model_output, batch_size, fingerprint)
    inputs = load_inputs(data, data_dir, part)
    if inputs.labels is not None:  # checked before the network runs
        predictor.task.check_truth(inputs.labels, len(inputs))
    sets = predictor.predict(
        inputs.images, alpha=alpha, epsilon=epsilon, nested=nested, ids=inputs.rows, seed=seed, early_exit=early_exit
    )
    rows = [{"index": index, **row} for index, row in zip(inputs.rows.tolist(), sets.rows(), strict=True)]
    summary: dict[str, Any] = {
        "images": len(sets),
        "mean_size": float(sets.size.double().mean()),
        "trivial": int(sets.trivial.sum()),
        "empty": int((sets.size == 0).sum()),
        "guarantee": sets.guarantee.to_dict(),
        "coverage": None,
        "out": None if to is None else str(to),
    }
    lines = [
        str(sets.guarantee),
        f"{len(sets)} sets, mean size {summary['mean_size']:.2f}, {summary['trivial']} trivial, {summary['empty']} empty",
    ]
    if sets.draws_used is not None:
        summary["mean_draws"] = float(sets.draws_used.double().mean())
        lines.append(f"{summary['mean_draws']:.1f} of {predictor.draws} draws per input with early exit")
    if inputs.labels is not None:
        coverage = sets.measure(inputs.labels).coverage
        summary["coverage"] = coverage.__dict__
        lines.append(f"coverage {coverage} on the labels in the data, unattacked")
    if to is not None:
        write_file(to, write_rows(rows, rows_as).encode())
        lines.append(f"rows     {to}")
    if as_json:
        ui.print_json(summary if to is not None else {**summary, "rows": rows})
        return
    if to is None:
        sys.stdout.write(write_rows(rows, rows_as))
    for line in lines:
        (ui.err if to is None else ui.out).print(line)


@ui.app.command()
def report(
    saved: Saved,
    model: ui.ModelSpec,
    data: ui.DataSpec,
    weights: ui.Weights = None,
    model_output: ui.ModelOutput = "logits",
    data_dir: ui.DataDir = None,
    part: ui.Part = None,
    alpha: LevelAlpha = None,
    epsilon: LevelEpsilon = None,
    to: Annotated[Path, typer.Option("--out", help="The page.")] = Path("report.html"),
    figures: ui.Figures = None,
    fingerprint: ui.Fingerprint = None,
    device: ui.Device = None,
    batch_size: ui.BatchSize = None,
    seed: ui.Secret = None,
    as_json: ui.Json = False,
) -> None:
    """One self-contained page on a saved predictor and labelled data: promise, curves, sizes, classes, examples, cost, origin."""
    from keepcover.engine.fingerprint import fingerprint as file_digest
    from keepcover.files import check_folder, check_place
    from keepcover.pages.predictor_page import predictor_page
    from keepcover.specs import load_inputs, load_predictor
    from keepcover.store import data_fingerprint

    check_place(to)
    if figures is not None:
        check_folder(figures)
    predictor = load_predictor(saved, model, weights, device, model_output, batch_size, fingerprint)
    promise = predictor.at(alpha, epsilon).guarantee
    inputs = load_inputs(data, data_dir, part, labelled=True)
    labels = predictor.task.check_truth(inputs.labels, len(inputs))
    start = time.monotonic()
    every = predictor.predict_all(inputs.images, ids=inputs.rows, seed=seed)
    seconds = time.monotonic() - start
    origin = {
        "test data": f"{inputs.name}, {f'part {part}' if part else 'all of it'}, {len(inputs)} inputs",
        "test data fingerprint": data_fingerprint((inputs.images, labels)),
        "predictor": f"{saved.name}, SHA-256 {file_digest(saved)}",
        "noise": "fresh from the operating system"
        if seed is None
        else f"seed {seed}: for experiments, it can be guessed",
        "command": ui.command_line(),
    }
    level = promise.alpha, promise.epsilon
    page = predictor_page(
        predictor, every, inputs.images, labels, inputs.name, level=level, origin=origin, seconds=seconds
    ).write(to, figures)
    measured = every[level].measure(labels)
    if as_json:
        ui.print_json({"report": str(page), "guarantee": promise.to_dict(), "evaluation": measured.to_dict()})
        return
    ui.out.print(str(promise))
    ui.out.print(str(measured))
    ui.out.print(f"report  {page}")


@ui.app.command()
def show(saved: Saved, as_json: ui.Json = False) -> None:
    """What a saved predictor promises and where it comes from; refuses a file that does not match its checksums.

    Needs no model: every threshold is computed again from the scores in the file.
    """
    from keepcover.engine.fingerprint import fingerprint as file_digest
    from keepcover.engine.inputs import InputRange
    from keepcover.prediction.artifact import read, restore

    manifest, _ = read(saved)
    own_score = (
        manifest["task"].get("score", {}).get("custom")
    )  # code that is not in the file, so nothing is scored again
    levels = [] if own_score else list(restore(saved).levels.values())
    if as_json:
        ui.print_json({"file": str(saved), "sha256": file_digest(saved), **manifest})
        return
    promises = [(entry["guarantee"], entry["threshold"]) for entry in manifest["levels"]]
    for promise, _ in promises:
        ui.out.print(promise["statement"])
    ui.print_table(
        "",
        ["method", "alpha", "epsilon", "draws", "cal. draws", "score", "transform", "threshold", "sets"],
        [
            [
                promise["method"],
                f"{promise['alpha']:g}",
                f"{promise['epsilon']:g}",
                promise["draws"],
                promise["calibration_draws"],
                promise["score"],
                promise["transform"],
                ", ".join(f"{float(value):.6g}" for value in threshold[:3]) + (", ..." if len(threshold) > 3 else ""),
                "not checked" if own_score else "always full" if levels[at].full else "ready",
            ]
            for at, (promise, threshold) in enumerate(promises)
        ],
    )
    ui.out.print("It rests on:")
    for assumption in promises[0][0]["assumptions"]:
        ui.out.print(f"  {assumption}")
    task, seen, model = manifest["task"], manifest["inputs"], manifest["model"]
    names = task.get("class_names") or []
    known = {
        "task": task["name"],
        "classes": f"{task.get('classes')}: {', '.join(names[:20])}{', ...' if len(names) > 20 else ''}".removesuffix(
            ": "
        ),
        "inputs": "unknown" if seen is None else InputRange.from_dict(seen),
        "calibration": f"{manifest['points']} points, holdout {manifest['holdout_size']}",
        "numerics": ", ".join(f"{key} {value}" for key, value in manifest["numerics"].items()),
        "fingerprint": "no model: calibrated on noisy outputs" if model is None else model["fingerprint"],
        **manifest["provenance"],
        "file": f"{saved}, format {manifest['format']}, SHA-256 {file_digest(saved)}",
    }
    ui.out.print("")
    for key, value in known.items():
        ui.out.print(f"{key:<12} {value}")
