r"""The second seam: for whom a promise is made, how surely, and despite what.

The plain promise is marginal: on average over calibration points and query. Each clause changes some of what thresholds are
made of, and says so in words:

- the level: the miscoverage that is left to spend;
- the rank: which order statistic of n calibration statistics is the threshold;
- the budget: how large the sum of n bounded losses may be under risk control;
- the cells: which calibration points a threshold comes from, a class, a cluster of classes or a group;
- the importance of a point under label shift.

Clauses combine because each maps what it is given. A threshold is a tensor that broadcasts over queries and labels: one number;
``[K]``, one per label; ``[G, 1]`` or ``[G, K]``, one row per group.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache
from typing import Any

import torch
from torch import Tensor

from keepcover.assumption import Assumption
from keepcover.bounds import conformal_rank, exact_level, order_statistic
from keepcover.bounds.concentration import bisect
from keepcover.errors import InputError
from keepcover.noise import Threat
from keepcover.promises.clause import CLAUSES, Clause, Sample, smallest

AVERAGED = ("the calibration data", "classes", "groups")
PER_QUERY = (
    "not simultaneous over several alpha or epsilon, not for a level picked after seeing sets, and not for the best of many "
    "repeated queries."
)


def average(text: str) -> Assumption:
    """A sentence on what the promise does not say."""
    how = (
        "It bounds what the promise says. Fix alpha and epsilon before you look at sets, and limit repeated queries: keepcover "
        "serve --repeat-limit."
    )
    return Assumption(text, "you", how)


MARGINAL = average(f"The promise is marginal and per query: not per class, {PER_QUERY}")


@dataclass(frozen=True, init=False)
class Promise:
    """Clauses that hold together. ``Promise()`` is the marginal promise.

    Args:
        delta (float): with confidence 1 - delta over the calibration data, instead of on average over them.
        per (str | Sequence): ``"class"``, or an array with the group of every point.
        clusters (str): ``"auto"`` with ``per="class"``: pool classes that behave alike on the holdout.
        poisoned (int): calibration points that may have been replaced, added or removed.
        calibration_epsilon (float): how far every calibration input may have been moved before its noise was drawn.
        drift (float): total variation between the law of calibration points and that of queries.
        label_weights (Sequence[float]): per class, its share among queries over its share at calibration.

    Example:
        >>> promise = Promise()
        >>> promise.rank(99, exact_level(0.1)), promise.budget(99, exact_level(0.1), 1.0)
        (90, 9.0)
        >>> Promise(delta=0.05, per="class", poisoned=3)
        Promise(delta=0.05, per='class', poisoned=3)
        >>> Promise(poisoned=3).rank(99, exact_level(0.1))
        93
    """

    clauses: tuple[Clause, ...] = field(default=())

    def __init__(self, **clauses: Any) -> None:
        unknown = [name for name in clauses if name not in CLAUSES]
        if unknown:
            raise InputError(f"a promise may say {', '.join(CLAUSES)} beyond the marginal one, got {unknown[0]!r}")
        # In the order of the registry, whatever the order of the arguments: equal promises are equal values.
        made = [kind.of(clauses[name]) for name, kind in CLAUSES.items() if clauses.get(name) is not None]
        said = {clause.keyword: clause for clause in made if clause.absent is None or clause.stated() != clause.absent}
        for clause in said.values():
            if clause.requires is not None and clause.requires[0] not in (other.unit for other in made):
                raise InputError(clause.requires[1])
            for other, why in clause.excludes.items():
                if other in said:
                    raise InputError(f"{clause.keyword} and {other} do not hold together: {why}; leave one out")
        object.__setattr__(self, "clauses", tuple(said.values()))

    @classmethod
    def of(cls, value: Any) -> Promise:
        """A promise, the marginal one for None; anything else is refused.

        Example:
            >>> Promise.of(None)
            Promise()
        """
        if value is not None and not isinstance(value, Promise):
            raise InputError(f"expected a Promise, such as Promise(per='class'), got {value!r}")
        return cls() if value is None else value

    # -- numbers ---------------------------------------------------------------------------------------------------------

    def level(self, alpha: float | Fraction) -> Fraction:
        """The miscoverage that calibration may spend of ``alpha``, in exact arithmetic."""
        level = exact_level(alpha)
        for clause in self.clauses:
            level = clause.level(level)
        return level

    def rank(self, n: int, level: Fraction) -> int:
        """Which order statistic of n calibration statistics certifies ``level``; a rank above n means none."""
        rank = conformal_rank(n, level)
        for clause in self.clauses:
            rank = clause.rank(rank, n, level)
        return rank

    def share(self, n: int, level: float) -> float:
        """The share of points above the threshold to expect at this level: what clauses add to the rank is taken off."""
        return level - (self.rank(n, Fraction(level)) - conformal_rank(n, Fraction(level))) / (n + 1)

    def quantile(self, sample: Sample | Tensor, level: Fraction) -> float:
        r"""The threshold at this miscoverage: an order statistic, never interpolated; +inf if there is none.

        Under label shift, the smallest value below or at which lies a weight of :math:`(1 - level)(\sum_i w_i + w)`, w the query's.
        """
        sample = Sample(sample) if isinstance(sample, Tensor) else sample
        if sample.grid is not None:
            raise InputError("a quantile needs one thing to cover per point; use exact_asymmetric for several")
        if sample.importance is None:
            return order_statistic(sample.statistic, self.rank(sample.points, level))
        values, order = sample.statistic.sort()
        weights = sample.importance.to(values.device)[order].cumsum(dim=0)
        needed = float((1 - level) * (1 + Fraction(1, 10**12))) * (float(weights[-1]) + sample.own)
        at = int(torch.searchsorted(weights, needed))
        return float(values[at]) if at < len(values) else math.inf

    def budget(self, n: int | float, level: Fraction, top: float, own: float = 1.0) -> float:
        """How large the sum of n calibration losses in [0, top] may be: the next point, which weighs ``own``, may add ``top``."""
        budget = float(level) * (n + own) - own * top
        for clause in self.clauses:
            budget = clause.budget(budget, n, level, top)
        return budget

    def tampering(self, threat: Threat) -> Threat | None:
        """What an attacker may have done to calibration inputs."""
        return next((t for t in (clause.tampering(threat) for clause in self.clauses) if t is not None), None)

    def least_level(self, n: int) -> float:
        """The smallest miscoverage that n points can have a finite threshold for, rounded up.

        Example:
            >>> round(Promise().least_level(99), 6)
            0.01
        """
        return bisect(lambda level: self.rank(n, Fraction(level)) > n, 0.0, 1.0)[1]

    def points_needed(self, level: Fraction) -> int:
        """The least number of calibration points with a finite threshold at this miscoverage.

        Example:
            >>> Promise().points_needed(exact_level(0.1))
            9
        """
        return smallest(lambda n: self.rank(n, level) <= n, 1)

    @property
    def suspects(self) -> int:
        """Calibration points that may not be what they were."""
        return sum(clause.suspects() for clause in self.clauses)

    @property
    def moved(self) -> float:
        """How much coverage the population may have lost since calibration."""
        return sum((clause.moved() for clause in self.clauses), 0.0)

    # -- thresholds ------------------------------------------------------------------------------------------------------

    @property
    def partition(self) -> Clause | None:
        """The clause that says what has a threshold of its own."""
        return next((clause for clause in reversed(self.clauses) if clause.unit), None)

    @property
    def reads(self) -> set[str]:
        """What must be known of calibration points: ``label``, ``group``."""
        return {what for clause in self.clauses for what in clause.reads}

    @property
    def groups(self) -> Any:
        """The clause that promises per group; None where none does."""
        return self.partition if "group" in self.reads else None

    def cells(self, classes: int | None) -> int:
        """How many cells calibration points are divided among."""
        return (self.partition.count(classes) or 1) if self.partition else 1

    def parts(self, sample: Sample, classes: int | None) -> list[Sample]:
        """The calibration points that each threshold comes from."""
        if self.partition is None:
            return [sample]
        cell = self.partition.cells(sample)
        assert cell is not None
        return [sample[cell == at] for at in range(self.cells(classes))]

    def thresholds(self, sample: Sample, classes: int | None, threshold_of: Callable[[Sample], float]) -> Tensor:
        """Every threshold, each from its own points: a tensor that broadcasts, see this module's beginning.

        Args:
            sample: all calibration statistics.
            classes: K, where labels have thresholds of their own.
            threshold_of: the threshold of one part, +inf for everything.
        """
        weights = next((w for w in (clause.importance() for clause in self.clauses) if w is not None), None)
        if weights is not None:
            assert sample.label is not None
            sample = replace(sample, importance=weights.to(sample.label.device)[sample.label])
        parts = self.parts(sample, classes)
        own = [1.0] if weights is None else weights.tolist()

        @cache
        def made(cell: int, weight: float) -> float:
            part = parts[cell]
            return threshold_of(replace(part, own=weight)) if part.points else math.inf

        place = self.partition.of_label(classes or 0) if self.partition else None
        if place is not None:
            table = [[made(cell, own[k % len(own)]) for k, cell in enumerate(place.tolist())]]
        else:
            table = [[made(cell, weight) for weight in own] for cell in range(len(parts))]
        values = torch.tensor(table, dtype=torch.float64)
        if self.groups is not None:
            return values
        return values[0] if values.shape[1] > 1 or place is not None else values[0, 0]

    def check(self, task: Any) -> None:
        """Refuse a task that a clause means nothing for."""
        for clause in self.clauses:
            clause.check(task)

    @property
    def needs_holdout(self) -> bool:
        """Whether a clause chooses something on the holdout."""
        return any(clause.needs_holdout for clause in self.clauses)

    def settled(self, holdout: Any, n: int, alpha: float) -> Promise:
        """The promise with everything chosen that it leaves to the holdout."""
        made = Promise()
        object.__setattr__(made, "clauses", tuple(clause.settled(holdout, n, alpha) for clause in self.clauses))
        return made

    # -- words -----------------------------------------------------------------------------------------------------------

    @property
    def short(self) -> str:
        """The promise in a few words, for tables.

        Example:
            >>> Promise(delta=0.05, per="class").short, Promise().short
            ('delta 0.05, per class', 'marginal')
        """
        return ", ".join(clause.short() for clause in self.clauses if clause.unit in ("", self._unit)) or "marginal"

    @property
    def _unit(self) -> str:
        return self.partition.unit if self.partition else ""

    @property
    def departs(self) -> bool:
        """Whether calibration points and queries need not be exchangeable as they come."""
        return any(clause.departs for clause in self.clauses)

    @property
    def confidence(self) -> str:
        """How the guarantee's sentence begins. A confidence is that of one threshold: of each, not of all at once."""
        each = f" for each {self._unit} on its own" if self.partition else ""
        return "".join(f"{words}{each}, " for words in (clause.confidence() for clause in self.clauses) if words)

    @property
    def whom(self) -> str:
        """For whom the probability is promised."""
        return self.partition.whom() if self.partition else ""

    @property
    def sentence(self) -> str:
        """What the clauses add to the guarantee's sentence."""
        return "".join(f", {words}" for words in (clause.sentence() for clause in self.clauses) if words)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the promise rests on, and what it does not say."""
        settled = {what for clause in self.clauses for what in clause.settles}
        left = [what for what in AVERAGED if what not in settled]
        over = " and ".join(filter(None, [", ".join(left[:-1]), *left[-1:]]))
        said = f"The promise is an average over {over}, and per query: {PER_QUERY}"
        own = [average(said) if settled else MARGINAL]
        if self.confidence and self.partition:
            how = f"It bounds what the promise says: divide delta by the number of them to have every {self._unit} at once."
            text = f"The confidence is that of every {self._unit} on its own; for all of them at once, ask for delta divided by their number."
            own.append(Assumption(text, "you", how))
        return (*own, *(line for clause in self.clauses for line in clause.assumptions))

    @property
    def budgets(self) -> dict[str, str]:
        """What every clause that could be said allows for here, in words: poison, drift and the like."""
        said = {clause.keyword: clause.sentence() for clause in self.clauses}
        return {name: said.get(name) or without for name, kind in CLAUSES.items() if (without := kind.without)}

    def config(self) -> dict[str, Any]:
        """The clauses by keyword, for JSON: ``Promise(**config)`` is the same promise."""
        return {clause.keyword: clause.stated() for clause in self.clauses}

    def __repr__(self) -> str:
        return f"Promise({', '.join(f'{name}={value!r}' for name, value in self.config().items())})"


def for_queries(threshold: Tensor, group: Tensor | None) -> Tensor:
    """The threshold of every query and label, which broadcasts against ``[n, K]``; the group -1 gets the largest of all.

    Example:
        >>> for_queries(torch.tensor([[1.0], [2.0]]), torch.tensor([0, 1, -1]))[:, 0]
        tensor([1., 2., 2.])
    """
    if threshold.ndim < 2:
        return threshold
    if group is None:
        raise InputError("the promise is per group, so every query must say its group: give groups=, one per query")
    return torch.cat([threshold, threshold.amax(dim=0, keepdim=True)])[group.to(threshold.device)]


def of_truth(threshold: Tensor, label: Tensor | None, group: Tensor | None) -> Tensor:
    """The threshold that the truth of every query is compared with: one number, or one per query.

    Example:
        >>> of_truth(torch.tensor([1.0, 2.0]), torch.tensor([1, 1, 0]), None)
        tensor([2., 2., 1.])
    """
    own = for_queries(threshold, group)
    if own.ndim == 0 or own.shape[-1] == 1:
        return own.squeeze(-1) if own.ndim == 2 else own
    assert label is not None
    place = label.to(own.device)
    return own[place] if own.ndim == 1 else own.gather(1, place[:, None])[:, 0]
