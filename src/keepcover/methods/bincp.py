"""BinCP (Zargarbashi & Bojchevski, ICLR 2025) in its fixed-threshold form, for comparison."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keepcover.bounds import clopper_pearson, exact_level
from keepcover.errors import InputError
from keepcover.methods.base import Asked, Explanation, Method, Rule
from keepcover.methods.holdout import Holdout
from keepcover.scores import Draws, Steps


@dataclass(frozen=True)
class BinCP(Method):
    """With p = P[S <= t] for a t fixed on the holdout: include k iff the upper confidence bound of the attacked p
    reaches the attacked p*, the conformal quantile of the calibration points' lower bounds.

    Clopper-Pearson bounds at level eta / (n + K), so that all of them hold at once but for probability eta.
    """

    eta: float = 0.001

    name = "bincp"
    certified = True
    compares_only = True
    uses_holdout = True
    clauses = ()

    def fit(self, asked: Asked, holdout: Holdout | None = None) -> Rule:
        if holdout is None:
            raise InputError("bincp fixes its threshold on a holdout; give one")
        pooled = holdout.items().draws.values.flatten()
        return self.rule(asked, t=float(pooled.kthvalue(math.ceil((1 - asked.alpha) * len(pooled))).values))

    def rule(self, asked: Asked, transform: Steps | None = None, **parameters: Any) -> Rule:
        return FixedThreshold(self, asked, **parameters)


@dataclass(frozen=True)
class FixedThreshold(Rule):
    """Counts above a t from the holdout; the threshold is the largest count that keeps a candidate."""

    t: float = 0.0

    @property
    def _level(self) -> float:
        return self.method.eta / (self.asked.n + (self.asked.candidates or 0))  # type: ignore[attr-defined]

    def statistic(self, true: Draws) -> Tensor:
        return true.above(self.t)

    def threshold_of(self, statistic: Tensor, points: int, weight: Tensor | None = None) -> float:
        self._one_item_per_point(weight)
        eta = exact_level(self.method.eta)  # type: ignore[attr-defined]
        rank = math.floor((exact_level(self.asked.alpha) - eta) * (len(statistic) + 1))
        if rank < 1:
            return math.inf
        worst = int(statistic.sort(descending=True).values[rank - 1])  # p* belongs to the rank-th largest count
        cal, test = self.calibration_draws, self.test_draws
        p_star = clopper_pearson(cal - worst, cal, self._level)[0]
        above = np.arange(test + 1)
        kept = clopper_pearson(test - above, test, self._level)[1] >= self.asked.threat.down(p_star)
        return math.inf if kept.all() else float(above[kept].max(initial=-1))

    def test_statistic(self, draws: Draws, v: Tensor | None = None) -> Tensor:
        return draws.above(self.t).to(torch.float64)

    def climb(self, true: Draws, threshold: float) -> Tensor:
        return true.values.mean(dim=-1)

    def explain(
        self, draws: Draws, threshold: float, fit: Callable[[Tensor], Tensor], v: Tensor | None = None
    ) -> Explanation:
        n = draws.count
        least = round(n - min(threshold, n))
        return Explanation(1 - draws.above(self.t) / n, least / n, f"at least {least} of {n} draws must vote for it")
