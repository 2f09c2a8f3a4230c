"""One self-contained page about a saved predictor on labelled data: promise, sizes, coverage, examples, cost, origin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from keepcover.errors import InputError
from keepcover.guarantee import Guarantee
from keepcover.pages import plots
from keepcover.pages.report import (
    Cell,
    Example,
    Figure,
    Page,
    Section,
    Table,
    curve_words,
    hardware,
    origin_section,
    picturable,
    promise_section,
    set_words,
)
from keepcover.prediction.predictor import Level, Predictor
from keepcover.tasks.metrics import Evaluation
from keepcover.tasks.sets import PredictionSets

MOST_CLASSES = 30
MOST_SIZES = 12
EXAMPLES = 12


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
    sets, measured = every[level], {key: sets.evaluate(labels) for key, sets in every.items()}
    promise, own = sets.guarantee, measured[level]
    empty = f", {own.empty:.1%} are empty, which counts as missed" if own.empty else ""
    page = Page(
        "Prediction sets on your data",
        f"{data}, {len(sets)} labelled inputs, clean, {hardware()}",
        str(promise),
        conclusion=f"On these inputs, unattacked, {own.coverage.mean:.1%} of the sets hold the true label (promised: {1 - promise.alpha:.6g}). "
        f"They have {own.size:.2f} of {predictor.classes} labels on average; {own.singletons:.1%} are a single label{empty}.",
    )
    page.sections += [_numbers(measured, level), _sizes(own), _classes(own, predictor, promise.alpha)]
    if len({epsilon for _, epsilon in every}) > 1:
        page.sections.insert(1, _curves(measured, every, predictor.classes))
    if picturable(images):
        page.sections.append(_examples(sets, images, labels))
    page.sections.append(_cost(predictor, promise, len(sets), seconds))
    page.sections.append(promise_section(promise.assumptions))
    page.sections.append(origin_section({**facts(predictor), **(origin or {})}))
    return page


def facts(predictor: Predictor) -> dict[str, str]:
    """Everything known about a predictor's origin, as text."""
    promise = predictor.guarantee
    known: dict[str, Any] = {
        "method": f"{promise.method}, score {promise.score}, transform {promise.transform}",
        "calibration points": promise.n,
        "holdout": predictor.holdout_size,
        "classes": predictor.classes,
        "inputs": "unknown" if predictor.inputs is None else predictor.inputs,
        "numerics": ", ".join(f"{key} {value}" for key, value in predictor.smoother.numerics.items()),
        "model fingerprint": predictor.model_fingerprint or "none",
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

    def row(key: Level, one: Evaluation) -> list[Cell]:
        low, high = one.size_interval
        values = [
            f"alpha {key[0]:g}, epsilon {key[1]:g}",
            str(one.coverage),
            f"{1 - key[0]:g}",
            f"{one.size:.2f} [{low:.2f}, {high:.2f}]",
            f"{one.singletons:.1%}",
            f"{one.empty:.1%}",
            f"{one.full:.1%}",
        ]
        return [Cell(value) for value in values]

    rows = [row(level, measured[level]), *(row(key, one) for key, one in measured.items() if key != level)]
    more = " The first line is what the rest of the page is about." if len(rows) > 1 else ""
    return Section(
        "Coverage and size",
        f"On these inputs as they are, attacked by nobody.{more}",
        Table(head, rows),
        note="Coverage with its 95 % Clopper-Pearson interval, size with a 95 % normal interval of its mean. The promise is an "
        "average over calibrations and queries, so one measurement may fall short of it; keepcover audit tells luck from a "
        "broken promise, under attack too.",
    )


def _curves(measured: Mapping[Level, Evaluation], every: Mapping[Level, PredictionSets], classes: int) -> Section:
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
    return Section(
        "What a larger radius costs",
        "Clean inputs, sets that promise to hold up to epsilon. The larger the promised radius, the more labels it takes, and the "
        "further clean coverage lies above the promise.",
        figures=[
            Figure(
                "size-by-epsilon",
                plots.size_curves(sizes, classes, certified),
                "Mean set size against epsilon, with 95 % intervals.",
                f"Mean set size against epsilon. {curve_words(sizes)}.",
            ),
            Figure(
                "coverage-by-epsilon",
                plots.coverage_curves(coverages, alphas, certified, "epsilon (L2, units of the inputs)"),
                "Coverage of clean inputs against epsilon, with 95 % intervals; dotted, what is promised.",
                f"Coverage of clean inputs against epsilon. {curve_words(coverages, '.3f')}.",
            ),
        ],
        note="Each promise holds for its own level, not for all levels at once, and not for one picked after seeing the sets.",
    )


def _sizes(measured: Evaluation) -> Section:
    sizes = list(measured.by_size.items())
    rows = [
        [
            Cell(str(size)),
            Cell(str(share.count)),
            Cell(f"{share.count / measured.coverage.count:.1%}"),
            Cell(str(share)),
        ]
        for size, share in sizes[:MOST_SIZES]
    ]
    words = ", ".join(f"{share.count} of size {size}" for size, share in sizes[:MOST_SIZES])
    left = len(sizes) - len(rows)
    return Section(
        "How large the sets are",
        "A set of one label is an answer; a larger one says between which labels the model cannot decide. An empty one is a miss.",
        Table(["labels in the set", "sets", "share", "coverage"], rows),
        [
            Figure(
                "set-sizes",
                plots.size_histogram(measured.histogram),
                "Sets by their number of labels.",
                f"Sets: {words}.",
            )
        ],
        note="Coverage among sets of one size, with 95 % Clopper-Pearson intervals: nothing is promised for it."
        + (f" {left} larger sizes are not in the table." if left else ""),
    )


def _classes(measured: Evaluation, predictor: Predictor, alpha: float) -> Section:
    names = predictor.class_names or tuple(str(k) for k in range(predictor.classes))
    worst = sorted(measured.by_class.items(), key=lambda item: item[1].mean)[:MOST_CLASSES]
    left = len(measured.by_class) - len(worst)
    figure = plots.coverage_by_class(
        [names[k] for k, _ in worst], [(share.mean, share.low, share.high) for _, share in worst], alpha
    )
    return Section(
        "Coverage by class",
        "The promise is marginal: nothing is promised per class. Hard classes may be covered less often, easy ones more.",
        Table(
            ["true class", "coverage", "mean size", "inputs"],
            [
                [
                    Cell(names[k]),
                    Cell(str(s), "bad" if s.high < 1 - alpha else ""),
                    Cell(f"{measured.size_by_class[k]:.2f}"),
                    Cell(str(s.count)),
                ]
                for k, s in worst
            ],
        ),
        [
            Figure(
                "coverage-by-class",
                figure,
                "Coverage of every class, with 95 % intervals; dotted, the promised average.",
                f"Coverage by class, from {worst[0][1].mean:.3f} for {names[worst[0][0]]} to {worst[-1][1].mean:.3f} for "
                f"{names[worst[-1][0]]}; the promised average is {1 - alpha:g}.",
            )
        ],
        note="95 % Clopper-Pearson intervals, each on its own; in red, classes whose interval lies below the promised average."
        + (f" The {len(worst)} classes of lowest coverage; {left} more are not shown." if left else ""),
    )


def _examples(sets: PredictionSets, images: Tensor, labels: Tensor) -> Section:
    """Some images with their sets: missed ones, single labels and larger sets, as many of each as there are."""
    hit = sets.mask[torch.arange(len(labels)), labels]
    kinds = (~hit, hit & (sets.size == 1), hit & (sets.size > 1))
    chosen = torch.cat([kind.nonzero()[: EXAMPLES // 3, 0] for kind in kinds]).tolist()
    names = sets.class_names or tuple(str(k) for k in range(sets.mask.shape[1]))
    rows = sets[torch.tensor(chosen, dtype=torch.long)].labels(names)
    examples = [
        Example(
            f"truth: {names[int(labels[i])]}{'' if hit[i] else ', missed'}",
            [(images[i], set_words(row))],
            bad=not hit[i],
        )
        for i, row in zip(chosen, rows, strict=True)
    ]
    words = "First the inputs whose set misses the truth, then single labels, then larger sets; the set is below each image."
    return Section("Examples", words, examples=examples)


def _cost(predictor: Predictor, promise: Guarantee, count: int, seconds: float | None) -> Section:
    calibration = promise.calibration_draws or promise.draws
    rows = [
        ["model evaluations per query", f"{promise.draws:,}"],
        ["model evaluations per calibration point, paid once", f"{calibration:,}"],
        ["in all for calibration", f"{calibration * (promise.n + predictor.holdout_size):,}"],
    ]
    if seconds is not None:
        rows.append(
            [
                "this page's sets, from one pass for every level",
                f"{seconds:.2f} s, {1000 * seconds / count:.2f} ms each",
            ]
        )
    return Section(
        "What it costs",
        "Every query is answered from noisy copies of the input; their number is the price of the promise.",
        Table(["what", "cost"], [[Cell(text) for text in row] for row in rows]),
    )
