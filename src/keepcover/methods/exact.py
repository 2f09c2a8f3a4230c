r"""The exact Monte Carlo certificates: a label is in the set iff at most kappa of its N noisy scores exceed t.

No Monte Carlo error is paid: given the clean exceedance probability q the clean count is exactly binomial, the
attacked one stochastically below :math:`\mathrm{Bin}(N, \mathrm{shift}(q, r))`, so :math:`P[\mathrm{miss}] \le E\,h(q)`.
What differs is how t is calibrated so that :math:`E\,h(q) \le \alpha`: by a quantile (:class:`Exact`, the hull) or by
conformal risk control (:class:`ExactAsymmetric`, the majorant). See the docs for both proofs.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from keepcover.bounds.bounds import (
    conformal_law,
    covered_at_most_given,
    gaussian_shift,
    hull_bracket,
    hull_curve,
    hull_level,
    hull_levels,
    majorant,
    majorant_cost,
    majorant_gap,
    risk_control_law,
)
from keepcover.errors import InputError
from keepcover.guarantee import conformal_quantile, conformal_rank, exact_level
from keepcover.methods.base import Method, Setting
from keepcover.methods.holdout import Holdout
from keepcover.scores.draws import Draws

GAMMAS = (0.25, 0.5, 0.75)


@dataclass(frozen=True)
class CountRule(Method):
    """At most ``kappa`` of the draws above t; one more is forgiven with probability ``gamma``, drawn per image."""

    kappa: int = 0
    gamma: float = 0.0

    certified = True
    compares_only = True
    uses_holdout = True

    @property
    def randomized(self) -> bool:
        return self.gamma > 0

    def test_statistic(self, draws: Draws, v: Tensor | None = None) -> Tensor:
        strict = draws.largest(self.kappa + 1)  # at most t iff at most kappa draws exceed t
        if self.gamma == 0:
            return strict
        if v is None:
            raise InputError("a randomised boundary needs one uniform number per image, independent of the noise")
        return torch.where((v < self.gamma)[:, None], draws.largest(self.kappa + 2), strict)

    def verify(self) -> None:
        super().verify()
        if not (0 <= self.kappa < self.test_draws and 0 <= self.gamma < 1):
            raise InputError(
                f"expected 0 <= kappa < {self.test_draws} draws and 0 <= gamma < 1, got kappa {self.kappa}, gamma {self.gamma}"
            )

    @abstractmethod
    def holdout_risk(self, law: ndarray) -> ndarray:
        """What calibration keeps below alpha (or alpha'), minus it, at each threshold of a holdout's count law."""

    def estimated_size(self, holdout: Holdout) -> float:
        fits = self.holdout_risk(holdout.count_law(self.calibration_draws)) <= 0
        if not fits.any():
            return float(self.setting.classes)
        return float(holdout.size(self.test_draws, self.kappa, self.gamma)[fits.argmax()])


@dataclass(frozen=True)
class Exact(CountRule):
    r"""9a, the hull. :math:`Z` = the (c+1)-th largest of the calibration draws; t = its conformal quantile at
    :math:`1 - \alpha'`, :math:`\alpha' = \sup\{a : H(a) \le \alpha\}` from :func:`keepcover.bounds.bounds.hull_level`.
    """

    c: int = 0

    name = "exact"

    @property
    def level(self) -> float:
        """alpha', the conformal level that certifies alpha under attack."""
        s = self.setting
        return hull_level(self.calibration_draws, self.c, self.test_draws, self.kappa, s.r, s.alpha, self.gamma)

    def verify(self) -> None:
        super().verify()
        if not 0 <= self.c < self.calibration_draws:
            raise InputError(f"expected 0 <= c < {self.calibration_draws} calibration draws, got c = {self.c}")

    @classmethod
    def fit(cls, setting: Setting, holdout: Holdout | None = None, randomize: bool = False) -> Exact:
        if holdout is None:
            raise InputError(f"{cls.name} chooses its rule on a holdout; give one")
        best = min(
            (best_hull_rule(setting, holdout, gamma) for gamma in ((0.0, *GAMMAS) if randomize else (0.0,))),
            key=lambda rule: rule[0],
        )
        _, c, kappa, gamma = best
        return cls(setting, kappa=kappa, gamma=gamma, c=c)

    def holdout_risk(self, law: ndarray) -> ndarray:
        if conformal_rank(self.setting.n, Fraction(self.level)) > self.setting.n:
            return np.ones(len(law))  # no finite threshold will do
        return law[:, self.c + 1 :].sum(axis=1) - self.level

    def calibration_statistic(self, true: Draws) -> Tensor:
        return true.largest(self.c + 1)

    def threshold(self, statistic: Tensor) -> float:
        return conformal_quantile(statistic, Fraction(self.level))

    def _correct_rank(self, n: int) -> int:
        """The smallest rank a correct rule may use, from the setting, c and kappa alone: never from :attr:`level`."""
        s = self.setting
        rule = (self.calibration_draws, self.c, self.test_draws, self.kappa, s.r, s.alpha, self.gamma)
        return conformal_rank(n, Fraction(hull_bracket(*rule)[1]))

    def p_value(self, covered: int, m: int, n: int) -> float:
        """Given t, P[Z > t] is beta distributed around alpha', and a query is missed with probability at most H of it."""
        rule = (self.calibration_draws, self.c, self.test_draws, self.kappa, self.setting.r, self.gamma)
        corners = hull_curve(*rule)
        law = conformal_law(n, self._correct_rank(n), lambda clean: np.interp(clean, *corners))
        return covered_at_most_given(covered, m, *law)

    def supports(self, true: Draws, threshold: float) -> bool:
        at_most = int((true.largest(self.c + 1) <= threshold).sum())
        return threshold == math.inf or at_most >= self._correct_rank(len(true))


@dataclass(frozen=True)
class ExactAsymmetric(CountRule):
    r"""9b, the majorant. t = the smallest value with :math:`(\sum_i g(count_i(t)) + g(N_{cal})) / (n+1) \le \alpha`.

    g is nondecreasing with :math:`E\,g(\mathrm{Bin}(N_{cal}, q)) \ge h(q)`, chosen on the holdout. Many calibration
    draws, paid once, buy fewer draws per query.
    """

    g: tuple[float, ...] = ()

    name = "exact_asymmetric"

    @classmethod
    def fit(cls, setting: Setting, holdout: Holdout | None = None, randomize: bool = False) -> ExactAsymmetric:
        if holdout is None:
            raise InputError(f"{cls.name} chooses its rule on a holdout; give one")
        law = holdout.count_law(setting.cal_draws)
        found = []
        for gamma in (0.0, *GAMMAS) if randomize else (0.0,):
            for kappa, start in likely_kappas(setting, holdout, gamma):
                at = _smallest_threshold(setting, law, kappa, gamma, start)
                found.append((float(holdout.size(setting.draws, kappa, gamma)[at]), kappa, gamma, at))
        _, kappa, gamma, at = min(found)
        g, _ = majorant(law[at], setting.draws, kappa, setting.r, gamma)
        return cls(setting, kappa=kappa, gamma=gamma, g=tuple(float(value) for value in g))

    def __post_init__(self) -> None:
        if len(self.g) != self.calibration_draws + 1 or np.any(np.diff(self.g) < 0):
            raise InputError(
                f"expected a nondecreasing g on 0..{self.calibration_draws} calibration draws, got {len(self.g)} values"
            )

    def verify(self) -> None:
        super().verify()
        gap = majorant_gap(self.g, self.test_draws, self.kappa, self.setting.r, self.gamma)
        if not (gap <= 0 and self.g[0] >= 0):
            raise InputError(f"g is no majorant: it falls short of the worst-case miss rate by {gap:.3g}")

    def holdout_risk(self, law: ndarray) -> ndarray:
        n = self.setting.n
        return (n * law @ np.array(self.g) + self.g[-1]) / (n + 1) - self.setting.alpha

    @property
    def majorises(self) -> bool:
        """Whether g is above h wherever that is looked at; if not, g certifies nothing."""
        return majorant_gap(self.g, self.test_draws, self.kappa, self.setting.r, self.gamma) <= 0

    def p_value(self, covered: int, m: int, n: int) -> float:
        """Given t, a query is missed with probability at most R(t) = E g(count(t)), whose law risk control bounds."""
        high = self.g[-1] if self.majorises else math.inf  # no majorant: a correct rule has no finite threshold
        return covered_at_most_given(covered, m, *risk_control_law(n, self.setting.alpha, self.g[0], high))

    def supports(self, true: Draws, threshold: float) -> bool:
        g = torch.tensor(self.g, dtype=torch.float64)
        risk = (float(g[true.above(threshold).cpu()].sum()) + self.g[-1]) / (len(true) + 1)
        return threshold == math.inf or bool(self.majorises and risk <= self.setting.alpha + 1e-9)

    @property
    def _rises(self) -> tuple[ndarray, ndarray]:
        """The counts at which g rises, and by how much."""
        rise = np.diff(self.g)
        return np.flatnonzero(rise > 0) + 1, rise[rise > 0]

    def calibration_statistic(self, true: Draws) -> Tensor:
        # count(t) >= j iff the j-th largest draw exceeds t: these order statistics are all that g can see.
        at, _ = self._rises
        return true.ascending[..., true.count - torch.as_tensor(at, device=true.values.device)]

    def threshold(self, statistic: Tensor) -> float:
        _, rise = self._rises
        n, alpha = len(statistic), float(exact_level(self.setting.alpha))
        budget = alpha * (n + 1) - n * self.g[0] - self.g[-1]
        if budget < 0:
            return math.inf
        scores, order = statistic.flatten().sort(descending=True)
        weight = torch.as_tensor(rise, device=scores.device).expand(n, -1).flatten()[order]
        spent = weight.cumsum(dim=0)  # sum of g over the points minus n g(0), once t falls below each score
        broke = torch.searchsorted(spent, budget, right=True)
        return float(scores[broke]) if broke < len(scores) else -math.inf


class RCP1(Exact):
    r"""One draw for everything (Zargarbashi & Bojchevski 2025): :math:`\alpha' = \Phi(\Phi^{-1}(\alpha) - r)`."""

    name = "rcp1"
    uses_holdout = False
    draw_rule = "one"

    @property
    def level(self) -> float:
        return float(gaussian_shift(self.setting.alpha, -self.setting.r)) * (1 - 1e-9)

    @classmethod
    def fit(cls, setting: Setting, holdout: Holdout | None = None, randomize: bool = False) -> RCP1:
        return cls(setting)

    def verify(self) -> None:
        super().verify()
        if self.gamma != 0:
            raise InputError(f"{self.name} forgives nothing; expected gamma 0, got {self.gamma}")

    def calibration_statistic(self, true: Draws) -> Tensor:
        return true.values[..., 0]

    def test_statistic(self, draws: Draws, v: Tensor | None = None) -> Tensor:
        return draws.values[..., 0]


# -- choosing on the holdout -------------------------------------------------------------------------------------------


def candidates(setting: Setting) -> tuple[ndarray, ndarray]:
    """Pairs (c, kappa) worth trying: all of them for few draws, else those where kappa meets the attacked median."""
    cal, test = setting.cal_draws, setting.draws
    some_c = np.arange(cal) if cal <= 32 else np.unique(np.geomspace(1, 0.75 * cal, 28).round().astype(int) - 1)
    if test <= 32:
        c, kappa = np.meshgrid(some_c, np.arange(test), indexing="ij")
        return c.ravel(), kappa.ravel()
    attacked = gaussian_shift((some_c + 0.5) / cal, setting.r)
    spread = np.sqrt(attacked * (1 - attacked) * test) + 1
    kappa = (test * attacked)[:, None] + spread[:, None] * np.linspace(-1.0, 2.5, 11)
    pairs = {(int(c), int(k)) for c, row in zip(some_c, kappa, strict=True) for k in row.round() if 0 <= k < test}
    c_all, kappa_all = np.array(sorted(pairs)).T
    return c_all, kappa_all


def _hull_sizes(setting: Setting, holdout: Holdout, gamma: float) -> tuple[ndarray, ndarray, ndarray, ndarray]:
    """Estimated set size of every candidate rule, with c, kappa and the index of its threshold."""
    c, kappa = candidates(setting)
    level = hull_levels(setting.cal_draws, c, setting.draws, kappa, setting.r, setting.alpha, gamma)
    law = holdout.count_law(setting.cal_draws)
    missed = law[:, ::-1].cumsum(axis=1)[:, ::-1]  # [t, j]: share of points with at least j draws above t
    at = (missed[:, c + 1] <= level).argmax(axis=0)
    by_kappa = {int(k): holdout.size(setting.draws, int(k), gamma) for k in np.unique(kappa)}
    size = np.array([by_kappa[int(k)][i] for k, i in zip(kappa, at, strict=True)])
    size[(setting.n + 1) * level < 1] = setting.classes  # too few calibration points for that level
    return size, c, kappa, at


def best_hull_rule(setting: Setting, holdout: Holdout, gamma: float = 0.0) -> tuple[float, int, int, float]:
    """The (c, kappa) with the smallest estimated set size: (size, c, kappa, gamma)."""
    size, c, kappa, _ = _hull_sizes(setting, holdout, gamma)
    best = int(size.argmin())
    return float(size[best]), int(c[best]), int(kappa[best]), gamma


def likely_kappas(setting: Setting, holdout: Holdout, gamma: float, most: int = 7) -> list[tuple[int, int]]:
    """The kappas under which the hull already does best, each with its threshold's index: where the majorant looks."""
    size, _, kappa, at = _hull_sizes(setting, holdout, gamma)
    order = size.argsort(kind="stable")
    first = {int(kappa[i]): int(at[i]) for i in order[::-1]}  # the best of each kappa wins
    ranked = list(dict.fromkeys(int(kappa[i]) for i in order))
    return [(k, first[k]) for k in ranked[:most]]


def _smallest_threshold(setting: Setting, law: ndarray, kappa: int, gamma: float, start: int) -> int:
    """The smallest threshold whose majorant fits into alpha on the holdout: gallop from ``start``, then bisect."""

    def fits(at: int) -> bool:
        return (
            at == len(law) - 1
            or majorant_cost(law[at], setting.draws, kappa, setting.r, gamma, setting.n) <= setting.alpha
        )

    low, high, step = 0, start, 4
    while not fits(high):
        low, high, step = high + 1, min(high + step, len(law) - 1), 2 * step
    step = 4
    while low < high:
        middle = max(low, high - step) if step else (low + high) // 2
        if fits(middle):
            high, step = middle, 2 * step
        else:
            low, step = middle + 1, 0
    return high
