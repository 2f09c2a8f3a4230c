"""One self-contained page about a saved predictor on labelled data: promise, sizes, coverage, examples, cost, origin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from keepcover import tasks
from keepcover.errors import InputError
from keepcover.guarantee import Guarantee
from keepcover.pages import plots, sections
from keepcover.pages.report import Figure, Page, Section, Table, hardware
from keepcover.prediction.predictor import Level, Predictor
from keepcover.prediction.report import facts

SHARES = {"singletons": "single labels", "empty": "empty", "full": "full label set"}  # what some measurements have
MOST_SIZES = 12
MOST_INTERVALS = 200
MOST_SCENES, MOST_MASKS = 5, 3


def predictor_page(
    predictor: Predictor,
    every: Mapping[Level, tasks.Sets],
    images: Tensor,
    labels: Tensor,
    data: str,
    *,
    level: Level | None = None,
    origin: Mapping[str, Any] | None = None,
    seconds: float | None = None,
    groups: Sequence[Any] | None = None,
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
        groups: the group of every input, where the promise is per group.
    """
    level = next(iter(every)) if level is None else level
    if level not in every:
        raise InputError(f"expected one of the levels {', '.join(map(str, every))}, got {level}")
    measured = {key: measure(sets, labels, groups) for key, sets in every.items()}
    candidates = predictor.task.candidates
    names = predictor.class_names or tuple(str(k) for k in range(candidates or 0))
    sets, promise = every[level], every[level].guarantee
    about, found = (
        f"{data}, {len(sets)} labelled inputs, clean, {hardware()}",
        _conclusion(measured[level], promise, names),
    )
    page = Page("Prediction sets on your data", about, promise, conclusion=found)
    if predictor.warning is not None:
        page.conclusion += f" Note: {predictor.warning}."
    page.sections.append(_numbers(measured, level))
    if len({epsilon for _, epsilon in every}) > 1:
        page.sections.append(_curves(measured, promise, candidates))
    page.sections += _looks(sets, measured[level], images, labels, names)
    took = ""
    if seconds is not None:
        took = f"This page's sets took {seconds:.2f} s, {1000 * seconds / len(sets):.2f} ms each, from one pass for every level."
    page.sections.append(sections.cost_section({promise.method: promise}, took, predictor.holdout_size))
    return page.closed({**facts(predictor), **(origin or {})})


def measure(sets: Any, truth: Tensor, groups: Sequence[Any] | None = None) -> Any:
    """tasks.Sets against the truth, by group where there are some and such sets can be broken down."""
    by_group = groups is not None and isinstance(sets, tasks.PredictionSets)
    return sets.measure(truth, groups) if by_group else sets.measure(truth)


def _conclusion(own: Any, promise: Guarantee, names: Sequence[str]) -> str:
    """What the numbers come to, in a sentence or two."""
    here, promised = "On these inputs, unattacked", f"(promised: {1 - promise.alpha:.6g})"
    held = f"{here}, {own.coverage.mean:.1%} of the"
    if isinstance(own, tasks.Evaluation):
        empty = f", {own.empty:.1%} are empty, which counts as missed" if own.empty else ""
        size = f"They have {own.size:.2f} of {len(names)} labels on average; {own.singletons:.1%} are a single label{empty}"
        return f"{held} sets hold the true label {promised}. {size}."
    if isinstance(own, tasks.IntervalEvaluation):
        size = f"Their length is {own.size:.4g} on average, {own.median:.4g} in the middle"
        return f"{held} unions hold the true value {promised}. {size}."
    if isinstance(own, tasks.RiskEvaluation):
        nothing = f" {own.nothing} of them have nothing to miss." if own.nothing else ""
        missed = f"{promise.task.replace('the expected', 'the mean')} is {own.risk.mean:.1%}"
        return f"{here}, {missed} (promised: at most {promise.alpha:.1%}).{nothing} The mean size is {own.size:.4g}."
    return f"{here}: {own}."


def _numbers(measured: Mapping[Level, Any], level: Level) -> Section:
    """Every level in a line, the page's own first."""
    more = [name for name in SHARES if hasattr(measured[level], name)]
    rows = []
    for alpha, epsilon in dict.fromkeys((level, *measured)):
        one = measured[alpha, epsilon]
        shares = [f"{getattr(one, name):.1%}" for name in more]
        form = ".2f" if one.size >= 0.5 else ".3g"  # masks are shares of an image
        size, low, high = (format(value, form) for value in (one.size, *one.size_interval))
        numbers = [str(one.coverage), f"{1 - alpha:g}", f"{size} [{low}, {high}]", *shares]
        rows.append([f"alpha {alpha:g}, epsilon {epsilon:g}", *numbers])
    first = " The first line is what the rest of the page is about." if len(rows) > 1 else ""
    return Section(
        "Coverage and size",
        f"On these inputs as they are, unattacked.{first}",
        Table(["promise", "coverage", "promised", "mean size", *(SHARES[name] for name in more)], rows),
        note="95 % intervals: of coverage Clopper-Pearson's or one for means of shares, of the mean size a normal one. The promise is an average "
        "over calibrations and queries: one measurement may fall short; keepcover audit tells luck from a broken promise, under attack too.",
    )


def _curves(measured: Mapping[Level, Any], promise: Guarantee, most: int | None) -> Section:
    sizes: dict[str, list[tuple[float, ...]]] = {}
    coverages: dict[str, list[tuple[float, ...]]] = {}
    for (alpha, epsilon), one in sorted(measured.items()):
        name, share = f"alpha {alpha:g}", one.coverage
        sizes.setdefault(name, []).append((epsilon, one.size, *one.size_interval))
        coverages.setdefault(name, []).append((epsilon, share.mean, share.low, share.high))
    certified, axis = dict.fromkeys(sizes, promise.certified), sections.radius_axis(promise.threat)
    words = "Mean set size against epsilon, with 95 % intervals."
    figures = sections.curve_figures("size-by-epsilon", sizes, certified, axis, words, guides=[most] if most else [])
    words = "Coverage of clean inputs against epsilon, with 95 % intervals; dotted, what is promised."
    promised = [1 - alpha for alpha in dict.fromkeys(alpha for alpha, _ in measured)]
    figures += sections.curve_figures("coverage-by-epsilon", coverages, certified, axis, words, promised=promised)
    text = "Clean inputs, sets that promise to hold up to epsilon. A larger radius takes more labels and lifts clean coverage further."
    note = "Each promise holds for its own level, not for all levels at once, and not for one picked after seeing the sets."
    return Section("What a larger radius costs", text, figures=figures, note=note)


# -- what only some kinds of sets have ---------------------------------------------------------------------------------


def _looks(sets: Any, own: Any, images: Tensor, truth: Tensor, names: Sequence[str]) -> Iterator[Section]:
    if isinstance(own, tasks.Evaluation):
        yield _sizes(own, sets.guarantee.method)
        yield _by(own.by_class, own.size_by_class, names, sets.guarantee, "class")
        if own.by_group:
            yield _by(own.by_group, own.size_by_group, {k: k for k in own.by_group}, sets.guarantee, "group")
    if isinstance(sets, tasks.PredictionIntervals):
        yield _intervals(sets, truth)
    elif isinstance(sets, tasks.PredictionSets) and sections.picturable(images):
        yield sections.examples_section(sets, images, truth)
    elif isinstance(sets, tasks.PixelSets) and sections.picturable(images):
        yield _scenes(sets, images, truth, names)


def _sizes(measured: tasks.Evaluation, method: str) -> Section:
    rows = [
        [str(size), str(share.count), f"{share.count / measured.coverage.count:.1%}", str(share)]
        for size, share in list(measured.by_size.items())[:MOST_SIZES]
    ]
    left = len(measured.by_size) - len(rows)
    text = "A set of one label is an answer; a larger one says between which labels the model cannot decide. An empty one is a miss."
    note = "Coverage among sets of one size, with 95 % Clopper-Pearson intervals: nothing is promised for it."
    note += f" {left} larger sizes are not in the table." if left else ""
    table = Table(["labels in the set", "sets", "share", "coverage"], rows)
    return sections.sizes_section(text, table, {method: measured.histogram}, note)


def _by(
    shares: Mapping[Any, tasks.Proportion], sizes: Mapping[Any, float], names: Any, promise: Guarantee, unit: str
) -> Section:
    lines = [(str(names[k]), share, str(share), f"{sizes[k]:.2f}") for k, share in shares.items()]
    note = "Clopper-Pearson intervals that hold for all of them at once, with 95 %; in red, those that lie below what is promised."
    return sections.classes_section(lines, promise, unit, note)


def _intervals(sets: tasks.PredictionIntervals, truth: Tensor) -> Section:
    """Unions sorted by length, a figure per target."""
    figures = []
    hull, values = sets.hull.reshape(len(sets), -1, 2).double(), truth.reshape(len(sets), -1).double()
    some = torch.linspace(0, len(hull) - 1, min(len(hull), MOST_INTERVALS)).round().long()
    for target in range(hull.shape[1]):
        ends = hull[:, target]
        order = (ends[:, 1] - ends[:, 0]).nan_to_num(nan=-1.0).argsort()[some]
        ends, true = ends[order].cpu(), values[:, target][order].cpu()
        name = f"intervals-{target + 1}" if hull.shape[1] > 1 else "intervals"
        words = f"{len(order)} intervals around the unions, the shortest to the left; dots are the truth, red where it is missed."
        missed = int((~((ends[:, 0] <= true) & (true <= ends[:, 1]))).sum())
        figures.append(Figure(name, plots.sorted_intervals(ends, true), words, f"{words} {missed} of them miss it."))
    return Section("Intervals, sorted by length", figures=figures)


def _scenes(sets: tasks.PixelSets, images: Tensor, truth: Tensor, names: Sequence[str]) -> Section:
    """Scenes as they are and shaded, those that miss most first; a panel for every class of the masks, or one for all."""
    labels: tuple[int | None, ...] = sets.of[:MOST_MASKS] or (None,)
    titles = ["any label" if k is None else names[k] if names else f"class {k}" for k in labels]
    held, rows = sets.covers(truth).cpu(), []
    order = held.argsort(stable=True)
    chosen = order[torch.linspace(0, len(order) - 1, min(MOST_SCENES, len(order))).round().long()].tolist()
    for i in chosen:
        image, one = images[i].cpu(), sets[i]
        row: list[tuple[Tensor, Tensor | None]] = [(image, None)]
        for label in labels:
            painted = plots.shaded(image, one.certain(label)[0].cpu(), one.kept(label)[0].cpu())
            row.append((painted, None if label is None else truth[i].cpu() == label))
        rows.append(row)
    said = [f"{float(held[i]):.1%} kept" for i in chosen]
    words = "Red: certain, one label alone is kept. Yellow: possible, others are kept too. Grey: excluded. Outlined: the truth."
    alt = f"{len(rows)} scenes and their masks: {', '.join(said)}. {words}"
    figure = Figure("scenes", plots.scenes_figure(rows, ["the scene", *titles], said), words, alt)
    return Section("Scenes", "From the scene of which most is missed to one of which least is.", figures=[figure])
