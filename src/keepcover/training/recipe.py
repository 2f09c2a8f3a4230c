"""How a network is trained under noise, as numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from keepcover.errors import InputError
from keepcover.noise import Noise, get_noise

Device = torch.device | str
# What a network trained by another optimiser than the one its recipe names has in place of its rate.
RATES: dict[str, dict[str, Any]] = {"sgd": {"lr": 0.2, "nesterov": True}, "adamw": {"lr": 3e-3}, "muon": {"lr": 0.03}}


@dataclass(frozen=True)
class Recipe:
    """How a base model is trained; the defaults are those of the CIFAR ResNets.

    Attributes:
        sigma: of the Gaussian noise.
        noise: another noise in its place, as on the command line: ``uniform:0.5``.
        optimiser: ``sgd``, ``adamw`` or ``muon``, whose rate is the angle of a step.
        epochs: passes over the data; measured where ``minutes`` is given.
        batch_size: images per step, each under ``copies`` noises.
        lr: highest rate: linear warm-up over ``warmup_epochs``, then cosine to zero.
        pad: pixels of random shift.
        flip: mirror at random.
        cutout: side of a square that is made grey at a random place of every image; 0 for none.
        cutmix: share of images in which a random rectangle is taken from another image, and with it a share of the label.
        average: share of the run over which weights are averaged exponentially; 0 keeps the last ones.
        teacher_weight: of the teachers' outputs in the loss, where there are teachers; the labels have the rest.
        temperature: at which outputs are compared with the teachers'.
        minutes: wall-clock time for the whole run, compiler included.
        clip: longest gradient, a longer one is scaled down to it; 0 for any length.
    """

    sigma: float
    epochs: int = 80
    batch_size: int = 256
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 1e-4
    warmup_epochs: int = 2
    pad: int = 4
    flip: bool = True
    seed: int = 0
    nesterov: bool = False
    copies: int = 1
    cutout: int = 0
    cutmix: float = 0.0
    average: float = 0.0
    teacher_weight: float = 0.9
    temperature: float = 2.0
    minutes: float | None = None
    noise: str | None = None
    optimiser: str = "sgd"
    clip: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.sigma < math.inf and 0 < self.lr < math.inf) or min(self.epochs, self.batch_size) < 1:
            found = f"{self.sigma}, {self.epochs}, {self.batch_size} and {self.lr}"
            raise InputError(f"expected sigma >= 0, epochs >= 1, a batch size >= 1 and lr > 0, all finite, got {found}")
        if self.pad < 0 or self.cutout < 0:
            raise InputError(f"expected pad and cutout of 0 pixels or more, got {self.pad} and {self.cutout}")
        if self.optimiser not in RATES:
            raise InputError(f"expected an optimiser among {', '.join(RATES)}, got {self.optimiser!r}")
        shares = self.cutmix, self.average, self.teacher_weight
        if not all(0 <= share <= 1 for share in shares):
            raise InputError(f"expected shares in [0, 1] for cutmix, average and teacher_weight, got {shares}")
        if self.copies < 1 or not self.temperature > 0 or not (self.minutes is None or 0 < self.minutes < math.inf):
            found = f"{self.copies}, {self.temperature} and {self.minutes}"
            raise InputError(f"expected copies >= 1, temperature > 0 and minutes > 0, got {found}")

    @property
    def law(self) -> Noise:
        """The noise it trains under."""
        return get_noise(self.sigma if self.noise is None else self.noise)

    def learning_rate(self, step: int, steps_per_epoch: int) -> float:
        """Linear warm-up, then cosine to zero.

        Example:
            >>> recipe = Recipe(0.25, epochs=10, warmup_epochs=2)
            >>> [round(recipe.learning_rate(step, 1), 4) for step in (0, 1, 2, 6, 10)]
            [0.05, 0.1, 0.1, 0.05, 0.0]
        """
        warm, total = min(self.warmup_epochs, self.epochs - 1) * steps_per_epoch, self.epochs * steps_per_epoch
        if step < warm:
            return self.lr * (step + 1) / warm
        return self.lr * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, total - warm)))


# In place of the defaults: small networks, and wide ones, which overfit under the defaults.
SMALL: dict[str, Any] = {"weight_decay": 1e-3, "temperature": 1.0, "optimiser": "adamw"}
WIDE: dict[str, Any] = {"batch_size": 512, "weight_decay": 1e-3, "cutout": 12, "average": 0.04}
WIDE |= {"optimiser": "muon", **RATES["muon"]}


def recommended(model: str, optimiser: str | None = None) -> dict[str, Any]:
    """What a recipe for the network of this name has in place of the defaults: wide networks overfit under the defaults.

    Example:
        >>> recommended("wrn-28-8")["optimiser"], recommended("cifar-resnet110")
        ('muon', {})
        >>> recommended("cifar-resnet110", "adamw")
        {'optimiser': 'adamw', 'lr': 0.003}
    """
    usual = dict(WIDE) if "wrn-" in model else {}
    if optimiser in (None, usual.get("optimiser", Recipe.optimiser)):
        return usual
    return {**usual, "optimiser": optimiser, **RATES.get(optimiser, {})}
