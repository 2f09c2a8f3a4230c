"""The sections that pages share, each written once: curves, sizes, classes, costs, examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from keepcover.guarantee import Guarantee
from keepcover.noise import Threat, get_norm
from keepcover.pages import plots
from keepcover.pages.report import Cell, Example, Figure, Section, Table
from keepcover.tasks import PredictionSets, Proportion

MOST_CLASSES = 30
MOST_PANELS = 6

interval = "{mean:.3f} [{low:.3f}, {high:.3f}]".format_map  # of a proportion as JSON has it


def radius_axis(threat: Threat, name: str = "epsilon") -> str:
    """What stands below an axis of radii."""
    return f"{name} ({get_norm(str(threat.norm)).short}, units of the inputs)"


def evaluations(draws: int) -> str:
    """The price of a query in words."""
    return f"{draws} model evaluation{'' if draws == 1 else 's'} per query"


def curve_words(curves: Mapping[str, plots.Curve], form: str = ".2f") -> str:
    """Curves as a sentence: every line's first and last point.

    Example:
        >>> curve_words({"exact": [(0.0, 1.2), (0.25, 1.5)], "rcp1": [(0.0, 2.0)]})
        'exact: 1.20 at 0, 1.50 at 0.25; rcp1: 2.00 at 0'
    """

    def words(points: plots.Curve) -> str:
        ends = dict.fromkeys((points[0], points[-1]))
        return ", ".join(f"{format(point[1], form)} at {point[0]:g}" for point in ends)

    return "; ".join(f"{name}: {words(points)}" for name, points in curves.items())


def curve_figures(
    name: str, curves: Mapping[str, plots.Curve], certified: Mapping[str, bool], axis: str, caption: str, **options: Any
) -> list[Figure]:
    """A figure of :func:`plots.radius_curves` for every few curves; of coverages where ``promised`` ones are given."""
    form = ".2f"
    if "promised" in options:
        form, options = ".3f", {"y": "coverage", "guides": options["promised"], "limits": (None, 1.01)}
    groups = plots.in_groups(curves)
    return [
        Figure(
            name if number == 1 else f"{name}-{number}",
            plots.radius_curves(group, certified, axis, **options),
            caption + (f" {number} of {len(groups)}." if len(groups) > 1 else ""),
            f"{caption} {curve_words(group, form)}.",
        )
        for number, group in enumerate(groups, 1)
    ]


def sizes_section(text: str, table: Table, histograms: Mapping[str, Sequence[int]], note: str = "") -> Section:
    """How many labels sets have: a panel for every histogram of sizes 0, 1, ..."""
    shares = {name: [count / sum(counts) for count in counts] for name, counts in histograms.items()}
    words = "; ".join(f"{name}: {share[1]:.0%} of one label, {share[0]:.0%} empty" for name, share in shares.items())
    caption = "Share of sets with each number of labels."
    figure = Figure("set-sizes", plots.size_shares(shares), caption, f"Set sizes. {words}.")
    return Section("How large the sets are", text, table, [figure], note=note)


def classes_section(
    lines: Sequence[tuple[str, Proportion, str, str]], promise: Guarantee, unit: str, note: str, whose: str = ""
) -> Section:
    """Coverage by true class (or group), the worst first: name, coverage, and coverage and mean size in words of every class.

    A class is marked where all of its range lies below what is promised.
    """
    alpha, own, plural = promise.alpha, promise.promise.partition, "classes" if unit == "class" else f"{unit}s"
    promised = "the promised average"
    text = f"The promise is an average: nothing is promised per {unit}. Some may be covered less often, others more."
    if own and own.unit == unit:
        promised = f"what is promised to every {unit}"
        text = f"The promise is made to every {unit}: each has a threshold of its own."
    elif own and own.unit == "cluster":
        text = "The promise is made to every cluster of classes, and is an average over the classes of a cluster."
    worst = sorted(lines, key=lambda line: line[1].mean)[:MOST_CLASSES]
    rows = [
        [name, Cell(coverage, "bad" if share.high < 1 - alpha else ""), size, str(share.count)]
        for name, share, coverage, size in worst
    ]
    left, (names, shares, *_) = len(lines) - len(worst), zip(*worst, strict=True)
    ends = f"from {shares[0].mean:.3f} for {names[0]} to {shares[-1].mean:.3f} for {names[-1]}"
    figure = Figure(
        f"coverage-by-{unit}",
        plots.coverage_by_class(names, [(share.mean, share.low, share.high) for share in shares], alpha),
        f"Coverage of every {unit}, with 95 % intervals for all at once; dotted, {promised}.",
        f"Coverage by {unit}, {ends}; {promised} is {1 - alpha:g}.",
    )
    table = Table(["true class" if unit == "class" else unit, "coverage", "mean size", "inputs tested"], rows)
    note += f" The {len(worst)} {plural} of lowest coverage; {left} more are not shown." if left else ""
    return Section(f"Coverage by {unit}", whose + text, table, [figure], note=note)


def cost_section(promises: Mapping[str, Guarantee], note: str = "", held: int = 0) -> Section:
    """Model evaluations per query and for calibration, in which ``held`` more points took part."""
    rows = []
    for name, promise in promises.items():
        per_point = promise.calibration_draws or promise.draws
        rows.append([name, f"{promise.draws:,}", f"{per_point:,}", f"{per_point * (promise.n + held):,}"])
    text = "Every query is answered from noisy copies of the input: model evaluations are the price of the promise."
    table = Table(["method", "per query", "per calibration point, paid once", "in all for calibration"], rows)
    return Section("What it costs", text, table, note=note)


def examples_section(sets: PredictionSets, images: Tensor, labels: Tensor, count: int = 12) -> Section:
    """Some images with their sets: missed ones, single labels and larger sets, as many of each as there are."""
    hit = sets.covers(labels) >= 1  # of several true labels all
    kinds = (~hit, hit & (sets.size == 1), hit & (sets.size > 1))
    chosen = torch.cat([kind.nonzero()[: count // 3, 0] for kind in kinds])
    names = sets.class_names or tuple(str(k) for k in range(sets.mask.shape[1]))
    examples = []
    for i, row in zip(chosen.tolist(), sets[chosen].labels(names), strict=True):
        true = ", ".join(names[k] for k in (labels[i].nonzero() if labels.ndim == 2 else labels[i]).flatten().tolist())
        title = f"truth: {true or 'none'}{'' if hit[i] else ', missed'}"
        examples.append(Example(title, [(images[i], set_words(row))], not hit[i]))
    words = "First the inputs whose set misses the truth, then single labels, then larger sets; the set is below each image."
    return Section("Examples", words, examples=examples)


def picturable(images: Tensor) -> bool:
    """Whether inputs are images that can be shown: [n, 1 or 3, height, width]."""
    return images.ndim == 4 and images.shape[1] in (1, 3)


def set_words(labels: Sequence[Any], most: int = 6) -> str:
    """A set as text; a large one by its first labels and how many there are.

    Example:
        >>> set_words(["cat", "dog"]), set_words([]), set_words(range(9), most=3)
        ('{cat, dog}', '{}', '{0, 1, 2 and 6 more}')
    """
    more = f" and {len(labels) - most} more" if len(labels) > most else ""
    return f"{{{', '.join(map(str, labels[:most]))}{more}}}"
