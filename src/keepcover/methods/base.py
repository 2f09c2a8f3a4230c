"""The fourth seam: a method is a theorem with its options; fitted to a question and a holdout it is a rule.

question + holdout --fit--> rule;  rule.statistic(calibration) --> rule.threshold;  rule.test_statistic(query) <= threshold
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from fractions import Fraction
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from keepcover.bounds import Counts, conformal_law, covered_at_most, covered_at_most_given, exact_level
from keepcover.errors import InputError
from keepcover.guarantee import Guarantee, warn_of_coverage
from keepcover.methods.holdout import Holdout
from keepcover.noise import Noise, Threat, get_threat
from keepcover.promises import Promise, Sample
from keepcover.scores import PTT, Draws, Items, Reading, Steps, Tally
from keepcover.tasks import Task

Held = TypeVar("Held", Items, Tally)  # what calibration keeps of points, with one thing to cover or several
Fit = Callable[[Tensor], Tensor]  # scores as a rule reads them -> how well they fit, in [0, 1]


@dataclass(frozen=True)
class Asked:
    """What is asked of a method: the promise and the budget, all fixed before calibration data are looked at.

    Attributes:
        alpha: miscoverage.
        threat: what the attacker may do.
        draws, calibration_draws: model evaluations per query and per calibration point.
        n: calibration points.
        candidates: labels of a full set; None where sets are not finite.
        promise: for whom, how surely and despite what.
    """

    alpha: float
    threat: Threat
    draws: int
    n: int
    candidates: int | None = None
    calibration_draws: int | None = None
    promise: Promise = field(default_factory=Promise)

    @property
    def per_point(self) -> int:
        """Draws per calibration point."""
        return self.draws if self.calibration_draws is None else self.calibration_draws

    @property
    def level(self) -> Fraction:
        """What the promise leaves of alpha."""
        return self.promise.level(self.alpha)

    @property
    def cell_points(self) -> int:
        """Calibration points to expect behind one threshold."""
        return max(1, self.n // self.promise.cells(self.candidates))

    def settled(self, holdout: Holdout | None) -> Asked:
        """With everything chosen that the promise leaves to the holdout."""
        return replace(self, promise=self.promise.settled(holdout, self.n, self.alpha))

    @property
    def counts(self) -> Counts:
        """The laws of counts under this threat and promise."""
        return Counts(self.threat, self.per_point, self.draws, self.promise.tampering(self.threat))

    def config(self) -> dict[str, Any]:
        """For JSON; :meth:`from_config` reads it back."""
        return {**vars(self), "threat": self.threat.config(), "promise": self.promise.config()}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Asked:
        return cls(**{**config, "threat": get_threat(config["threat"]), "promise": Promise(**config["promise"])})


class Method(ABC):
    """A theorem with its options: a frozen dataclass whose fields are plain values.

    Attributes:
        name: in the command line, JSON and saved predictors.
        certified: whether coverage is proved under attack.
        compares_only: uses only the order of scores, so :meth:`Score.order` serves it and PTT cannot help it.
        things: how many things to cover per point its theorem takes: ``one``, ``several`` of different weight, or ``any``.
        counts: its rules keep a candidate iff few enough of its draws exceed a threshold (:attr:`Rule.counting`).
        uses_holdout: looks at the holdout; methods that do not may add it to their calibration points.
        draw_rule: ``free``, ``same`` (calibration and test draws must agree for the statistics to be exchangeable) or
            ``one``.
        least_draws: draws per query without which the method is undefined.
        needs_concave: its theorem needs a concave ``up``.
        clauses: the clauses of a promise that it can keep beyond the marginal one; None for all.
        transform: what it applies to noisy scores before it averages them.
        makes: the rules that it is fitted to.
    """

    name: str
    certified: ClassVar[bool]
    compares_only: ClassVar[bool] = False
    things: ClassVar[str] = "one"
    counts: ClassVar[bool] = False
    uses_holdout: ClassVar[bool] = False
    draw_rule: ClassVar[str] = "free"
    least_draws: ClassVar[int] = 1
    needs_concave: ClassVar[bool] = False
    clauses: ClassVar[tuple[str, ...] | None] = None
    transform: PTT | None = None
    makes: ClassVar[type[Rule]]

    def fit(self, asked: Asked, holdout: Holdout | None = None) -> Rule:
        """Choose whatever the method may choose, on the holdout alone: its transform, unless said otherwise."""
        steps = None if self.transform is None else self.held(holdout).steps(self.transform, asked.alpha)
        return self.rule(asked, steps)

    def rule(self, asked: Asked, transform: Steps | None = None, **parameters: Any) -> Rule:
        """The rule with these parameters, as :meth:`fit` chose them before."""
        return self.makes(self, asked, transform, **parameters)

    def held(self, holdout: Holdout | None) -> Holdout:
        """The holdout, which a method that chooses something cannot do without."""
        if holdout is None:
            raise InputError(f"{self.name} makes its choices on a holdout; give one")
        return holdout

    def suited(self, task: Task) -> Method:
        """The method that answers for a task: itself, unless it chooses among several."""
        return self

    @property
    def spent(self) -> float:
        """What is paid of alpha for Monte Carlo error before a quantile is taken."""
        return 0.0

    def left(self, asked: Asked) -> Fraction:
        """The miscoverage at which a quantile is taken: what promise and Monte Carlo error leave of alpha."""
        return asked.level - exact_level(self.spent)

    @property
    def needs_holdout(self) -> bool:
        return self.uses_holdout or self.transform is not None

    def usual_calibration_draws(self, draws: int) -> int:
        """Draws per calibration point where the user names none: as many as per query."""
        return draws

    def draws_used(self, draws: int, calibration_draws: int) -> tuple[int, int]:
        """Model evaluations per query and per calibration point, of those asked for."""
        if draws < self.least_draws:
            raise InputError(f"{self.name} needs at least {self.least_draws} draws per query, got {draws}")
        return {"free": (draws, calibration_draws), "same": (draws, draws), "one": (1, 1)}[self.draw_rule]

    def unfit(self, noise: Noise) -> str:
        """Why the theorem does not hold under a noise; empty where it does."""
        if self.certified and noise.deterministic:
            return f"{self.name} is about random draws, and {noise} are not; choose noise=RandomBands(width), or bands for one thing to cover per point"
        if self.needs_concave and not noise.concave:
            return f"{self.name} needs noise whose up is concave; choose exact or exact_asymmetric"
        return ""

    def refuses(self, promise: Promise) -> str:
        """The first clause of a promise that the method does not offer; nothing where it offers all."""
        for clause in promise.clauses:
            listed = self.clauses is None or clause.keyword in self.clauses
            if not listed or (not self.certified and clause.moves_inputs):
                return clause.keyword
        return ""

    def check(self, asked: Asked, task: Task) -> None:
        """Refuse what the theorem does not cover, before the network runs."""
        if refused := self.refuses(asked.promise):
            refused = f"{self.name} does not offer {refused} in its promise; choose exact or exact_asymmetric"
        if reason := self.unfit(asked.threat.noise) or refused or task.unfit(self):
            raise InputError(reason)
        asked.promise.check(task)
        if not self.compares_only and self.transform is None and not task.bounded:
            raise InputError(
                f"{self.name} without PTT assumes scores in [0, 1], and {task.score_name!r} does not promise that; use "
                "transform='ptt', a bounded score, or an exact certificate"
            )
        warn_of_coverage(asked.alpha)
        self.promised(asked)

    def promised(self, asked: Asked, **stated: Any) -> Guarantee:
        """The guarantee for this question, with what else it states; an impossible one is refused."""
        draws, per_point = self.draws_used(asked.draws, asked.per_point)
        kept = (asked.alpha, asked.threat, draws, asked.n, per_point, asked.promise, self.spent)
        return Guarantee(self.name, self.certified, *kept, **stated)

    def options(self) -> dict[str, Any]:
        """Its fields, for JSON."""
        return asdict(self)  # type: ignore[call-overload]


@dataclass(frozen=True)
class Rule(ABC):
    """A method fitted to a question. Subclasses state their theorem in three functions and describe themselves in two more.

    Attributes:
        method: the theorem and its options.
        asked: the question.
        transform: the fitted transform; None for none.
    """

    method: Method
    asked: Asked
    transform: Steps | None = field(default=None, compare=False, repr=False)

    # -- what is asked of every rule -----------------------------------------------------------------------------------

    @abstractmethod
    def statistic(self, true: Draws) -> Tensor:
        """What is kept of a calibration item: its scores ``[items, N]`` -> ``[items]`` or ``[items, j]``."""

    def test_statistic(self, draws: Draws, v: Tensor | None = None) -> Tensor:
        """``[n, ..., N]`` scores -> ``[n, ...]``; a candidate is in the set iff its statistic is at most the threshold. By
        default that of a calibration item.
        """
        return self.statistic(draws)

    def threshold_of(self, sample: Sample) -> float:
        """The threshold that calibration statistics give; +inf means everything. By default a conformal quantile."""
        return self.asked.promise.quantile(sample, self.taken)

    @property
    def taken(self) -> Fraction:
        """The miscoverage at which the quantile is taken."""
        return self.method.left(self.asked)

    def read(self, items: Held) -> Held:
        """Items whose scores are the score itself, or its order, as this rule reads them: transformed."""
        if self.transform is None or isinstance(items, Tally):
            return items
        return replace(items, draws=Draws(self.transform(items.draws.values), unit=True))

    def sample(self, items: Items | Tally) -> Sample:
        """The statistics of calibration items, as this rule reads them."""
        own = items.first(self.calibration_draws)
        if own.several:
            return Sample(self.losses(own), own.count, own.grid, group=own.group)
        assert isinstance(own, Items)
        return Sample(self.statistic(own.draws), label=own.label, group=own.group)

    def losses(self, items: Items | Tally) -> Tensor:
        """Where points have several things to cover: the losses of every row on its grid, ``[rows, grid]``."""
        raise InputError(f"{self.name} needs one thing to cover per point; use exact_asymmetric or one_draw")

    def thresholds(self, sample: Sample) -> Tensor:
        """One threshold for each whom the promise is made to: a tensor that broadcasts over queries and labels."""
        return self.asked.promise.thresholds(sample, self.asked.candidates, self.threshold_of)

    def threshold(self, items: Items | Tally) -> Tensor:
        """The thresholds that calibration items give, as this rule reads them."""
        return self.thresholds(self.sample(items))

    def explain(self, draws: Draws, threshold: Tensor, fit: Fit, v: Tensor | None = None) -> Explanation:
        """How well candidates ``[n, K, N]`` fit and what is needed, such that support >= needed says what is decided.

        ``fit`` maps scores as this rule reads them to [0, 1], decreasing. By default the rule thresholds a mean score, from
        which its Monte Carlo allowance may have been subtracted: the allowance is shown on the other side.
        """
        statistic = self.test_statistic(draws, v).double()
        allowance = float((draws.mean - statistic).min())
        return Explanation.of(fit(statistic + allowance), fit(threshold.double() + allowance), "mean support")

    def climb(self, true: Draws, threshold: Tensor) -> Tensor:
        """What an attacker raises: ``[b, N]`` scores of the truth -> ``[b]``, differentiable. The mean score by default."""
        values = true.values if self.transform is None else self.transform.smooth(true.values)
        return values.mean(dim=-1)

    @property
    def words(self) -> str:
        """The rule as a person would say it."""
        return f"the statistic of {self.test_draws} draws is at most a threshold from {self.calibration_draws} per calibration point"

    # -- what follows ---------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self.method.name

    @property
    def reading(self) -> Reading:
        """Which noisy scores this rule reads."""
        return Reading(self.method.compares_only or self.transform is not None, self.transform)

    @property
    def test_draws(self) -> int:
        """Model evaluations per query that this rule really uses."""
        return self.method.draws_used(self.asked.draws, self.asked.per_point)[0]

    @property
    def calibration_draws(self) -> int:
        """Model evaluations per calibration point that this rule really uses."""
        return self.method.draws_used(self.asked.draws, self.asked.per_point)[1]

    @property
    def counts(self) -> Counts:
        """The laws of counts that this rule's draws have."""
        return replace(self.asked.counts, calibration_draws=self.calibration_draws, draws=self.test_draws)

    @property
    def counting(self) -> tuple[int, float] | None:
        """(kappa, gamma) where a candidate is kept iff at most kappa draws exceed t (one more with probability gamma)."""
        return None

    @property
    def randomized(self) -> bool:
        """Whether sets depend on ``v``, one uniform number per query."""
        return self.counting is not None and self.counting[1] > 0

    def always_full(self, threshold: float) -> bool:
        """Whether this threshold keeps every candidate, whatever the query."""
        return threshold == math.inf

    def enough_draws(self, items: Items) -> int | None:
        """How many draws would give other sets than full ones, where the rule's bounds tell: means and shares stay what they
        are in these items, and bounds get narrower.
        """
        if self.method.compares_only:
            return None
        for draws in (2**k for k in range(1, 21) if 2**k > self.test_draws):
            more = replace(self, asked=replace(self.asked, draws=draws, calibration_draws=draws))
            if not more.always_full(more.threshold_of(Sample(more.statistic(items.draws)))):
                return draws
        return None

    def p_value(self, covered: Any, m: int, n: int) -> float:
        """Probability that a **correct** rule for this question, calibrated on n points, covers at most this many of m: a whole
        number of points, or a sum of shares where points have several things to cover.

        The luck of the calibration draw is included. Nothing here may read what the rule itself computed (a level, a
        threshold): a rule that is wrong must not be compared with its own mistake. By default the law of a conformal
        quantile at alpha less what is :attr:`Method.spent`, which is added again: the query is missed if its clean statistic
        exceeds the quantile or if a Monte Carlo bound fails. Exactly beta-binomial where nothing is spent.
        """
        if self.method.spent == 0 and self.asked.promise.moved == 0:
            return covered_at_most(covered, m, n, self.sure_rank(n))
        return covered_at_most_given(covered, m, *self.law(n))

    def law(self, n: int, several: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """What calibration on n points leaves to luck: ``missed`` ascending and ``exceeded`` with P[M > missed] <= exceeded,
        where a **correct** rule misses a query with probability M at most, attacked or not, given its calibration points; or
        the share M of it on average where points have ``several`` things to cover, or none.

        By default that of a conformal quantile, to which what is spent and moved is added; see :meth:`p_value`.
        """
        return conformal_law(n, self.sure_rank(n), lambda clean: np.minimum(self.worst_miss(clean), 1.0))

    def worst_miss(self, clean: np.ndarray) -> np.ndarray:
        """How often queries are missed at most where clean statistics exceed the quantile so often."""
        return clean + (self.method.spent + self.asked.promise.moved)

    def correct_rank(self, n: int) -> int:
        """The smallest rank that a correct rule for this question may use: never from what the rule itself computed."""
        return self.asked.promise.rank(n, self.method.left(self.asked))

    def sure_rank(self, n: int) -> int:
        """The rank among untouched points that a threshold has for sure, whatever was done to those that the promise allows for."""
        rank = self.correct_rank(n)
        return rank - self.asked.promise.suspects if rank <= n else rank

    @property
    def least_points(self) -> int:
        """With fewer calibration points a threshold is +inf: a label or a group with so few is in every set, or has full sets."""
        return self.asked.promise.points_needed(self.taken)

    def supports(self, items: Any, threshold: float) -> bool:
        """Whether the calibration items, as this rule reads them, support the threshold: computed again, it is no larger."""
        again = self.threshold_of(self.sample(items))
        return threshold >= again or math.isclose(threshold, again, rel_tol=1e-9)

    def estimated_size(self, holdout: Holdout) -> float:
        """Mean set size to expect, from the holdout alone (its own points serve as calibration points)."""
        threshold = torch.tensor(self.threshold_of(self.sample(holdout.items(self.reading))), dtype=torch.float64)
        return float(self.sizes(holdout, threshold).mean())

    def sizes(self, holdout: Holdout, threshold: Tensor) -> Tensor:
        """The size of every holdout point's set at a threshold."""
        task, v = holdout.task, torch.linspace(0, 1, len(holdout), device=holdout.outputs.device)
        prepared = task.prepare(holdout.outputs[:, : self.test_draws], self.reading, holdout.u)
        return task.sizes(task.inside(task.summary(prepared, self, v), self, threshold)).double()

    def guarantee(self, task: Task, threshold: Tensor | None = None) -> Guarantee:
        """What the rule promises for a task, with these thresholds where there are some; refuses what cannot be promised."""
        return self.method.promised(
            self.asked,
            task=task.words,
            assumed=task.assumptions,
            score=task.score_name,
            transform="none" if self.method.transform is None else self.method.transform.name,
            least=self.least_points if self.asked.promise.partition else 0,
            always=() if threshold is None else self.always(task, threshold),
            shares=task.shares,
        )

    def always(self, task: Task, threshold: Tensor) -> tuple[str, ...]:
        """Labels that are in every set, and groups whose sets are all full."""
        promise = self.asked.promise
        if threshold.ndim == 0:
            return ()
        names = promise.groups.per if promise.groups else getattr(task, "class_names", None) or range(len(threshold))
        full = [all(map(self.always_full, row)) for row in threshold.view(len(threshold), -1).tolist()]
        return tuple(str(name) for name, whole in zip(names, full, strict=True) if whole)

    def verify(self, task: Task) -> None:
        """Raise unless question and parameters are such that the theorem holds: a file may state anything."""
        self.method.check(self.asked, task)

    def parameters(self) -> dict[str, Any]:
        """What fit chose, as plain JSON values."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("method", "asked", "transform")}

    def _unit_interval(self, draws: Draws) -> Draws:
        low, high = (0.0, 1.0) if draws.unit else draws.extremes
        if not (low >= 0 and high <= 1):
            raise InputError(
                f"{self.name} expects scores in [0, 1] (its bound assumes it), got [{low:.3g}, {high:.3g}]; "
                "use transform 'ptt', choose hps/aps/raps, or a count rule (exact, exact_asymmetric)"
            )
        return draws


@dataclass(frozen=True)
class Explanation:
    """How well every candidate fits, in [0, 1], and what the rule asks of each, which broadcasts: in the set iff support >=
    needed.
    """

    support: Tensor
    needed: Tensor
    words: str

    @classmethod
    def of(cls, support: Tensor, needed: Tensor, what: str) -> Explanation:
        """With words for one number, or for one per label."""
        low, high = max(float(needed.min()), 0.0), max(float(needed.max()), 0.0)
        return cls(support, needed, f"{what} at least {low:.2g}" + (f" to {high:.2g}, by label" if high > low else ""))

    @classmethod
    def votes(cls, draws: Draws, t: float | Tensor, above: float) -> Explanation:
        """Of the share of draws at or below t, where so many may be above."""
        n, least = draws.count, draws.count - int(min(above, draws.count))
        words = "the draw must vote for it" if n == least == 1 else f"at least {least} of {n} draws must vote for it"
        return cls(1 - draws.above(t) / n, torch.tensor(least / n), words)


def around(true: Draws, position: int, threshold: Tensor) -> Tensor:
    """The score at this position from the top, 0 the largest, minus t. A tenth of the draws around it is averaged, because the
    gradient of a single draw is noise.
    """
    centre, reach = min(position, true.count - 1), true.count // 20
    window = true.values.sort(dim=-1, descending=True).values[..., max(0, centre - reach) : centre + reach + 1]
    return window.mean(dim=-1) - threshold.to(window.device).clamp(max=1e30)


def with_options(method: Method, **options: Any) -> Method:
    """The method with some of its options changed, or an error that names those it has.

    Example:
        >>> from keepcover.methods import Exact
        >>> with_options(Exact(), randomize=True)
        Exact(randomize=True)
    """
    known = {f.name for f in fields(method)}  # type: ignore[arg-type]
    unknown = [name for name in options if name not in known]
    if unknown:
        offered = f"it has {', '.join(sorted(known))}" if known else "it has none"
        raise InputError(f"{method.name} has no option {unknown[0]!r}; {offered}")
    return replace(method, **options)  # type: ignore[type-var]
