"""The worst attack of every noise, carried out: real inputs, real noise, a model that fails wherever up says that one can.

The truth is class 0. Where noise hides or is bounded, a model says class 1 of easy inputs only where the attack shows, and of hard ones,
a few of the clean inputs, always: a certificate must pay for up(0) out of what the hard ones leave of alpha. Under other noise its
score climbs along the attack, so that what exceeds a threshold is a half-space. Seeds are fixed; a verdict is an exact p-value below 0.001.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import keepcover
from keepcover import Ablation, Bands, Gaussian, Laplace, Noise, RandomBands, Uniform
from keepcover.noise.norms import Shape

pytestmark = pytest.mark.filterwarnings("ignore::keepcover.errors.KeepcoverWarning")
SHAPE, MARK = (3, 6, 8), 0.9


class Fails(nn.Module):
    """Class 1 where ``shows`` of what it reads exceeds ``limit``, or where the input is hard; class 0 elsewhere."""

    def __init__(self, shows: Callable[[Tensor], Tensor], limit: float) -> None:
        super().__init__()
        self.shows, self.limit = shows, nn.Parameter(torch.tensor(limit))

    def forward(self, images: Tensor) -> Tensor:
        seen = self.shows(images)
        hard = images.flatten(1).nan_to_num(nan=-math.inf).amax(dim=1) > 100
        fails = ((seen > self.limit) | hard).float()
        return torch.stack([3 - 6 * fails, 6 * fails - 3], dim=1)


class Climbs(Fails):
    """The further ``shows`` is, the more it says class 1."""

    def forward(self, images: Tensor) -> Tensor:
        further = self.shows(images) - self.limit
        return torch.stack([-further, further], dim=1)


def brightest(images: Tensor) -> Tensor:
    return images.flatten(1).nan_to_num(nan=-math.inf).amax(dim=1)


def first(images: Tensor) -> Tensor:
    return images.flatten(1)[:, 0]


def along_all(images: Tensor) -> Tensor:
    return images.flatten(1).sum(dim=1) / math.sqrt(images[0].numel())


def marked(places: Callable[[int], Any]) -> Callable[[Tensor, float], Tensor]:
    """Replace positions by the mark, in every channel."""

    def attack(images: Tensor, epsilon: float) -> Tensor:
        moved = images.clone()
        rows, columns = places(int(epsilon))
        moved[:, :, rows, columns] = MARK
        return moved

    return attack


def pushed(images: Tensor, epsilon: float) -> Tensor:
    moved = images.clone()
    moved.view(len(images), -1)[:, 0] += epsilon
    return moved


def lifted(images: Tensor, epsilon: float) -> Tensor:
    return images + epsilon


@dataclass(frozen=True)
class Worst:
    """A noise, what it certifies, the model that fails as much as up allows, the attack, and one that is larger."""

    noise: Noise
    norm: str
    epsilon: float
    model: Fails
    attack: Callable[[Tensor, float], Tensor]
    larger: float
    hard: float = 0.04


def pixels(m: int) -> Any:
    return torch.arange(m) // SHAPE[2], torch.arange(m) % SHAPE[2]


def square_at_the_border(m: int) -> Any:
    return slice(0, m), slice(SHAPE[2] - m, SHAPE[2])


CASES = {
    "ablation": Worst(Ablation(6), "l0", 2, Fails(brightest, 0.5), marked(pixels), 8),
    "ablation, patch": Worst(Ablation(4), "patch", 2, Fails(brightest, 0.5), marked(square_at_the_border), 4),
    "random bands": Worst(RandomBands(2), "patch", 2, Fails(brightest, 0.5), marked(square_at_the_border), 5),
    "bands": Worst(Bands(2), "patch", 2, Fails(brightest, 0.5), marked(square_at_the_border), 5),
    "uniform": Worst(Uniform(0.5), "l1", 0.3, Fails(first, 0.5), pushed, 0.9),
    "laplace": Worst(Laplace(0.5), "l1", 0.8, Climbs(first, 6.0), pushed, 1.8, hard=0),
    "gaussian, l1": Worst(Gaussian(0.5), "l1", 0.4, Climbs(first, 4.0), pushed, 0.8, hard=0),
    "gaussian, l2": Worst(Gaussian(0.5), "l2", 0.4, Climbs(first, 4.0), pushed, 0.8, hard=0),
    "gaussian, linf": Worst(Gaussian(0.5), "linf", 0.4 / 12, Climbs(along_all, 4.0), lifted, 0.8 / 12, hard=0),
}


def inputs(n: int, seed: int, hard: float) -> tuple[Tensor, Tensor]:
    """Dark images, a few of them hard; the truth is class 0."""
    images = torch.zeros(n, *SHAPE, dtype=torch.float64)
    images[torch.rand(n, generator=torch.Generator().manual_seed(seed)) < hard] = 1000.0
    return images, torch.zeros(n, dtype=torch.int64)


def verdict(worst: Worst, noise: Noise, radius: float) -> tuple[str, float]:
    """Of the predictor that believes in ``noise``, under the real noise and the worst attack of this radius; and its mean size."""
    draws = {} if noise.deterministic else {"draws": 16, "calibration_draws": 16}
    method = "bands" if noise.deterministic else "exact"
    predictor = keepcover.calibrate(
        worst.model,
        inputs(900, 1, worst.hard),
        epsilon=worst.epsilon,
        norm=worst.norm,
        noise=noise,
        method=method,
        seed=1,
        **draws,
    )
    attacks = {"worst": lambda images, _, epsilon: worst.attack(images, epsilon)}
    report = keepcover.audit(
        predictor, inputs(1000, 2, worst.hard), attacks=attacks, radii=[radius], seed=3, progress=False
    )
    return report.rows[1].verdict, report.rows[0].size


@pytest.mark.parametrize("case", CASES)
def test_the_worst_attack_within_epsilon_is_survived_and_a_larger_one_is_not(case: str) -> None:
    worst = CASES[case]
    assert verdict(worst, worst.noise, worst.epsilon) == ("consistent", pytest.approx(1.0, abs=0.2))
    assert verdict(worst, worst.noise, worst.larger)[0] == "no promise, lost"


def believing(noise: Noise) -> Noise:
    """The same noise, said to leave every probability as it is."""

    class Careless(type(noise)):  # type: ignore[misc]
        def worst(self, q: Any, epsilon: float, norm: str, shape: Shape) -> Any:
            return q

        def touched(self, epsilon: float, shape: Shape) -> int:
            return 0

    return Careless(**{name: value for name, value in noise.config().items() if name != "name"})


@pytest.mark.parametrize("case", CASES)
def test_who_forgets_the_attack_is_found_out(case: str) -> None:
    worst = CASES[case]
    assert verdict(worst, believing(worst.noise), worst.epsilon)[0] == "violated"
