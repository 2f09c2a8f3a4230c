"""Losses of one label, of several and of pixels; views that move labels with their pixels; training on each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from keepcover.data import Labelled
from keepcover.errors import InputError
from keepcover.models import UNet
from keepcover.training import fit_under_noise
from keepcover.training.base import noisy_accuracy, train_base
from keepcover.training.losses import CrossEntropy, rarity
from keepcover.training.recipe import Recipe
from keepcover.training.views import Views

IGNORE = 7


def boxes(count: int, seed: int = 0, side: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Images with a bright box somewhere, and where it is; the first row of every image has no label."""
    generator = torch.Generator().manual_seed(seed)
    images, masks = torch.full((count, 1, side, side), 0.2), torch.zeros(count, side, side, dtype=torch.int64)
    for i, (top, left) in enumerate(torch.randint(1, side - 5, (count, 2), generator=generator).tolist()):
        images[i, :, top : top + 4, left : left + 4] = 0.9
        masks[i, top : top + 4, left : left + 4] = 1
    masks[:, 0] = IGNORE
    return images, masks


def test_pixels_without_a_label_cost_nothing() -> None:
    """By hand: the mean over labelled pixels of -log p, per image; an image without any costs zero, not NaN."""
    outputs, truth = torch.randn(3, 4, 5, 6), torch.randint(0, 4, (3, 5, 6))
    truth[0, :2], truth[2] = IGNORE, IGNORE
    found, log = CrossEntropy(IGNORE)(outputs, truth), outputs.log_softmax(dim=1)
    for i in range(2):
        want = [-log[i, truth[i, r, c], r, c] for r in range(5) for c in range(6) if truth[i, r, c] != IGNORE]
        torch.testing.assert_close(found[i], torch.stack(want).mean())
    assert found[2] == 0
    assert len(CrossEntropy(IGNORE).right(outputs, truth)) == 18 + 30
    moved = outputs.clone()
    moved[0, :, :2] += 5 * torch.randn(4, 2, 6)
    torch.testing.assert_close(CrossEntropy(IGNORE)(moved, truth), found)


def test_the_shape_of_the_truth_says_which_loss() -> None:
    outputs, labels, several = torch.randn(5, 3), torch.tensor([0, 2, 1, 1, 0]), torch.rand(5, 3) < 0.5
    torch.testing.assert_close(CrossEntropy()(outputs, labels), F.cross_entropy(outputs, labels, reduction="none"))
    want = -torch.where(several, outputs.sigmoid().log(), (-outputs).sigmoid().log()).mean(dim=1)
    torch.testing.assert_close(CrossEntropy()(outputs, several), want)
    weights = (1.0, 2.0, 5.0)
    weighed = CrossEntropy(weights=weights)(outputs, labels)
    torch.testing.assert_close(weighed, CrossEntropy()(outputs, labels) * torch.tensor(weights)[labels])
    with pytest.raises(InputError, match=r"expected labels of shape \[5\] for outputs \[5, 3\], got \[4\]"):
        CrossEntropy()(outputs, labels[:4])
    with pytest.raises(InputError, match=r"expected labels of shape \[5, 3\] .* got \[5\] \(torch.bool\)"):
        CrossEntropy()(outputs, labels > 0)


def test_rare_classes_weigh_more() -> None:
    truth = torch.tensor([0] * 90 + [1] * 9 + [2] + [IGNORE] * 50)
    weights = torch.tensor(rarity(truth, 4))
    assert float(weights[1] / weights[0]) == pytest.approx(10**0.5)
    assert float(weights[2] / weights[0]) == pytest.approx(90**0.5)
    assert float(weights[truth[:100]].mean()) == pytest.approx(1, rel=0.1)  # the absent class takes a little
    assert weights.isfinite().all()


def test_labels_move_with_their_pixels() -> None:
    """Pixels show their own label: whatever is cropped and mirrored, they agree, and the border is ignored."""
    masks = torch.randint(1, 5, (4, 6, 8))
    data = Labelled("toy", masks[:, None].float() * 50 / 255, masks, tuple("abcde"))
    views = Views.of(data, Recipe(0.0, pad=2, flip=True), "cpu", border=IGNORE)
    torch.manual_seed(0)
    seen = set()
    for _ in range(20):
        images, labels = views.pick(torch.tensor([3, 1, 1, 0]))
        assert labels is not None
        shown = (images[:, 0] * 255 / 50).round().long()
        assert torch.equal(torch.where(shown == 0, IGNORE, shown), labels)
        seen |= {tuple(labels[0].flatten().tolist())}
    assert len(seen) > 10
    with pytest.raises(InputError, match="cutmix"):
        Views.of(data, Recipe(0.0, cutmix=0.5), "cpu")


def test_a_network_learns_pixels() -> None:
    images, masks = boxes(64)
    torch.manual_seed(0)
    model, loss = UNet(2, 4, channels=1), CrossEntropy(IGNORE)
    fit_under_noise(model, images, masks, 0.1, epochs=8, batch_size=16, loss=loss, progress=False)
    test, truth = boxes(16, seed=1)
    with torch.no_grad():
        right = loss.right(model(test), truth).double().mean()
    assert right > 0.97  # a constant answer has 0.88


def test_several_labels_are_learned() -> None:
    torch.manual_seed(0)
    images = (torch.rand(256, 1, 2, 2) < 0.5).float()
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4))
    fit_under_noise(model, images, images.flatten(1) > 0.5, 0.1, lr=0.03, progress=False)
    assert ((model(images) > 0) == (images.flatten(1) > 0.5)).all()


def test_base_training_writes_a_segmentation_network(tmp_path: Path) -> None:
    images, masks = boxes(40)
    data, out = Labelled("boxes", images, masks, ("ground", "box")), tmp_path / "unet.safetensors"
    torch.manual_seed(0)
    model = UNet(2, 2, channels=1)
    recipe = Recipe(0.1, epochs=2, batch_size=8, lr=3e-3, pad=1, average=0.2, optimiser="adamw")
    loss = CrossEntropy(IGNORE, rarity(masks, 2))
    card = train_base(model, data, data[:8], recipe, out, architecture="unet-2", loss=loss, progress=False, say=print)
    assert card["loss"] == {"ignore": IGNORE, "weights": loss.weights}
    share = noisy_accuracy(model, data[:8], 0.1, "cpu", loss=loss)
    assert card["top1_accuracy_one_noisy_draw_test"] == share
    with pytest.raises(InputError, match=r"expected logits of shape \(2, 2, 12, 12\)"):
        train_base(
            nn.Sequential(nn.Flatten(), nn.Linear(144, 2)), data, data, recipe, out, architecture="no", loss=loss
        )
