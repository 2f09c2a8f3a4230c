"""Queries without labels: a martingale that grows where they stop looking like the queries before them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy import ndarray

from keepcover.tasks.shown import BINS

# Bets on a p-value, c = 2p - 1: slopes and curvatures, whose mean over uniform p is zero.
BETS = np.array([(0.9, 0), (-0.9, 0), (0.4, 0), (-0.4, 0), (0, 0.9), (0, -0.9)])
PATIENCE = 100  # queries after which half of the capital is at stake
TOGETHER = 256  # queries at a time: their factors, at most 1.9 each, have a finite product


def reserve(t: Any) -> Any:
    """What of the capital is not yet at stake after t queries."""
    return PATIENCE / (PATIENCE + t)


def advance(seen: ndarray, capital: ndarray, count: int, values: ndarray, ties: ndarray) -> None:
    r"""Queries ``[n, ...]`` of every stream, in place, after ``count`` before them: ``[..., bins]`` counts and ``[..., bets]`` capital.

    The p-value :math:`(\#\{v_i > v_t\} + u \, \#\{v_i = v_t\}) / t` over i <= t is uniform and independent of those before it
    if the values are exchangeable, so every bet's capital is a martingale. All of them at once: what starts at t is
    multiplied by every factor from t on.
    """
    bins = np.arange(seen.shape[-1])
    t = (count + 1.0 + np.arange(len(values))).reshape(-1, *[1] * (values.ndim - 1))
    so_far = seen + np.cumsum(values[..., None] == bins, axis=0)
    above = (so_far * (bins > values[..., None])).sum(-1)
    c = 2 * (above + ties * np.take_along_axis(so_far, values[..., None], -1)[..., 0]) / t - 1
    factors = 1 + np.stack([c, (3 * c * c - 1) / 2], -1) @ BETS.T
    onward = np.flip(np.cumprod(np.flip(factors, 0), axis=0), 0)
    starts = ((reserve(t - 1) - reserve(t)) / len(BETS))[..., None]
    with np.errstate(over="ignore"):
        np.minimum(capital * onward[0] + (starts * onward).sum(0), 1e300, out=capital)
    seen[...] = so_far[-1]


@dataclass
class Queries:
    r"""Evidence that a stream of values in ``range(BINS)`` is not exchangeable, one martingale for each of several statistics.

    A part of the capital starts at every query, so a change after a long quiet time is still found. Each martingale ever
    reaches S/a with probability at most a/S, hence the largest of S, divided by S, reaches 1/a with probability at most a:
    :attr:`evidence`. Their average would need all of them to be martingales given one another's past, which conformal
    p-values of several statistics are not.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> queries = Queries(1).add(rng.integers(0, 4, (400, 1)), rng)
        >>> quiet = queries.evidence
        >>> bool(quiet < 10), bool(queries.add(rng.integers(3, 6, (100, 1)), rng).evidence > 100)
        (True, True)
    """

    statistics: int
    count: int = 0
    seen: list[list[int]] = field(default_factory=list)
    capital: list[list[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.seen = self.seen or [[0] * BINS for _ in range(self.statistics)]
        self.capital = self.capital or [[0.0] * len(BETS) for _ in range(self.statistics)]

    def add(self, values: ndarray, rng: np.random.Generator) -> Queries:
        """Queries in the order they came, ``[n, statistics]``; ``rng`` breaks ties, and must not be the client's to guess."""
        seen, capital, ties = np.array(self.seen), np.array(self.capital), rng.random(values.shape)
        for at in range(0, len(values), TOGETHER):
            some = slice(at, at + TOGETHER)
            advance(seen, capital, self.count, values[some], ties[some])
            self.count += len(values[some])
        self.seen, self.capital = seen.tolist(), capital.tolist()
        return self

    @property
    def values(self) -> ndarray:
        """The martingale of every statistic."""
        return np.sum(self.capital, axis=1) + reserve(self.count)

    @property
    def evidence(self) -> float:
        """The largest martingale, divided by their number."""
        return float(self.values.max() / self.statistics)
