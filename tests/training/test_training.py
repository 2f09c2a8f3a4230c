"""Training under noise: the noisy loss falls, the seed decides everything, bad input is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from keepcover.errors import InputError, KeepcoverWarning
from keepcover.training import fit_under_noise
from keepcover.training.base import padded_bytes
from tests.toys import toy


def fresh(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))


def noisy_loss(model: nn.Module, data: tuple[Tensor, Tensor], sigma: float) -> float:
    """Cross-entropy on eight fixed noisy copies of points that training has not seen."""
    generator = torch.Generator().manual_seed(7)
    images, labels = data
    with torch.no_grad():
        losses = [
            nn.functional.cross_entropy(model(images + sigma * torch.randn(images.shape, generator=generator)), labels)
            for _ in range(8)
        ]
    return float(torch.stack(losses).mean())


def train(sigma: float = 0.1, seed: int = 0, **options: Any) -> nn.Module:
    return fit_under_noise(fresh(), *toy(300, seed=1), sigma, seed=seed, progress=False, **{"epochs": 12, **options})


def test_training_lowers_the_noisy_loss() -> None:
    """From chance (log 4 = 1.39) to well below, on fresh points under fresh noise; and the model is left in eval mode."""
    test, model = toy(300, seed=2), fresh()
    before = noisy_loss(model, test, 0.1)
    returned = fit_under_noise(model, *toy(300, seed=1), 0.1, epochs=30, lr=0.05, progress=False)
    assert returned is model
    assert not any(module.training for module in model.modules())
    assert before > 1.2
    assert noisy_loss(model, test, 0.1) < 0.6 * before


def test_training_under_noise_is_for_noise() -> None:
    """At large noise a model trained under it beats one trained without."""
    test = toy(300, seed=2)
    clean, noisy = (train(sigma, epochs=30, lr=0.05) for sigma in (0.0, 0.3))
    assert noisy_loss(noisy, test, 0.3) < noisy_loss(clean, test, 0.3)


def test_the_seed_decides_order_and_noise() -> None:
    """The same weights bit for bit, whatever the global generator does; another seed gives others."""
    one = train(seed=1)
    torch.manual_seed(999)
    same, other = train(seed=1), train(seed=2)
    for a, b in zip(one.parameters(), same.parameters()):
        assert torch.equal(a, b)
    assert not all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters()))


def test_the_inputs_are_not_written_to() -> None:
    images, labels = toy(50)
    kept = images.clone()
    fit_under_noise(fresh(), images, labels, 0.5, epochs=1, progress=False)
    assert torch.equal(images, kept)


def test_every_step_is_reported() -> None:
    """epochs x batches steps, the last batch being whatever is left."""
    reports: list[tuple[int, int]] = []
    fit_under_noise(
        fresh(), *toy(50), 0.1, epochs=3, batch_size=20, progress=lambda done, total: reports.append((done, total))
    )
    assert reports == [(step, 9) for step in range(1, 10)]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"images": torch.zeros(0, 1, 4, 4), "labels": torch.zeros(0, dtype=torch.int64)}, "at least one, got 0 and 0"),
        ({"images": (255 * toy(20)[0]).to(torch.uint8)}, "expected float images in .0, 1., got torch.uint8"),
        ({"images": torch.full((20, 1, 4, 4), torch.nan)}, "NaN"),
        ({"epochs": 0}, "epoch"),
        ({"batch_size": 0}, "batch size"),
        ({"sigma": -0.1}, "sigma"),
        ({"sigma": float("nan")}, "sigma"),
    ],
)
def test_bad_input_is_refused(changes: dict[str, Any], match: str) -> None:
    images, labels = toy(20)
    request = {"images": images, "labels": labels, "sigma": 0.1, "progress": False, **changes}
    with pytest.raises(InputError, match=match):
        fit_under_noise(fresh(), **request)


def test_pixels_that_are_not_in_units_of_sigma_are_warned_of() -> None:
    """As calibrate does: at 0-255 the noise is 255 times too small, and the training is ordinary training."""
    images, labels = toy(20)
    with pytest.warns(KeepcoverWarning, match="images seem to be in 0-255"):
        fit_under_noise(fresh(), 255 * images, labels, 0.1, epochs=1, progress=False)


@pytest.mark.parametrize("change", [lambda x: 255 * x, lambda x: (255 * x).to(torch.uint8), lambda x: 2 * x - 1])
def test_recipes_keep_pixels_as_bytes_so_others_are_refused(change: Callable[[Tensor], Tensor]) -> None:
    """Beyond [0, 1] they would wrap around, silently."""
    images = toy(20)[0].clamp(0, 1)
    assert padded_bytes(images, 0).float().sub(255 * images).abs().max() <= 0.5
    with pytest.raises(InputError, match=r"expected float images in \[0, 1\], the units of sigma, got "):
        padded_bytes(change(images), 0)
