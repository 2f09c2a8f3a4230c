"""The premises of RSCP+, BinCP and CAS: their union bounds are so loose that a broken premise hardly shows in the miss rate,
so each premise is a law of its own, which rules keep and mutants break.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy import stats

from keepcover.bounds import hoeffding
from keepcover.methods import CAS, BinCP, BinCPSharp, Rule
from keepcover.scores import Draws
from tests.methods.worst import BOUNDED, SIGMA, Map, asked_for, thresholds


def clean_exceedances(rule: Any, repetitions: int, seed: int = 0) -> int:
    """How often the smoothed score of a fresh clean point exceeds tau: at most alpha - 2 beta of the time.

    With r = 0 the threshold is tau + b_H. The scores are made small, so that it is not clipped at 1.
    """
    generator = torch.Generator().manual_seed(seed)
    n, draws = rule.asked.n, rule.calibration_draws
    values = 0.1 * torch.rand(repetitions, n + 1, draws, generator=generator, dtype=torch.float64)
    means = rule.statistic(Draws(values.flatten(0, 1))).unflatten(0, (repetitions, n + 1))
    tau = thresholds(rule, means[:, :n]) - hoeffding(draws, rule.method.beta)
    return int((means[:, n] > tau + 1e-12).sum())


def overestimates(rule: Rule, repetitions: int, seed: int = 0) -> int:
    """How often the test statistic, a lower confidence bound, exceeds the smoothed score of the hard half of the points.

    Hard points are coins with mean 1/2; the easy points between them never vary.
    """
    generator = torch.Generator().manual_seed(seed)
    coins = torch.randint(2, (2 * repetitions, 1, rule.test_draws), generator=generator).double()
    coins[1::2] = 0.0
    return int((rule.test_statistic(Draws(coins))[::2] > 0.5).sum())


def with_level(rule: type[Rule] | None, method: BinCP | CAS, level: float, draws: int = 64) -> Any:
    """A rule (a mutant, or the method's own) whose Monte Carlo bounds fail so often that it can be seen."""
    eta = level if isinstance(method, BinCPSharp) else 9 * level
    options = {**method.options(), "eta": eta, **({"transform": None} if isinstance(method, CAS) else {})}
    method, asked = type(method)(**options), asked_for(7, draws)
    return method.rule(asked) if rule is None else rule(method, asked)


def overestimated_shares(rule: Any, repetitions: int, increasing: Map = lambda u: u, seed: int = 0) -> int:
    """How often less than p_L of a point's scores are at most its t: at most level / 2 of the time.

    Scores are an increasing map of uniform numbers, so that the probability of a score at most t is t, mapped back.
    """
    generator = torch.Generator().manual_seed(seed)
    u = torch.rand(repetitions, rule.calibration_draws, generator=generator, dtype=torch.float64)
    t = rule.statistic(Draws(increasing(u)))
    return int((t < increasing(torch.tensor(rule.lower(rule.c), dtype=torch.float64))).sum())


def overestimated_attacks(rule: Any, shape: str, repetitions: int, seed: int = 0) -> int:
    """How often the bound of a point's attacked mean exceeds the mean under the worst attack: at most ``level``."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(repetitions, rule.calibration_draws, generator=generator, dtype=torch.float64)
    found = -rule.statistic(Draws(BOUNDED[shape](SIGMA * noise).double()))
    r = rule.asked.threat.epsilon / SIGMA
    return int((found > stats.norm.cdf(-r / (np.sqrt(2) if shape == "smooth" else 1))).sum())


def underestimated_means(rule: Rule, repetitions: int, seed: int = 0) -> int:
    """How often the upper bound of a query's mean is below the mean, for coins: at most twice ``level``."""
    generator = torch.Generator().manual_seed(seed)
    coins = torch.randint(2, (repetitions, 1, rule.test_draws), generator=generator).double()
    return int((-rule.test_statistic(Draws(coins)) < 0.5).sum())
