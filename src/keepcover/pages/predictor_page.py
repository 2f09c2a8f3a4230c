"""One self-contained page about a saved predictor on labelled data: promise, sizes, coverage, examples, cost, origin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from keepcover.errors import InputError
from keepcover.noise import Threat
from keepcover.pages import plots
from keepcover.pages.report import Page, Section, Table, hardware, origin_section, promise_section
from keepcover.pages.sections import (
    classes_section,
    cost_section,
    curve_figures,
    examples_section,
    picturable,
    radius_axis,
    sizes_section,
)
from keepcover.prediction.predictor import Level, Predictor
from keepcover.tasks import Evaluation, PredictionSets

MOST_SIZES = 12


def predictor_page(
    predictor: Predictor,
    every: Mapping[Level, PredictionSets],
    images: Tensor,
    labels: Tensor,
    data: str,
    *,
    level: Level | None = None,
    origin: Mapping[str, Any] | None = None,
    seconds: float | None = None,
) -> Page:
    """The page.

    Args:
        predictor: whose sets these are.
        every: its sets for ``images`` at every level, from :meth:`Predictor.predict_all`; or some of them.
        images, labels: labelled inputs that were not used to calibrate.
        data: their name.
        level: the (alpha, epsilon) that the page is about; the first of ``every`` by default.
        origin: facts about this evaluation to stand beside those the predictor brings: data, seed, command.
        seconds: what predicting took.
    """
    level = next(iter(every)) if level is None else level
    if level not in every:
        raise InputError(f"expected one of the levels {', '.join(map(str, every))}, got {level}")
    sets, measured = every[level], {key: sets.measure(labels) for key, sets in every.items()}
    promise, own = sets.guarantee, measured[level]
    empty = f", {own.empty:.1%} are empty, which counts as missed" if own.empty else ""
    page = Page(
        "Prediction sets on your data",
        f"{data}, {len(sets)} labelled inputs, clean, {hardware()}",
        str(promise),
        conclusion=f"On these inputs, unattacked, {own.coverage.mean:.1%} of the sets hold the true label (promised: {1 - promise.alpha:.6g}). "
        f"They have {own.size:.2f} of {predictor.classes} labels on average; {own.singletons:.1%} are a single label{empty}.",
    )
    page.sections.append(_numbers(measured, level))
    if len({epsilon for _, epsilon in every}) > 1:
        page.sections.append(_curves(measured, every, predictor.classes, promise.threat))
    page.sections += [_sizes(own, promise.method), _classes(own, predictor, promise.alpha)]
    if picturable(images):
        page.sections.append(examples_section(sets, images, labels))
    took = "" if seconds is None else f"{seconds:.2f} s, {1000 * seconds / len(sets):.2f} ms each"
    page.sections += [
        cost_section(
            {promise.method: promise},
            f"This page's sets took {took}, from one pass for every level." if took else "",
            predictor.holdout_size,
        ),
        promise_section(promise.assumptions),
        origin_section({**facts(predictor), **(origin or {})}),
    ]
    return page


def facts(predictor: Predictor) -> dict[str, str]:
    """Everything known about a predictor's origin, as text."""
    promise, identity = predictor.guarantee, predictor.identity
    known: dict[str, Any] = {
        "method": f"{promise.method}, score {promise.score}, transform {promise.transform}",
        "calibration points": promise.n,
        "holdout": predictor.holdout_size,
        "classes": predictor.classes,
        "inputs": predictor.inputs or "unknown",
        "numerics": ", ".join(f"{key} {value}" for key, value in predictor.numerics.items()),
        "model fingerprint": (identity and identity.fingerprint) or "none",
        **{_ORIGIN.get(key, key): value for key, value in predictor.provenance.items()},
    }
    return {key: str(value) for key, value in known.items()}


_ORIGIN = {
    "created": "calibrated on",
    "data": "calibration data",
    "keepcover": "calibrated with keepcover",
    "torch": "calibrated with torch",
}


def _numbers(measured: Mapping[Level, Evaluation], level: Level) -> Section:
    """Every level in a line, the page's own first."""
    head = ["promise", "coverage", "promised", "mean size", "single labels", "empty", "full label set"]
    rows = []
    for alpha, epsilon in dict.fromkeys((level, *measured)):
        one = measured[alpha, epsilon]
        low, high = one.size_interval
        shares = [f"{share:.1%}" for share in (one.singletons, one.empty, one.full)]
        size = f"{one.size:.2f} [{low:.2f}, {high:.2f}]"
        rows.append([f"alpha {alpha:g}, epsilon {epsilon:g}", str(one.coverage), f"{1 - alpha:g}", size, *shares])
    more = " The first line is what the rest of the page is about." if len(rows) > 1 else ""
    return Section(
        "Coverage and size",
        f"On these inputs as they are, unattacked.{more}",
        Table(head, rows),
        note="Coverage with its 95 % Clopper-Pearson interval, size with a 95 % normal interval of its mean. The promise is an "
        "average over calibrations and queries, so one measurement may fall short of it; keepcover audit tells luck from a "
        "broken promise, under attack too.",
    )


def _curves(
    measured: Mapping[Level, Evaluation], every: Mapping[Level, PredictionSets], classes: int, threat: Threat
) -> Section:
    alphas = list(dict.fromkeys(alpha for alpha, _ in every))
    certified = {
        f"alpha {alpha:g}": all(s.guarantee.certified for (a, _), s in every.items() if a == alpha) for alpha in alphas
    }
    sizes: dict[str, list[tuple[float, ...]]] = {}
    coverages: dict[str, list[tuple[float, ...]]] = {}
    for (alpha, epsilon), one in sorted(measured.items()):
        name, share = f"alpha {alpha:g}", one.coverage
        sizes.setdefault(name, []).append((epsilon, one.size, *one.size_interval))
        coverages.setdefault(name, []).append((epsilon, share.mean, share.low, share.high))
    axis = radius_axis(threat)
    return Section(
        "What a larger radius costs",
        "Clean inputs, sets that promise to hold up to epsilon. The larger the promised radius, the more labels it takes, and the "
        "further clean coverage lies above the promise.",
        figures=[
            *curve_figures(
                "size-by-epsilon",
                sizes,
                lambda group: plots.size_curves(group, classes, certified, axis),
                "Mean set size against epsilon, with 95 % intervals.",
            ),
            *curve_figures(
                "coverage-by-epsilon",
                coverages,
                lambda group: plots.coverage_curves(group, alphas, certified, axis),
                "Coverage of clean inputs against epsilon, with 95 % intervals; dotted, what is promised.",
                ".3f",
            ),
        ],
        note="Each promise holds for its own level, not for all levels at once, and not for one picked after seeing the sets.",
    )


def _sizes(measured: Evaluation, method: str) -> Section:
    rows = [
        [str(size), str(share.count), f"{share.count / measured.coverage.count:.1%}", str(share)]
        for size, share in list(measured.by_size.items())[:MOST_SIZES]
    ]
    left = len(measured.by_size) - len(rows)
    return sizes_section(
        "A set of one label is an answer; a larger one says between which labels the model cannot decide. An empty one is a miss.",
        Table(["labels in the set", "sets", "share", "coverage"], rows),
        {method: measured.histogram},
        "Coverage among sets of one size, with 95 % Clopper-Pearson intervals: nothing is promised for it."
        + (f" {left} larger sizes are not in the table." if left else ""),
    )


def _classes(measured: Evaluation, predictor: Predictor, alpha: float) -> Section:
    names = predictor.class_names or tuple(str(k) for k in range(predictor.classes))
    lines = [
        (
            names[k],
            (share.mean, share.low, share.high),
            [str(share), f"{measured.size_by_class[k]:.2f}", str(share.count)],
        )
        for k, share in measured.by_class.items()
    ]
    return classes_section(
        lines,
        alpha,
        ["coverage", "mean size", "inputs"],
        "95 % intervals",
        "95 % Clopper-Pearson intervals, each on its own; in red, classes whose interval lies below the promised average.",
    )
