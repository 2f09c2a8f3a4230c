"""Bounds against closed forms, exact binomial sums, and hulls computed by brute force."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy import ndarray
from scipy import stats
from scipy.spatial import ConvexHull

from keepcover.bounds.bounds import (
    bernstein,
    binomial_tail,
    breakpoints,
    clopper_pearson,
    covered_at_most,
    dkw,
    gaussian_shift,
    hoeffding,
    hull_level,
    hull_levels,
    hypergeometric,
    majorant,
    majorant_gap,
    miss_rate,
)
from keepcover.errors import InputError

patient = settings(deadline=None, derandomize=True)
probabilities = st.floats(1e-9, 1 - 1e-9)
distances = st.floats(-3, 3)


@patient
@given(probabilities, distances)
def test_shift_is_undone_by_the_opposite_shift(p: float, d: float) -> None:
    assert float(gaussian_shift(gaussian_shift(p, d), -d)) == pytest.approx(p, rel=1e-6)


@patient
@given(probabilities, distances)
def test_shift_is_the_normal_cdf_moved(p: float, d: float) -> None:
    assert float(gaussian_shift(p, d)) == pytest.approx(stats.norm.cdf(stats.norm.ppf(p) + d), rel=1e-9)


@pytest.mark.parametrize("d", [-math.inf, -50.0, -1.0, 0.0, 1.0, 50.0, math.inf])
def test_shift_fixes_impossible_and_certain_events(d: float) -> None:
    assert gaussian_shift(np.array([0.0, 1.0]), d).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("p", [-0.1, 1.1, math.nan])
def test_shift_refuses_what_is_no_probability(p: float) -> None:
    with pytest.raises(InputError, match=r"probabilities in \[0, 1\]"):
        gaussian_shift(p, 0.5)


@pytest.mark.parametrize("draws", [2, 16, 256])
@pytest.mark.parametrize("beta", [0.001, 0.04])
def test_radii_are_their_formulas(draws: int, beta: float) -> None:
    assert hoeffding(draws, beta) == pytest.approx(math.sqrt(math.log(1 / beta) / (2 * draws)), rel=1e-14)
    assert math.exp(-2 * draws * dkw(draws, beta) ** 2) == pytest.approx(beta, rel=1e-12)
    for variance in (0.0, 0.04, 0.25):
        expected = math.sqrt(2 * variance * math.log(2 / beta) / draws) + 7 * math.log(2 / beta) / (3 * (draws - 1))
        assert bernstein(variance, draws, beta) == pytest.approx(expected, rel=1e-14)
        assert bernstein(torch.tensor([variance]), draws, beta).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("beta", [0.01, 0.05])
@pytest.mark.parametrize("draws", [5, 16, 64])
def test_radii_hold_for_coins(draws: int, beta: float) -> None:
    """P[mean - radius > p] <= beta for every coin, by exact binomial sums; V is the sample variance of the coin."""
    k = np.arange(draws + 1)
    mean, variance = k / draws, k * (draws - k) / (draws * (draws - 1))
    for p in np.linspace(0.01, 0.99, 99):
        law = stats.binom(draws, p).pmf(k)
        assert law[mean - hoeffding(draws, beta) > p].sum() <= beta
        assert law[mean - bernstein(variance, draws, beta) > p].sum() <= beta


@pytest.mark.parametrize(("draws", "level"), [(1, 0.1), (10, 0.05), (100, 0.001)])
def test_clopper_pearson_misses_each_side_with_at_most_half_the_level(draws: int, level: float) -> None:
    """Exact binomial sums over a grid of proportions, and the equations that define the two ends."""
    k = np.arange(draws + 1)
    low, high = clopper_pearson(k, draws, level)
    for p in np.concatenate([np.linspace(0, 1, 501), low + 1e-12, high - 1e-12]):
        law = stats.binom(draws, np.clip(p, 0, 1)).pmf(k)
        assert law[low > p].sum() <= level / 2 * (1 + 1e-6)
        assert law[high < p].sum() <= level / 2 * (1 + 1e-6)
    assert (low[0], high[-1]) == (0.0, 1.0)
    np.testing.assert_allclose(stats.binom(draws, low[1:]).sf(k[1:] - 1), level / 2, rtol=1e-8)
    np.testing.assert_allclose(stats.binom(draws, high[:-1]).cdf(k[:-1]), level / 2, rtol=1e-8)


def test_bad_levels_and_counts_are_refused() -> None:
    with pytest.raises(InputError, match="at least 2 draws"):
        bernstein(0.1, 1, 0.01)
    with pytest.raises(InputError, match="between 0 and 10"):
        clopper_pearson(11, 10, 0.05)
    with pytest.raises(InputError, match=r"levels in \(0, 0.5\]"):
        dkw(10, 0.6)
    with pytest.raises(InputError, match="c = 4 of 4"):
        hull_level(4, 4, 4, 0, 0.5, 0.1)
    with pytest.raises(InputError, match="kappa = -1 of 4"):
        hull_level(4, 0, 4, -1, 0.5, 0.1)
    with pytest.raises(InputError, match="0 < alpha < 1"):
        hull_level(4, 0, 4, 0, 0.5, 1.0)
    with pytest.raises(InputError, match="sample of at most 4"):
        hypergeometric(4, 5)


@pytest.mark.parametrize("draws", [1, 4, 64, 4096])
def test_binomial_tail_is_accurate_far_out(draws: int) -> None:
    q = np.concatenate([[0.0, 1.0], np.logspace(-12, -0.001, 40)])
    for at_least in np.unique(np.linspace(-1, draws + 1, 20).astype(int)):
        expected = stats.binom(draws, q).sf(at_least - 1)
        np.testing.assert_allclose(binomial_tail(draws, at_least, q), expected, rtol=1e-9, atol=1e-290)


@patient
@given(st.integers(1, 40), st.data(), st.floats(-4, 4), st.floats(0, 2), st.floats(0, 1))
def test_miss_rate_is_the_binomial_law_of_the_attacked_count(
    draws: int, data: st.DataObject, z: float, r: float, gamma: float
) -> None:
    kappa = data.draw(st.integers(0, draws - 1))
    law = stats.binom(draws, stats.norm.cdf(z + r))
    expected = law.sf(kappa + 1) + (1 - gamma) * law.pmf(kappa + 1)
    assert float(miss_rate(z, draws, kappa, r, gamma)) == pytest.approx(expected, rel=1e-8, abs=1e-12)


# -- the hull ----------------------------------------------------------------------------------------------------------


def curve(
    n_cal: int, c: int, n_test: int, kappa: int, r: float, gamma: float = 0.0, points: int = 40_001
) -> tuple[ndarray, ndarray, ndarray]:
    """A dense sample of q in [0, 1], f(q) and h(q), from scipy's binomial law."""
    z = np.concatenate([[-np.inf], np.linspace(-12, 9, points), [np.inf]])
    attacked = stats.norm.cdf(z + r)
    f = stats.binom.sf(c, n_cal, stats.norm.cdf(z))
    h = (1 - gamma) * stats.binom.sf(kappa, n_test, attacked) + gamma * stats.binom.sf(kappa + 1, n_test, attacked)
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


RULES = [
    (1, 0, 1, 0, 0.5, 0.1, 0.0),
    (2, 0, 2, 0, 0.5, 0.1, 0.0),
    (4, 1, 4, 1, 0.5, 0.1, 0.0),
    (4, 1, 4, 2, 1.0, 0.1, 0.5),
    (8, 1, 8, 2, 0.25, 0.05, 0.25),
    (16, 4, 16, 7, 0.5, 0.1, 0.0),
    (16, 8, 2, 1, 1.0, 0.2, 0.0),
    (64, 20, 1, 0, 0.5, 0.1, 0.75),
    (32, 3, 32, 12, 1.0, 0.01, 0.0),
    (256, 60, 256, 120, 0.5, 0.1, 0.0),
    (4096, 1500, 4096, 2270, 0.5, 0.1, 0.0),
    (4096, 40, 64, 2, 0.5, 0.1, 0.0),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_hull_level_is_just_below_the_brute_force_hull(rule: tuple) -> None:
    *counts, r, alpha, gamma = rule
    _, f, h = curve(*counts, r, gamma)
    brute, _, _ = crossing(f, h, alpha)
    level = hull_level(*counts, r, alpha, gamma)
    assert brute * (1 - 1e-3) <= level <= brute


def test_golden_hull_levels(golden_folder: Path) -> None:
    for row in json.loads((golden_folder / "exact.json").read_text())["rows"]:
        level = hull_level(row["n_cal"], row["c"], row["n_test"], row["kappa"], row["r"], row["alpha"])
        assert row["alpha_prime"] * (1 - 1e-3) <= level <= row["alpha_prime"] + 1e-6


@settings(patient, max_examples=40)
@given(st.floats(0.001, 0.5), st.floats(0.05, 3))
def test_one_draw_has_a_closed_form(alpha: float, r: float) -> None:
    exact = stats.norm.cdf(stats.norm.ppf(alpha) - r)
    assert exact * (1 - 1e-3) <= hull_level(1, 0, 1, 0, r, alpha) <= exact


@settings(patient, max_examples=40)
@given(st.integers(1, 16), st.data(), st.floats(0.05, 1.5), st.floats(0, 0.5), st.floats(0.02, 0.4))
def test_hull_level_falls_with_the_radius_and_rises_with_alpha(
    draws: int, data: st.DataObject, r: float, more: float, alpha: float
) -> None:
    """Up to the relative accuracy of 1e-4 that each value has; and it is never above alpha when c >= kappa."""
    c, kappa = data.draw(st.integers(0, draws - 1)), data.draw(st.integers(0, draws - 1))
    level = hull_level(draws, c, draws, kappa, r, alpha)
    assert hull_level(draws, c, draws, kappa, r + more, alpha) <= level * (1 + 2e-4) + 1e-300
    assert hull_level(draws, c, draws, kappa, r, alpha / 2) <= level * (1 + 2e-4) + 1e-300
    if c >= kappa:
        assert level <= alpha


def test_without_an_attack_nothing_is_paid() -> None:
    for draws, c in ((1, 0), (4, 1), (64, 20)):
        assert 0.0999 <= hull_level(draws, c, draws, c, 0.0, 0.1) <= 0.1


@pytest.mark.parametrize("r", [10.0, 30.0, 40.0, 60.0, 1000.0])
def test_a_hopeless_radius_certifies_nothing(r: float) -> None:
    assert 0 <= hull_level(4, 1, 4, 1, r, 0.1) < 1e-8


@pytest.mark.parametrize("rule", [(64, 60, 64, 0), (64, 63, 64, 0), (256, 250, 256, 1)], ids=str)
def test_a_hopeless_rule_is_settled_quickly(rule: tuple[int, int, int, int]) -> None:
    """alpha' is around 1e-200 here; whatever is said, it is said within five seconds and is no more than nothing."""

    def give_up(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"the hull of {rule} was still being refined")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, 5.0)
    try:
        assert 0 <= hull_level(*rule, 0.5, 0.1) < 1e-12
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("gamma", [0.0, 0.5])
@pytest.mark.parametrize("draws", [(4, 4), (16, 2), (64, 64)])
def test_the_batch_of_levels_is_close_to_the_certified_ones(draws: tuple[int, int], gamma: float) -> None:
    n_cal, n_test = draws
    c, kappa = (
        grid.ravel()
        for grid in np.meshgrid(np.arange(0, n_cal, 1 + n_cal // 16), np.arange(0, n_test, 1 + n_test // 8))
    )
    batch = hull_levels(n_cal, c, n_test, kappa, 0.5, 0.1, gamma)
    useful = batch > 1e-3
    single = [hull_level(n_cal, int(a), n_test, int(b), 0.5, 0.1, gamma) for a, b in zip(c[useful], kappa[useful])]
    assert len(single) >= 2
    np.testing.assert_allclose(batch[useful], single, rtol=0.03)


# -- the majorant ------------------------------------------------------------------------------------------------------

CASES = [
    (1, 1, 0, 0.5, 0.0),
    (4, 1, 0, 0.5, 0.0),
    (16, 1, 0, 0.5, 0.0),
    (16, 4, 1, 0.5, 0.5),
    (64, 2, 0, 1.0, 0.0),
    (64, 16, 6, 0.5, 0.0),
]


def bimodal_weights(n_cal: int) -> ndarray:
    """Counts of a model that is mostly right: many zeros, some in between, a few all above the threshold."""
    q = np.linspace(0, 1, 400) ** 20
    return stats.binom.pmf(np.arange(n_cal + 1), n_cal, q[:, None]).mean(axis=0)


@pytest.mark.parametrize(("n_cal", "draws", "kappa", "r", "gamma"), CASES)
def test_majorant_is_valid_everywhere(n_cal: int, draws: int, kappa: int, r: float, gamma: float) -> None:
    """E g(Bin(N_cal, q)) >= h(q) on a dense grid of q, by exact binomial sums; g never falls; the price is as told."""
    weights = bimodal_weights(n_cal)
    g, cost = majorant(weights, draws, kappa, r, gamma)
    assert (np.diff(g) >= 0).all()
    assert cost == pytest.approx(float(weights @ g), rel=1e-12)
    z = np.concatenate([[-np.inf], np.linspace(-10, 9, 5001), [np.inf]])
    expect = stats.binom.pmf(np.arange(n_cal + 1), n_cal, stats.norm.cdf(z)[:, None]) @ g
    gap = miss_rate(z, draws, kappa, r, gamma) - expect
    assert gap.max() <= 0
    assert majorant_gap(g, draws, kappa, r, gamma) <= 0
    assert majorant_gap(g * 0.95, draws, kappa, r, gamma) > 0  # and not by a wide margin


@pytest.mark.parametrize(("n_cal", "draws", "kappa", "r", "gamma"), CASES)
def test_majorant_is_no_dearer_than_the_best_hull_rule(
    n_cal: int, draws: int, kappa: int, r: float, gamma: float
) -> None:
    """The hull is g = a + slope 1{count > c}; its cheapest price at P[count > c] = w is H(w), the line's touching point."""
    weights = bimodal_weights(n_cal)
    _, cost = majorant(weights, draws, kappa, r, gamma)
    prices, slopes = [], np.geomspace(0.05, 100, 400)[:, None]
    for j in breakpoints(n_cal):
        _, f, h = curve(n_cal, j - 1, draws, kappa, r, gamma, points=2001)
        intercepts = np.max(h - slopes * f, axis=1)
        prices.append(np.min(intercepts + slopes[:, 0] * (weights[j:].sum() + 1 / 2500)))
    assert 0.05 < min(prices) < 0.25
    assert cost <= min(prices) + 2e-3


@pytest.mark.parametrize(("total", "sample"), [(1, 0), (4, 2), (64, 16), (256, 255)])
def test_hypergeometric_law(total: int, sample: int) -> None:
    marked, found = np.arange(total + 1)[:, None], np.arange(sample + 1)[None, :]
    np.testing.assert_allclose(
        hypergeometric(total, sample), stats.hypergeom(total, marked, sample).pmf(found), rtol=1e-8, atol=1e-15
    )


@pytest.mark.parametrize(("m", "n", "rank"), [(1, 9, 9), (40, 25, 24), (1000, 500, 451), (5, 8, 9)])
def test_covered_counts_follow_the_beta_binomial_law(m: int, n: int, rank: int) -> None:
    for covered in sorted({0, m // 2, m - 1, m}):
        expected = stats.betabinom(m, rank, n + 1 - rank).cdf(covered) if rank <= n else float(covered >= m)
        assert covered_at_most(covered, m, n, rank) == pytest.approx(expected, rel=1e-8)
