"""Shared fixtures. Shapes and types of keepcover's own functions are checked at run time here, and only here."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jaxtyping
import pytest

import tests.typed  # noqa: F401  # before the hook, which takes it by name

jaxtyping.install_import_hook("keepcover", "tests.typed.checked")

# Real weights, noisy logits and data for development: beside the checkout, or wherever KEEPCOVER_ASSETS points.
ASSETS = Path(os.environ.get("KEEPCOVER_ASSETS", Path(__file__).resolve().parents[2] / "shared"))


@pytest.fixture(scope="session")
def golden_folder() -> Path:
    return Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def assets() -> Path:
    if not ASSETS.is_dir():
        pytest.skip(
            f"needs development assets (weights, CIFAR); none at {ASSETS}, set KEEPCOVER_ASSETS to their folder"
        )
    return ASSETS


@pytest.fixture
def untyped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library as users run it: for forged files, which types would refuse first, and for loops that they make slow."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


# What a page did while a test drove it: both must stay empty.
class Watched:
    """A Playwright page whose console errors and requests to other machines are kept."""

    def __init__(self, page: Any) -> None:
        self.page, self.errors, self.outside = page, [], []
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self._see(request.url))

    def _see(self, url: str) -> None:
        address = urlsplit(url)
        if address.scheme not in ("file", "data", "blob", "about") and address.hostname not in (
            "127.0.0.1",
            "localhost",
        ):
            self.outside.append(url)

    def unharmed(self) -> None:
        assert self.errors == [], "the page wrote errors to the console"
        assert self.outside == [], "the page asked another machine"


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """The system's Chromium, driven by Playwright; a test that needs it is skipped where either is missing."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs Playwright: make browser-test installs it")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("needs a Chromium on the PATH (Debian: apt-get install chromium)")
    quiet = ["--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=path, args=[*quiet, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
        )
        yield browser
        browser.close()


@pytest.fixture
def watched(chromium: Any) -> Iterator[Watched]:
    """A fresh page at desktop width that must end with no console error and no request to another machine."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    watched = Watched(context.new_page())
    yield watched
    context.close()
    watched.unharmed()
