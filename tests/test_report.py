"""Pages: self-contained, escaped, complete; figures reproducible byte for byte and faithful to their numbers."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast import plots
from holdfast.audit import Audit, audit
from holdfast.calibration import calibrate
from holdfast.experiments.side_by_side import AuditRequest, summary_rows, write_audit
from holdfast.report import (
    Cell,
    Figure,
    Page,
    Section,
    Table,
    audit_examples,
    audit_section,
    audit_table,
    hardware,
    interval,
    methods_table,
)

from .test_smoothing import nearest, toy

EPSILON = 0.15


class Reader(HTMLParser):
    """Checks nesting and collects links, cells and text."""

    VOID = ("meta", "path", "use", "br", "img", "image", "link", "rect", "circle", "line")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.rows: list[list[str]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "action")]
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def parsed(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


def offline(page: str) -> None:
    """No script, no style or image from elsewhere: only fragments of the page itself and embedded data."""
    reader = parsed(page)
    assert all(link.startswith(("#", "data:")) for link in reader.links), reader.links
    assert not {"script", "link", "iframe", "object", "embed"} & set(reader.tags)
    assert not re.search(r"url\((?!#|['\"]?data:)", page)
    assert "@import" not in page


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return nearest()


@pytest.fixture(scope="module")
def report(model: nn.Module) -> Audit:
    """Vanilla conformal prediction loses labels here, the certified one keeps them."""
    shared: dict[str, Any] = {"epsilon": EPSILON, "seed": 1, "class_names": ["<zero>", "one", "two", "three"]}
    predictors = {
        "vanilla": calibrate(model, toy(200, seed=1), method="cp", sigma=0.0, draws=1, **shared),
        "certified & kept": calibrate(model, toy(200, seed=1), method="rcp1", sigma=0.15, **shared),
    }
    return audit(predictors, toy(60, seed=3), radii=[EPSILON, 0.05], steps=6, draws=4, seed=5, progress=False)


# -- pages -------------------------------------------------------------------------------------------------------------


def test_everything_is_escaped_but_figures() -> None:
    nasty = '<script>alert("x")</script> & more'
    page = Page(nasty, nasty, nasty)
    page.sections.append(
        Section(nasty, nasty, Table([nasty], [[Cell(nasty)]]), [Figure("<svg><g></g></svg>", nasty)], [nasty], nasty)
    )
    html = page.html()
    offline(html)
    assert "<svg><g></g></svg>" in html
    assert parsed(html).rows == [[nasty], [nasty]]
    assert "".join(parsed(html).text).count(nasty) >= 9


def test_parts_that_are_not_given_are_not_there() -> None:
    html = Page("title", "subtitle", sections=[Section("only a heading")]).html()
    body = html[html.index("<body") :]
    assert "only a heading" in body
    for tag in ("<table", "<figure", "<ul", 'class="lead"', 'class="note"'):
        assert tag not in body
    assert "a promise" in Page("title", "subtitle", "a promise").html()


def test_pages_are_written_whole(tmp_path: Path) -> None:
    page = Page("title", "subtitle")
    path = page.write(tmp_path / "new" / "folder" / "page.html")
    assert path.read_text() == page.html()
    assert [file.name for file in path.parent.iterdir()] == ["page.html"]
    assert page.html().startswith("<!doctype html>")
    assert '<html lang="en">' in page.html()


# -- tables ------------------------------------------------------------------------------------------------------------


def test_the_audit_table_is_the_audit(report: Audit) -> None:
    table = audit_table(report)
    assert len(table.rows) == len(report.rows) == 10
    for row, cells in zip(report.rows, table.rows):
        texts = [cell.text for cell in cells]
        assert len(texts) == len(table.head)
        assert texts[:3] == [row.name, row.attack, f"{row.radius:g}"]
        assert texts[3] == interval(row.coverage)
        assert (texts[-1], cells[-1].kind) == (row.verdict, "bad" if "lost" in row.verdict else "")
    assert {row.verdict for row in report.rows if row.name == "vanilla" and row.radius == EPSILON} == {
        "no promise, lost"
    }
    section = audit_section(report)
    assert section.table == table
    assert "luck of the calibration draw" in section.note


def test_the_methods_table_marks_what_was_lost(report: Audit) -> None:
    rows = summary_rows(report, EPSILON)
    table = methods_table(rows)
    vanilla, certified = table.rows
    assert (vanilla[1].text, certified[1].text, certified[1].kind) == ("no", "yes", "good")
    assert (vanilla[5].kind, certified[5].kind) == ("bad", "good")
    assert vanilla[5].text == interval(rows[0]["attacked_coverage"])
    assert all(len(row) == len(table.head) for row in table.rows)
    violated = methods_table([{**rows[1], "verdict": "violated"}]).rows[0]
    assert (violated[5].kind, violated[-1].kind) == ("bad", "bad")


def test_an_interval_is_written_with_its_ends() -> None:
    assert interval({"mean": 0.9, "low": 0.85678, "high": 0.95}) == "0.900 [0.857, 0.950]"
    assert "Python 3" in hardware()


# -- figures -----------------------------------------------------------------------------------------------------------


def figures(report: Audit) -> dict[str, Any]:
    rows, certified = summary_rows(report, EPSILON), {"a": True, "b": False}
    curves = {"a": [(0.0, 1.0), (0.1, 1.5)], "b": [(0.0, 1.1), (0.1, 3.9)]}
    return {
        "sizes": plots.size_curves(curves, 4, certified),
        "coverages": plots.coverage_curves({"a": [(0.0, 0.9), (0.1, 0.8)], "b": [(0.0, 0.9)]}, 0.1, certified),
        "densities": plots.score_densities(torch.linspace(0, 1, 50), torch.linspace(0, 1, 50) ** 4, 0.1),
        "bars": plots.clean_and_attacked(rows, 0.1),
        "examples": plots.examples(torch.rand(2, 3, 4, 4), torch.rand(2, 3, 4, 4), [("a", "b")] * 2, ["x", "y"]),
    }


def test_figures_are_reproducible_and_offline(report: Audit) -> None:
    """Twice the same figure is twice the same text, but for the random pixels of the examples."""
    one, two = ({name: plots.svg(figure) for name, figure in figures(report).items()} for _ in range(2))
    for name, text in one.items():
        assert text.startswith("<svg")
        offline(f"<html>{text}</html>")
        if name != "examples":
            assert text == two[name]


def test_figures_show_their_numbers(report: Audit) -> None:
    drawn = figures(report)
    lines = [line for line in drawn["sizes"].axes[0].get_lines() if line.get_label() in ("a", "b")]
    assert [(line.get_label(), list(line.get_ydata()), line.get_linestyle()) for line in lines] == [
        ("a", [1.0, 1.5], "-"), ("b", [1.1, 3.9], "--")
    ]  # fmt: skip
    assert drawn["sizes"].axes[0].get_ylim()[0] == 0
    rows = summary_rows(report, EPSILON)
    coverage, size = drawn["bars"].axes
    widths = [bar.get_width() for bar in coverage.patches]
    assert widths == [row["coverage"]["mean"] for row in rows] + [row["attacked_coverage"]["mean"] for row in rows]
    assert [bar.get_width() for bar in size.patches] == [row["size"] for row in rows] + [
        row["attacked_size"] for row in rows
    ]
    vertical = next(line for line in drawn["densities"].axes[0].get_lines())
    assert vertical.get_xdata()[0] == pytest.approx(float(torch.linspace(0, 1, 50).double().quantile(0.9)))
    for figure in drawn.values():
        plots.svg(figure)  # closes it


# -- the audit's own page ----------------------------------------------------------------------------------------------


def test_examples_are_labels_lost_by_one_and_kept_by_the_other(report: Audit) -> None:
    found = audit_examples(report, "vanilla", "certified & kept", EPSILON, count=2)
    assert found is not None
    assert "vanilla lost the true label" in found.text
    assert (
        audit_examples(report, "certified & kept", "certified & kept", EPSILON) is None
    )  # nobody loses what they keep
    assert audit_examples(report, "vanilla", "certified & kept", 0.77) is None  # no such radius
    assert audit_examples(report, "vanilla", "nobody", EPSILON) is None


def test_the_audit_page(report: Audit, tmp_path: Path) -> None:
    request = AuditRequest(data="toy", radii=(EPSILON, 0.05), epsilon=EPSILON, steps=6, attack_draws=4)
    path = write_audit(request, report, tmp_path / "out", 1.0)
    page = path.read_text()
    offline(page)
    reader = parsed(page)
    assert [row[0] for row in reader.rows].count("vanilla") == 1 + 5  # the summary, and every attack
    assert ["vanilla", "softmax", "0.15"] in [row[:3] for row in reader.rows]
    assert "&lt;zero&gt;" in page or "zero" not in page
    assert sorted(file.name for file in path.parent.iterdir()) == ["audit.html", "audit.json"]


def test_an_audit_without_an_attack_has_a_page_too(report: Audit, model: nn.Module, tmp_path: Path) -> None:
    """Radius 0 is a clean audit: a table, no attacked rows, no crash."""
    predictor = calibrate(model, toy(200, seed=1), method="rcp1", epsilon=0.0, sigma=0.15, seed=1)
    clean = audit(predictor, toy(60, seed=3), radii=[0.0], seed=5, progress=False)
    page = write_audit(AuditRequest(radii=(0.0,), epsilon=0.0), clean, tmp_path, 1.0).read_text()
    offline(page)
    assert "consistent" in page
