"""``keepcover evaluate``: methods on precomputed noisy logits, over random splits."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from keepcover.cli import console as ui
from keepcover.cli import options as opt
from keepcover.engine.fingerprint import fingerprint
from keepcover.errors import InputError
from keepcover.evaluation import Row
from keepcover.evaluation import evaluate as run
from keepcover.evaluation.manifest import manifest, write_results
from keepcover.files import check_folder, check_place
from keepcover.methods import METHODS
from keepcover.pages.evaluation_page import evaluation_page
from keepcover.pages.sections import interval
from keepcover.prediction.source import source_of
from keepcover.promises import Promise
from keepcover.specs import read_shape
from keepcover.store import LogitStore
from keepcover.store.logits_file import read_arrays


@dataclass(frozen=True)
class Splits:
    """How :func:`keepcover.evaluate` uses points and draws.

    Args:
        draws: Use the first N draws; all by default.
        calibration_draws: Draws of calibration points, if different.
        splits: Random calibration/test halves.
        holdout: Points set aside for tuning and PTT.
        redraw_holdout: A new holdout for every split.
        calibration: Calibration points per split; half of what the holdout leaves by default.
    """

    draws: int | None = None
    calibration_draws: int | None = None
    splits: int = 50
    holdout: int = 500
    redraw_holdout: bool = False
    calibration: int | None = None
    seed: opt.Seed = 0


@opt.command
def evaluate(
    logits: Annotated[Path, typer.Argument()],
    epsilon: opt.Epsilon,
    asked: opt.Question,
    split: Splits,
    *,
    shape: opt.InputShape = None,
    alpha: opt.Alpha = 0.1,
    meaning: opt.Meaning,
    method: Annotated[list[str] | None, f"One or several of {', '.join(METHODS)}, or all."] = None,
    transform: Literal["none", "ptt", "both"] = "both",
    save: Annotated[Path | None, "--out", lambda path: check_folder(path.parent, path.name)] = None,
    report: Annotated[Path | None, check_place] = None,
    figures: opt.Figures = None,
    class_names: opt.ClassNames = None,
) -> ui.Answer:
    """Any methods on precomputed noisy logits, over random splits. No network needed, so any framework will do.

    `logits[i, j]` are the outputs for image i plus the j-th noise vector, noise independent across images and draws.
    `keepcover smooth` makes a store of them; one that is too large for memory is read piece by piece.

    Args:
        logits: safetensors or npz with `logits` [n, N, ...] and `labels` [n, ...], or a store's folder.
        transform: PTT cannot help methods that only compare scores.
        save: Also write rows and manifest to this JSON file.
        report: Also write a self-contained HTML page to this file.
    """
    start = time.monotonic()
    if figures is not None and report is None:
        raise InputError("--figures are those of the page: say where it goes with --report FILE.html")
    names = opt.read_names(class_names)
    known = meaning.known(names)
    outputs, truth = (LogitStore.at(logits), None) if logits.is_dir() else read_arrays(logits, "logits", "labels")
    source = source_of(outputs, truth, asked.optional() if logits.is_dir() else asked.required())
    promise = asked.promise()
    several = [Promise(), promise] if promise.clauses else [promise]  # the marginal one shows what the other costs
    named = None if method is None or "all" in method else method
    with ui.bar("evaluating") as progress:
        rows = run(
            source,
            epsilon=epsilon,
            norm=asked.norm,
            shape=read_shape(shape),
            alpha=alpha,
            promise=several,
            methods=asked.methods(named, METHODS, source.noise, known, several),
            transforms=("none", "ptt") if transform == "both" else (transform,),
            task=known,
            progress=progress,
            **vars(split),
        )
    facts = [row.to_dict() for row in rows]
    if save:
        config = {"logits": logits.name, "images": source.points, **vars(split)}
        write_results(save, facts, manifest(ui.command_line(), config, time.monotonic() - start))
    kept = (
        f"{split.holdout} holdout points, {'redrawn per split' if split.redraw_holdout else 'the same in every split'}"
    )
    if report:
        how = f"seed {split.seed}: {kept}, random halves of the rest to calibrate and to look at"
        origin = {**_origin(logits), "splits and seed": how, "command": ui.command_line()}
        with ui.err.status("writing the page"):
            page = evaluation_page(rows, logits.name, images=source.points, class_names=names or None, origin=origin)
            page.write(report, figures)
    lines = [_line(row, rows if len(several) > 1 else ()) for row in rows]
    about = f"alpha {alpha:g}, {rows[0].guarantee.threat.reach}, {source.noise}, score {known.score_name}"
    listed = ui.table(f"{logits.name}: {about}", list(lines[0]), [list(line.values()) for line in lines])
    shown = [listed, ui.dim(f"mean ± standard deviation over {split.splits} splits, seed {split.seed}, {kept}")]
    written = {"report": str(report)} if report else {}
    return ui.Answer({"rows": facts, **written}, [*shown, *(f"report  {one}" for one in written.values())])


def _line(row: Row, beside: Sequence[Row]) -> dict[str, Any]:
    """One line of the table; ``beside`` are the rows among which its promise has a cost."""
    promise = row.guarantee
    return {
        **({"promise": promise.promise.short} if beside else {}),
        "method": row.method,
        "transform": row.transform,
        "certified": "yes" if promise.certified else "no",
        "draws": promise.draws,
        "cal. draws": promise.calibration_draws,
        "size": row.size,
        **({"cost": f"{row.cost(beside) or 0:+.1%}"} if beside else {}),
        "coverage, clean": row.coverage,
        "worst class or group": ", ".join(map(interval, row.worst.values())),
        "trivial splits": f"{row.trivial_splits}/{row.splits}",
    }


def _origin(path: Path) -> dict[str, str]:
    """Where noisy logits come from: everything a store knows; of a file, its checksum."""
    if not path.is_dir():
        return {"logits": f"{path.name}, SHA-256 {fingerprint(path)}"}
    store = LogitStore.at(path)
    held = f"store {store.folder.name}, {store.draws} draws per image"
    return {"logits": held, **{name.replace("_", " "): str(value) for name, value in asdict(store.key).items()}}
