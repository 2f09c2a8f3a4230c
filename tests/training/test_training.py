"""Training under noise: the noisy loss falls, the seed decides everything, bad input is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from keepcover.errors import InputError, KeepcoverWarning
from keepcover.models.denoiser import Denoiser, denoised
from keepcover.noise import Bands, Gaussian, Noise, RandomBands, Uniform
from keepcover.training import fit_under_noise
from keepcover.training.views import padded_bytes
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
    """epochs x batches steps; batches have one size, at most the one asked for."""
    reports: list[tuple[int, int]] = []
    fit_under_noise(
        fresh(), *toy(50), 0.1, epochs=3, batch_size=20, progress=lambda done, total: reports.append((done, total))
    )
    assert reports == [(step, 9) for step in range(1, 10)]


def test_without_labels_a_network_keeps_what_it_said() -> None:
    """It is trained on clean images first. Labels are not needed, and the frozen copy is not trained."""
    images, test = toy(300, seed=1)[0], toy(300, seed=2)
    model = train(sigma=0.0, epochs=30, lr=0.05)
    said = model(test[0]).argmax(dim=1)
    before = noisy_loss(model, (test[0], said), 0.3)
    fit_under_noise(model, images, sigma=0.3, epochs=30, lr=0.02, progress=False)
    assert noisy_loss(model, (test[0], said), 0.3) < 0.8 * before
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("noise", [Bands(2), RandomBands(2), Uniform(0.5)], ids=str)
def test_any_noise_trains_through_its_seam(noise: Noise) -> None:
    """What the network sees is the noise's own, and new in every step; sigma and noise exclude each other."""
    seen: list[Tensor] = []

    class Watched(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            seen.append(input.detach()[:, 0, 0])
            return super().forward(input.nan_to_num(0.0))

    images, labels = torch.ones(64, 1, 4, 4), torch.zeros(64, dtype=torch.int64)
    model = Watched(nn.Flatten(), nn.Linear(16, 2))
    fit_under_noise(model, images, labels, noise=noise, epochs=4, progress=False)
    rows = torch.cat(seen)
    if noise.hides:
        assert (rows.isnan().sum(dim=1) == 2).all()
        assert len({tuple(row) for row in rows.isnan().tolist()}) == 4
    else:
        assert 0.45 < (rows - 1).abs().max() <= 0.5
    assert len({str(batch) for batch in seen[1:]}) == 4
    for both in ({}, {"sigma": 0.1, "noise": noise}):
        with pytest.raises(InputError, match="one of the two"):
            fit_under_noise(model, images, labels, **both)


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
        ({"labels": ["cat"] * 20}, "such as integer class labels, got 'cat'"),
        ({"labels": toy(20)[1] + 3}, "expected labels between 0 and 3 .the model has 4 outputs., got 3 to 6"),
        ({"labels": toy(20)[1].float()}, "expected integer class labels, got dtype torch.float32"),
        ({"model": lambda images: images}, "expected a torch module to train, got function"),
        ({"model": fresh().requires_grad_(False)}, "parameters to train, got none from .*: they are all frozen"),
        ({"model": nn.Flatten()}, "parameters to train, got none from Flatten"),
        ({"sigma": None, "noise": "laplace"}, "expected noise as name:number"),
        ({"images": toy(20)}, r"expected images \[n, ...\] as a tensor or array, got tuple"),
        ({"model": nn.RNN(4, 4)}, r"RNN cannot take images of shape \(1, 4, 4\) .*number of channels"),
        (
            {"model": nn.Sequential(nn.Flatten(), nn.LSTM(16, 4))},
            "expected logits .*, got tuple from Sequential; wrap it",
        ),
    ],
)
def test_bad_input_is_refused(changes: dict[str, Any], match: str) -> None:
    images, labels = toy(20)
    request = {"model": fresh(), "images": images, "labels": labels, "sigma": 0.1, "progress": False, **changes}
    with pytest.raises(InputError, match=match):
        inspect.unwrap(fit_under_noise)(**request)  # without the types that tests alone check


class Inverting(Denoiser):
    """One that does harm: it turns light into dark."""

    def __init__(self) -> None:
        super().__init__(channels=1, widths=(4, 4, 4, 4), blocks=(1, 1, 1, 1))

    def forward(self, images: Tensor, sigma: Tensor | float) -> Tensor:
        return 1 - images + 0 * super().forward(images, sigma)


def test_a_denoised_model_learns_what_its_classifier_said() -> None:
    """The line that keepcover.check recommends runs for it too. The teacher sees images as they are, or it would learn nothing."""
    images, labels = toy(300, seed=1)
    options: dict[str, Any] = {"epochs": 25, "lr": 0.2, "progress": False}
    linear = fit_under_noise(nn.Sequential(nn.Flatten(), nn.Linear(16, 4)), images, labels, 0.0, **options)
    model = denoised(linear, Inverting())

    def right(one: nn.Module) -> float:
        return float((one(toy(300, seed=2)[0]).argmax(1) == toy(300, seed=2)[1]).double().mean())

    assert right(model.under_noise(Gaussian(0.1))) < 0.4 < 0.8 < right(model.under_noise(Gaussian(0.0)))
    tuned = fit_under_noise(model, images.numpy(), sigma=0.1, **options)
    assert tuned.sigma == 0.1
    assert right(tuned) > 0.8


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = fresh(), nn.Linear(2, 2)

    def forward(self, images: Tensor) -> Tensor:
        return self.used(images)


def test_a_part_that_no_output_depends_on_does_no_harm() -> None:
    """A second head, or the denoiser where there is no noise. A noise may have its name, as for calibrate."""
    images, labels = toy(200, seed=1)
    model = TwoHeads()
    fit_under_noise(model, images, labels, noise="gaussian:0.1", epochs=20, lr=0.2, progress=False)
    assert float((model(images).argmax(1) == labels).double().mean()) > 0.8
    fit_under_noise(denoised(fresh(), Inverting()), images, labels, 0.0, epochs=1, progress=False)


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
