"""Rows and figures -> one self-contained HTML page that opens offline, in light and dark, on paper and on a phone."""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keepcover.assumption import CHECKED
from keepcover.errors import optional
from keepcover.evaluation.manifest import versions
from keepcover.files import make_folder, write_file
from keepcover.guarantee import Guarantee
from keepcover.pages import plots


class Cell(str):
    """Text in a table; ``kind`` is ``good``, ``bad`` or empty."""

    kind: str

    def __new__(cls, text: str, kind: str = "") -> Cell:
        cell = super().__new__(cls, text)
        cell.kind = kind
        return cell


@dataclass(frozen=True)
class Table:
    """The first text of a row names it; a :class:`Cell` has a colour. ``facts`` are names with long values that wrap."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
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


@dataclass(frozen=True)
class Example:
    """Versions of one image [1 or 3, height, width], each with what is said of it; ``bad`` where the truth was missed."""

    title: str
    images: Sequence[tuple[Tensor, str]]
    bad: bool = False


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

    def markdown(self) -> str:
        """The section as a model card has it: its words and its table, without pictures."""
        parts = [f"### {_plain(self.title)}", _plain(self.text)]
        if self.table is not None:
            rows = [self.table.head, ["---"] * len(self.table.head), *self.table.rows]
            parts.append("\n".join(f"| {' | '.join(map(_plain, row))} |" for row in rows))
        parts += ["\n".join(f"- {_plain(point)}" for point in self.points), _plain(self.note)]
        return "\n\n".join(part for part in parts if part)


def _plain(text: str) -> str:
    """Text that Markdown shows as it is, in one line.

    Example:
        >>> print(_plain("a|b *c* <d>"))
        a\\|b \\*c\\* \\<d>
    """
    return text if text == "---" else re.sub(r"([\\`*_<\[\]|#])", r"\\\1", " ".join(text.split()))


def rests_on(guarantee: Guarantee) -> Section:
    """Every assumption with how it is checked."""
    rows = [[str(one), CHECKED[one.by], one.how] for one in guarantee.assumptions]
    return Section("What the promise rests on", table=Table(["assumption", "checked", "how"], rows, facts=True))


@dataclass
class Page:
    """A title, a line on what was looked at, the promise, sections; ``conclusion`` says in a sentence what they show."""

    title: str
    subtitle: str
    guarantee: Guarantee | str = ""
    sections: list[Section] = field(default_factory=list)
    conclusion: str = ""

    @property
    def figures(self) -> list[Figure]:
        return [figure for section in self.sections for figure in section.figures]

    def _repr_html_(self) -> str:
        """The page in a frame of its own, so that its styles and the notebook's do not meet."""
        return f'<iframe srcdoc="{escape(self.html())}" style="width:100%;height:40em;border:0"></iframe>'

    def html(self) -> str:
        jinja = optional("jinja2", "HTML reports need jinja2", "report")
        how = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True}
        environment = jinja.Environment(loader=jinja.PackageLoader("keepcover.pages"), **how)
        return environment.get_template("report.html").render(page=self, plots=plots)

    def closed(self, facts: Mapping[str, Any]) -> Page:
        """The page with what its guarantee rests on and where its numbers come from at its end: what is known, then the
        day, versions and hardware of this page.
        """
        if isinstance(self.guarantee, Guarantee):
            self.sections.append(rests_on(self.guarantee))
        made = {
            "this page": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
            "hardware": f"{_device()}, {platform.machine()}",
        }
        rows = [[key, str(value)] for key, value in {**facts, **made}.items()]
        self.sections.append(Section("Where it comes from", table=Table(["fact", "value"], rows, facts=True)))
        return self

    def write(self, path: Path, figures: Path | None = None) -> Path:
        """Write the page, and its figures as SVG and PNG into a folder where one is named."""
        make_folder(path.parent)
        write_file(path, self.html().encode())
        if figures is not None:
            for figure in self.figures:
                plots.write_files(figure.drawing, figures, figure.name)
        return path


def hardware() -> str:
    """Where the numbers were made."""
    return f"{_device()}, Python {platform.python_version()}, torch {torch.__version__}"


def _device() -> str:
    threads = torch.get_num_threads()
    words = f"{threads} CPU thread{'s' if threads > 1 else ''}"
    return torch.cuda.get_device_name() if torch.cuda.is_available() else words
