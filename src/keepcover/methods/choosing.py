"""Choosing (c, kappa), g and a threshold on the holdout: approximate where it only chooses, exact where it certifies."""

from __future__ import annotations

import math

import numpy as np
from numpy import ndarray

from keepcover.bounds import hull_levels, majorant, majorant_cost
from keepcover.methods.base import Asked
from keepcover.methods.holdout import Holdout, between


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
    at = holdout.crossing(missed[:, c + 1] - share)
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
    law, counts, price = holdout.count_law(asked.per_point), asked.counts, _price(asked, len(holdout))
    found = []
    for gamma in gammas:
        for kappa, start in _likely_kappas(asked, holdout, gamma):
            at = holdout.crossing(_excess(asked, law, kappa, gamma, start, price))
            found.append((float(between(holdout.size(asked.draws, kappa, gamma), at)), kappa, gamma, at))
    _, kappa, gamma, at = min(found)
    g, _ = majorant(law[math.ceil(at)], counts, kappa, gamma, price)
    return kappa, gamma, tuple(float(value) for value in g)


def _excess(asked: Asked, law: ndarray, kappa: int, gamma: float, start: int, price: float) -> ndarray:
    """By how much majorants are over alpha on the holdout, at the smallest threshold that fits and ahead of it: gallop from ``start``,
    then bisect. Whether one fits is not monotone where the budget depends on the top of g, so the path is part of the choice.
    """
    level, n, last = asked.level, asked.cell_points, len(law) - 1
    found = np.full(len(law), np.nan)
    found[last] = 0.0

    def over(at: int) -> float:
        if np.isnan(found[at]):
            mean, top = majorant_cost(law[at], asked.counts, kappa, gamma, price)
            found[at] = n * mean - float(asked.promise.budget(n, level, top))
        return float(found[at])

    low, high, step = 0, start, 4
    while over(high) > 0:
        low, high, step = high + 1, min(high + step, last), 2 * step
    step = 4
    while low < high:
        middle = max(low, high - step) if step else (low + high) // 2
        if over(middle) <= 0:
            high, step = middle, 2 * step
        else:
            low, step = middle + 1, 0
    if high:
        found[high - 1], found[: high - 1] = max(over(high - 1), 0.0), np.inf
    return found


def _price(asked: Asked, held: int) -> float:
    """What the top of g costs, per calibration point and unit: the budget that it takes, and what the holdout does not show.

    A new point has more draws above t than all that are held out with probability 1 / (held + 1). Without a price few points choose a
    g that is 0 on them and explodes behind them: sets of 2.32 ± 0.76 labels in place of those of ``results/few-points-180.json``.
    """
    n, level = asked.cell_points, asked.level
    low, high = (asked.promise.budget(n, level, top) for top in (1.0, 1.25))
    return max(0.0, float(low - high) / 0.25) / n + 1 / (held + 1)
