"""Rules that count: a candidate is in the set iff at most kappa of its N noisy scores exceed t."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from keepcover.bounds import covered_at_most_given
from keepcover.errors import InputError
from keepcover.methods.base import Explanation, Fit, Method, Rule, around
from keepcover.methods.holdout import Holdout, between
from keepcover.promises import Sample
from keepcover.promises.clause import smallest
from keepcover.scores import Draws, Items, Tally


class Counting(Method):
    """What certificates by counting share as methods."""

    certified = True
    compares_only = True
    counts = True


@dataclass(frozen=True)
class Chosen(Counting):
    """Those that choose how many draws may exceed t, and may let the boundary be randomised."""

    randomize: bool = False

    uses_holdout = True

    @property
    def gammas(self) -> tuple[float, ...]:
        """The randomised boundaries to choose among."""
        return (0.0, 0.25, 0.5, 0.75) if self.randomize else (0.0,)


class Once(Counting):
    """Those with one draw for everything."""

    draw_rule = "one"
    needs_concave = True


@dataclass(frozen=True)
class CountRule(Rule):
    """At most ``kappa`` of the draws above t; one more is forgiven with probability ``gamma``, drawn per query."""

    kappa: int = 0
    gamma: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.kappa < self.test_draws and 0 <= self.gamma < 1):
            raise InputError(
                f"expected 0 <= kappa < {self.test_draws} draws and 0 <= gamma < 1, got {self.kappa} and {self.gamma}"
            )
        if self.gamma and isinstance(self.method, Once):
            raise InputError(f"{self.name} forgives nothing; expected gamma 0, got {self.gamma}")

    @property
    def counting(self) -> tuple[int, float]:
        return self.kappa, self.gamma

    def test_statistic(self, draws: Draws, v: Tensor | None = None) -> Tensor:
        strict = draws.largest(self.kappa + 1)  # at most t iff at most kappa draws exceed t
        if self.gamma == 0:
            return strict
        if v is None:
            raise InputError("a randomised boundary needs one uniform number per query, independent of the noise")
        forgiven = (v < self.gamma).view(-1, *[1] * (strict.ndim - 1))
        return torch.where(forgiven, draws.largest(self.kappa + 2), strict)

    def climb(self, true: Draws, threshold: Tensor) -> Tensor:
        """The (kappa+1)-th largest score of the truth, minus t: above 0 the truth is missed.

        The attacker's number of draws may differ from the rule's, so the position is scaled.
        """
        return around(true, round((self.kappa + 0.5) / self.test_draws * true.count - 0.5), threshold)

    def explain(self, draws: Draws, threshold: Tensor, fit: Fit, v: Tensor | None = None) -> Explanation:
        forgiven = v is not None and bool((v < self.gamma).all())
        return Explanation.votes(draws, threshold, self.kappa + forgiven)

    def p_value(self, covered: float, m: int, n: int) -> float:
        return covered_at_most_given(covered, m, *self.law(n, several=not isinstance(covered, int)))

    @abstractmethod
    def holdout_risk(self, law: ndarray) -> ndarray:
        """What calibration keeps below alpha (or alpha'), minus it, at each threshold of a holdout's count law."""

    def estimated_size(self, holdout: Holdout) -> float:
        at = holdout.crossing(self.holdout_risk(holdout.count_law(self.calibration_draws)))
        return float(between(holdout.size(self.test_draws, self.kappa, self.gamma), float(at)))


@dataclass(frozen=True)
class RiskRule(CountRule):
    r"""Conformal risk control of :math:`\sum_k w_k\,g(count_k(t))`: t = the smallest value with
    :math:`(\sum_i \sum_k w_{ik}\,g(count_{ik}(t)) + g(N_{cal})) / (n+1) \le` a level. The constant is the largest loss that the
    next point can have, g(N_cal), whether that is 1 or more; points without items lose nothing and count among the n.
    """

    g: ClassVar[tuple[float, ...]] = (0.0, 1.0)

    @property
    def spends(self) -> Fraction:
        """The level at which the mean loss is controlled."""
        return self.asked.level

    @property
    def _rises(self) -> tuple[ndarray, ndarray]:
        """The counts at which g rises, and by how much."""
        rise = np.diff(self.g)
        return np.flatnonzero(rise > 0) + 1, rise[rise > 0]

    def statistic(self, true: Draws) -> Tensor:
        # count(t) >= j iff the j-th largest draw exceeds t: these order statistics are all that g can see.
        at, _ = self._rises
        return true.ascending[..., true.count - torch.as_tensor(at, device=true.values.device)]

    def losses(self, items: Items | Tally) -> Tensor:
        return items.losses(self.g)

    def _budget(self, points: int | float, own: float = 1.0) -> float:
        """How large the sum of g over calibration points may be."""
        return self.asked.promise.budget(points, self.spends, self.g[-1], own)

    @property
    def least_points(self) -> int:
        return smallest(lambda n: self._budget(n) >= n * self.g[0], 1)

    def threshold_of(self, sample: Sample) -> float:
        if sample.grid is not None:
            fits = self._fits(sample.statistic.sum(dim=0), sample.points)
            broken = (~fits).nonzero()
            return float(sample.grid[0 if not len(broken) else min(int(broken[-1]) + 1, len(sample.grid) - 1)])
        share = torch.ones(len(sample.statistic)) if sample.importance is None else sample.importance
        points = float(share.double().sum())
        budget = self._budget(points, sample.own) - points * self.g[0]
        if budget < 0:
            return math.inf
        scores, order = sample.statistic.flatten().sort(descending=True)
        rises = torch.as_tensor(self._rises[1], device=scores.device) * share.to(scores.device)[:, None]
        # The sum of g over the points minus that of g(0), once t falls below a score.
        spent = rises.flatten()[order].cumsum(dim=0)
        broke = torch.searchsorted(spent, budget, right=True)
        return float(scores[broke]) if broke < len(scores) else -math.inf

    def _fits(self, total: Tensor, points: int) -> Tensor:
        """Where a sum of losses keeps to its budget; weights are rounded, so they are taken for a little more."""
        return total * (1 + 1e-12) <= self._budget(points)

    def holdout_risk(self, law: ndarray) -> ndarray:
        n = self.asked.cell_points
        return law @ np.array(self.g) - self._budget(n) / n

    def supports(self, items: Any, threshold: float) -> bool:
        if threshold == math.inf:
            return True
        own = items.first(self.calibration_draws)
        if own.several:
            # No more is claimed than at the next threshold down.
            at = int(torch.searchsorted(own.grid, threshold, right=True)) - 1
            return bool(self._fits(self.losses(own).sum(dim=0), own.points)[at])
        assert isinstance(own, Items)
        total = float(torch.tensor(self.g, dtype=torch.float64)[own.draws.above(threshold).cpu()].sum())
        return total <= self._budget(own.points) + 1e-9 * own.points
