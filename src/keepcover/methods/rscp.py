"""RSCP (Gendler et al. 2022) and RSCP+ (the paper, Section 3): thresholds on the smoothed score, inflated."""

from __future__ import annotations

import math

from torch import Tensor

from keepcover.bounds.bounds import bernstein, gaussian_shift, hoeffding
from keepcover.guarantee import conformal_quantile, exact_level
from keepcover.methods.base import Method
from keepcover.scores.draws import Draws


class RSCP(Method):
    r"""Include k iff :math:`\hat S(\tilde x, k) \le \mathrm{shift}(\tau, \epsilon / \sigma)`.

    Not certified: the proof needs the exact smoothed score, the rule uses its Monte Carlo estimate.
    """

    name = "rscp"
    certified = False
    draw_rule = "same"

    def calibration_statistic(self, true: Draws) -> Tensor:
        return self._unit_interval(true).mean

    def threshold(self, statistic: Tensor) -> float:
        tau = conformal_quantile(statistic, self.setting.alpha)
        return tau if math.isinf(tau) else float(gaussian_shift(min(tau, 1.0), self.setting.r))

    def always_full(self, threshold: float) -> bool:
        return threshold >= 1

    def test_statistic(self, draws: Draws, v: Tensor | None = None) -> Tensor:
        return self._unit_interval(draws).mean


class RSCPPlusHoeffding(Method):
    r"""Include k iff :math:`\hat S(\tilde x, k) - b_H \le \mathrm{shift}(\min(\tau + b_H, 1), \epsilon / \sigma)`.

    :math:`\tau` is taken at level :math:`1 - \alpha + 2\beta`: the two Monte Carlo errors are paid by a union bound.
    """

    name = "rscp_plus_hoeffding"
    certified = True
    pays_beta = True

    def calibration_statistic(self, true: Draws) -> Tensor:
        return self._unit_interval(true).mean

    def threshold(self, statistic: Tensor) -> float:
        tau = conformal_quantile(statistic, exact_level(self.setting.alpha) - self.spent)
        if math.isinf(tau):
            return tau
        clean = hoeffding(self.calibration_draws, self.setting.beta)
        return float(gaussian_shift(min(tau + clean, 1.0), self.setting.r))

    def always_full(self, threshold: float) -> bool:
        return threshold >= 1 - hoeffding(self.test_draws, self.setting.beta)

    def test_statistic(self, draws: Draws, v: Tensor | None = None) -> Tensor:
        return self._unit_interval(draws).mean - hoeffding(draws.count, self.setting.beta)


class RSCPPlusBernstein(RSCPPlusHoeffding):
    """RSCP+ with the empirical Bernstein radius of that very image and label on the test side."""

    name = "rscp_plus_bernstein"
    least_draws = 2

    def always_full(self, threshold: float) -> bool:
        return bool(threshold >= 1 - bernstein(0.0, self.test_draws, self.setting.beta))

    def test_statistic(self, draws: Draws, v: Tensor | None = None) -> Tensor:
        self._unit_interval(draws)
        return draws.mean - bernstein(draws.variance, draws.count, self.setting.beta)
