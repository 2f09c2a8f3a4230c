"""The conformal quantile against its definition in fractions, the exact law of coverage, and what a Guarantee refuses."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from keepcover.errors import InputError
from keepcover.guarantee import ASSUMPTIONS, Guarantee, conformal_quantile, conformal_rank, exact_level
from keepcover.methods import Setting, SplitCP
from keepcover.scores.draws import Draws

patient = settings(deadline=None, derandomize=True)

levels = st.integers(1, 999).map(lambda thousandths: Fraction(thousandths, 1000))
tied_scores = st.lists(st.integers(-4, 4).map(float), min_size=1, max_size=40)


def definition(scores: list[float], alpha: Fraction) -> float:
    """The smallest t with at least (1 - alpha)(n + 1) scores at most t, counting +inf as the last score."""
    need = (1 - alpha) * (len(scores) + 1)
    return min(t for t in [*scores, math.inf] if sum(s <= t for s in [*scores, math.inf]) >= need)


@patient
@given(tied_scores, levels)
def test_quantile_is_its_definition(scores: list[float], alpha: Fraction) -> None:
    expected = definition(scores, alpha)
    assert conformal_quantile(torch.tensor(scores), alpha) == expected
    assert conformal_quantile(torch.tensor(scores), float(alpha)) == expected  # as typed: 0.1 means 1/10


@patient
@given(st.integers(1, 10_000), levels)
def test_rank_is_the_ceiling_in_exact_arithmetic(n: int, alpha: Fraction) -> None:
    assert conformal_rank(n, alpha) == math.ceil((n + 1) * (1 - alpha))


@pytest.mark.parametrize("n", [9, 19, 29, 69, 99, 999, 4749])
def test_typed_levels_suffer_no_binary_rounding(n: int) -> None:
    """(n + 1) / 10 is an integer here, and (1 - 0.1) (n + 1) in floats is not always."""
    assert conformal_rank(n, exact_level(0.1)) == (n + 1) * 9 // 10
    assert conformal_quantile(torch.arange(1, n + 1).double(), 0.1) == (n + 1) * 9 // 10


@patient
@given(st.integers(1, 2000), st.floats(1e-9, 0.999))
def test_computed_levels_err_on_the_safe_side(n: int, level: float) -> None:
    assert Fraction(n + 1 - conformal_rank(n, Fraction(level)), n + 1) <= Fraction(level)


def test_extreme_levels() -> None:
    scores = torch.tensor([1.0, 2.0, 3.0])
    assert conformal_quantile(scores, Fraction(0)) == math.inf
    assert conformal_quantile(scores, Fraction(1)) == -math.inf
    assert conformal_quantile(torch.tensor([1.0, math.inf]), Fraction(1, 3)) == math.inf


def test_bad_scores_are_refused() -> None:
    with pytest.raises(InputError, match="NaN"):
        conformal_quantile(torch.tensor([0.1, math.nan]), 0.1)
    with pytest.raises(InputError, match="non-empty"):
        conformal_quantile(torch.zeros(0), 0.1)


@pytest.mark.parametrize(("n", "alpha"), [(25, 0.1), (9, 0.1), (40, 0.37)])
def test_covered_counts_are_beta_binomial(n: int, alpha: float) -> None:
    """Of m fresh points: BetaBinomial(m, k, n + 1 - k), k the rank.

    Massart's inequality bounds the distance to the empirical cdf for any law and sample size: false-alarm rate 1e-6.
    The binomial law that ignores the calibration draw is rejected by the same test.
    """
    m, repetitions = 40, 3000
    rule = SplitCP(Setting(alpha, 0.0, 0.0, 1, n, 2))
    scores = torch.randn(repetitions, n + m, 1, generator=torch.Generator().manual_seed(n), dtype=torch.float64).exp()
    counts = [
        int(rule.decide(Draws(test[:, None]), rule.threshold(rule.calibration_statistic(Draws(cal)))).sum())
        for cal, test in zip(scores[:, :n], scores[:, n:])
    ]
    at = np.arange(m + 1)
    empirical = (np.array(counts)[:, None] <= at).mean(axis=0)
    k = math.ceil((n + 1) * (1 - Fraction(str(alpha))))
    radius = math.sqrt(math.log(2 / 1e-6) / (2 * repetitions))
    assert np.abs(empirical - stats.betabinom(m, k, n + 1 - k).cdf(at)).max() <= radius
    assert np.abs(empirical - stats.binom(m, k / (n + 1)).cdf(at)).max() > radius


GOOD = {"method": "exact", "certified": True, "alpha": 0.1, "epsilon": 0.125, "sigma": 0.25, "draws": 16, "n": 100}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alpha": 0.0}, "alpha strictly between 0 and 1, got 0.0; 0.1 promises 90 %"),
        ({"alpha": 1.0}, "alpha strictly between 0 and 1"),
        ({"alpha": math.nan}, "finite alpha"),
        ({"epsilon": math.inf}, "finite epsilon"),
        ({"epsilon": -0.1}, "epsilon >= 0, the L2 radius"),
        ({"sigma": -0.1}, "sigma >= 0"),
        ({"sigma": 0.0}, "give sigma > 0 .* or choose the uncertified method cp"),
        ({"draws": 0}, "at least 1 draw"),
        ({"calibration_draws": 0}, "at least 1 draw"),
        ({"norm": "linf"}, "norm 'l2', the only one"),
        ({"beta": 0.0}, r"beta in \(0, 1\)"),
        ({"beta": 0.05}, "2 beta = 0.1 leaves nothing of alpha = 0.1: choose beta below 0.05"),
        (
            {"n": 8},
            "8 calibration points cannot certify miscoverage 0.1: at least 9 are needed; add data or raise alpha",
        ),
        ({"n": 9, "beta": 0.01}, "miscoverage 0.08: at least 12 are needed"),
    ],
)
def test_impossible_promises_are_refused(change: dict, message: str) -> None:
    Guarantee(**GOOD)
    with pytest.raises(InputError, match=message):
        Guarantee(**GOOD | change)


@patient
@given(levels)
def test_the_number_of_points_it_asks_for_is_the_smallest_that_works(alpha: Fraction) -> None:
    need = math.ceil(1 / alpha) - 1
    assert conformal_rank(need, alpha) <= need
    if need > 0:
        Guarantee(**GOOD | {"alpha": float(alpha), "n": need})
        with pytest.raises(InputError, match=f"at least {need} are needed"):
            Guarantee(**GOOD | {"alpha": float(alpha), "n": need - 1})


def test_the_sentence_of_a_certified_method() -> None:
    assert str(Guarantee(**GOOD | {"method": "rscp_plus_hoeffding", "alpha": 0.05, "beta": 0.001, "draws": 1})) == (
        "With probability at least 95 %, the set contains the true label of a query even if an adversary has moved it "
        "by up to 0.125 in L2 norm (method rscp_plus_hoeffding, Gaussian noise sigma 0.25, 1 draw per query, "
        "Monte Carlo budget 2 x 0.001 inside the 5 %, 100 calibration points)."
    )


def test_the_sentence_of_an_uncertified_method_promises_nothing_under_attack() -> None:
    assert str(Guarantee(**GOOD | {"method": "cp", "certified": False, "sigma": 0.0})) == (
        "With probability at least 90 %, the set contains the true label of a query that nobody has attacked "
        "(method cp, 100 calibration points); under attack cp promises nothing."
    )


def test_numbers_sentence_and_assumptions_travel_together() -> None:
    guarantee = Guarantee(**GOOD)
    as_dict = guarantee.to_dict()
    assert {key: as_dict[key] for key in GOOD} == GOOD
    assert as_dict["statement"] == str(guarantee)
    assert as_dict["assumptions"] == list(ASSUMPTIONS)
