"""One self-contained page about predictors under attack: what each promised, what was observed, labels lost and kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from keepcover.attacks.audit import Audit, AuditRow
from keepcover.noise import get_norm
from keepcover.pages import plots
from keepcover.pages.report import Cell, Example, Figure, Page, Section, Table, hardware
from keepcover.pages.sections import curve_figures, evaluations, interval, picturable, radius_axis, set_words
from keepcover.tasks import PredictionSets


def audit_page(
    audit: Audit,
    about: str,
    *,
    title: str = "Audit: promises under attack",
    rows: Sequence[dict[str, Any]] | None = None,
    text: str = "",
    more: Sequence[Section] = (),
    origin: Mapping[str, Any] | None = None,
) -> Page:
    """The page of an audit; its promise is that of the last certified predictor, its radius that predictor's epsilon.

    Args:
        audit: what :func:`keepcover.audit` returned.
        about: what was attacked, by what, for the line below the title.
        title: of the page.
        rows: one per predictor, as :meth:`Audit.summary` gives them, which is the default.
        text: what the first section says of models and data.
        more: sections that stand behind the first.
        origin: facts about this audit: model, data, seed.
    """
    first = audit.rows[0]
    radii = sorted({row.radius for row in audit.rows if row.radius > 0})
    radius = first.epsilon if first.epsilon in radii or not radii else radii[-1]
    rows = audit.summary(radius) if rows is None else rows
    certified = {row["name"]: row["certified"] for row in rows}
    kept = [name for name in certified if certified[name]]
    promise = audit.sets[(kept or [first.name])[-1], "none", 0.0].guarantee
    alpha, within = promise.alpha, get_norm(str(promise.threat.norm)).reach(radius)
    pictures = attack_figures(rows, alpha, within)
    if len(radii) > 1:
        pictures += curve_figures(
            "coverage-by-radius",
            {name: _worst(audit, name) for name in certified},
            certified,
            radius_axis(promise.threat, "attack radius"),
            "Coverage by attack radius; dotted, the promise.",
            promised=[1 - alpha],
        )
    weakest = min(rows, key=lambda row: row["attacked_coverage"]["mean"])["name"]
    attacks = ", ".join(dict.fromkeys(row.attack for row in audit.rows if row.attack != "none")) or "none"
    page = Page(title, f"{about}, {hardware()}", promise, conclusion=conclusion(rows, alpha, within))
    page.sections += [
        Section(
            "Clean and attacked",
            f"{text}Attacked within {within}; the worst of the attacks is shown.",
            methods_table(rows),
            pictures,
            note="Coverage with 95 % Clopper-Pearson intervals. Certified methods promise it under attack, the others on clean data only.",
        ),
        *more,
        audit_section(
            audit.rows,
            "The audit: what was promised, what was observed",
            "Every predictor met the same images. The attacker knows model, noise level and thresholds, but not the noise that is drawn.",
        ),
        *(audit_examples(audit, weakest, kept[-1], radius) if kept else ()),
    ]
    return page.closed({"attacks": attacks, **(origin or {})})


def _worst(audit: Audit, name: str) -> list[tuple[float, ...]]:
    """Radius and lowest coverage of one predictor."""
    own = [row for row in audit.rows if row.name == name]
    radii = sorted({row.radius for row in own})
    return [(radius, min(row.coverage["mean"] for row in own if row.radius == radius)) for radius in radii]


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
        many = len(certified) > 1
        who = f"all {len(certified)} certified methods" if many else f"the certified method {best['name']}"
        said.append(
            f"What was observed is consistent with the {1 - alpha:.0%} that {who} promised under attack (lowest: {least:.1%}). The "
            f"smallest sets under attack, {best['attacked_size']:.2f} labels, are those of {best['name']}, from {evaluations(best['draws'])}."
        )
    return " ".join(said)


def _verdict(verdict: str) -> Cell:
    return Cell(verdict, "bad" if "lost" in verdict or verdict == "violated" else "")


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
    forms = ("coverage", "Coverage", "{0[mean]:.3f} and {1[mean]:.3f}"), ("size", "Mean set size", "{:.2f} and {:.2f}")
    for what, title, form in forms:
        words = "; ".join(f"{row['name']}: {form.format(row[what], row[f'attacked_{what}'])}" for row in rows)
        caption = f"{title}, clean and attacked within {within}."
        drawing = plots.clean_and_attacked(rows, alpha, [what])
        figures.append(Figure(f"{what}-clean-and-attacked", drawing, caption, f"{caption} {words}."))
    return figures


def audit_table(found: Sequence[AuditRow]) -> Table:
    """Every attack on every predictor: observation, p-value and verdict."""
    rows = []
    for row in found:
        seen = [row.attack, f"{row.radius:g}", interval(row.coverage), f"{row.size:.2f}", f"{row.p_value:.2g}"]
        rows.append([row.name, _verdict(row.verdict), *seen])
    return Table(["predictor", "verdict", "attack", "radius", "coverage", "size", "p-value"], rows)


def audit_section(rows: Sequence[AuditRow], title: str, text: str) -> Section:
    """What was promised and what was observed."""
    note = (
        "The p-value is the probability of covering this few inputs or fewer if the promise held, by the law that includes the "
        "luck of the calibration draw; below 0.001 a promise counts as violated. An audit can find a broken promise; it proves none."
    )
    return Section(title, text, audit_table(rows), note=note)


def audit_examples(audit: Audit, weak: str, certified: str, radius: float, count: int = 6) -> list[Section]:
    """Images on which the first predictor lost the label and the second kept it, with both sets; none where there are none."""
    attacks = ("none", 0.0), ("softmax", radius)
    found = [audit.sets.get((name, attack, r)) for name in (weak, certified) for attack, r in attacks]
    sets = [one for one in found if isinstance(one, PredictionSets)]
    if len(sets) < 4 or not picturable(audit.images):
        return []
    weak_clean, weak_attacked, _, kept_attacked = sets
    lost = weak_clean.covers(audit.labels) & ~weak_attacked.covers(audit.labels) & kept_attacked.covers(audit.labels)
    names, examples = weak_clean.class_names or range(len(weak_clean.mask[0])), []
    for i in lost.nonzero()[:count, 0].tolist():
        own, own_attacked, other, other_attacked = (set_words(one[i].rows()[0]["labels"]) for one in sets)
        clean = audit.images[i], f"clean: {weak} {own}, {certified} {other}"
        moved = audit.attacked[weak, "softmax", radius][i]
        attacked = moved, f"attacked: {weak} {own_attacked}, {certified} {other_attacked}"
        examples.append(Example(f"truth: {names[int(audit.labels[i])]}", [clean, attacked]))
    words = f"Images on which {weak} lost the true label under its attack while {certified} kept it under its own."
    return [Section("Before and after", words, examples=examples)] if examples else []
