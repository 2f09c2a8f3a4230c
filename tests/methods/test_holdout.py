"""The holdout's averages over every way to pick N of M draws, against enumerating them."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
import torch

from keepcover.errors import InputError
from keepcover.methods import Holdout, get_method
from keepcover.methods.base import Asked
from keepcover.noise import Gaussian, Threat
from keepcover.scores import PTT, Reading
from keepcover.tasks import Classification
from tests.methods.worst import AS_THEY_ARE, holdout_of


def tiny(seed: int, ties: bool, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(6, 3, 5, generator=generator, dtype=dtype)
    return (scores * 4).round() / 4 if ties else scores, torch.randint(3, (6,), generator=generator)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("draws", [1, 2, 5])
def test_count_law_is_the_average_over_subsets(draws: int, ties: bool) -> None:
    scores, labels = tiny(draws, ties)
    holdout = holdout_of(scores, labels)
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
    holdout = holdout_of(scores, labels)
    sizes = holdout.size(draws, kappa, gamma)
    subsets = [list(subset) for subset in combinations(range(5), draws)]
    for at, t in enumerate(holdout.thresholds):
        counts = np.array([(scores.numpy()[..., subset] > t).sum(axis=-1) for subset in subsets])
        accepted = (counts <= kappa) + gamma * (counts == kappa + 1)
        assert sizes[at] == pytest.approx(accepted.sum(axis=-1).mean(), abs=1e-12)


def test_thresholds_are_the_true_scores_and_infinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepcover.methods.holdout.THRESHOLDS", 4000)
    scores, labels = tiny(0, ties=False, dtype=torch.float64)
    holdout = holdout_of(scores, labels)
    assert holdout.thresholds[-1] == math.inf
    true = np.unique(scores[torch.arange(6), labels].numpy())
    assert set(holdout.thresholds[:-1]) <= set(true)
    assert set(true[1:]) <= set(
        holdout.thresholds
    )  # the grid ends at a quantile of 2 %: only the smallest may be absent
    assert (np.diff(holdout.thresholds) > 0).all()
    assert (len(holdout), holdout.draws) == (6, 5)
    assert torch.equal(holdout.items().draws.values, scores[torch.arange(6), labels])


def test_the_grid_is_no_longer_than_it_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepcover.methods.holdout.THRESHOLDS", 64)
    scores = torch.rand(200, 2, 8)
    assert 20 < len(holdout_of(scores, torch.zeros(200, dtype=torch.int64)).thresholds) <= 65


def test_what_several_methods_ask_for_is_made_once() -> None:
    scores, labels = tiny(0, ties=False)
    holdout = holdout_of(scores, labels)
    assert holdout.items() is holdout.items(Reading(order=True))
    assert holdout.steps(PTT(), 0.1) is holdout.steps(PTT(1 / 400), 0.1)
    assert holdout.steps(PTT(), 0.1) is not holdout.steps(PTT(), 0.2)
    assert torch.equal(holdout.reference, scores[torch.arange(6), labels, 0])  # one draw each


def test_randomised_scores_use_the_points_own_numbers() -> None:
    outputs, labels, u = torch.randn(6, 5, 3), torch.arange(6) % 3, torch.rand(6)
    task = Classification("aps").seen(outputs)
    own = Holdout(task, outputs, labels, u).items(Reading(order=False))
    assert torch.equal(own.draws.values, task.items(outputs, labels, Reading(order=False), u).draws.values)
    assert not torch.equal(own.draws.values, Holdout(task, outputs, labels).items(Reading(order=False)).draws.values)


def test_bad_holdouts_are_refused() -> None:
    for outputs, truth in ((torch.zeros(3, 4, 2), torch.zeros(2)), (torch.zeros(0, 4, 2), torch.zeros(0))):
        with pytest.raises(InputError, match="holdout outputs and as many truths"):
            Holdout(AS_THEY_ARE, outputs, truth.long())


@pytest.mark.parametrize("method", ["exact", "exact_asymmetric"])
def test_sizes_between_thresholds_are_those_of_a_fine_grid(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of the grid is up to 10 % of these sets of 50 labels, more than rules differ by: whole steps would choose by chance."""
    asked = Asked(0.1, Threat(Gaussian(1.0), 0.25), draws=4, n=1000, candidates=50, calibration_draws=16)
    between, whole = [], []
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        labels = torch.randint(50, (400,), generator=generator)
        scores = torch.rand(400, 50, 16, generator=generator)
        scores[torch.arange(400), labels] **= 2 + 8 * torch.rand(400, 1, generator=generator)  # the truth's are smaller
        usual, fine = holdout_of(scores, labels), holdout_of(scores, labels)
        with monkeypatch.context() as patch:
            patch.setattr("keepcover.methods.holdout.THRESHOLDS", 4000)
            assert len(fine.thresholds) > 1000
        rule = get_method(method).fit(asked, fine)
        wanted = rule.estimated_size(fine)
        first = int((rule.holdout_risk(usual.count_law(16)) <= 0).argmax())
        whole.append(usual.size(4, rule.kappa)[first] / wanted)
        between.append(rule.estimated_size(usual) / wanted)
    assert max(whole) > 1.05
    assert between == pytest.approx([1.0] * 4, rel=0.03)


def test_few_held_out_points_do_not_make_a_majorant_explode(monkeypatch: pytest.MonkeyPatch) -> None:
    """A g that is 0 on 20 points and large behind them spends up to half of the budget of 180 points on g(N) alone."""

    def tops() -> list[float]:
        found = []
        for seed in range(8):
            generator = torch.Generator().manual_seed(seed)
            means = torch.rand(20, 10, generator=generator) * 4
            means[:, 0] = 0.7 * torch.randn(20, generator=generator)
            scores = means[..., None] + torch.randn(20, 10, 64, generator=generator)
            asked = Asked(0.1, Threat(Gaussian(1.0), 0.5), draws=4, n=180, candidates=10, calibration_draws=64)
            holdout = holdout_of(scores, torch.zeros(20, dtype=torch.int64))
            found.append(get_method("exact_asymmetric").fit(asked, holdout).g[-1])  # type: ignore[attr-defined]
        return found

    assert max(tops()) < 1.01  # h(1) = 1: less is impossible
    monkeypatch.setattr("keepcover.methods.choosing._price", lambda *_: 0.0)
    assert max(tops()) > 8


def test_nothing_lies_between_scores_that_have_few_values() -> None:
    """No calibration finds a threshold there: half a step would promise sets that nobody gets."""
    generator = torch.Generator().manual_seed(0)
    labels, excess = torch.zeros(100, dtype=torch.int64), np.array([1.0, -1.0, -2.0])
    coarse = torch.randint(2, (100, 3, 4), generator=generator).float()
    holdout = holdout_of(coarse, labels)
    assert holdout.thresholds.tolist() == [0.0, 1.0, math.inf]
    assert float(holdout.crossing(excess)) == 1.0
    holdout = holdout_of(torch.rand(2000, 3, 4, generator=generator), torch.zeros(2000, dtype=torch.int64))
    excess = np.linspace(1, -1, len(holdout.thresholds)) + 1e-4
    first = int((excess <= 0).argmax())
    assert first - 1 < float(holdout.crossing(excess)) < first
    assert float(holdout.crossing(np.full(len(holdout.thresholds), 1.0))) == len(holdout.thresholds) - 1  # none fits
