"""One self-contained page about a saved predictor on labelled data: promise, sizes, coverage, examples, origin."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from holdfast import plots
from holdfast.metrics import Evaluation
from holdfast.predictor import Predictor
from holdfast.report import Cell, Figure, Page, Section, Table, hardware
from holdfast.sets import PredictionSets

MOST_CLASSES = 30
EXAMPLES = 12


def predictor_page(predictor: Predictor, sets: PredictionSets, images: Tensor, labels: Tensor, data: str) -> Page:
    """The page; ``sets`` are the predictor's for ``images``."""
    measured = sets.evaluate(labels)
    promise = sets.guarantee
    page = Page(
        "Prediction sets on your data", f"{data}, {len(sets)} labelled inputs, clean, {hardware()}", str(promise)
    )
    page.sections.append(_numbers(measured, promise.alpha))
    page.sections.append(_classes(measured, predictor, promise.alpha))
    shown = _examples(sets, images, labels)
    if shown is not None:
        page.sections.append(shown)
    page.sections.append(Section("What the promise rests on", points=promise.assumptions))
    rows = [[Cell(key), Cell(value)] for key, value in facts(predictor).items()]
    page.sections.append(Section("Where it comes from", table=Table(["", ""], rows)))
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
        **predictor.provenance,
    }
    return {key: str(value) for key, value in known.items()}


def _numbers(measured: Evaluation, alpha: float) -> Section:
    head = ["coverage", "promised", "mean size", "single labels", "empty", "full label set"]
    row = [
        str(measured.coverage), f"{1 - alpha:g}", f"{measured.size:.2f} ± {measured.size_std:.2f}", f"{measured.singletons:.1%}",
        f"{measured.empty:.1%}", f"{measured.full:.1%}",
    ]  # fmt: skip
    figure = Figure(plots.svg(plots.size_histogram(measured.histogram)), "Sets by their number of labels.")
    return Section(
        "Coverage and size",
        "On these inputs as they are, attacked by nobody.",
        Table(head, [[Cell(value) for value in row]]),
        [figure],
        note="Coverage with its 95 % Clopper-Pearson interval. The promise is an average over calibrations and queries, so "
        "one measurement may fall short of it; holdfast audit tells luck from a broken promise, under attack too.",
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
        "Nothing is promised per class: hard classes may be covered less often, easy ones more.",
        Table(
            ["true class", "coverage", "inputs"], [[Cell(names[k]), Cell(str(s)), Cell(str(s.count))] for k, s in worst]
        ),
        [Figure(plots.svg(figure), "Coverage of every class, with 95 % intervals; dotted, the promised average.")],
        note=f"The {len(worst)} classes of lowest coverage; {left} more are not shown." if left else "",
    )


def _examples(sets: PredictionSets, images: Tensor, labels: Tensor) -> Section | None:
    """Some images with their sets: missed ones, single labels and larger sets, as many of each as there are."""
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        return None
    hit = sets.mask[torch.arange(len(labels)), labels]
    kinds = (~hit, hit & (sets.size == 1), hit & (sets.size > 1))
    chosen = torch.cat([kind.nonzero()[: EXAMPLES // 3, 0] for kind in kinds])
    names = sets.class_names or tuple(str(k) for k in range(sets.mask.shape[1]))

    def caption(labels: list[Any]) -> str:
        return "{" + ",\n".join(map(str, labels)) + "}" if len(labels) <= 4 else f"{len(labels)} labels"

    figure = plots.gallery(
        images[chosen],
        [caption(row) for row in sets[chosen].labels(names)],
        [f"truth: {names[int(labels[i])]}" for i in chosen],
    )
    return Section(
        "Examples",
        "First the inputs whose set misses the truth, then single labels, then larger sets.",
        figures=[Figure(plots.svg(figure), "The true class above each image, its set below.")],
    )
