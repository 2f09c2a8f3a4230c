r"""BinCP (Zargarbashi & Bojchevski, ICLR 2025) in both of its forms, for comparison.

Both keep a label iff enough of its noisy scores are at most a threshold t. A clean point has a share F(t) of its scores
at or below t, an attacked one at least :math:`\mathrm{shift}(F(t), -r)`, and Clopper-Pearson bounds stand between
shares of draws and probabilities. The forms differ in what is fixed and what is calibrated: the share (:class:`BinCP`,
which the authors run) or t (:class:`BinCPThreshold`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from keepcover.bounds.bounds import clopper_pearson, conformal_law, covered_at_most_given, gaussian_shift
from keepcover.errors import InputError
from keepcover.guarantee import conformal_quantile, conformal_rank, exact_level
from keepcover.methods.base import Method, Setting
from keepcover.methods.holdout import Holdout
from keepcover.scores.draws import Draws


@dataclass(frozen=True)
class Bounded(Method):
    """The published accounting of BinCP and CAS: every Monte Carlo bound at ``level``, all of them right but for eta.

    One bound per calibration point and K for the query: n + K at eta / (n + K) each. eta is taken from alpha.
    """

    eta: float = 0.001

    certified = True

    def __post_init__(self) -> None:
        if not 0 < self.eta < 1:
            raise InputError(f"expected the Monte Carlo budget eta in (0, 1), got {self.eta}; 0.001 is usual")

    @property
    def level(self) -> float:
        """What each Monte Carlo bound may fail with."""
        return self.eta / (self.setting.n + self.setting.classes)

    @property
    def spent(self) -> Fraction:
        return exact_level(self.eta)

    @property
    def miscoverage(self) -> Fraction:
        """The conformal level: what is left of alpha."""
        return exact_level(self.setting.alpha) - self.spent


class Shares(Bounded):
    """What both forms of BinCP share: shares of draws become probabilities, are attacked, and become shares again."""

    compares_only = True

    def lower(self, above: int) -> float:
        """With at most ``above`` of the calibration draws above t: the Clopper-Pearson lower bound of F(t)."""
        draws = self.calibration_draws
        return float(clopper_pearson(draws - above, draws, self.level)[0])

    def allowed(self, above: int) -> int:
        """How many test draws may then exceed t: the upper bound of the share below reaches the attacked lower bound."""
        draws, count = self.test_draws, np.arange(self.test_draws + 1)
        upper = clopper_pearson(draws - count, draws, self.level)[1]
        return int(count[upper >= gaussian_shift(self.lower(above), -self.setting.r)].max())


@dataclass(frozen=True)
class BinCP(Shares):
    r"""The fixed-probability form, with the authors' p = 0.8 and their accounting.

    :math:`t_i` = the m-th smallest noisy score of calibration point i, :math:`m = \lceil pN \rceil`; t = the conformal
    quantile of the :math:`t_i` at :math:`1 - \alpha + \eta`; :math:`p_L` = the Clopper-Pearson lower bound of m successes
    in N draws. Include k iff the upper bound of :math:`P[S(\tilde x, k) \le t]` is at least
    :math:`\mathrm{shift}(p_L, -r)`.

    Proof. :math:`t_i` is read off the draws that :math:`p_L` speaks of, and :math:`p_L` holds all the same: for the cdf
    :math:`F_i` of point i's noisy score, :math:`F_i(t_i)` is at least the m-th smallest of N uniform numbers, a
    :math:`\mathrm{Beta}(m, N-m+1)` variable, and the lower bound of m successes is that law's quantile. So
    :math:`t_i \ge Q_i`, the :math:`p_L`-quantile of :math:`F_i`, but for probability level / 2. The :math:`Q_i` and the
    clean query's Q are exchangeable and t is at least the conformal quantile of the :math:`Q_i`, so
    :math:`Q \le t`, hence :math:`F(t) \ge p_L`, but for :math:`\alpha - \eta`. Attacked,
    :math:`F(t) \ge \mathrm{shift}(p_L, -r)`, and the upper bound of the true label's share fails with probability
    level / 2. In total :math:`\alpha - \eta + (n + 1)\,\eta / (2 (n + K)) < \alpha`.

    The authors interpolate between order statistics and bound p N successes, which need not be whole. An interpolated
    value may have no more probability below it than the order statistic beneath it, so their bound can fail more often
    than level / 2: up to 1.3 times that at 64 draws, 3.3 times at 32, which is more than their budget. With m, a whole
    number, there is no gap, and sets are slightly smaller. :class:`BinCPSharp` shows that coverage never hung on it.

    Example:
        >>> rule = BinCP(Setting(alpha=0.1, epsilon=0.125, sigma=0.25, draws=64, n=4750, classes=10))
        >>> rule.c, round(rule.lower(rule.c), 3), rule.kappa        # 3 of 64 draws at or below t keep a label
        (12, 0.491, 61)
    """

    p: float = 0.8

    name = "bincp"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.p <= 1:
            raise InputError(f"expected the share p in (0, 1], got {self.p}; 0.8 is usual")

    @property
    def c(self) -> int:
        """How many draws of a calibration point lie above its t."""
        return self.calibration_draws - math.ceil(exact_level(self.p) * self.calibration_draws)

    @cached_property
    def kappa(self) -> int:
        """How many draws of a query may lie above t."""
        return self.allowed(self.c)

    def calibration_statistic(self, true: Draws) -> Tensor:
        return true.largest(self.c + 1)

    def threshold(self, statistic: Tensor) -> float:
        return math.inf if self.kappa == self.test_draws else conformal_quantile(statistic, self.miscoverage)

    def test_statistic(self, draws: Draws, v: Tensor | None = None) -> Tensor:
        return draws.largest(self.kappa + 1)  # at most t iff at most kappa draws exceed t


class BinCPSharp(BinCP):
    r"""The fixed-probability form without a union bound over calibration points.

    Bounds at level eta (each side eta / 2), t at miscoverage :math:`(\alpha - \eta/2)(1 - \eta/2)`. Any eta fixed before
    calibration will do; alpha / 10 is a choice made for small sets, not part of the proof.

    Proof. Imagine N clean draws of the query. Their m-th smallest, Z, is exchangeable with the :math:`t_i`:
    :math:`P[Z > t] \le (\alpha - \eta/2)(1 - \eta/2)`. Z > t says that fewer than m of N draws are at most t; where
    :math:`F(t) < p_L` this has probability at least :math:`1 - \eta/2`, by the definition of :math:`p_L`. Hence
    :math:`P[F(t) < p_L] \le \alpha - \eta/2`. Else the label is missed only if the query's own upper bound fails:
    :math:`\eta/2`. The sum is alpha, and neither n nor K appears.

    The same rule, "at most kappa draws above the quantile of the (c+1)-th largest", is certificate 9a for this c and kappa.
    :class:`keepcover.methods.Exact` gives it the largest level that is right and chooses c and kappa on a holdout.
    """

    name = "bincp_sharp"

    @classmethod
    def fit(cls, setting: Setting, holdout: Holdout | None = None) -> BinCPSharp:
        return cls(setting, eta=setting.alpha / 10)

    @property
    def level(self) -> float:
        return self.eta

    @property
    def miscoverage(self) -> Fraction:
        side = exact_level(self.eta) / 2
        return (exact_level(self.setting.alpha) - side) * (1 - side)

    def p_value(self, covered: int, m: int, n: int) -> float:
        """Given t, the clean (c+1)-th largest score exceeds it with probability B, F(t) < p_L with at most B / (1 - eta/2)."""
        side = self.eta / 2
        law = conformal_law(
            n, conformal_rank(n, self.miscoverage), lambda clean: np.minimum(clean / (1 - side) + side, 1.0)
        )
        return covered_at_most_given(covered, m, *law)


@dataclass(frozen=True)
class BinCPThreshold(Shares):
    """The fixed-threshold form: t = the (1 - alpha)-quantile of the holdout's noisy true-label scores.

    p* = the conformal quantile of the calibration points' lower bounds of F(t). Include k iff the upper bound of
    P[S <= t] is at least shift(p*, -r). With few draws the lower bounds of the points that decide are near zero.
    """

    t: float = 0.0

    name = "bincp_threshold"
    uses_holdout = True

    @classmethod
    def fit(cls, setting: Setting, holdout: Holdout | None = None) -> BinCPThreshold:
        if holdout is None:
            raise InputError(f"{cls.name} fixes its threshold on a holdout; give one")
        pooled = holdout.true.values.flatten()
        return cls(setting, t=float(pooled.kthvalue(math.ceil((1 - setting.alpha) * len(pooled))).values))

    def verify(self) -> None:
        super().verify()
        if not 0 < self.eta < self.setting.alpha:
            raise InputError(f"expected eta between 0 and alpha, got {self.eta}")

    def calibration_statistic(self, true: Draws) -> Tensor:
        return true.above(self.t)

    def threshold(self, statistic: Tensor) -> float:
        """The largest number of test draws above t that still keeps a label."""
        worst = conformal_quantile(statistic.double(), self.miscoverage)  # p* belongs to this count
        allowed = self.test_draws if worst == math.inf else self.allowed(int(worst))
        return math.inf if allowed == self.test_draws else float(allowed)

    def test_statistic(self, draws: Draws, v: Tensor | None = None) -> Tensor:
        return draws.above(self.t).to(torch.float64)
