"""Soft sorting: exact projections, exact gradients, the hard limit; and the losses built on it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtri
from torch import Tensor

from keepcover.errors import InputError
from keepcover.training.conformal import RCT, ConfTr, ExactRCT, isotonic, soft_quantile, soft_sort

vectors = st.lists(st.floats(-5, 5, allow_nan=False, width=32), min_size=1, max_size=24)


def pool_adjacent_violators(values: list[float]) -> list[float]:
    """The classical sequential algorithm for a nonincreasing fit."""
    blocks: list[list[float]] = []
    for value in values:
        blocks.append([value, 1.0])
        while len(blocks) > 1 and blocks[-1][0] / blocks[-1][1] > blocks[-2][0] / blocks[-2][1]:
            total, count = blocks.pop()
            blocks[-1][0] += total
            blocks[-1][1] += count
    return [total / count for total, count in blocks for _ in range(int(count))]


@given(vectors)
@settings(deadline=None, max_examples=80)
def test_minimax_formula_is_pool_adjacent_violators(values: list[float]) -> None:
    fitted = isotonic(torch.tensor(values, dtype=torch.float64))
    assert torch.allclose(fitted, torch.tensor(pool_adjacent_violators(values), dtype=torch.float64), atol=1e-10)


@given(vectors, st.floats(0.01, 10))
@settings(deadline=None, max_examples=60)
def test_soft_sort_lies_in_the_permutahedron(values: list[float], strength: float) -> None:
    """The projection keeps the sum, is ascending, and its partial sums never exceed those of the hard sort's top."""
    theta = torch.tensor(values, dtype=torch.float64)
    soft = soft_sort(theta, strength)
    assert torch.allclose(soft.sum(), theta.sum(), atol=1e-8)
    assert (soft.diff() >= -1e-9).all()
    top = theta.sort(descending=True).values.cumsum(0)
    assert (soft.flip(0).cumsum(0) <= top + 1e-8).all()


def test_strength_to_zero_is_the_hard_sort_and_large_is_the_mean() -> None:
    theta = torch.randn(50, dtype=torch.float64)
    assert torch.allclose(soft_sort(theta, 1e-3), theta.sort().values, atol=1e-9)
    assert torch.allclose(soft_sort(theta, 1e6), theta.mean().expand(50), atol=1e-3)


@pytest.mark.parametrize("strength", [0.1, 1.0, 10.0])
def test_gradients_match_finite_differences(strength: float) -> None:
    theta = torch.randn(9, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: soft_sort(t, strength), (theta,), eps=1e-7, atol=1e-5)
    assert torch.autograd.gradcheck(lambda t: soft_quantile(t, 0.8, strength), (theta,), eps=1e-7, atol=1e-5)


@given(st.integers(2, 60), st.integers(5, 95))
@settings(deadline=None, max_examples=40)
def test_soft_quantile_tends_to_the_interpolated_order_statistic(n: int, percent: int) -> None:
    values = torch.randn(n, dtype=torch.float64)
    position = min(max(percent / 100 * (n + 1), 1.0), float(n))
    ordered = values.sort().values
    low = min(math.floor(position), n - 1)
    expected = ordered[low - 1] + (position - low) * (ordered[low] - ordered[low - 1])
    assert float(soft_quantile(values, percent / 100, 1e-4)) == pytest.approx(float(expected), abs=1e-8)


def test_batched_sorting_equals_one_by_one() -> None:
    theta = torch.randn(3, 4, 8, dtype=torch.float64)
    one_by_one = torch.stack([soft_sort(row, 0.5) for row in theta.flatten(0, 1)]).view_as(theta)
    assert torch.allclose(soft_sort(theta, 0.5), one_by_one, atol=1e-12)


def batch(copies: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(40) % 4
    logits = torch.randn(40, copies, 4, generator=generator, dtype=torch.float64)
    logits += 3 * torch.nn.functional.one_hot(labels, 4)[:, None]
    return logits, labels


def test_rct_is_its_formula() -> None:
    """Section 7: Phi^-1 of the mean HPS, a soft quantile plus r, sigmoid sets, log of class plus size loss."""
    logits, labels = batch(8)
    loss = RCT(r=0.5, strength=1e-4)(logits, labels)
    scores = torch.from_numpy(ndtri((1 - logits.softmax(-1).mean(1)).clamp(1e-7, 1 - 1e-7).numpy()))
    own = scores[:20].gather(1, labels[:20, None])[:, 0].sort().values
    position = 0.9 * 21
    tau = own[17] + (position - 18) * (own[18] - own[17]) + 0.5
    soft = torch.sigmoid((tau - scores[20:]) / 0.1)
    class_loss = (1 - soft.gather(1, labels[20:, None])).mean()
    size_loss = (soft.sum(1) - 1).clamp_min(0).mean()
    assert float(loss.loss) == pytest.approx(float((class_loss + size_loss + 1e-8).log()), abs=1e-6)
    assert float(RCT(r=0.5, strength=1e-4, log=False)(logits, labels).loss) == pytest.approx(
        float(class_loss + size_loss), abs=1e-6
    )


def test_conftr_is_rct_without_noise_attack_and_probit() -> None:
    logits, labels = batch(1)
    loss = ConfTr(strength=1e-4)(logits, labels)
    scores = -logits[:, 0].log_softmax(-1)
    own = scores[:20].gather(1, labels[:20, None])[:, 0].sort().values
    tau = own[17] + 0.9 * (own[18] - own[17])
    assert float(loss.soft_size) == pytest.approx(
        float(torch.sigmoid((tau - scores[20:]) / 0.1).sum(1).mean()), abs=1e-6
    )


def test_exact_loss_thresholds_order_statistics() -> None:
    logits, labels = batch(8)
    loss = ExactRCT(c=1, kappa=3, level=0.2, strength=1e-4)(logits, labels)
    from keepcover.scores.scores import log_odds

    ordered = log_odds(logits).transpose(1, 2).sort(dim=-1, descending=True).values
    own = ordered[:20, :, 1].gather(1, labels[:20, None])[:, 0].sort().values
    tau = own[15] + (0.8 * 21 - 16) * (own[16] - own[15])
    assert float(loss.hard_size) == pytest.approx(float((ordered[20:, :, 3] <= tau + 1e-6).sum(1).double().mean()))


@pytest.mark.parametrize("loss", [RCT(), ExactRCT()])
def test_a_few_steps_on_a_linear_head_shrink_the_sets(loss: RCT | ExactRCT) -> None:
    """Gradients reach the head and lead downhill."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(200) % 4
    features = torch.randn(200, 8, 6, generator=generator) + 2 * torch.nn.functional.one_hot(labels, 6).float()[:, None]
    head = torch.nn.Linear(6, 4)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
    values = []
    for _ in range(60):
        result = loss(head(features), labels)
        optimizer.zero_grad()
        result.loss.backward()
        optimizer.step()
        values.append(float(result.loss.detach()))
    assert values[-1] < values[0] - 0.3


def test_bad_input_is_refused() -> None:
    with pytest.raises(InputError, match="strength > 0"):
        soft_sort(torch.zeros(3), 0.0)
    with pytest.raises(InputError, match="at least 2 examples"):
        ConfTr()(torch.zeros(1, 1, 3), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(InputError, match="below the 8 noisy copies"):
        ExactRCT(c=8)(*batch(8))
