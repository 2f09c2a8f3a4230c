"""Noise that hides most of the input, and with it most of the attack: ablation against changed pixels, tokens or features, and
bands against patches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import torch
from numpy import ndarray
from torch import Tensor

from keepcover.assumption import Assumption
from keepcover.errors import InputError
from keepcover.noise.base import FRESH, PHILOX, Noise, pseudorandom
from keepcover.noise.norms import Shape, everywhere, positions
from keepcover.noise.stream import Stream, widened

ABSENT = -1  # among tokens; NaN among numbers
UNMIXED = Assumption(
    "Nothing mixes pixels before some are hidden: no resizing, no normalisation by the image's own mean, and what is hidden "
    "is not filled from the rest.",
    "you",
    "Positions are hidden before the model sees the input, so the model itself may do what it likes; look at what your code does "
    "to an input before it is calibrated on or asked about.",
)


def _anew(what: str) -> tuple[Assumption, ...]:
    return FRESH, pseudorandom(f"{PHILOX} {what}, anew for every draw."), UNMIXED


@dataclass(frozen=True)
class Ablation(Noise):
    r"""Keep ``keep`` positions, drawn without replacement within a draw; the others become absent.

    A position is a pixel with all its channels where inputs are images [channels, height, width], and an entry of the last axis
    elsewhere: a token, a feature. With d positions of which an attack changes m,

    .. math:: up(q) = \min\left(1, q + 1 - \binom{d-m}{k} / \binom{d}{k}\right)

    since with the remaining probability no changed position is kept, and the model reads what it would have read. Tokens may be
    exchanged, not inserted or deleted. Shorter inputs are easier to attack: a predictor serves one length.

    Absent is NaN, or -1 among tokens, so that a model that does not expect it fails at once;
    :func:`keepcover.models.masked` and :class:`keepcover.models.Filled` show it to ordinary networks.

    Every position gets a number of 52 bits and the smallest are kept: a tie at the last one, of probability d / 2^53, keeps two.

    Reference: Levine & Feizi, Robustness certificates for sparse adversarial attacks by randomized ablation, AAAI 2020.

    Example:
        >>> round(float(Ablation(75).up(0.0, 3, shape=(3, 32, 32))), 4)
        0.2042
        >>> print(Ablation(75))
        ablation that keeps 75 positions
    """

    keep: int

    name, norms, weaker = "ablation", ("l0", "patch"), "fewer positions kept"
    hides = True
    assumptions = _anew("choose what is kept")

    def __post_init__(self) -> None:
        if not (isinstance(self.keep, int | float) and self.keep >= 1 and self.keep % 1 == 0):
            raise InputError(f"expected a whole number of positions to keep, at least 1, got {self.keep}")
        object.__setattr__(self, "keep", int(self.keep))

    def noisy(self, images: Tensor, stream: Stream, ids: Tensor, draws: range) -> Tensor:
        keys = stream.unit(ids, draws, (self._of(tuple(images.shape[1:])),))
        return hidden(images, keys <= keys.kthvalue(self.keep, dim=-1, keepdim=True).values)

    def worst(self, q: ndarray, epsilon: float, norm: str, shape: Shape) -> Any:
        return q + self._mass(epsilon, norm, shape)

    def kinks(self, epsilon: float, norm: str, shape: Shape) -> tuple[float, ...]:
        return (1 - self._mass(epsilon, norm, shape),)

    def needs_shape(self, norm: str) -> bool:
        return True

    def _of(self, shape: Shape) -> int:
        if positions(shape) < self.keep:
            raise InputError(f"{self} meets an input {list(shape)} with {positions(shape)}; keep fewer")
        return positions(shape)

    def _mass(self, epsilon: float, norm: str, shape: Shape) -> float:
        """The probability that a changed position is kept."""
        changed = int(epsilon) if norm == "l0" else int(epsilon) ** 2
        return _seen(self._of(shape), changed, self.keep)

    def __str__(self) -> str:
        return f"ablation that keeps {self.keep} positions"


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
    assumptions = _anew("place the band")

    def _first(self, stream: Stream, ids: Tensor, draws: range, total: int) -> Tensor:
        return stream.unit(ids, draws, ()).mul_(total).floor_().long()

    def __str__(self) -> str:
        return f"random bands of {self.width} columns"


@lru_cache(maxsize=1024)
def _seen(total: int, changed: int, keep: int) -> float:
    if changed >= total:
        return 1.0
    return float(1 - Fraction(math.comb(total - changed, keep), math.comb(total, keep)))


def hidden(images: Tensor, kept: Tensor) -> Tensor:
    """Images ``[b, ...]`` with absent positions where ``kept`` ``[b, draws, positions]`` is False, ``[b, draws, ...]``."""
    draws, flat = kept.shape[1], widened(images).repeat_interleave(kept.shape[1], dim=0)
    mask = everywhere(kept.flatten(0, 1), flat)
    # Tokens of 8 bits have no -1: it would be 255, a token like others.
    shown, absent = (flat.float(), torch.nan) if flat.is_floating_point() else (flat.long(), ABSENT)
    return torch.where(mask, shown, absent).view(len(images), draws, *images.shape[1:])
