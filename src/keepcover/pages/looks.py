"""What a page shows of one kind of sets alone: a sentence, and sections with pictures. Kinds that are not listed have neither."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from keepcover.guarantee import Guarantee
from keepcover.pages.pictures import scenes_figure, shaded, sorted_intervals
from keepcover.pages.report import Figure, Section, Table
from keepcover.pages.sections import classes_section, examples_section, picturable, sizes_section
from keepcover.tasks import (
    Evaluation,
    IntervalEvaluation,
    PixelSets,
    PredictionIntervals,
    PredictionSets,
    Proportion,
    RiskEvaluation,
)

MOST_SIZES = 12
MOST_INTERVALS = 200
MOST_SCENES, MOST_MASKS = 5, 3


@dataclass(frozen=True)
class Shown:
    """Sets at one level, what was measured of them, and what they were made for.

    Attributes:
        names: of the classes, where there are some.
    """

    sets: Any
    measured: Any
    images: Tensor
    truth: Tensor
    names: Sequence[str] = field(default=())

    @property
    def promise(self) -> Guarantee:
        return self.sets.guarantee


def measure(sets: Any, truth: Tensor, groups: Sequence[Any] | None = None) -> Any:
    """Sets against the truth, by group where there are some and such sets can be broken down."""
    return (
        sets.measure(truth, groups) if groups is not None and isinstance(sets, PredictionSets) else sets.measure(truth)
    )


def conclusion(shown: Shown) -> str:
    """What the numbers come to, in a sentence or two."""
    own = SENTENCES.get(type(shown.measured))
    return f"On these inputs, unattacked: {shown.measured}." if own is None else own(shown)


def sections(shown: Shown) -> list[Section]:
    """Everything that only such sets have."""
    kinds = (type(shown.measured), type(shown.sets))
    return [section for kind in kinds if kind in SECTIONS for section in SECTIONS[kind](shown)]


# -- sets of labels ----------------------------------------------------------------------------------------------------


def _labels_sentence(shown: Shown) -> str:
    own, promise = shown.measured, shown.promise
    empty = f", {own.empty:.1%} are empty, which counts as missed" if own.empty else ""
    return (
        f"On these inputs, unattacked, {own.coverage.mean:.1%} of the sets hold the true label (promised: {1 - promise.alpha:.6g}). "
        f"They have {own.size:.2f} of {len(shown.names)} labels on average; {own.singletons:.1%} are a single label{empty}."
    )


def _labels_sections(shown: Shown) -> list[Section]:
    own, promise, names = shown.measured, shown.promise, shown.names
    by_class = {names[k]: share for k, share in own.by_class.items()}
    size_by_class = {names[k]: size for k, size in own.size_by_class.items()}
    found = [_sizes(own, promise.method), _by(by_class, size_by_class, promise)]
    return [*found, _by(own.by_group, own.size_by_group, promise, "group")] if own.by_group else found


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


def _by(
    shares: Mapping[Any, Proportion], sizes: Mapping[Any, float], promise: Guarantee, unit: str = "class"
) -> Section:
    lines = []
    for name, share in shares.items():
        cells = [str(share), f"{sizes[name]:.2f}", str(share.count)]
        lines.append((str(name), (share.mean, share.low, share.high), cells))
    return classes_section(
        lines,
        promise,
        ["coverage", "mean size", "inputs"],
        "95 % intervals",
        "Clopper-Pearson intervals that hold for all of them at once, with 95 %; in red, those that lie below what is promised.",
        unit=unit,
    )


def _images(shown: Shown) -> list[Section]:
    return [examples_section(shown.sets, shown.images, shown.truth)] if picturable(shown.images) else []


# -- intervals ---------------------------------------------------------------------------------------------------------


def _intervals_sentence(shown: Shown) -> str:
    own = shown.measured
    return (
        f"On these inputs, unattacked, {own.coverage.mean:.1%} of the unions hold the true value (promised: {1 - shown.promise.alpha:.6g}). "
        f"Their length is {own.size:.4g} on average, {own.median:.4g} in the middle."
    )


def _intervals(shown: Shown) -> list[Section]:
    """Unions sorted by length, a figure per target."""
    figures = []
    hull = shown.sets.hull.reshape(len(shown.sets), -1, 2)
    truth = shown.truth.reshape(len(shown.sets), -1)
    some = torch.linspace(0, len(hull) - 1, min(len(hull), MOST_INTERVALS)).round().long()
    for target in range(hull.shape[1]):
        ends, true = hull[:, target].double(), truth[:, target].double()
        order = (ends[:, 1] - ends[:, 0]).nan_to_num(nan=-1.0).argsort()[some]
        ends, true = ends[order].cpu(), true[order].cpu()
        name = f"intervals-{target + 1}" if hull.shape[1] > 1 else "intervals"
        words = f"{len(order)} intervals around the unions, the shortest to the left; dots are the truth, red where it is missed."
        missed = int((~((ends[:, 0] <= true) & (true <= ends[:, 1]))).sum())
        figures.append(Figure(name, sorted_intervals(ends, true), words, f"{words} {missed} of them miss it."))
    return [Section("Intervals, sorted by length", figures=figures)]


# -- masks of scenes ---------------------------------------------------------------------------------------------------


def _risk_sentence(shown: Shown) -> str:
    own, promise = shown.measured, shown.promise
    nothing = f" {own.nothing} of them have nothing to miss." if own.nothing else ""
    missed = promise.task.replace("the expected", "the mean")
    return (
        f"On these inputs, unattacked, {missed} is {own.risk.mean:.1%} (promised: at most {promise.alpha:.1%}).{nothing} The mean size is "
        f"{own.size:.4g}."
    )


def _scenes(shown: Shown) -> list[Section]:
    """Scenes as they are and shaded, those that miss most first; a panel for every class of the masks, or one for all."""
    if not picturable(shown.images):
        return []
    labels: tuple[int | None, ...] = shown.sets.of[:MOST_MASKS] or (None,)
    names = ["any label" if k is None else shown.names[k] if shown.names else f"class {k}" for k in labels]
    held, rows = shown.sets.covers(shown.truth).cpu(), []
    order = held.argsort(stable=True)
    chosen = order[torch.linspace(0, len(order) - 1, min(MOST_SCENES, len(order))).round().long()].tolist()
    for i in chosen:
        image, one = shown.images[i].cpu(), shown.sets[i]
        row: list[tuple[Tensor, Tensor | None]] = [(image, None)]
        for label in labels:
            painted = shaded(image, one.certain(label)[0].cpu(), one.kept(label)[0].cpu())
            row.append((painted, None if label is None else shown.truth[i].cpu() == label))
        rows.append(row)
    said = [f"{float(held[i]):.1%} kept" for i in chosen]
    words = "Red: certain, one label alone is kept. Yellow: possible, others are kept too. Grey: excluded. Outlined: the truth."
    figure = scenes_figure(rows, ["the scene", *names], said)
    return [
        Section(
            "Scenes",
            "From the scene of which most is missed to one of which least is.",
            figures=[
                Figure("scenes", figure, words, f"{len(rows)} scenes and their masks: {', '.join(said)}. {words}")
            ],
        )
    ]


SENTENCES: dict[type, Callable[[Shown], str]] = {
    Evaluation: _labels_sentence,
    IntervalEvaluation: _intervals_sentence,
    RiskEvaluation: _risk_sentence,
}
SECTIONS: dict[type, Callable[[Shown], list[Section]]] = {
    Evaluation: _labels_sections,
    PredictionSets: _images,
    PredictionIntervals: _intervals,
    PixelSets: _scenes,
}
