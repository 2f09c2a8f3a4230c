"""Rows and figures -> one self-contained HTML page that opens offline, in light and dark, on paper and on a phone."""

from __future__ import annotations

import base64
import platform
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import scipy
import torch
from torch import Tensor

from keepcover.attacks.audit import Audit
from keepcover.errors import InputError
from keepcover.files import make_folder, write_file
from keepcover.pages import plots

NARROW = 6.0  # inches; a wider figure takes the whole width of the page, and scrolls on a phone


@dataclass(frozen=True)
class Cell:
    """A table cell; ``kind`` is ``good``, ``bad`` or empty."""

    text: str
    kind: str = ""


@dataclass(frozen=True)
class Table:
    """The first cell of a row names it. ``facts`` are names with long values that wrap."""

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    facts: bool = False


@dataclass(frozen=True)
class Figure:
    """A drawing with its caption.

    Attributes:
        name: of its files, lower-case words joined by hyphens; no other figure of the page has it.
        drawing: what a function of :mod:`keepcover.pages.plots` returned.
        alt: its content in words, for readers who cannot see it; the caption by default.
    """

    name: str
    drawing: Any
    caption: str
    alt: str = ""

    @property
    def wide(self) -> bool:
        return bool(self.drawing.get_figwidth() > NARROW)

    @property
    def svg(self) -> str:
        return plots.page_svg(self.drawing, self.name)


@dataclass(frozen=True)
class Example:
    """Versions of one image [1 or 3, height, width], each with what is said of it; ``bad`` where the truth was missed."""

    title: str
    images: Sequence[tuple[Tensor, str]]
    bad: bool = False

    @property
    def shown(self) -> list[tuple[str, str]]:
        """Data URIs and texts."""
        return [
            (f"data:image/png;base64,{base64.b64encode(plots.pixels(image)).decode()}", text)
            for image, text in self.images
        ]


@dataclass(frozen=True)
class Section:
    """A heading with text, a table, figures, examples, a list and a note, each optional."""

    title: str
    text: str = ""
    table: Table | None = None
    figures: Sequence[Figure] = ()
    points: Sequence[str] = ()
    note: str = ""
    examples: Sequence[Example] = ()

    @property
    def anchor(self) -> str:
        """The part of the address that leads here."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-") or "section"


@dataclass
class Page:
    """A title, a line on what was looked at, the promise, sections; ``conclusion`` says in a sentence what they show."""

    title: str
    subtitle: str
    guarantee: str = ""
    sections: list[Section] = field(default_factory=list)
    conclusion: str = ""

    @property
    def figures(self) -> list[Figure]:
        return [figure for section in self.sections for figure in section.figures]

    def html(self) -> str:
        try:
            from jinja2 import Environment, PackageLoader
        except ImportError:
            raise InputError("HTML reports need jinja2: pip install '.[report]' in a checkout") from None
        environment = Environment(
            loader=PackageLoader("keepcover.pages"), autoescape=True, trim_blocks=True, lstrip_blocks=True
        )
        return environment.get_template("report.html").render(page=self, colors=plots.COLORS, dark=plots.DARK)

    def write(self, path: Path, figures: Path | None = None) -> Path:
        """Write the page, and its figures as SVG and PNG into a folder where one is named."""
        make_folder(path.parent)
        write_file(path, self.html().encode())
        if figures is not None:
            for figure in self.figures:
                plots.write_files(figure.drawing, figures, figure.name)
        return path


def curve_words(curves: Mapping[str, Sequence[tuple[float, ...]]], form: str = ".2f") -> str:
    """Curves as a sentence: every line's first and last point.

    Example:
        >>> curve_words({"exact": [(0.0, 1.2), (0.25, 1.5)], "rcp1": [(0.0, 2.0)]})
        'exact: 1.20 at 0, 1.50 at 0.25; rcp1: 2.00 at 0'
    """

    def words(points: Sequence[tuple[float, ...]]) -> str:
        ends = [points[0]] if len(points) == 1 else [points[0], points[-1]]
        return ", ".join(f"{format(point[1], form)} at {point[0]:g}" for point in ends)

    return "; ".join(f"{name}: {words(points)}" for name, points in curves.items())


def promise_section(assumptions: Sequence[str]) -> Section:
    return Section("What the promise rests on", points=assumptions)


def origin_section(facts: Mapping[str, Any]) -> Section:
    """Where the numbers come from: what is known, then versions, hardware and the day."""
    rows = [[Cell(key), Cell(str(value))] for key, value in {**facts, **made()}.items()]
    return Section("Where it comes from", table=Table(["fact", "value"], rows, facts=True))


def made() -> dict[str, str]:
    """With what and when this page was made."""
    import keepcover

    versions = {
        "keepcover": keepcover.__version__,
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "scipy": scipy.__version__,
    }
    return {
        "this page": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "hardware": f"{_device()}, {platform.machine()}",
    }


def _device() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"{threads} CPU thread{'s' if threads > 1 else ''}"


def interval(coverage: dict[str, Any]) -> str:
    return f"{coverage['mean']:.3f} [{coverage['low']:.3f}, {coverage['high']:.3f}]"


def hardware() -> str:
    """Where the numbers were made."""
    return f"{_device()}, Python {platform.python_version()}, torch {torch.__version__}"


def conclusion(rows: Sequence[dict[str, Any]], alpha: float, radius: float) -> str:
    """What an audit's rows show, in a sentence or two."""
    certified = [row for row in rows if row["certified"]]
    others = [row for row in rows if not row["certified"]]
    said = []
    if others:
        worst = min(others, key=lambda row: row["attacked_coverage"]["mean"])
        said.append(
            f"Attacked within L2 {radius:g}, {worst['name']} covers {worst['attacked_coverage']['mean']:.1%}; its {1 - alpha:.0%} were "
            "promised for clean inputs only."
        )
    broken = [row["name"] for row in certified if row["verdict"] == "violated"]
    if broken:
        said.append(f"A certified promise is violated: {', '.join(broken)}.")
    elif certified:
        best = min(certified, key=lambda row: row["attacked_size"])
        least = min(row["attacked_coverage"]["mean"] for row in certified)
        all_of = (
            f"all {len(certified)} certified methods" if len(certified) > 1 else f"the certified method {best['name']}"
        )
        evaluations = f"{best['draws']} model evaluation{'s' if best['draws'] > 1 else ''}"
        said.append(
            f"What was observed is consistent with the {1 - alpha:.0%} that {all_of} promised under attack (lowest: {least:.1%}). "
            f"The smallest sets, {best['attacked_size']:.2f} labels under attack, are those of {best['name']}, from {evaluations} per query."
        )
    return " ".join(said)


def methods_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Clean and attacked coverage and size of every method; what it comes to stands first, on a phone too."""
    head = [
        "method",
        "verdict",
        "certified",
        "draws",
        "coverage, clean",
        "size",
        "coverage, attacked",
        "size, attacked",
    ]
    body = []
    for row in rows:
        bad = "lost" in row["verdict"] or row["verdict"] == "violated"
        body.append(
            [
                Cell(row["name"]),
                Cell(row["verdict"], "bad" if bad else ""),
                Cell("yes" if row["certified"] else "no", "good" if row["certified"] else ""),
                Cell(str(row["draws"])),
                Cell(interval(row["coverage"])),
                Cell(f"{row['size']:.2f}"),
                Cell(interval(row["attacked_coverage"]), "bad" if bad else "good" if row["certified"] else ""),
                Cell(f"{row['attacked_size']:.2f}"),
            ]
        )
    return Table(head, body)


def attack_figures(rows: Sequence[dict[str, Any]], alpha: float, radius: float) -> list[Figure]:
    """Coverage and size of every method, clean and attacked, a figure each."""
    coverage = "; ".join(
        f"{row['name']}: {row['coverage']['mean']:.3f} and {row['attacked_coverage']['mean']:.3f}" for row in rows
    )
    size = "; ".join(f"{row['name']}: {row['size']:.2f} and {row['attacked_size']:.2f}" for row in rows)
    where = f"clean and attacked within L2 {radius:g}"
    return [
        Figure(
            f"{what}-clean-and-attacked",
            plots.clean_and_attacked(rows, alpha, [what]),
            f"{title}, {where}.",
            f"{title}, {where}. {words}.",
        )
        for what, title, words in (("coverage", "Coverage", coverage), ("size", "Mean set size", size))
    ]


def audit_table(audit: Audit) -> Table:
    """Every attack on every predictor."""
    head = ["predictor", "verdict", "attack", "radius", "coverage", "size", "p-value"]
    body = [
        [
            Cell(row.name),
            Cell(row.verdict, "bad" if "lost" in row.verdict or row.verdict == "violated" else ""),
            Cell(row.attack),
            Cell(f"{row.radius:g}"),
            Cell(interval(row.coverage)),
            Cell(f"{row.size:.2f}"),
            Cell(f"{row.p_value:.2g}"),
        ]
        for row in audit.rows
    ]
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
    keys = (vanilla, "softmax", radius), (certified, "softmax", radius)
    if any(key not in audit.sets for key in keys) or not picturable(audit.images):
        return None
    index = torch.arange(len(audit.labels))
    had = audit.sets[vanilla, "none", 0.0].mask[index, audit.labels]
    lost = ~audit.sets[keys[0]].mask[index, audit.labels]
    kept = audit.sets[keys[1]].mask[index, audit.labels]
    chosen = (had & lost & kept).nonzero()[:count, 0].tolist()
    if not chosen:
        return None
    names = audit.sets[keys[0]].class_names

    def text(what: str, attack: tuple[str, float], i: int) -> str:
        sets = [f"{name} {set_words(audit.sets[name, *attack].labels(names)[i])}" for name in (vanilla, certified)]
        return f"{what}: {', '.join(sets)}"

    def example(i: int) -> Example:
        truth = names[int(audit.labels[i])] if names else int(audit.labels[i])
        attacked = audit.attacked[keys[0]][i]
        return Example(
            f"truth: {truth}",
            [(audit.images[i], text("clean", ("none", 0.0), i)), (attacked, text("attacked", ("softmax", radius), i))],
        )

    words = f"Images on which {vanilla} lost the true label under its attack while {certified} kept it under its own."
    return Section("Before and after", words, examples=[example(i) for i in chosen])


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
