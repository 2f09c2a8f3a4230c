"""What is known of a predictor, without data: for notebooks, files and the pages of other reports."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepcover.assumption import CHECKED
from keepcover.files import write_file
from keepcover.tasks.shown import html_table

if TYPE_CHECKING:
    from keepcover.prediction.predictor import Predictor

HIDDEN = ("how", "points", "unknown", "of")  # of a predictor's history


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
        return (
            f"{levels_table(self.predictor)}<h3>What the promise rests on</h3>{rests}"
            f"<h3>Where it comes from</h3>{origin}"
        )

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
