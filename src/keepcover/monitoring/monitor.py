"""``keepcover.monitor``: whether a promise is still kept, from labels as they arrive and from queries alone."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy import ndarray

from keepcover.errors import InputError
from keepcover.monitoring.outcomes import Outcomes
from keepcover.monitoring.queries import BINS, Queries
from keepcover.prediction import Predictor

DAY = 86_400
ALARMS = {"promise": "misses are more frequent than promised", "queries": "queries have changed; a warning, no breach"}


@dataclass
class Monitor:
    """Watches one promise. Made by :func:`keepcover.monitor`.

    Attributes:
        levels: how often misses may happen, given the calibration: one number, or one per class, group or cluster.
        false_alarm: the probability that a promise that is kept is ever called broken, and that exchangeable queries are
            ever called drifting, each.
        luck: what of it, or with ``delta`` beside it, the luck of the calibration takes.
        cells: which of the levels every label has; empty where there is one, or one per group.
        scores: names of further statistics of queries.
        outcomes: the e-process.
        streams: the martingales, one per process that counts queries.
        alarms: when ``promise`` or ``queries`` fired, in seconds since 1970.
        about: the digest of the predictor, alpha and epsilon.
    """

    levels: tuple[float, ...]
    false_alarm: float = 0.01
    luck: float = 0.0
    cells: tuple[int, ...] = ()
    scores: tuple[str, ...] = ()
    outcomes: Outcomes = field(default_factory=Outcomes)
    streams: list[Queries] = field(default_factory=list)
    alarms: dict[str, float] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        fits = self.levels and all(0 <= level <= 1 for level in self.levels)
        if not (fits and 0 <= self.luck < self.false_alarm < 1):
            found = f"{self.levels}, {self.luck} and {self.false_alarm}"
            raise InputError(f"expected levels in [0, 1] and 0 <= luck < false_alarm < 1, got {found}")

    def add_outcomes(self, missed: Any, cell: Any = None, now: float | None = None) -> list[str]:
        """Count outcomes: whether each set missed, or the share it missed where a query has several things to cover, and which
        of the levels it has, where there are several. Returns alarms that are new.
        """
        now, own = time.time() if now is None else now, np.asarray(0 if cell is None else cell)
        if (cell is None and len(self.levels) > 1) or not ((own >= 0) & (own < len(self.levels))).all():
            raise InputError(f"expected which of the {len(self.levels)} levels every outcome has, got {cell!r:.60}")
        self.outcomes.add(missed, np.array(self.levels)[own], int(now // DAY))
        return self._alarms(now)

    def add_labels(self, sets: Any, truth: Any, groups: Any = None, now: float | None = None) -> list[str]:
        """Count the true labels of sets. ``groups`` are positions among the groups of the promise, as ``predictor.grouped`` gives;
        those of unknown groups have no promise, and do not count. A label -1 is a class that the model does not have: a miss, or
        without a promise where that is per class.
        """
        if groups is None and len(self.levels) > 1 and not self.cells:
            raise InputError("the promise is per group: give groups=predictor.grouped(groups, n), one per set")
        missed = 1 - sets.covers(truth).double().cpu().numpy()  # first: it refuses what is no truth of these sets
        cell = self.cell_of(np.asarray(truth)) if self.cells else 0 if groups is None else np.asarray(groups)
        cell = np.broadcast_to(cell, len(sets))
        return self.add_outcomes(missed[cell >= 0], cell[cell >= 0], now)

    def cell_of(self, labels: Any) -> ndarray:
        """Which of the levels every label has, where the promise is per class; -1, a class that the model does not have, has none."""
        return np.array([*self.cells, -1])[labels]

    def statistics(self, sets: Any, **scores: Any) -> ndarray:
        """What is kept of queries, ``[n, statistics]`` of 5 bits each: the traits of their sets, and the scores."""
        if set(scores) != set(self.scores):
            named = ", ".join(self.scores) or "that monitor(scores=...) named: none"
            raise InputError(f"expected the scores {named}, got {', '.join(scores) or 'none'}")
        more = [np.clip(np.asarray(scores[name], float) * BINS, 0, BINS - 1).astype(int) for name in self.scores]
        return np.column_stack([sets.traits, *more])

    def add_queries(self, statistics: ndarray, rng: Any = None, now: float | None = None) -> list[str]:
        """Count queries by their :meth:`statistics`, in the order they came. Returns alarms that are new."""
        self.streams = self.streams or [Queries(statistics.shape[1])]
        self.streams[0].add(statistics, np.random.default_rng() if rng is None else rng)
        return self._alarms(time.time() if now is None else now)

    def merged(self, other: Monitor) -> Monitor:
        """One monitor for two replicas: outcomes as if one process had seen them all, queries by the stronger evidence.

        An alarm of the sum is an alarm; one that a replica alone had raised stays only if the sum has it too. Merge every replica once,
        and as many of them each time: the rate of false alarms on queries is for a fixed number of streams.
        """
        own, theirs = ([one.levels, one.false_alarm, one.scores, one.about] for one in (self, other))
        if own != theirs:
            raise InputError("the monitors watch different promises; merge those of one predictor")
        outcomes, streams = self.outcomes.merged(other.outcomes), self.streams + other.streams
        both = replace(self, outcomes=outcomes, streams=streams, alarms={})
        both._alarms(min([*self.alarms.values(), *other.alarms.values()], default=time.time()))
        return both

    @property
    def evidence(self) -> dict[str, float]:
        """The e-values, by what they are evidence against."""
        drift = max((stream.evidence for stream in self.streams), default=1.0)
        return {"promise": self.outcomes.evidence, "queries": drift / max(len(self.streams), 1)}

    @property
    def limits(self) -> dict[str, float]:
        """Evidence at which an alarm is raised."""
        return {"promise": 1 / (self.false_alarm - self.luck), "queries": 1 / self.false_alarm}

    def _alarms(self, now: float) -> list[str]:
        found = self.evidence
        new = [name for name, limit in self.limits.items() if name not in self.alarms and found[name] >= limit]
        self.alarms |= dict.fromkeys(new, now)
        return new

    def report(self) -> dict[str, Any]:
        """Numbers and words, for JSON."""
        outcomes, misses = self.outcomes.counts
        promise = {"outcomes": outcomes, "misses": round(misses, 3), "levels": list(self.levels)}
        counted = {"promise": promise, "queries": {"queries": sum(stream.count for stream in self.streams)}}
        rows = {
            name: {"evidence": evidence, "alarm_at": self.limits[name], "since": self.alarms.get(name), **counted[name]}
            for name, evidence in self.evidence.items()
        }
        return {**self.about, **rows, "alarms": [ALARMS[name] for name in self.alarms], "false_alarm": self.false_alarm}

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON; :meth:`from_dict` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> Monitor:
        """A monitor as :meth:`to_dict` or JSON has it; refuses what no monitor has written."""
        try:
            made: dict[str, Any] = {**state, **{name: tuple(state[name]) for name in ("levels", "cells", "scores")}}
            made["outcomes"] = Outcomes({int(day): [*map(float, s)] for day, s in state["outcomes"]["days"].items()})
            made["streams"] = [Queries(**stream) for stream in state["streams"]]
            monitor = cls(**made)
            monitor.report()
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            why = f"{type(error).__name__}: {error}"
            raise InputError(f"this is not the state of a monitor ({why}); give what Monitor.to_dict gave") from None
        return monitor


def monitor(
    predictor: Predictor,
    *,
    alpha: float | None = None,
    epsilon: float | None = None,
    false_alarm: float = 0.01,
    scores: tuple[str, ...] = (),
) -> Monitor:
    r"""Watch a promise in production: anytime valid, so look as often as you like.

    ``add_labels`` tests "given the calibration and everything before, a set misses with probability at most p". An attack
    within epsilon leaves that true, so it never makes evidence. Where a query has several things to cover, what is tested is the
    mean share that is missed. p is alpha where the promise has ``delta``: the alarm is then
    false with probability at most ``false_alarm`` unless the calibration was one of the delta that the promise allows. Elsewhere
    p is the (1 - ``false_alarm`` / 2)-quantile of what the calibration leaves to luck (:meth:`Rule.law`), and the e-process has the
    other half.

    ``add_queries`` tests that queries are exchangeable. Attacks and harmless drifts make evidence too: a warning.

    Args:
        predictor: whose promise.
        alpha, epsilon: which of its levels; the first by default.
        false_alarm: the probability that an alarm of either kind is ever false, for each kind.
        scores: names of further numbers in [0, 1] per query, such as a confidence, given to ``statistics``.

    Example:
        >>> import torch, keepcover
        >>> outputs, labels = torch.randn(500, 1, 3, generator=torch.Generator().manual_seed(0)), torch.arange(500) % 3
        >>> predictor = keepcover.calibrate_outputs(outputs, labels, method="cp", alpha=0.1, epsilon=0.0, sigma=0.0)
        >>> watch = keepcover.monitor(predictor)
        >>> [round(level, 2) for level in watch.levels]
        [0.14]
        >>> watch.add_outcomes([False] * 90 + [True] * 10), watch.add_outcomes([True] * 40)
        ([], ['promise'])
    """
    if not 0 < false_alarm < 1:
        raise InputError(f"expected false_alarm strictly between 0 and 1, got {false_alarm}")
    digest, predictor = predictor.digest, predictor.at(alpha, epsilon)
    rule, promise, task = predictor.rule, predictor.rule.asked.promise, predictor.task
    if any(clause.importance() is not None for clause in promise.clauses):
        raise InputError("the law of a weighted quantile is unknown, so a promise with label_weights is not monitored")
    about = {"predictor": digest, "alpha": rule.asked.alpha, "epsilon": rule.asked.threat.epsilon}
    if promise.config().get("delta") is not None and promise.partition is None:
        return Monitor((rule.asked.alpha,), false_alarm, 0.0, (), tuple(scores), about=about)
    items: Any = predictor.items
    parts, luck = promise.parts(rule.sample(rule.read(items)), task.candidates), false_alarm / 2

    def level(points: int) -> float:
        """What a query's probability of a miss exceeds, over calibrations, with probability at most its share of ``luck``."""
        missed, exceeded = rule.law(points, not task.single)
        fits = np.flatnonzero(exceeded <= luck / len(parts))
        return float(missed[fits[0] if len(fits) else -1])

    levels = tuple(level(part.points) if part.points else 0.0 for part in parts)
    place = promise.partition.of_label(task.candidates or 0) if promise.partition else None
    cells = () if place is None else tuple(place.tolist())
    return Monitor(levels, false_alarm, luck, cells, tuple(scores), about=about)
