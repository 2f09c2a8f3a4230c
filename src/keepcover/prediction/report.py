"""What is known of a predictor, without data: for notebooks, files and the pages of other reports. Whether its sets will be of
use, in a sentence for all that show it; and two predictors side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepcover.assumption import CHECKED
from keepcover.files import write_file
from keepcover.tasks.shown import html_table

if TYPE_CHECKING:
    from keepcover.noise import Noise
    from keepcover.prediction.predictor import Predictor

HIDDEN = ("how", "points", "unknown", "of")  # of a predictor's history
# Of the accuracy above guessing that noise may take, and of the labels beyond the first that sets may hold.
SHARE = 1 / 3


@dataclass(frozen=True)
class Accuracy:
    """The shares of calibration and holdout points that the model gets right, under one noise draw and without noise.

    Attributes:
        noisy: averaged over all draws.
        clean: None where only noisy outputs are known.

    Example:
        >>> Accuracy(0.5, 0.9).lost(10), Accuracy(0.8, 0.9).lost(10)
        (True, False)
    """

    noisy: float
    clean: float | None = None

    def lost(self, classes: int) -> bool:
        """Whether noise takes a third of the accuracy above guessing, or the model hardly does better than guessing."""
        guess = 1 / classes
        least = 0.1 * (1 - guess) if self.clean is None else max(0.1 * (1 - guess), (1 - SHARE) * (self.clean - guess))
        return self.noisy - guess < least


def wide(size: float, classes: int) -> bool:
    """Whether sets hold a third of the labels beyond the first.

    Example:
        >>> wide(4.75, 10), wide(1.35, 10)
        (True, False)
    """
    return size - 1 > SHARE * (classes - 1)


def warning(noise: Noise, accuracy: Accuracy, size: float | None, classes: int, denoisable: bool) -> str | None:
    """What a user should know before relying on such sets; None where they will do."""
    lost = accuracy.lost(classes)
    if not lost and (size is None or not wide(size, classes)):
        return None
    draws = f"{accuracy.noisy:.1%} of noisy draws under {noise}"
    draws += "" if accuracy.clean is None else f", on {accuracy.clean:.1%} without noise"
    sets = "sets will be large" if size is None else f"sets hold about {size:.1f} of {classes} labels"
    if lost and accuracy.clean is not None and Accuracy(accuracy.clean).lost(classes):
        return f"the model is right on only {draws}, and {sets}; noise takes little from it, so train it further with labels"
    if lost:
        return f"the model is right on only {draws}, and {sets}; {noise.before if denoisable else ''}{noise.remedy}"
    more = "" if noise.deterministic else " or more draws"
    return f"{sets}, although the model is right on {draws}; choose more or less noise, a smaller epsilon{more}, or improve the model"


def facts(predictor: Predictor) -> dict[str, str]:
    """Everything known about a predictor's origin, as text."""
    promise, identity = predictor.guarantee, predictor.identity
    made = {
        "created": "calibrated on",
        "data": "calibration data",
        "scores": "SHA-256 of the newest scores",
        "data_sha256": "SHA-256 of the newest data",
    }
    made |= {name: f"calibrated with {name}" for name in ("keepcover", "torch")}
    known: dict[str, Any] = {
        "method": f"{promise.method}, score {promise.score}, transform {promise.transform}",
        "calibration points": promise.n,
        "holdout": predictor.holdout_size,
        "classes": predictor.task.candidates or "none",
        "inputs": predictor.inputs or "unknown",
        "numerics": ", ".join(f"{key} {value}" for key, value in predictor.numerics.items()),
        "model fingerprint": (identity and identity.fingerprint) or "none",
        **{made.get(key, key): value for key, value in predictor.provenance.items() if key not in HIDDEN},
    }
    return {key: str(value) for key, value in known.items()}


def levels_table(predictor: Predictor) -> str:
    """Every promise in a line, and what is wrong with them."""
    rows = []
    for (alpha, epsilon), one in predictor.levels.items():
        size = "everything" if one.full else "unknown" if one.size is None else f"{one.size:.3g}"
        rows.append([f"{alpha:g}", f"{epsilon:g}", size, predictor.promised(one)])
    warned = "" if predictor.warning is None else f"<p><b>Warning:</b> {escape(predictor.warning)}</p>"
    title = repr(predictor).splitlines()[0]
    return f"<p>{escape(title)}</p>{html_table(['alpha', 'epsilon', 'expected size', 'promise'], rows)}{warned}"


@dataclass(frozen=True)
class Report:
    """Promises, what they rest on, and where they come from: a notebook shows it, :meth:`write` makes it a page."""

    predictor: Predictor

    def _repr_html_(self) -> str:
        stated = [one.to_dict().values() for one in self.predictor.guarantee.assumptions]
        rests = html_table(["assumption", "checked", "how"], map(tuple, stated))
        origin = html_table(["fact", "value"], facts(self.predictor).items())
        promised = f"{levels_table(self.predictor)}<h3>What the promise rests on</h3>{rests}"
        return f"{promised}<h3>Where it comes from</h3>{origin}"

    def __str__(self) -> str:
        rests = [f"  - {one} ({CHECKED[one.by]})" for one in self.predictor.guarantee.assumptions]
        origin = [f"  {name}: {value}" for name, value in facts(self.predictor).items()]
        return "\n".join([repr(self.predictor), "rests on", *rests, "comes from", *origin])

    def write(self, path: str | Path) -> Path:
        """The report as one page that needs nothing else."""
        head = '<!doctype html><html lang="en"><meta charset="utf-8"><title>Prediction sets: what is promised</title>'
        style = "<style>body{font:16px sans-serif;max-width:60em;margin:2em auto}td,th{text-align:left;padding:.2em .6em}</style>"
        write_file(Path(path), f"{head}{style}<body>{self._repr_html_()}</body></html>\n".encode())
        return Path(path)


def compare(one: Predictor, two: Predictor) -> dict[str, Any]:
    """What differs between two predictors, as pairs, and what is the same, by name; plain values for JSON.

    The expected size of each is that on the data it was calibrated on: the holdout at first, new points after a renewal.

    Example:
        >>> import torch, keepcover
        >>> logits, truth = torch.randn(400, 4, 3), torch.arange(400) % 3
        >>> a = keepcover.calibrate_outputs(logits[:200], truth[:200], epsilon=0.1, sigma=0.2)
        >>> found = compare(a, a.recalibrate_outputs(logits[200:], truth[200:], how="add"))
        >>> found["differences"]["calibration points"], "noise" in found["same"]
        ([180, 380], True)
    """
    known = [_facts(one), _facts(two)]
    pairs = {name: [facts.get(name) for facts in known] for name in {**known[0], **known[1]}}
    differences = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    return {"differences": differences, "same": [name for name in pairs if name not in differences]}


def _facts(predictor: Predictor) -> dict[str, Any]:
    identity = predictor.identity
    facts: dict[str, Any] = {
        "task": predictor.task.config(),
        "noise": str(predictor.noise),
        "model fingerprint": None if identity is None else identity.fingerprint,
        "numerics": predictor.numerics,
        "holdout": predictor.holdout_size,
        "calibration points": predictor.items.points,
        "history": [f"{entry['how']} {entry['points']} ({entry['scores'][:12]})" for entry in predictor.history],
    }
    for (alpha, epsilon), one in predictor.levels.items():
        at = f"alpha {alpha:g}, epsilon {epsilon:g}: "
        facts[at + "promise"] = str(predictor.promised(one))
        facts[at + "rule"] = f"{one.rule.name}: {one.rule.words}"
        facts[at + "threshold"] = [float(value) for value in one.threshold.flatten()]
        facts[at + "expected size"] = one.size
    return facts
