"""One self-contained page about methods over random splits of noisy outputs: the evaluation of ``keepcover evaluate``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from keepcover.errors import InputError
from keepcover.evaluation import Row
from keepcover.evaluation.rows import Breakdown
from keepcover.pages import plots
from keepcover.pages.report import Cell, Figure, Page, Section, Table, hardware
from keepcover.pages.sections import MOST_PANELS, classes_section, cost_section, evaluations, interval, sizes_section
from keepcover.tasks import Spread


def name_of(row: Row) -> str:
    """A method with what makes it differ from its other lines."""
    name = row.method + (f" + {row.transform.upper()}" if row.transform != "none" else "")
    return name + (f", {row.guarantee.promise.short}" if row.guarantee.promise.clauses else "")


def evaluation_page(
    rows: Sequence[Row],
    data: str,
    *,
    images: int,
    class_names: Sequence[str] | None = None,
    origin: Mapping[str, Any] | None = None,
) -> Page:
    """The page of rows that :func:`keepcover.evaluate` returned.

    Its promise, sizes and classes are those of the certified method with the smallest sets, or of the smallest where
    none is certified; where promises beyond the marginal one were asked for, of one that makes such a promise.

    Args:
        rows: one per method, transform and promise, all under one alpha and threat.
        data: the name of the outputs; ``images`` of them.
        class_names: by class index; the indices by default.
        origin: what is known of outputs, splits and seed.
    """
    clean = [row for row in rows if row.attack == "none"]
    if not clean:
        raise InputError("expected at least one clean row to make a page of; the methods asked for gave none")
    promising = [row for row in clean if row.guarantee.promise.clauses]
    best = min(promising or clean, key=lambda row: (not row.guarantee.certified, row.size.mean))
    promise, seen = best.guarantee, best.observed
    splits = f"{best.splits} random split{'s' if best.splits > 1 else ''}"
    smallest = f"smallest {'certified ' if promise.certified else ''}sets"
    page = Page(
        "Prediction sets over random splits",
        f"{data}, {images} images, {splits}, alpha {promise.alpha:g}, {promise.threat.reach}, {promise.threat.noise}, score "
        f"{promise.score}; {hardware()}",
        promise,
        conclusion=f"Of {len(promising or clean)} methods, {name_of(best)} has the {smallest}: {best.size.mean:.2f} labels on "
        f"average over {splits}, from {evaluations(promise.draws)}, at a clean coverage of {best.coverage.mean:.1%}.",
    )
    page.sections.append(_methods(clean, best, smallest))
    if promising:
        page.sections.append(_promises(clean))
    if seen.by_class.members:
        names = class_names or [str(k) for k in range(len(seen.by_class.count[0]))]
        page.sections += [_sizes(clean), _by(best, seen.by_class, names, "class")]
    if seen.by_group.members:
        page.sections.append(_by(best, seen.by_group, promise.promise.groups.per, "group"))
    note = (
        f"What a predictor of its own would pay; here all methods share the same outputs. {promise.n} calibration points for the "
        "method of the sentence above; those that need no holdout calibrate on it too."
    )
    page.sections.append(cost_section({name_of(row): row.guarantee for row in clean}, note))
    return page.closed({"images": images, "splits": splits, **(origin or {})})


def _spread(values: Sequence[float], digits: int) -> str:
    spread, ends = Spread.of(values), f"{min(values):.{digits}f}, {max(values):.{digits}f}"
    return f"{spread.mean:.{digits}f} ± {spread.std:.{digits}f} [{ends}]"


def _methods(rows: Sequence[Row], best: Row, smallest: str) -> Section:
    promise, body = best.guarantee, []
    for row in rows:
        seen, own = row.observed, row.guarantee
        certified = Cell("yes", "good") if own.certified else "no"
        numbers = [str(own.draws), str(own.calibration_draws), _spread(seen.sizes, 2)]
        coverage = Cell(_spread(seen.coverages, 3), "bad" if max(seen.coverages) < 1 - own.alpha else "")
        full = f"{row.trivial_splits} of {row.splits} splits"
        body.append([name_of(row), certified, *numbers, coverage, full])
    points = {name_of(row): [(row.coverage.mean, row.size.mean, row.coverage.std, row.size.std)] for row in rows}
    certified = {name_of(row): row.guarantee.certified for row in rows}
    words = "; ".join(f"{name_of(row)}: {row.coverage.mean:.3f} and {row.size.mean:.2f}" for row in rows)
    figure = Figure(
        "size-against-coverage",
        plots.size_against_coverage(points, promise.alpha, certified),
        "Mean size against clean coverage, with deviations over splits. Coverage far above the dotted line is paid for in labels.",
        f"Coverage and mean size of every method. {words}.",
    )
    head = ["method", "certified", "draws", "cal. draws", "mean size", "coverage, clean", "full label sets"]
    return Section(
        "Every method",
        f"All methods on the same splits: calibrated on one half, looked at on the other, clean. Certified ones promise {1 - promise.alpha:.0%} "
        f"within {promise.threat.reach}, the others on clean data only. The sentence above is that of {name_of(best)}, the {smallest} here.",
        Table(head, body),
        [figure],
        note="Mean ± standard deviation over splits, and [lowest, highest] of them. Splits share their images: the deviation "
        "says how a number moves when the data are split again, not how it would with other images.",
    )


def _promises(rows: Sequence[Row]) -> Section:
    """What a promise costs, and what it does for the class and the group that are covered least."""
    body, kinds = [], [f"coverage, {name.replace('_', ' ')}" for name in rows[0].worst]
    for row in rows:
        most, cost = 1 - row.guarantee.alpha, row.cost(rows)
        worst = [Cell(interval(found), "bad" if found["high"] < most else "") for found in row.worst.values()]
        body.append([name_of(row), f"{row.size.mean:.2f}", "-" if cost is None else f"{cost:+.1%}", *worst])
    text = "The same methods with the marginal promise and the one asked for: sizes, and coverage of the worst class and group."
    note = "Clean inputs. The intervals hold for all classes, or groups, at once, with 95 %; in red, those below 1 - alpha."
    table = Table(["method and promise", "mean size", "cost beside marginal", *kinds], body)
    return Section("What the promise costs", text, table, note=note)


def _sizes(rows: Sequence[Row]) -> Section:
    chosen = sorted(rows, key=lambda row: (not row.guarantee.certified, row.size.mean))[:MOST_PANELS]
    histograms = {name_of(row): row.observed.histogram.tolist() for row in chosen}
    body = []
    for name, counts in histograms.items():
        sizes = [size for size, count in enumerate(counts) if count]
        span = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        body.append([name, *(f"{counts[size] / sum(counts):.1%}" for size in (0, 1, -1)), span])
    table = Table(["method", "empty", "one label", "full label set", "sizes"], body)
    left = len(rows) - len(chosen)
    most = f"The {len(chosen)} with the smallest sets, certified ones first; {left} more are not shown."
    text = "Test sets of all splits together, by their number of labels."
    return sizes_section(text, table, histograms, most if left else "")


def _by(best: Row, seen: Breakdown, names: Sequence[Any], unit: str) -> Section:
    lines = []
    for k in seen.members:
        shares, sizes = seen(k)
        size = Spread.of(sizes)
        lines.append((str(names[k]), seen.proportion(k), _spread(shares, 3), f"{size.mean:.2f} ± {size.std:.2f}"))
    note = (
        "Mean ± standard deviation and [lowest, highest] over splits. The intervals of the figure hold for all at once, with 95 %, for "
        "the choice of the inputs and for how they were divided; in red, those that lie below what is promised."
    )
    return classes_section(lines, best.guarantee, unit, note, f"Of {name_of(best)}, on clean inputs. ")
