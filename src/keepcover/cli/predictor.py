"""A model of the user's: calibrate it, predict with it, report on it, show what was saved."""

from __future__ import annotations

import csv
import io
import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer

from keepcover import advice
from keepcover.cli import console as ui
from keepcover.cli import options as opt
from keepcover.engine.fingerprint import fingerprint, identifier
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

# What a line of ``show`` says of a promise.
SAID = ("method", "alpha", "epsilon", "draws", "calibration_draws", "score", "transform")
Saved = Annotated[Path, typer.Argument(help="What `keepcover calibrate` wrote.")]


@dataclass(frozen=True)
class Look:
    """What :func:`keepcover.check` takes.

    Args:
        sigma: Noise to try, repeat for several; a half, one, two and four times epsilon by default.
        norm: What epsilon measures.
        points: Inputs to look at, at random.
        denoiser: A denoiser of your own to try; the bundled one by default.
    """

    epsilon: opt.Epsilon
    sigma: list[float] | None = None
    norm: Literal["l2", "l1", "linf"] = "l2"
    alpha: opt.Alpha = 0.1
    score: opt.Score = None
    draws: opt.Draws = 16
    points: int = 200
    denoiser: str | None = None
    seed: opt.Secret = None


@opt.command
def check(using: opt.Model, given: opt.Data, look: Look, numerics: opt.Numerics) -> ui.Answer:
    """What a model can promise, from a small sample, before anything is paid for; and what to do next.

    Accuracy, certified size and time at several sigmas, alone and behind the denoiser. What is chosen depends on these
    points, so others must calibrate: by default this looks at part 3/4 of the data, says `--part 4/4` next, and leaves the first
    half for training.
    """
    seen = replace(given, part=given.part or "3/4")
    # Sigma is chosen on these points, which would void a promise that is calibrated on them.
    if next_part(str(seen.part)) == seen.part:
        raise InputError(f"expected a part that leaves others to calibrate on, for instance 1/2, got {seen.part}")
    inputs = seen.inputs(labelled=True)
    network = using.load(len(inputs.class_names) or int(inputs.labels.max()) + 1)
    found = advice.check(numerics.smoother(network, get_noise(0.0), using.device), inputs.pair, **vars(look))
    others = replace(seen, part=next_part(str(seen.part)))
    # train base has a part of its own by default
    third = None if given.part is None or given.data in OFFICIAL else next_part(str(others.part))
    rest = " ".join(filter(None, (opt.typed(using, "model"), opt.typed(others), opt.typed(numerics))))
    training = f"{opt.typed(using, 'model', 'model_output', 'fingerprint')} {opt.typed(replace(given, part=third))}"
    shown = replace(found, smoother=False, model=shlex.quote(using.model), rest=rest, training=training.strip())
    return ui.Answer(shown.to_dict(), [repr(shown)])


@dataclass(frozen=True)
class Levels:
    """What :func:`keepcover.calibrate` takes as it is.

    Args:
        epsilon: Radius of the attack, in the units of the inputs; repeat for several.
        alpha: Miscoverage, 0.1 by default; repeat for several.
        draws: Model evaluations per query; 16 by default, bands have their own number.
        calibration_draws: Model evaluations per calibration point, paid once; by default 64 for `auto` and
            `exact_asymmetric`, as many as per query for others.
        holdout: Points set aside for tuning; a tenth, at most 500, by default.
    """

    epsilon: list[float]
    alpha: list[float] | None = None
    draws: int | None = None
    calibration_draws: int | None = None
    holdout: int | None = None
    seed: opt.Secret = None


@opt.command
def calibrate(
    using: opt.Model,
    given: opt.Data,
    levels: Levels,
    save: Annotated[Path, "--out", check_place],
    asked: opt.Question,
    meaning: opt.Meaning,
    numerics: opt.Numerics,
    *,
    method: Annotated[str, f"`auto` or one of {', '.join(METHODS)}."] = "auto",
    input_scale: str | None = None,
    transform: Literal["none", "ptt"] | None = None,
    randomize: bool = False,
    classes: int | None = None,
    class_names: opt.ClassNames = None,
) -> ui.Answer:
    """Calibrate a model of your own on labelled data and save the predictor.

    The data must not have been used in training. Use one `--part` of them here (`1/2`) and another (`2/2`) for `predict`,
    `report` and `audit`.

    Args:
        save: Where the predictor goes (safetensors).
        input_scale: Units of features, in which sigma and epsilon are: `std`, or one number each, separated by commas.
        transform: PTT by default for methods that average scores.
        randomize: Let exact rules randomise their boundary.
        classes: Outputs of a built-in model; as many as the data have by default.
    """
    start = time.monotonic()
    points = given.inputs(labelled=True)
    names = opt.read_names(class_names) or points.class_names
    task = meaning.known(names)
    network = using.load(classes or len(names) or (task.counted(points.labels) if len(points) else 0))
    identifier(network, using.fingerprint)  # a model that could not be saved is not calibrated either
    options = opt.given({"beta": asked.beta, "randomize": randomize or None})
    if transform is not None:
        options["transform"] = PTT() if transform == "ptt" else None
    auto = asked.sigma == "auto" and asked.noise is None
    units: Any = input_scale.split(",") if input_scale and input_scale != "std" else input_scale
    predictor = run(
        numerics.smoother(network, get_noise(0.0) if auto else asked.required(), using.device),
        points.pair,
        sigma="auto" if auto else None,
        task=task,
        input_scale=units,
        method=get_method(method, **options),
        fingerprint=using.fingerprint,
        **opt.given(vars(levels)),
        **asked.arguments(points.rows),
    )
    data = f"{points.name}, part {given.part}" if given.part else points.name  # without the folders of this machine
    predictor.provenance.update(model=Path(using.model).name, data=data, data_sha256=data_fingerprint(points.pair))
    predictor.save(save)
    promised = [
        {"alpha": a, "epsilon": e, "guarantee": str(predictor.at(a, e).guarantee), "estimated_size": one.size}
        for (a, e), one in predictor.levels.items()
    ]
    facts = {
        "predictor": str(save),
        "classes": predictor.task.candidates,
        "model_fingerprint": predictor.identity.fingerprint if predictor.identity else None,
        "holdout_size": predictor.holdout_size,
        "levels": promised,
        "warning": predictor.warning,
        "seconds": round(time.monotonic() - start, 1),
    }
    sized = predictor.task.sized
    shown = [f"{one['guarantee']}\nestimated size  {sized(one['estimated_size'])}\n" for one in promised]
    shown.append(f"predictor       {save}")
    for command, on in (("predict", "NEW"), ("report", "LABELLED"), ("audit --predictor", "LABELLED")):
        place = f"{shlex.quote(str(save))} {opt.typed(using)} --data {on}"
        shown.append(f"next            keepcover {command} {place}")
    return ui.Answer(facts, shown)


@opt.command
def predict(
    saved: Saved,
    using: opt.Model,
    given: opt.Data,
    query: opt.Query,
    *,
    nested: bool = False,
    early_exit: bool = False,
    to: Annotated[Path | None, "--out", check_place] = None,
    form: Annotated[Literal["jsonl", "csv", "npz"] | None, "--format"] = None,
    as_json: opt.Json = False,
) -> None:
    """Prediction sets for new data: one row per input with index, labels, size and whether the set is trivial.

    Rows go to the screen, or to `--out` as a whole. Where the data have labels, coverage is measured too. The summary goes
    to stderr when the rows are on the screen; `--json` prints it, rows included unless they went to a file.

    Args:
        nested: Unite with the sets of all smaller epsilons.
        early_exit: Stop drawing for an input once its set is decided (exact rules only).
        to: Write the rows to this file instead of the screen.
        form: By the ending of the file: .jsonl or .csv, or .npz for the sets as arrays, such as masks; jsonl on the
            screen.
    """
    rows_as = form or format_of(to)
    if rows_as == "npz" and to is None:
        raise InputError("arrays go to a file: --out SETS.npz")
    predictor, inputs = using.predictor(saved, query.batch_size), given.inputs()
    if inputs.labels is not None:  # checked before the network runs
        predictor.task.check_truth(inputs.labels, len(inputs))
    how: dict[str, Any] = {"alpha": query.alpha, "epsilon": query.epsilon, "nested": nested, "early_exit": early_exit}
    sets = predictor.predict(inputs.images, **how, **query.arguments(inputs.rows))
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
    sizes = f"mean size {summary['mean_size']:.2f}, {summary['trivial']} trivial, {summary['empty']} empty"
    lines = [str(sets.guarantee), f"{len(sets)} sets, {sizes}"]
    if sets.draws_used is not None:
        summary["mean_draws"] = float(sets.draws_used.double().mean())
        lines.append(f"{summary['mean_draws']:.1f} of {predictor.draws} draws per input with early exit")
    if inputs.labels is not None:
        what = "risk" if sets.guarantee.shares else "coverage"
        share = getattr(sets.measure(inputs.labels), what)
        summary[what] = share.__dict__
        lines.append(f"{what} {share} on the labels in the data, unattacked")
    if to is not None:
        write_file(to, write_arrays(sets) if rows_as == "npz" else write_rows(rows, rows_as).encode())
        lines.append(f"rows     {to}")
    if as_json:
        return ui.print_json(summary if to is not None else {**summary, "rows": rows})
    if to is None:
        sys.stdout.write(write_rows(rows, rows_as))
    for line in lines:
        (ui.err if to is None else ui.out).print(line)


def format_of(path: Path | None) -> str:
    """The format that the ending of a file's name asks for; JSON lines where there is no file.

    Example:
        >>> format_of(Path("sets.csv"))
        'csv'
    """
    form = "jsonl" if path is None else path.suffix.lower().removeprefix(".")
    if form not in ("jsonl", "csv", "npz"):
        raise InputError(f"expected a file that ends in .jsonl, .csv or .npz, got {path}; or say which with --format")
    return form


def write_rows(rows: Sequence[dict[str, Any]], form: str) -> str:
    """The rows as the text of a file; in CSV what a set holds is joined by semicolons.

    Example:
        >>> print(write_rows([{"index": 7, "labels": ["cat", "fox"], "size": 2, "trivial": False}], "csv"), end="")
        index,labels,size,trivial
        7,cat;fox,2,false
    """
    if form == "jsonl":
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(rows[0] if rows else [])
    writer.writerows([_cell(value) for value in row.values()] for row in rows)
    return text.getvalue()


def write_arrays(sets: Any) -> bytes:
    """Sets as the arrays of an .npz file, with what they promise."""
    content, arrays = io.BytesIO(), {name: one.cpu().numpy() for name, one in sets.arrays().items()}
    np.savez_compressed(content, guarantee=str(sets.guarantee), **arrays)
    return content.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        value = [f"{name}={one:.6g}" for name, one in value.items()]
    if not isinstance(value, list):
        return value
    for one in value:
        if ";" in str(one):
            raise InputError(f"CSV joins labels by semicolons, and the class {one!r} holds one; use the format jsonl")
    return ";".join(map(str, value))


@opt.command
def report(
    saved: Saved,
    using: opt.Model,
    given: opt.Data,
    query: opt.Query,
    *,
    to: Annotated[Path, "--out", check_place] = Path("report.html"),
    figures: opt.Figures = None,
) -> ui.Answer:
    """One self-contained page on a saved predictor and labelled data: promise, curves, sizes, classes, examples, cost, origin.

    Args:
        to: The page.
    """
    predictor, inputs = using.predictor(saved, query.batch_size), given.inputs(labelled=True)
    promise = predictor.at(query.alpha, query.epsilon).guarantee
    labels = predictor.task.check_truth(inputs.labels, len(inputs))
    start, how = time.monotonic(), query.arguments(inputs.rows)
    every, groups = predictor.predict_all(inputs.images, **how), how["groups"]
    seconds, guessed = time.monotonic() - start, f"seed {query.seed}: for experiments, it can be guessed"
    origin = {
        "test data": f"{inputs.name}, {f'part {given.part}' if given.part else 'all of it'}, {len(inputs)} inputs",
        "test data fingerprint": data_fingerprint((inputs.images, labels)),
        "predictor": f"{saved.name}, SHA-256 {fingerprint(saved)}",
        "noise": "fresh from the operating system" if query.seed is None else guessed,
        "command": ui.command_line(),
    }
    level = promise.alpha, promise.epsilon
    about: dict[str, Any] = {"level": level, "origin": origin, "seconds": seconds, "groups": groups}
    page = predictor_page(predictor, every, inputs.images, labels, inputs.name, **about).write(to, figures)
    measured = measure(every[level], labels, groups)
    facts = {"report": str(page), "guarantee": promise.to_dict(), "evaluation": measured.to_dict()}
    return ui.Answer(facts, [f"{promise}\n{measured}\nreport  {page}"])


@opt.command
def show(saved: Saved) -> ui.Answer:
    """What a saved predictor promises and where it comes from; refuses a file that does not match its checksums.

    Needs no model: every threshold is computed again from the scores in the file.
    """
    (manifest, _), digest = read(saved), fingerprint(saved)
    task, seen, model, history = (manifest[name] for name in ("task", "inputs", "model", "history"))
    # A score or a loss of the user's is code that is not in the file, so nothing is scored again.
    score, promises = task.get("score"), [entry["guarantee"] for entry in manifest["levels"]]
    own_score = "function" in task or (isinstance(score, dict) and score.get("custom"))
    predictor = None if own_score else restore(saved)
    states = ["not checked"] * len(promises)
    if predictor is not None:
        states = ["always full" if one.full else "ready" for one in predictor.levels.values()]
    rows = []
    for entry, promise, state in zip(manifest["levels"], promises, states, strict=True):
        thresholds = [f"{float(value):.6g}" for value in entry["threshold"][:3]]
        thresholds += ["..."] if len(entry["threshold"]) > 3 else []
        rows.append([*(promise[name] for name in SAID), ", ".join(thresholds), state])
    head = [*(name.replace("calibration_", "cal. ") for name in SAID), "threshold", "sets"]
    shown = [*(promise["statement"] for promise in promises), ui.table("", head, rows)]
    if predictor is not None and predictor.warning is not None:
        shown.append(f"Warning: {predictor.warning}")
    shown.append("\n  ".join(["It rests on:", *promises[0]["assumptions"]]))
    names = task.get("class_names") or []
    listed = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    known = {
        "task": task["name"],
        "classes": f"{task.get('classes')}: {listed}" if names else task.get("classes"),
        "inputs": "unknown" if seen is None else InputRange.from_dict(seen),
        "calibration": f"{manifest['points']} points, holdout {manifest['holdout_size']}",
        "numerics": ", ".join(f"{key} {value}" for key, value in manifest["numerics"].items()),
        "fingerprint": "no model: calibrated on noisy outputs" if model is None else model["fingerprint"],
        **{key: value for key, value in history[-1].items() if key not in ("of", "unknown")},
        "history": ", ".join(f"{one['how']} {one['points']} points ({one['created'][:10]})" for one in history),
        "file": f"{saved}, format {manifest['format']}, SHA-256 {digest}",
    }
    facts = ["", *(f"{key:<12} {value}" for key, value in known.items())]
    return ui.Answer({"file": str(saved), "sha256": digest, **manifest}, [*shown, *facts])
