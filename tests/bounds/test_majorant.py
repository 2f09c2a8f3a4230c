"""The majorant certificate: valid for every q by exact binomial sums, no dearer than the hull, and mutants are told."""

from __future__ import annotations

import numpy as np
import pytest
from numpy import ndarray
from scipy import stats
from scipy.optimize import linprog

from keepcover.bounds import Counts, is_majorant, majorant, majorant_cost, majorant_gap
from keepcover.bounds.majorant import INCREMENT_COST, breakpoints
from keepcover.noise import Ablation, Gaussian, Threat
from tests.bounds.brute import bimodal_weights, counts_of, curve

CASES = [
    (1, 1, 0, 0.5, 0.0),
    (4, 1, 0, 0.5, 0.0),
    (16, 1, 0, 0.5, 0.0),
    (16, 4, 1, 0.5, 0.5),
    (64, 2, 0, 1.0, 0.0),
    (64, 16, 6, 0.5, 0.0),
]
cases = pytest.mark.parametrize(("n_cal", "draws", "kappa", "r", "gamma"), CASES)


def expectation(g: ndarray, q: ndarray) -> ndarray:
    """E g(Bin(N_cal, q)) as the sum that it is."""
    return stats.binom.pmf(np.arange(len(g)), len(g) - 1, q[:, None]) @ g


@cases
def test_majorant_is_valid_everywhere(n_cal: int, draws: int, kappa: int, r: float, gamma: float) -> None:
    """E g(Bin(N_cal, q)) >= h(q) on a dense grid of q, by exact binomial sums; g never falls; the price is as told."""
    weights, counts = bimodal_weights(n_cal), counts_of(n_cal, draws, r)
    g, cost = majorant(weights, counts, kappa, gamma)
    assert (np.diff(g) >= 0).all()
    assert g[0] >= 0
    assert cost == pytest.approx(float(weights @ g), rel=1e-12)
    q, _, h = curve(n_cal, 0, draws, kappa, r, gamma, points=5001)
    assert (h - expectation(g, q)).max() <= 0
    assert majorant_gap(g, counts, kappa, gamma) <= 0
    assert majorant_gap(g * 0.95, counts, kappa, gamma) > 0  # and not by a wide margin


@cases
def test_is_majorant_tells_honest_g_from_scaled_ones(
    n_cal: int, draws: int, kappa: int, r: float, gamma: float
) -> None:
    """The program's cells leave a little above h; without it, g touches h, and a thousandth less must not pass."""
    counts = counts_of(n_cal, draws, r)
    g, _ = majorant(bimodal_weights(n_cal), counts, kappa, gamma)
    assert is_majorant(g, counts, kappa, gamma)
    assert is_majorant(g + 0.01, counts, kappa, gamma)
    q, _, h = curve(n_cal, 0, draws, kappa, r, gamma, points=5001)
    slack = float((expectation(g, q) - h).min())
    assert 0 <= slack <= 2e-4
    assert not is_majorant(0.999 * (g - slack), counts, kappa, gamma)
    assert not is_majorant(0.999 * g - slack, counts, kappa, gamma)
    assert not is_majorant(g - slack - 1e-5, counts, kappa, gamma)
    assert not is_majorant(g, counts_of(n_cal, draws, r + 0.05), kappa, gamma)  # of a longer attack
    if kappa:
        assert not is_majorant(g, counts, kappa - 1, gamma)
    if n_cal > 1:
        assert not is_majorant(1 + g[::-1], counts, kappa, gamma)  # large enough, but it falls
        assert not is_majorant(np.append(g[0], g[:-1]), counts, kappa, gamma)  # off by one count


@pytest.mark.parametrize("weight", [0, 1, 4, 8])
def test_every_honest_g_passes_wherever_the_holdout_lies(weight: int) -> None:
    """Holdouts whose counts are all the same make g as steep, or as flat, as it can be."""
    weights = np.eye(9)[weight]
    for kappa in (0, 2, 3):
        for r in (0.0, 0.5, 2.0):
            counts = counts_of(8, 4, r)
            g, _ = majorant(weights, counts, kappa)
            assert is_majorant(g, counts, kappa)
            q, _, h = curve(8, 0, 4, kappa, r, points=3001)
            assert (expectation(g, q) >= h).all()


def test_an_honest_g_passes_where_h_bends_within_a_cell() -> None:
    """Nearly certain draws and a forgiving boundary: h is flat over most of its last cells, which are cut seven times."""
    counts, weights = Counts(Threat(Ablation(20), 2.0, "l0", (1, 8, 8)), 4, 8), np.array([0.2, 0.0, 0.51, 0.17, 0.12])
    g, _ = majorant(weights, counts, 7, 0.5)
    assert is_majorant(g, counts, 7, 0.5)
    assert not is_majorant(g - 1e-4, counts, 7, 0.5)


def test_is_majorant_errs_on_the_safe_side() -> None:
    """Whatever passes dominates on a dense grid: g perturbed at random, most of it just enough to fail."""
    counts, generator = counts_of(8, 2, 0.5), np.random.default_rng(0)
    g, _ = majorant(bimodal_weights(8), counts, 0)
    q, _, h = curve(8, 0, 2, 0, 0.5, points=5001)
    passed = 0
    for _ in range(200):
        other = np.maximum.accumulate(g + generator.normal(0, 0.01, len(g)).cumsum())
        if is_majorant(other, counts, 0):
            passed += 1
            assert (h - expectation(other, q)).max() <= 1e-12
    assert 20 < passed < 180


@cases
def test_majorant_is_no_dearer_than_the_best_hull_rule(
    n_cal: int, draws: int, kappa: int, r: float, gamma: float
) -> None:
    """The hull is g = a + slope 1{count > c}; its cheapest price at P[count > c] = w is H(w), the line's touching point."""
    weights = bimodal_weights(n_cal)
    _, cost = majorant(weights, counts_of(n_cal, draws, r), kappa, gamma)
    prices, slopes = [], np.geomspace(0.05, 100, 400)[:, None]
    for j in breakpoints(n_cal):
        _, f, h = curve(n_cal, j - 1, draws, kappa, r, gamma, points=2001)
        intercepts = np.max(h - slopes * f, axis=1)
        prices.append(np.min(intercepts + slopes[:, 0] * (weights[j:].sum() + 1 / 2500)))
    assert 0.05 < min(prices) < 0.25
    assert cost <= min(prices) + 2e-3


@cases
def test_majorant_costs_hardly_more_than_any_must(n_cal: int, draws: int, kappa: int, r: float, gamma: float) -> None:
    """The cheapest g that dominates h on a thousand q alone, which every valid g does, is 0.6 % cheaper at most; 2 % with whole cells."""
    weights = bimodal_weights(n_cal)
    _, cost = majorant(weights, counts_of(n_cal, draws, r), kappa, gamma)
    q, _, h = curve(n_cal, 0, draws, kappa, r, gamma, points=1201)
    reached = stats.binom.sf(np.arange(n_cal + 1) - 1, n_cal, q[:, None])  # E of g that rises by 1 at each count
    rises = weights[::-1].cumsum()[::-1] + np.append(0.0, np.full(n_cal, INCREMENT_COST))
    best = linprog(rises, A_ub=-reached, b_ub=-h, bounds=(0, None)).x
    least = float(weights @ best.cumsum())
    assert least * (1 - 1e-3) <= cost <= least * 1.006


@cases
def test_the_cost_for_choosing_is_close_to_the_certified_one(
    n_cal: int, draws: int, kappa: int, r: float, gamma: float
) -> None:
    weights, counts = bimodal_weights(n_cal), counts_of(n_cal, draws, r)
    _, cost = majorant(weights, counts, kappa, gamma)
    assert majorant_cost(weights, counts, kappa, gamma)[0] == pytest.approx(cost, rel=0.05)


def test_a_majorant_that_is_too_small_is_caught() -> None:
    counts = counts_of(16, 1, 0.5)
    g, _ = majorant(bimodal_weights(16), counts, 0)
    assert majorant_gap(g, counts, 0) <= 0
    for small in (g - 0.01, np.append(g[1:], g[-1]) - g[1] + g[0]):  # shifted; off by one count
        assert majorant_gap(small, counts, 0) > 0
        assert not is_majorant(small, counts, 0)


def test_what_is_no_number_is_no_majorant() -> None:
    counts = counts_of(4, 1, 0.5)
    g, _ = majorant(bimodal_weights(4), counts, 0)
    for at in range(5):
        for value in (np.nan, np.inf, -np.inf):
            assert not is_majorant(np.where(np.arange(5) == at, value, g), counts, 0)


def test_tampering_asks_for_a_larger_g() -> None:
    """E g(Bin(N_cal, down(q))) >= h(q): what is valid for untouched calibration points is not, and the new g is."""
    threat, moved, weights = Threat(Gaussian(1.0), 0.5), Threat(Gaussian(1.0), 0.25), bimodal_weights(8)
    plain, tampered = Counts(threat, 8, 2), Counts(threat, 8, 2, moved)
    (g, cost), (more, dearer) = (majorant(weights, counts, 0) for counts in (plain, tampered))
    assert dearer > cost
    assert is_majorant(more, tampered, 0)
    assert not is_majorant(g, tampered, 0)
    q, _, h = curve(8, 0, 2, 0, 0.5, points=3001)
    assert (expectation(more, stats.norm.cdf(stats.norm.ppf(q) - 0.25)) >= h).all()


def test_breakpoints_hold_both_ends() -> None:
    assert breakpoints(5) == (1, 2, 3, 4, 5)
    many = breakpoints(1000)
    assert (many[0], many[-1], len(many)) == (1, 1000, 128)
