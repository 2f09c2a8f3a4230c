"""Exact laws of counts against scipy's, and what risk control leaves against the tails it is made of."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from keepcover.bounds import (
    binomial_tail,
    conformal_law,
    covered_at_most,
    covered_at_most_given,
    hypergeometric,
    risk_control_law,
)
from keepcover.errors import InputError

M = 1000


@pytest.mark.parametrize("draws", [1, 4, 64, 4096])
def test_binomial_tail_is_accurate_far_out(draws: int) -> None:
    q = np.concatenate([[0.0, 1.0], np.logspace(-12, -0.001, 40)])
    for at_least in np.unique(np.linspace(-1, draws + 1, 20).astype(int)):
        expected = stats.binom(draws, q).sf(at_least - 1)
        np.testing.assert_allclose(binomial_tail(draws, at_least, q), expected, rtol=1e-9, atol=1e-290)


@pytest.mark.parametrize(("total", "sample"), [(1, 0), (4, 2), (64, 16), (256, 255)])
def test_hypergeometric_law(total: int, sample: int) -> None:
    marked, found = np.arange(total + 1)[:, None], np.arange(sample + 1)[None, :]
    np.testing.assert_allclose(
        hypergeometric(total, sample), stats.hypergeom(total, marked, sample).pmf(found), rtol=1e-8, atol=1e-15
    )
    with pytest.raises(InputError, match=f"sample of at most {total}"):
        hypergeometric(total, total + 1)


@pytest.mark.parametrize(("m", "n", "rank"), [(1, 9, 9), (40, 25, 24), (1000, 500, 451), (5, 8, 9)])
def test_covered_counts_follow_the_beta_binomial_law(m: int, n: int, rank: int) -> None:
    for covered in sorted({0, m // 2, m - 1, m}):
        expected = stats.betabinom(m, rank, n + 1 - rank).cdf(covered) if rank <= n else float(covered >= m)
        assert covered_at_most(covered, m, n, rank) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("rank", [0, 90, 95, 101])
def test_the_law_of_a_quantile_integrates_to_the_beta_binomial(rank: int) -> None:
    """From above, by at most a tenth; ranks 0 and n + 1 are thresholds of -inf and +inf."""
    for covered in (800, 900, 950, M):
        exact = covered_at_most(covered, M, 100, rank) if rank else float(covered >= 0)
        found = covered_at_most_given(covered, M, *conformal_law(100, rank))
        assert exact * (1 - 1e-9) <= found <= exact * 1.1 + 1e-12


def test_risk_control_law_bounds_the_tail_it_is_made_of() -> None:
    """Losses that are 0 or 1: the risk exceeds u iff a binomial stays below its budget, at most; exactly computable."""
    for n in (50, 200, 1000):
        u, exceeded = risk_control_law(n, (0.1 * (n + 1) - 1) / n, 0.0, 1.0)
        exact = stats.binom.cdf(math.floor(0.1 * (n + 1) - 1 + 1e-9), n, u)
        assert np.all(exceeded >= exact - 1e-15)
        assert np.all(np.diff(exceeded) <= 1e-15)
        assert exceeded[0] == 1
        some = (exact < 0.01) & (exact > 1e-6)
        assert np.all(exceeded[some] < 15 * exact[some])  # and it is of use


def test_risk_control_law_at_its_edges() -> None:
    def law(n: int, low: float, high: float) -> tuple[np.ndarray, np.ndarray]:
        return risk_control_law(n, (0.1 * (n + 1) - high) / n, low, high)

    assert covered_at_most_given(M - 1, M, *law(5, 0.0, 1.0)) == 0  # t = +inf
    assert covered_at_most_given(M, M, *law(5, 0.0, 1.0)) == 1
    for low in (0.08, 0.0):  # g says 0.08 of every point; or t = -inf will do
        found = covered_at_most_given(930, M, *law(50, low, 0.08))
        assert found == pytest.approx(stats.binom.cdf(930, M, 0.92))
