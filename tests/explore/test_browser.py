"""The explorer in Chromium: choose, move, attack, upload; nothing in the console, nobody else asked, no barrier."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from keepcover.explore.answers import Explorer

from .exploring import EPSILONS, running, toy_explorer

pytestmark = pytest.mark.browser

METHODS = ("vanilla", "rscp", "exact")


@pytest.fixture(scope="module")
def explorer() -> Explorer:
    made = toy_explorer()
    made.prepare()
    return made


@pytest.fixture(scope="module")
def address(explorer: Explorer) -> Iterator[str]:
    with running(explorer) as address:
        yield address


@pytest.fixture
def page(watched: Any, address: str) -> Any:
    opened(watched.page, address)
    return watched.page


def opened(page: Any, address: str) -> None:
    page.goto(address)
    page.wait_for_selector("body[data-ready]", timeout=60_000)


def shown_sets(page: Any) -> dict[str, set[int]]:
    """The labels in the chips of every card."""
    return {
        key: {int(chip.get_attribute("data-label")) for chip in page.query_selector_all(f".card.{key} .chips li")}
        for key in METHODS
    }


def move_to(page: Any, step: int) -> None:
    page.evaluate(
        "step => { const e = document.getElementById('epsilon'); e.value = step; e.dispatchEvent(new Event('input')); }",
        step,
    )


def choose(page: Any, name: str) -> None:
    with page.expect_response(lambda response: f'"{name}"' in (response.request.post_data or "")):
        page.click(f"[data-image={name}]")
    page.wait_for_function("name => document.getElementById('chosen').src.includes(`/${name}.png`)", arg=name)


@pytest.mark.parametrize("draws", [4, 64])
def test_sets_grow_with_epsilon_and_never_shrink(page: Any, explorer: Explorer, draws: int) -> None:
    """The whole slider, on several images: what is on the page is what the explorer answers, and is nested."""
    page.check(f"input[name=draws][value='{draws}']", force=True)
    page.wait_for_selector("#cards:not(.waiting)")
    grew = 0
    for index in (1, 5, 9):
        choose(page, f"g{index}")
        page.wait_for_function(
            "text => document.querySelector('.card.exact .size').textContent.includes(text)",
            arg=f"{draws} noisy draws",
            timeout=60_000,
        )
        answer = explorer.sets(f"g{index}", 0.1, draws)["methods"]
        before = {key: set() for key in METHODS}
        for step, epsilon in enumerate(EPSILONS):
            move_to(page, step)
            assert page.text_content("#epsilon-value") == f"{epsilon:g}"
            now = shown_sets(page)
            for key in METHODS:
                inside = {k for k, at in enumerate(answer[key]["enters"]) if at is not None and at <= step}
                assert now[key] == inside
                assert before[key] <= now[key]
                grew += step > 0 and len(now[key]) > len(before[key])
            before = now
    assert grew


def test_the_slider_obeys_the_keyboard_without_asking_anybody(page: Any) -> None:
    asked: list[str] = []
    page.focus("#epsilon")
    page.on("request", lambda request: asked.append(request.url))
    for _ in EPSILONS:
        page.keyboard.press("ArrowLeft")
    assert page.text_content("#epsilon-value") == "0"
    assert page.is_disabled("#attack-button")
    page.keyboard.press("End")
    assert page.text_content("#epsilon-value") == f"{EPSILONS[-1]:g}"
    assert asked == []
    assert "up to 0.3 in L2 norm" in page.text_content(".card.exact .promise")
    assert "promises nothing" in page.text_content(".card.vanilla .promise")


def test_trivial_sets_and_names_are_shown_as_they_are(page: Any) -> None:
    page.check("input[name=draws][value='4']", force=True)  # four draws bound a mean by nothing
    page.wait_for_selector("#cards:not(.waiting)")
    page.wait_for_function("() => document.querySelector('.card.rscp .size').textContent.includes('trivial set')")
    assert "<b>star</b>" in page.text_content(".card.rscp .chips")  # a class name is text, whatever it looks like
    assert page.query_selector(".chips b") is None


def test_an_attack_shows_the_image_and_what_was_lost(page: Any, explorer: Explorer) -> None:
    lost = 0
    for index in range(6):
        choose(page, f"g{index}")
        page.click("#attack-button")
        page.wait_for_selector("#attack-result:not([hidden])", timeout=30_000)
        epsilon = float(page.text_content("#epsilon-value"))
        expected = explorer.attack(f"g{index}", 0.1, 4, epsilon)
        for one in expected["attempts"]:
            for key in METHODS:
                cell = f"#fates tr[data-method={key}] td[data-aim={one['aim']}]"
                assert page.get_attribute(cell, "data-fate") == one["fates"][key]
        lost += expected["attempts"][0]["fates"]["vanilla"] == "lost"
        assert page.get_attribute("#attacked", "src") in [one["attacked"] for one in expected["attempts"]]
        assert page.get_attribute("#original", "src") == expected["original"]
        move_to(page, 1)  # a picture of another epsilon must not stay
        assert page.is_hidden("#attack-result")
        move_to(page, EPSILONS.index(epsilon))
    assert lost


def test_an_image_that_vanilla_loses_is_found(page: Any) -> None:
    page.click("#find-button")
    page.wait_for_selector("#attack-result:not([hidden])", timeout=30_000)
    assert page.get_attribute("#fates tr[data-method=vanilla] td[data-aim=plain]", "data-fate") == "lost"
    assert "label lost" in page.text_content("#fates tr[data-method=vanilla]")
    assert "Chosen because it is lost" in page.text_content("#attack-note")
    assert page.locator(".gallery button[aria-pressed=true]").count() == 1


def test_an_upload_is_shown_with_what_was_done_to_it(page: Any, tmp_path: Path) -> None:
    content = io.BytesIO()
    Image.radial_gradient("L").resize((30, 20)).convert("RGB").save(content, "PNG")
    (tmp_path / "photo.png").write_bytes(content.getvalue())
    page.set_input_files("#file", str(tmp_path / "photo.png"))
    page.wait_for_function("() => document.getElementById('chosen-caption').textContent.includes('your image')")
    assert "cropped and resized from 30 x 20 to 4 x 4" in page.text_content("#upload-note")
    page.check("#invert")
    page.wait_for_function("() => document.getElementById('upload-note').textContent.includes('inverted')")
    page.select_option("#label", "1")
    page.click("#attack-button")
    page.wait_for_selector("#attack-result:not([hidden])", timeout=30_000)
    assert "“square”, the label you chose" in page.text_content("#attack-note")


def test_the_curves_come_by_themselves(page: Any) -> None:
    page.click("#to-curves")
    page.wait_for_selector("#curves-result:not([hidden])", timeout=90_000)
    assert page.locator("#coverage-chart .line").count() == 2 * len(METHODS)  # the legend has one each
    assert "150 untouched test images" in page.text_content("#curves-note")
    assert page.locator("#curves-table tbody tr").count() == len(METHODS) * len(EPSILONS)
    page.click("#to-promise")
    text = page.text_content("#view-promise")
    assert "fresh noise for every query" in text
    assert "not for a level picked after seeing sets" in text


def test_the_class_filter_and_the_pages_of_the_gallery(page: Any) -> None:
    first = page.get_attribute("#gallery button", "data-image")
    page.click("#next")
    assert page.get_attribute("#gallery button", "data-image") != first
    page.select_option("#class-filter", "1")
    alts = [image.get_attribute("alt") for image in page.query_selector_all("#gallery img")]
    assert alts
    assert all(alt.endswith(", square") for alt in alts)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)])
def test_every_view_fits_and_has_no_barrier(
    chromium: Any, address: str, tmp_path: Path, width: int, height: int, scheme: str
) -> None:
    """No sideways scrolling, nothing serious or critical from axe, and a picture of each view to look at."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python").Axe()
    context = chromium.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page = context.new_page()
    opened(page, address)
    page.click("#attack-button")
    page.wait_for_selector("#attack-result:not([hidden])", timeout=30_000)
    for view in ("image", "curves", "promise"):
        page.click(f"#to-{view}")
        if view == "curves":
            page.wait_for_selector("#curves-result:not([hidden])", timeout=90_000)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        grave = [v for v in axe.run(page).response["violations"] if v["impact"] in ("serious", "critical")]
        assert grave == [], [(v["id"], [node["html"][:120] for node in v["nodes"]]) for v in grave]
        picture = page.screenshot(path=tmp_path / f"{view}.png", full_page=True)
        assert len(picture) > 10_000
    context.close()


def test_a_refusal_is_said_on_the_page(watched: Any, address: str, tmp_path: Path) -> None:
    opened(watched.page, address)
    (tmp_path / "no-image.png").write_bytes(b"not an image")
    watched.page.set_input_files("#file", str(tmp_path / "no-image.png"))
    watched.page.wait_for_selector("#problem:not([hidden])")
    assert "not a readable image" in watched.page.text_content("#problem")
    assert all("422" in error for error in watched.errors)  # the browser's own line on the refused upload
    watched.errors.clear()
