"""The conformal quantile against its definition in fractions."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from keepcover.bounds import conformal_quantile, conformal_rank, exact_level
from keepcover.errors import InputError
from keepcover.promises import Promise

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
    assert Promise().quantile(torch.tensor(scores), alpha) == expected


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


@pytest.mark.parametrize("quantile", [conformal_quantile, Promise().quantile])
def test_extreme_levels_and_bad_scores(quantile: Callable[[Tensor, Fraction], float]) -> None:
    scores = torch.tensor([1.0, 2.0, 3.0])
    assert quantile(scores, Fraction(0)) == math.inf
    assert quantile(scores, Fraction(1)) == -math.inf
    assert quantile(torch.tensor([1.0, math.inf]), Fraction(1, 3)) == math.inf
    with pytest.raises(InputError, match="NaN"):
        quantile(torch.tensor([0.1, math.nan]), Fraction(1, 10))
    with pytest.raises(InputError, match="non-empty"):
        quantile(torch.zeros(0), Fraction(1, 10))
