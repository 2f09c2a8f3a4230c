"""How good sets are: coverage, size and their breakdowns, each with the interval that belongs to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from keepcover.bounds import clopper_pearson, mean_interval
from keepcover.errors import InputError


@dataclass(frozen=True)
class Proportion:
    """A share with its two-sided interval, given this calibration: Clopper-Pearson's for points that are covered or not,
    Hoeffding-Bentkus' for shares of points.
    """

    mean: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, hits: int, count: int, level: float = 0.05) -> Proportion:
        low, high = clopper_pearson(hits, count, level)
        return cls(hits / count, float(low), float(high), count)

    @classmethod
    def of_shares(cls, shares: Tensor, level: float = 0.05) -> Proportion:
        """The mean of one share in [0, 1] per point.

        Example:
            >>> print(Proportion.of_shares(torch.tensor([1.0, 0.5] * 100)))
            0.750 [0.665, 0.823]
        """
        mean = min(max(float(shares.double().mean()), 0.0), 1.0)
        return cls(mean, *mean_interval(mean, len(shares), level), len(shares))

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
class Sized:
    """What every measurement says: the coverage, the mean size, and its spread between points."""

    coverage: Proportion
    size: float
    size_std: float

    @property
    def size_interval(self) -> tuple[float, float]:
        """95 % normal interval of the mean size, over points like these under this calibration."""
        half = 1.96 * self.size_std / self.coverage.count**0.5
        return max(0.0, self.size - half), self.size + half

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Evaluation(Sized):
    """Everything measured on one set of labelled predictions (one split).

    Attributes:
        coverage: share of sets that contain the true label, with a 95 % Clopper-Pearson interval.
        size: mean number of labels per set; ``size_std`` is the spread between images.
        singletons, empty, full: shares of sets with one label, none, all. An empty set says that no label fits well enough;
            it counts as missed, and mean sizes below 1 come from such sets.
        histogram: number of sets of each size 0..K.
        by_class: coverage per true class, with intervals that hold for all classes at once; nothing is promised for them unless
            the promise is per class. ``by_size``: coverage per set size, never promised.
        size_by_class: mean number of labels per true class.
        by_group, size_by_group: the same for groups, where they were given.
    """

    singletons: float
    empty: float
    full: float
    histogram: tuple[int, ...]
    by_class: dict[int, Proportion]
    by_size: dict[int, Proportion]
    size_by_class: dict[int, float]
    by_group: dict[Any, Proportion] = field(default_factory=dict)
    size_by_group: dict[Any, float] = field(default_factory=dict)

    def __str__(self) -> str:
        few = f"singletons {self.singletons:.1%}" + (f"   empty {self.empty:.1%}" if self.empty else "")
        return f"coverage {self.coverage}   size {self.size:.2f}   {few}   {self.coverage.count} images"


@dataclass(frozen=True)
class RiskEvaluation(Sized):
    """Sets against several true things per point.

    Attributes:
        coverage: mean share of a point's true things that its set holds, with a 95 % interval for means of bounded values; a point
            without any has all of them.
        size: mean size; ``size_std`` is the spread between points.
        nothing: points without anything to miss. They are in the mean, as the promise has it.
        by_class: of all true things of each class, the share held; nothing is promised for them.
    """

    nothing: int
    by_class: dict[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, shares: Tensor, size: Tensor, nothing: Tensor, by_class: dict[int, float]) -> RiskEvaluation:
        """From one number per point each."""
        sizes = Spread.of(size)
        return cls(Proportion.of_shares(shares), sizes.mean, sizes.std, int(nothing.sum()), by_class)

    @property
    def risk(self) -> Proportion:
        """The mean share that sets miss: what is promised to be at most alpha."""
        kept = self.coverage
        return Proportion(1 - kept.mean, 1 - kept.high, 1 - kept.low, kept.count)

    def to_dict(self) -> dict[str, Any]:
        return {"risk": asdict(self.risk), **super().to_dict()}

    def __str__(self) -> str:
        nothing = f", {self.nothing} with nothing to miss" if self.nothing else ""
        return f"risk {self.risk}   size {self.size:.4g}   {self.coverage.count} points{nothing}"


def as_labels(labels: Any) -> Tensor:
    """Labels, or another truth, as a tensor; names are refused with a word on how to number them.

    Example:
        >>> as_labels(["cat", "dog"])
        Traceback (most recent call last):
        ...
        keepcover.errors.InputError: expected numbers, such as integer class labels, got 'cat'; number them, names, labels = np.unique(labels, return_inverse=True), ...
    """
    try:
        return torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError):
        first = next(iter(np.asarray(labels, dtype=object).ravel().tolist()), None)
        first = str(first) if isinstance(first, str) else first  # not numpy's kind, which prints its type
        raise InputError(
            f"expected numbers, such as integer class labels, got {first!r}; number them, names, labels = np.unique(labels, "
            "return_inverse=True), in the order of the model's outputs, and give class_names=names"
        ) from None


MOST = 2**31  # classes, where the model has not said how many


def check_labels(labels: Any, n: int, classes: int | None, least: int = 0) -> Int[Tensor, " n"]:
    """Labels as int64, or an error that says which of them are wrong; None where the number of classes is not known yet."""
    labels = as_labels(labels)
    if labels.ndim != 1 or len(labels) != n:
        raise InputError(f"expected {n} labels in one dimension, got shape {tuple(labels.shape)}")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise InputError(f"expected integer class labels, got dtype {labels.dtype}")
    if len(labels) and not least <= int(labels.min()) <= int(labels.max()) < (classes or MOST):
        known = f"{classes - 1} (the model has {classes} outputs)" if classes else "one less than there are classes"
        raise InputError(f"expected labels between 0 and {known}, got {int(labels.min())} to {int(labels.max())}")
    return labels.long()


def check_several(truth: Any, n: int, classes: int | None) -> Bool[Tensor, "n k"]:
    """Which of the classes are true of each point, or an error that says what is wrong.

    Example:
        >>> check_several([[1, 0], [0, 0]], 2, 2)
        tensor([[ True, False],
                [False, False]])
    """
    given = as_labels(truth)
    wanted = f"[{n}, {'K' if classes is None else classes}]"
    if given.ndim != 2 or len(given) != n or classes not in (None, given.shape[1]):
        raise InputError(
            f"expected the true labels as a table {wanted}, one column per output of the model, got {list(given.shape)}; "
            "torch.nn.functional.one_hot(labels, K).bool() makes one of single labels"
        )
    if given.is_floating_point() or given.is_complex() or not bool(((given == 0) | (given == 1)).all()):
        raise InputError(f"expected true labels as booleans, or whole numbers 0 and 1, got {given.dtype}")
    return given.bool()


def measure(mask: Bool[Tensor, "n k"], labels: Any, groups: Sequence[Any] | None = None) -> Evaluation:
    """Measure prediction sets against the truth, and by group where ``groups`` name that of every set.

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

    def grouped(groups: Tensor, at_once: bool = True) -> tuple[dict[int, Proportion], dict[int, float]]:
        total, held = torch.bincount(groups), torch.bincount(groups, weights=sizes.double())
        hits = torch.bincount(groups, weights=hit.double()).long()
        seen = total.nonzero()[:, 0].tolist()
        level = 0.05 / len(seen) if at_once else 0.05
        shares = {i: Proportion.of(int(hits[i]), int(total[i]), level) for i in seen}
        return shares, {i: float(held[i] / total[i]) for i in seen}

    if groups is not None and len(groups) != n:
        raise InputError(f"expected the groups of {n} sets, got {len(groups)}")
    names = list(dict.fromkeys(groups or ()))
    place = torch.tensor([names.index(group) for group in groups or ()], dtype=torch.int64, device=mask.device)
    of_group, size_of_group = grouped(place) if names else ({}, {})
    by_class, size_by_class = grouped(labels)
    size, histogram = Spread.of(sizes), torch.bincount(sizes, minlength=classes + 1).tolist()
    return Evaluation(
        coverage=Proportion.of(int(hit.sum()), n),
        size=size.mean,
        size_std=size.std,
        singletons=histogram[1] / n,
        empty=histogram[0] / n,
        full=histogram[classes] / n,
        histogram=tuple(histogram),
        by_class=by_class,
        by_size=grouped(sizes, at_once=False)[0],
        size_by_class=size_by_class,
        by_group={names[i]: share for i, share in of_group.items()},
        size_by_group={names[i]: size for i, size in size_of_group.items()},
    )
