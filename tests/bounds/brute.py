"""The certificates' two laws and their hull by brute force: scipy's binomial and normal laws, and Qhull."""

from __future__ import annotations

import numpy as np
from numpy import ndarray
from scipy import stats
from scipy.spatial import ConvexHull

from keepcover.bounds import Counts
from keepcover.noise import Gaussian, Threat


def counts_of(calibration_draws: int, draws: int, r: float) -> Counts:
    """Gaussian noise of standard deviation 1 against an attack of r."""
    return Counts(Threat(Gaussian(1.0), r), calibration_draws, draws)


def curve(
    calibration_draws: int, c: int, draws: int, kappa: int, r: float, gamma: float = 0.0, points: int = 40_001
) -> tuple[ndarray, ndarray, ndarray]:
    """A dense sample of q in [0, 1], f(q) and h(q)."""
    z = np.concatenate([[-np.inf], np.linspace(-12, 9, points), [np.inf]])
    attacked = stats.norm.cdf(z + r)
    f = stats.binom.sf(c, calibration_draws, stats.norm.cdf(z))
    h = (1 - gamma) * stats.binom.sf(kappa, draws, attacked) + gamma * stats.binom.sf(kappa + 1, draws, attacked)
    return stats.norm.cdf(z), f, h


def crossing(f: ndarray, h: ndarray, alpha: float) -> tuple[float, int, int]:
    """Where the upper concave hull of the points reaches alpha: the abscissa and the two hull points around it.

    The hull of a sample lies inside the hull of the curve, so the abscissa is at least the true alpha'.
    """
    corners = ConvexHull(np.column_stack([np.append(f, 1.0), np.append(h, 0.0)])).vertices  # (1, 0) closes it below
    upper = sorted((i for i in corners if i < len(f)), key=lambda i: (f[i], h[i]))
    last = max(k for k, i in enumerate(upper) if h[i] <= alpha)
    i, j = upper[last], upper[last + 1]
    weight = (alpha - h[i]) / (h[j] - h[i])
    return float(f[i] + weight * (f[j] - f[i])), int(i), int(j)


def bimodal_weights(calibration_draws: int) -> ndarray:
    """Counts of a model that is mostly right: many zeros, some in between, a few all above the threshold."""
    q = np.linspace(0, 1, 400) ** 20
    return stats.binom.pmf(np.arange(calibration_draws + 1), calibration_draws, q[:, None]).mean(axis=0)
