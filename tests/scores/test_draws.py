"""Reductions of noisy scores: exact identities with sorting, counting and numpy in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keepcover.errors import InputError
from keepcover.scores import Draws, Items
from keepcover.scores.draws import in_pieces, pieces

patient = settings(deadline=None, derandomize=True)

rows = st.lists(st.integers(0, 5), min_size=1, max_size=9)


@patient
@given(rows, st.integers(1, 11), st.booleans())
def test_largest_is_the_order_statistic(row: list[int], position: int, sorted_before: bool) -> None:
    draws = Draws(torch.tensor([row], dtype=torch.float32))
    if sorted_before:
        _ = draws.ascending
    expected = sorted(row, reverse=True)[position - 1] if position <= len(row) else -math.inf
    assert draws.largest(position).tolist() == [expected]


@patient
@given(rows, st.integers(0, 10), st.integers(-1, 6))
def test_at_most_kappa_draws_exceed_t_iff_the_next_largest_is_at_most_t(row: list[int], kappa: int, t: int) -> None:
    draws = Draws(torch.tensor([row], dtype=torch.float64))
    assert int(draws.above(float(t))) == sum(value > t for value in row)
    assert bool(draws.largest(kappa + 1) <= t) == (sum(value > t for value in row) <= kappa)


def test_mean_and_variance_are_float64_and_unbiased() -> None:
    values = torch.rand(3, 4, 1000, generator=torch.Generator().manual_seed(0)) * 1e-3 + 0.999
    draws, reference = Draws(values), values.double().numpy()
    assert draws.mean.dtype == draws.variance.dtype == torch.float64
    np.testing.assert_allclose(draws.mean.numpy(), reference.mean(axis=-1), rtol=1e-14)
    np.testing.assert_allclose(draws.variance.numpy(), reference.var(axis=-1, ddof=1), rtol=1e-10)


def test_selections_keep_mean_variance_and_count_together() -> None:
    values = torch.randn(5, 3, 8)
    draws, some, labels = Draws(values), torch.tensor([4, 0]), torch.tensor([2, 0, 1, 1, 2])
    assert torch.equal(draws[some].mean, draws.mean[some])
    assert torch.equal(draws[some].variance, draws.variance[some])
    assert torch.equal(draws.of_label(labels).values, torch.stack([values[i, y] for i, y in enumerate(labels)]))
    assert torch.equal(draws.first(3).values, values[..., :3])
    assert draws.first(8) is draws
    assert (len(draws), draws.count, draws.first(3).count, len(draws[some])) == (5, 8, 3, 2)


@pytest.mark.parametrize("piece", [1, 24, 60, 2**18])
def test_pieces_are_all_of_it_and_change_nothing(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepcover.scores.draws.PIECE", piece)
    values = torch.randn(7, 3, 8, generator=torch.Generator().manual_seed(0))
    parts = pieces(values)
    assert torch.equal(torch.cat([values[part] for part in parts]), values)
    assert all(values[part].numel() <= max(piece, 24) for part in parts)
    assert len(parts) == {1: 7, 24: 7, 60: 4, 2**18: 1}[piece]
    assert torch.equal(in_pieces(values, lambda part: part.amax(dim=-1)), values.amax(dim=-1))
    assert [len(values[part]) for part in pieces(values[:0])] == [0]


def test_bad_draws_are_refused() -> None:
    with pytest.raises(InputError, match="at least one draw"):
        Draws(torch.zeros(3))
    with pytest.raises(InputError, match="at least one draw"):
        Draws(torch.zeros(3, 0))
    with pytest.raises(InputError, match="asked for 9 draws, only 8"):
        Draws(torch.zeros(2, 8)).first(9)
    with pytest.raises(InputError, match="at least 2 draws"):
        _ = Draws(torch.zeros(2, 1)).variance
    with pytest.raises(InputError, match="at least 1, got 0"):
        Draws(torch.zeros(2, 8)).largest(0)


def test_items_keep_their_points_and_weights_when_draws_are_fewer() -> None:
    values, weight = torch.rand(6, 8), torch.tensor([0.5, 0.5, 1.0, 0.2, 0.3, 0.5])
    items = Items(Draws(values), points=9, weight=weight)
    fewer = items.first(3)
    assert torch.equal(fewer.draws.values, values[:, :3])
    assert (fewer.points, fewer.weight) == (9, weight)
    single = Items.single(Draws(values))
    assert (single.points, single.weight) == (6, None)
