"""Piecewise linear scores for property tests, and their smoothed values by quadrature."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import assume, settings
from hypothesis import strategies as st
from scipy.integrate import quad

from keepcover.paper.closed_form import Score

patient = settings(deadline=None, derandomize=True)

sigmas = st.sampled_from([0.1, 0.2, 0.3, 1.0])

Parts = tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]
"""What a Score is made of. The tests make it: run-time type checks draw random numbers, which strategies must not."""


@st.composite
def monotone_scores(draw: st.DrawFn) -> Parts:
    """Steps, ramps and flat pieces in any mixture, rising within [0, 1]."""
    knots = sorted(draw(st.sets(st.integers(-50, 50), min_size=1, max_size=5)))
    values = sorted(draw(st.lists(st.integers(0, 20), min_size=2 * len(knots), max_size=2 * len(knots))))
    assume(values[0] < values[-1])
    return tuple(k / 100 for k in knots), tuple(v / 20 for v in values[::2]), tuple(v / 20 for v in values[1::2])


@st.composite
def odd_scores(draw: st.DrawFn) -> Parts:
    """Scores that fall, rise and fall, or the other way round, odd about 0: the failure case and its relatives."""
    inner, outer = sorted(draw(st.sets(st.integers(1, 60), min_size=2, max_size=2)))
    p, q, s = sorted(draw(st.lists(st.integers(10, 20), min_size=3, max_size=3)))
    end = draw(st.integers(0, s - 1))
    before, after = (20 - end, 20 - q, p, s), (20 - s, 20 - p, q, end)
    if draw(st.booleans()):
        before, after = tuple(20 - v for v in before), tuple(20 - v for v in after)
    knots = (-outer / 100, -inner / 100, inner / 100, outer / 100)
    return knots, tuple(v / 20 for v in before), tuple(v / 20 for v in after)


def values(score: Score, x: Any) -> Any:
    """The score itself; at a knot, the value after it."""
    piece = np.searchsorted(score.knots, x, side="right")
    starts, at = np.array([score.knots[0], *score.knots]), np.array([score.before[0], *score.after])
    return at[piece] + np.array([0.0, *score.slopes, 0.0])[piece] * (x - starts[piece])


def mirrored(score: Score) -> Score:
    """1 - S(-x)."""
    flip = lambda values: tuple(1 - v for v in reversed(values))  # noqa: E731
    return Score(tuple(-k for k in reversed(score.knots)), flip(score.after), flip(score.before))


def expectation(score: Score, sigma: float, x: float, weight: Any = lambda z: 1.0) -> float:
    """E[weight(Z) S(x + sigma Z)] by adaptive quadrature between the knots."""
    inside = [(k - x) / sigma for k in score.knots if abs(k - x) < 12 * sigma]

    def integrand(z: float) -> float:
        density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        return weight(z) * float(values(score, x + sigma * z)) * density

    return math.fsum(quad(integrand, a, b, epsabs=1e-13, limit=200)[0] for a, b in pairwise([-12, *inside, 12]))
