"""One draw per query, for one thing to cover (RCP1) or for any loss: what the clean loss may be so that no attack lifts it above alpha."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import torch
from numpy import ndarray

from keepcover.bounds import risk_control_law
from keepcover.methods.counting import Once, RiskRule
from keepcover.methods.exact import HullRule
from keepcover.methods.holdout import Holdout


class OneDraw(HullRule):
    """One calibration draw and one per query: up is its own concave hull, so alpha' needs no grid."""

    words = "the one draw is at most t"  # type: ignore[assignment]

    @property
    def level(self) -> float:
        if self.counts.tampering is not None:  # two attacks, one after the other
            return super().level
        return self.asked.threat.most(float(self.asked.level))


@dataclass(frozen=True)
class RCP1(Once):
    r"""One draw for everything (Zargarbashi & Bojchevski 2025): the largest :math:`\alpha'` that no attack lifts above alpha."""

    name = "rcp1"
    makes = OneDraw


class OneDrawRisk(RiskRule):
    """The loss itself, g(count) = count, at the level that an attack lifts to alpha at most."""

    words = "the one draw is at most t, by risk control"  # type: ignore[assignment]

    @property
    def spends(self) -> Fraction:
        return Fraction(self.asked.threat.most(float(self.asked.level)))

    def estimated_size(self, holdout: Holdout) -> float:
        sample, n = self.sample(holdout.items(self.reading)), self.asked.cell_points
        as_many = replace(sample, statistic=sample.statistic * (n / sample.points), count=torch.tensor([n]))
        return float(self.sizes(holdout, torch.tensor(self.threshold_of(as_many), dtype=torch.float64)).mean())

    def law(self, n: int, several: bool = False) -> tuple[ndarray, ndarray]:
        """Given t, the clean risk has the law that risk control bounds, and an attack lifts it to at most up of it."""
        sure = self._budget(n) + self.asked.promise.suspects
        clean, exceeded = risk_control_law(n, sure / n, 0.0, 1.0)
        if not exceeded.any():
            return clean, exceeded  # t = +inf misses nothing
        return np.minimum(self.asked.threat.up(np.clip(clean, 0.0, 1.0)) + self.asked.promise.moved, 1.0), exceeded


@dataclass(frozen=True)
class OneDrawControl(Once):
    r"""Conformal risk control of a loss L in [0, 1] with one draw for everything, at
    :math:`\alpha' = \sup\{a : up(a) \le \alpha\}`.

    For any u the event :math:`L > u` is a set of noisy inputs, so an attack lifts its probability to at most up of it. By Jensen,
    for concave up, :math:`E L(\tilde x) = E \int_0^1 P[L(\tilde x + \delta) > u]\,du \le E \int_0^1 up(P[L(x + \delta) > u])\,du
    \le up(E L) \le \alpha`. Where up(0) exceeds alpha, only the largest threshold is safe.

    It is the baseline for several things per point, and all there is for a loss of the user's own. For one thing per point
    it is RCP1.
    """

    name = "one_draw"
    makes = OneDrawRisk
    things = "several"
