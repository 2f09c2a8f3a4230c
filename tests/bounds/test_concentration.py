"""Concentration bounds against their formulas and against exact binomial sums."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from keepcover.bounds import bernstein, clopper_pearson, dkw, hoeffding
from keepcover.errors import InputError


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
    p = np.linspace(0.01, 0.99, 99)[:, None]
    law = stats.binom.pmf(k, draws, p)
    for lower in (mean - hoeffding(draws, beta), mean - bernstein(variance, draws, beta)):
        assert np.where(lower > p, law, 0.0).sum(axis=1).max() <= beta


@pytest.mark.parametrize(("draws", "level"), [(1, 0.1), (10, 0.05), (100, 0.001)])
def test_clopper_pearson_misses_each_side_with_at_most_half_the_level(draws: int, level: float) -> None:
    """Exact binomial sums over a grid of proportions, and the equations that define the two ends."""
    k = np.arange(draws + 1)
    low, high = clopper_pearson(k, draws, level)
    p = np.clip(np.concatenate([np.linspace(0, 1, 501), low + 1e-12, high - 1e-12]), 0, 1)[:, None]
    law = stats.binom.pmf(k, draws, p)
    for missed in (low > p, high < p):
        assert np.where(missed, law, 0.0).sum(axis=1).max() <= level / 2 * (1 + 1e-6)
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
