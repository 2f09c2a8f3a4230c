"""Bands against patches: the model sees a few columns at a time, and a patch is in few of the bands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from numpy import ndarray
from torch import Tensor

from keepcover.assumption import Assumption
from keepcover.errors import InputError
from keepcover.noise.ablation import UNMIXED, anew, hidden
from keepcover.noise.base import Noise
from keepcover.noise.norms import Shape
from keepcover.noise.stream import Stream


@dataclass(frozen=True)
class Bands(Noise):
    r"""Every cyclic band of ``width`` columns, one after the other: no noise, no secret, as many evaluations as columns.

    A patch of m columns, of any height, touches at most m + width - 1 of the w bands, and they are neighbours:

    .. math:: up(q) = \min(1, q + (m + s - 1) / w)

    for a share q of the bands. The method ``bands`` certifies it. What is outside the band is absent, as in
    :class:`keepcover.noise.Ablation`.

    Reference: Levine & Feizi, (De)Randomized smoothing for certifiable defense against patch attacks, NeurIPS 2020.

    Example:
        >>> round(float(Bands(4).up(0.0, 5, shape=(3, 32, 32))), 4), Bands(4).positions((3, 32, 32))
        (0.25, 32)
        >>> print(Bands(4))
        all bands of 4 columns
    """

    width: int

    name, norms, weaker = "bands", ("patch",), "narrower bands"
    hides = deterministic = True
    each = "band"
    assumptions = (
        Assumption(
            "Nothing is random and nothing is secret: the attacker may know everything, and a query with the same id gets the same answer.",
            "library",
            "Every position is evaluated, in order.",
        ),
        UNMIXED,
    )

    def __post_init__(self) -> None:
        if not (isinstance(self.width, int | float) and self.width >= 1 and self.width % 1 == 0):
            raise InputError(f"expected a whole number of columns, at least 1, got {self.width}")
        object.__setattr__(self, "width", int(self.width))

    def positions(self, shape: Shape) -> int:
        if len(shape) < 3 or shape[-1] < self.width:
            needs = "images [channels, height, width] of at least so many"
            raise InputError(f"bands of {self.width} columns need {needs}, got {list(shape)}")
        return shape[-1]

    def touched(self, epsilon: float, shape: Shape) -> int:
        """How many bands a patch of this side can touch."""
        return min(int(epsilon) + self.width - 1, self.positions(shape)) if epsilon else 0

    def noisy(self, images: Tensor, stream: Stream, ids: Tensor, draws: range) -> Tensor:
        first = self._first(stream, ids, draws, self.positions(tuple(images.shape[1:])))
        columns, total = torch.arange(images.shape[-1], device=images.device), images.shape[-1]
        kept = (columns - first[..., None]) % total < self.width
        return hidden(images, kept[..., None, :].expand(-1, -1, images.shape[-2], -1).flatten(2))

    def _first(self, stream: Stream, ids: Tensor, draws: range, total: int) -> Tensor:
        """The first column of every band, [b, len(draws)]."""
        if draws.stop > total:
            raise InputError(f"there are {total} bands, one for every column, asked for {draws.stop}")
        return torch.arange(draws.start, draws.stop, draws.step, device=ids.device).expand(len(ids), -1)

    def fresh(self, images: Tensor) -> Tensor:
        return Noise.fresh(RandomBands(self.width), images)  # training sees every band in turn

    def worst(self, q: ndarray, epsilon: float, norm: str, shape: Shape) -> Any:
        return q + self.touched(epsilon, shape) / self.positions(shape)

    def kinks(self, epsilon: float, norm: str, shape: Shape) -> tuple[float, ...]:
        return (1 - self.touched(epsilon, shape) / self.positions(shape),)

    def needs_shape(self, norm: str) -> bool:
        return True

    def __str__(self) -> str:
        return f"all bands of {self.width} columns"


@dataclass(frozen=True)
class RandomBands(Bands):
    """One band of ``width`` columns per draw, at a secret place, with replacement across draws: for few draws per query.

    The place is a number of 52 bits times the columns, rounded down: within columns / 2^52 of uniform in total variation.

    Example:
        >>> print(RandomBands(4))
        random bands of 4 columns
    """

    name, deterministic, each = "random_bands", False, "draw"
    assumptions = anew("place the band")

    def _first(self, stream: Stream, ids: Tensor, draws: range, total: int) -> Tensor:
        return stream.unit(ids, draws, ()).mul_(total).floor_().long()

    def __str__(self) -> str:
        return f"random bands of {self.width} columns"
