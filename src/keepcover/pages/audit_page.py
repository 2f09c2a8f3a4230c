"""One self-contained page about predictors under attack: what each promised, what was observed, labels lost and kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from keepcover.attacks.audit import Audit
from keepcover.pages import plots
from keepcover.pages.report import Page, Section, hardware
from keepcover.pages.sections import (
    attack_figures,
    audit_examples,
    audit_section,
    conclusion,
    curve_figures,
    methods_table,
    radius_axis,
    reach,
)


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
    kept = [row["name"] for row in rows if row["certified"]]
    promise = audit.sets[(kept or [first.name])[-1], "none", 0.0].guarantee
    alpha, within = promise.alpha, reach(promise.threat, radius)
    pictures = attack_figures(rows, alpha, within)
    if len(radii) > 1:
        certified, axis = {row["name"]: row["certified"] for row in rows}, radius_axis(promise.threat, "attack radius")
        pictures += curve_figures(
            "coverage-by-radius",
            {name: _worst(audit, name) for name in certified},
            lambda group: plots.radius_curves(group, certified, axis, "coverage", [1 - alpha], (None, 1.01)),
            "Coverage by attack radius; dotted, the promise.",
            ".3f",
        )
    weakest = min(rows, key=lambda row: row["attacked_coverage"]["mean"])["name"]
    shown = audit_examples(audit, weakest, kept[-1], radius) if kept and kept[-1] != weakest else None
    attacks = ", ".join(dict.fromkeys(row.attack for row in audit.rows if row.attack != "none")) or "none"
    page = Page(title, f"{about}, {hardware()}", promise, conclusion=conclusion(rows, alpha, within))
    page.sections += [
        Section(
            "Clean and attacked",
            f"{text}Attacked within {within}; the worst of the attacks is shown.",
            methods_table(rows),
            pictures,
            note="Coverage with 95 % Clopper-Pearson intervals. A certified method makes its promise under attack, the others "
            "on clean data only.",
        ),
        *more,
        audit_section(audit),
        *([shown] if shown else []),
    ]
    return page.closed({"attacks": attacks, **(origin or {})})


def _worst(audit: Audit, name: str) -> list[tuple[float, ...]]:
    """Radius and lowest coverage of one predictor."""
    own = [row for row in audit.rows if row.name == name]
    radii = sorted({row.radius for row in own})
    return [(radius, min(row.coverage["mean"] for row in own if row.radius == radius)) for radius in radii]
