"""Uniform noise against L1 attacks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from numpy import ndarray
from torch import Tensor

from keepcover.errors import InputError
from keepcover.noise.base import Noise, added_noise
from keepcover.noise.norms import Shape
from keepcover.noise.stream import Stream, added


@dataclass(frozen=True)
class Uniform(Noise):
    r"""Independent uniform noise between -``half_width`` and ``half_width`` on every input number.

    .. math:: up(q) = \min(1, q + \epsilon / (2 \lambda))

    since two such cubes, moved by :math:`\delta` against each other, differ in
    :math:`1 - \prod_i (1 - |\delta_i| / 2\lambda) \le |\delta|_1 / 2\lambda` of their volume. An attack reaches up(0) > 0: what
    the clean noise never shows. One draw helps only while up(0) is below alpha.

    The noise takes :math:`2^{52}` equally likely values. Rounded with the input to a grid of about half_width / 1024, each
    number is within :math:`2^{-39}` in total variation of uniform noise so rounded.

    Reference: Levine & Feizi, Improved, deterministic smoothing for L1 certified robustness, ICML 2021.

    Example:
        >>> round(float(Uniform(0.5).up(0.2, 0.3)), 4)
        0.5
        >>> print(Uniform(0.5))
        uniform noise of half width 0.5
    """

    half_width: float

    name, norms, weaker = "uniform", ("l1",), "a larger half width"
    assumptions = added_noise("a thousandth of the noise", "uniform")

    def __post_init__(self) -> None:
        if not (isinstance(self.half_width, int | float) and 0 < self.half_width < math.inf):
            raise InputError(f"expected a finite half width > 0, got {self.half_width}")
        object.__setattr__(self, "half_width", float(self.half_width))

    def noisy(self, images: Tensor, stream: Stream, ids: Tensor, draws: range) -> Tensor:
        noise = stream.unit(ids, draws, tuple(images.shape[1:])).mul_(2).sub_(1).mul_(self.half_width)
        return added(images, noise, self.half_width)

    def worst(self, q: ndarray, epsilon: float, norm: str, shape: Shape) -> Any:
        return q + epsilon / (2 * self.half_width)

    def kinks(self, epsilon: float, norm: str, shape: Shape) -> tuple[float, ...]:
        return (1 - epsilon / (2 * self.half_width),)

    def __str__(self) -> str:
        return f"uniform noise of half width {self.half_width:g}"
