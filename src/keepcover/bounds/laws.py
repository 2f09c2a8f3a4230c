"""Exact laws of counts: binomial tails, draws without replacement, and what calibration luck does to coverage."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from scipy.special import bdtr, betainc, betaincinv, gammaln

from keepcover.bounds.concentration import hoeffding_bentkus
from keepcover.errors import InputError

Curve = Callable[[ndarray], ndarray]


def binomial_tail(draws: int, at_least: Any, q: Any) -> Any:
    r"""P[Bin(draws, q) >= at_least], elementwise, accurate far into the tail (never ``1 - cdf``).

    Example:
        >>> round(float(binomial_tail(4, 1, 0.5)), 4), float(binomial_tail(4, 0, 0.5)), float(binomial_tail(4, 5, 0.5))
        (0.9375, 1.0, 0.0)
    """
    j = np.asarray(at_least, dtype=np.float64)
    inside = betainc(np.clip(j, 1, draws), draws - np.clip(j, 1, draws) + 1, q)
    return np.where(j <= 0, 1.0, np.where(j > draws, 0.0, inside))[()]


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
    marked, found = np.arange(total + 1.0)[:, None], np.arange(sample + 1.0)[None, :]
    ways = _log_choose(marked, found) + _log_choose(total - marked, sample - found)
    return np.exp(ways - _log_choose(total, sample))


def _log_choose(n: Any, k: Any) -> Any:
    """The logarithm of the number of ways to choose k of n; -inf where there is none."""
    inside = np.clip(k, 0, n)
    ways = gammaln(n + 1) - gammaln(inside + 1) - gammaln(n - inside + 1)
    return np.where((k < 0) | (k > n), -np.inf, ways)


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
    law = _log_choose(m, j) + gammaln(j + a) + gammaln(m - j + b) - gammaln(m + a + b)
    return float(min(np.exp(law + gammaln(a + b) - gammaln(a) - gammaln(b)).sum(), 1.0))


def covered_at_most_given(covered: float, m: int, missed: ndarray, exceeded: ndarray) -> float:
    r"""P[at most ``covered`` of m] when points are missed with a probability M that the calibration draw decides.

    A whole number of points, or, as a float, a sum of shares in [0, 1] of which M are missed on average: their law is not known,
    so :func:`hoeffding_bentkus` stands in for the binomial one.

    The law of M: :math:`P[M > missed_k] \le exceeded_k`, ``missed`` ascending, M at most its last entry. Integrated over
    the cells between them, each at its worse end, so the p-value is never too small: with
    :math:`\varphi(u) = P[\mathrm{Bin}(m, 1 - u) \le covered]` it is

    .. math:: \varphi(missed_0) + \sum_k (\varphi(missed_{k+1}) - \varphi(missed_k)) \, exceeded_k

    Example:
        >>> exact = covered_at_most(440, 500, 999, 900)
        >>> bool(1 <= covered_at_most_given(440, 500, *conformal_law(999, 900)) / exact < 1.05)
        True
    """
    clean = 1 - np.clip(missed, 0.0, 1.0)
    few = bdtr(covered, m, clean) if isinstance(covered, int) else hoeffding_bentkus(min(covered / m, 1.0), m, clean)
    return float(min(few[0] + np.sum(np.diff(few) * exceeded[:-1]), 1.0))


def conformal_law(n: int, rank: int, worst_miss: Curve = lambda clean: clean) -> tuple[ndarray, ndarray]:
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


def risk_control_law(n: int, mean: float, low: float, high: float) -> tuple[ndarray, ndarray]:
    r"""``missed`` and ``exceeded`` of risk control that leaves n losses between ``low`` and ``high`` a ``mean``, :math:`\hat a`.

    For the marginal promise :math:`\hat a = (\alpha (n + 1) - high) / n`. If the risk R(t)
    there exceeds u, then so few losses are left at the largest t whose risk is u or more too, where they are independent
    with mean at least u: a lower tail of n bounded variables, which :func:`hoeffding_bentkus` bounds, :math:`\hat a` and u
    being taken as shares of the range.

    Example:
        >>> u, exceeded = risk_control_law(1000, (0.1 * 1001 - 1.0) / 1000, 0.0, 1.0)
        >>> float(exceeded[0]), bool(0.001 < np.interp(0.135, u, exceeded) < 0.002)
        (1.0, True)
    """
    if mean < low:
        return np.zeros(1), np.zeros(1)  # t = +inf misses nothing
    start, end = min(mean, high, 1.0), min(high, 1.0)
    u = start + (end - start) * np.linspace(0.0, 1.0, 4001) ** 2  # fine where the risk will be
    width = max(high - low, 1e-300)
    x, v = min((mean - low) / width, 1.0), np.minimum((u - low) / width, 1.0)
    return u, hoeffding_bentkus(x, n, v)
