"""Gaussian noise against L2, L1 and Linf attacks: the only file of the certificates that knows a probit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy import ndarray
from scipy.special import ndtr, ndtri
from torch import Tensor

from keepcover.errors import InputError
from keepcover.noise.base import Noise, added_noise
from keepcover.noise.norms import Shape
from keepcover.noise.stream import Stream


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
    before = "put a denoiser before it (keepcover.denoised), "
    remedy = "fine-tune it under this noise (keepcover.training.fit_under_noise) or choose less noise: keepcover.check compares them"
    assumptions = added_noise("sigma / 1024", "Gaussian")

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
