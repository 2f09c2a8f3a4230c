"""Pictures of scenes: every pixel has the colour of what is known of it."""

from __future__ import annotations

import pytest
import torch

from keepcover.pages import plots
from keepcover.pages.plots import CERTAIN, EXCLUDED, POSSIBLE, TRUTH, scenes_figure, shaded

pytest.importorskip("matplotlib")


def luminance(color: str) -> float:
    """WCAG's relative luminance."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_pixels_have_the_colour_of_what_is_known() -> None:
    image = torch.rand(3, 6, 8)
    certain, possible = torch.zeros(2, 6, 8).bool()
    possible[1:5, 2:7], certain[2:4, 3:5] = True, True
    found = shaded(image, certain, possible)
    assert found.shape == (3, 6, 8)
    red, green, blue = found
    assert (red[certain] > 3 * green[certain]).all()
    only = possible & ~certain
    assert ((red[only] > green[only]) & (green[only] > 3 * blue[only])).all()
    assert torch.equal(red[~possible], green[~possible])
    assert torch.equal(red[~possible], blue[~possible])
    torch.testing.assert_close(red[~possible], 0.5 * image.mean(dim=0)[~possible])
    torch.testing.assert_close(
        shaded(image[:1], certain, possible), shaded(image[:1].expand(3, -1, -1), certain, possible)
    )


def test_certain_and_possible_differ_in_brightness() -> None:
    """A contrast of 3 : 1 at least, so that no eye needs the hue."""
    bright, dim = luminance(POSSIBLE) + 0.05, luminance(CERTAIN) + 0.05
    assert bright / dim > 3
    assert bright / (luminance(EXCLUDED) + 0.05) > 3
    assert luminance(TRUTH) > luminance(EXCLUDED)


def test_a_figure_has_a_panel_per_scene_and_column() -> None:
    scene, truth = torch.rand(3, 6, 8), torch.zeros(6, 8).bool()
    truth[2:4, 3:5] = True
    rows = [[(scene, None), (scene, truth)], [(scene[:1], None), (scene, torch.zeros(6, 8).bool())]]
    figure = scenes_figure(rows, ["scene", "found"], ["one", "two"])
    axes = figure.get_axes()
    assert [[text.get_text() for text in axis.texts] for axis in axes] == [["one"], [], ["two"], []]
    assert [axis.get_title() for axis in axes] == ["scene", "found", "", ""]
    assert [len(axis.images) for axis in axes] == [1, 1, 1, 1]
    assert [len(axis.collections) for axis in axes] == [0, 1, 0, 0]  # outlines where there is something true
    assert {text.get_text() for text in figure.legends[0].get_texts()} == {"certain", "possible", "excluded", "truth"}
    assert plots.png(figure, dpi=50)[:4] == b"\x89PNG"
