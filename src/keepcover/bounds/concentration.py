"""Concentration: how far a Monte Carlo mean, cdf or share lies from the truth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.special import bdtr, betaincinv, rel_entr

from keepcover.errors import InputError

Array = Any  # a float, an ndarray or a tensor: these formulas are elementwise


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


def hoeffding_bentkus(share: float, n: int, mean: Array) -> Array:
    r"""A bound of P[the average of n independent values in [0, 1] is at most ``share``] where their mean is at least ``mean``.

    The smaller of Chernoff's :math:`e^{-n\,KL(share, mean)}` and Bentkus' :math:`e\,P[\mathrm{Bin}(n, mean) \le \lceil n\,share \rceil]`.
    It grows with ``share`` and falls with ``mean``: a test by it depends on the values through their sum alone.

    Example:
        >>> round(float(hoeffding_bentkus(0.0795, 1000, 0.1)), 4)
        0.0479
    """
    mean = np.asarray(mean, dtype=np.float64)
    chernoff = np.where(mean > share, np.exp(-n * (rel_entr(share, mean) + rel_entr(1 - share, 1 - mean))), 1.0)
    most = min(np.ceil(n * share + 1e-9), n)  # a sum that floating point rounded down to an integer counts as above it
    return np.minimum(chernoff, np.e * bdtr(most, n, mean))[()]


def bisect(holds: Callable[[float], Any], low: float, high: float) -> tuple[float, float]:
    """Where ``holds``, true from ``low`` on, ceases to be true before ``high``: the number before and the one after, rounded apart.

    Example:
        >>> low, high = bisect(lambda x: x * x < 2, 1.0, 2.0)
        >>> round(low, 6), high - low < 1e-15
        (1.414214, True)
    """
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low, high


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


def mean_interval(mean: float, n: int, level: float) -> tuple[float, float]:
    r"""Two-sided interval of the expectation of independent values in [0, 1] whose average over n is ``mean``; each side is missed
    with probability at most ``level / 2``: what :func:`hoeffding_bentkus` does not reject.

    Example:
        >>> [round(end, 4) for end in mean_interval(0.9, 100, 0.05)]
        [0.7997, 0.9621]
    """

    def highest(share: float) -> float:
        return bisect(lambda mean: hoeffding_bentkus(share, n, mean) > level / 2, share, 1.0)[1]

    return 1 - highest(1 - mean), highest(mean)
