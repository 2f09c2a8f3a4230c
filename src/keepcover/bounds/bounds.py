r"""Concentration bounds, the Gaussian shift, and the two exact Monte Carlo certificates.

Everything here is float64 arithmetic on a few numbers: no tensors of images, no network. Bounds that certify err on
the safe side of rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from scipy.special import bdtr, betainc, betaincinv, gammaln, ndtr, ndtri, rel_entr

from keepcover.errors import InputError

Array = Any  # a float, an ndarray or a tensor: these formulas are elementwise


def gaussian_shift(p: Float[ndarray, "..."] | float, d: float) -> Any:
    r"""The largest probability a Gaussian-smoothed event can reach when its input moves by ``d`` standard deviations.

    .. math:: \mathrm{shift}(p, d) = \Phi(\Phi^{-1}(p) + d), \quad \mathrm{shift}(0, d) = 0, \ \mathrm{shift}(1, d) = 1

    Example:
        >>> round(float(gaussian_shift(0.1, 0.5)), 4)
        0.2172
        >>> float(gaussian_shift(0.0, 9.0)), float(gaussian_shift(1.0, -9.0))
        (0.0, 1.0)
    """
    p = np.asarray(p, dtype=np.float64)
    if np.any((p < 0) | (p > 1)) or np.isnan(p).any():
        raise InputError(f"expected probabilities in [0, 1], got range [{p.min()}, {p.max()}]")
    with np.errstate(invalid="ignore"):
        shifted = ndtr(ndtri(p) + d)
    # Phi(Phi^-1(p)) may round past p; a shift never moves the other way.
    shifted = np.maximum(p, shifted) if d >= 0 else np.minimum(p, shifted)
    return np.where((p == 0) | (p == 1), p, shifted)[()]


def hoeffding(draws: int, beta: float) -> float:
    r"""One-sided Hoeffding radius of the mean of ``draws`` values in [0, 1]: :math:`\sqrt{\ln(1/\beta) / (2N)}`.

    Example:
        >>> round(hoeffding(256, 0.001), 4)
        0.1162
    """
    return float(np.sqrt(-np.log(beta) / (2 * draws)))


def bernstein(variance: Array, draws: int, beta: float) -> Array:
    r"""One-sided empirical Bernstein radius (Maurer & Pontil 2009), from the unbiased sample variance.

    .. math:: \sqrt{2 V \ln(2/\beta) / N} + 7 \ln(2/\beta) / (3 (N - 1))

    Example:
        >>> round(bernstein(0.01, 256, 0.001), 4)
        0.0939
    """
    if draws < 2:
        raise InputError(f"the empirical Bernstein bound needs a sample variance: at least 2 draws, got {draws}")
    log = float(np.log(2 / beta))
    return (2 * variance * log / draws) ** 0.5 + 7 * log / (3 * (draws - 1))


def dkw(draws: int, beta: float) -> float:
    r"""One-sided Dvoretzky-Kiefer-Wolfowitz-Massart radius of an empirical cdf, for :math:`\beta \le 1/2`.

    Example:
        >>> dkw(100, 0.01) == hoeffding(100, 0.01)
        True
    """
    if not 0 < beta <= 0.5:
        raise InputError(f"the one-sided DKW bound holds for levels in (0, 0.5], got {beta}")
    return hoeffding(draws, beta)


def clopper_pearson(successes: Array, draws: int, level: float) -> tuple[Any, Any]:
    r"""Exact two-sided interval of a binomial proportion; each side is missed with probability at most ``level / 2``.

    Example:
        >>> low, high = clopper_pearson(90, 100, 0.05)
        >>> round(float(low), 4), round(float(high), 4)
        (0.8238, 0.951)
    """
    k = np.asarray(successes, dtype=np.float64)
    if np.any(k < 0) or np.any(k > draws):
        raise InputError(f"expected successes between 0 and {draws}, got range [{k.min()}, {k.max()}]")
    low = np.where(k == 0, 0.0, betaincinv(np.maximum(k, 0.5), draws - k + 1, level / 2))
    high = np.where(k == draws, 1.0, betaincinv(k + 1, np.maximum(draws - k, 0.5), 1 - level / 2))
    return low[()], high[()]


def binomial_tail(draws: int, at_least: Any, q: Any) -> Any:
    r"""P[Bin(draws, q) >= at_least], elementwise, accurate far into the tail (never ``1 - cdf``).

    Example:
        >>> round(float(binomial_tail(4, 1, 0.5)), 4), float(binomial_tail(4, 0, 0.5)), float(binomial_tail(4, 5, 0.5))
        (0.9375, 1.0, 0.0)
    """
    j = np.asarray(at_least, dtype=np.float64)
    inside = betainc(np.clip(j, 1, draws), draws - np.clip(j, 1, draws) + 1, q)
    return np.where(j <= 0, 1.0, np.where(j > draws, 0.0, inside))[()]


def miss_rate(z: Any, draws: int, kappa: Any, r: float, gamma: Any = 0.0) -> Any:
    r"""h(q): the worst-case probability that more than ``kappa`` of ``draws`` attacked scores exceed the threshold.

    The clean exceedance probability is :math:`q = \Phi(z)`, the attacked one at most :math:`\Phi(z + r)`. A randomised
    boundary forgives one more exceedance with probability ``gamma``.

    Example:
        >>> round(float(miss_rate(0.0, 4, 1, 0.0)), 4), round(float(miss_rate(0.0, 4, 1, 0.5)), 4)
        (0.6875, 0.9097)
    """
    q = ndtr(np.asarray(z, dtype=np.float64) + r)
    strict, lenient = binomial_tail(draws, np.add(kappa, 1), q), binomial_tail(draws, np.add(kappa, 2), q)
    return (1 - gamma) * strict + gamma * lenient


# -- 9a: the hull ----------------------------------------------------------------------------------------------------

# Probit grid of q. Both endpoints of [0, 1] belong to it: leaving out q = 0 makes alpha' up to 2.5 times too large.
_GRID = np.concatenate([[-np.inf], np.linspace(-38.0, -6.0, 129)[:-1], np.linspace(-6.0, 8.2, 513), [np.inf]])


def _bridge(f: ndarray, h: ndarray, alpha: float) -> tuple[ndarray, ndarray, ndarray]:
    r"""Where the upper concave hull of the points (f, h) crosses height alpha, for a batch of point sets [P, m].

    Lines :math:`\mu \mapsto f_i + \mu (\alpha - h_i)`: the crossing is :math:`\max_\mu \min_i` of them. Starting from
    the two end points, the lowest line at the current :math:`\mu` replaces the end on its side until nothing is lower.
    Any :math:`\mu` gives a lower bound, so stopping early is safe. Returns the crossing and the two hull points.
    """
    rows = np.arange(len(f))
    left, right = np.zeros(len(f), dtype=np.int64), np.full(len(f), f.shape[1] - 1)
    crossing = np.zeros(len(f))
    for _ in range(64):
        rise = h[rows, right] - h[rows, left]
        mu = (f[rows, right] - f[rows, left]) / rise
        lines = f + mu[:, None] * (alpha - h)
        lowest = lines.argmin(axis=1)
        crossing = np.maximum(crossing, lines[rows, lowest])
        lower = lines[rows, lowest] < (f[rows, left] + mu * (alpha - h[rows, left])) * (1 - 1e-12)
        if not lower.any():
            break
        below = h[rows, lowest] <= alpha
        left = np.where(lower & below, lowest, left)
        right = np.where(lower & ~below, lowest, right)
    return crossing, left, right


def _check_rule(calibration_draws: int, c: int, draws: int, kappa: int, r: float, alpha: float) -> None:
    if not (0 <= c < calibration_draws and 0 <= kappa < draws):
        raise InputError(
            f"expected 0 <= c < calibration draws and 0 <= kappa < draws, got c = {c} of {calibration_draws} and "
            f"kappa = {kappa} of {draws}"
        )
    if not (0 < alpha < 1 and 0 <= r < np.inf):
        raise InputError(f"expected 0 < alpha < 1 and a finite r = epsilon / sigma >= 0, got alpha {alpha} and r {r}")


def hull_level(
    calibration_draws: int, c: int, draws: int, kappa: int, r: float, alpha: float, gamma: float = 0.0
) -> float:
    r"""alpha': the conformal level at which the count rule (c, kappa) certifies miscoverage ``alpha`` under attack.

    With :math:`f(q) = P[\mathrm{Bin}(N_{cal}, q) > c]`, :math:`h(q) = P[\mathrm{Bin}(N, \mathrm{shift}(q, r)) > \kappa]`
    and H the upper concave hull of :math:`\{(f(q), h(q))\}`, :math:`\alpha' = \sup\{a : H(a) \le \alpha\}`.

    Each grid cell is represented by its worst corner, h at its right end and f at its left end, so the result never
    exceeds the true alpha'; cells that touch the hull are split until the optimistic corner agrees within 1e-4.

    Example:
        One draw each is the one-sample certificate :math:`\Phi(\Phi^{-1}(\alpha) - r)`:

        >>> round(hull_level(1, 0, 1, 0, 0.5, 0.1), 4), round(float(gaussian_shift(0.1, -0.5)), 4)
        (0.0374, 0.0374)
    """
    return hull_bracket(calibration_draws, c, draws, kappa, r, alpha, gamma)[0]


@lru_cache(maxsize=65536)
def hull_bracket(
    calibration_draws: int, c: int, draws: int, kappa: int, r: float, alpha: float, gamma: float = 0.0
) -> tuple[float, float]:
    """alpha' from below and from above: what a rule may use (:func:`hull_level`), and what no correct rule exceeds.

    Example:
        >>> low, high = hull_bracket(1, 0, 1, 0, 0.5, 0.1)
        >>> bool(low <= gaussian_shift(0.1, -0.5) <= high), high / low - 1 < 2e-4
        (True, True)
    """
    _check_rule(calibration_draws, c, draws, kappa, r, alpha)
    z = _GRID
    if miss_rate(np.inf, draws, kappa, r, gamma) <= alpha:
        return 1.0, 1.0  # the randomised boundary alone keeps enough
    if miss_rate(z[1], draws, kappa, r, gamma) > alpha:
        # So large an attack that no level the grid can tell from zero certifies alpha.
        return 0.0, float(binomial_tail(calibration_draws, c + 1, ndtr(z[1])))
    safe = above = 0.0
    for _ in range(24):
        f = binomial_tail(calibration_draws, c + 1, ndtr(z))
        h = miss_rate(z, draws, kappa, r, gamma)
        (safe,), _, _ = _bridge(f[None, :-1], h[None, 1:], alpha)
        (hopeful,), (i,), (j,) = _bridge(f[None], h[None], alpha)
        mu = (f[j] - f[i]) / (h[j] - h[i])
        above = f[i] + mu * (alpha - h[i])  # on a chord between two points of the curve, hence below the hull
        if hopeful - safe <= 1e-4 * hopeful or len(z) > 100_000:
            break
        worst_corner = f[:-1] + mu * (alpha - h[1:])
        coarse = np.flatnonzero(worst_corner[1:-1] < hopeful * (1 - 5e-5)) + 1
        finer = [np.linspace(z[k], z[k + 1], 6)[1:-1] for k in coarse]
        z = np.unique(np.concatenate([z, *finer]))
    return min(max(float(safe) * (1 - 1e-9), 0.0), 1.0), min(float(above) * (1 + 1e-9), 1.0)


@lru_cache(maxsize=64)
def hull_curve(
    calibration_draws: int, c: int, draws: int, kappa: int, r: float, gamma: float = 0.0
) -> tuple[ndarray, ndarray]:
    """Corners (a, H(a)) of an upper bound of the concave hull H, ascending in a.

    Example:
        >>> a, height = hull_curve(1, 0, 1, 0, 0.5)
        >>> 0.1 <= float(np.interp(0.037411, a, height)) < 0.102
        True
    """
    cells = 4000 * min(int(max(calibration_draws, draws) ** 0.5), 16)  # f and h are the steeper the more draws
    z = np.union1d(_GRID, np.linspace(-9.0, 9.0, cells + 1))
    f = binomial_tail(calibration_draws, c + 1, ndtr(z))
    h = miss_rate(np.append(z[1:], np.inf), draws, kappa, r, gamma)  # h(1) is 1 - gamma where kappa + 1 draws are all
    corners: list[tuple[float, float]] = []
    for x, y in zip(f, h, strict=True):
        while len(corners) > 1:
            (x1, y1), (x2, y2) = corners[-2:]
            if (y2 - y1) * (x - x1) > (y - y1) * (x2 - x1):
                break
            corners.pop()
        corners.append((float(x), float(y)))
    a, height = np.array(corners).T
    return a, np.maximum.accumulate(height)


def hull_levels(
    calibration_draws: int, c: ndarray, draws: int, kappa: ndarray, r: float, alpha: float, gamma: float = 0.0
) -> Float[ndarray, " p"]:
    """alpha' of many rules at once, on one fixed grid: for choosing among rules, **not** for certifying one.

    Example:
        >>> hull_levels(4, np.array([0, 1]), 4, np.array([1, 1]), 0.5, 0.1).round(3)
        array([0.1  , 0.019])
    """
    z = np.concatenate(
        [[-np.inf], np.linspace(-7.0, 7.0, 384 + 12 * int(max(calibration_draws, draws) ** 0.5)), [np.inf]]
    )
    some_c, at_c = np.unique(c, return_inverse=True)
    some_kappa, at_kappa = np.unique(kappa, return_inverse=True)
    f = binomial_tail(calibration_draws, some_c[:, None] + 1, ndtr(z))
    h = miss_rate(z, draws, some_kappa[:, None], r, gamma)
    return _bridge(f[at_c], h[at_kappa], alpha)[0]


# -- 9b: the majorant --------------------------------------------------------------------------------------------------


# Cells of the linear program are cut where h crosses these heights, so that pairing h at the right end of a cell with
# E g at its left end costs at most the distance between two of them: fine where alpha lives, coarser above.
_HEIGHTS = np.concatenate(
    [
        np.geomspace(1e-7, 4e-4, 24),
        np.arange(0.0005, 0.02, 0.0005),
        np.arange(0.02, 0.2, 0.002),
        np.arange(0.2, 1.0, 0.01),
    ]
)


@lru_cache(maxsize=256)
def _cells(calibration_draws: int, draws: int, kappa: int, r: float, gamma: float) -> tuple[ndarray, ndarray, ndarray]:
    """The cells' probit edges, P[Bin >= each breakpoint] at their left ends and h at their right ends."""
    dense = np.linspace(-9.0, 9.0, 8192) - r
    edges = np.interp(_HEIGHTS, miss_rate(dense, draws, kappa, r, gamma), dense)
    z = np.concatenate([[-np.inf], np.unique(edges), [np.inf]])
    return z, *_constraints(z, calibration_draws, draws, kappa, r, gamma)


def _constraints(
    z: ndarray, calibration_draws: int, draws: int, kappa: int, r: float, gamma: float
) -> tuple[ndarray, ndarray]:
    steps = np.array([0, *breakpoints(calibration_draws)])
    return binomial_tail(calibration_draws, steps[None, :], ndtr(z[:-1])[:, None]), miss_rate(
        z[1:], draws, kappa, r, gamma
    )


def breakpoints(calibration_draws: int, most: int = 48) -> tuple[int, ...]:
    """The counts at which a majorant may rise: all of them for few draws, else an even subset with both ends."""
    return tuple(int(j) for j in np.unique(np.linspace(1, calibration_draws, min(most, calibration_draws)).round()))


def majorant(
    weights: Float[ndarray, " counts"],
    draws: int,
    kappa: int,
    r: float,
    gamma: float = 0.0,
    increment_cost: float = 1 / 2500,
) -> tuple[Float[ndarray, " counts"], float]:
    r"""The cheapest nondecreasing g on {0..N_cal} with :math:`E\,g(\mathrm{Bin}(N_{cal}, q)) \ge h(q)` for every q.

    ``weights[j]`` is the share of holdout points whose count is j; the cost is :math:`\sum_j w_j g(j)` plus
    ``increment_cost`` per unit of rise, which keeps g finite at counts the holdout never showed. A linear program over
    the rises of g (HiGHS). Every q lies in a cell whose constraint pairs h at the right end with E g at the left end;
    both increase in q, so the constraint holds on the whole cell. Tight cells are then split and the program solved again.

    Returns:
        g, lifted so that every constraint holds in float64 with 1e-6 to spare, and its cost without the increments.

    Example:
        >>> g, cost = majorant(np.array([0.9, 0.1]), draws=1, kappa=0, r=0.0)
        >>> g.round(1), round(cost, 1)          # no attack, one draw: g is the miss indicator itself
        (array([0., 1.]), 0.1)
    """
    from scipy.optimize import linprog  # imported late: it costs more than the rest of the package together

    calibration_draws = len(weights) - 1
    steps = breakpoints(calibration_draws)
    cost = np.array([weights.sum(), *(weights[j:].sum() + increment_cost for j in steps)])
    z, expect, need = _cells(calibration_draws, draws, kappa, r, gamma)

    def solve() -> ndarray:
        result = linprog(cost, A_ub=-expect, b_ub=-need, bounds=(0, None), method="highs")
        if result.status != 0:
            raise RuntimeError(f"the majorant program did not solve: {result.message}")
        return result.x

    solution = solve()
    tight = np.flatnonzero(expect @ solution - need < 1e-7)
    finer = np.concatenate([np.linspace(z[k], z[k + 1], 9)[1:-1] for k in np.clip(tight, 1, len(z) - 3)])
    z = np.unique(np.concatenate([z, finer]))
    expect, need = _constraints(z, calibration_draws, draws, kappa, r, gamma)
    solution = solve()
    rises = np.zeros(calibration_draws + 1)
    rises[[0, *steps]] = np.maximum(solution, 0.0)
    violation = np.max(need - expect @ rises[[0, *steps]])
    rises[0] += max(0.0, float(violation)) + 1e-6
    g = rises.cumsum()
    return g, float(weights @ g)


@lru_cache(maxsize=256)
def _points(
    calibration_draws: int, draws: int, kappa: int, r: float, gamma: float
) -> tuple[ndarray, ndarray, tuple[int, ...]]:
    """A few q: P[Bin >= each of a few counts] and h there, unpaired."""
    steps = breakpoints(calibration_draws, most=24)
    z = _cells(calibration_draws, draws, kappa, r, gamma)[0][1:-1:4]
    tails = binomial_tail(calibration_draws, np.array([0, *steps])[None, :], ndtr(z)[:, None])
    return tails, miss_rate(z, draws, kappa, r, gamma), steps


def majorant_cost(
    weights: Float[ndarray, " counts"],
    draws: int,
    kappa: int,
    r: float,
    gamma: float,
    n: int,
    increment_cost: float = 1 / 2500,
) -> float:
    """About what :func:`majorant` costs n calibration points: for choosing a threshold, **not** for certifying one.

    Example:
        >>> weights = np.array([0.95, 0.04, 0.01])
        >>> g, cost = majorant(weights, draws=1, kappa=0, r=0.5)
        >>> abs(majorant_cost(weights, 1, 0, 0.5, 0.0, n=10**6) / cost - 1) < 0.05
        True
    """
    from scipy.optimize import linprog

    expect, need, steps = _points(len(weights) - 1, draws, kappa, r, gamma)
    tails = np.array([1.0, *(weights[j:].sum() for j in steps)])
    price = tails + np.array([0.0, *[increment_cost] * len(steps)])
    result = linprog(price, A_ub=-expect, b_ub=-need, bounds=(0, None), method="highs")
    if result.status != 0:
        raise RuntimeError(f"the majorant program did not solve: {result.message}")
    return float((n * tails @ result.x + result.x.sum()) / (n + 1))


def majorant_gap(g: Any, draws: int, kappa: int, r: float, gamma: float = 0.0) -> float:
    """The largest h(q) - E g(Bin(N_cal, q)) over a dense grid of q, 0 and 1 included; at most zero for a valid g.

    Example:
        >>> g, _ = majorant(np.array([0.9, 0.1]), draws=1, kappa=0, r=0.5)
        >>> majorant_gap(g, 1, 0, 0.5) <= 0, majorant_gap(0.9 * g, 1, 0, 0.5) <= 0
        (True, False)
    """
    z = np.union1d(_GRID, np.linspace(-9.0, 9.0, 4001))
    rises = np.diff(np.asarray(g), prepend=0.0)
    at = np.flatnonzero(rises)
    expect = binomial_tail(len(rises) - 1, at[:, None], ndtr(z)).T @ rises[at]
    return float(np.max(miss_rate(z, draws, kappa, r, gamma) - expect))


@lru_cache(maxsize=64)
def hypergeometric(total: int, sample: int) -> Float[ndarray, "marked found"]:
    """P[``found`` of a random ``sample`` are marked | ``marked`` of ``total`` are], as a [total+1, sample+1] matrix.

    It turns counts over all of an image's draws into the average over every way to pick fewer of them.

    Example:
        >>> hypergeometric(4, 1)[:, 1]
        array([0.  , 0.25, 0.5 , 0.75, 1.  ])
    """
    if not 0 <= sample <= total:
        raise InputError(f"expected a sample of at most {total} draws, got {sample}")

    def log_choose(n: Any, k: Any) -> Any:
        inside = np.clip(k, 0, n)
        return np.where((k < 0) | (k > n), -np.inf, gammaln(n + 1) - gammaln(inside + 1) - gammaln(n - inside + 1))

    marked, found = np.arange(total + 1.0)[:, None], np.arange(sample + 1.0)[None, :]
    log = (
        log_choose(marked, found)
        + log_choose(total - marked, sample - found)
        - log_choose(np.float64(total), np.float64(sample))
    )
    return np.exp(log)


def covered_at_most(covered: int, m: int, n: int, rank: int) -> float:
    r"""P[at most ``covered`` of ``m`` test points are covered] when the threshold is the ``rank``-th of n scores.

    The covered count of split conformal prediction with continuous scores is exactly
    :math:`\mathrm{BetaBinomial}(m, rank, n + 1 - rank)`: it includes the luck of the calibration draw, which a binomial
    test ignores.

    Example:
        >>> covered_at_most(1, 1, 9, 9), round(covered_at_most(0, 1, 9, 9), 6)
        (1.0, 0.1)
    """
    if covered >= m or rank > n:
        return 1.0 if covered >= m else 0.0
    a, b, j = float(rank), float(n + 1 - rank), np.arange(covered + 1.0)
    log = (
        gammaln(m + 1) - gammaln(j + 1) - gammaln(m - j + 1) + gammaln(j + a) + gammaln(m - j + b) - gammaln(m + a + b)
    )
    return float(min(np.exp(log + gammaln(a + b) - gammaln(a) - gammaln(b)).sum(), 1.0))


def covered_at_most_given(covered: int, m: int, missed: ndarray, exceeded: ndarray) -> float:
    r"""P[at most ``covered`` of m] when points are missed with a probability M that the calibration draw decides.

    The law of M: :math:`P[M > missed_k] \le exceeded_k`, ``missed`` ascending, M at most its last entry. Integrated over
    the cells between them, each at its worse end, so the p-value is never too small:
    :math:`\varphi(missed_0) + \sum_k (\varphi(missed_{k+1}) - \varphi(missed_k)) \, exceeded_k` with
    :math:`\varphi(u) = P[\mathrm{Bin}(m, 1 - u) \le covered]`.

    Example:
        >>> exact = covered_at_most(440, 500, 999, 900)
        >>> bool(1 <= covered_at_most_given(440, 500, *conformal_law(999, 900)) / exact < 1.05)
        True
    """
    few = bdtr(covered, m, 1 - np.clip(missed, 0.0, 1.0))
    return float(min(few[0] + np.sum(np.diff(few) * exceeded[:-1]), 1.0))


def conformal_law(
    n: int, rank: int, worst_miss: Callable[[ndarray], ndarray] = lambda clean: clean
) -> tuple[ndarray, ndarray]:
    r"""``missed`` and ``exceeded`` of a conformal quantile: the clean statistic of a fresh point exceeds the
    ``rank``-th of n with probability :math:`B \sim \mathrm{Beta}(n + 1 - rank, rank)`, and ``worst_miss(B)`` are missed.

    Example:
        >>> missed, exceeded = conformal_law(99, 90)
        >>> round(float(np.interp(0.5, exceeded[::-1], missed[::-1])), 3)          # the median, about 0.1
        0.097
    """
    if rank > n:
        return np.zeros(1), np.zeros(1)  # t = +inf misses nothing
    if rank < 1:
        return worst_miss(np.ones(1)), np.zeros(1)  # t = -inf
    tail = np.geomspace(1e-12, 0.02, 200)
    below = np.concatenate([[0.0], tail, np.linspace(0.02, 0.98, 801)[1:-1], 1 - tail[::-1], [1.0]])
    return worst_miss(betaincinv(float(n + 1 - rank), float(rank), below)), 1 - below


def risk_control_law(n: int, alpha: float, low: float, high: float) -> tuple[ndarray, ndarray]:
    r"""``missed`` and ``exceeded`` of conformal risk control at alpha with n losses between ``low`` and ``high``.

    Its threshold leaves the n losses a mean of at most :math:`\hat a = (\alpha (n + 1) - high) / n`. If the risk R(t)
    there exceeds u, then so few losses are left at the largest t whose risk is u or more too, where they are independent
    with mean at least u: a lower tail of n bounded variables, which Chernoff bounds by :math:`e^{-n\,KL(x, v)}` and Bentkus
    by :math:`e\,P[\mathrm{Bin}(n, v) \le \lceil n x \rceil]`, x and v being :math:`\hat a` and u as shares of the range.

    Example:
        >>> u, exceeded = risk_control_law(1000, 0.1, 0.0, 1.0)
        >>> float(exceeded[0]), bool(0.001 < np.interp(0.135, u, exceeded) < 0.002)
        (1.0, True)
    """
    mean = (alpha * (n + 1) - high) / n
    if mean < low:
        return np.zeros(1), np.zeros(1)  # t = +inf misses nothing
    start, end = min(mean, high, 1.0), min(high, 1.0)
    u = start + (end - start) * np.linspace(0.0, 1.0, 4001) ** 2  # fine where the risk will be
    width = max(high - low, 1e-300)
    x, v = min((mean - low) / width, 1.0), np.minimum((u - low) / width, 1.0)
    chernoff = np.where(v > x, np.exp(-n * (rel_entr(x, v) + rel_entr(1 - x, 1 - v))), 1.0)
    bentkus = np.e * bdtr(min(np.ceil(n * x + 1e-9), n), n, v)
    return u, np.minimum(chernoff, bentkus)
