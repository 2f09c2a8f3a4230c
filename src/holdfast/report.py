"""Rows and figures -> one self-contained HTML page that opens offline."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from holdfast.artifact import make_folder, write_atomically
from holdfast.audit import Audit
from holdfast.errors import InputError


@dataclass(frozen=True)
class Cell:
    """A table cell; ``kind`` is ``good``, ``bad`` or empty."""

    text: str
    kind: str = ""


@dataclass(frozen=True)
class Table:
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True)
class Figure:
    svg: str
    caption: str


@dataclass(frozen=True)
class Section:
    """A heading with text, a table, figures, a list and a note, each optional."""

    title: str
    text: str = ""
    table: Table | None = None
    figures: Sequence[Figure] = ()
    points: Sequence[str] = ()
    note: str = ""


@dataclass
class Page:
    title: str
    subtitle: str
    guarantee: str = ""
    sections: list[Section] = field(default_factory=list)

    def html(self) -> str:
        try:
            from jinja2 import Environment, PackageLoader
            from markupsafe import Markup
        except ImportError:
            raise InputError("HTML reports need jinja2: pip install 'holdfast[report]'") from None
        environment = Environment(
            loader=PackageLoader("holdfast"), autoescape=True, trim_blocks=True, lstrip_blocks=True
        )
        sections = [
            {**section.__dict__, "figures": [{"svg": Markup(f.svg), "caption": f.caption} for f in section.figures]}
            for section in self.sections
        ]
        template = environment.get_template("report.html")
        return template.render(title=self.title, subtitle=self.subtitle, guarantee=self.guarantee, sections=sections)

    def write(self, path: Path) -> Path:
        make_folder(path.parent)
        write_atomically(path, self.html().encode())
        return path


def interval(coverage: dict[str, Any]) -> str:
    return f"{coverage['mean']:.3f} [{coverage['low']:.3f}, {coverage['high']:.3f}]"


def hardware() -> str:
    """Where the numbers were made."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{torch.get_num_threads()} CPU threads"
    return f"{device}, Python {platform.python_version()}, torch {torch.__version__}"


def methods_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Clean and attacked coverage and size of every method."""
    head = [
        "method",
        "certified",
        "draws",
        "coverage, clean",
        "size",
        "coverage, attacked",
        "size, attacked",
        "verdict",
    ]
    body = []
    for row in rows:
        bad = "lost" in row["verdict"] or row["verdict"] == "violated"
        body.append(
            [
                Cell(row["name"]), Cell("yes" if row["certified"] else "no", "good" if row["certified"] else ""),
                Cell(str(row["draws"])), Cell(interval(row["coverage"])), Cell(f"{row['size']:.2f}"),
                Cell(interval(row["attacked_coverage"]), "bad" if bad else "good"), Cell(f"{row['attacked_size']:.2f}"),
                Cell(row["verdict"], "bad" if bad else ""),
            ]
        )  # fmt: skip
    return Table(head, body)


def audit_table(audit: Audit) -> Table:
    """Every attack on every predictor."""
    head = ["predictor", "attack", "radius", "coverage", "size", "p-value", "verdict"]
    body = [
        [
            Cell(row.name), Cell(row.attack), Cell(f"{row.radius:g}"), Cell(interval(row.coverage)), Cell(f"{row.size:.2f}"),
            Cell(f"{row.p_value:.2g}"),
            Cell(row.verdict, "bad" if "lost" in row.verdict or row.verdict == "violated" else ""),
        ]
        for row in audit.rows
    ]  # fmt: skip
    return Table(head, body)


def audit_section(audit: Audit) -> Section:
    """The audit's own section: promise, observation, p-value and verdict."""
    return Section(
        "The audit: what was promised, what was observed",
        "Every predictor met the same images, clean and attacked. The attacker knows the model, the noise level and the "
        "thresholds, but not the noise that the defender draws.",
        audit_table(audit),
        note="The p-value is the probability of covering this few images or fewer if the promise held, by the law that "
        "includes the luck of the calibration draw; below 0.001 a promise counts as violated.",
    )


def audit_examples(audit: Audit, vanilla: str, certified: str, radius: float, count: int = 6) -> Section | None:
    """Images on which the first predictor lost the label and the second kept it, with both sets."""
    from holdfast import plots

    keys = (vanilla, "softmax", radius), (certified, "softmax", radius)
    if any(key not in audit.sets for key in keys):
        return None
    index = torch.arange(len(audit.labels))
    had = audit.sets[vanilla, "none", 0.0].mask[index, audit.labels]
    lost = ~audit.sets[keys[0]].mask[index, audit.labels]
    kept = audit.sets[keys[1]].mask[index, audit.labels]
    chosen = (had & lost & kept).nonzero()[:count, 0]
    if len(chosen) == 0:
        return None

    def caption(attack: tuple[str, float], i: int) -> str:
        lines = []
        for name in (vanilla, certified):
            names = next(iter(audit.sets[name, *attack][torch.tensor([i])]))
            lines.append(f"{name}:\n{{{', '.join(map(str, names)) if len(names) <= 4 else f'{len(names)} labels'}}}")
        return "\n".join(lines)

    names = audit.sets[keys[0]].class_names
    titles = [f"truth: {names[int(audit.labels[i])] if names else int(audit.labels[i])}" for i in chosen]
    captions = [(caption(("none", 0.0), int(i)), caption(("softmax", radius), int(i))) for i in chosen]
    figure = plots.examples(audit.images[chosen], audit.attacked[keys[0]][chosen], captions, titles)
    text = f"Images on which {vanilla} lost the true label under its attack while {certified} kept it under its own."
    return Section(
        "Before and after", text, figures=[Figure(plots.svg(figure), "Clean above, attacked below, sets underneath.")]
    )
