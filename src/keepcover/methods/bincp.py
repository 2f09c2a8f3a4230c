"""BinCP (Zargarbashi & Bojchevski, ICLR 2025) in its fixed-threshold form, for comparison."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from keepcover.bounds.bounds import clopper_pearson, gaussian_shift
from keepcover.errors import InputError
from keepcover.guarantee import exact_level
from keepcover.methods.base import Method, Setting
from keepcover.methods.holdout import Holdout
from keepcover.scores.draws import Draws


@dataclass(frozen=True)
class BinCP(Method):
    """With p = P[S <= t] for a t fixed on the holdout: include k iff the upper confidence bound of the attacked p
    reaches the Gaussian shift of p*, the conformal quantile of the calibration points' lower bounds.

    Clopper-Pearson bounds at level eta / (n + K), so that all of them hold at once but for probability eta.
    """

    t: float = 0.0
    eta: float = 0.001

    name = "bincp"
    certified = True
    compares_only = True
    uses_holdout = True

    @classmethod
    def fit(cls, setting: Setting, holdout: Holdout | None = None, eta: float = 0.001) -> BinCP:
        if holdout is None:
            raise InputError("bincp fixes its threshold on a holdout; give one")
        pooled = holdout.true.values.flatten()
        return cls(setting, t=float(pooled.kthvalue(math.ceil((1 - setting.alpha) * len(pooled))).values), eta=eta)

    @property
    def _level(self) -> float:
        return self.eta / (self.setting.n + self.setting.classes)

    def calibration_statistic(self, true: Draws) -> Tensor:
        return true.above(self.t)

    def threshold(self, statistic: Tensor) -> float:
        """The largest number of test draws above t that still keeps a label."""
        rank = math.floor((exact_level(self.setting.alpha) - exact_level(self.eta)) * (len(statistic) + 1))
        if rank < 1:
            return math.inf
        worst = int(statistic.sort(descending=True).values[rank - 1])  # p* belongs to the rank-th largest count
        cal, test = self.calibration_draws, self.test_draws
        p_star = clopper_pearson(cal - worst, cal, self._level)[0]
        above = np.arange(test + 1)
        kept = clopper_pearson(test - above, test, self._level)[1] >= gaussian_shift(p_star, -self.setting.r)
        return math.inf if kept.all() else float(above[kept].max(initial=-1))

    def test_statistic(self, draws: Draws, v: Tensor | None = None) -> Tensor:
        return draws.above(self.t).to(torch.float64)
