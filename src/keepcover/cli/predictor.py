"""A model of the user's: calibrate it, predict with it, report on it, show what was saved."""

from __future__ import annotations

import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from keepcover import advice
from keepcover.cli import console as ui
from keepcover.cli import options as opt
from keepcover.cli.rows import format_of, write_arrays, write_rows
from keepcover.engine.fingerprint import fingerprint as file_digest
from keepcover.engine.fingerprint import identifier
from keepcover.engine.inputs import InputRange
from keepcover.errors import InputError
from keepcover.files import check_place, write_file
from keepcover.methods import METHODS, get_method
from keepcover.noise import get_noise
from keepcover.pages.predictor_page import measure, predictor_page
from keepcover.prediction.artifact import read, restore
from keepcover.prediction.calibration import calibrate as run
from keepcover.scores import PTT
from keepcover.specs import OFFICIAL, next_part
from keepcover.store import data_fingerprint

Saved = Annotated[Path, typer.Argument(help="What `keepcover calibrate` wrote.")]
LevelAlpha = Annotated[float | None, "One of the predictor's alphas; its first by default."]
LevelEpsilon = Annotated[float | None, "One of the predictor's epsilons; its first by default."]


@opt.command
def check(
    using: opt.Model,
    given: opt.Data,
    epsilon: opt.Epsilon,
    numerics: opt.Numerics,
    *,
    sigma: Annotated[
        list[float] | None, "Noise to try, repeat for several; a half, one, two and four times epsilon by default."
    ] = None,
    norm: Annotated[Literal["l2", "l1", "linf"], "What epsilon measures."] = "l2",
    alpha: opt.Alpha = 0.1,
    score: opt.Score = None,
    draws: opt.Draws = 16,
    points: Annotated[int, "Inputs to look at, at random."] = 200,
    denoiser: Annotated[str | None, "A denoiser of your own to try; the bundled one by default."] = None,
    seed: opt.Secret = None,
) -> ui.Answer:
    """What a model can promise, from a small sample, before anything is paid for; and what to do next.

    Accuracy, certified size and time at several sigmas, alone and behind the denoiser. What is chosen depends on these
    points, so others must calibrate: by default this looks at part 3/4 of the data, says `--part 4/4` next, and leaves the first
    half for training.
    """
    asked, given = given, replace(given, part=given.part or "3/4")
    inputs = given.inputs(labelled=True)
    assert inputs.labels is not None
    outputs = len(inputs.class_names) if inputs.class_names else int(inputs.labels.max()) + 1
    smoother = numerics.smoother(using.load(outputs), get_noise(0.0), using.device)
    found = advice.check(
        smoother,
        (inputs.images, inputs.labels),
        epsilon=epsilon,
        sigma=sigma,
        norm=norm,
        alpha=alpha,
        draws=draws,
        score=score or "hps",
        denoiser=denoiser,
        points=points,
        seed=seed,
    )
    others = next_part(str(given.part))
    third = (
        None if asked.part is None or given.data in OFFICIAL else next_part(others)
    )  # train base has its own default
    module = opt.typed(replace(using, model_output="logits", fingerprint=None), "model")
    shown = replace(
        found,
        model=shlex.quote(using.model),
        rest=f"{opt.typed(using, 'model')} {opt.typed(replace(given, part=others))}".strip(),
        training=f"{module} {opt.typed(replace(given, part=third))}".strip(),
    )
    return ui.Answer(shown.to_dict(), [repr(shown)])


@opt.command
def calibrate(
    using: opt.Model,
    given: opt.Data,
    epsilon: Annotated[list[float], "Radius of the attack, in the units of the inputs; repeat for several."],
    save: Annotated[Path, "--out", "Where the predictor goes (safetensors).", check_place],
    asked: opt.Question,
    meaning: opt.Meaning,
    numerics: opt.Numerics,
    *,
    alpha: Annotated[list[float] | None, "Miscoverage, 0.1 by default; repeat for several."] = None,
    method: Annotated[str, f"`auto` or one of {', '.join(METHODS)}."] = "auto",
    input_scale: Annotated[
        str | None, "Units of features, in which sigma and epsilon are: `std`, or one number each, separated by commas."
    ] = None,
    transform: Annotated[Literal["none", "ptt"] | None, "PTT by default for methods that average scores."] = None,
    draws: Annotated[int | None, "Model evaluations per query; 16 by default, bands have their own number."] = None,
    calibration_draws: Annotated[
        int | None,
        "Model evaluations per calibration point, paid once; by default 64 for `auto` and `exact_asymmetric`, as "
        "many as per query for others.",
    ] = None,
    holdout: Annotated[int | None, "Points set aside for tuning; a tenth, at most 500, by default."] = None,
    randomize: Annotated[bool, "--randomize", "Let exact rules randomise their boundary."] = False,
    classes: Annotated[int | None, "Outputs of a built-in model; as many as the data have by default."] = None,
    class_names: opt.ClassNames = None,
    seed: opt.Secret = None,
) -> ui.Answer:
    """Calibrate a model of your own on labelled data and save the predictor.

    The data must not have been used in training. Use one `--part` of them here (`1/2`) and another (`2/2`) for `predict`,
    `report` and `audit`.
    """
    start = time.monotonic()
    points = given.inputs(labelled=True)
    assert points.labels is not None
    names = opt.read_names(class_names) or points.class_names
    task = meaning.known(names)
    outputs = classes or (len(names) if names else task.counted(points.labels) if len(points) else 0)
    units: Any = input_scale.split(",") if input_scale and input_scale != "std" else input_scale
    network = using.load(outputs)
    identifier(network, using.fingerprint)  # a model that could not be saved is not calibrated either
    options: dict[str, Any] = {} if asked.beta is None else {"beta": asked.beta}
    if randomize:
        options["randomize"] = True
    if transform is not None:
        options["transform"] = PTT() if transform == "ptt" else None
    auto = asked.sigma == "auto" and asked.noise is None
    predictor = run(
        numerics.smoother(network, get_noise(0.0) if auto else asked.required(), using.device),
        (points.images, points.labels),
        sigma="auto" if auto else None,
        epsilon=epsilon,
        alpha=alpha or 0.1,
        task=task,
        input_scale=units,
        method=get_method(method, **options),
        draws=draws,
        calibration_draws=calibration_draws,
        holdout=holdout,
        seed=seed,
        fingerprint=using.fingerprint,
        **asked.arguments(points.rows),
    )
    where = f"{points.name}, part {given.part}" if given.part else points.name
    origin = {"model": Path(using.model).name, "data": where}  # without the folders of this machine
    predictor.provenance.update(origin, data_sha256=data_fingerprint((points.images, points.labels)))
    predictor.save(save)
    levels = [
        {"alpha": a, "epsilon": e, "guarantee": str(predictor.at(a, e).guarantee), "estimated_size": one.size}
        for (a, e), one in predictor.levels.items()
    ]
    facts = {
        "predictor": str(save),
        "classes": predictor.task.candidates,
        "model_fingerprint": predictor.identity.fingerprint if predictor.identity else None,
        "holdout_size": predictor.holdout_size,
        "levels": levels,
        "warning": predictor.warning,
        "seconds": round(time.monotonic() - start, 1),
    }
    sized = predictor.task.sized
    shown = [f"{one['guarantee']}\nestimated size  {sized(one['estimated_size'])}\n" for one in levels]
    place, after = (
        shlex.quote(str(save)),
        (("predict", "NEW"), ("report", "LABELLED"), ("audit --predictor", "LABELLED")),
    )
    following = [
        f"next            keepcover {command} {place} {opt.typed(using)} --data {data}" for command, data in after
    ]
    return ui.Answer(facts, [*shown, f"predictor       {save}", *following])


@opt.command
def predict(
    saved: Saved,
    using: opt.Model,
    given: opt.Data,
    grouped: opt.Groups,
    *,
    alpha: LevelAlpha = None,
    epsilon: LevelEpsilon = None,
    nested: Annotated[bool, "--nested", "Unite with the sets of all smaller epsilons."] = False,
    early_exit: Annotated[
        bool, "--early-exit", "Stop drawing for an input once its set is decided (exact rules only)."
    ] = False,
    to: Annotated[Path | None, "--out", "Write the rows to this file instead of the screen.", check_place] = None,
    form: Annotated[
        Literal["jsonl", "csv", "npz"] | None,
        "--format",
        "By the ending of the file: .jsonl or .csv, or .npz for the sets as arrays, such as masks; jsonl on the screen.",
    ] = None,
    batch_size: opt.BatchSize = None,
    seed: opt.Secret = None,
    as_json: opt.Json = False,
) -> None:
    """Prediction sets for new data: one row per input with index, labels, size and whether the set is trivial.

    Rows go to the screen, or to `--out` as a whole. Where the data have labels, coverage is measured too. The summary goes
    to stderr when the rows are on the screen; `--json` prints it, rows included unless they went to a file.
    """
    rows_as = form or format_of(to)
    if rows_as == "npz" and to is None:
        raise InputError("arrays go to a file: --out SETS.npz")
    predictor = using.predictor(saved, batch_size)
    inputs = given.inputs()
    if inputs.labels is not None:  # checked before the network runs
        predictor.task.check_truth(inputs.labels, len(inputs))
    how: dict[str, Any] = {"alpha": alpha, "epsilon": epsilon, "nested": nested, "early_exit": early_exit}
    sets = predictor.predict(inputs.images, ids=inputs.rows, seed=seed, **how, **grouped.arguments(inputs.rows))
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
        measured = sets.measure(inputs.labels)
        what = "risk" if sets.guarantee.shares else "coverage"
        summary[what] = getattr(measured, what).__dict__
        lines.append(f"{what} {getattr(measured, what)} on the labels in the data, unattacked")
    if to is not None:
        write_file(to, write_arrays(sets) if rows_as == "npz" else write_rows(rows, rows_as).encode())
        lines.append(f"rows     {to}")
    if as_json:
        return ui.print_json(summary if to is not None else {**summary, "rows": rows})
    if to is None:
        sys.stdout.write(write_rows(rows, rows_as))
    for line in lines:
        (ui.err if to is None else ui.out).print(line)


@opt.command
def report(
    saved: Saved,
    using: opt.Model,
    given: opt.Data,
    grouped: opt.Groups,
    *,
    alpha: LevelAlpha = None,
    epsilon: LevelEpsilon = None,
    to: Annotated[Path, "--out", "The page.", check_place] = Path("report.html"),
    figures: opt.Figures = None,
    batch_size: opt.BatchSize = None,
    seed: opt.Secret = None,
) -> ui.Answer:
    """One self-contained page on a saved predictor and labelled data: promise, curves, sizes, classes, examples, cost, origin."""
    predictor = using.predictor(saved, batch_size)
    promise = predictor.at(alpha, epsilon).guarantee
    inputs = given.inputs(labelled=True)
    labels = predictor.task.check_truth(inputs.labels, len(inputs))
    start = time.monotonic()
    groups = grouped.arguments(inputs.rows)
    every = predictor.predict_all(inputs.images, ids=inputs.rows, seed=seed, **groups)
    seconds = time.monotonic() - start
    origin = {
        "test data": f"{inputs.name}, {f'part {given.part}' if given.part else 'all of it'}, {len(inputs)} inputs",
        "test data fingerprint": data_fingerprint((inputs.images, labels)),
        "predictor": f"{saved.name}, SHA-256 {file_digest(saved)}",
        "noise": "fresh from the operating system"
        if seed is None
        else f"seed {seed}: for experiments, it can be guessed",
        "command": ui.command_line(),
    }
    level = promise.alpha, promise.epsilon
    about: dict[str, Any] = {"level": level, "origin": origin, "seconds": seconds, "groups": groups["groups"]}
    page = predictor_page(predictor, every, inputs.images, labels, inputs.name, **about).write(to, figures)
    measured = measure(every[level], labels, groups["groups"])
    facts = {"report": str(page), "guarantee": promise.to_dict(), "evaluation": measured.to_dict()}
    return ui.Answer(facts, [f"{promise}\n{measured}\nreport  {page}"])


@opt.command
def show(saved: Saved) -> ui.Answer:
    """What a saved predictor promises and where it comes from; refuses a file that does not match its checksums.

    Needs no model: every threshold is computed again from the scores in the file.
    """
    (manifest, _), digest = read(saved), file_digest(saved)
    # A score or a loss of the user's is code that is not in the file, so nothing is scored again.
    score = manifest["task"].get("score")
    own_score = "function" in manifest["task"] or (isinstance(score, dict) and score.get("custom"))
    predictor = None if own_score else restore(saved)
    levels = [] if predictor is None else list(predictor.levels.values())
    promises, rows = [entry["guarantee"] for entry in manifest["levels"]], []
    for at, entry in enumerate(manifest["levels"]):
        promise, threshold = entry["guarantee"], [f"{float(value):.6g}" for value in entry["threshold"][:4]]
        rows.append(
            [
                *(promise["method"], f"{promise['alpha']:g}", f"{promise['epsilon']:g}", promise["draws"]),
                *(promise["calibration_draws"], promise["score"], promise["transform"]),
                ", ".join([*threshold[:3], *(["..."] if len(threshold) > 3 else [])]),
                "not checked" if own_score else "always full" if levels[at].full else "ready",
            ]
        )
    head = ["method", "alpha", "epsilon", "draws", "cal. draws", "score", "transform", "threshold", "sets"]
    shown = [*(promise["statement"] for promise in promises), ui.table("", head, rows)]
    if predictor is not None and predictor.warning is not None:
        shown.append(f"Warning: {predictor.warning}")
    shown.append("\n  ".join(["It rests on:", *promises[0]["assumptions"]]))
    task, seen, model = manifest["task"], manifest["inputs"], manifest["model"]
    names = task.get("class_names") or []
    listed = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    known = {
        "task": task["name"],
        "classes": f"{task.get('classes')}: {listed}" if names else task.get("classes"),
        "inputs": "unknown" if seen is None else InputRange.from_dict(seen),
        "calibration": f"{manifest['points']} points, holdout {manifest['holdout_size']}",
        "numerics": ", ".join(f"{key} {value}" for key, value in manifest["numerics"].items()),
        "fingerprint": "no model: calibrated on noisy outputs" if model is None else model["fingerprint"],
        **{key: value for key, value in manifest["history"][-1].items() if key not in ("of", "unknown")},
        "history": ", ".join(
            f"{entry['how']} {entry['points']} points ({entry['created'][:10]})" for entry in manifest["history"]
        ),
        "file": f"{saved}, format {manifest['format']}, SHA-256 {digest}",
    }
    facts = ["", *(f"{key:<12} {value}" for key, value in known.items())]
    return ui.Answer({"file": str(saved), "sha256": digest, **manifest}, [*shown, *facts])
