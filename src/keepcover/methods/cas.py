"""CAS (Zargarbashi, Akhondzadeh & Bojchevski, ICML 2024) in its test-time form, for comparison."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keepcover.bounds import dkw, exact_level, hoeffding
from keepcover.methods.base import Asked, Explanation, Method, Rule
from keepcover.methods.holdout import Holdout
from keepcover.scores import PTT, Draws, Steps


@dataclass(frozen=True)
class CAS(Method):
    r"""Cdf-aware smoothing of the conformity :math:`s = 1 - S`: the attacked mean is bounded through its whole cdf.

    .. math:: \overline{s} = \sum_j (b_{j+1} - b_j)\, up(1 - F_{low}(b_j))

    on the sorted draws :math:`b_j`, with :math:`F_{low}` the DKW lower bound of the cdf. Include k iff
    :math:`\overline{s} \ge p^*`, the conformal quantile of the calibration means' Hoeffding lower bounds.
    """

    eta: float = 0.001
    transform: PTT | None = PTT()

    name = "cas"
    certified = True
    clauses = ()

    def fit(self, asked: Asked, holdout: Holdout | None = None) -> Rule:
        return self.rule(asked, self.steps(asked, holdout))

    def rule(self, asked: Asked, transform: Steps | None = None, **parameters: Any) -> Rule:
        return WholeCdf(self, asked, transform, **parameters)


class WholeCdf(Rule):
    """Minus an upper bound of the attacked mean conformity, so that small means that the candidate fits."""

    method: CAS

    @property
    def _level(self) -> float:
        return self.method.eta / (self.asked.n + (self.asked.candidates or 0))

    def statistic(self, true: Draws) -> Tensor:
        return self._unit_interval(true).mean

    def threshold_of(self, statistic: Tensor, points: int, weight: Tensor | None = None) -> float:
        self._one_item_per_point(weight)
        rank = math.floor((exact_level(self.asked.alpha) - exact_level(self.method.eta)) * (len(statistic) + 1))
        if rank < 1:
            return math.inf
        worst = float(statistic.sort(descending=True).values[rank - 1])
        p_star = 1 - worst - hoeffding(self.calibration_draws, self._level)
        return math.inf if p_star <= 0 else -p_star

    def always_full(self, threshold: float) -> bool:
        least = self.asked.threat.up(min(dkw(self.test_draws, self._level), 1.0))
        return bool(threshold >= -least)

    def test_statistic(self, draws: Draws, v: Tensor | None = None) -> Tensor:
        ascending = self._unit_interval(draws).ascending.double()
        cdf = np.arange(draws.count + 1) / draws.count
        low = np.maximum(cdf - dkw(draws.count, self._level), 0.0)
        weight = self.asked.threat.up(1 - low)
        # Summed by parts: with s = 1 - S ascending, b_0 = 0 and b_{N+1} = 1, the bound is 1 minus a weighted sum of S.
        drops = torch.as_tensor((weight[:-1] - weight[1:])[::-1].copy(), device=ascending.device)
        return ascending @ drops - 1

    def explain(
        self, draws: Draws, threshold: float, fit: Callable[[Tensor], Tensor], v: Tensor | None = None
    ) -> Explanation:
        needed = -threshold
        return Explanation(-self.test_statistic(draws, v), needed, f"mean support at least {max(needed, 0.0):.2g}")
