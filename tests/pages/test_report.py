"""Pages: self-contained, escaped, complete; figures reproducible byte for byte and faithful to their numbers."""

from __future__ import annotations

import io
import re
from html import escape
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from keepcover.attacks.audit import Audit, audit
from keepcover.pages import plots
from keepcover.pages.audit_page import audit_examples, audit_page, audit_section, conclusion, methods_table
from keepcover.pages.report import Cell, Example, Figure, Page, Section, Table, hardware
from keepcover.pages.sections import interval
from keepcover.prediction.calibration import calibrate
from tests.pages.reader import offline, parsed
from tests.toys import nearest, toy

EPSILON = 0.15
NAMES = ["<zero>", "<one>", "<two>", "<three>"]
WITHIN = f"L2 {EPSILON:g}"


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return nearest()


@pytest.fixture(scope="module")
def report(model: nn.Module) -> Audit:
    """Vanilla conformal prediction loses labels here, the certified one keeps them."""
    shared: dict[str, Any] = {"epsilon": EPSILON, "seed": 1, "class_names": NAMES}
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
        Section(
            nasty,
            nasty,
            Table([nasty, ""], [[Cell(nasty), Cell(nasty)]]),
            [Figure("bars", plots.size_shares({"a": [0.4, 0.6]}), nasty, nasty)],
            [nasty],
            nasty,
            [Example(nasty, [(torch.rand(3, 2, 2), nasty)])],
        )
    )
    html = page.html()
    offline(html)
    assert html.count("<svg") == 1
    assert parsed(html).rows == [[nasty, ""], [nasty, nasty]]
    assert "".join(parsed(html).text).count(nasty) >= 12


def test_a_page_is_marked_up_for_those_who_do_not_see_it() -> None:
    table = Table(["", "coverage"], [[Cell("exact"), Cell("0.9", "good")]])
    figure = Figure("sizes", plots.size_shares({"a": [0.0, 1.0]}), "Sets by size.", "Three sets of one label.")
    example = Example("truth: cat", [(torch.rand(1, 2, 2), "{cat}")])
    html = Page(
        "title",
        "about",
        "a promise",
        [Section("What it's worth", "", table, [figure], examples=[example]), Section("Origin")],
    ).html()
    assert '<div class="scroll table" tabindex="0" role="region" aria-label="Table: What it&#39;s worth">' in html
    assert '<td></td><th scope="col">coverage</th>' in html
    assert '<th scope="row">exact</th><td class="good">0.9</td>' in html
    assert '<div role="img" aria-label="Three sets of one label."><svg' in html
    assert '<a href="#what-it-s-worth">' in html
    assert '<section id="what-it-s-worth" aria-labelledby="what-it-s-worth-title">' in html
    assert 'alt="Input, truth: cat"' in html
    assert re.search(r"@media screen and \(prefers-color-scheme: dark\)", html)
    assert "@media print" in html
    assert "default-src 'none'" in html


def test_figures_are_files_too(tmp_path: Path) -> None:
    drawing = plots.size_shares({"a": [0.0, 0.75, 0.25]})
    page = Page("title", "about", sections=[Section("one", figures=[Figure("set-sizes", drawing, "Sets by size.")])])
    page.write(tmp_path / "page.html", tmp_path / "new" / "figures")
    files = sorted(path.name for path in (tmp_path / "new" / "figures").iterdir())
    assert files == ["set-sizes.png", "set-sizes.svg"]
    assert (tmp_path / "new" / "figures" / "set-sizes.png").read_bytes().startswith(b"\x89PNG")
    saved = (tmp_path / "new" / "figures" / "set-sizes.svg").read_text()
    assert saved == plots.svg(drawing)
    assert "fill: #ffffff" in saved  # a page that embeds the file cannot give it a ground
    assert "var(" not in saved


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
    section = audit_section(report.rows, "Audit", "")
    table = section.table
    assert table is not None
    assert len(table.rows) == len(report.rows) == 10
    for row, cells in zip(report.rows, table.rows):
        texts = list(cells)
        assert len(texts) == len(table.head)
        assert (texts[1], cells[1].kind) == (row.verdict, "bad" if "lost" in row.verdict else "")
        assert (texts[0], *texts[2:4]) == (row.name, row.attack, f"{row.radius:g}")
        assert texts[4] == interval(row.coverage)
    assert {row.verdict for row in report.rows if row.name == "vanilla" and row.radius == EPSILON} == {
        "no promise, lost"
    }
    assert "luck of the calibration draw" in section.note


def test_the_methods_table_marks_what_was_lost(report: Audit) -> None:
    rows = report.summary(EPSILON)
    table = methods_table(rows)
    vanilla, certified = table.rows
    assert (vanilla[2], certified[2], certified[2].kind) == ("no", "yes", "good")
    assert (vanilla[6].kind, certified[6].kind) == ("bad", "good")
    assert vanilla[6] == interval(rows[0]["attacked_coverage"])
    lucky = methods_table([{**rows[0], "verdict": "no promise"}]).rows[0]
    assert lucky[6].kind == ""  # what is not promised is not praised
    assert all(len(row) == len(table.head) for row in table.rows)
    violated = methods_table([{**rows[1], "verdict": "violated"}]).rows[0]
    assert (violated[6].kind, violated[1].kind) == ("bad", "bad")


def test_the_conclusion_is_a_sentence_about_the_rows(report: Audit) -> None:
    rows = report.summary(EPSILON)
    text = conclusion(rows, 0.1, WITHIN)
    lost, kept = rows
    assert f"{lost['name']} covers {lost['attacked_coverage']['mean']:.1%}" in text
    assert f"consistent with the 90% that the certified method {kept['name']} promised" in text
    assert f"{kept['attacked_size']:.2f} labels" in text
    two = conclusion([*rows, {**kept, "name": "larger", "attacked_size": 9.0}], 0.1, WITHIN)
    assert "that all 2 certified methods promised" in two
    assert f"those of {kept['name']}, from" in two
    assert "violated: larger" in conclusion([*rows, {**kept, "name": "larger", "verdict": "violated"}], 0.1, WITHIN)
    assert escape(text) in Page("title", "subtitle", conclusion=text).html()


def test_no_two_lines_of_a_figure_share_a_colour() -> None:
    groups = plots.in_groups({f"method {k}": [(0.0, 1.0)] for k in range(13)})
    assert [name for group in groups for name in group] == [f"method {k}" for k in range(13)]
    for group in groups:
        axis = plots.radius_curves(group, dict.fromkeys(group, True), "epsilon", limits=(0.0, 4.0)).axes[0]
        colors = [line.get_color() for line in axis.lines]
        assert len(set(colors)) == len(colors) == len(group)
        assert axis.get_ylim() == (0, 4.0)


def test_grey_images_are_shown_as_they_are() -> None:
    from matplotlib.image import imread

    shown = imread(io.BytesIO(plots.pixels(torch.tensor([[[0.0, 1.0]]]))))
    assert shown[0].tolist() == [0.0, 1.0]


def test_an_interval_is_written_with_its_ends() -> None:
    assert interval({"mean": 0.9, "low": 0.85678, "high": 0.95}) == "0.900 [0.857, 0.950]"
    assert "Python 3" in hardware()


# -- figures -----------------------------------------------------------------------------------------------------------


def figures(report: Audit) -> dict[str, Any]:
    rows, certified = report.summary(EPSILON), {"a": True, "b": False}
    curves = {"a": [(0.0, 1.0), (0.1, 1.5)], "b": [(0.0, 1.1), (0.1, 3.9)]}
    return {
        "sizes": plots.radius_curves(curves, certified, "epsilon", guides=[4.0, 400.0]),
        "coverages": plots.radius_curves(
            {"a": [(0.0, 0.9, 0.8, 1.0), (0.1, 0.8, 0.7, 0.9)], "b": [(0.0, 0.9)]},
            certified,
            "epsilon",
            "coverage",
            [0.9],
            (None, 1.01),
        ),
        "densities": plots.score_densities(torch.linspace(0, 1, 50), torch.linspace(0, 1, 50) ** 4, 0.1),
        "bars": plots.clean_and_attacked(rows, 0.1),
        "shares": plots.size_shares({"a": [0.0, 0.75, 0.25, 0.0], "b": [0.5, 0.0, 0.5, 0.0]}),
        "scatter": plots.size_against_coverage(
            {"a": [(0.9, 1.2, 0.01, 0.1)], "b": [(0.95, 40.0, 0.01, 0.1)]}, 0.1, certified
        ),
        "classes": plots.coverage_by_class(["x", "y" * 40], [(0.9, 0.8, 1.0), (0.95, 0.9, 1.0)], 0.1),
    }


def test_figures_are_reproducible_and_offline(report: Audit) -> None:
    """Twice the same figure is twice the same text."""
    one, two = ({name: plots.svg(figure) for name, figure in figures(report).items()} for _ in range(2))
    for text in one.values():
        assert text.startswith("<svg")
        offline(f"<html>{text}</html>")
    assert one == two


def test_figures_of_the_documentation_bring_two_schemes(report: Audit) -> None:
    for name, figure in figures(report).items():
        text = plots.adaptive_svg(figure, name)
        style, drawing = re.fullmatch(r"(?s)<svg[^>]*><style>(.*?)</style>(.*)", text.strip()).groups()  # type: ignore[union-attr]
        light, dark = style.split("@media (prefers-color-scheme: dark)")
        assert all(color in light for color in plots.COLORS)
        assert all(color in dark for color in plots.DARK)
        assert not re.findall(r"(?:fill|stroke): ?#[0-9a-f]{6}", drawing)  # nothing that one scheme would hide
        offline(f"<html>{text}</html>")


def test_on_a_page_every_colour_is_the_pages(report: Audit) -> None:
    """Only CSS variables and currentColor are left, no ground is drawn, and no identifier is that of another figure."""
    seen: set[str] = set()
    for name, figure in figures(report).items():
        text = plots.page_svg(figure, name)
        offline(f"<html>{text}</html>")
        colours = set(re.findall(r"(?:fill|stroke): ?([^;\"]+)", text))
        assert colours <= {"none", "currentColor", "var(--soft)", "var(--card)", *(f"var(--c{i})" for i in range(6))}, (
            name
        )
        ids = re.findall(r'\bid="([^"]+)"', text)
        assert len(ids) == len(set(ids))
        assert seen.isdisjoint(ids)
        seen |= set(ids)
        assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', text)) <= set(ids)


# What the three colour blindnesses see of linear RGB, in full strength (Machado, Oliveira & Fernandes 2009).
SEEN = {
    "no colour blindness": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def linear(colour: str) -> np.ndarray:
    value = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ rgb.clip(0, 1) / np.array([0.9505, 1, 1.089])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize(("colours", "ground"), [(plots.COLORS, "#ffffff"), (plots.DARK, "#1c222b")])
def test_colours_are_told_apart_and_stand_out(colours: tuple[str, ...], ground: str) -> None:
    """Each pair differs by at least 15 in CIELAB under every colour blindness; each colour has contrast 3 with its ground (WCAG 1.4.11)."""
    for matrix in SEEN.values():
        points = [lab(np.asarray(matrix) @ linear(colour)) for colour in colours]
        assert min(float(np.linalg.norm(a - b)) for a, b in combinations(points, 2)) > 15
    luminance = [float(np.array([0.2126, 0.7152, 0.0722]) @ linear(colour)) for colour in (ground, *colours)]
    for own in luminance[1:]:
        light, dark = max(own, luminance[0]), min(own, luminance[0])
        assert (light + 0.05) / (dark + 0.05) >= 3


def test_figures_show_their_numbers(report: Audit) -> None:
    drawn = figures(report)
    lines = [line for line in drawn["sizes"].axes[0].get_lines() if line.get_label() in ("a", "b")]
    assert [(line.get_label(), list(line.get_ydata()), line.get_linestyle()) for line in lines] == [
        ("a", [1.0, 1.5], "-"),
        ("b", [1.1, 3.9], "--"),
    ]
    assert drawn["sizes"].axes[0].get_ylim()[0] == 0
    guides = [line.get_ydata()[0] for line in drawn["sizes"].axes[0].get_lines() if line.get_linestyle() == ":"]
    assert guides == [4]  # the one far above the lines would squeeze them
    rows = report.summary(EPSILON)
    coverage, size = drawn["bars"].axes
    widths = [bar.get_width() for bar in coverage.patches]
    assert widths == [row["coverage"]["mean"] for row in rows] + [row["attacked_coverage"]["mean"] for row in rows]
    assert [bar.get_width() for bar in size.patches] == [row["size"] for row in rows] + [
        row["attacked_size"] for row in rows
    ]
    vertical = next(line for line in drawn["densities"].axes[0].get_lines())
    assert vertical.get_xdata()[0] == pytest.approx(float(torch.linspace(0, 1, 50).double().quantile(0.9)))
    shares = [[bar.get_height() for bar in axis.patches] for axis in drawn["shares"].axes]
    assert shares == [[0.0, 0.75, 0.25], [0.5, 0.0, 0.5]]  # no set has three labels
    (bars,) = drawn["coverages"].axes[0].collections
    assert [bar[:, 1].tolist() for bar in bars.get_segments()] == [[0.8, 1.0], [0.7, 0.9]]
    assert drawn["scatter"].axes[0].get_yscale() == "log"


def test_a_wide_figure_gets_the_whole_width() -> None:
    wide = Figure("wide", plots.subplots(1, 2, figsize=(9, 3))[0], "two panels")
    narrow = Figure("narrow", plots.size_shares({"a": [0.4, 0.6]}), "one panel")
    html = Page("title", "about", sections=[Section("one", figures=[wide, narrow])]).html()
    assert html.count('<figure class="wide">') == 1
    assert html.count('role="region" aria-label="Figure: two panels"') == 1


# -- the audit's own page ----------------------------------------------------------------------------------------------


def test_examples_are_labels_lost_by_one_and_kept_by_the_other(report: Audit) -> None:
    (found,) = audit_examples(report, "vanilla", "certified & kept", EPSILON, count=2)
    assert "vanilla lost the true label" in found.text
    index = torch.arange(len(report.labels))
    lost = ~report.sets["vanilla", "softmax", EPSILON].mask[index, report.labels]
    assert 1 <= len(found.examples) <= 2
    for example in found.examples:
        (clean, before), (attacked, after) = example.images
        i = next(i for i, image in enumerate(report.images) if torch.equal(image, clean))
        assert lost[i]
        assert torch.equal(attacked, report.attacked["vanilla", "softmax", EPSILON][i])
        truth = NAMES[int(report.labels[i])]
        assert example.title == f"truth: {truth}"
        assert before.startswith("clean: vanilla {")
        assert truth in after.split("certified & kept ")[1]
        assert truth not in after.split("certified & kept ")[0]
    # A predictor does not lose what it keeps.
    assert audit_examples(report, "certified & kept", "certified & kept", EPSILON) == []
    assert audit_examples(report, "vanilla", "certified & kept", 0.77) == []  # no such radius
    assert audit_examples(report, "vanilla", "unknown", EPSILON) == []


def test_the_audit_page(report: Audit, tmp_path: Path) -> None:
    page = audit_page(report, "toy, 60 images", origin={"seed": 7})
    path = page.write(tmp_path / "audit.html", tmp_path / "figures")
    html = path.read_text()
    offline(html)
    reader = parsed(html)
    assert [row[0] for row in reader.rows].count("vanilla") == 1 + 5  # the summary, and every attack
    assert ["vanilla", "no promise, lost", "softmax", "0.15"] in [row[:4] for row in reader.rows]
    (examples,) = [section.examples for section in page.sections if section.title == "Before and after"]
    assert examples
    for example in examples:  # every name is in brackets
        assert escape(example.title) in html
        assert example.title not in html
    facts = {row[0]: row[1] for row in reader.rows if len(row) == 2}
    assert (facts["attacks"], facts["seed"]) == ("softmax, margin", "7")
    assert page.guarantee == report.sets["certified & kept", "none", 0.0].guarantee
    assert str(page.guarantee) in " ".join(reader.text)
    assert {file.stem for file in (tmp_path / "figures").iterdir()} == {
        "coverage-clean-and-attacked",
        "size-clean-and-attacked",
        "coverage-by-radius",
    }
    assert f"Attacked within L2 {EPSILON:g}; the worst" in page.sections[0].text


def test_an_audit_without_an_attack_has_a_page_too(model: nn.Module) -> None:
    """Radius 0 is a clean audit: a table, no attacked rows, no crash."""
    predictor = calibrate(model, toy(200, seed=1), method="rcp1", epsilon=0.0, sigma=0.15, seed=1)
    clean = audit(predictor, toy(60, seed=3), radii=[0.0], seed=5, progress=False)
    html = audit_page(clean, "toy").html()
    offline(html)
    assert [row[:4] for row in parsed(html).rows if row[0] == "rcp1"][-1] == ["rcp1", "consistent", "none", "0"]
