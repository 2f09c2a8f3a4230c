"""A predictor in production: renew its thresholds, compare its versions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from keepcover.cli import console as ui
from keepcover.cli import options as opt
from keepcover.cli.predictor import Saved
from keepcover.errors import InputError
from keepcover.files import check_place
from keepcover.prediction.artifact import restore
from keepcover.prediction.comparison import compare
from keepcover.store import data_fingerprint

MOST = 8  # thresholds or batches that are printed


@opt.command
def recalibrate(
    saved: Saved,
    using: opt.Model,
    given: opt.Data,
    save: Annotated[Path, "--out", check_place],
    *,
    how: Literal["replace", "add", "window"] = "replace",
    window: int | None = None,
    groups: Path | None = None,
    batch_size: opt.BatchSize = None,
    seed: opt.Secret = None,
) -> ui.Answer:
    """Renew the thresholds of a saved predictor from new labelled data; everything else stays, and only these data run.

    The data must be like the queries to come, and none of them may have been used in training, tuning or an earlier batch.

    Args:
        save: Where the renewed predictor goes (safetensors).
        how: `replace` the calibration points, `add` to them, or keep a rolling `window` of batches.
        window: With `--how window`: how many batches stay, the new one included.
        groups: The group of every input, one per line, where the promise is per group.
    """
    old, points = using.predictor(saved, batch_size), given.inputs(labelled=True)
    digest = data_fingerprint(points.pair)
    if (
        again := next((at for at, one in enumerate(old.history) if one.get("data_sha256") == digest), None)
    ) is not None:
        raise InputError(
            f"these are the data of batch {again} ({old.history[again]['created']}): points that count twice, or that the holdout has "
            "seen, void the promise; give new ones"
        )
    known = None if groups is None else opt.read_groups(groups, points.rows)
    asked: dict[str, Any] = {"how": how, "window": window, "groups": known, "seed": seed}
    new = old.recalibrate(points.pair, fingerprint=using.fingerprint, **asked)
    origin = {"model": Path(using.model).name, "data": str(given)}
    new.provenance.update(origin, data_sha256=digest)
    new.save(save)
    return _answer(compare(old, new), {"predictor": str(save)})


@opt.command
def diff(
    saved: Annotated[Path, typer.Argument(metavar="A")], other: Annotated[Path, typer.Argument(metavar="B")]
) -> ui.Answer:
    """What differs between two saved predictors: promise, thresholds, expected size, rule, model, history. Needs no model.

    Args:
        saved: A saved predictor.
        other: Another, such as a renewed one.
    """
    return _answer(compare(restore(saved), restore(other)), {"a": str(saved), "b": str(other)})


def _answer(found: dict[str, Any], about: dict[str, str]) -> ui.Answer:
    files = [f"{name:<10} {path}" for name, path in about.items()]
    # Below each other: two promises may differ in their last word.
    differing = [f"{name}\n  a  {_words(a, b)}\n  b  {_words(b, a)}" for name, (a, b) in found["differences"].items()]
    rest = f"same: {', '.join(found['same'])}" if differing else "nothing differs"
    return ui.Answer({**about, **found}, [*files, *differing, rest])


def _words(value: Any, other: Any) -> str:
    """A value; of a long list the first few that are not those of the other."""
    if not isinstance(value, list):
        return f"{value:.6g}" if isinstance(value, float) else str(value)
    against = other if isinstance(other, list) and len(other) == len(value) > MOST else [None] * len(value)
    own = [(at, one) for at, (one, two) in enumerate(zip(value, against, strict=True)) if one != two]
    said = [f"{f'{at}: ' if len(value) > MOST else ''}{_words(one, None)}" for at, one in own[:MOST]]
    return ", ".join(said) + (f" and {len(own) - MOST} more" if len(own) > MOST else "")
