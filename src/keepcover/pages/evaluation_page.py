"""One self-contained page about methods over random splits of noisy logits: the evaluation of ``keepcover evaluate``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from keepcover.errors import InputError
from keepcover.evaluation.observed import Observed
from keepcover.evaluation.splits import Row
from keepcover.guarantee import Guarantee
from keepcover.pages import plots
from keepcover.pages.report import Cell, Figure, Page, Section, Table, hardware, origin_section, promise_section

MOST_CLASSES = 30
MOST_PANELS = 6


def name_of(row: Row) -> str:
    """A method with what makes it differ from its other lines."""
    return row.method + (" + PTT" if row.transform == "ptt" else "")


def evaluation_page(
    rows: Sequence[Row],
    data: str,
    *,
    images: int,
    class_names: Sequence[str] | None = None,
    origin: Mapping[str, Any] | None = None,
) -> Page:
    """The page of clean rows that :func:`keepcover.evaluation.splits.evaluate_methods` returned.

    Its promise, sizes and classes are those of the certified method with the smallest sets, or of the smallest where
    none is certified.

    Args:
        rows: one per method and transform, all under one alpha, epsilon and sigma.
        data: the name of the logits; ``images`` of them.
        class_names: by class index; the indices by default.
        origin: what is known of logits, splits and seed.
    """
    clean = [row for row in rows if row.attack == "none"]
    if not clean:
        raise InputError("expected at least one clean row to make a page of; the methods asked for gave none")
    best = min(
        (row for row in clean if row.certified or not any(r.certified for r in clean)), key=lambda r: r.size.mean
    )
    seen, promise = best.observed, best.guarantee
    assert seen is not None
    assert promise is not None
    splits = f"{best.splits} random split{'s' if best.splits > 1 else ''}"
    page = Page(
        "Prediction sets over random splits",
        f"{data}, {images} images, {splits}, alpha {best.alpha:g}, epsilon {best.epsilon:g}, sigma {best.sigma:g}, score "
        f"{best.score}; {hardware()}",
        str(promise),
        conclusion=f"Of {len(clean)} methods, {name_of(best)} has the smallest {'certified ' if best.certified else ''}sets: {best.size.mean:.2f} labels on "
        f"average over {splits}, from {best.draws} model evaluation{'s' if best.draws > 1 else ''} per query, at a clean coverage of "
        f"{best.coverage.mean:.1%}.",
    )
    page.sections += [
        _methods(clean, best),
        _sizes(clean),
        _classes(best, seen, class_names or [str(k) for k in range(len(seen.count[0]))]),
        _cost(clean, promise),
        promise_section(promise.assumptions),
        origin_section({"images": images, "splits": splits, **(origin or {})}),
    ]
    return page


def _spread(mean: float, std: float, values: Sequence[float], digits: int) -> str:
    return f"{mean:.{digits}f} ± {std:.{digits}f} [{min(values):.{digits}f}, {max(values):.{digits}f}]"


def _seen(row: Row) -> Observed:
    assert row.observed is not None
    return row.observed


def _methods(rows: Sequence[Row], best: Row) -> Section:
    head = ["method", "certified", "draws", "cal. draws", "mean size", "coverage, clean", "full label sets"]
    body = []
    for row in rows:
        seen, promised = _seen(row), 1 - row.alpha
        body.append(
            [
                Cell(name_of(row)),
                Cell("yes" if row.certified else "no", "good" if row.certified else ""),
                Cell(str(row.draws)),
                Cell(str(row.calibration_draws)),
                Cell(_spread(row.size.mean, row.size.std, seen.sizes, 2)),
                Cell(
                    _spread(row.coverage.mean, row.coverage.std, seen.coverages, 3),
                    "bad" if max(seen.coverages) < promised else "",
                ),
                Cell(f"{row.trivial_splits} of {row.splits} splits"),
            ]
        )
    points = {name_of(row): [(row.coverage.mean, row.size.mean, row.coverage.std, row.size.std)] for row in rows}
    words = "; ".join(f"{name}: {point[0][0]:.3f} and {point[0][1]:.2f}" for name, point in points.items())
    figure = Figure(
        "size-against-coverage",
        plots.size_against_coverage(points, best.alpha, {name_of(row): row.certified for row in rows}),
        "Mean size against clean coverage, with their deviations over splits. Smaller is better, and coverage far above "
        "the dotted line is paid for in labels.",
        f"Coverage and mean size of every method. {words}.",
    )
    return Section(
        "Every method",
        f"All methods on the same splits: calibrated on one half, looked at on the other, clean. A certified method promises "
        f"{1 - best.alpha:.0%} within L2 {best.epsilon:g}, the others on clean data only. The sentence above is that of "
        f"{name_of(best)}, the smallest {'certified ' if best.certified else ''}sets here.",
        Table(head, body),
        [figure],
        note="Mean ± standard deviation over splits, and [lowest, highest] of them. Splits share their images: the deviation "
        "says how a number moves when the data are split again, not how it would with other images.",
    )


def _sizes(rows: Sequence[Row]) -> Section:
    chosen = sorted(rows, key=lambda row: (not row.certified, row.size.mean))[:MOST_PANELS]
    shares = {}
    for row in chosen:
        counts = _seen(row).histogram
        shares[name_of(row)] = (counts / counts.sum()).tolist()

    def cells(name: str, share: Sequence[float]) -> list[Cell]:
        sizes = [size for size, part in enumerate(share) if part]
        values = [
            f"{share[0]:.1%}",
            f"{share[1]:.1%}",
            f"{share[-1]:.1%}",
            str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}",
        ]
        return [Cell(name), *(Cell(value) for value in values)]

    words = "; ".join(f"{name}: {share[1]:.0%} of one label, {share[0]:.0%} empty" for name, share in shares.items())
    left = len(rows) - len(chosen)
    return Section(
        "How large the sets are",
        "Test sets of all splits together, by their number of labels.",
        Table(["method", "empty", "one label", "full label set", "sizes"], [cells(*item) for item in shares.items()]),
        [
            Figure(
                "set-sizes",
                plots.size_shares(shares),
                "Share of sets with each number of labels.",
                f"Set sizes. {words}.",
            )
        ],
        note=f"The {len(chosen)} with the smallest sets, certified ones first; {left} more are not shown."
        if left
        else "",
    )


def _classes(best: Row, seen: Observed, names: Sequence[str]) -> Section:
    shares = {k: [float(h[k] / n[k]) for h, n in zip(seen.hits, seen.count, strict=True) if n[k]] for k in seen.classes}
    worst = sorted(shares, key=lambda k: seen.class_coverage(k).mean)[:MOST_CLASSES]
    body = []
    for k in worst:
        coverage, size = seen.class_coverage(k), seen.class_size(k)
        tested = sum(int(n[k]) for n in seen.count) / len(seen.count)
        kind = "bad" if max(shares[k]) < 1 - best.alpha else ""
        body.append(
            [
                Cell(names[k]),
                Cell(_spread(coverage.mean, coverage.std, shares[k], 3), kind),
                Cell(f"{size.mean:.2f} ± {size.std:.2f}"),
                Cell(f"{tested:.0f}"),
            ]
        )
    left = len(shares) - len(worst)
    points = [(seen.class_coverage(k).mean, min(shares[k]), max(shares[k])) for k in worst]
    return Section(
        "Coverage by class",
        f"Of {name_of(best)}. The promise is marginal: nothing is promised per class. Hard classes may be covered less often, easy "
        "ones more.",
        Table(["true class", "coverage, clean", "mean size", "inputs per split"], body),
        [
            Figure(
                "coverage-by-class",
                plots.coverage_by_class([names[k] for k in worst], points, best.alpha),
                "Coverage of every class, with the range over splits; dotted, the promised average.",
                f"Coverage by class, from {points[0][0]:.3f} for {names[worst[0]]} to {points[-1][0]:.3f} for {names[worst[-1]]}; "
                f"the promised average is {1 - best.alpha:g}.",
            )
        ],
        note="Mean ± standard deviation and [lowest, highest] over splits; in red, classes below the promised average in every "
        "split." + (f" The {len(worst)} classes of lowest coverage; {left} more are not shown." if left else ""),
    )


def _cost(rows: Sequence[Row], promise: Guarantee) -> Section:
    body = [
        [
            Cell(name_of(row)),
            Cell(f"{row.draws:,}"),
            Cell(f"{row.calibration_draws:,}"),
            Cell(f"{row.calibration_draws * row.guarantee.n:,}"),
        ]
        for row in rows
        if row.guarantee is not None
    ]
    return Section(
        "What it costs",
        "Model evaluations: the price of a promise that a predictor of its own would pay. Here all methods share the same logits.",
        Table(["method", "per query", "per calibration point", "in all for calibration"], body),
        note=f"{promise.n} calibration points for the method of the sentence above; those that need no holdout calibrate on it too.",
    )
