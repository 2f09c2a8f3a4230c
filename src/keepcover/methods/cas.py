"""CAS (Zargarbashi, Akhondzadeh & Bojchevski, ICML 2024) in both of its forms, for comparison."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from keepcover.bounds.bounds import bernstein, dkw, gaussian_shift, hoeffding
from keepcover.errors import InputError
from keepcover.guarantee import conformal_quantile
from keepcover.methods.bincp import Bounded
from keepcover.scores.draws import Draws


class CAS(Bounded):
    r"""Cdf-aware smoothing of the conformity :math:`s = 1 - S`: attacked means are bounded through the whole cdf.

    The calibration-time form, which the authors run. The mean of a calibration point's s after any attack is at least

    .. math:: \underline{s} = \sum_j (b_{j+1} - b_j)\, \mathrm{shift}(1 - F_{up}(b_j), -r)

    on the sorted draws :math:`b_j`, :math:`b_0 = 0` and :math:`b_{N+1} = 1`, with :math:`F_{up}` the DKW upper bound of the
    cdf of s. Include k iff the upper confidence bound of the query's mean is at least the conformal quantile of the
    :math:`\underline{s}`.

    Proof. But for eta, no :math:`\underline{s}_i` exceeds the worst attacked mean of its point and the query's upper
    bound is right. Worst attacked means of calibration points and of the clean query are exchangeable, and the attacked
    query's mean is at least its own. The upper bound is the smaller of Hoeffding's and the empirical Bernstein one (the
    authors use the latter): n + 2 bounds at eta / (n + K), and K is at least 2.
    """

    name = "cas"
    least_draws = 2

    def _through_cdf(self, draws: Draws, side: int) -> Tensor:
        """Minus the bound of the attacked mean of s, upper (side 1) or lower (side -1)."""
        ascending = self._unit_interval(draws).ascending.double()
        cdf = np.arange(draws.count + 1) / draws.count - side * dkw(draws.count, self.level)
        weight = gaussian_shift(1 - np.clip(cdf, 0.0, 1.0), side * self.setting.r)
        # Summed by parts, the bound is the first weight minus a weighted sum of S.
        drops = torch.as_tensor((weight[:-1] - weight[1:])[::-1].copy(), device=ascending.device)
        return ascending @ drops - float(weight[0])

    @property
    def least(self) -> float:
        """The upper bound of a label whose every score is 1: no label's is smaller."""
        draws = self.test_draws
        return min(hoeffding(draws, self.level), float(bernstein(0.0, draws, self.level)))

    def verify(self) -> None:
        super().verify()
        if not 0 < self.eta < self.setting.alpha:
            raise InputError(f"expected eta between 0 and alpha, got {self.eta}")

    def calibration_statistic(self, true: Draws) -> Tensor:
        return self._through_cdf(true, -1)

    def threshold(self, statistic: Tensor) -> float:
        return conformal_quantile(statistic, self.miscoverage)

    def always_full(self, threshold: float) -> bool:
        return threshold >= -self.least

    def test_statistic(self, draws: Draws, v: Tensor | None = None) -> Tensor:
        """Minus the upper bound, so that small means that the label fits."""
        draws = self._unit_interval(draws)
        radius = bernstein(draws.variance, draws.count, self.level).clamp(max=hoeffding(draws.count, self.level))
        return (draws.mean - 1 - radius).clamp(min=-1.0)


class CASTestTime(CAS):
    r"""The test-time form: the upper bound of the attacked mean, for the query alone, against clean means.

    .. math:: \overline{s} = \sum_j (b_{j+1} - b_j)\, \mathrm{shift}(1 - F_{low}(b_j), r)

    Include k iff :math:`\overline{s}` is at least the conformal quantile of the calibration means' Hoeffding lower bounds.
    """

    name = "cas_test_time"
    least_draws = 1

    @property
    def least(self) -> float:
        return float(gaussian_shift(min(dkw(self.test_draws, self.level), 1.0), self.setting.r))

    def calibration_statistic(self, true: Draws) -> Tensor:
        return self._unit_interval(true).mean - 1 + hoeffding(self.calibration_draws, self.level)

    def test_statistic(self, draws: Draws, v: Tensor | None = None) -> Tensor:
        return self._through_cdf(draws, 1)
