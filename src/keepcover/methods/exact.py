r"""The exact Monte Carlo certificates: a candidate is in the set iff at most kappa of its N noisy scores exceed t.

No Monte Carlo error is paid: given the clean exceedance probability q the clean count is exactly binomial, the
attacked one stochastically below :math:`\mathrm{Bin}(N, up(q))`, so :math:`P[\mathrm{miss}] \le E\,h(q)`.
What differs is how t is calibrated so that :math:`E\,h(q) \le \alpha`: by a quantile (:class:`Exact`, the hull) or by
conformal risk control (:class:`ExactAsymmetric`, the majorant). See the docs for both proofs.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from keepcover.bounds import (
    covered_at_most_given,
    hull_bracket,
    hull_curve,
    hull_level,
    hull_levels,
    is_majorant,
    majorant,
    majorant_cost,
    majorant_gap,
    risk_control_law,
)
from keepcover.errors import InputError
from keepcover.methods.bands import AllBands
from keepcover.methods.base import Asked, Explanation, Fit, Method, Rule, around
from keepcover.methods.holdout import Holdout
from keepcover.noise import Noise
from keepcover.promises import Sample
from keepcover.promises.base import smallest
from keepcover.scores import Draws, Items, Steps, Tally
from keepcover.tasks import Task


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
        fits = self.holdout_risk(holdout.count_law(self.calibration_draws)) <= 0
        size = holdout.size(self.test_draws, self.kappa, self.gamma)
        return float(size[fits.argmax() if fits.any() else -1])


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
        as_many = replace(sample, statistic=sample.statistic * (n / sample.points), count=torch.tensor([n]))
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
        (AllBands().check if asked.threat.noise.deterministic else super().check)(asked, task)

    def rule(self, asked: Asked, transform: Steps | None = None, **parameters: Any) -> Rule:
        raise InputError("auto chooses among exact, exact_asymmetric and bands: a rule is of one of them")


# -- choosing on the holdout: approximate where it only chooses, exact where it certifies --------------------------------


def candidates(asked: Asked) -> tuple[ndarray, ndarray]:
    """Pairs (c, kappa) worth trying: all of them for few draws, else those where kappa meets the attacked median."""
    cal, test = asked.per_point, asked.draws
    some_c = np.arange(cal) if cal <= 32 else np.unique(np.geomspace(1, 0.75 * cal, 28).round().astype(int) - 1)
    if test <= 32:
        c, kappa = np.meshgrid(some_c, np.arange(test), indexing="ij")
        return c.ravel(), kappa.ravel()
    attacked = asked.threat.up((some_c + 0.5) / cal)
    spread = np.sqrt(attacked * (1 - attacked) * test) + 1
    kappa = (test * attacked)[:, None] + spread[:, None] * np.linspace(-1.0, 2.5, 11)
    pairs = {(int(c), int(k)) for c, row in zip(some_c, kappa, strict=True) for k in row.round() if 0 <= k < test}
    c_all, kappa_all = np.array(sorted(pairs)).T
    return c_all, kappa_all


def _hull_sizes(asked: Asked, holdout: Holdout, gamma: float) -> tuple[ndarray, ndarray, ndarray, ndarray]:
    """Estimated set size of every candidate rule, with c, kappa and the index of its threshold."""
    c, kappa = candidates(asked)
    level = hull_levels(asked.counts, c, kappa, float(asked.level), gamma)
    law = holdout.count_law(asked.per_point)
    missed = law[:, ::-1].cumsum(axis=1)[:, ::-1]  # [t, j]: share of points with at least j draws above t
    n, promise = asked.cell_points, asked.promise
    share = np.array([promise.share(n, float(a)) for a in level]) if promise.clauses else level
    at = (missed[:, c + 1] <= share).argmax(axis=0)
    by_kappa = {int(k): holdout.size(asked.draws, int(k), gamma) for k in np.unique(kappa)}
    size = np.array([by_kappa[int(k)][i] for k, i in zip(kappa, at, strict=True)])
    # Too few calibration points for that level: the threshold would be infinite.
    hopeless = level < promise.least_level(n)
    size[hopeless] = np.array([by_kappa[int(k)][-1] for k in kappa[hopeless]])
    return size, c, kappa, at


def best_hull_rule(asked: Asked, holdout: Holdout, gamma: float = 0.0) -> tuple[float, int, int, float]:
    """The (c, kappa) with the smallest estimated set size: (size, c, kappa, gamma)."""
    size, c, kappa, _ = _hull_sizes(asked, holdout, gamma)
    best = int(size.argmin())
    return float(size[best]), int(c[best]), int(kappa[best]), gamma


def _likely_kappas(asked: Asked, holdout: Holdout, gamma: float, most: int = 7) -> list[tuple[int, int]]:
    """The kappas under which the hull already does best, each with its threshold's index: where the majorant looks."""
    size, _, kappa, at = _hull_sizes(asked, holdout, gamma)
    found: dict[int, int] = {}
    for i in size.argsort(kind="stable"):
        found.setdefault(int(kappa[i]), int(at[i]))  # the best of each kappa wins
    return list(found.items())[:most]


def best_majorant_rule(
    asked: Asked, holdout: Holdout, gammas: tuple[float, ...]
) -> tuple[int, float, tuple[float, ...]]:
    """kappa, gamma and g with the smallest estimated set size."""
    law, counts = holdout.count_law(asked.per_point), asked.counts
    found = []
    for gamma in gammas:
        for kappa, start in _likely_kappas(asked, holdout, gamma):
            at = _smallest_threshold(asked, law, kappa, gamma, start)
            found.append((float(holdout.size(asked.draws, kappa, gamma)[at]), kappa, gamma, at))
    _, kappa, gamma, at = min(found)
    g, _ = majorant(law[at], counts, kappa, gamma, _price(asked))
    return kappa, gamma, tuple(float(value) for value in g)


def _smallest_threshold(asked: Asked, law: ndarray, kappa: int, gamma: float, start: int) -> int:
    """The smallest threshold whose majorant fits into alpha on the holdout, from ``start`` up or down."""
    level, n, price = asked.level, asked.cell_points, _price(asked)

    def fits(at: int) -> bool:
        if at == len(law) - 1:
            return True
        mean, top = majorant_cost(law[at], asked.counts, kappa, gamma, price)
        return n * mean <= asked.promise.budget(n, level, top)

    if not fits(start):
        return smallest(fits, start + 1, len(law) - 1)
    return start + 1 - smallest(lambda down: not fits(start - down), 1, start + 1)


def _price(asked: Asked) -> float:
    """What clauses charge for the top of g, per point and unit, beyond what the marginal promise does."""
    n, level = asked.cell_points, asked.level
    low, high = (asked.promise.budget(n, level, top) for top in (1.0, 1.25))
    return max(0.0, (low - high) / 0.25 - 1.0) / n if asked.promise.clauses else 0.0
