"""Noise that is added to every number of an input: Gaussian, Laplace, uniform. The only certificates that know a probit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy import ndarray
from scipy.special import ndtr, ndtri
from torch import Tensor

from keepcover.assumption import Assumption
from keepcover.errors import InputError
from keepcover.noise.base import FRESH, PHILOX, Noise, pseudorandom
from keepcover.noise.norms import Shape
from keepcover.noise.stream import Stream, added

_PIECE = 2**16  # numbers whose logarithm is taken together: what is allocated in between stays in a CPU's cache


def _rounded(step: str, law: str) -> tuple[Assumption, Assumption]:
    added = f"{PHILOX}, added to the input and rounded with it to a grid of about {step}"
    return FRESH, pseudorandom(f"{added}, stand in for real {law} noise.")


@dataclass(frozen=True)
class Gaussian(Noise):
    r"""Independent normal noise of standard deviation ``sigma`` on every input number.

    .. math:: up(q) = \Phi(\Phi^{-1}(q) + \epsilon / \sigma)

    by Neyman-Pearson: half-spaces attain it. The L1 ball lies inside the L2 ball of the same radius, the Linf ball of d numbers
    inside that of :math:`\epsilon \sqrt d`; every channel of a pixel counts. ``Gaussian(0)`` adds nothing and certifies nothing.

    Reference: Cohen, Rosenfeld & Kolter, Certified adversarial robustness via randomized smoothing, ICML 2019.

    Example:
        >>> round(float(Gaussian(0.25).up(0.1, 0.125)), 4)
        0.2172
        >>> round(float(Gaussian(0.25).up(0.1, 1 / 255, "linf", (3, 32, 32))), 6), round(3072**0.5 / 255, 5)
        (0.340122, 0.21736)
        >>> print(Gaussian(0.25))
        Gaussian noise sigma 0.25
    """

    sigma: float

    name, norms, weaker = "gaussian", ("l2", "l1", "linf"), "a larger sigma"
    remedy = (
        "put a denoiser before it (keepcover.denoised), fine-tune it under this noise (keepcover.training.fit_under_noise) or "
        "choose less noise: keepcover.check compares them"
    )
    assumptions = _rounded("sigma / 1024", "Gaussian")

    def __post_init__(self) -> None:
        if not (isinstance(self.sigma, int | float) and 0 <= self.sigma < math.inf):
            raise InputError(f"expected a finite sigma >= 0, got {self.sigma}")
        object.__setattr__(self, "sigma", float(self.sigma))

    @property
    def certifies(self) -> bool:
        return self.sigma > 0

    def noisy(self, images: Tensor, stream: Stream, ids: Tensor, draws: range) -> Tensor:
        if self.sigma == 0:
            same = images.float() if images.is_floating_point() else images
            return same[:, None].expand(-1, len(draws), *images.shape[1:])
        return stream.noisy(images, ids, draws, self.sigma)

    def fresh(self, images: Tensor) -> Tensor:
        return images + self.sigma * torch.randn_like(images)

    def worst(self, q: ndarray, epsilon: float, norm: str, shape: Shape) -> Any:
        if self.sigma == 0:
            return np.ones_like(q)
        length = epsilon * math.sqrt(math.prod(shape)) if norm == "linf" else epsilon
        return np.where((q == 0) | (q == 1), q, ndtr(ndtri(q) + length / self.sigma))

    def needs_shape(self, norm: str) -> bool:
        return norm == "linf"

    def grid(self) -> ndarray:
        z = np.concatenate([np.linspace(-38.0, -6.0, 129)[:-1], np.linspace(-6.0, 8.2, 513)])
        return np.unique(np.concatenate([[0.0], ndtr(z), [1.0]]))

    def __str__(self) -> str:
        return f"Gaussian noise sigma {self.sigma:g}"


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
    assumptions = _rounded("a thousandth of the noise", "Laplace")

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
    assumptions = _rounded("a thousandth of the noise", "uniform")

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
