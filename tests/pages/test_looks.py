"""The page of a predictor for every task: its sentence, its numbers and its pictures come from the sets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from keepcover import calibrate_outputs
from keepcover.pages.plots import shaded, size_shares, sorted_intervals, svg
from keepcover.pages.predictor_page import predictor_page
from keepcover.pages.report import Page
from keepcover.tasks import PredictionIntervals, Segmentation

pytest.importorskip("matplotlib")
ASK: dict[str, Any] = {"sigma": 0.5, "seed": 0, "holdout": 40}


def page_of(outputs: Tensor, truth: Tensor, images: Tensor, **ask: Any) -> tuple[Page, Any]:
    """The page on the last 20 points of a predictor that was calibrated on the others, and its sets at the first level."""
    predictor = calibrate_outputs(outputs[:-20], truth[:-20], **{"epsilon": 0.1, **ASK, **ask})
    sets = predictor.predict_outputs(outputs[-20:], seed=0)
    return predictor_page(predictor, {(0.1, 0.1): sets}, images[-20:], truth[-20:], "toy"), sets


def scenes(n: int = 160) -> tuple[Tensor, Tensor]:
    """Noisy logits of three classes on 6 x 8 pixels, and the truth: class 2 is a box somewhere."""
    generator = torch.Generator().manual_seed(0)
    truth = (torch.rand(n, 6, 8, generator=generator) < 0.5).long()
    for i, left in enumerate(torch.randint(0, 5, (n,), generator=generator).tolist()):
        truth[i, 2:5, left : left + 3] = 2
    own = 3 * torch.nn.functional.one_hot(truth, 3).permute(0, 3, 1, 2)[:, None]
    return own + torch.randn(n, 4, 3, 6, 8, generator=generator), truth


def section(page: Page, title: str) -> Any:
    (found,) = [one for one in page.sections if one.title == title]
    return found


def test_masks_are_shown_on_their_scenes() -> None:
    (outputs, truth), images = scenes(), torch.rand(160, 3, 6, 8)
    task = Segmentation(of=("box",), class_names=("a", "b", "box"))
    page, sets = page_of(outputs, truth, images, task=task)
    measured = sets.measure(truth[-20:])
    assert (
        f"pixels of box that the mask of their class misses is {measured.risk.mean:.1%} (promised: at most 10.0%)"
        in page.conclusion
    )
    assert section(page, "Coverage and size").table.rows[0][1] == str(measured.coverage)
    held = sets.covers(truth[-20:])
    (figure,) = section(page, "Scenes").figures
    assert figure.alt.startswith(f"5 scenes and their masks: {float(held.min()):.1%} kept")
    scene, painted = (panel.images[0].get_array() for panel in figure.drawing.get_axes()[:2])
    worst = int(held.argmin())
    assert torch.equal(torch.as_tensor(scene), images[140 + worst].permute(1, 2, 0))
    one = sets[worst]
    want = shaded(images[140 + worst], one.certain("box")[0], one.kept("box")[0])
    assert torch.equal(torch.as_tensor(painted), want.permute(1, 2, 0))
    assert [panel.get_title() for panel in figure.drawing.get_axes()[:2]] == ["the scene", "box"]
    assert "data:image/png" in page.html()


def test_sets_of_every_label_have_one_picture() -> None:
    (outputs, truth), images = scenes(), torch.rand(160, 1, 6, 8)
    page, sets = page_of(outputs, truth, images, task=Segmentation())
    (figure,) = section(page, "Scenes").figures
    assert len(figure.drawing.get_axes()) == 10
    assert "pixels whose true label is missing" in page.conclusion
    unseen, _ = page_of(outputs, truth, torch.rand(160, 7), task=Segmentation())
    assert not any(one.title == "Scenes" for one in unseen.sections)
    assert len(sets) == 20


def test_intervals_are_sorted_by_length() -> None:
    y = torch.randn(200)
    outputs = y[:, None] + 0.3 * torch.randn(200, 4)
    page, sets = page_of(outputs, y, torch.rand(200, 5), task="regression")
    assert isinstance(sets, PredictionIntervals)
    (figure,) = section(page, "Intervals, sorted by length").figures
    missed = int((~sets.contains(y[-20:])).sum())
    assert f"{missed} of them miss it" in figure.alt or sets.pieces.shape[2] > 1
    assert f"{sets.measure(y[-20:]).coverage.mean:.1%} of the unions hold the true value" in page.conclusion


def test_missed_values_are_marked_and_infinite_ends_reach_the_frame() -> None:
    ends = torch.tensor([[0.0, 1.0], [0.0, 2.0], [-torch.inf, torch.inf], [torch.nan, torch.nan]]).double()
    figure = sorted_intervals(ends, torch.tensor([0.5, 3.0, 1.0, 1.0]).double())
    (axis,) = figure.get_axes()
    held, missed = (line.get_xdata().tolist() for line in axis.lines)
    assert (held, missed) == ([0, 2], [1, 3])
    low, high = axis.get_ylim()
    lines = axis.collections[0].get_segments()
    assert lines[2][0][1] < low
    assert lines[2][1][1] > high


def test_several_true_labels_are_named() -> None:
    truth = torch.rand(160, 3) < 0.4
    outputs = 4.0 * truth[:, None] - 2 + torch.randn(160, 4, 3)
    page, sets = page_of(outputs, truth, torch.rand(160, 1, 4, 4), task="multilabel", class_names=("x", "y", "z"))
    examples = section(page, "Examples").examples
    assert any(", " in example.title.removesuffix(", missed") for example in examples)
    assert "(promised: at most 10.0%)" in page.conclusion
    assert len(sets) == 20


def test_figures_have_the_style_and_leave_that_of_others() -> None:
    from matplotlib import rcParams

    before = dict(rcParams)
    figure = size_shares({"exact": [0.1, 0.7, 0.2]})
    svg(figure)
    assert dict(rcParams) == before
    assert not figure.get_axes()[0].spines["top"].get_visible()
