"""From names to files: compute, write rows and manifest, then tables and pictures where the extras are at hand."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepcover.errors import InputError
from keepcover.evaluation.manifest import manifest, write_results
from keepcover.files import check_folder, write_file
from keepcover.paper.reproduce import show
from keepcover.paper.reproduce.cells import Table
from keepcover.paper.reproduce.figures import DRAWS, FROM_TABLES, Figure, figures
from keepcover.paper.reproduce.material import Material
from keepcover.paper.reproduce.paper import tables
from keepcover.paper.reproduce.runner import Computed, Say, capped, compute, rows_of


def catalogue() -> dict[str, Table | Figure]:
    """Everything that can be reproduced, by name."""
    return {**tables(), **figures()}


def chosen(names: Sequence[str]) -> dict[str, Table | Figure]:
    """What was asked for; ``all`` is everything."""
    known = catalogue()
    if not names:
        raise InputError("say what to reproduce: names from --list, or all")
    unknown = [name for name in names if name not in known and name != "all"]
    if unknown:
        raise InputError(f"nothing is called {unknown[0]!r}; there are {', '.join(known)} and all")
    return known if "all" in names else {name: known[name] for name in names}


@dataclass
class Run:
    """One reproduction: where results go and how."""

    material: Material
    out: Path
    splits: int = 50
    draws: int | None = None
    resume: bool = False
    say: Say = print

    def config(self) -> dict[str, Any]:
        m = self.material
        return {
            "images": m.images,
            "draws": self.draws,
            "seed": m.seed,
            "splits": self.splits,
            "holdout": m.holdout,
            "device": m.device,
            "compile": m.compile,
            "attack": {"images": m.attack_images, "steps": m.attack_steps, "draws": m.attack_draws},
        }

    def reproduce(self, names: Sequence[str], command: str) -> list[Path]:
        """Compute what was asked for and write ``NAME.json`` each; returns the files, written now or before.

        Under ``all``, what lacks its data or weights is passed over and said; asked for by name, it is an error.
        """
        files, known, skipped = [], Computed(), []
        for name, item in chosen(names).items():
            path = self.out / f"{name}.json"
            if self.resume and self._done(path):
                self.say(f"{name}: done before")
                files.append(path)
                continue
            check_folder(self.out, path.name)
            self.say(f"{name}: {item.title}")
            start = time.monotonic()
            try:
                rows = self._rows(item, known)
            except InputError as error:
                if "all" not in names:
                    raise
                skipped.append(name)
                self.say(f"  passed over: {error}")
                continue
            about = manifest(command, self.config(), time.monotonic() - start) | {"inputs": dict(self.material.used)}
            write_results(path, rows, {**about, "title": item.title, "where": item.where, "note": item.note})
            files.append(path)
        if skipped:
            self.say(f"passed over: {', '.join(skipped)}")
        return files

    def _rows(self, item: Table | Figure, known: Computed) -> list[dict[str, Any]]:
        if isinstance(item, Figure):
            return item.compute(self.material, min(DRAWS, self.draws or DRAWS))
        cells = capped(item.cells, self.draws)
        if not cells:
            raise InputError(f"{item.name} is about more than {self.draws} draws; ask for more with --draws")
        compute(cells, self.material, known, splits=self.splits, most=self.draws, say=self.say)
        return rows_of(cells, item, known)

    def _done(self, path: Path) -> bool:
        """Whether the file holds a run with these settings, on these data and weights."""
        try:
            about = json.loads(path.read_text())["manifest"]
            same = about["config"] == json.loads(json.dumps(self.config()))
            return same and self.material.unchanged(about["inputs"])
        except (OSError, ValueError, KeyError, TypeError, InputError):
            return False


def draw(name: str, rows: Sequence[dict[str, Any]]) -> Any | None:
    """The matplotlib figure of a result, where it has one."""
    drawings = {**FROM_TABLES, **{figure.name: figure.draw for figure in figures().values()}}
    return drawings[name](rows) if name in drawings else None


def write_page(path: Path) -> list[Path]:
    """Markdown, HTML and pictures beside a result's JSON file."""
    from keepcover.pages import plots
    from keepcover.pages.report import Cell, Page, Section, origin_section
    from keepcover.pages.report import Figure as Picture
    from keepcover.pages.report import Table as Grid

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
        table = Grid(head, [[Cell(entry) for entry in line] for line in body])
    figure = draw(name, rows)
    if figure is not None:
        pictures.append(Picture(name, figure, about["title"]))
        written += plots.write_files(figure, path.parent, name)
    section = Section("Beside the paper", f"The paper: {about['where']}.", table, pictures, note=about.get("note", ""))
    origin = {
        "rows": path.name,
        "command": about["command"],
        "configuration": _words(about["config"]),
        "computed with": _words(about["versions"]),
        "source": about.get("source"),
        "commit": about["commit"],
        "computed on": about["date"],
    }
    known = {key: value for key, value in origin.items() if value is not None}
    page = Page(about["title"], facts(about), sections=[section, origin_section(known)])
    written.append(page.write(path.with_suffix(".html")))
    return written


def _words(values: dict[str, Any]) -> str:
    """A dictionary as a reader would write it, without what was left to its default."""
    return ", ".join(
        f"{key} ({_words(value)})" if isinstance(value, dict) else f"{key} {value}"
        for key, value in values.items()
        if value is not None
    )


def facts(about: dict[str, Any]) -> str:
    """How the numbers were made, in one line."""
    config = about["config"]
    where = about["hardware"]["gpu"] or f"{about['hardware']['threads']} CPU threads"
    return f"{config['splits']} splits, seed {config['seed']}, holdout {config['holdout']}; {about['seconds']:g} s on {where}."
