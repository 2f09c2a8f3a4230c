"""One self-contained page about a saved predictor on labelled data: promise, sizes, coverage, examples, cost, origin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from keepcover.errors import InputError
from keepcover.guarantee import Guarantee
from keepcover.pages import plots
from keepcover.pages.looks import Shown, conclusion, measure, sections
from keepcover.pages.report import Page, Section, Table, hardware
from keepcover.pages.sections import cost_section, curve_figures, radius_axis
from keepcover.prediction.predictor import Level, Predictor
from keepcover.prediction.report import facts
from keepcover.tasks import Sets

SHARES = {"singletons": "single labels", "empty": "empty", "full": "full label set"}  # what some measurements have


def predictor_page(
    predictor: Predictor,
    every: Mapping[Level, Sets],
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
    sets, shown = every[level], Shown(every[level], measured[level], images, labels, names)
    page = Page(
        "Prediction sets on your data",
        f"{data}, {len(sets)} labelled inputs, clean, {hardware()}",
        promise := sets.guarantee,
        conclusion=conclusion(shown),
    )
    if predictor.warning is not None:
        page.conclusion += f" Note: {predictor.warning}."
    page.sections.append(_numbers(measured, level))
    if len({epsilon for _, epsilon in every}) > 1:
        page.sections.append(_curves(measured, promise, candidates))
    page.sections += sections(shown)
    took = ""
    if seconds is not None:
        each = 1000 * seconds / len(sets)
        took = f"This page's sets took {seconds:.2f} s, {each:.2f} ms each, from one pass for every level."
    page.sections.append(cost_section({promise.method: promise}, took, predictor.holdout_size))
    return page.closed({**facts(predictor), **(origin or {})})


def _numbers(measured: Mapping[Level, Any], level: Level) -> Section:
    """Every level in a line, the page's own first."""
    more = [name for name in SHARES if hasattr(measured[level], name)]
    head = ["promise", "coverage", "promised", "mean size", *(SHARES[name] for name in more)]
    rows = []
    for alpha, epsilon in dict.fromkeys((level, *measured)):
        one = measured[alpha, epsilon]
        low, high = one.size_interval
        shares = [f"{getattr(one, name):.1%}" for name in more]
        form = ".2f" if one.size >= 0.5 else ".3g"  # masks are shares of an image
        size = f"{format(one.size, form)} [{format(low, form)}, {format(high, form)}]"
        rows.append([f"alpha {alpha:g}, epsilon {epsilon:g}", str(one.coverage), f"{1 - alpha:g}", size, *shares])
    first = " The first line is what the rest of the page is about." if len(rows) > 1 else ""
    return Section(
        "Coverage and size",
        f"On these inputs as they are, unattacked.{first}",
        Table(head, rows),
        note="Coverage with its 95 % interval (Clopper-Pearson's, or one for means of shares), size with a 95 % normal interval of its mean. "
        "The promise is an average over calibrations and queries, so one measurement may fall short of it; keepcover audit tells luck from a "
        "broken promise, under attack too.",
    )


def _curves(measured: Mapping[Level, Any], promise: Guarantee, most: int | None) -> Section:
    sizes: dict[str, list[tuple[float, ...]]] = {}
    coverages: dict[str, list[tuple[float, ...]]] = {}
    for (alpha, epsilon), one in sorted(measured.items()):
        name, share = f"alpha {alpha:g}", one.coverage
        sizes.setdefault(name, []).append((epsilon, one.size, *one.size_interval))
        coverages.setdefault(name, []).append((epsilon, share.mean, share.low, share.high))
    certified, axis = dict.fromkeys(sizes, promise.certified), radius_axis(promise.threat)
    promised = [1 - alpha for alpha in dict.fromkeys(alpha for alpha, _ in measured)]
    return Section(
        "What a larger radius costs",
        "Clean inputs, sets that promise to hold up to epsilon. The larger the promised radius, the more labels it takes, and the "
        "further clean coverage lies above the promise.",
        figures=[
            *curve_figures(
                "size-by-epsilon",
                sizes,
                lambda group: plots.radius_curves(group, certified, axis, guides=[] if most is None else [float(most)]),
                "Mean set size against epsilon, with 95 % intervals.",
            ),
            *curve_figures(
                "coverage-by-epsilon",
                coverages,
                lambda group: plots.radius_curves(group, certified, axis, "coverage", promised, (None, 1.01)),
                "Coverage of clean inputs against epsilon, with 95 % intervals; dotted, what is promised.",
                ".3f",
            ),
        ],
        note="Each promise holds for its own level, not for all levels at once, and not for one picked after seeing the sets.",
    )
