"""Gaussian noise against L2 attacks: the only file of the certificates that knows a probit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy import ndarray
from scipy.special import ndtr, ndtri
from torch import Tensor

from keepcover.errors import InputError
from keepcover.noise.base import FRESH, Noise, Shape, probabilities
from keepcover.noise.stream import Stream


@dataclass(frozen=True)
class Gaussian(Noise):
    r"""Independent normal noise of standard deviation ``sigma`` on every input number.

    .. math:: up(q) = \Phi(\Phi^{-1}(q) + \epsilon / \sigma)

    by Neyman-Pearson: half-spaces attain it. ``Gaussian(0)`` adds nothing and certifies nothing.

    Reference: Cohen, Rosenfeld & Kolter, Certified adversarial robustness via randomized smoothing, ICML 2019.

    Example:
        >>> round(float(Gaussian(0.25).up(0.1, 0.125)), 4)
        0.2172
        >>> print(Gaussian(0.25))
        Gaussian noise sigma 0.25
    """

    sigma: float

    name = "gaussian"
    norms = ("l2",)
    assumptions = (
        FRESH,
        "Pseudo-random numbers of a secret seed (Philox), added to the input and rounded with it to a grid of about sigma / 1024, "
        "stand in for real Gaussian noise.",
    )

    def __post_init__(self) -> None:
        if not (isinstance(self.sigma, int | float) and 0 <= self.sigma < math.inf):
            raise InputError(f"expected a finite sigma >= 0, got {self.sigma}")
        object.__setattr__(self, "sigma", float(self.sigma))

    @property
    def certifies(self) -> bool:
        return self.sigma > 0

    def noisy(self, images: Tensor, stream: Stream, ids: Tensor, draws: range) -> Tensor:
        if self.sigma == 0:
            return images.float()[:, None].expand(-1, len(draws), *images.shape[1:])
        return stream.noisy(images, ids, draws, self.sigma)

    def up(self, q: Any, epsilon: float, norm: str | None = None, shape: Shape | None = None) -> Any:
        self.check_norm(norm)
        q = probabilities(q)
        if epsilon == 0:
            return q[()]
        if self.sigma == 0:
            return np.where(q > 0, 1.0, 0.0)[()]
        with np.errstate(invalid="ignore"):
            moved = ndtr(ndtri(q) + epsilon / self.sigma)
        # Phi(Phi^-1(q)) may round below q or below the truth: up errs upwards.
        return np.where((q == 0) | (q == 1), q, np.clip(np.maximum(q, moved * (1 + 1e-12)), 0.0, 1.0))[()]

    def grid(self) -> ndarray:
        z = np.concatenate([np.linspace(-38.0, -6.0, 129)[:-1], np.linspace(-6.0, 8.2, 513)])
        return np.unique(np.concatenate([[0.0], ndtr(z), [1.0]]))

    def __str__(self) -> str:
        return f"Gaussian noise sigma {self.sigma:g}"
