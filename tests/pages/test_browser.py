"""Every kind of page in Chromium, from a file: no error, no request, no overflow, accessible in light and dark, printable."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from keepcover import cli
from keepcover.demo import Entry, run_demo, write_report
from keepcover.methods import RCP1, RSCP, Exact, SplitCP
from keepcover.paper.reproduce.run import write_page
from tests.conftest import Watched
from tests.toys import nearest, toy

pytestmark = pytest.mark.browser

PAGES = ("demo", "predictor", "evaluation", "audit", "reproduce")
WIDTHS = (1280, 390)
# Where screenshots go, for a look at them.
SHOTS = os.environ.get("KEEPCOVER_SCREENSHOTS")


def make_nearest() -> nn.Module:
    return nearest()


def _demo(folder: Path) -> Path:
    entries = (
        Entry("vanilla CP", SplitCP(), 1, sigma=0.0),
        Entry("RSCP + PTT", RSCP(), 16),
        Entry("RCP1", RCP1(), 1),
        Entry("exact, 8 draws", Exact(), 8),
    )
    return write_report(run_demo(0, lambda _: None, entries, attacked=40, epochs=15), folder / "demo")


def _predictor(folder: Path) -> Path:
    images, labels = toy(400, seed=1)
    np.savez(folder / "data.npz", images=images.numpy(), labels=labels.numpy())
    given = ("--model", "own:make_nearest", "--data", str(folder / "data.npz"))
    saved, page = folder / "p.safetensors", folder / "predictor.html"
    levels = [f"--epsilon={e}" for e in (0.1, 0.05, 0.15)] + ["--alpha=0.1", "--alpha=0.2"]
    names = "an unusually long class name that has to wrap somewhere,bee,cow,dog"
    assert cli.main(["calibrate", *given, "--sigma=0.15", *levels, f"--out={saved}", f"--class-names={names}"]) == 0
    assert cli.main(["report", str(saved), *given, f"--out={page}", f"--figures={folder / 'figures'}"]) == 0
    return page


def _evaluation(folder: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 12, (400,), generator=generator)
    logits = 3 * nn.functional.one_hot(labels, 12)[:, None] + torch.randn(400, 16, 12, generator=generator)
    np.savez(folder / "logits.npz", logits=logits.numpy(), labels=labels.numpy())
    page = folder / "evaluation.html"
    options = ["--epsilon=0.1", "--sigma=0.25", "--splits=4", "--holdout=60", f"--report={page}"]
    assert cli.main(["evaluate", str(folder / "logits.npz"), *options]) == 0
    return page


def _audit(folder: Path) -> Path:
    few = ["--images=30", "--steps=3", "--attack-draws=2", "--method=cp", "--method=rcp1", "--method=auto"]
    given = ["--model", "own:make_nearest", "--data", str(folder / "data.npz"), "--sigma=0.15", "--epsilon=0.15"]
    assert cli.main(["audit", *given, *few, "--radius=0.05", "--radius=0.15", f"--out={folder / 'audit'}"]) == 0
    return folder / "audit" / "audit.html"


def _reproduce(folder: Path) -> Path:
    """A committed result with a wide table and a figure of two panels."""
    source = Path(__file__).parents[2] / "results" / "reproduce" / "motivation.json"
    target = folder / source.name
    target.write_text(source.read_text())
    return next(path for path in write_page(target) if path.suffix == ".html")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    folder = tmp_path_factory.mktemp("pages")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "own", sys.modules[__name__])
        makers = (_demo, _predictor, _evaluation, _audit, _reproduce)
        yield {name: make(folder) for name, make in zip(PAGES, makers, strict=True)}


def opened(watched: Watched, path: Path, width: int = 1280, scheme: str = "light") -> Any:
    page = watched.page
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(path.as_uri())
    return page


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_nothing_serious(watched: Watched, pages: dict[str, Path], name: str, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    for width in WIDTHS:
        # axe runs as a script, which the page's own policy forbids: read the same page without the policy.
        page = opened(watched, pages[name], width, scheme)
        text = pages[name].read_text()
        assert "script" not in re.sub(r"<style>.*?</style>", "", text, flags=re.DOTALL).replace("description", "")
        page.set_content(re.sub(r"<meta http-equiv[^>]*>", "", text))
        found = axe.run(page).response["violations"]
        serious = [one for one in found if one["impact"] in ("serious", "critical")]
        assert serious == [], json.dumps(
            [(one["id"], [n["html"][:200] for n in one["nodes"][:3]]) for one in serious], indent=1
        )


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PAGES)
def test_nothing_is_wider_than_the_page(watched: Watched, pages: dict[str, Path], name: str, width: int) -> None:
    page = opened(watched, pages[name], width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    outside = page.evaluate(
        """() => [...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll') && !e.closest('svg')
            && e.getBoundingClientRect().right > document.documentElement.clientWidth + 1).map(e => e.outerHTML.slice(0, 120))"""
    )
    assert outside == []
    if SHOTS:
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            page.screenshot(path=Path(SHOTS) / f"{name}-{width}-{scheme}.png", full_page=True)


@pytest.mark.parametrize("name", PAGES)
def test_what_scrolls_can_be_reached_by_keyboard_and_has_a_name(
    watched: Watched, pages: dict[str, Path], name: str
) -> None:
    page = opened(watched, pages[name], 390)
    regions = page.evaluate(
        """() => [...document.querySelectorAll('*')].filter(e => e.scrollWidth > e.clientWidth + 1
            && ['auto', 'scroll'].includes(getComputedStyle(e).overflowX))
            .map(e => [e.tabIndex, e.getAttribute('role'), e.getAttribute('aria-label')])"""
    )
    assert regions, "a wide table scrolls at this width"
    assert all(index == 0 and role == "region" and label for index, role, label in regions)
    region = page.locator(".table").first
    region.focus()
    page.keyboard.press("ArrowRight")
    for _ in range(100):  # scrolling is animated; the page's policy forbids Playwright's own waiting, which is a script
        if page.evaluate("document.activeElement.scrollLeft") > 0:
            break
        page.wait_for_timeout(50)
    assert page.evaluate("document.activeElement.scrollLeft") > 0


@pytest.mark.parametrize("name", PAGES)
def test_figures_take_the_colours_of_the_page(watched: Watched, pages: dict[str, Path], name: str) -> None:
    """Letters and axes are the page's ink in both schemes; nothing is left black, and no figure has a ground of its own."""
    for scheme, ink in (("light", "rgb(28, 36, 48)"), ("dark", "rgb(230, 233, 238)")):
        page = opened(watched, pages[name], scheme=scheme)
        drawn = page.evaluate(
            """() => [...new Set([...document.querySelectorAll('svg use, svg path')].filter(e => !e.closest('defs'))
                .flatMap(e => { const s = getComputedStyle(e); return [s.fill, s.stroke]; }))]"""
        )
        assert ink in drawn
        assert "rgb(0, 0, 0)" not in drawn
        assert scheme == "light" or "rgb(255, 255, 255)" not in drawn


@pytest.mark.parametrize("name", PAGES)
def test_headings_landmarks_and_alternatives(watched: Watched, pages: dict[str, Path], name: str) -> None:
    page = opened(watched, pages[name])
    levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3,h4')].map(h => Number(h.tagName[1]))")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(later <= earlier + 1 for earlier, later in pairwise(levels))
    for mark in ("header", "main", "footer"):
        assert page.locator(f"body > {mark}").count() == 1
    assert page.locator("svg").count() == page.locator('[role="img"][aria-label] svg').count() >= 1
    assert page.locator("img:not([alt])").count() == 0
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))
    targets = page.evaluate("[...document.querySelectorAll('a')].map(a => a.getAttribute('href').slice(1))")
    assert set(targets) <= set(ids)


@pytest.mark.parametrize("name", PAGES)
def test_paper_is_white_and_rows_stay_whole(watched: Watched, pages: dict[str, Path], name: str) -> None:
    page = opened(watched, pages[name], scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    colours = page.evaluate("(s => [s.backgroundColor, s.color])(getComputedStyle(document.body))")
    assert colours == ["rgb(255, 255, 255)", "rgb(28, 36, 48)"]
    assert page.evaluate("[...document.querySelectorAll('tr')].every(r => getComputedStyle(r).breakInside == 'avoid')")
    page.set_viewport_size({"width": 680, "height": 960})  # A4 less its margins
    assert page.evaluate("document.documentElement.scrollWidth") <= 680
    document = page.pdf(format="A4", path=Path(SHOTS) / f"{name}.pdf" if SHOTS else None)
    assert document.startswith(b"%PDF-")
    assert len(document) > 10_000
