"""What random splits show of one method: a row of a table, and what pages draw behind it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from scipy.special import stdtrit
from torch import Tensor

from keepcover.guarantee import Guarantee
from keepcover.tasks import Proportion, Spread


class Seen(NamedTuple):
    """Some test points of a split: which they are, the sizes of their sets, whether those hold the truth or which share of it,
    whether every set is full, and the points' classes and groups.
    """

    points: Int[Tensor, " m"]
    size: Tensor
    covered: Tensor
    trivial: bool
    label: Int[Tensor, " m"] | None = None
    group: Int[Tensor, " m"] | None = None


@dataclass
class Breakdown:
    """Test points by class or by group, split by split: how many, how many covered, and the sizes of their sets; and which points
    any split tested, by class.
    """

    count: list[Tensor] = field(default_factory=list)
    hits: list[Tensor] = field(default_factory=list)
    labels: list[Tensor] = field(default_factory=list)
    tested: dict[int, set[int]] = field(default_factory=dict)

    def add(self, size: Tensor, covered: Tensor, of: Tensor, many: int, points: Tensor) -> None:
        for kept, weights in ((self.count, None), (self.hits, covered.double()), (self.labels, size.double())):
            kept.append(torch.bincount(of, weights=weights, minlength=many).cpu())
        for k in range(many):
            self.tested.setdefault(k, set()).update(points[(of == k).to(points.device)].tolist())

    def __call__(self, k: int) -> tuple[list[float], list[float]]:
        """Coverage and mean set size of one class in every split that tested it."""
        tested = [split for split in zip(self.count, self.hits, self.labels, strict=True) if split[0][k]]
        return [float(hits[k] / n[k]) for n, hits, _ in tested], [float(size[k] / n[k]) for n, _, size in tested]

    @property
    def members(self) -> list[int]:
        """The classes that some split tested."""
        return torch.stack(self.count).sum(dim=0).nonzero()[:, 0].tolist() if self.count else []

    def proportion(self, k: int, level: float = 0.05) -> Proportion:
        """Coverage of one class over splits, with an interval that is simultaneous over classes (Bonferroni).

        Two errors, which are independent and so add in squares: which points there are, a Clopper-Pearson interval of as many as any
        split tested; and how they were divided, Student's t times std / sqrt(S) over S splits, which is what calibration and test
        halves leave to luck. Of one split nothing is known of the second.
        """
        shares, count = self(k)[0], len(self.tested[k])
        spread, each = Spread.of(shares), level / len(self.members)
        luck = float(stdtrit(max(len(shares) - 1, 1), 1 - each / 2)) * spread.std / len(shares) ** 0.5
        seen, mean = Proportion.of(round(spread.mean * count), count, each), spread.mean
        low, high = mean - math.hypot(mean - seen.low, luck), mean + math.hypot(seen.high - mean, luck)
        return Proportion(mean, max(low, 0.0), min(high, 1.0), count)

    def worst(self) -> dict[str, Any]:
        """The class with the lowest coverage."""
        k = min(self.members, key=lambda k: sum(self(k)[0]) / len(self(k)[0]))
        return {"of": k, **vars(self.proportion(k))}


@dataclass
class Observed:
    """What the splits saw of one method, collected split by split with :meth:`add`.

    Attributes:
        sizes, coverages: mean size and coverage of each split.
        trivial: splits in which every set was the full one.
        histogram: test sets of each whole size 0, 1, ..., counted over all splits.
        by_class, by_group: the same by true class and by group, where there are some.

    Example:
        >>> seen = Observed()
        >>> one = Seen(torch.arange(2), torch.tensor([1, 2]), torch.tensor([True, True]), False, torch.tensor([0, 1]))
        >>> seen.add(one, classes=2)
        >>> seen.histogram.tolist(), seen.sizes, seen.by_class(1)
        ([0, 1, 1], [1.5], ([1.0], [2.0]))
    """

    sizes: list[float] = field(default_factory=list)
    coverages: list[float] = field(default_factory=list)
    trivial: int = 0
    histogram: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64), compare=False)
    by_class: Breakdown = field(default_factory=Breakdown, compare=False)
    by_group: Breakdown = field(default_factory=Breakdown, compare=False)

    def add(self, seen: Seen, classes: int | None = None, groups: int = 0) -> None:
        """One split's test points, of so many classes and groups."""
        points, size, covered, trivial, label, group = seen
        self.sizes.append(float(size.double().mean()))
        self.coverages.append(float(covered.double().mean()))
        self.trivial += trivial
        if group is not None:
            self.by_group.add(size, covered, group, groups, points)
        if label is None or classes is None:
            return
        counted = torch.bincount(size, minlength=classes + 1).cpu()
        self.histogram = self.histogram + counted if len(self.histogram) else counted
        self.by_class.add(size, covered, label, classes, points)


@dataclass(frozen=True)
class Row:
    """One method's line: sizes and coverages are means and standard deviations over splits.

    ``observed`` holds what every split saw, for pages; :meth:`to_dict` leaves it out. ``asked`` is the method that was asked for,
    which may have chosen another's rule.
    """

    guarantee: Guarantee
    observed: Observed = field(repr=False)
    attack: str = "none"
    asked: str = ""

    @property
    def method(self) -> str:
        return self.guarantee.method

    @property
    def transform(self) -> str:
        return self.guarantee.transform

    @property
    def splits(self) -> int:
        return len(self.observed.sizes)

    @property
    def size(self) -> Spread:
        return Spread.of(self.observed.sizes)

    @property
    def coverage(self) -> Spread:
        return Spread.of(self.observed.coverages)

    @property
    def trivial_splits(self) -> int:
        return self.observed.trivial

    def cost(self, rows: Sequence[Row]) -> float | None:
        """How much larger sets are than those of the marginal promise among these rows, as a share; None where it is missing."""
        marginal = (row for row in rows if not row.guarantee.promise.clauses)
        own = (self.asked, self.transform, self.attack)
        same = next((row.size.mean for row in marginal if (row.asked, row.transform, row.attack) == own), None)
        return self.size.mean / same - 1 if same else None

    def to_dict(self) -> dict[str, Any]:
        """The numbers, for JSON."""
        g = self.guarantee
        noise = g.threat.noise.config()
        return {
            **{name: getattr(g, name) for name in ("method", "score", "transform", "certified", "alpha", "epsilon")},
            "norm": g.threat.norm,
            "noise": noise.pop("name"),
            **noise,
            **({"promise": g.promise.config()} if g.promise.clauses else {}),
            "draws": g.draws,
            "calibration_draws": g.calibration_draws,
            "splits": self.splits,
            "size": vars(self.size),
            "coverage": vars(self.coverage),
            **({"risk": {**vars(self.coverage), "mean": 1 - self.coverage.mean}} if g.shares else {}),
            "trivial_splits": self.trivial_splits,
            "attack": self.attack,
            **self.worst,
        }

    @property
    def worst(self) -> dict[str, Any]:
        """The class and the group with the lowest coverage, each with a simultaneous interval."""
        parts = {"worst_class": self.observed.by_class, "worst_group": self.observed.by_group}
        return {name: by.worst() for name, by in parts.items() if by.count}
