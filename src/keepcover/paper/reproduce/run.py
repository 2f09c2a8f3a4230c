"""From names to files: group cells by what they need, evaluate each group once, write rows and manifest, then pages."""

from __future__ import annotations

import json
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from keepcover.errors import InputError
from keepcover.evaluation import Entry, Row, evaluate_entries
from keepcover.evaluation.manifest import manifest, write_results
from keepcover.files import check_folder, write_file
from keepcover.pages import plots
from keepcover.pages.report import Figure, Page, Section, Table
from keepcover.paper.reproduce import show
from keepcover.paper.reproduce.figures import DRAWINGS, DRAWS, FIGURES
from keepcover.paper.reproduce.material import Material
from keepcover.paper.reproduce.tables import TABLES, Cell, Origin
from keepcover.tasks import Task


@dataclass(frozen=True)
class Item:
    """A table or figure of the paper: a table has cells, a figure a function in :data:`FIGURES`."""

    name: str
    title: str
    where: str
    note: str = ""
    needs: Sequence[str] = ()
    cells: Sequence[Cell] = ()

    @property
    def datasets(self) -> set[str]:
        return {*self.needs, *(cell.origin.dataset for cell in self.cells)}


@cache
def catalogue() -> dict[str, Item]:
    """Everything that can be reproduced, by name."""
    known = {}
    for name, about in tomllib.loads((Path(__file__).parent / "printed.toml").read_text()).items():
        paper = about.pop("printed", {})
        about.pop("digits", None)  # of closed forms, which read them themselves
        own = TABLES[name]() if name in TABLES else ()
        cells = [replace(cell, paper=paper.get(cell.row, {}).get(cell.column, {})) for cell in own]
        known[name] = Item(name, **about, cells=cells)
    return known


def chosen(names: Sequence[str]) -> dict[str, Item]:
    """What was asked for; ``all`` is everything."""
    known = catalogue()
    if not names:
        raise InputError("say what to reproduce: names from --list, or all")
    unknown = [name for name in names if name not in known and name != "all"]
    if unknown:
        raise InputError(f"nothing is called {unknown[0]!r}; there are {', '.join(known)} and all")
    return known if "all" in names else {name: known[name] for name in names}


def capped(cells: Sequence[Cell], most: int | None) -> list[Cell]:
    """The cells with at most so many draws, and their rows named accordingly.

    Those whose place names its draws, and those that mean nothing with so few, are left out.
    """
    if most is None:
        return list(cells)
    fewer = []
    for cell in cells:
        asked, draws = cell.entry, min(cell.entry.draws or most, most)
        named = "draws" in cell.row + cell.column or cell.column.startswith("N =")
        if draws < asked.method.least_draws or (named and draws != asked.draws):
            continue
        row = cell.row if draws == asked.draws else f"{cell.row}, {draws} draw{'s' if draws > 1 else ''}"
        calibration = asked.calibration_draws and min(asked.calibration_draws, most)
        fewer.append(replace(cell, row=row, entry=replace(asked, draws=draws, calibration_draws=calibration)))
    return fewer


@dataclass
class Run:
    """One reproduction: where results go and how; ``known`` are the rows computed so far, which tables share."""

    material: Material
    out: Path
    splits: int = 50
    draws: int | None = None
    resume: bool = False
    say: Callable[[str], None] = print
    known: dict[tuple[Origin, Entry, bool], Row] = field(default_factory=dict, init=False)

    def config(self) -> dict[str, Any]:
        m = self.material
        attack = {"images": m.attack_images, "steps": m.attack_steps, "draws": m.attack_draws}
        own = {name: getattr(m, name) for name in ("images", "seed", "holdout", "device", "compile")}
        return {**own, "draws": self.draws, "splits": self.splits, "attack": attack}

    def reproduce(self, names: Sequence[str], command: str) -> list[Path]:
        """Compute what was asked for and write ``NAME.json`` each; returns the files, written now or before.

        Under ``all``, what lacks its data or weights is passed over and said; asked for by name, it is an error.
        """
        files, skipped = [], []
        for name, item in chosen(names).items():
            path = self.out / f"{name}.json"
            if self.resume and self._done(path):
                self.say(f"{name}: done before")
            else:
                check_folder(self.out, path.name)
                self.say(f"{name}: {item.title}")
                start = time.monotonic()
                try:
                    rows = self._rows(item)
                except InputError as error:
                    if "all" not in names:
                        raise
                    skipped.append(name)
                    self.say(f"  passed over: {error}")
                    continue
                about = manifest(command, self.config(), time.monotonic() - start)
                about |= {"inputs": dict(self.material.used)}
                write_results(path, rows, about | {"title": item.title, "where": item.where, "note": item.note})
            files.append(path)
        if skipped:
            self.say(f"passed over: {', '.join(skipped)}")
        return files

    def _rows(self, item: Item) -> list[dict[str, Any]]:
        if item.name in FIGURES:
            return FIGURES[item.name](self.material, min(DRAWS, self.draws or DRAWS))
        cells = capped(item.cells, self.draws)
        if not cells:
            raise InputError(f"{item.name} is about more than {self.draws} draws; ask for more with --draws")
        return [{"table": item.name, **row} for row in self.rows(cells)]

    def rows(self, cells: Sequence[Cell]) -> list[dict[str, Any]]:
        """The cells with their numbers, as plain values; what is not known is computed."""
        self._compute([cell for cell in cells if (cell.origin, cell.entry, cell.attacked) not in self.known])
        return [
            {
                "row": cell.row,
                "column": cell.column,
                **{name: getattr(cell.origin, name) for name in ("head", "dataset", "weights")},
                **self.known[cell.origin, cell.entry, cell.attacked].to_dict(),
                **({} if cell.entry.method.transform is None else {"T": cell.entry.method.transform.T}),
                "paper": {key: cell.paper.get(key) for key in ("size", "size_std", "coverage", "coverage_std")},
            }
            for cell in cells
        ]

    def _available(self, cell: Cell) -> int:
        """Draws of the outputs that a cell is evaluated on: as many as rules are tuned on in the paper, or what the cell asks
        for where that is more; without noise all draws are one.
        """
        return max(min(DRAWS, self.draws or DRAWS), cell.entry.draws or 0) if cell.origin.sigma else 1

    def _compute(self, cells: Sequence[Cell]) -> None:
        """Evaluate the cells, those on the same outputs together."""
        longest: dict[Origin, int] = {}
        for cell in cells:
            longest[cell.origin] = max(longest.get(cell.origin, 0), self._available(cell))
        groups: dict[tuple[Origin, int, Task | None], list[Cell]] = {}
        for cell in cells:
            # A rule tuned on the holdout sees the draws it is tuned on; the others look at the first of however many there are.
            draws = self._available(cell) if cell.entry.method.uses_holdout else longest[cell.origin]
            # One pass of ImageNet's network serves all scores; in memory, the scores of one are dropped before the next.
            task = None if cell.origin.dataset == "imagenet" else cell.entry.task
            groups.setdefault((cell.origin, draws, task), []).append(cell)

        def order(group: tuple[Origin, int, Task | None]) -> tuple[Any, ...]:
            """Origin by origin and the most draws first, so that features are loaded once."""
            origin, draws, _ = group
            return origin.dataset, origin.sigma, -draws, origin.head, origin.epsilon

        for origin, draws, task in sorted(groups, key=order):
            mine = groups[origin, draws, task]
            self.say(f"  {origin.weights} {origin.head}, {draws} draws: {len(mine)} cells")
            radius = {cell.entry.epsilon for cell in mine if cell.attacked}  # one per network and table
            entries = list(dict.fromkeys(cell.entry for cell in mine))
            how: dict[str, Any] = {"splits": self.splits, "holdout": self.material.holdout, "seed": self.material.seed}
            attacked = self.material.attacked(origin, draws, *radius) if radius else None
            found = evaluate_entries(self.material.noisy(origin, draws), entries, **how, attacked=attacked)
            for one, rows in zip(entries, found, strict=True):
                self.known.update({(origin, one, row.attack != "none"): row for row in rows})

    def _done(self, path: Path) -> bool:
        """Whether the file holds a run with these settings, on these data and weights."""
        try:
            about = json.loads(path.read_text())["manifest"]
            return about["config"] == self.config() and self.material.unchanged(about["inputs"])
        except (OSError, ValueError, KeyError, TypeError, InputError):
            return False


def write_page(path: Path) -> list[Path]:
    """Markdown, HTML and pictures beside a result's JSON file."""
    content = json.loads(path.read_text())
    rows, about, name = content["rows"], content["manifest"], path.stem
    written: list[Path] = []
    table, pictures = None, []
    head, body = show.any_grid(rows)
    if head:
        lines = [f"# {about['title']}", "", f"{about['where']}. {facts(about)}", "", show.markdown(head, body), ""]
        better = show.improvements(rows)
        lines += ["Improvement over the baseline:", "", *(f"- {line}" for line in better), ""] if better else []
        written.append(path.with_suffix(".md"))
        write_file(written[-1], "\n".join(lines).encode())
        table = Table(head, body)
    if name in DRAWINGS:
        pictures.append(Figure(name, DRAWINGS[name](rows), about["title"]))
        written += plots.write_files(pictures[0].drawing, path.parent, name)
    section = Section("Beside the paper", f"The paper: {about['where']}.", table, pictures, note=about.get("note", ""))
    known = {"rows": path.name, "command": about["command"], "configuration": _words(about["config"])}
    known |= {"computed with": _words(about["versions"])}
    known |= {key: about[key] for key in ("source", "commit") if about.get(key)} | {"computed on": about["date"]}
    page = Page(about["title"], facts(about), sections=[section]).closed(known)
    return [*written, page.write(path.with_suffix(".html"))]


def _words(values: dict[str, Any]) -> str:
    """A dictionary as a reader would write it, without what was left to its default."""
    said = {key: f"({_words(value)})" if isinstance(value, dict) else value for key, value in values.items()}
    return ", ".join(f"{key} {value}" for key, value in said.items() if value is not None)


def facts(about: dict[str, Any]) -> str:
    """How the numbers were made, in one line."""
    config = about["config"]
    where = about["hardware"]["gpu"] or f"{about['hardware']['threads']} CPU threads"
    return f"{config['splits']} splits, seed {config['seed']}, holdout {config['holdout']}; {about['seconds']:g} s on {where}."
