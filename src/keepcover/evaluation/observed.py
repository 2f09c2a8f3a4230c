"""What random splits saw of one method beyond its two means: every split's numbers, sizes image by image, true classes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from keepcover.tasks.metrics import Spread


@dataclass
class Observed:
    """Collected split by split with :meth:`add`.

    Attributes:
        sizes, coverages: mean size and coverage of each split.
        histogram: test sets of each size 0..K, counted over all splits.
        count, hits, labels: per split and true class, test points, covered ones, and labels in their sets.

    Example:
        >>> seen = Observed()
        >>> seen.add(torch.tensor([[True, False], [True, True]]), torch.tensor([True, True]), torch.tensor([0, 1]))
        >>> seen.histogram.tolist(), seen.sizes, seen.class_size(1).mean
        ([0, 1, 1], [1.5], 2.0)
    """

    sizes: list[float] = field(default_factory=list)
    coverages: list[float] = field(default_factory=list)
    histogram: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))
    count: list[Tensor] = field(default_factory=list)
    hits: list[Tensor] = field(default_factory=list)
    labels: list[Tensor] = field(default_factory=list)

    def add(self, mask: Bool[Tensor, "m k"], covered: Bool[Tensor, " m"], truth: Int[Tensor, " m"]) -> None:
        """One split's test points: their sets, whether those hold the truth, and the truth."""
        size, classes = mask.sum(dim=1), mask.shape[1]
        self.sizes.append(float(mask.sum() / len(mask)))
        self.coverages.append(float(covered.double().mean()))
        counted = torch.bincount(size, minlength=classes + 1).cpu()
        self.histogram = self.histogram + counted if len(self.sizes) > 1 else counted
        for kept, weights in ((self.count, None), (self.hits, covered.double()), (self.labels, size.double())):
            kept.append(torch.bincount(truth, weights=weights, minlength=classes).long().cpu())

    def _by_class(self, what: list[Tensor], k: int) -> Spread:
        """Mean and deviation of a ratio over the splits that tested the class."""
        return Spread.of([float(top[k] / n[k]) for top, n in zip(what, self.count, strict=True) if n[k]])

    def class_coverage(self, k: int) -> Spread:
        """Coverage of one true class over splits."""
        return self._by_class(self.hits, k)

    def class_size(self, k: int) -> Spread:
        """Mean set size of one true class over splits."""
        return self._by_class(self.labels, k)

    @property
    def classes(self) -> list[int]:
        """The true classes that some split tested."""
        return torch.stack(self.count).sum(dim=0).nonzero()[:, 0].tolist()
