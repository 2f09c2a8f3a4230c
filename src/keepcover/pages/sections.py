"""The sections that pages share, each written once: curves, sizes, classes, costs, and methods under attack."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from keepcover.attacks.audit import Audit, AuditRow
from keepcover.guarantee import Guarantee
from keepcover.noise import Threat, get_norm
from keepcover.pages import plots
from keepcover.pages.report import Cell, Example, Figure, Section, Table
from keepcover.tasks import PredictionSets

MOST_CLASSES = 30
MOST_PANELS = 6


def reach(threat: Threat, radius: float) -> str:
    """A radius as the threat measures it: ``L2 0.125``."""
    return replace(threat, epsilon=radius).reach


def radius_axis(threat: Threat, name: str = "epsilon") -> str:
    """What stands below an axis of radii."""
    return f"{name} ({get_norm(str(threat.norm)).short}, units of the inputs)"


def evaluations(draws: int) -> str:
    """The price of a query in words."""
    return f"{draws} model evaluation{'' if draws == 1 else 's'} per query"


# -- curves, sizes, classes, costs -------------------------------------------------------------------------------------


def curve_words(curves: Mapping[str, plots.Curve], form: str = ".2f") -> str:
    """Curves as a sentence: every line's first and last point.

    Example:
        >>> curve_words({"exact": [(0.0, 1.2), (0.25, 1.5)], "rcp1": [(0.0, 2.0)]})
        'exact: 1.20 at 0, 1.50 at 0.25; rcp1: 2.00 at 0'
    """

    def words(points: plots.Curve) -> str:
        ends = [points[0]] if len(points) == 1 else [points[0], points[-1]]
        return ", ".join(f"{format(point[1], form)} at {point[0]:g}" for point in ends)

    return "; ".join(f"{name}: {words(points)}" for name, points in curves.items())


def curve_figures(
    name: str, curves: Mapping[str, plots.Curve], draw: Callable[[Any], Any], caption: str, form: str = ".2f"
) -> list[Figure]:
    """A figure for every few curves; ``draw`` makes it of them."""
    groups = plots.in_groups(curves)
    return [
        Figure(
            name if number == 1 else f"{name}-{number}",
            draw(group),
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
    lines: Sequence[tuple[str, tuple[float, float, float], Sequence[str]]],
    promise: Guarantee,
    head: Sequence[str],
    ranges: str,
    note: str,
    whose: str = "",
    unit: str = "class",
) -> Section:
    """Coverage by true class (or group), the worst first: (name, (mean, low, high), cells of the table) of every class.

    A class is marked where all of its range lies below what is promised; ``ranges`` says what the range is.
    """
    alpha, own, plural = promise.alpha, promise.promise.partition, "classes" if unit == "class" else f"{unit}s"
    promised = f"what is promised to every {unit}" if own and own.unit == unit else "the promised average"
    text = f"The promise is an average: nothing is promised per {unit}. Some may be covered less often, others more."
    if own and own.unit == unit:
        text = f"The promise is made to every {unit}: each has a threshold of its own."
    elif own and own.unit == "cluster":
        text = "The promise is made to every cluster of classes, and is an average over the classes of a cluster."
    worst = sorted(lines, key=lambda line: line[1][0])[:MOST_CLASSES]
    rows = [
        [name, Cell(cells[0], "bad" if high < 1 - alpha else ""), *cells[1:]] for name, (_, _, high), cells in worst
    ]
    (first, (lowest, *_), _), (last, (highest, *_), _) = worst[0], worst[-1]
    left = len(lines) - len(worst)
    figure = Figure(
        f"coverage-by-{unit}",
        plots.coverage_by_class([name for name, _, _ in worst], [share for _, share, _ in worst], alpha),
        f"Coverage of every {unit}, with {ranges}; dotted, {promised}.",
        f"Coverage by {unit}, from {lowest:.3f} for {first} to {highest:.3f} for {last}; {promised} is {1 - alpha:g}.",
    )
    return Section(
        f"Coverage by {unit}",
        whose + text,
        Table(["true class" if unit == "class" else unit, *head], rows),
        [figure],
        note=note + (f" The {len(worst)} {plural} of lowest coverage; {left} more are not shown." if left else ""),
    )


def cost_section(promises: Mapping[str, Guarantee], note: str = "", held: int = 0) -> Section:
    """Model evaluations per query and for calibration, in which ``held`` more points took part."""
    rows = []
    for name, promise in promises.items():
        per_point = promise.calibration_draws or promise.draws
        rows.append([name, f"{promise.draws:,}", f"{per_point:,}", f"{per_point * (promise.n + held):,}"])
    return Section(
        "What it costs",
        "Every query is answered from noisy copies of the input: model evaluations are the price of the promise.",
        Table(["method", "per query", "per calibration point, paid once", "in all for calibration"], rows),
        note=note,
    )


# -- under attack ------------------------------------------------------------------------------------------------------


def interval(coverage: dict[str, Any]) -> str:
    return f"{coverage['mean']:.3f} [{coverage['low']:.3f}, {coverage['high']:.3f}]"


def _verdict(verdict: str) -> Cell:
    return Cell(verdict, "bad" if "lost" in verdict or verdict == "violated" else "")


def conclusion(rows: Sequence[dict[str, Any]], alpha: float, within: str) -> str:
    """What an audit's rows show, in a sentence or two; the attack stays ``within`` a radius."""
    certified = [row for row in rows if row["certified"]]
    others = [row for row in rows if not row["certified"]]
    said = []
    if others:
        worst = min(others, key=lambda row: row["attacked_coverage"]["mean"])
        said.append(
            f"Attacked within {within}, {worst['name']} covers {worst['attacked_coverage']['mean']:.1%}; its {1 - alpha:.0%} were "
            "promised for clean inputs only."
        )
    broken = [row["name"] for row in certified if row["verdict"] == "violated"]
    if broken:
        said.append(f"A certified promise is violated: {', '.join(broken)}.")
    elif certified:
        best = min(certified, key=lambda row: row["attacked_size"])
        least = min(row["attacked_coverage"]["mean"] for row in certified)
        who = (
            f"all {len(certified)} certified methods" if len(certified) > 1 else f"the certified method {best['name']}"
        )
        said.append(
            f"What was observed is consistent with the {1 - alpha:.0%} that {who} promised under attack (lowest: {least:.1%}). The "
            f"smallest sets, {best['attacked_size']:.2f} labels under attack, are those of {best['name']}, from "
            f"{evaluations(best['draws'])}."
        )
    return " ".join(said)


def methods_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Clean and attacked coverage and size of every method; what it comes to stands first, on a phone too."""
    head = ["method", "verdict", "certified", "draws"]
    head += ["coverage, clean", "size", "coverage, attacked", "size, attacked"]
    body = []
    for row in rows:
        verdict, kept = _verdict(row["verdict"]), "good" if row["certified"] else ""
        certified = Cell("yes" if row["certified"] else "no", kept)
        attacked = Cell(interval(row["attacked_coverage"]), verdict.kind or kept)
        clean = [str(row["draws"]), interval(row["coverage"]), f"{row['size']:.2f}"]
        body.append([row["name"], verdict, certified, *clean, attacked, f"{row['attacked_size']:.2f}"])
    return Table(head, body)


def attack_figures(rows: Sequence[dict[str, Any]], alpha: float, within: str) -> list[Figure]:
    """Coverage and size of every method, clean and attacked, a figure each."""
    figures = []
    for what, title in (("coverage", "Coverage"), ("size", "Mean set size")):
        pairs = ((row["name"], row[what], row[f"attacked_{what}"]) for row in rows)
        words = [
            f"{name}: {clean['mean']:.3f} and {attacked['mean']:.3f}"
            if what == "coverage"
            else f"{name}: {clean:.2f} and {attacked:.2f}"
            for name, clean, attacked in pairs
        ]
        caption = f"{title}, clean and attacked within {within}."
        drawing = plots.clean_and_attacked(rows, alpha, [what])
        figures.append(Figure(f"{what}-clean-and-attacked", drawing, caption, f"{caption} {'; '.join(words)}."))
    return figures


def audit_table(found: Sequence[AuditRow]) -> Table:
    """Every attack on every predictor: observation, p-value and verdict."""
    rows = []
    for row in found:
        seen = [row.attack, f"{row.radius:g}", interval(row.coverage), f"{row.size:.2f}", f"{row.p_value:.2g}"]
        rows.append([row.name, _verdict(row.verdict), *seen])
    return Table(["predictor", "verdict", "attack", "radius", "coverage", "size", "p-value"], rows)


def audit_section(audit: Audit) -> Section:
    """What was promised and what was observed."""
    return Section(
        "The audit: what was promised, what was observed",
        "Every predictor met the same images, clean and attacked. The attacker knows the model, the noise level and the "
        "thresholds, but not the noise that the defender draws.",
        audit_table(audit.rows),
        note="The p-value is the probability of covering this few images or fewer if the promise held, by the law that "
        "includes the luck of the calibration draw; below 0.001 a promise counts as violated.",
    )


def audit_examples(audit: Audit, weak: str, certified: str, radius: float, count: int = 6) -> Section | None:
    """Images on which the first predictor lost the label and the second kept it, with both sets."""
    attacks = ("none", 0.0), ("softmax", radius)
    found = [audit.sets.get((name, attack, r)) for name in (weak, certified) for attack, r in attacks]
    sets = [one for one in found if isinstance(one, PredictionSets)]
    if len(sets) < 4 or not picturable(audit.images):
        return None
    weak_clean, weak_attacked, kept_clean, kept_attacked = sets
    lost = weak_clean.covers(audit.labels) & ~weak_attacked.covers(audit.labels) & kept_attacked.covers(audit.labels)

    def text(what: str, first: PredictionSets, second: PredictionSets, i: int) -> str:
        one, other = (set_words(sets.rows()[i]["labels"]) for sets in (first, second))
        return f"{what}: {weak} {one}, {certified} {other}"

    names, examples = weak_clean.class_names or range(len(weak_clean.mask[0])), []
    for i in lost.nonzero()[:count, 0].tolist():
        clean = audit.images[i], text("clean", weak_clean, kept_clean, i)
        attacked = audit.attacked[weak, "softmax", radius][i], text("attacked", weak_attacked, kept_attacked, i)
        examples.append(Example(f"truth: {names[int(audit.labels[i])]}", [clean, attacked]))
    words = f"Images on which {weak} lost the true label under its attack while {certified} kept it under its own."
    return Section("Before and after", words, examples=examples) if examples else None


# -- examples ----------------------------------------------------------------------------------------------------------


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
    shown = ", ".join(map(str, labels[:most]))
    return f"{{{shown} and {len(labels) - most} more}}" if len(labels) > most else f"{{{shown}}}"
