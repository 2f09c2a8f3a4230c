r"""The exact Monte Carlo certificates: a candidate is in the set iff at most kappa of its N noisy scores exceed t.

No Monte Carlo error is paid: given the clean exceedance probability q the clean count is exactly binomial, the
attacked one stochastically below :math:`\mathrm{Bin}(N, up(q))`, so :math:`P[\mathrm{miss}] \le E\,h(q)`.
What differs is how t is calibrated so that :math:`E\,h(q) \le \alpha`: by a quantile (:class:`Exact`, the hull) or by
conformal risk control (:class:`ExactAsymmetric`, the majorant). See the docs for both proofs.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from keepcover.bounds import (
    conformal_law,
    covered_at_most_given,
    hull_bracket,
    hull_curve,
    hull_level,
    is_majorant,
    majorant_gap,
    risk_control_law,
)
from keepcover.errors import InputError
from keepcover.methods.base import Asked, Explanation, Method, Rule
from keepcover.methods.choosing import best_hull_rule, best_majorant_rule
from keepcover.methods.holdout import Holdout
from keepcover.scores import Draws, Items, Steps
from keepcover.tasks import Task

GAMMAS = (0.25, 0.5, 0.75)


class Counting(Method):
    """What both certificates share as methods."""

    certified = True
    compares_only = True
    uses_holdout = True
    randomize: bool

    @property
    def gammas(self) -> tuple[float, ...]:
        """The randomised boundaries to choose among."""
        return (0.0, *GAMMAS) if self.randomize else (0.0,)

    def _held(self, holdout: Holdout | None) -> Holdout:
        if holdout is None:
            raise InputError(f"{self.name} chooses its rule on a holdout; give one")
        return holdout


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

    def climb(self, true: Draws, threshold: float) -> Tensor:
        """The (kappa+1)-th largest score of the truth, minus t: above 0 the truth is missed.

        The attacker's number of draws may differ from the rule's, so the position is scaled; a tenth of the draws around it
        is averaged, because the gradient of a single draw is noise.
        """
        descending = true.values.sort(dim=-1, descending=True).values
        centre = min(true.count - 1, round((self.kappa + 0.5) / self.test_draws * true.count - 0.5))
        reach = true.count // 20
        window = descending[..., max(0, centre - reach) : centre + reach + 1]
        return window.mean(dim=-1) - min(threshold, 1e30)

    def explain(
        self, draws: Draws, threshold: float, fit: Callable[[Tensor], Tensor], v: Tensor | None = None
    ) -> Explanation:
        n = draws.count
        least = n - self.kappa - (1 if v is not None and bool((v < self.gamma).all()) else 0)
        words = "the draw must vote for it" if n == 1 else f"at least {least} of {n} draws must vote for it"
        return Explanation(1 - draws.above(threshold) / n, least / n, words)

    @abstractmethod
    def holdout_risk(self, law: ndarray) -> ndarray:
        """What calibration keeps below alpha (or alpha'), minus it, at each threshold of a holdout's count law."""

    def estimated_size(self, holdout: Holdout) -> float:
        fits = self.holdout_risk(holdout.count_law(self.calibration_draws)) <= 0
        size = holdout.size(self.test_draws, self.kappa, self.gamma)
        return float(size[fits.argmax() if fits.any() else -1])


@dataclass(frozen=True)
class Exact(Counting):
    r"""The hull certificate. :math:`Z` = the (c+1)-th largest of the calibration draws; t = its conformal quantile at
    :math:`1 - \alpha'`, :math:`\alpha' = \sup\{a : H(a) \le \alpha\}` from :func:`keepcover.bounds.hull_level`.

    Attributes:
        randomize: let the boundary be randomised: it removes granularity for few draws.
    """

    randomize: bool = False

    name = "exact"

    def fit(self, asked: Asked, holdout: Holdout | None = None) -> HullRule:
        held = self._held(holdout)
        _, c, kappa, gamma = min(best_hull_rule(asked, held, gamma) for gamma in self.gammas)
        return HullRule(self, asked, kappa=kappa, gamma=gamma, c=c)

    def rule(self, asked: Asked, transform: Steps | None = None, **parameters: Any) -> HullRule:
        return HullRule(self, asked, **parameters)


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
        alpha = float(self.asked.promise.level(self.asked.alpha))
        return hull_level(self.counts, self.c, self.kappa, alpha, self.gamma)

    def statistic(self, true: Draws) -> Tensor:
        return true.largest(self.c + 1)

    def threshold_of(self, statistic: Tensor, points: int, weight: Tensor | None = None) -> float:
        self._one_item_per_point(weight)
        return self.asked.promise.quantile(statistic, Fraction(self.level))

    def holdout_risk(self, law: ndarray) -> ndarray:
        asked = self.asked
        if asked.promise.rank(asked.n, Fraction(self.level)) > asked.n:
            return np.ones(len(law))  # no finite threshold will do
        return law[:, self.c + 1 :].sum(axis=1) - self.level

    def _correct_rank(self, n: int) -> int:
        """The smallest rank a correct rule may use, from the question, c and kappa alone: never from :attr:`level`."""
        promise = self.asked.promise
        most = hull_bracket(self.counts, self.c, self.kappa, float(promise.level(self.asked.alpha)), self.gamma)[1]
        return promise.rank(n, Fraction(most))

    def p_value(self, covered: int, m: int, n: int) -> float:
        """Given t, P[Z > t] is beta distributed around alpha', and a query is missed with probability at most H of it."""
        corners = hull_curve(self.counts, self.c, self.kappa, self.gamma)
        law = conformal_law(n, self._correct_rank(n), lambda clean: np.interp(clean, *corners))
        return covered_at_most_given(covered, m, *law)

    def supports(self, items: Items, threshold: float) -> bool:
        at_most = int((items.first(self.calibration_draws).draws.largest(self.c + 1) <= threshold).sum())
        return threshold == math.inf or at_most >= self._correct_rank(items.points)


@dataclass(frozen=True)
class ExactAsymmetric(Counting):
    r"""The majorant certificate. t = the smallest value with :math:`(\sum_i g(count_i(t)) + g(N_{cal})) / (n+1) \le \alpha`.

    g is nondecreasing with :math:`E\,g(\mathrm{Bin}(N_{cal}, q)) \ge h(q)`, chosen on the holdout. Many calibration
    draws, paid once, buy fewer draws per query.

    Attributes:
        randomize: let the boundary be randomised.
    """

    randomize: bool = False

    name = "exact_asymmetric"

    def usual_calibration_draws(self, draws: int) -> int:
        return max(64, draws)

    def fit(self, asked: Asked, holdout: Holdout | None = None) -> MajorantRule:
        held = self._held(holdout)
        kappa, gamma, g = best_majorant_rule(asked, held, self.gammas)
        return MajorantRule(self, asked, kappa=kappa, gamma=gamma, g=g)

    def rule(self, asked: Asked, transform: Steps | None = None, **parameters: Any) -> MajorantRule:
        return MajorantRule(self, asked, **{**parameters, "g": tuple(parameters.get("g", ()))})


@dataclass(frozen=True)
class MajorantRule(CountRule):
    """Conformal risk control of g, a function of calibration counts that dominates the attacked miss rate."""

    g: tuple[float, ...] = ()

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

    @property
    def _rises(self) -> tuple[ndarray, ndarray]:
        """The counts at which g rises, and by how much."""
        rise = np.diff(self.g)
        return np.flatnonzero(rise > 0) + 1, rise[rise > 0]

    def statistic(self, true: Draws) -> Tensor:
        # count(t) >= j iff the j-th largest draw exceeds t: these order statistics are all that g can see.
        at, _ = self._rises
        return true.ascending[..., true.count - torch.as_tensor(at, device=true.values.device)]

    def _budget(self, points: int) -> float:
        """How large the sum of g over calibration points may be."""
        promise = self.asked.promise
        return promise.budget(points, promise.level(self.asked.alpha), self.g[-1])

    def threshold_of(self, statistic: Tensor, points: int, weight: Tensor | None = None) -> float:
        _, rise = self._rises
        share = torch.ones(len(statistic), dtype=torch.float64) if weight is None else weight.double()
        budget = self._budget(points) - float(share.sum()) * self.g[0]
        if budget < 0:
            return math.inf
        scores, order = statistic.flatten().sort(descending=True)
        rises = torch.as_tensor(rise, device=scores.device) * share.to(scores.device)[:, None]
        # The sum of g over the points minus that of g(0), once t falls below a score.
        spent = rises.flatten()[order].cumsum(dim=0)
        broke = torch.searchsorted(spent, budget, right=True)
        return float(scores[broke]) if broke < len(scores) else -math.inf

    def holdout_risk(self, law: ndarray) -> ndarray:
        return law @ np.array(self.g) - self._budget(self.asked.n) / self.asked.n

    def verify(self, task: Task) -> None:
        super().verify(task)
        if not (self.g[0] >= 0 and is_majorant(self.g, self.counts, self.kappa, self.gamma)):
            raise InputError("g is no majorant: it falls short of the worst-case miss rate")

    @property
    def majorises(self) -> bool:
        """Whether g is above h wherever that is looked at; if not, g certifies nothing."""
        return majorant_gap(self.g, self.counts, self.kappa, self.gamma) <= 0

    def p_value(self, covered: int, m: int, n: int) -> float:
        """Given t, a query is missed with probability at most R(t) = E g(count(t)), whose law risk control bounds."""
        high = self.g[-1] if self.majorises else math.inf  # no majorant: a correct rule has no finite threshold
        mean = self._budget(n) / n if self.majorises else -math.inf
        return covered_at_most_given(covered, m, *risk_control_law(n, mean, self.g[0], high))

    def supports(self, items: Items, threshold: float) -> bool:
        if threshold == math.inf:
            return True
        count = items.first(self.calibration_draws).draws.above(threshold).cpu()
        loss = torch.tensor(self.g, dtype=torch.float64)[count]
        total = float((loss if items.weight is None else loss * items.weight.double()).sum())
        return bool(self.majorises and total <= self._budget(items.points) + 1e-9 * items.points)


@dataclass(frozen=True)
class RCP1(Method):
    r"""One draw for everything (Zargarbashi & Bojchevski 2025): the largest :math:`\alpha'` that no attack lifts above alpha."""

    name = "rcp1"
    certified = True
    compares_only = True
    draw_rule = "one"
    needs_concave = True

    def fit(self, asked: Asked, holdout: Holdout | None = None) -> HullRule:
        return self.rule(asked)

    def rule(self, asked: Asked, transform: Steps | None = None, **parameters: Any) -> HullRule:
        return OneDraw(self, asked, **parameters)


class OneDraw(HullRule):
    """One calibration draw and one per query: up is its own concave hull, so alpha' needs no grid."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gamma != 0:
            raise InputError(f"{self.name} forgives nothing; expected gamma 0, got {self.gamma}")

    @property
    def words(self) -> str:
        return "the one draw is at most t"

    @property
    def level(self) -> float:
        return self.asked.threat.most(float(self.asked.promise.level(self.asked.alpha)))


@dataclass(frozen=True)
class Auto(Counting):
    """The better of both certificates by expected set size on the holdout: the hull with as many calibration draws as the
    majorant, the hull with as many as per query, or the majorant.
    """

    randomize: bool = False

    name = "auto"

    def usual_calibration_draws(self, draws: int) -> int:
        return ExactAsymmetric().usual_calibration_draws(draws)

    def fit(self, asked: Asked, holdout: Holdout | None = None) -> Rule:
        held = self._held(holdout)
        short = replace(asked, calibration_draws=min(asked.draws, asked.per_point))
        rules: list[Rule] = [Exact(self.randomize).fit(a, held) for a in dict.fromkeys((asked, short))]
        rules.append(ExactAsymmetric(self.randomize).fit(asked, held))
        return min(rules, key=lambda rule: rule.estimated_size(held))

    def rule(self, asked: Asked, transform: Steps | None = None, **parameters: Any) -> Rule:
        raise InputError("auto chooses among exact and exact_asymmetric: a rule is of one of them")
