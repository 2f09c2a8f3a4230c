r"""Counts of noisy scores above a threshold: their clean law at calibration, their worst attacked law at a query.

With :math:`q = P[S(x + \delta, y) > t]` a clean count is exactly :math:`\mathrm{Bin}(N_{cal}, q)`, and an attacked one
stochastically below :math:`\mathrm{Bin}(N, up(q))`. Both exact certificates are statements about these two laws.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy import ndarray
from scipy.special import expit, logit

from keepcover.bounds.laws import binomial_tail
from keepcover.errors import InputError
from keepcover.noise import Threat


@dataclass(frozen=True)
class Counts:
    """The two laws under one threat.

    Attributes:
        threat: what an attacker may do to a query.
        calibration_draws, draws: noisy scores per calibration point and per query.
        tampering: what was done to the calibration inputs before their noise was drawn; None for nothing.

    Example:
        >>> from keepcover.noise import Gaussian
        >>> counts = Counts(Threat(Gaussian(1.0), 0.5), calibration_draws=4, draws=4)
        >>> round(float(counts.clean(0, 0.5)), 4), round(float(counts.missed(1, 0.5)), 4)
        (0.9375, 0.9097)
    """

    threat: Threat
    calibration_draws: int
    draws: int
    tampering: Threat | None = None

    def __post_init__(self) -> None:
        if self.calibration_draws < 1 or self.draws < 1:
            raise InputError(f"expected at least 1 draw, got {self.draws} (calibration {self.calibration_draws})")

    def check(self, c: int, kappa: int) -> None:
        """Refuse a rule that counts past its draws."""
        if not (0 <= c < self.calibration_draws and 0 <= kappa < self.draws):
            raise InputError(
                f"expected 0 <= c < calibration draws and 0 <= kappa < draws, got c = {c} of {self.calibration_draws} "
                f"and kappa = {kappa} of {self.draws}"
            )

    def seen(self, q: Any) -> Any:
        """The least exceedance probability of a calibration point whose untouched one is q."""
        return q if self.tampering is None else self.tampering.down(q)

    def clean(self, c: Any, q: Any) -> Any:
        r"""f(q): the probability that more than ``c`` calibration draws exceed the threshold."""
        return binomial_tail(self.calibration_draws, np.add(c, 1), self.seen(q))

    def missed(self, kappa: Any, q: Any, gamma: Any = 0.0) -> Any:
        r"""h(q): the worst probability that more than ``kappa`` attacked draws exceed it: the label is missed.

        A randomised boundary forgives one more with probability ``gamma``.
        """
        attacked = self.threat.up(q)
        strict = binomial_tail(self.draws, np.add(kappa, 1), attacked)
        lenient = binomial_tail(self.draws, np.add(kappa, 2), attacked) if np.any(gamma) else 0.0
        return (1 - gamma) * strict + gamma * lenient

    def grid(self, finer: int = 1) -> ndarray:
        """Where the bounds look: the threat's own probabilities, each gap cut into ``finer`` parts.

        0 and 1 are among them: leaving out q = 0 makes alpha' up to 2.5 times too large.
        """
        coarse = np.concatenate([threat.grid() for threat in (self.threat, self.tampering) if threat is not None])
        inside = np.unique(coarse[(coarse > 0) & (coarse < 1)])
        return np.unique(np.concatenate([[0.0], between(inside[:-1], inside[1:], finer), inside[-1:], [1.0]]))


def between(low: Any, high: Any, parts: int) -> ndarray:
    """Every cell from ``low`` to ``high`` cut into ``parts``, evenly in log-odds: where the parts begin, flat.

    Example:
        >>> between([0.2, 0.8], [0.8, 0.9], 2).round(3)
        array([0.2 , 0.5 , 0.8 , 0.857])
    """
    low, high = np.atleast_1d(low), np.atleast_1d(high)
    points = expit(np.linspace(logit(low), logit(high), parts, endpoint=False, axis=1))
    points[:, 0] = low
    return np.clip(points, low[:, None], high[:, None]).ravel()
