r"""The majorant certificate: conformal risk control of a function of counts that dominates the attacked miss rate.

Choose g nondecreasing on {0..N_cal} with :math:`E\,g(\mathrm{Bin}(N_{cal}, q)) \ge h(q)` for every q. Controlling the mean
of g over calibration points at alpha then controls the attacked miss rate at alpha.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from scipy.special import expit, logit

from keepcover.bounds.counts import Counts, between
from keepcover.bounds.laws import binomial_tail

# Cells of the linear program are first cut where h crosses these heights: pairing h at the right end of a cell with E g at its
# left end costs at most the distance between two of them. Where that costs anything they are then cut finer.
_EVEN = (np.arange(*span) for span in ((0.0005, 0.02, 0.0005), (0.02, 0.2, 0.002), (0.2, 1.0, 0.01)))
_HEIGHTS = np.concatenate([np.geomspace(1e-7, 4e-4, 24), *_EVEN])
INCREMENT_COST = 1 / 2500  # per unit of rise: keeps g finite at counts the holdout never showed
PRECISION = 3e-3  # of h: what pairing the two ends of a cell may cost in the end
PARTS, MOST_CELLS = 4, 1000  # of a cell that is cut, and of a program that is cut further
DEPTH = 16  # how often cells are cut to verify a g; seven times is the most that was seen


@lru_cache(maxsize=256)
def _cells(counts: Counts, kappa: int, gamma: float) -> tuple[ndarray, ndarray, ndarray]:
    """The cells' edges, P[Bin >= each breakpoint] at their left ends and h at their right ends."""
    dense = counts.grid(finer=12)[1:-1]
    # An attack may lift q = 0 itself, and g(0) must reach that far: fine above h(0) too.
    heights = np.union1d(_HEIGHTS, counts.missed(kappa, 0.0, gamma) + _HEIGHTS[_HEIGHTS < 0.02])
    edges = expit(np.interp(heights, counts.missed(kappa, dense, gamma), logit(dense)))
    q = np.concatenate([[0.0], np.unique(edges), [1.0]])
    return q, *_constraints(q, counts, kappa, gamma)


def _constraints(q: ndarray, counts: Counts, kappa: int, gamma: float) -> tuple[ndarray, ndarray]:
    return _tails(q[:-1], counts, breakpoints(counts.calibration_draws)), counts.missed(kappa, q[1:], gamma)


def breakpoints(calibration_draws: int, most: int = 128) -> tuple[int, ...]:
    """The counts at which a majorant may rise: all of them for few draws, else an even subset with both ends."""
    return tuple(int(j) for j in np.unique(np.linspace(1, calibration_draws, min(most, calibration_draws)).round()))


def _solve(cost: ndarray, expect: ndarray, need: ndarray) -> ndarray:
    from scipy.optimize import linprog  # imported late: it costs more than the rest of the package together

    result = linprog(cost, A_ub=-expect, b_ub=-need, bounds=(0, None), method="highs")
    if result.status != 0:
        raise RuntimeError(f"the majorant program did not solve: {result.message}")
    return result.x


def majorant(
    weights: Float[ndarray, " counts"], counts: Counts, kappa: int, gamma: float = 0.0, price: float = 0.0
) -> tuple[Float[ndarray, " counts"], float]:
    r"""The cheapest nondecreasing g on {0..N_cal} with :math:`E\,g(\mathrm{Bin}(N_{cal}, q)) \ge h(q)` for every q.

    ``weights[j]`` is the share of holdout points whose count is j; the cost is :math:`\sum_j w_j g(j)` plus a little per
    unit of rise, and ``price`` per unit of the largest value where a promise pays for it. A linear program over the rises of
    g (HiGHS). Every q lies in a cell whose constraint pairs h at the right end with E g at the left end; both increase in q,
    so the constraint holds on the whole cell. Cells in which that costs anything are cut and the program is solved again,
    until h rises by at most 0.3 % of itself in each of them, or there are a thousand. At 2 % sets of one draw per query were 1 % larger.

    Returns:
        g, lifted so that every constraint holds in float64 with 1e-6 to spare, and its cost without the increments.

    Example:
        >>> from keepcover.noise import Gaussian, Threat
        >>> g, cost = majorant(np.array([0.9, 0.1]), Counts(Threat(Gaussian(1.0), 0.0), 1, 1), kappa=0)
        >>> g.round(1), round(cost, 1)          # no attack, one draw: g is the miss indicator itself
        (array([0., 1.]), 0.1)
    """
    steps = breakpoints(counts.calibration_draws)
    # Points with nothing to cover weigh nothing, but how many there are differs from sample to sample: g(0) costs as if none were.
    cost = np.array([1.0, *(weights[j:].sum() + INCREMENT_COST for j in steps)]) + price
    q, expect, need = _cells(counts, kappa, gamma)
    while True:
        solved = _solve(cost, expect, need)
        rise = np.diff(need, prepend=0.0)
        loses = (expect @ solved - need < rise) & (rise > PRECISION * need + 1e-5)
        split = np.flatnonzero(loses & (q[:-1] > 0) & (q[1:] < 1))
        if not len(split) or len(q) > MOST_CELLS:
            break
        q = np.unique(np.concatenate([q, between(q[split], q[split + 1], PARTS)]))
        expect, need = _constraints(q, counts, kappa, gamma)
    rises = np.zeros(counts.calibration_draws + 1)
    rises[[0, *steps]] = np.maximum(solved, 0.0)
    rises[0] += max(0.0, float(np.max(need - expect @ rises[[0, *steps]]))) + 1e-6
    g = rises.cumsum()
    return g, float(weights @ g)


@lru_cache(maxsize=256)
def _points(counts: Counts, kappa: int, gamma: float) -> tuple[ndarray, ndarray, tuple[int, ...]]:
    """A few q: P[Bin >= each of a few counts] and h there, unpaired."""
    steps = breakpoints(counts.calibration_draws, most=24)
    q = _cells(counts, kappa, gamma)[0][1:-1:4]
    return _tails(q, counts, steps), counts.missed(kappa, q, gamma), steps


def _tails(q: ndarray, counts: Counts, steps: tuple[int, ...]) -> ndarray:
    """P[Bin(N_cal, q) >= 0 and each step]."""
    return binomial_tail(counts.calibration_draws, np.array([0, *steps]), counts.seen(q)[:, None])


def majorant_cost(
    weights: Float[ndarray, " counts"], counts: Counts, kappa: int, gamma: float, price: float = 0.0
) -> tuple[float, float]:
    """About the mean of :func:`majorant` and its largest value: for choosing a threshold, **not** for certifying one.

    Example:
        >>> from keepcover.noise import Gaussian, Threat
        >>> weights, counts = np.array([0.95, 0.04, 0.01]), Counts(Threat(Gaussian(1.0), 0.5), 2, 1)
        >>> g, cost = majorant(weights, counts, kappa=0)
        >>> abs(majorant_cost(weights, counts, 0, 0.0)[0] / cost - 1) < 0.05
        True
    """
    expect, need, steps = _points(counts, kappa, gamma)
    tails = np.array([1.0, *(weights[j:].sum() for j in steps)])
    x = _solve(tails + np.array([0.0, *[INCREMENT_COST] * len(steps)]) + price, expect, need)
    return float(tails @ x), float(x.sum())


def majorant_gap(g: Any, counts: Counts, kappa: int, gamma: float = 0.0) -> float:
    """The largest h(q) - E g(Bin(N_cal, q)) over a dense grid of q; at most zero for a valid g.

    Example:
        >>> from keepcover.noise import Gaussian, Threat
        >>> counts = Counts(Threat(Gaussian(1.0), 0.5), 1, 1)
        >>> g, _ = majorant(np.array([0.9, 0.1]), counts, kappa=0)
        >>> majorant_gap(g, counts, 0) <= 0, majorant_gap(0.9 * g, counts, 0) <= 0
        (True, False)
    """
    q = counts.grid(finer=6)
    return float(np.max(counts.missed(kappa, q, gamma) - _expected(g, counts, q)))


def _expected(g: Any, counts: Counts, q: ndarray) -> ndarray:
    """E g(Bin(N_cal, q)), the counts as they are seen at calibration."""
    rises = np.diff(np.asarray(g, dtype=np.float64), prepend=0.0)
    at = np.flatnonzero(rises)
    return binomial_tail(len(rises) - 1, at[:, None], counts.seen(q)).T @ rises[at]


def is_majorant(g: Any, counts: Counts, kappa: int, gamma: float = 0.0) -> bool:
    """Whether E g dominates h for **every** q: on each of many cells E g at the left end reaches h at the right end.

    Cells where it does not are cut as :func:`majorant` cuts them, so that what it returns passes.

    Example:
        >>> from keepcover.noise import Gaussian, Threat
        >>> counts = Counts(Threat(Gaussian(1.0), 0.5), 1, 1)
        >>> g, _ = majorant(np.array([0.9, 0.1]), counts, kappa=0)
        >>> is_majorant(g, counts, 0), is_majorant(0.9 * g, counts, 0)
        (True, False)
    """
    if not (np.isfinite(g).all() and np.all(np.diff(g) >= 0)):
        return False
    q = _cells(counts, kappa, gamma)[0]
    left, right = q[:-1], q[1:]
    for _ in range(DEPTH):
        reached = _expected(g, counts, left) + 1e-12
        short = reached < counts.missed(kappa, right, gamma)
        if not short.any():
            return True
        low, high = left[short], right[short]
        fails = np.any(reached[short] < counts.missed(kappa, low, gamma))
        if fails or low[0] == 0 or high[-1] == 1 or len(low) > MOST_CELLS:
            return False
        left = between(low, high, PARTS)
        right = np.where(np.arange(1, len(left) + 1) % PARTS, np.append(left[1:], 1.0), high.repeat(PARTS))
    return False
