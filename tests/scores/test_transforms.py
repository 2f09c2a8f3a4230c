"""PTT is a rank, then a sigmoid; the rank of a fresh score is uniform."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from keepcover.errors import InputError
from keepcover.scores import PTT
from keepcover.scores.transforms import rank, sigmoid

patient = settings(deadline=None, derandomize=True)

values = st.lists(st.integers(-20, 20), min_size=1, max_size=30).map(
    lambda v: torch.tensor(v, dtype=torch.float64) / 10
)


def uniform_on_cells(cells: Tensor, count: int) -> bool:
    """Exact binomial test of every cell of a uniform law; false-alarm rate at most 1e-5 over all cells together."""
    counts = torch.bincount(cells, minlength=count)
    if len(counts) > count:
        return False
    return all(stats.binomtest(int(c), len(cells), 1 / count).pvalue > 1e-5 / count for c in counts)


@patient
@given(values, values, st.sampled_from([0.1, 0.5, 0.67]), st.sampled_from([1 / 400, 0.025, 1.0]))
def test_ptt_is_the_sigmoid_of_the_rank(holdout: Tensor, scores: Tensor, alpha: float, T: float) -> None:
    holdout, b = holdout.sort().values, 1 - alpha
    expected = [1 / (1 + math.exp(-max((int((holdout <= s).sum()) / len(holdout) - b) / T, -700))) for s in scores]
    actual = PTT(T).fit(holdout, alpha)(scores)
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-300)
    torch.testing.assert_close(sigmoid(rank(scores, holdout).double(), b, T), actual, rtol=1e-3, atol=1e-4)


@patient
@given(values, values)
def test_rank_counts_holdout_scores_at_most_s(holdout: Tensor, scores: Tensor) -> None:
    expected = (holdout[None, :] <= scores[:, None]).sum(dim=1) / len(holdout)
    assert torch.equal(rank(scores, holdout.sort().values), expected)


@patient
@given(values, values)
def test_ptt_is_monotone(holdout: Tensor, scores: Tensor) -> None:
    assert (PTT(0.1).fit(holdout)(scores.sort().values).diff() >= 0).all()


def test_ptt_keeps_the_shape_and_sorts_its_holdout() -> None:
    holdout, scores = torch.rand(50), torch.rand(2, 3, 4)
    flat = PTT().fit(holdout)(scores.flatten())
    assert torch.equal(PTT().fit(holdout.flip(0))(scores).flatten(), flat)
    assert torch.equal(PTT().fit(holdout)(scores.transpose(0, 2)), flat.view(2, 3, 4).transpose(0, 2))


@pytest.mark.parametrize("piece", [1, 7, 2**18])
def test_pieces_change_nothing(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, scores = PTT().fit(torch.rand(50)), torch.rand(5, 6)
    whole = steps(scores)
    monkeypatch.setattr("keepcover.scores.transforms.PIECE", piece)
    assert torch.equal(steps(scores), whole)


def test_what_an_attack_climbs_meets_the_steps_at_the_reference() -> None:
    """Straight lines between steps: the same values at reference scores but the first, nondecreasing, with a gradient."""
    holdout = torch.rand(30, dtype=torch.float64)
    steps, at = PTT(0.1).fit(holdout), holdout.sort().values[1:]
    torch.testing.assert_close(steps.smooth(at), steps(at))
    scores = torch.linspace(0.05, 0.95, 200, dtype=torch.float64, requires_grad=True)
    smooth = steps.smooth(scores)
    assert (smooth.diff() >= 0).all()
    (gradient,) = torch.autograd.grad(smooth.sum(), scores)
    assert (gradient >= 0).all()
    assert (gradient > 0).double().mean() > 0.9


def test_fit_is_centred_at_one_minus_alpha() -> None:
    """A score at the (1 - alpha)-quantile of the holdout maps to 1/2."""
    steps = PTT().fit(torch.linspace(0, 1, 1001, dtype=torch.float64)[1:], alpha=0.2)
    assert steps(torch.tensor([0.8005], dtype=torch.float64)).item() == pytest.approx(0.5, abs=1e-9)
    assert PTT().T == 1 / 400


def test_as_the_temperature_vanishes_the_mean_is_a_count() -> None:
    """T -> 0: the smoothed score is the share of draws at or above one order statistic of the holdout."""
    generator = torch.Generator().manual_seed(0)
    holdout = torch.rand(99, generator=generator, dtype=torch.float64)
    draws = torch.rand(200, 32, generator=generator, dtype=torch.float64)
    means = PTT(1e-12).fit(holdout, alpha=0.1)(draws).mean(dim=1)
    step = holdout.sort().values[89]  # the first whose rank, 90/99, is above 0.9
    assert torch.equal(means, (draws >= step).double().mean(dim=1))


def test_the_rank_of_a_fresh_score_is_uniform() -> None:
    """On {0, 1/m, ..., 1}, whatever the continuous law of the scores. Exact tests, false-alarm rate 1e-5."""
    m, repetitions = 5, 6000
    scores = torch.randn(repetitions, m + 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64).exp()
    holdout, fresh = scores[:, :m].sort(dim=1).values, scores[:, m:]
    cells = torch.stack([rank(s, h) for s, h in zip(fresh, holdout)])[:, 0] * m
    assert uniform_on_cells(cells.round().long(), m + 1)
    tied = (scores[:2000] * 2).round()
    holdout, fresh = tied[:, :m].sort(dim=1).values, tied[:, m:]
    cells = torch.stack([rank(s, h) for s, h in zip(fresh, holdout)])[:, 0] * m
    assert not uniform_on_cells(cells.round().long(), m + 1)  # and the test can tell


def test_bad_holdouts_are_refused() -> None:
    for bad in (math.nan, math.inf):
        with pytest.raises(InputError, match="NaN or infinity"):
            PTT().fit(torch.tensor([0.1, bad]))
    with pytest.raises(InputError, match="vector of holdout scores"):
        PTT().fit(torch.zeros(0))
    for temperature in (0.0, math.nan):
        with pytest.raises(InputError, match="T > 0"):
            PTT(temperature)
