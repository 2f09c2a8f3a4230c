"""Choosing (c, kappa), g and a threshold on the holdout: approximate where it only chooses, exact where it certifies."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from numpy import ndarray

from keepcover.bounds import hull_levels, majorant, majorant_cost
from keepcover.methods.base import Asked
from keepcover.methods.holdout import Holdout, between, crossing


def candidates(asked: Asked) -> tuple[ndarray, ndarray]:
    """Pairs (c, kappa) worth trying: all of them for few draws, else those where kappa meets the attacked median."""
    cal, test = asked.per_point, asked.draws
    some_c = np.arange(cal) if cal <= 32 else np.unique(np.geomspace(1, 0.75 * cal, 28).round().astype(int) - 1)
    if test <= 32:
        c, kappa = np.meshgrid(some_c, np.arange(test), indexing="ij")
        return c.ravel(), kappa.ravel()
    attacked = asked.threat.up((some_c + 0.5) / cal)
    spread = np.sqrt(attacked * (1 - attacked) * test) + 1
    kappa = (test * attacked)[:, None] + spread[:, None] * np.linspace(-1.0, 2.5, 11)
    pairs = {(int(c), int(k)) for c, row in zip(some_c, kappa, strict=True) for k in row.round() if 0 <= k < test}
    c_all, kappa_all = np.array(sorted(pairs)).T
    return c_all, kappa_all


def _hull_sizes(asked: Asked, holdout: Holdout, gamma: float) -> tuple[ndarray, ndarray, ndarray, ndarray]:
    """Estimated set size of every candidate rule, with c, kappa and the index of its threshold."""
    c, kappa = candidates(asked)
    level = hull_levels(asked.counts, c, kappa, float(asked.level), gamma)
    law = holdout.count_law(asked.per_point)
    missed = law[:, ::-1].cumsum(axis=1)[:, ::-1]  # [t, j]: share of points with at least j draws above t
    n, promise = asked.cell_points, asked.promise
    share = np.array([promise.share(n, float(a)) for a in level]) if promise.clauses else level
    at = crossing(missed[:, c + 1] - share)
    by_kappa = {int(k): holdout.size(asked.draws, int(k), gamma) for k in np.unique(kappa)}
    size = np.array([between(by_kappa[int(k)], i) for k, i in zip(kappa, at, strict=True)])
    # Too few calibration points for that level: the threshold would be infinite.
    hopeless = level < promise.least_level(n)
    size[hopeless] = np.array([by_kappa[int(k)][-1] for k in kappa[hopeless]])
    return size, c, kappa, at


def best_hull_rule(asked: Asked, holdout: Holdout, gamma: float = 0.0) -> tuple[float, int, int, float]:
    """The (c, kappa) with the smallest estimated set size: (size, c, kappa, gamma)."""
    size, c, kappa, _ = _hull_sizes(asked, holdout, gamma)
    best = int(size.argmin())
    return float(size[best]), int(c[best]), int(kappa[best]), gamma


def _likely_kappas(asked: Asked, holdout: Holdout, gamma: float, most: int = 7) -> list[tuple[int, int]]:
    """The kappas under which the hull already does best, each with its threshold's index: where the majorant looks."""
    size, _, kappa, at = _hull_sizes(asked, holdout, gamma)
    found: dict[int, int] = {}
    for i in size.argsort(kind="stable"):
        found.setdefault(int(kappa[i]), math.ceil(at[i]))  # the best of each kappa wins
    return list(found.items())[:most]


def best_majorant_rule(
    asked: Asked, holdout: Holdout, gammas: tuple[float, ...]
) -> tuple[int, float, tuple[float, ...]]:
    """kappa, gamma and g with the smallest estimated set size."""
    law, counts = holdout.count_law(asked.per_point), asked.counts
    found = []
    for gamma in gammas:
        for kappa, start in _likely_kappas(asked, holdout, gamma):
            at = _smallest_threshold(asked, law, kappa, gamma, start)
            found.append((float(between(holdout.size(asked.draws, kappa, gamma), at)), kappa, gamma, at))
    _, kappa, gamma, at = min(found)
    g, _ = majorant(between(law, at), counts, kappa, gamma, _price(asked))
    return kappa, gamma, tuple(float(value) for value in g)


def _smallest_threshold(asked: Asked, law: ndarray, kappa: int, gamma: float, start: int) -> float:
    """Where the smallest threshold lies whose majorant fits into alpha on the holdout: gallop from ``start``, then bisect.

    Whether one fits is not monotone where the budget depends on the top of g, so the path is part of the choice.
    """
    level, n, price, last = asked.level, asked.cell_points, _price(asked), len(law) - 1

    @cache
    def excess(at: int) -> float:
        mean, top = majorant_cost(law[at], asked.counts, kappa, gamma, price)
        return n * mean - float(asked.promise.budget(n, level, top)) if at < last else 0.0

    low, high, step = 0, start, 4
    while excess(high) > 0:
        low, high, step = high + 1, min(high + step, last), 2 * step
    step = 4
    while low < high:
        middle = max(low, high - step) if step else (low + high) // 2
        if excess(middle) <= 0:
            high, step = middle, 2 * step
        else:
            low, step = middle + 1, 0
    return high - 1 + float(crossing(np.array([excess(high - 1), excess(high), 0.0]))) if 0 < high < last else high


def _price(asked: Asked) -> float:
    """What clauses charge for the top of g, per point and unit, beyond what the marginal promise does."""
    n, level = asked.cell_points, asked.level
    low, high = (asked.promise.budget(n, level, top) for top in (1.0, 1.25))
    return max(0.0, (low - high) / 0.25 - 1.0) / n if asked.promise.clauses else 0.0
