"""Laplace noise against L1 attacks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from keepcover.errors import InputError
from keepcover.noise.base import Noise, added_noise
from keepcover.noise.norms import Shape
from keepcover.noise.stream import Stream, added

_PIECE = 2**16  # numbers whose logarithm is taken together: what is allocated in between stays in a CPU's cache


@dataclass(frozen=True)
class Laplace(Noise):
    r"""Independent Laplace noise of density :math:`e^{-|n| / scale} / (2\,scale)` on every input number.

    With :math:`\rho = \epsilon / scale`,

    .. math:: up(q) = q e^\rho \; (q \le e^{-\rho} / 2), \qquad 1 - e^{-\rho} / (4q) \; (q \le 1/2), \qquad
        1 - (1 - q) e^{-\rho} \; (\text{else})

    which is :math:`\bar F(\bar F^{-1}(q) - \epsilon)`: half-spaces along an axis attain it. In one dimension that is
    Neyman-Pearson, because log-concave noise has a monotone likelihood ratio; then move coordinate by coordinate: up is
    concave, and :math:`up_a(up_b(q)) = up_{a+b}(q)`.

    The noise takes :math:`2^{52}` equally likely values. Rounded with the input to a grid of about scale / 1024, each number is
    within :math:`2^{-33}` in total variation of Laplace noise so rounded.

    Reference: Teng, Lee & Yuan, L1 adversarial robustness certificates, 2020.

    Example:
        >>> Laplace(1.0).up([0.2, 0.4, 0.8], 0.5).round(4)
        array([0.3297, 0.6209, 0.8787])
        >>> print(Laplace(0.25))
        Laplace noise of scale 0.25
    """

    scale: float

    name, norms, weaker = "laplace", ("l1",), "a larger scale"
    assumptions = added_noise("a thousandth of the noise", "Laplace")

    def __post_init__(self) -> None:
        if not (isinstance(self.scale, int | float) and 0 < self.scale < math.inf):
            raise InputError(f"expected a finite scale > 0, got {self.scale}")
        object.__setattr__(self, "scale", float(self.scale))

    def noisy(self, images: Tensor, stream: Stream, ids: Tensor, draws: range) -> Tensor:
        noise = stream.unit(ids, draws, tuple(images.shape[1:])).contiguous()
        for piece in noise.view(-1).split(_PIECE):
            # 2 min(u, 1 - u) is exact, and so is the sign: which half u is in.
            rest = 1 - piece
            size = minus_log(torch.minimum(piece, rest).mul_(2)).mul_(self.scale)
            piece.copy_(torch.where(piece < rest, -size, size))
        return added(images, noise, self.scale)

    def worst(self, q: ndarray, epsilon: float, norm: str, shape: Shape) -> Any:
        shrink = math.exp(-epsilon / self.scale)
        upper = np.where(q <= 0.5, 1 - shrink / (4 * q), 1 - (1 - q) * shrink)
        return np.where(q <= shrink / 2, q / shrink if shrink else 1.0, upper)

    def kinks(self, epsilon: float, norm: str, shape: Shape) -> tuple[float, ...]:
        return math.exp(-epsilon / self.scale) / 2, 0.5

    def __str__(self) -> str:
        return f"Laplace noise of scale {self.scale:g}"


def minus_log(u: Tensor) -> Tensor:
    r"""-log u for u in (0, 1] in float64, by correctly rounded operations alone: the same bits on every device.

    :math:`u = m 2^e` with m between the roots of 1/2 and 2, and :math:`\log m = 2\,\mathrm{artanh}(z)`, z = (m - 1) / (m + 1).

    Example:
        >>> u = torch.tensor([1.0, 0.5, 1e-15], dtype=torch.float64)
        >>> bool(((minus_log(u) + u.log()).abs() <= 1e-15 * u.log().abs()).all())
        True
    """
    m, e = torch.frexp(u)
    low = m < math.sqrt(0.5)
    m, e = torch.where(low, m * 2, m), (e - low.to(e.dtype)).to(torch.float64)
    z = (m - 1) / (m + 1)
    square = z * z
    series = torch.full_like(z, 1 / 21)
    for k in range(9, -1, -1):
        series = series.mul_(square).add_(1 / (2 * k + 1))
    return series.mul_(z).mul_(-2).sub_(e.mul_(math.log(2)))
