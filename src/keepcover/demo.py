"""The demo: train, calibrate every method, attack for real, on scikit-learn's digits. About a minute on two cores."""

from __future__ import annotations

import contextlib
import json
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from keepcover.attacks import Audit, audit
from keepcover.data import Labelled, digits
from keepcover.engine.memory import RememberingSmoother
from keepcover.errors import KeepcoverWarning
from keepcover.files import make_folder, write_file
from keepcover.methods import Method, get_method
from keepcover.noise import Stream
from keepcover.pages import plots
from keepcover.pages.audit_page import audit_page
from keepcover.pages.report import Figure, Section
from keepcover.pages.sections import curve_figures, radius_axis
from keepcover.prediction.calibration import calibrate
from keepcover.prediction.predictor import Predictor
from keepcover.prediction.report import facts
from keepcover.scores import PTT, Reading
from keepcover.tasks import Evaluation
from keepcover.training.example import EPOCHS, SIGMA, example_model, example_split
from keepcover.training.loop import Say

ALPHA, EPSILON = 0.1, 0.5
FILES = ("report.html", "results.json", "predictor.safetensors")
RADII = (0.5, 0.125, 0.25, 0.375)  # the first is the one that is attacked


@dataclass(frozen=True)
class Entry:
    """One line of the demo: a method with its budget."""

    name: str
    method: Method
    draws: int
    sigma: float = SIGMA


ENTRIES = (
    Entry("vanilla CP", get_method("cp"), 1, 0.0),
    Entry("smoothed CP", get_method("cp_smoothed"), 64),
    Entry("RSCP + PTT", get_method("rscp"), 64),
    Entry("RSCP+ Hoeffding + PTT", get_method("rscp_plus_hoeffding"), 256),
    Entry("RSCP+ Bernstein + PTT", get_method("rscp_plus_bernstein"), 256),
    Entry("BinCP", get_method("bincp"), 256),
    Entry("CAS + PTT", get_method("cas"), 256),
    Entry("RCP1", get_method("rcp1"), 1),
    Entry("exact, 1 draw", get_method("exact_asymmetric"), 1),
    Entry("exact, 4 draws", get_method("exact_asymmetric"), 4),
    Entry("exact (hull), 16 draws", get_method("exact"), 16),
    Entry("exact, 16 draws", get_method("auto"), 16),
)


@dataclass(frozen=True)
class DemoResult:
    """Everything the table and the report show."""

    data: Labelled
    model: nn.Module
    accuracy: float
    predictors: dict[str, Predictor]
    clean: dict[str, dict[float, Evaluation]]
    audit: Audit
    noisy_scores: tuple[Tensor, Tensor, float]
    seconds: float
    seed: int

    @property
    def curves(self) -> dict[str, list[tuple[float, float]]]:
        """Mean size by promised radius, on clean test points."""
        by_radius = {name: self.clean[name].items() for name in self.predictors}
        return {name: sorted((radius, one.size) for radius, one in found) for name, found in by_radius.items()}

    @property
    def best(self) -> Predictor:
        """The last line's predictor: the one that is saved."""
        return list(self.predictors.values())[-1]

    def rows(self) -> list[dict[str, Any]]:
        """One dictionary per method: what the table prints."""
        rows = self.audit.summary(EPSILON)
        for row in rows:  # clean numbers from all test points, not only those attacked
            measured = self.clean[row["name"]][EPSILON]
            row.update(coverage=measured.coverage.__dict__, size=measured.size, full=measured.full)
        return rows

    def to_dict(self) -> dict[str, Any]:
        asked = {"dataset": self.data.name, "alpha": ALPHA, "epsilon": EPSILON, "sigma": SIGMA, "seed": self.seed}
        found = {"noisy_accuracy": self.accuracy, "seconds": self.seconds}
        return {**asked, **found, "rows": self.rows(), "audit": self.audit.to_dict()}


def run_demo(
    seed: int = 0, say: Say = print, entries: Sequence[Entry] = ENTRIES, attacked: int = 250, epochs: int = EPOCHS
) -> DemoResult:
    """Run everything; ``say`` is told what happens. The last entry is the predictor that is kept."""
    with contextlib.ExitStack() as after:
        after.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)  # tensors this small cost more to share among threads than to compute
        start = time.monotonic()
        train, holdout, calibration, test = example_split(seed)
        say(f"training a small CNN on {len(train)} digits under noise of sigma {SIGMA:g}")
        model = example_model(train, seed, epochs=epochs)
        smoothers = {sigma: RememberingSmoother(model, sigma) for sigma in (0.0, SIGMA)}
        made: dict[str, Predictor] = {}
        clean: dict[str, dict[float, Evaluation]] = {}
        for entry in sorted(entries, key=lambda entry: -entry.draws):  # most draws first: the others reuse them
            say(f"calibrating {entry.name} ({entry.draws} draw{'s' if entry.draws > 1 else ''} per query)")
            how: dict[str, Any] = {"method": entry.method, "draws": entry.draws, "alpha": ALPHA, "epsilon": RADII}
            how |= {"holdout": holdout.pair if entry.method.needs_holdout else None, "class_names": train.class_names}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", KeepcoverWarning)  # full label sets show in the table
                made[entry.name] = calibrate(smoothers[entry.sigma], calibration.pair, seed=seed + 1, **how)
            sets = made[entry.name].predict_all(test.images, seed=seed + 2)
            clean[entry.name] = {epsilon: one.measure(test.labels) for (_, epsilon), one in sets.items()}
        predictors = {entry.name: made[entry.name] for entry in entries}
        say(f"attacking {attacked} test images: 20 L2 steps of length {EPSILON / 10:g} in a ball of radius {EPSILON:g}")
        report = audit(predictors, test[:attacked].pair, steps=20, draws=16, seed=seed + 3, progress=False)
        best = predictors[entries[-1].name]
        noisy = best.running.logits(test.images, 4, Stream(seed, "test"))
        accuracy = float((noisy.argmax(-1) == test.labels[:, None]).double().mean())
        scores, seconds = _densities(best, holdout), time.monotonic() - start
        return DemoResult(digits(), model, accuracy, predictors, clean, report, scores, seconds, seed)


def _densities(predictor: Predictor, holdout: Labelled) -> tuple[Tensor, Tensor, float]:
    """Noisy true-label scores of the holdout before and after a PTT fitted on their first draws."""
    logits, u = predictor.running.logits(holdout.images, 8, Stream(0, "holdout")), torch.full((len(holdout),), 0.5)
    scores = predictor.task.items(logits, holdout.labels, Reading(False), u).draws.values
    ptt = PTT().fit(scores[:, 0], ALPHA)
    return scores[:, 1:].flatten(), ptt(scores[:, 1:].flatten()), ALPHA


def write_report(result: DemoResult, folder: Path, figures: Path | None = None) -> Path:
    """Write ``report.html``, ``results.json`` and the predictor, figures too where they have a folder; returns the page."""
    make_folder(folder)
    html, numbers, saved = (folder / name for name in FILES)
    best, axis = result.best, radius_axis(result.best.guarantee.threat)
    certified = {name: predictor.guarantee.certified for name, predictor in result.predictors.items()}
    top = 1.05 * max(point[1] for points in result.curves.values() for point in points)

    costs = Section(
        "What robustness costs",
        "Mean set size on clean test images as the promised radius grows.",
        figures=curve_figures(
            "size-by-epsilon",
            result.curves,
            certified,
            axis,
            "Mean set size against epsilon.",
            guides=[10.0],
            limits=(0.0, top),
        ),
        note=f"Radii {', '.join(f'{r:g}' for r in sorted(RADII))}; each predictor answers for all of them from one pass.",
    )
    words = "Densities of true-label scores under noise: spread out before PTT, at 0 and 1 after it."
    drawn = plots.score_densities(*result.noisy_scores)
    densities = Section(
        "Why PTT helps RSCP+",
        "PTT maps scores through their holdout ranks and a steep sigmoid. Nearly all noisy scores then sit at 0 or 1, "
        "where the smoothed score moves least under attack.",
        figures=[Figure("score-densities", drawn, "True-label scores under noise.", words)],
    )
    page = audit_page(
        result.audit,
        f"seed {result.seed}, {len(result.data)} images of 8 x 8 pixels in [0, 1], {result.seconds:.0f} s",
        title="keepcover on handwritten digits",
        rows=result.rows(),
        text=f"A small CNN trained under {best.noise} (right on {result.accuracy:.0%} of noisy test draws). 500 calibration and "
        f"500 test points, one split, alpha {ALPHA:g}. The attack is projected gradient ascent on the first {len(result.audit.images)} test "
        "images. ",
        more=[costs, densities],
        origin={
            "data": "scikit-learn's handwritten digits: 697 for training, 100 holdout, 500 calibration, 500 test",
            "seed": f"{result.seed}, of split, training and noise: for a demo; a deployed predictor draws fresh noise",
            **facts(best),
            "wall-clock": f"{result.seconds:.0f} s",
        },
    )
    best.save(saved)
    write_file(numbers, json.dumps(result.to_dict(), indent=1).encode())
    return page.write(html, figures)
