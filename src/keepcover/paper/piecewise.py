r"""Scores on the line whose Gaussian smoothing is known in closed form.

A score is straight between its knots, may jump at them, and is constant beyond them. Under noise each piece counts with
its Gaussian mass times its value at the mean of the normal truncated to it, so that the smoothed score

.. math:: h(x) = \Phi^{-1}(E[S(x + \sigma Z)]), \quad Z \sim N(0, 1)

and its derivative are finite sums. They are evaluated on a logarithmic scale: h keeps its digits where the mean of S
differs from 0 or 1 by less than the smallest number that a float can hold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any

import numpy as np
from numpy import ndarray
from scipy.special import log_ndtr, ndtri_exp

from keepcover.errors import InputError

SIGMAS = (1e-3, 10.0)
"""For knots about one apart everything has nine digits at these ends, and twelve between 0.01 and 1."""


@dataclass(frozen=True)
class Score:
    """A piecewise linear score of one label with values in [0, 1].

    It is monotone, or it turns twice and is odd about its centre (as the paper's failure case is). Of such a score it is
    known how often its smoothed version turns, so that all roots can be found.

    Attributes:
        knots: where pieces meet, in increasing order.
        before: the value just left of every knot; the first one holds all the way down to minus infinity.
        after: the value just right of every knot; the last one holds up to infinity.

    Example:
        >>> step = Score(knots=(0.2,), before=(0.0,), after=(1.0,))
        >>> ramp = Score(knots=(0.0, 1.0), before=(0.0, 1.0), after=(0.0, 1.0))
    """

    knots: tuple[float, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]

    def __post_init__(self) -> None:
        counts = len(self.knots), len(self.before), len(self.after)
        if not counts[0] or len(set(counts)) > 1:
            raise InputError(f"expected as many values before and after as knots, and one at least, got {counts}")
        if not all(map(math.isfinite, self.knots)) or any(a >= b for a, b in pairwise(self.knots)):
            raise InputError(f"expected finite knots in increasing order, got {self.knots}")
        if not all(0 <= value <= 1 for value in (*self.before, *self.after)):
            raise InputError(f"expected values in [0, 1], got {self.before} before and {self.after} after the knots")
        if not self.directions:
            raise InputError("expected a score that varies, got a constant: its smoothed version has no threshold")
        if len(self.directions) > 1 and not (len(self.directions) == 3 and self._is_odd):
            raise InputError(
                "expected a score that is monotone, or that turns twice and is odd about its centre, got one that "
                f"goes {' '.join('up' if d > 0 else 'down' for d in self.directions)}; its roots would not be counted"
            )

    @cached_property
    def jumps(self) -> ndarray:
        """By how much the score jumps at every knot."""
        return np.subtract(self.after, self.before)

    @cached_property
    def starts(self) -> ndarray:
        """A point of every piece to count from: its left end; of the first piece, which has none, the right one."""
        return np.array([self.knots[0], *self.knots])

    @cached_property
    def values(self) -> ndarray:
        """The value of every piece there."""
        return np.array([self.before[0], *self.after])

    @cached_property
    def slopes(self) -> ndarray:
        """Slope of every piece: zero beyond the knots."""
        return np.array([0.0, *(np.subtract(self.before[1:], self.after[:-1]) / np.diff(self.knots)), 0.0])

    @cached_property
    def ranges(self) -> ndarray:
        """The least and the greatest value of every piece."""
        return np.sort(np.array([self.values, [*self.before, self.after[-1]]]), axis=0)

    @cached_property
    def directions(self) -> tuple[int, ...]:
        """Where the score goes from left to right, up (1) or down (-1), jumps and slopes alike, repetitions left out."""
        changes = [*(change for pair in zip(self.slopes, self.jumps) for change in pair), self.slopes[-1]]
        return tuple(sign for sign, _ in groupby(int(np.sign(change)) for change in changes if change))

    @property
    def centre(self) -> float:
        return (self.knots[0] + self.knots[-1]) / 2

    @property
    def _is_odd(self) -> bool:
        mirrored = np.subtract(2 * self.centre, self.knots[::-1])
        sums = np.add(self.before, self.after[::-1])
        return bool(max(np.abs(mirrored - self.knots).max(), np.abs(sums - sums[0]).max()) < 1e-12)

    def __call__(self, x: float | ndarray) -> Any:
        """The value at x; at a knot, the one after it."""
        piece = np.searchsorted(self.knots, x, side="right")
        return self.values[piece] + self.slopes[piece] * (x - self.starts[piece])


@dataclass(frozen=True)
class Smoothed:
    """The smoothed score h of a piecewise linear score.

    Example: a step becomes a straight line, the steepest that h can be.
        >>> h = Smoothed(Score((0.2,), (0.0,), (1.0,)), sigma=0.1)
        >>> print(h(np.array([0.1, 0.2, 0.3])), h.derivative(np.array([0.1, 0.2, 0.3])))
        [-1.  0.  1.] [10. 10. 10.]
    """

    score: Score
    sigma: float

    def __post_init__(self) -> None:
        low, high = SIGMAS
        if not low <= self.sigma <= high:
            raise InputError(
                f"expected sigma from {low:g} to {high:g}, got {self.sigma}; the closed form keeps its digits there"
            )

    def __call__(self, x: float | ndarray) -> Any:
        log_mass, values = self._pieces(x)
        with np.errstate(divide="ignore"):  # a piece of value 0 adds exp(-inf)
            mean, rest = (np.logaddexp.reduce(log_mass + np.log(v), axis=-1) for v in (values, 1 - values))
        smaller = np.minimum(mean, rest)  # of E S and 1 - E S the one that carries digits
        z = ndtri_exp(smaller)
        z -= (log_ndtr(z) - smaller) * np.exp(log_ndtr(z) - _log_phi(z))  # Newton: ndtri_exp stops three digits early
        return np.where(mean > rest, -1.0, 1.0) * z

    def derivative(self, x: float | ndarray) -> Any:
        """h'(x) = (d/dx E S) / phi(h): jumps count with the normal density, slopes with the mass of their piece."""
        log_mass, _ = self._pieces(x)
        log_phi = _log_phi(self(x))[..., None]
        jumps = np.exp(_log_phi(self._distance(x, self.score.knots)) - log_phi) @ self.score.jumps
        inclined = self.score.slopes != 0  # the others may weigh more than a float holds, relative to phi(h)
        return jumps / self.sigma + np.exp(log_mass[..., inclined] - log_phi) @ self.score.slopes[inclined]

    def _distance(self, x: float | ndarray, points: Any) -> ndarray:
        """(point - x) / sigma, points along the last axis."""
        return np.subtract(points, np.asarray(x)[..., None]) / self.sigma

    def _pieces(self, x: float | ndarray) -> tuple[ndarray, ndarray]:
        """Log mass of every piece under N(x, sigma^2), and the score's mean on it."""
        edges = self._distance(x, (-math.inf, *self.score.knots, math.inf))
        low, high = edges[..., :-1], edges[..., 1:]
        log_mass = _log_mass(low, high)
        # The mean of Z within a piece, by which x + sigma Z differs from x there.
        drift = np.exp(_log_phi(low) - log_mass) - np.exp(_log_phi(high) - log_mass)
        from_start = self.sigma * drift - self.sigma * self._distance(x, self.score.starts)
        values = self.score.values + self.score.slopes * from_start
        return log_mass, np.clip(values, *self.score.ranges)

    @cached_property
    def turns(self) -> tuple[float, ...]:
        """Where h turns, on the whole line.

        Gaussian smoothing diminishes variation (the kernel is totally positive): h' changes sign at most as often as S
        changes direction, and in the same order. A monotone score therefore never turns; an odd one that turns twice
        does so at two points mirrored about its centre, or not at all when the noise has washed the middle out.
        """
        from scipy.optimize import brentq

        if len(self.score.directions) == 1:
            return ()
        middle, centre = self.score.directions[1], self.score.centre

        def rise(distance: float) -> float:
            return middle * float(self.derivative(centre + distance))

        if rise(0.0) <= 0:
            return ()
        far = (self.score.knots[-1] - centre) / 2
        while rise(far) > 0:
            far *= 2
        distance = float(brentq(rise, 0.0, far, xtol=1e-15))  # pyright: ignore[reportArgumentType]
        return centre - distance, centre + distance

    def branches(self, low: float, high: float) -> list[tuple[float, float]]:
        """[low, high] cut where h turns: on each part h is monotone."""
        return list(pairwise([low, *(x for x in self.turns if low < x < high), high]))

    def crossings(self, t: float, low: float, high: float) -> tuple[float, ...]:
        """Every x in [low, high] where h crosses t: at most one on each branch."""
        branches = self.branches(low, high)
        return tuple(self._root(t, a, b) for a, b in branches if (self(a) <= t) != (self(b) <= t))

    def below(self, t: float, low: float, high: float) -> tuple[tuple[float, float], ...]:
        """The intervals of [low, high] where h is at most t; two may touch where h turns."""
        found = []
        for a, b in self.branches(low, high):
            first, last = self(a) <= t, self(b) <= t
            if first != last:
                a, b = (a, self._root(t, a, b)) if first else (self._root(t, a, b), b)
            if (first or last) and a < b:
                found.append((a, b))
        return tuple(found)

    def _root(self, t: float, a: float, b: float) -> float:
        from scipy.optimize import brentq

        return float(brentq(lambda x: self(x) - t, a, b, xtol=1e-16))  # pyright: ignore[reportArgumentType]


def _log_phi(z: Any) -> Any:
    """Log of the standard normal density."""
    return -(z**2) / 2 - math.log(2 * math.pi) / 2


def _log_mass(low: ndarray, high: ndarray) -> ndarray:
    """log(Phi(high) - Phi(low)) without cancellation: intervals right of zero are mirrored."""
    right = low > 0
    low, high = np.where(right, -high, low), np.where(right, -low, high)
    return log_ndtr(high) + np.log(-np.expm1(log_ndtr(low) - log_ndtr(high)))
