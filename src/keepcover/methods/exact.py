r"""The exact Monte Carlo certificates: a candidate is in the set iff at most kappa of its N noisy scores exceed t.

No Monte Carlo error is paid: given the clean exceedance probability q the clean count is exactly binomial, the
attacked one stochastically below :math:`\mathrm{Bin}(N, up(q))`, so :math:`P[\mathrm{miss}] \le E\,h(q)`.
What differs is how t is calibrated so that :math:`E\,h(q) \le \alpha`: by a quantile (:class:`Exact`, the hull) or by
conformal risk control (:class:`ExactAsymmetric`, the majorant). See the docs for both proofs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from keepcover.bounds import hull_bracket, hull_curve, hull_level, is_majorant, majorant_gap, risk_control_law
from keepcover.errors import InputError
from keepcover.methods.bands import AllBands
from keepcover.methods.base import Asked, Method, Rule
from keepcover.methods.choosing import best_hull_rule, best_majorant_rule
from keepcover.methods.counting import Chosen, CountRule, Once, RiskRule
from keepcover.methods.holdout import Holdout
from keepcover.noise import Noise
from keepcover.promises import Sample
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
        return (
            f"at most {self.kappa} of {self.test_draws} draws above t, the quantile of the draw ranked {self.c + 1} of "
            f"{self.calibration_draws}"
        )

    @property
    def level(self) -> float:
        """alpha', the conformal level that certifies alpha under attack."""
        return hull_level(self.counts, self.c, self.kappa, float(self.asked.level), self.gamma)

    @property
    def least_points(self) -> int:
        return self.asked.promise.points_needed(Fraction(self.level))

    def statistic(self, true: Draws) -> Tensor:
        return true.largest(self.c + 1)

    def threshold_of(self, sample: Sample) -> float:
        return self.asked.promise.quantile(sample, Fraction(self.level))

    def holdout_risk(self, law: ndarray) -> ndarray:
        n, promise = self.asked.cell_points, self.asked.promise
        if promise.rank(n, Fraction(self.level)) > n:
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

    randomize: bool = False

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
        return (
            f"at most {self.kappa} of {self.test_draws} draws above t, by risk control; g rises from {self.g[0]:.4f} to "
            f"{self.g[-1]:.3f}"
        )

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

    randomize: bool = False

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
        as_many = replace(sample, statistic=sample.statistic * (n / sample.points), points=n)
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


@dataclass(frozen=True)
class Auto(Chosen):
    """The better of both certificates by expected set size on the holdout: the hull with as many calibration draws as the
    majorant, the hull with as many as per query, or the majorant. Where nothing is random, the deterministic rule.
    """

    randomize: bool = False

    name = "auto"
    things = "any"

    def suited(self, task: Task) -> Method:
        """Itself where a point has one thing to cover, else the first certificate that the task allows."""
        if task.single:
            return self
        return next((one for one in (ExactAsymmetric(self.randomize), OneDrawControl()) if not task.unfit(one)), self)

    def usual_calibration_draws(self, draws: int) -> int:
        return ExactAsymmetric().usual_calibration_draws(draws)

    def fit(self, asked: Asked, holdout: Holdout | None = None) -> Rule:
        held = self.held(holdout)
        if asked.threat.noise.deterministic:
            return AllBands().fit(asked, held)
        short = replace(asked, calibration_draws=min(asked.draws, asked.per_point))
        rules: list[Rule] = [Exact(self.randomize).fit(each, held) for each in dict.fromkeys((asked, short))]
        rules.append(ExactAsymmetric(self.randomize).fit(asked, held))
        return min(rules, key=lambda rule: rule.estimated_size(held))

    def unfit(self, noise: Noise) -> str:
        return ""

    def check(self, asked: Asked, task: Task) -> None:
        deterministic = asked.threat.noise.deterministic
        AllBands().check(asked, task) if deterministic else super().check(asked, task)

    def rule(self, asked: Asked, transform: Steps | None = None, **parameters: Any) -> Rule:
        raise InputError("auto chooses among exact, exact_asymmetric and bands: a rule is of one of them")
