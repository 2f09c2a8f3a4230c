r"""The hull certificate: the conformal level at which a quantile of counts certifies miscoverage under attack.

For a rule (c, kappa) let :math:`f(q)` be the chance that a calibration point counts as missed and :math:`h(q)` the worst
chance that an attacked query is missed. Exchangeability bounds :math:`E f`, the certificate must bound :math:`E h`; with H
the upper concave hull of :math:`\{(f(q), h(q))\}` Jensen gives :math:`E h \le H(E f)`.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from keepcover.bounds.counts import Counts, between
from keepcover.errors import InputError


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
        # No rise where h(0) exceeds alpha: the crossing is then 0.
        rise = np.maximum(h[rows, right] - h[rows, left], 1e-12)
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


def hull_level(counts: Counts, c: int, kappa: int, alpha: float, gamma: float = 0.0) -> float:
    r"""alpha': the conformal level at which the count rule (c, kappa) certifies miscoverage ``alpha`` under attack.

    .. math:: \alpha' = \sup\{a : H(a) \le \alpha\}

    Each grid cell is represented by its worst corner, h at its right end and f at its left end, so the result never
    exceeds the true alpha'; cells that touch the hull are split until the optimistic corner agrees within 1e-4.

    Example:
        One draw each is the one-sample certificate, the attacked probability that comes down to alpha:

        >>> from keepcover.noise import Gaussian, Threat
        >>> threat = Threat(Gaussian(1.0), 0.5)
        >>> round(hull_level(Counts(threat, 1, 1), 0, 0, 0.1), 4), round(float(threat.down(0.1)), 4)
        (0.0374, 0.0374)
    """
    return hull_bracket(counts, c, kappa, alpha, gamma)[0]


@lru_cache(maxsize=65536)
def hull_bracket(counts: Counts, c: int, kappa: int, alpha: float, gamma: float = 0.0) -> tuple[float, float]:
    """alpha' from below and from above: what a rule may use (:func:`hull_level`), and what no correct rule exceeds.

    Example:
        >>> from keepcover.noise import Gaussian, Threat
        >>> threat = Threat(Gaussian(1.0), 0.5)
        >>> low, high = hull_bracket(Counts(threat, 1, 1), 0, 0, 0.1)
        >>> bool(low <= threat.down(0.1) <= high), high / low - 1 < 2e-4
        (True, True)
    """
    counts.check(c, kappa)
    if not 0 < alpha < 1:
        raise InputError(f"expected 0 < alpha < 1, got {alpha}")
    q = counts.grid()
    if counts.missed(kappa, 1.0, gamma) <= alpha:
        return 1.0, 1.0  # the randomised boundary alone keeps enough
    if counts.missed(kappa, q[1], gamma) > alpha:
        # So large an attack that no level the grid can tell from zero certifies alpha.
        return 0.0, float(counts.clean(c, q[1]))
    rounds = 24
    while True:
        f, h = counts.clean(c, q), counts.missed(kappa, q, gamma)
        (safe,), _, _ = _bridge(f[None, :-1], h[None, 1:], alpha)
        (hopeful,), (i,), (j,) = _bridge(f[None], h[None], alpha)
        rounds -= 1
        if hopeful - safe <= 1e-4 * hopeful or len(q) > 100_000 or rounds == 0:
            break
        mu = (f[j] - f[i]) / (h[j] - h[i])
        worst_corner = f[:-1] + mu * (alpha - h[1:])
        coarse = np.flatnonzero(worst_corner[1:-1] < hopeful * (1 - 5e-5)) + 1
        q = np.unique(np.concatenate([q, between(q[coarse], q[coarse + 1], 5)]))
    chord = f[i] + (f[j] - f[i]) / (h[j] - h[i]) * (alpha - h[i])  # between points of the curve, hence below the hull
    return min(max(float(safe) * (1 - 1e-9), 0.0), 1.0), min(float(chord) * (1 + 1e-9), 1.0)


def hull_levels(counts: Counts, c: ndarray, kappa: ndarray, alpha: float, gamma: float = 0.0) -> Float[ndarray, " p"]:
    """alpha' of many rules at once, on the coarse grid: for choosing among rules, **not** for certifying one.

    Example:
        >>> from keepcover.noise import Gaussian, Threat
        >>> hull_levels(Counts(Threat(Gaussian(1.0), 0.5), 4, 4), np.array([0, 1]), np.array([1, 1]), 0.1).round(3)
        array([0.1  , 0.019])
    """
    q = counts.grid()
    # Below 1e-12 nothing that can be chosen happens; both ends stay.
    q = np.concatenate([q[:1], q[q > 1e-12]])
    some_c, at_c = np.unique(c, return_inverse=True)
    some_kappa, at_kappa = np.unique(kappa, return_inverse=True)
    f, h = counts.clean(some_c[:, None], q), counts.missed(some_kappa[:, None], q, gamma)
    return _bridge(f[at_c], h[at_kappa], alpha)[0]


@lru_cache(maxsize=64)
def hull_curve(counts: Counts, c: int, kappa: int, gamma: float = 0.0) -> tuple[ndarray, ndarray]:
    """Corners (a, H(a)) of an upper bound of the concave hull H, ascending in a.

    Example:
        >>> from keepcover.noise import Gaussian, Threat
        >>> a, height = hull_curve(Counts(Threat(Gaussian(1.0), 0.5), 1, 1), 0, 0)
        >>> 0.1 <= float(np.interp(0.037411, a, height)) < 0.102
        True
    """
    # The curve is steeper with more draws.
    q = counts.grid(finer=6 * min(int(max(counts.calibration_draws, counts.draws) ** 0.5), 16))
    f = counts.clean(c, q)
    h = counts.missed(kappa, np.append(q[1:], 1.0), gamma)  # h(1) is 1 - gamma where kappa + 1 draws are all
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
