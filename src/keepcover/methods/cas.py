"""CAS (Zargarbashi, Akhondzadeh & Bojchevski, ICML 2024) in both of its forms, for comparison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keepcover.bounds import bernstein, dkw, hoeffding
from keepcover.methods.base import Explanation, Fit, Rule
from keepcover.methods.bincp import Bounded
from keepcover.scores import PTT, Draws


class CalibrationTime(Rule):
    """Minus an upper bound of the mean conformity, so that small means that the label fits."""

    method: CAS

    @property
    def level(self) -> float:
        """What each Monte Carlo bound may fail with."""
        return self.method.level(self.asked)

    def _through_cdf(self, draws: Draws, attacked: Callable[[Any], Any], side: int, count: int) -> Tensor:
        """Minus the bound of the attacked mean of s, upper (side 1) or lower (side -1), as ``count`` draws allow it."""
        ascending = self._unit_interval(draws).ascending.double()
        cdf = np.arange(draws.count + 1) / draws.count - side * dkw(count, self.level)
        weight = attacked(1 - np.clip(cdf, 0.0, 1.0))
        # Summed by parts, the bound is the first weight minus a weighted sum of S.
        drops = torch.as_tensor((weight[:-1] - weight[1:])[::-1].copy(), device=ascending.device)
        return ascending @ drops - float(weight[0])

    @property
    def least(self) -> float:
        """The upper bound of a label whose every score is 1: no label's is smaller."""
        draws = self.test_draws
        return min(hoeffding(draws, self.level), float(bernstein(0.0, draws, self.level)))

    def statistic(self, true: Draws) -> Tensor:
        return self._through_cdf(true, self.asked.threat.down, -1, self.calibration_draws)

    def always_full(self, threshold: float) -> bool:
        return threshold >= -self.least

    def test_statistic(self, draws: Draws, v: Tensor | None = None) -> Tensor:
        draws = self._unit_interval(draws)
        radius = bernstein(draws.variance, draws.count, self.level).clamp(max=hoeffding(draws.count, self.level))
        return (draws.mean - 1 - radius).clamp(min=-1.0)

    def explain(self, draws: Draws, threshold: Tensor, fit: Fit, v: Tensor | None = None) -> Explanation:
        return Explanation.of(-self.test_statistic(draws, v), -threshold, "mean support")


class QueryTime(CalibrationTime):
    """The query's attacked mean is bounded instead of the calibration points'."""

    @property
    def least(self) -> float:
        return float(self.asked.threat.up(min(dkw(self.test_draws, self.level), 1.0)))

    def statistic(self, true: Draws) -> Tensor:
        return self._unit_interval(true).mean - 1 + hoeffding(self.calibration_draws, self.level)

    def test_statistic(self, draws: Draws, v: Tensor | None = None) -> Tensor:
        return self._through_cdf(draws, self.asked.threat.up, 1, self.test_draws)


@dataclass(frozen=True)
class CAS(Bounded):
    r"""Cdf-aware smoothing of the conformity :math:`s = 1 - S`: attacked means are bounded through the whole cdf.

    The calibration-time form, which the authors run. The mean of a calibration point's s after any attack is at least

    .. math:: \underline{s} = \sum_j (b_{j+1} - b_j)\, down(1 - F_{up}(b_j))

    on the sorted draws :math:`b_j`, :math:`b_0 = 0` and :math:`b_{N+1} = 1`, with :math:`F_{up}` the DKW upper bound of the
    cdf of s. Include k iff the upper confidence bound of the query's mean is at least the conformal quantile of the
    :math:`\underline{s}`.

    Proof. But for eta, no :math:`\underline{s}_i` exceeds the worst attacked mean of its point and the query's upper
    bound is right. Worst attacked means of calibration points and of the clean query are exchangeable, and the attacked
    query's mean is at least its own. The upper bound is the smaller of Hoeffding's and the empirical Bernstein one (the
    authors use the latter): n + 2 bounds at eta / (n + K), and K is at least 2.
    """

    transform: PTT | None = PTT()

    name = "cas"
    makes = CalibrationTime
    least_draws = 2


@dataclass(frozen=True)
class CASTestTime(CAS):
    r"""The test-time form: the upper bound of the attacked mean, for the query alone, against clean means.

    .. math:: \overline{s} = \sum_j (b_{j+1} - b_j)\, up(1 - F_{low}(b_j))

    Include k iff :math:`\overline{s}` is at least the conformal quantile of the calibration means' Hoeffding lower bounds.
    """

    name = "cas_test_time"
    makes = QueryTime
    least_draws = 1
