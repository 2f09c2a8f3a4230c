"""The promise itself: attacked coverage where the attack is the worst there can be (``worst.py``).

Every certified method must keep its miss rate at or below alpha for every law of x. Repetitions draw fresh calibration points,
fresh noise and one fresh test point, so that misses are independent and the test is exactly binomial. Each check has a
false-alarm rate of ``LEVEL``, all of them together less than 1e-5; seeds are fixed. ``violated`` and the checks around it are
what the mutants in ``test_mutants.py`` must not get past.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from keepcover.methods import CAS, BinCP, BinCPSharp, Exact, RSCPPlus, SplitCP, get_method
from keepcover.promises import Promise
from keepcover.scores import PTT, Draws
from tests.bounds.brute import crossing, curve
from tests.methods.premises import (
    clean_exceedances,
    overestimated_attacks,
    overestimated_shares,
    overestimates,
    underestimated_means,
    with_level,
)
from tests.methods.worst import (
    BOUNDED,
    LAWS,
    SIGMA,
    asked_for,
    attacked_misses,
    calibrated,
    fit,
    plainly,
    rounded,
    thresholds,
    two_points,
    violated,
)

COUNT_RULES: dict[str, tuple[Any, Any]] = {
    "exact": ("exact", asked_for(120, 16)),
    "exact-randomised": (Exact(randomize=True), asked_for(120, 4)),
    "exact-strong-attack": ("exact", asked_for(200, 8, r=1.0, alpha=0.2)),
    "exact_asymmetric-1": ("exact_asymmetric", asked_for(120, 1, calibration_draws=16)),
    "exact_asymmetric-2-randomised": (
        get_method("exact_asymmetric", randomize=True),
        asked_for(120, 2, calibration_draws=16),
    ),
    "auto": ("auto", asked_for(120, 4, calibration_draws=16)),
    "rcp1": ("rcp1", asked_for(120, 1)),
    "bincp": ("bincp", asked_for(60, 64)),
    "bincp-asymmetric": ("bincp", asked_for(60, 32, calibration_draws=100)),
    "bincp_sharp": ("bincp_sharp", asked_for(60, 32)),
    "bincp_sharp-strong-attack": ("bincp_sharp", asked_for(60, 64, r=1.0, alpha=0.2)),
    "bincp_threshold": ("bincp_threshold", asked_for(60, 64)),
}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("case", COUNT_RULES)
def test_count_rules_keep_their_promise(case: str, law: str) -> None:
    method, asked = COUNT_RULES[case]
    increasing = rounded(law, lambda s: s)
    rule = fit(method, asked, LAWS[law], increasing)
    misses = attacked_misses(rule, LAWS[law], increasing, asked.threat.epsilon, 1500)
    assert not violated(misses, 1500, asked.alpha), f"{misses} of 1500 missed at alpha {asked.alpha}"


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("shape", ["smooth", "step", "ptt"])
@pytest.mark.parametrize("name", ["rscp_plus_hoeffding", "rscp_plus_bernstein", "cas", "cas_test_time"])
def test_mean_rules_keep_their_promise(name: str, shape: str, law: str) -> None:
    asked = asked_for(60, 64)
    increasing = rounded(law, BOUNDED.get(shape, BOUNDED["smooth"]))
    options = {"beta": 0.02} if name.startswith("rscp_plus") else {}
    rule = fit(get_method(name, transform=PTT() if shape == "ptt" else None, **options), asked, LAWS[law], increasing)
    misses = attacked_misses(rule, LAWS[law], increasing, asked.threat.epsilon, 600)
    assert not violated(misses, 600, asked.alpha), f"{misses} of 600 missed at alpha {asked.alpha}"


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
    rule = Exact().rule(asked_for(n, n_test, r, alpha, n_cal), kappa=kappa, c=c)
    generator, rates = torch.Generator().manual_seed(0), []
    for _ in range(repetitions):
        points = two_points(float(x[0]), float(x[1]), share)((n, 1), generator).double()
        noise = SIGMA * torch.randn(n, n_cal, generator=generator, dtype=torch.float64)
        t = calibrated(rule, Draws(points + noise))
        missed = rule.counts.missed(kappa, stats.norm.cdf((x - t) / SIGMA))
        rates.append((1 - share) * missed[0] + share * missed[1])
    mean, error = np.mean(rates), np.std(rates, ddof=1) / np.sqrt(repetitions)
    assert mean - 5 * error >= 0.85 * alpha
    assert mean - 5.3 * error <= alpha


# -- what calibration luck does ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "alpha"), [(25, 0.1), (9, 0.1), (40, 0.37)])
def test_covered_counts_are_beta_binomial(n: int, alpha: float) -> None:
    """Of m fresh points: BetaBinomial(m, k, n + 1 - k), k the rank.

    Massart's inequality bounds the distance to the empirical cdf for any law and sample size: false-alarm rate 1e-6.
    The binomial law that ignores the calibration draw is rejected by the same test.
    """
    m, repetitions = 40, 3000
    rule = SplitCP().rule(asked_for(n, 1, alpha=alpha))
    scores = torch.randn(repetitions, n + m, 1, generator=torch.Generator().manual_seed(n), dtype=torch.float64).exp()
    statistic, query = rule.statistic(Draws(scores[:, :n])), rule.test_statistic(Draws(scores[:, n:]))
    counts = (query <= thresholds(rule, statistic)[:, None]).sum(dim=1).numpy()
    at = np.arange(m + 1)
    empirical = (counts[:, None] <= at).mean(axis=0)
    k = math.ceil((n + 1) * (1 - Fraction(str(alpha))))
    radius = math.sqrt(math.log(2 / 1e-6) / (2 * repetitions))
    assert np.abs(empirical - stats.betabinom(m, k, n + 1 - k).cdf(at)).max() <= radius
    assert np.abs(empirical - stats.binom(m, k / (n + 1)).cdf(at)).max() > radius


@pytest.mark.parametrize("name", ["exact", "exact_asymmetric", "rcp1"])
def test_a_clause_of_the_promise_reaches_the_threshold(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With confidence 99 % over calibration: the true attacked miss rate, given the threshold, exceeds alpha in at most 1 %
    of calibrations (exact binomial test at 1e-6), and more often under the marginal promise."""
    over = {}
    for promise in (Promise(), Promise(delta=0.01)):
        rule = fit(name, asked_for(300, 4, calibration_draws=8, promise=promise), LAWS["point"], lambda s: s)
        assert rule.counting is not None
        kappa, gamma = rule.counting
        noise = torch.randn(400, 300, rule.calibration_draws, generator=torch.Generator().manual_seed(1))
        statistic = rule.statistic(Draws(SIGMA * noise.flatten(0, 1))).unflatten(0, (400, 300))
        missed = rule.counts.missed(kappa, stats.norm.sf(thresholds(rule, statistic).numpy() / SIGMA), gamma)
        over[promise] = int((missed > 0.1).sum())
    assert not violated(over[Promise(delta=0.01)], 400, 0.01, 1e-6)
    assert violated(over[Promise()], 400, 0.01, 1e-6)


# -- the premises of RSCP+, BinCP and CAS --------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", ["hoeffding", "bernstein"])
def test_rscp_plus_sets_two_beta_aside(bound: str) -> None:
    rule = RSCPPlus(bound, beta=0.04, transform=None).fit(asked_for(99, 4, r=0.0))
    assert not violated(clean_exceedances(rule, 1500), 1500, 0.1 - 2 * 0.04)


@pytest.mark.parametrize("bound", ["hoeffding", "bernstein"])
def test_rscp_plus_test_statistics_are_lower_confidence_bounds(bound: str) -> None:
    rule = RSCPPlus(bound, beta=0.04, transform=None).fit(asked_for(99, 1024))
    assert not violated(overestimates(rule, 2000), 2000, 0.04)


@pytest.mark.parametrize("p", [0.2, 0.8])
@pytest.mark.parametrize("method", [BinCP, BinCPSharp])
def test_bincp_bounds_the_share_below_a_points_own_quantile(method: type[BinCP], p: float) -> None:
    """t is read off the draws that p_L speaks of, and p_L still fails with probability level / 2 at most."""
    rule = with_level(None, method(p=p), 0.1)
    assert rule.method.level(rule.asked) == pytest.approx(0.1)
    assert not violated(overestimated_shares(rule, 20_000), 20_000, 0.05)
    assert not violated(overestimated_shares(rule, 20_000, lambda u: (8 * u).ceil()), 20_000, 0.05)


@pytest.mark.parametrize("shape", ["smooth", "step"])
def test_cas_bounds_attacked_means(shape: str) -> None:
    rule = with_level(None, CAS(), 0.05)
    assert not violated(overestimated_attacks(rule, shape, 5000), 5000, 0.05)
    assert not violated(underestimated_means(rule, 5000), 5000, 0.1)
    assert plainly("cas").transform is None
