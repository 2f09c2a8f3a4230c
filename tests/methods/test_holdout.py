"""The holdout's averages over every way to pick N of M draws, against enumerating them."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
import torch

from keepcover.errors import InputError
from keepcover.methods.holdout import Holdout
from keepcover.scores.draws import Draws


def tiny(seed: int, ties: bool, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(6, 3, 5, generator=generator, dtype=dtype)
    return (scores * 4).round() / 4 if ties else scores, torch.randint(3, (6,), generator=generator)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("draws", [1, 2, 5])
def test_count_law_is_the_average_over_subsets(draws: int, ties: bool) -> None:
    scores, labels = tiny(draws, ties)
    holdout = Holdout(Draws(scores), labels)
    true = scores[torch.arange(6), labels].numpy()
    subsets = [list(subset) for subset in combinations(range(5), draws)]
    law = holdout.count_law(draws)
    for at, t in enumerate(holdout.thresholds):
        counts = np.array([(true[:, subset] > t).sum(axis=1) for subset in subsets])
        np.testing.assert_allclose(law[at], [(counts == j).mean() for j in range(draws + 1)], atol=1e-12)


@pytest.mark.parametrize("gamma", [0.0, 0.25])
@pytest.mark.parametrize(("draws", "kappa"), [(1, 0), (3, 0), (3, 2), (5, 1)])
def test_size_is_the_average_over_subsets(draws: int, kappa: int, gamma: float) -> None:
    scores, labels = tiny(kappa, ties=True)
    holdout = Holdout(Draws(scores), labels)
    sizes = holdout.size(draws, kappa, gamma)
    subsets = [list(subset) for subset in combinations(range(5), draws)]
    for at, t in enumerate(holdout.thresholds):
        counts = np.array([(scores.numpy()[..., subset] > t).sum(axis=-1) for subset in subsets])
        accepted = (counts <= kappa) + gamma * (counts == kappa + 1)
        assert sizes[at] == pytest.approx(accepted.sum(axis=-1).mean(), abs=1e-12)


def test_thresholds_are_the_true_scores_and_infinity() -> None:
    scores, labels = tiny(0, ties=False, dtype=torch.float64)
    holdout = Holdout(Draws(scores), labels, thresholds=4000)
    assert holdout.thresholds[-1] == math.inf
    true = np.unique(scores[torch.arange(6), labels].numpy())
    assert set(holdout.thresholds[:-1]) <= set(true)
    assert set(true[1:]) <= set(
        holdout.thresholds
    )  # the grid ends at a quantile of 2 %: only the smallest may be absent
    assert (np.diff(holdout.thresholds) > 0).all()
    assert len(holdout) == 6
    assert torch.equal(holdout.true.values, scores[torch.arange(6), labels])


def test_the_grid_is_no_longer_than_asked_for() -> None:
    scores = torch.rand(200, 2, 8)
    assert 20 < len(Holdout(Draws(scores), torch.zeros(200, dtype=torch.int64), thresholds=64).thresholds) <= 65


def test_bad_holdouts_are_refused() -> None:
    with pytest.raises(InputError, match=r"\[points, classes, draws\]"):
        Holdout(Draws(torch.zeros(3, 4)), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(InputError, match="as many labels"):
        Holdout(Draws(torch.zeros(3, 4, 2)), torch.zeros(2, dtype=torch.int64))
