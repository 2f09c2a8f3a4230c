"""How good sets are: coverage, size and their breakdowns, each with the interval that belongs to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from keepcover.bounds import clopper_pearson
from keepcover.errors import InputError


@dataclass(frozen=True)
class Proportion:
    """A share with its two-sided Clopper-Pearson interval: binomial, given this calibration and these images."""

    mean: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, hits: int, count: int, level: float = 0.05) -> Proportion:
        low, high = clopper_pearson(hits, count, level)
        return cls(hits / count, float(low), float(high), count)

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over random splits: how much a number moves when the data are split again."""

    mean: float
    std: float

    @classmethod
    def of(cls, values: Sequence[float] | Tensor) -> Spread:
        values = torch.as_tensor(values, dtype=torch.float64)
        return cls(float(values.mean()), float(values.std()) if len(values) > 1 else 0.0)

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.std:.3f}"


@dataclass(frozen=True)
class Evaluation:
    """Everything measured on one set of labelled predictions (one split).

    Attributes:
        coverage: share of sets that contain the true label, with a 95 % Clopper-Pearson interval.
        size: mean number of labels per set; ``size_std`` is the spread between images.
        singletons, empty, full: shares of sets with one label, none, all. An empty set says that no label fits well enough;
            it counts as missed, and mean sizes below 1 come from such sets.
        histogram: number of sets of each size 0..K.
        by_class: coverage per true class; ``by_size``: coverage per set size. Neither is promised.
        size_by_class: mean number of labels per true class.
    """

    coverage: Proportion
    size: float
    size_std: float
    singletons: float
    empty: float
    full: float
    histogram: tuple[int, ...]
    by_class: dict[int, Proportion]
    by_size: dict[int, Proportion]
    size_by_class: dict[int, float]

    @property
    def size_interval(self) -> tuple[float, float]:
        """95 % normal interval of the mean size, over images like these under this calibration."""
        half = 1.96 * self.size_std / self.coverage.count**0.5
        return max(0.0, self.size - half), self.size + half

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        empty = f"   empty {self.empty:.1%}" if self.empty else ""
        return (
            f"coverage {self.coverage}   size {self.size:.2f}   singletons {self.singletons:.1%}{empty}   "
            f"{self.coverage.count} images"
        )


def as_labels(labels: Any) -> Tensor:
    """Labels as a tensor; names are refused with a word on how to number them.

    Example:
        >>> as_labels(["cat", "dog"])
        Traceback (most recent call last):
        ...
        keepcover.errors.InputError: expected integer class labels, got 'cat'; number them, names, labels = np.unique(labels, return_inverse=True), ...
    """
    try:
        return torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError):
        first = next(iter(np.asarray(labels, dtype=object).ravel().tolist()), None)
        first = str(first) if isinstance(first, str) else first  # not numpy's kind, which prints its type
        raise InputError(
            f"expected integer class labels, got {first!r}; number them, names, labels = np.unique(labels, "
            "return_inverse=True), in the order of the model's outputs, and give class_names=names"
        ) from None


def check_labels(labels: Any, n: int, classes: int, least: int = 0) -> Int[Tensor, " n"]:
    """Labels as int64, or an error that says which of them are wrong."""
    labels = as_labels(labels)
    if labels.ndim != 1 or len(labels) != n:
        raise InputError(f"expected {n} labels in one dimension, got shape {tuple(labels.shape)}")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise InputError(f"expected integer class labels, got dtype {labels.dtype}")
    if len(labels) and not least <= int(labels.min()) <= int(labels.max()) < classes:
        raise InputError(
            f"expected labels between 0 and {classes - 1} (the model has {classes} outputs), got "
            f"{int(labels.min())} to {int(labels.max())}"
        )
    return labels.long()


def measure(mask: Bool[Tensor, "n k"], labels: Any) -> Evaluation:
    """Measure prediction sets against the truth.

    Example:
        >>> mask = torch.tensor([[True, False], [True, True], [False, True], [False, False]])
        >>> print(measure(mask, torch.tensor([0, 1, 0, 1])))
        coverage 0.500 [0.068, 0.932]   size 1.00   singletons 50.0%   empty 25.0%   4 images
    """
    if mask.ndim != 2 or len(mask) == 0:
        raise InputError(f"expected a non-empty mask [images, classes], got shape {tuple(mask.shape)}")
    n, classes = mask.shape
    labels = check_labels(labels, n, classes).to(mask.device)
    hit = mask.gather(1, labels[:, None])[:, 0]
    sizes = mask.sum(dim=1)

    def grouped(groups: Tensor) -> dict[int, Proportion]:
        total = torch.bincount(groups)
        hits = torch.bincount(groups, weights=hit.double()).long()
        return {i: Proportion.of(int(hits[i]), int(total[i])) for i in range(len(total)) if total[i] > 0}

    by_class = grouped(labels)
    labels_in_sets = torch.bincount(labels, weights=sizes.double())
    return Evaluation(
        coverage=Proportion.of(int(hit.sum()), n),
        size=float(sizes.double().mean()),
        size_std=float(sizes.double().std()) if n > 1 else 0.0,
        singletons=float((sizes == 1).double().mean()),
        empty=float((sizes == 0).double().mean()),
        full=float((sizes == classes).double().mean()),
        histogram=tuple(int(v) for v in torch.bincount(sizes, minlength=classes + 1)),
        by_class=by_class,
        by_size=grouped(sizes),
        size_by_class={k: float(labels_in_sets[k]) / share.count for k, share in by_class.items()},
    )
