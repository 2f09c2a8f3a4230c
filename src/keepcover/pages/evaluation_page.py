"""One self-contained page about methods over random splits of noisy outputs: the evaluation of ``keepcover evaluate``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from keepcover.errors import InputError
from keepcover.evaluation import Observed, Row
from keepcover.pages import plots
from keepcover.pages.report import Cell, Figure, Page, Section, Table, hardware, origin_section, promise_section
from keepcover.pages.sections import MOST_PANELS, classes_section, cost_section, evaluations, sizes_section
from keepcover.tasks import Spread


def name_of(row: Row) -> str:
    """A method with what makes it differ from its other lines."""
    return row.method + (f" + {row.transform.upper()}" if row.transform != "none" else "")


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
    none is certified.

    Args:
        rows: one per method and transform, all under one alpha and threat.
        data: the name of the outputs; ``images`` of them.
        class_names: by class index; the indices by default.
        origin: what is known of outputs, splits and seed.
    """
    clean = [row for row in rows if row.attack == "none"]
    if not clean:
        raise InputError("expected at least one clean row to make a page of; the methods asked for gave none")
    best = min(clean, key=lambda row: (not row.guarantee.certified, row.size.mean))
    promise, seen = best.guarantee, _seen(best)
    splits = f"{best.splits} random split{'s' if best.splits > 1 else ''}"
    smallest = f"smallest {'certified ' if promise.certified else ''}sets"
    page = Page(
        "Prediction sets over random splits",
        f"{data}, {images} images, {splits}, alpha {promise.alpha:g}, {promise.threat.reach}, {promise.threat.noise}, score "
        f"{promise.score}; {hardware()}",
        str(promise),
        conclusion=f"Of {len(clean)} methods, {name_of(best)} has the {smallest}: {best.size.mean:.2f} labels on average over "
        f"{splits}, from {evaluations(promise.draws)}, at a clean coverage of {best.coverage.mean:.1%}.",
    )
    page.sections.append(_methods(clean, best, smallest))
    if seen.classes:
        page.sections += [_sizes(clean), _classes(best, class_names or [str(k) for k in range(len(seen.count[0]))])]
    page.sections += [
        cost_section(
            {name_of(row): row.guarantee for row in clean},
            f"What a predictor of its own would pay; here all methods share the same outputs. {promise.n} calibration points for "
            "the method of the sentence above; those that need no holdout calibrate on it too.",
        ),
        promise_section(promise.assumptions),
        origin_section({"images": images, "splits": splits, **(origin or {})}),
    ]
    return page


def _seen(row: Row) -> Observed:
    assert row.observed is not None
    return row.observed


def _spread(spread: Spread, values: Sequence[float], digits: int) -> str:
    ends = f"{min(values):.{digits}f}, {max(values):.{digits}f}"
    return f"{spread.mean:.{digits}f} ± {spread.std:.{digits}f} [{ends}]"


def _methods(rows: Sequence[Row], best: Row, smallest: str) -> Section:
    promise, body = best.guarantee, []
    for row in rows:
        seen, own = _seen(row), row.guarantee
        short = "bad" if max(seen.coverages) < 1 - own.alpha else ""
        body.append(
            [
                name_of(row),
                Cell("yes" if own.certified else "no", "good" if own.certified else ""),
                str(own.draws),
                str(own.calibration_draws),
                _spread(row.size, seen.sizes, 2),
                Cell(_spread(row.coverage, seen.coverages, 3), short),
                f"{row.trivial_splits} of {row.splits} splits",
            ]
        )
    points = {name_of(row): [(row.coverage.mean, row.size.mean, row.coverage.std, row.size.std)] for row in rows}
    certified = {name_of(row): row.guarantee.certified for row in rows}
    words = "; ".join(f"{name}: {point[0][0]:.3f} and {point[0][1]:.2f}" for name, point in points.items())
    figure = Figure(
        "size-against-coverage",
        plots.size_against_coverage(points, promise.alpha, certified),
        "Mean size against clean coverage, with their deviations over splits. Smaller is better, and coverage far above "
        "the dotted line is paid for in labels.",
        f"Coverage and mean size of every method. {words}.",
    )
    head = ["method", "certified", "draws", "cal. draws", "mean size", "coverage, clean", "full label sets"]
    return Section(
        "Every method",
        f"All methods on the same splits: calibrated on one half, looked at on the other, clean. A certified method promises "
        f"{1 - promise.alpha:.0%} within {promise.threat.reach}, the others on clean data only. The sentence above is that of "
        f"{name_of(best)}, the {smallest} here.",
        Table(head, body),
        [figure],
        note="Mean ± standard deviation over splits, and [lowest, highest] of them. Splits share their images: the deviation "
        "says how a number moves when the data are split again, not how it would with other images.",
    )


def _sizes(rows: Sequence[Row]) -> Section:
    chosen = sorted(rows, key=lambda row: (not row.guarantee.certified, row.size.mean))[:MOST_PANELS]
    histograms = {name_of(row): _seen(row).histogram.tolist() for row in chosen}

    def line(name: str, counts: Sequence[int]) -> list[str]:
        sizes = [size for size, count in enumerate(counts) if count]
        span = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        return [name, *(f"{counts[size] / sum(counts):.1%}" for size in (0, 1, -1)), span]

    table = Table(
        ["method", "empty", "one label", "full label set", "sizes"], [line(*item) for item in histograms.items()]
    )
    left = len(rows) - len(chosen)
    most = f"The {len(chosen)} with the smallest sets, certified ones first; {left} more are not shown."
    text = "Test sets of all splits together, by their number of labels."
    return sizes_section(text, table, histograms, most if left else "")


def _classes(best: Row, names: Sequence[str]) -> Section:
    seen, lines = _seen(best), []
    for k in seen.classes:
        shares = [float(hits[k] / count[k]) for hits, count in zip(seen.hits, seen.count, strict=True) if count[k]]
        coverage, size = seen.class_coverage(k), seen.class_size(k)
        tested = sum(int(count[k]) for count in seen.count) / len(seen.count)
        cells = [_spread(coverage, shares, 3), f"{size.mean:.2f} ± {size.std:.2f}", f"{tested:.0f}"]
        lines.append((names[k], (coverage.mean, min(shares), max(shares)), cells))
    return classes_section(
        lines,
        best.guarantee.alpha,
        ["coverage, clean", "mean size", "inputs per split"],
        "the range over splits",
        "Mean ± standard deviation and [lowest, highest] over splits; in red, classes below the promised average in every split.",
        f"Of {name_of(best)}. ",
    )
