"""Labels as they arrive: an e-process against "sets miss no more often than promised"."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy import ndarray

from keepcover.errors import InputError

STAKES = 0.5 ** np.arange(1, 9)  # of the capital, on a miss: the most a bettor would lose on a hit


def growth(missed: Any, level: Any) -> ndarray:
    r"""The logarithm of what one outcome multiplies every bettor's capital by, ``[..., stakes]``.

    With stake s, level p and x in [0, 1], whether or what share was missed: :math:`1 - s + s\,x / p`. Its mean is
    :math:`1 + s (q / p - 1)` where x has mean q: at most 1 iff :math:`q \le p`. At p = 0, where nothing can be missed, a hit
    says nothing and costs nothing: a class that is in every set would eat up the capital of the others.

    Example:
        >>> np.exp(growth([True, False, 0.5], 0.1))[:, 0]
        array([5.5, 0.5, 3. ])
    """
    missed, level = np.asarray(missed, dtype=float)[..., None], np.asarray(level, dtype=float)[..., None]
    return np.log1p(STAKES * np.where((missed == 0) & (level == 0), 0.0, missed / np.maximum(level, 1e-9) - 1))


def log_evidence(days: ndarray, grown: ndarray) -> Any:
    """log E of :class:`Outcomes`, from ``[..., days, stakes]`` sums of growth on those days, ascending.

    Example:
        >>> bool(np.isclose(log_evidence(np.array([3, 4, 9]), np.zeros((3, 8))), 0))
        True
    """
    reserve = 1 / np.log2(days - days[0] + 4.0)  # capital of bettors that have not started
    start = np.log(-np.diff(reserve, prepend=1.0) / len(STAKES))
    since = np.flip(np.cumsum(np.flip(grown, -2), axis=-2), -2) + start[:, None]
    most = np.maximum(since.max(axis=(-2, -1)), 0.0)
    return most + np.log(np.exp(since - most[..., None, None]).sum(axis=(-2, -1)) + reserve[-1] * np.exp(-most))


@dataclass
class Outcomes:
    r"""Evidence that misses have probability above their level: small, and of replicas it adds up exactly.

    For every day it keeps the number of outcomes, the sum of what they missed, and what :func:`growth` adds up to. Bettors with stakes
    :math:`s` start on every day k = 0, 1, ... with capital :math:`w_k`, so that a long quiet time does not use up what a late
    change needs; :math:`1/\log_2(k + 4)` is left for days after k:

    .. math:: E = \sum_k w_k \frac{1}{8} \sum_s \prod_{i \text{ from day } k} (1 - s + s \, x_i / p_i)

    E starts at 1 and does not grow on average while every outcome, given all before it, is a miss with probability at most
    its level, or misses a share :math:`x_i` in [0, 1] whose mean is at most that; so it ever reaches 1/a with probability at most a (Ville). The order of outcomes within a day does not matter.

    Example:
        >>> quiet = Outcomes().add([False] * 95 + [True] * 5, 0.1, day=0)
        >>> breach = Outcomes().add([False] * 60 + [True] * 40, 0.1, day=1)
        >>> bool(quiet.evidence < 1), bool(breach.evidence > 1e6), bool(quiet.merged(breach).evidence > 1e6)
        (True, True, True)
    """

    days: dict[int, list[float]] = field(default_factory=dict)

    def add(self, missed: Any, level: Any, day: int) -> Outcomes:
        """Count outcomes that arrived on a day, each with the level of its own promise: misses, or shares missed."""
        seen = np.atleast_1d(np.asarray(missed, dtype=float))
        if not ((seen >= 0) & (seen <= 1)).all():  # more than 1 would be evidence for nothing
            raise InputError(f"expected misses as booleans or shares in [0, 1], got {seen.min()} to {seen.max()}")
        gained = growth(seen, np.broadcast_to(level, seen.shape)).sum(axis=0)
        self._add(day, [float(len(seen)), float(seen.sum()), *gained.tolist()])
        return self

    def _add(self, day: int, more: list[float]) -> None:
        self.days[day] = [a + b for a, b in zip(self.days.get(day, [0.0] * len(more)), more, strict=True)]

    def merged(self, other: Outcomes) -> Outcomes:
        """What one process would have that saw the outcomes of both."""
        both = Outcomes(dict(self.days))
        for day, sums in other.days.items():
            both._add(day, sums)
        return both

    @property
    def counts(self) -> tuple[int, float]:
        """Outcomes, and the sum of what they missed: a whole number where each is hit or miss."""
        outcomes, missed = (sum(sums[at] for sums in self.days.values()) for at in (0, 1))
        return int(outcomes), int(missed) if missed == int(missed) else missed

    @property
    def evidence(self) -> float:
        """The e-value E now."""
        if not self.days:
            return 1.0
        days = sorted(self.days)
        total = log_evidence(np.array(days), np.array([self.days[day][2:] for day in days]))
        return float(np.exp(min(float(total), 700.0)))
