"""What random splits show of one method: a row of a table, and what pages draw behind it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from keepcover.guarantee import Guarantee
from keepcover.tasks import Spread


@dataclass(frozen=True)
class Row:
    """One method's line: sizes and coverages are means and standard deviations over splits.

    ``observed`` holds what every split saw, for pages; :meth:`to_dict` leaves it out.
    """

    guarantee: Guarantee
    splits: int
    size: Spread
    coverage: Spread
    trivial_splits: int
    attack: str = "none"
    observed: Observed | None = field(default=None, repr=False, compare=False)

    @property
    def method(self) -> str:
        return self.guarantee.method

    @property
    def transform(self) -> str:
        return self.guarantee.transform

    def to_dict(self) -> dict[str, Any]:
        """The numbers, for JSON."""
        g = self.guarantee
        noise = g.threat.noise.config()
        return {
            "method": g.method,
            "score": g.score,
            "transform": g.transform,
            "certified": g.certified,
            "alpha": g.alpha,
            "epsilon": g.epsilon,
            "norm": g.threat.norm,
            "noise": noise.pop("name"),
            **noise,
            **({"promise": g.promise.config()} if g.promise.clauses else {}),
            "draws": g.draws,
            "calibration_draws": g.calibration_draws,
            "splits": self.splits,
            "size": vars(self.size),
            "coverage": vars(self.coverage),
            "trivial_splits": self.trivial_splits,
            "attack": self.attack,
        }


@dataclass
class Observed:
    """Collected split by split with :meth:`add`.

    Attributes:
        sizes, coverages: mean size and coverage of each split.
        histogram: test sets of each whole size 0, 1, ..., counted over all splits.
        count, hits, labels: per split and true class, test points, covered ones, and sizes of their sets.

    Example:
        >>> seen = Observed()
        >>> seen.add(torch.tensor([1, 2]), torch.tensor([True, True]), torch.tensor([0, 1]), 2)
        >>> seen.histogram.tolist(), seen.sizes, seen.class_size(1).mean
        ([0, 1, 1], [1.5], 2.0)
    """

    sizes: list[float] = field(default_factory=list)
    coverages: list[float] = field(default_factory=list)
    histogram: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    count: list[Tensor] = field(default_factory=list)
    hits: list[Tensor] = field(default_factory=list)
    labels: list[Tensor] = field(default_factory=list)

    def add(
        self,
        size: Tensor,
        covered: Bool[Tensor, " m"],
        group: Int[Tensor, " m"] | None = None,
        groups: int | None = None,
    ) -> None:
        """One split's test points: the sizes of their sets, whether those hold the truth, and the true class."""
        self.sizes.append(float(size.double().mean()))
        self.coverages.append(float(covered.double().mean()))
        if group is None or groups is None:
            return
        counted = torch.bincount(size, minlength=groups + 1).cpu()
        self.histogram = self.histogram + counted if len(self.histogram) else counted
        for kept, weights in ((self.count, None), (self.hits, covered.double()), (self.labels, size.double())):
            kept.append(torch.bincount(group, weights=weights, minlength=groups).long().cpu())

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
        return torch.stack(self.count).sum(dim=0).nonzero()[:, 0].tolist() if self.count else []
