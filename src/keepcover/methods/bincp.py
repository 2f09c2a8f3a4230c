r"""BinCP (Zargarbashi & Bojchevski, ICLR 2025), for comparison.

Both forms keep a label iff enough of its noisy scores are at most a threshold t. A clean point has a share F(t) of its scores
at or below t, an attacked one at least :math:`down(F(t))`, and Clopper-Pearson bounds stand between shares of draws and
probabilities. The forms differ in what is fixed and what is calibrated: the share (:class:`BinCP`, which the authors run)
or t (:class:`BinCPThreshold`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keepcover.bounds import clopper_pearson, exact_level
from keepcover.errors import InputError
from keepcover.methods.base import Asked, Explanation, Fit, Method, Rule
from keepcover.methods.holdout import Holdout
from keepcover.promises import Sample
from keepcover.scores import Draws


@dataclass(frozen=True)
class Bounded(Method):
    """The published accounting of BinCP and CAS: every Monte Carlo bound at ``level``, all of them right but for eta.

    One bound per calibration point and K for the query: n + K at eta / (n + K) each. eta is taken from alpha.
    """

    eta: float = 0.001

    certified = True
    clauses = ()

    def __post_init__(self) -> None:
        if not 0 < self.eta < 1:
            raise InputError(f"expected the Monte Carlo budget eta in (0, 1), got {self.eta}; 0.001 is usual")

    @property
    def spent(self) -> float:
        return self.eta

    def level(self, asked: Asked) -> float:
        """What each Monte Carlo bound may fail with."""
        if asked.candidates is None:
            raise InputError(f"{self.name} bounds every label at once and needs a finite number of them; use exact")
        return self.eta / (asked.n + asked.candidates)


class Shares(Rule):
    """What both forms of BinCP share: shares of draws become probabilities, are attacked, and become shares again."""

    method: Any  # a Bounded: what it may fail with

    def lower(self, above: int) -> float:
        """With at most ``above`` of the calibration draws above t: the Clopper-Pearson lower bound of F(t)."""
        draws = self.calibration_draws
        return float(clopper_pearson(draws - above, draws, self.method.level(self.asked))[0])

    def allowed(self, above: int) -> int:
        """How many test draws may then exceed t: the upper bound of the share below reaches the attacked lower bound."""
        draws, count = self.test_draws, np.arange(self.test_draws + 1)
        upper = clopper_pearson(draws - count, draws, self.method.level(self.asked))[1]
        return int(count[upper >= self.asked.threat.down(self.lower(above))].max())


class FixedShare(Shares):
    """At most kappa draws above t, the quantile of each calibration point's m-th smallest score."""

    @property
    def c(self) -> int:
        """How many draws of a calibration point lie above its t."""
        return self.calibration_draws - math.ceil(exact_level(self.method.p) * self.calibration_draws)

    @cached_property
    def kappa(self) -> int:
        """How many draws of a query may lie above t."""
        return self.allowed(self.c)

    @property
    def counting(self) -> tuple[int, float]:
        return self.kappa, 0.0

    def statistic(self, true: Draws) -> Tensor:
        return true.largest(self.c + 1)

    def threshold_of(self, sample: Sample) -> float:
        return math.inf if self.kappa == self.test_draws else super().threshold_of(sample)

    def test_statistic(self, draws: Draws, v: Tensor | None = None) -> Tensor:
        return draws.largest(self.kappa + 1)  # at most t iff at most kappa draws exceed t

    def explain(self, draws: Draws, threshold: Tensor, fit: Fit, v: Tensor | None = None) -> Explanation:
        return Explanation.votes(draws, threshold, self.kappa)


class SharpShare(FixedShare):
    """The same decision with the sharper accounting, whose law an audit uses."""

    def worst_miss(self, clean: np.ndarray) -> np.ndarray:
        """Given t, the clean (c+1)-th largest score exceeds it with probability B, F(t) < p_L with at most B / (1 - eta/2)."""
        side = self.method.eta / 2
        return clean / (1 - side) + side


@dataclass(frozen=True)
class BinCP(Bounded):
    r"""The fixed-probability form, with the authors' p = 0.8 and their accounting.

    :math:`t_i` = the m-th smallest noisy score of calibration point i, :math:`m = \lceil pN \rceil`; t = the conformal
    quantile of the :math:`t_i` at :math:`1 - \alpha + \eta`; :math:`p_L` = the Clopper-Pearson lower bound of m successes
    in N draws. Include k iff the upper bound of :math:`P[S(\tilde x, k) \le t]` is at least :math:`down(p_L)`.

    Proof. :math:`t_i` is read off the draws that :math:`p_L` speaks of, and :math:`p_L` holds all the same: for the cdf
    :math:`F_i` of point i's noisy score, :math:`F_i(t_i)` is at least the m-th smallest of N uniform numbers, a
    :math:`\mathrm{Beta}(m, N-m+1)` variable, and the lower bound of m successes is that law's quantile. So
    :math:`t_i \ge Q_i`, the :math:`p_L`-quantile of :math:`F_i`, but for probability level / 2. The :math:`Q_i` and the
    clean query's Q are exchangeable and t is at least the conformal quantile of the :math:`Q_i`, so
    :math:`Q \le t`, hence :math:`F(t) \ge p_L`, but for :math:`\alpha - \eta`. Attacked, :math:`F(t) \ge down(p_L)`, and
    the upper bound of the true label's share fails with probability level / 2. In total
    :math:`\alpha - \eta + (n + 1)\,\eta / (2 (n + K)) < \alpha`.

    The authors interpolate between order statistics and bound p N successes, which need not be whole. An interpolated
    value may have no more probability below it than the order statistic beneath it, so their bound can fail more often
    than level / 2: up to 1.3 times that at 64 draws, 3.3 times at 32, which is more than their budget. With m, a whole
    number, there is no gap, and sets are slightly smaller. :class:`BinCPSharp` shows that coverage never hung on it.

    Example:
        >>> from keepcover.noise import Gaussian, Threat
        >>> rule = BinCP().fit(Asked(0.1, Threat(Gaussian(0.25), 0.125), draws=64, n=4750, candidates=10))
        >>> rule.c, round(rule.lower(rule.c), 3), rule.kappa        # 3 of 64 draws at or below t keep a label
        (12, 0.491, 61)
    """

    p: float = 0.8

    name = "bincp"
    makes = FixedShare
    compares_only = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.p <= 1:
            raise InputError(f"expected the share p in (0, 1], got {self.p}; 0.8 is usual")


@dataclass(frozen=True)
class BinCPSharp(BinCP):
    r"""The fixed-probability form without a union bound over calibration points.

    Bounds at level eta (each side eta / 2), t at miscoverage :math:`(\alpha - \eta/2)(1 - \eta/2)`. Any eta fixed before
    calibration will do; 0.01, a tenth of the usual alpha, is a choice made for small sets, not part of the proof.

    Proof. Imagine N clean draws of the query. Their m-th smallest, Z, is exchangeable with the :math:`t_i`:
    :math:`P[Z > t] \le (\alpha - \eta/2)(1 - \eta/2)`. Z > t says that fewer than m of N draws are at most t; where
    :math:`F(t) < p_L` this has probability at least :math:`1 - \eta/2`, by the definition of :math:`p_L`. Hence
    :math:`P[F(t) < p_L] \le \alpha - \eta/2`. Else the label is missed only if the query's own upper bound fails:
    :math:`\eta/2`. The sum is alpha, and neither n nor K appears.

    The same rule, "at most kappa draws above the quantile of the (c+1)-th largest", is the hull certificate for this c and
    kappa. :class:`keepcover.methods.Exact` gives it the largest level that is right and chooses c and kappa on a holdout.
    """

    eta: float = 0.01

    name = "bincp_sharp"
    makes = SharpShare

    def level(self, asked: Asked) -> float:
        return self.eta

    def left(self, asked: Asked) -> Fraction:
        side = exact_level(self.eta) / 2
        return (asked.level - side) * (1 - side)


@dataclass(frozen=True)
class FixedThreshold(Shares):
    """Counts above a t from the holdout; the threshold is the largest count that keeps a label."""

    t: float = 0.0

    def statistic(self, true: Draws) -> Tensor:
        return true.above(self.t)

    def threshold_of(self, sample: Sample) -> float:
        # p* belongs to this count.
        worst = super().threshold_of(replace(sample, statistic=sample.statistic.double()))
        allowed = self.test_draws if worst == math.inf else self.allowed(int(worst))
        return math.inf if allowed == self.test_draws else float(allowed)

    def test_statistic(self, draws: Draws, v: Tensor | None = None) -> Tensor:
        return draws.above(self.t).to(torch.float64)

    def explain(self, draws: Draws, threshold: Tensor, fit: Fit, v: Tensor | None = None) -> Explanation:
        return Explanation.votes(draws, self.t, float(threshold))


@dataclass(frozen=True)
class BinCPThreshold(Bounded):
    """The fixed-threshold form: t = the (1 - alpha)-quantile of the holdout's noisy true-label scores.

    p* = the conformal quantile of the calibration points' lower bounds of F(t). Include k iff the upper bound of
    P[S <= t] is at least down(p*). With few draws the lower bounds of the points that decide are near zero.
    """

    name = "bincp_threshold"
    makes = FixedThreshold
    compares_only = True
    uses_holdout = True

    def fit(self, asked: Asked, holdout: Holdout | None = None) -> Rule:
        pooled = self.held(holdout).items().draws.values.flatten()
        return self.rule(asked, t=float(pooled.kthvalue(math.ceil((1 - asked.alpha) * len(pooled))).values))
