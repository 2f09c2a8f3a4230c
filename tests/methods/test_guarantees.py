"""The promise itself: attacked coverage where the attack is the worst there can be.

One dimension, score of the true label increasing in x + sigma * noise, attack x + epsilon. Exceeding a threshold is then
a half-space event, so the attacked exceedance probability is exactly shift(q, epsilon / sigma): no classifier can do
worse. Every certified method must keep its miss rate at or below alpha for every law of x.

Repetitions draw fresh calibration points, fresh noise and one fresh test point, so that misses are independent and the
test is exactly binomial. Each check has a false-alarm rate of ``LEVEL``, all of them together less than 1e-5; seeds are
fixed. ``violated`` and the checks around it are what the mutants in ``test_mutants.py`` must not get past.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from keepcover.bounds.bounds import hoeffding, miss_rate
from keepcover.methods import CAS, BinCP, BinCPSharp, Exact, Method, Setting, get_method
from keepcover.methods.bincp import Bounded
from keepcover.methods.holdout import Holdout
from keepcover.scores.draws import Draws
from keepcover.scores.transforms import PTT

from .test_bounds import crossing, curve

LEVEL = 5e-8
SIGMA = 0.25

Law = Callable[[tuple[int, ...], torch.Generator], Tensor]
Map = Callable[[Tensor], Tensor]


def two_points(low: float, high: float, weight: float) -> Law:
    """``high`` with probability ``weight``, else ``low``."""
    return lambda shape, generator: torch.where(torch.rand(shape, generator=generator) < weight, high, low)


LAWS: dict[str, Law] = {
    "point": lambda shape, generator: torch.zeros(shape),
    "narrow": lambda shape, generator: 0.05 * torch.randn(shape, generator=generator),
    "wide": lambda shape, generator: torch.randn(shape, generator=generator),
    "mixture": two_points(-0.4, 0.1, 0.12),
    "steps": lambda shape, generator: torch.randint(-4, 3, shape, generator=generator) / 4,
}
"""Laws of x. Scores of "steps" are rounded as well, so that they are full of ties."""

BOUNDED: dict[str, Map] = {"smooth": lambda s: torch.special.ndtr(s / SIGMA), "step": lambda s: (s > 0).float()}
"""Increasing maps into [0, 1]; under "step" the smoothed score is q itself."""


def rounded(law: str, increasing: Map) -> Map:
    return (lambda s: increasing((4 * s).floor() / 4)) if law == "steps" else increasing


def fit(name: str, setting: Setting, law: Law, increasing: Map, seed: int = 0, **options: bool) -> Method:
    """Fit on 100 holdout points; the second label is what the sets would like to leave out."""
    generator = torch.Generator().manual_seed(1000 + seed)
    draws = max(setting.draws, setting.cal_draws)
    x = torch.stack([law((100,), generator), law((100,), generator) + 1], dim=1)
    scores = increasing(x[..., None] + SIGMA * torch.randn(100, 2, draws, generator=generator))
    return get_method(name).fit(setting, Holdout(Draws(scores), torch.zeros(100, dtype=torch.int64)), **options)


def ptt_map(law: Law, increasing: Map, alpha: float, seed: int = 0) -> Map:
    """PTT fitted on one noisy draw of each of 100 holdout points."""
    generator = torch.Generator().manual_seed(2000 + seed)
    holdout = increasing(law((100,), generator) + SIGMA * torch.randn(100, generator=generator))
    return PTT.fit(holdout, alpha)


def attacked_misses(
    rule: Method, law: Law, increasing: Map, epsilon: float, repetitions: int, seed: int = 0, shared_noise: bool = False
) -> int:
    """In how many independent repetitions the attacked test point's label was left out."""
    generator = torch.Generator().manual_seed(seed)
    n, cal, test = rule.setting.n, rule.calibration_draws, rule.test_draws
    misses, at_once = 0, max(1, 4_000_000 // (n * cal))
    for start in range(0, repetitions, at_once):
        some = min(at_once, repetitions - start)
        x, attacked = law((some, n, 1), generator), law((some, 1, 1), generator) + epsilon
        cal_noise = torch.randn(some, 1 if shared_noise else n, cal, generator=generator)
        test_noise = cal_noise[:, :1, :test] if shared_noise else torch.randn(some, 1, test, generator=generator)
        true = Draws(increasing(x + SIGMA * cal_noise).flatten(0, 1))
        statistic = rule.calibration_statistic(true)
        statistic = statistic.reshape(some, n, *statistic.shape[1:])
        v = torch.rand(some, generator=generator)
        query = rule.test_statistic(Draws(increasing(attacked + SIGMA * test_noise)), v)[:, 0]
        misses += sum(not own <= rule.threshold(points) for own, points in zip(query.tolist(), statistic))
    return misses


def violated(misses: int, repetitions: int, rate: float, level: float = LEVEL) -> bool:
    """Exact one-sided binomial test: so many misses have probability below ``level`` if their rate is at most ``rate``."""
    return bool(stats.binom.sf(misses - 1, repetitions, rate) < level)


def setting_for(n: int, draws: int, r: float = 0.5, alpha: float = 0.1, **options: float) -> Setting:
    return Setting(alpha=alpha, epsilon=r * SIGMA, sigma=SIGMA, draws=draws, n=n, classes=2, **options)


COUNT_RULES: dict[str, tuple[str, Setting, dict[str, bool]]] = {
    "exact": ("exact", setting_for(120, 16), {}),
    "exact-randomised": ("exact", setting_for(120, 4), {"randomize": True}),
    "exact-strong-attack": ("exact", setting_for(200, 8, r=1.0, alpha=0.2), {}),
    "exact_asymmetric-1": ("exact_asymmetric", setting_for(120, 1, calibration_draws=16), {}),
    "exact_asymmetric-2-randomised": (
        "exact_asymmetric",
        setting_for(120, 2, calibration_draws=16),
        {"randomize": True},
    ),
    "rcp1": ("rcp1", setting_for(120, 1), {}),
    "bincp": ("bincp", setting_for(60, 64), {}),
    "bincp-asymmetric": ("bincp", setting_for(60, 32, calibration_draws=100), {}),
    "bincp_sharp": ("bincp_sharp", setting_for(60, 32), {}),
    "bincp_sharp-strong-attack": ("bincp_sharp", setting_for(60, 64, r=1.0, alpha=0.2), {}),
    "bincp_threshold": ("bincp_threshold", setting_for(60, 64), {}),
}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("case", COUNT_RULES)
def test_count_rules_keep_their_promise(case: str, law: str) -> None:
    name, setting, options = COUNT_RULES[case]
    increasing = rounded(law, lambda s: s)
    rule = fit(name, setting, LAWS[law], increasing, **options)
    misses = attacked_misses(rule, LAWS[law], increasing, setting.epsilon, 1500)
    assert not violated(misses, 1500, setting.alpha), f"{misses} of 1500 missed at alpha {setting.alpha}"


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("shape", ["smooth", "step", "ptt"])
@pytest.mark.parametrize("name", ["rscp_plus_hoeffding", "rscp_plus_bernstein", "cas", "cas_test_time"])
def test_mean_rules_keep_their_promise(name: str, shape: str, law: str) -> None:
    setting = setting_for(60, 64, beta=0.02)
    increasing = rounded(law, BOUNDED.get(shape, BOUNDED["smooth"]))
    if shape == "ptt":
        plain = increasing
        ptt = ptt_map(LAWS[law], plain, setting.alpha)
        increasing = lambda s: ptt(plain(s))  # noqa: E731
    rule = fit(name, setting, LAWS[law], increasing)
    misses = attacked_misses(rule, LAWS[law], increasing, setting.epsilon, 600)
    assert not violated(misses, 600, setting.alpha), f"{misses} of 600 missed at alpha {setting.alpha}"


@pytest.mark.parametrize(
    ("counts", "r"),
    [
        ((1, 0, 1, 0), 0.5),
        ((4, 1, 4, 1), 0.5),
        ((16, 4, 16, 6), 0.5),
        ((16, 3, 2, 1), 0.5),
        ((1, 0, 1, 0), 1.0),
        ((4, 1, 4, 2), 1.0),
        ((8, 2, 8, 4), 1.0),
    ],
    ids=str,
)
def test_exact_pays_nothing_for_the_worst_mixture(counts: tuple[int, int, int, int], r: float) -> None:
    """The two q's at the ends of the hull's bridge, mixed so that P[count > c] = alpha', attain alpha.

    The attacked miss rate given the threshold is known exactly in this model, so that calibration is the only source of
    randomness: the mean over repetitions, less five standard errors, must exceed 0.85 alpha, and must respect alpha.
    """
    alpha, repetitions = 0.1, 80
    n_cal, c, n_test, kappa = counts
    q, f, h = curve(*counts, r)
    level, i, j = crossing(f, h, alpha)
    n = max(int(60 / level), 8000)  # so many that the rank is hardly rounded and t hardly moves
    share = (level - f[i]) / (f[j] - f[i])
    x = np.clip(SIGMA * stats.norm.ppf(q[[i, j]]), -5, 5)
    rule = Exact(setting_for(n, n_test, r, alpha, calibration_draws=n_cal), kappa=kappa, c=c)
    generator, rates = torch.Generator().manual_seed(0), []
    for _ in range(repetitions):
        points = two_points(float(x[0]), float(x[1]), share)((n, 1), generator).double()
        noise = SIGMA * torch.randn(n, n_cal, generator=generator, dtype=torch.float64)
        t = rule.threshold(rule.calibration_statistic(Draws(points + noise)))
        missed = miss_rate((x - t) / SIGMA, n_test, kappa, r)
        rates.append((1 - share) * missed[0] + share * missed[1])
    mean, error = np.mean(rates), np.std(rates, ddof=1) / np.sqrt(repetitions)
    assert mean - 5 * error >= 0.85 * alpha
    assert mean - 5.3 * error <= alpha


# -- the premises of RSCP+, BinCP and CAS ------------------------------------------------------------------------------
# Their union bounds are so loose that a broken premise hardly shows in the miss rate; the premises are laws of their own.


def clean_exceedances(rule: Method, repetitions: int, seed: int = 0) -> int:
    """How often the smoothed score of a fresh clean point exceeds tau: at most alpha - 2 beta of the time.

    With r = 0 the threshold is tau + b_H. The scores are made small, so that it is not clipped at 1.
    """
    generator = torch.Generator().manual_seed(seed)
    n, draws = rule.setting.n, rule.calibration_draws
    values = 0.1 * torch.rand(repetitions, n + 1, draws, generator=generator, dtype=torch.float64)
    radius, exceedances = hoeffding(draws, rule.setting.beta), 0
    for points in values:
        tau = rule.threshold(rule.calibration_statistic(Draws(points[:n]))) - radius
        exceedances += bool(points[n].mean() > tau + 1e-12)
    return exceedances


def overestimates(rule: Method, repetitions: int, seed: int = 0) -> int:
    """How often the test statistic, a lower confidence bound, exceeds the smoothed score of the hard half of the points.

    Hard points are coins with mean 1/2; the easy points between them never vary.
    """
    generator = torch.Generator().manual_seed(seed)
    coins = torch.randint(2, (2 * repetitions, 1, rule.test_draws), generator=generator).double()
    coins[1::2] = 0.0
    return int((rule.test_statistic(Draws(coins))[::2] > 0.5).sum())


@pytest.mark.parametrize("name", ["rscp_plus_hoeffding", "rscp_plus_bernstein"])
def test_rscp_plus_sets_two_beta_aside(name: str) -> None:
    rule = get_method(name).fit(setting_for(99, 4, r=0.0, beta=0.04))
    assert not violated(clean_exceedances(rule, 1500), 1500, 0.1 - 2 * 0.04)


@pytest.mark.parametrize("name", ["rscp_plus_hoeffding", "rscp_plus_bernstein"])
def test_rscp_plus_test_statistics_are_lower_confidence_bounds(name: str) -> None:
    rule = get_method(name).fit(setting_for(99, 1024, beta=0.04))
    assert not violated(overestimates(rule, 2000), 2000, 0.04)


Rule = TypeVar("Rule", bound=Bounded)


def with_level(method: type[Rule], level: float, draws: int = 64) -> Rule:
    """A rule whose Monte Carlo bounds fail so often that it can be seen."""
    return method(setting_for(7, draws), eta=level if issubclass(method, BinCPSharp) else 9 * level)


def overestimated_shares(rule: BinCP, repetitions: int, increasing: Map = lambda u: u, seed: int = 0) -> int:
    """How often less than p_L of a point's scores are at most its t: at most level / 2 of the time.

    Scores are an increasing map of uniform numbers, so that the probability of a score at most t is t, mapped back.
    """
    generator = torch.Generator().manual_seed(seed)
    u = torch.rand(repetitions, rule.calibration_draws, generator=generator, dtype=torch.float64)
    t = rule.calibration_statistic(Draws(increasing(u)))
    return int((t < increasing(torch.tensor(rule.lower(rule.c), dtype=torch.float64))).sum())


def overestimated_attacks(rule: CAS, shape: str, repetitions: int, seed: int = 0) -> int:
    """How often the bound of a point's attacked mean exceeds the mean under the worst attack: at most ``level``."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(repetitions, rule.calibration_draws, generator=generator, dtype=torch.float64)
    found = -rule.calibration_statistic(Draws(BOUNDED[shape](SIGMA * noise).double()))
    attacked = stats.norm.cdf(-rule.setting.r / (np.sqrt(2) if shape == "smooth" else 1))
    return int((found > attacked).sum())


def underestimated_means(rule: CAS, repetitions: int, seed: int = 0) -> int:
    """How often the upper bound of a query's mean is below the mean, for coins: at most twice ``level``."""
    generator = torch.Generator().manual_seed(seed)
    coins = torch.randint(2, (repetitions, 1, rule.test_draws), generator=generator).double()
    return int((-rule.test_statistic(Draws(coins)) < 0.5).sum())


@pytest.mark.parametrize("p", [0.2, 0.8])
@pytest.mark.parametrize("method", [BinCP, BinCPSharp])
def test_bincp_bounds_the_share_below_a_points_own_quantile(method: type[BinCP], p: float) -> None:
    """t is read off the draws that p_L speaks of, and p_L still fails with probability level / 2 at most."""
    rule = replace(with_level(method, 0.1), p=p)
    assert rule.level == pytest.approx(0.1)
    assert not violated(overestimated_shares(rule, 20_000), 20_000, 0.05)
    assert not violated(overestimated_shares(rule, 20_000, lambda u: (8 * u).ceil()), 20_000, 0.05)


@pytest.mark.parametrize("shape", ["smooth", "step"])
def test_cas_bounds_attacked_means(shape: str) -> None:
    rule = with_level(CAS, 0.05)
    assert not violated(overestimated_attacks(rule, shape, 5000), 5000, 0.05)
    assert not violated(underestimated_means(rule, 5000), 5000, 0.1)
