"""How long certificates take to compute: the hull's level and the majorant, once per predictor, never per query."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
from scipy.stats import binom

from benchmarks.material import ALPHA
from benchmarks.timing import Options, alone, grown, seconds
from keepcover.bounds import Counts, hull_level, majorant
from keepcover.noise import Gaussian, Threat

# Both remember what they have computed, so every run asks for a slightly different attack.
_ATTACKS = itertools.count()


def _counts(draws: int) -> Counts:
    return Counts(Threat(Gaussian(1.0), 0.5 + 1e-7 * next(_ATTACKS)), draws, draws)


def one_level(draws: int) -> float:
    """alpha' of the rule that lets a quarter of the draws exceed."""
    return hull_level(_counts(draws), draws // 4, draws // 4, ALPHA)


def one_majorant(draws: int) -> float:
    """The cheapest majorant for a holdout most of whose points never exceed."""
    shares = binom.pmf(np.arange(draws + 1), draws, 0.05)
    return majorant(0.9 * shares + 0.1 / (draws + 1), _counts(draws), draws // 4)[1]


def measure(options: Options) -> dict[str, Any]:
    every = options.pick((1, 4, 16), (1, 2, 4, 8, 16, 32, 64, 128, 256))
    rows = []
    for name, work in (("hull level", one_level), ("majorant", one_majorant)):
        work(2)
        points = {n: [seconds(partial(work, n)) for _ in range(options.pick(1, 3))] for n in every}
        rows += [
            alone(f"{name}, N = {n}", points[n], {"draws": n}) for n in every if options.quick or n in (1, 16, 64, 256)
        ]
        rows.append(grown(f"{name}, growth with draws", "draws", points, {}))
    return {"rows": rows}
