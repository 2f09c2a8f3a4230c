"""CAS (Zargarbashi, Akhondzadeh & Bojchevski, ICML 2024) in its test-time form, for comparison."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from keepcover.bounds.bounds import dkw, gaussian_shift, hoeffding
from keepcover.guarantee import exact_level
from keepcover.methods.base import Method
from keepcover.scores.draws import Draws


@dataclass(frozen=True)
class CAS(Method):
    r"""Cdf-aware smoothing of the conformity :math:`s = 1 - S`: the attacked mean is bounded through its whole cdf.

    .. math:: \overline{s} = \sum_j (b_{j+1} - b_j)\, \mathrm{shift}(1 - F_{low}(b_j), r)

    on the sorted draws :math:`b_j`, with :math:`F_{low}` the DKW lower bound of the cdf. Include k iff
    :math:`\overline{s} \ge p^*`, the conformal quantile of the calibration means' Hoeffding lower bounds.
    """

    eta: float = 0.001

    name = "cas"
    certified = True

    @property
    def _level(self) -> float:
        return self.eta / (self.setting.n + self.setting.classes)

    def calibration_statistic(self, true: Draws) -> Tensor:
        return self._unit_interval(true).mean

    def threshold(self, statistic: Tensor) -> float:
        rank = math.floor((exact_level(self.setting.alpha) - exact_level(self.eta)) * (len(statistic) + 1))
        if rank < 1:
            return math.inf
        p_star = (
            1 - float(statistic.sort(descending=True).values[rank - 1]) - hoeffding(self.calibration_draws, self._level)
        )
        return math.inf if p_star <= 0 else -p_star

    def always_full(self, threshold: float) -> bool:
        least = gaussian_shift(min(dkw(self.test_draws, self._level), 1.0), self.setting.r)
        return bool(threshold >= -least)

    def test_statistic(self, draws: Draws, v: Tensor | None = None) -> Tensor:
        """Minus the upper bound, so that small means that the label fits."""
        ascending = self._unit_interval(draws).ascending.double()
        cdf = np.arange(draws.count + 1) / draws.count
        low = np.maximum(cdf - dkw(draws.count, self._level), 0.0)
        weight = gaussian_shift(1 - low, self.setting.r)
        # Summed by parts: with s = 1 - S ascending, b_0 = 0 and b_{N+1} = 1, the bound is 1 minus a weighted sum of S.
        drops = torch.as_tensor((weight[:-1] - weight[1:])[::-1].copy(), device=ascending.device)
        return ascending @ drops - 1
