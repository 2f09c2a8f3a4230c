r"""The exact Monte Carlo certificates: a candidate is in the set iff at most kappa of its N noisy scores exceed t.

No Monte Carlo error is paid: given the clean exceedance probability q the clean count is exactly binomial, the
attacked one stochastically below :math:`\mathrm{Bin}(N, up(q))`, so :math:`P[\mathrm{miss}] \le E\,h(q)`.
What differs is how t is calibrated so that :math:`E\,h(q) \le \alpha`: by a quantile (:class:`Exact`, the hull) or by
conformal risk control (:class:`ExactAsymmetric`, the majorant). See the docs for both proofs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy import ndarray
from torch import Tensor

from keepcover.bounds import hull_bracket, hull_curve, hull_level, is_majorant, majorant_gap, risk_control_law
from keepcover.errors import InputError
from keepcover.methods.base import Asked, Rule
from keepcover.methods.choosing import best_hull_rule, best_majorant_rule
from keepcover.methods.counting import Chosen, CountRule, RiskRule
from keepcover.methods.holdout import Holdout
from keepcover.scores import Draws, Steps
from keepcover.tasks import Task


@dataclass(frozen=True)
class HullRule(CountRule):
    """The (c+1)-th largest calibration draw, its quantile at alpha'."""

    c: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.c < self.calibration_draws:
            raise InputError(f"expected 0 <= c < {self.calibration_draws} calibration draws, got {self.c}")

    @property
    def words(self) -> str:
        ranked = f"the draw ranked {self.c + 1} of {self.calibration_draws}"
        return f"at most {self.kappa} of {self.test_draws} draws above t, the quantile of {ranked}"

    @property
    def level(self) -> float:
        """alpha', the conformal level that certifies alpha under attack."""
        return hull_level(self.counts, self.c, self.kappa, float(self.asked.level), self.gamma)

    @property
    def taken(self) -> Fraction:
        return Fraction(self.level)

    def statistic(self, true: Draws) -> Tensor:
        return true.largest(self.c + 1)

    def holdout_risk(self, law: ndarray) -> ndarray:
        n, promise = self.asked.cell_points, self.asked.promise
        if promise.rank(n, self.taken) > n:
            return np.ones(len(law))  # no finite threshold will do
        return law[:, self.c + 1 :].sum(axis=1) - promise.share(n, self.level)

    def correct_rank(self, n: int) -> int:
        """From the question, c and kappa alone: never from :attr:`level`."""
        most = hull_bracket(self.counts, self.c, self.kappa, float(self.asked.level), self.gamma)[1]
        return self.asked.promise.rank(n, Fraction(most))

    def worst_miss(self, clean: ndarray) -> ndarray:
        """Given t, P[Z > t] is beta distributed around alpha', and a query is missed with probability at most H of it."""
        corners = hull_curve(self.counts, self.c, self.kappa, self.gamma)
        return np.interp(clean, *corners) + self.asked.promise.moved

    def supports(self, items: Any, threshold: float) -> bool:
        at_most = int((items.first(self.calibration_draws).draws.largest(self.c + 1) <= threshold).sum())
        return threshold == math.inf or at_most >= self.correct_rank(items.points)


@dataclass(frozen=True)
class Exact(Chosen):
    r"""The hull certificate. :math:`Z` = the (c+1)-th largest of the calibration draws; t = its conformal quantile at
    :math:`1 - \alpha'`, :math:`\alpha' = \sup\{a : H(a) \le \alpha\}` from :func:`keepcover.bounds.hull_level`.

    Attributes:
        randomize: let the boundary be randomised: it removes granularity for few draws.
    """

    name = "exact"
    makes = HullRule

    def fit(self, asked: Asked, holdout: Holdout | None = None) -> HullRule:
        held = self.held(holdout)
        _, c, kappa, gamma = min(best_hull_rule(asked, held, gamma) for gamma in self.gammas)
        return HullRule(self, asked, kappa=kappa, gamma=gamma, c=c)


@dataclass(frozen=True)
class MajorantRule(RiskRule):
    """Conformal risk control of g, a function of calibration counts that dominates the attacked miss rate."""

    g: tuple[float, ...] = ()  # type: ignore[misc]

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.g) != self.calibration_draws + 1 or not np.isfinite(self.g).all() or np.any(np.diff(self.g) < 0):
            raise InputError(
                f"expected a finite nondecreasing g on 0..{self.calibration_draws} calibration draws, got {len(self.g)} values"
            )

    @property
    def words(self) -> str:
        rises = f"g rises from {self.g[0]:.4f} to {self.g[-1]:.3f}"
        return f"at most {self.kappa} of {self.test_draws} draws above t, by risk control; {rises}"

    def verify(self, task: Task) -> None:
        super().verify(task)
        if not (self.g[0] >= 0 and is_majorant(self.g, self.counts, self.kappa, self.gamma)):
            raise InputError("g is no majorant: it falls short of the worst-case miss rate")

    @property
    def majorises(self) -> bool:
        """Whether g is above h wherever that is looked at; if not, g certifies nothing."""
        return majorant_gap(self.g, self.counts, self.kappa, self.gamma) <= 0

    def law(self, n: int, several: bool = False) -> tuple[ndarray, ndarray]:
        """Given t, a query is missed with probability at most R(t) = E g(count(t)), whose law risk control bounds."""
        high = self.g[-1] if self.majorises else math.inf  # no majorant: a correct rule has no finite threshold
        sure = self._budget(n) + self.asked.promise.suspects * self.g[-1]
        mean = sure / n if self.majorises else -math.inf
        low = 0.0 if several else self.g[0]  # a point without things to cover loses nothing, not g(0)
        missed, exceeded = risk_control_law(n, mean, low, high)
        return np.minimum(missed + self.asked.promise.moved, 1.0), exceeded

    def supports(self, items: Any, threshold: float) -> bool:
        return threshold == math.inf or (self.majorises and super().supports(items, threshold))


@dataclass(frozen=True)
class ExactAsymmetric(Chosen):
    r"""The majorant certificate. t = the smallest value with :math:`(\sum_i g(count_i(t)) + g(N_{cal})) / (n+1) \le \alpha`.

    g is nondecreasing with :math:`E\,g(\mathrm{Bin}(N_{cal}, q)) \ge h(q)`, chosen on the holdout. Many calibration
    draws, paid once, buy fewer draws per query.

    Attributes:
        randomize: let the boundary be randomised.
    """

    name = "exact_asymmetric"
    makes = MajorantRule
    things = "any"

    def usual_calibration_draws(self, draws: int) -> int:
        return max(64, draws)

    def fit(self, asked: Asked, holdout: Holdout | None = None) -> Rule:
        kappa, gamma, g = best_majorant_rule(asked, self.held(holdout), self.gammas)
        return self.rule(asked, kappa=kappa, gamma=gamma, g=g)

    def rule(self, asked: Asked, transform: Steps | None = None, **parameters: Any) -> Rule:
        return super().rule(asked, transform, **{**parameters, "g": tuple(parameters.get("g", ()))})
