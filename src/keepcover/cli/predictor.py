"""One's own model from the command line: calibrate it, predict with it, report on it, show what was saved."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from keepcover.cli.console import (
    ClassNames,
    DataDir,
    DataSpec,
    Device,
    Figures,
    Fingerprint,
    Json,
    ModelOutput,
    ModelSpec,
    Part,
    ScoreName,
    Secret,
    Weights,
    app,
    command_line,
    err,
    out,
    print_json,
    print_table,
    read_names,
)
from keepcover.errors import InputError
from keepcover.methods import METHODS

if TYPE_CHECKING:
    from keepcover.prediction.predictor import Predictor
    from keepcover.specs import Inputs

Saved = Annotated[Path, typer.Argument(help="What `keepcover calibrate` wrote.")]
LevelAlpha = Annotated[float | None, typer.Option(help="One of the predictor's alphas; its first by default.")]
LevelEpsilon = Annotated[float | None, typer.Option(help="One of the predictor's epsilons; its first by default.")]
BatchSize = Annotated[int | None, typer.Option(help="Noisy images per forward pass; chosen by itself by default.")]
ESTIMATED = 200  # images whose sets give an estimate of the size


@app.command()
def calibrate(
    model: ModelSpec,
    data: DataSpec,
    sigma: Annotated[float, typer.Option(help="Standard deviation of the Gaussian noise, in the units of the inputs.")],
    epsilon: Annotated[list[float], typer.Option(help="L2 radius of the attack, in those units; repeat for several.")],
    save: Annotated[Path, typer.Option("--out", help="Where the predictor goes (safetensors).")],
    weights: Weights = None,
    model_output: ModelOutput = "logits",
    data_dir: DataDir = None,
    part: Part = None,
    alpha: Annotated[list[float] | None, typer.Option(help="Miscoverage, 0.1 by default; repeat for several.")] = None,
    method: Annotated[str, typer.Option(help=f"`auto` or one of {', '.join(METHODS)}.")] = "auto",
    score: Annotated[ScoreName, typer.Option(help="Non-conformity score.")] = "hps",
    transform: Annotated[
        Literal["none", "ptt"] | None, typer.Option(help="PTT by default for methods that average scores.")
    ] = None,
    draws: Annotated[int, typer.Option(help="Model evaluations per query.")] = 16,
    calibration_draws: Annotated[
        int | None,
        typer.Option(help="Model evaluations per calibration point, paid once; 64 for exact rules by default."),
    ] = None,
    beta: Annotated[float, typer.Option(help="Monte Carlo budget of RSCP+.")] = 0.001,
    holdout: Annotated[
        int | None, typer.Option(help="Points set aside for tuning; a tenth, at most 500, by default.")
    ] = None,
    randomize: Annotated[bool, typer.Option("--randomize", help="Let exact rules randomise their boundary.")] = False,
    classes: Annotated[
        int | None, typer.Option(help="Outputs of a built-in model; as many as the data have by default.")
    ] = None,
    class_names: ClassNames = None,
    fingerprint: Fingerprint = None,
    batch_size: BatchSize = None,
    device: Device = None,
    autocast: Annotated[
        Literal["bfloat16", "float16"] | None, typer.Option(help="Mixed precision; the predictor remembers it.")
    ] = None,
    channels_last: Annotated[bool, typer.Option("--channels-last", help="Memory format of the images.")] = False,
    compile_: Annotated[bool, typer.Option("--compile", help="Run the model through torch.compile.")] = False,
    seed: Secret = None,
    as_json: Json = False,
) -> None:
    """Calibrate a model of your own on labelled data and save the predictor.

    The data must not have been used in training. Use one `--part` of them here (`1/2`) and another (`2/2`) for `predict`,
    `report` and `audit`.
    """
    import torch

    from keepcover.engine.fingerprint import identifier
    from keepcover.files import check_place
    from keepcover.prediction.calibration import calibrate as run
    from keepcover.specs import MODELS, load_inputs, load_model

    start = time.monotonic()
    check_place(save)
    points = load_inputs(data, data_dir, part, labelled=True)
    assert points.labels is not None
    names = read_names(class_names) or points.class_names
    if model in MODELS and weights is None:
        raise InputError(f"{model} needs --weights FILE: a network that was not trained has nothing to calibrate")
    outputs = classes or (len(names) if names else int(points.labels.max()) + 1 if len(points) else 0)
    network = load_model(model, weights, outputs, device, model_output)
    identifier(network, fingerprint)  # a model that could not be saved is not calibrated either
    predictor = run(
        network,
        (points.images, points.labels),
        epsilon=epsilon,
        sigma=sigma,
        alpha=alpha or 0.1,
        score=score,
        method=method,
        draws=draws,
        calibration_draws=calibration_draws,
        transform=transform,
        beta=beta,
        holdout=holdout,
        randomize=randomize,
        class_names=names,
        seed=seed,
        fingerprint=fingerprint,
        batch_size=batch_size,
        device=device,
        autocast=getattr(torch, autocast) if autocast else None,
        channels_last=channels_last,
        compile=compile_,
    )
    predictor.provenance.update(
        model=_place(model), data=points.name if part is None else f"{points.name}, part {part}"
    )
    sizes = _estimate(predictor, points)
    predictor.save(save)
    levels = [
        {"alpha": a, "epsilon": e, "guarantee": str(predictor.guarantee_for(a, e)), "estimated_size": size}
        for (a, e), size in sizes.items()
    ]
    if as_json:
        facts = {
            "predictor": str(save),
            "classes": predictor.classes,
            "model_fingerprint": predictor.model_fingerprint,
            "holdout_size": predictor.holdout_size,
            "levels": levels,
            "seconds": round(time.monotonic() - start, 1),
        }
        print_json(facts)
        return
    for level in levels:
        out.print(level["guarantee"], highlight=False, soft_wrap=True)
        size = f"{level['estimated_size']:.2f} of {predictor.classes} labels"
        out.print(f"estimated size  {size}, on {min(ESTIMATED, len(points))} of these inputs\n", highlight=False)
    out.print(f"predictor       {save}", highlight=False, soft_wrap=True)
    given = f"--model {model}" + (f" --weights {weights}" if weights else "")
    given += f" --model-output {model_output}" if model_output != "logits" else ""
    given += f" --fingerprint {fingerprint}" if fingerprint else ""
    for command in (
        f"predict {save} {given} --data NEW",
        f"report {save} {given} --data LABELLED",
        f"audit --predictor {save} {given} --data LABELLED",
    ):
        out.print(f"next            keepcover {command}", highlight=False, soft_wrap=True, markup=False)


def _place(spec: str) -> str:
    """A model's name, without the folders of this machine."""
    return Path(spec).name


def _estimate(predictor: Predictor, points: Inputs) -> dict[tuple[float, float], float]:
    """Mean set size of every level on some of the data; sizes do not depend on labels, so calibration points will do."""
    import torch

    some = torch.randperm(len(points), generator=torch.Generator().manual_seed(0))[:ESTIMATED]
    return {
        level: float(sets.size.double().mean()) for level, sets in predictor.predict_all(points.images[some]).items()
    }


@app.command()
def predict(
    saved: Saved,
    model: ModelSpec,
    data: Annotated[
        str, typer.Option(help="A built-in dataset, or a .npz or .safetensors file with `images`; labels are optional.")
    ],
    weights: Weights = None,
    model_output: ModelOutput = "logits",
    data_dir: DataDir = None,
    part: Part = None,
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
    fingerprint: Fingerprint = None,
    device: Device = None,
    batch_size: BatchSize = None,
    seed: Secret = None,
    as_json: Json = False,
) -> None:
    """Prediction sets for new data: one row per input with index, labels, size and whether the set is trivial.

    Rows go to the screen, or to `--out` as a whole. Where the data have labels, coverage is measured too. The summary goes
    to stderr when the rows are on the screen; `--json` prints it, rows included unless they went to a file.
    """
    from keepcover.files import check_place, write_file
    from keepcover.specs import load_inputs, load_predictor
    from keepcover.tasks.set_rows import format_of, set_rows, write_rows

    if to is not None:
        check_place(to)
    rows_as = form or format_of(to)
    predictor = load_predictor(saved, model, weights, device, model_output, batch_size, fingerprint)
    inputs = load_inputs(data, data_dir, part)
    sets = _sets(predictor, inputs, alpha, epsilon, nested, seed, early_exit)
    index = inputs.rows.tolist()
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
        coverage = sets.evaluate(inputs.labels).coverage
        summary["coverage"] = coverage.__dict__
        lines.append(f"coverage {coverage} on the labels in the data, attacked by nobody")
    if to is not None:
        write_file(to, write_rows(sets, rows_as, index).encode())
        lines.append(f"rows     {to}")
    if as_json:
        print_json(summary if to is not None else {**summary, "rows": list(set_rows(sets, index))})
        return
    if to is None:
        sys.stdout.write(write_rows(sets, rows_as, index))
    for line in lines:
        (err if to is None else out).print(line, highlight=False, soft_wrap=True, markup=False)


def _sets(
    predictor: Predictor,
    inputs: Inputs,
    alpha: float | None,
    epsilon: float | None,
    nested: bool,
    seed: int | None,
    early_exit: bool = False,
) -> Any:
    """Labels are checked before the network runs."""
    from keepcover.tasks.metrics import check_labels

    if inputs.labels is not None:
        check_labels(inputs.labels, len(inputs), predictor.classes)
    return predictor.predict(
        inputs.images, alpha=alpha, epsilon=epsilon, nested=nested, ids=inputs.rows, seed=seed, early_exit=early_exit
    )


@app.command()
def report(
    saved: Saved,
    model: ModelSpec,
    data: DataSpec,
    weights: Weights = None,
    model_output: ModelOutput = "logits",
    data_dir: DataDir = None,
    part: Part = None,
    alpha: LevelAlpha = None,
    epsilon: LevelEpsilon = None,
    to: Annotated[Path, typer.Option("--out", help="The page.")] = Path("report.html"),
    figures: Figures = None,
    fingerprint: Fingerprint = None,
    device: Device = None,
    batch_size: BatchSize = None,
    seed: Secret = None,
    as_json: Json = False,
) -> None:
    """One self-contained page on a saved predictor and labelled data: promise, curves, sizes, classes, examples, cost, origin."""
    from keepcover.engine.fingerprint import fingerprint as file_digest
    from keepcover.files import check_folder, check_place
    from keepcover.pages.predictor_page import predictor_page
    from keepcover.specs import load_inputs, load_predictor
    from keepcover.store.key import data_fingerprint
    from keepcover.tasks.metrics import check_labels

    check_place(to)
    if figures is not None:
        check_folder(figures)
    predictor = load_predictor(saved, model, weights, device, model_output, batch_size, fingerprint)
    promise = predictor.guarantee_for(alpha, epsilon)
    inputs = load_inputs(data, data_dir, part, labelled=True)
    assert inputs.labels is not None
    labels = check_labels(inputs.labels, len(inputs), predictor.classes)
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
        "command": command_line(),
    }
    level = promise.alpha, promise.epsilon
    page = predictor_page(
        predictor, every, inputs.images, labels, inputs.name, level=level, origin=origin, seconds=seconds
    ).write(to, figures)
    measured = every[level].evaluate(labels)
    if as_json:
        print_json({"report": str(page), "guarantee": promise.to_dict(), "evaluation": measured.to_dict()})
        return
    out.print(str(promise), highlight=False, soft_wrap=True)
    out.print(str(measured), highlight=False)
    out.print(f"report  {page}", highlight=False, soft_wrap=True)


@app.command()
def show(saved: Saved, as_json: Json = False) -> None:
    """What a saved predictor promises and where it comes from; refuses a file that does not match its checksums.

    Needs no model: every threshold is computed again from the scores in the file.
    """
    from keepcover.engine.fingerprint import fingerprint as file_digest
    from keepcover.engine.inputs import InputRange
    from keepcover.prediction.artifact import promises, read

    manifest, tensors = read(saved)
    levels = promises(saved, manifest, tensors)
    if as_json:
        print_json({"file": str(saved), "sha256": file_digest(saved), **manifest})
        return
    for entry in manifest["levels"]:
        out.print(entry["guarantee"]["statement"], highlight=False, soft_wrap=True)
    print_table(
        "",
        ["method", "alpha", "epsilon", "sigma", "draws", "cal. draws", "score", "transform", "threshold", "sets"],
        [
            [
                c.rule.name,
                f"{a:g}",
                f"{e:g}",
                f"{c.rule.setting.sigma:g}",
                str(c.rule.test_draws),
                str(c.rule.calibration_draws),
                manifest["score"]["name"],
                c.transform,
                f"{c.threshold:.6g}",
                "always full" if c.rule.always_full(c.threshold) else "ready",
            ]
            for (a, e), c in levels.items()
        ],
    )
    out.print("It rests on:", highlight=False)
    for assumption in manifest["levels"][0]["guarantee"]["assumptions"]:
        out.print(f"  {assumption}", highlight=False, soft_wrap=True)
    names, seen = manifest["class_names"], manifest["inputs"]
    more = ", ..." if names and len(names) > 20 else ""
    known = {
        "classes": f"{manifest['classes']}" + (f": {', '.join(names[:20])}" if names else "") + more,
        "inputs": str(InputRange.from_dict(seen)),
        "calibration": f"{len(tensors['calibration'])} points, holdout {manifest['holdout_size']}",
        "numerics": ", ".join(f"{key} {value}" for key, value in manifest["numerics"].items()),
        "fingerprint": manifest["model_fingerprint"],
        **manifest["provenance"],
        "file": f"{saved}, format {manifest['format']}, SHA-256 {file_digest(saved)}",
    }
    out.print("")
    for key, value in known.items():
        out.print(f"{key:<12} {value}", highlight=False, soft_wrap=True, markup=False)
