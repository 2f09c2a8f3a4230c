"""Ablation against changed pixels, tokens or features: most of the input is hidden, and with it most of the attack."""

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


def anew(what: str) -> tuple[Assumption, ...]:
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
    assumptions = anew("choose what is kept")

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
