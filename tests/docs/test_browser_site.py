"""The documentation site: built strictly, opened from a folder, read at a desk and on a phone, by light and in the dark."""

from __future__ import annotations

import doctest
import functools
import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mkdocs", reason="needs the extra docs: make browser-test installs it")
pytestmark = pytest.mark.browser

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "index",
    "architecture",
    "quickstart",
    "methods",
    "mathematics",
    "hugging-face",
    "training",
    "reproducing",
    "comparison",
    "cli",
    "api/index",
    "api/keepcover",
    "api/bounds",
    "examples",
    "changelog",
)


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


def build(root: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """What ``make site`` runs."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    done = build(ROOT, out)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="session")
def address(site: Path) -> Iterator[str]:
    """The site from a server of this machine."""
    handler = functools.partial(QuietHandler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the sources that a test may spoil."""
    for name in ("docs", "examples", "src"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("mkdocs.yml", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_mistakes_fail_the_build(copy: Path) -> None:
    """Dead links, anchors and images and a page outside the navigation, each named."""
    page = copy / "docs" / "quickstart.md"
    targets = ("gone.md", "methods.md#gone", "api/keepcover.md#keepcover.gone", "#nowhere")
    mistakes = [*(f"[x]({target})" for target in targets), "![x](figures/gone.svg)"]
    page.write_text("\n\n".join([page.read_text(encoding="utf-8"), *mistakes]), encoding="utf-8")
    (copy / "docs" / "lost.md").write_text("# Lost\n")
    done = build(copy, copy / "out")
    assert done.returncode != 0
    for complaint in (*targets, "figures/gone.svg", "lost.md"):
        assert f"'{complaint}'" in done.stderr or f"- {complaint}" in done.stderr, complaint
    assert "Aborted with 6 warnings in strict mode" in done.stdout + done.stderr


def test_a_name_that_is_gone_fails_the_build(copy: Path) -> None:
    page = copy / "docs" / "api" / "noise.md"
    page.write_text(page.read_text(encoding="utf-8") + "\n::: keepcover.gone\n", encoding="utf-8")
    done = build(copy, copy / "out")
    assert done.returncode != 0
    assert "keepcover.gone" in done.stderr


def test_formulas_and_roles_of_docstrings() -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        from tools import docstrings, formulas, hooks
    finally:
        sys.path.remove(str(ROOT / "docs"))
    assert doctest.testmod(formulas).failed == 0
    with pytest.raises(ValueError, match=r"uses \\nosuch, which latex2mathml does not know"):
        formulas.formula(r"\nosuch")
    assert '<autoref identifier="keepcover.bounds.concentration.dkw" optional>' in docstrings.rendered(
        "see :func:`dkw`", "keepcover.bounds.concentration"
    )
    assert (
        docstrings.rendered("Args:\n    a, b: both.\n    c: one.") == "Args:\n    a: both.\n    b: both.\n    c: one."
    )
    assert hooks.inside("[x](../examples/a_b.py), [`y`](../src/z.py), [c](../CHANGELOG.md), [d](data.md)") == (
        "[x](examples.md#a_bpy), `y`, [c](changelog.md), [d](data.md)"
    )


def test_nothing_is_left_raw(site: Path) -> None:
    """No Sphinx role, directive or unresolved name reaches a reader."""
    for path in [*(site / "api").glob("*.html"), site / "mathematics.html"]:
        text = path.read_text(encoding="utf-8")
        for raw in (":math:", ":func:", ":class:", ".. math", "<autoref", "\\mathrm", "\\alpha"):
            assert raw not in text, (path.name, raw)


def test_formulas_are_set_by_the_browser(site: Path) -> None:
    text = (site / "mathematics.html").read_text(encoding="utf-8")
    assert text.count("<math") > 100
    assert text.count('display="block"') > 8
    assert "$" not in re.sub(r"(?s)<script.*?</script>|<pre.*?</pre>", "", text)


def test_no_page_names_another_machine_to_load_from(site: Path) -> None:
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|img|iframe)[^>]+src="([^"]+)"|<link[^>]+href="([^"]+)"', text)
        assert [one for pair in loaded for one in pair if one.startswith(("http", "//"))] == [], path.name


@pytest.mark.parametrize("width", [1280, 390])
def test_pages_fit_and_stay_at_home(site: Path, watched: Any, width: int) -> None:
    """Every page at this width: its title is there, nothing is wider than the window, all images are drawn."""
    watched.page.set_viewport_size({"width": width, "height": 900})
    for page in PAGES:
        watched.page.goto((site / f"{page}.html").as_uri())
        assert watched.page.locator("h1").first.is_visible(), page
        assert watched.page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0, page
        broken = "[...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)"
        assert watched.page.evaluate(broken) == [], page
        watched.unharmed()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_pages_are_accessible(address: str, watched: Any, scheme: str) -> None:
    """No serious finding of axe, which reads style sheets and so needs a server."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    watched.page.emulate_media(color_scheme=scheme)
    for page in ("index", "methods", "hugging-face", "cli", "api/keepcover", "api/bounds", "examples", "training"):
        watched.page.goto(f"{address}/{page}.html")
        found = [v for v in axe.run(watched.page).response["violations"] if v["impact"] in ("serious", "critical")]
        assert [(v["id"], v["nodes"][0]["html"], v["nodes"][0].get("failureSummary")) for v in found] == [], page


def test_a_wrong_address_finds_its_way_home(address: str, watched: Any) -> None:
    """The page for that is only ever sent by a server, and names its files from the root."""
    watched.page.goto(f"{address}/404.html")
    assert watched.page.locator("h1").first.inner_text().startswith("404")
    watched.page.get_by_role("link", name="keepcover").first.click()
    watched.page.locator("h1", has_text="Why").first.wait_for(timeout=20_000)


def test_search_works_from_a_folder(site: Path, watched: Any) -> None:
    watched.page.goto((site / "index.html").as_uri())
    watched.page.get_by_role("textbox", name="Search").fill("majorant")
    result = watched.page.locator(".md-search-result__link").first
    result.wait_for(state="visible", timeout=10_000)
    result.click()
    watched.page.wait_for_url("**/*.html?*", timeout=10_000)
    assert "ajorant" in watched.page.content()


def test_the_phone_has_its_menu(site: Path, watched: Any) -> None:
    watched.page.set_viewport_size({"width": 390, "height": 844})
    watched.page.goto((site / "index.html").as_uri())
    watched.page.locator("label.md-header__button[for=__drawer]").click()
    link = watched.page.locator(".md-nav--primary a", has_text="Quickstart").first
    link.wait_for(state="visible", timeout=5000)
    link.click()
    assert watched.page.locator("h1").first.inner_text().startswith("Quickstart")
