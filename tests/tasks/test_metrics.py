"""Metrics against counts made by hand."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from keepcover.errors import InputError
from keepcover.tasks import Proportion, Spread
from keepcover.tasks.metrics import check_labels, measure

# Sizes 1, 2, 0, 3, 1 and 1; the true label is in rows 0, 1 and 3.
MASK = torch.tensor([[1, 0, 0], [0, 1, 1], [0, 0, 0], [1, 1, 1], [0, 0, 1], [0, 1, 0]], dtype=torch.bool)
LABELS = torch.tensor([0, 2, 2, 2, 0, 0])


def test_evaluation_counts() -> None:
    result = measure(MASK, LABELS)
    assert (result.coverage.mean, result.coverage.count) == (0.5, 6)
    assert result.size == pytest.approx(8 / 6)
    assert result.size_std == pytest.approx(math.sqrt((3 * 1 / 9 + 4 / 9 + 16 / 9 + 25 / 9) / 5))
    assert (result.singletons, result.empty, result.full) == pytest.approx((3 / 6, 1 / 6, 1 / 6))
    assert result.histogram == (1, 3, 1, 1)
    assert {k: (v.mean, v.count) for k, v in result.by_class.items()} == {
        0: (pytest.approx(1 / 3), 3),
        2: (pytest.approx(2 / 3), 3),
    }
    assert {k: (v.mean, v.count) for k, v in result.by_size.items()} == {
        0: (0.0, 1),
        1: (pytest.approx(1 / 3), 3),
        2: (1.0, 1),
        3: (1.0, 1),
    }
    assert result.to_dict()["coverage"]["mean"] == 0.5


def test_one_image_has_no_spread() -> None:
    result = measure(MASK[:1], LABELS[:1])
    assert (result.size, result.size_std, result.coverage.mean) == (1.0, 0.0, 1.0)


def test_proportions_carry_their_clopper_pearson_interval() -> None:
    share = Proportion.of(90, 100)
    assert (share.mean, share.count) == (0.9, 100)
    assert stats.binom(100, share.low).sf(89) == pytest.approx(0.025, rel=1e-8)
    assert stats.binom(100, share.high).cdf(90) == pytest.approx(0.025, rel=1e-8)
    assert str(share) == "0.900 [0.824, 0.951]"
    assert (Proportion.of(0, 5).low, Proportion.of(5, 5).high) == (0.0, 1.0)


def test_spread_is_the_sample_standard_deviation() -> None:
    spread = Spread.of([1.0, 2.0, 4.0])
    assert spread.mean == pytest.approx(7 / 3)
    assert spread.std == pytest.approx(math.sqrt(7 / 3))
    assert Spread.of([3.0]) == Spread(3.0, 0.0)
    assert str(Spread.of(torch.tensor([1.0, 3.0]))) == "2.000 ± 1.414"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_labels_become_int64(dtype: torch.dtype) -> None:
    labels = check_labels(torch.tensor([0, 2, 1], dtype=dtype), 3, 3)
    assert labels.dtype == torch.int64
    assert labels.tolist() == [0, 2, 1]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.tensor([0, 1, 3]), r"between 0 and 2 \(the model has 3 outputs\), got 0 to 3"),
        (torch.tensor([0, -1, 2]), "got -1 to 2"),
        (torch.tensor([0, 1]), r"expected 3 labels in one dimension, got shape \(2,\)"),
        (torch.zeros(3, 1, dtype=torch.int64), "in one dimension"),
        (torch.tensor([0.0, 1.0, 2.0]), "integer class labels, got dtype torch.float32"),
        (torch.tensor([True, False, True]), "integer class labels, got dtype torch.bool"),
    ],
)
def test_bad_labels_are_refused(labels: torch.Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_labels(labels, 3, 3)


def test_an_empty_mask_is_refused() -> None:
    with pytest.raises(InputError, match="non-empty mask"):
        measure(torch.zeros(0, 3, dtype=torch.bool), torch.zeros(0, dtype=torch.int64))
