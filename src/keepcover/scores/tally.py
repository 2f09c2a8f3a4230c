r"""Several things to cover per point: their losses on a grid of thresholds that was fixed before any data.

A point's loss at a threshold t is :math:`\sum_k w_k\,g(count_k(t))` over its items, :math:`\sum_k w_k \le 1`. It does not increase
with t, so conformal risk control may take t from any set of values that was fixed beforehand and has +inf in it: among those
where the mean loss fits into its budget it takes the smallest, and the proof, which compares that value with the one that n + 1
exchangeable points would have chosen from the same set, asks nothing else of the set. The set here is the numbers of seven
significant bits (:data:`GRID`): a threshold is at most 1.6 % larger than it could be, whatever the scale of the scores.

Rounded so, a score is one of some two thousand values. How much weight has at least j of its N draws above each of them is then
all that a rule asks of the items of any number of points: memory grows neither with points nor with items.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keepcover.errors import InputError
from keepcover.scores.draws import Draws

# Bits after the leading one; powers of two between which numbers differ from 0 and infinity.
BITS, SMALLEST, LARGEST = 6, -6, 9
TOGETHER = 2**22  # numbers sorted into the grid at a time


def _numbers() -> Tensor:
    steps = 1 + torch.arange(2**BITS, dtype=torch.float64) / 2**BITS
    above = torch.cat([*(2.0**power * steps for power in range(SMALLEST, LARGEST)), steps[:1] * torch.inf])
    return torch.cat([-above.flip(0), steps[:1] * 0, above])


GRID: Float[Tensor, " grid"] = _numbers()
"""Thresholds to choose from, ascending: -inf, the numbers of seven significant bits from 1/64 to 512 and their negatives, 0, +inf."""


def places(values: Tensor, grid: Tensor = GRID) -> Int[Tensor, "..."]:
    """How many numbers of the grid lie strictly below each value: the i-th is exceeded iff i is smaller.

    Example:
        >>> places(torch.tensor([0.0, 1e-9, torch.inf])) - places(torch.tensor(0.0))
        tensor([  0,   1, 961])
    """
    return torch.searchsorted(grid.to(values.device, values.dtype), values.contiguous())


def kept(values: Float[Tensor, "n many"]) -> Float[Tensor, "n grid"]:
    """The share of every row's values that are at most each number of the grid.

    Example:
        >>> kept(torch.tensor([[1.0, 2.0]]))[0, places(torch.tensor([1.0, 1.5, 2.0]))]
        tensor([0.5000, 0.5000, 1.0000], dtype=torch.float64)
    """
    rows = torch.arange(len(values), device=values.device)[:, None].expand_as(values)
    return 1 - _above(places(values), rows, torch.ones_like(values), len(values)) / values.shape[1]


def _above(place: Tensor, row: Tensor, weight: Tensor, rows: int, bins: int = len(GRID)) -> Float[Tensor, "rows bins"]:
    """The weight of values above each number of the grid, by row; ``place`` is that of :func:`places`."""
    index = (row * (bins + 1) + place).flatten()
    found = torch.bincount(index, weight.double().flatten(), rows * (bins + 1)).double().view(rows, bins + 1)
    return found.flip(1).cumsum(dim=1).flip(1)[:, 1:]


def _summed(weight: Tensor, row: Tensor, rows: int) -> Tensor:
    """The weight of every row."""
    return torch.zeros(rows, dtype=torch.float64, device=weight.device).index_add_(0, row, weight.double())


def _check_losses(g: Sequence[float], draws: int) -> None:
    if len(g) != draws + 1:
        raise InputError(f"expected a loss for each of 0 to {draws} draws above the threshold, got {len(g)}")


def _parts(values: Tensor) -> list[slice]:
    step = max(1, TOGETHER // max(1, values.shape[1]))
    return [slice(at, at + step) for at in range(0, len(values), step)]


@dataclass(frozen=True)
class Items:
    """What must not be missed, under noise: one true label per image, or several things of different weight.

    Attributes:
        draws: noisy scores ``[items, N]``.
        points: how many points they belong to; more than items where some points have nothing to miss.
        weight: of each item in its point's loss, at most 1 per point together; None where every point has one item.
        owner: the point of each item, 0 and up, where items have weights.
        label, group: the class and the group of every item's point; None where no promise asks.
        batch: which entry of a predictor's history brought every item; None where one did.

    Example:
        >>> items = Items(Draws(torch.tensor([[1.0], [2.0]])), 3, torch.full((2,), 0.5), torch.tensor([1, 1]))
        >>> items.losses((0.0, 1.0))[:, places(torch.tensor([0.0, 1.0, 2.0]))].tolist()
        [[0.0, 0.0, 0.0], [1.0, 0.5, 0.0], [0.0, 0.0, 0.0]]
    """

    draws: Draws
    points: int
    weight: Float[Tensor, " items"] | None = None
    owner: Int[Tensor, " items"] | None = None
    label: Int[Tensor, " items"] | None = None
    group: Int[Tensor, " items"] | None = None
    batch: Int[Tensor, " items"] | None = None

    grid = GRID

    @classmethod
    def single(cls, draws: Draws) -> Items:
        """One item per point."""
        return cls(draws, len(draws))

    @classmethod
    def joined(cls, parts: Sequence[Items]) -> Items:
        """Weighted items of several batches of points, one after the other."""
        before = [0, *accumulate(part.points for part in parts)]
        owners = [part.weights[1] + start for part, start in zip(parts, before[:-1], strict=True)]
        draws = Draws(torch.cat([part.draws.values for part in parts]))
        return cls(draws, before[-1], torch.cat([part.weights[0] for part in parts]), torch.cat(owners))

    @property
    def several(self) -> bool:
        """Whether points may have any number of items."""
        return self.weight is not None

    @property
    def weights(self) -> tuple[Tensor, Tensor]:
        """The weight and the point of every item."""
        if self.weight is None or self.owner is None:
            raise InputError("expected items with weights and owners: these have one item per point")
        return self.weight, self.owner

    @property
    def count(self) -> Int[Tensor, " points"]:
        """Points behind every row of :meth:`losses`."""
        return torch.ones(self.points, dtype=torch.int64)

    def to(self, device: str | torch.device) -> Items:
        """Weighted items on another device."""
        draws, (weight, owner) = Draws(self.draws.values.to(device), self.draws.unit), self.weights
        return replace(self, draws=draws, weight=weight.to(device), owner=owner.to(device))

    def first(self, count: int) -> Items:
        """The first ``count`` draws of every item."""
        return replace(self, draws=self.draws.first(count))

    def losses(self, g: Sequence[float]) -> Float[Tensor, "points grid"]:
        r"""Every point's :math:`\sum_k w_k\,g(count_k(t))` at the thresholds of the grid."""
        (weight, owner), ascending, draws = self.weights, self.draws.ascending, self.draws.count
        _check_losses(g, draws)
        rise = torch.tensor(g, dtype=torch.float64, device=ascending.device).diff()
        steps = rise.nonzero()[:, 0]
        found = (float(g[0]) * _summed(weight, owner, self.points))[:, None].expand(-1, len(GRID)).clone()
        for part in _parts(ascending):
            # At least j draws exceed t iff the j-th largest does.
            own = ascending[part][:, draws - 1 - steps]
            weights = weight[part].double()[:, None] * rise[steps]
            found += _above(places(own), owner[part][:, None].expand_as(own), weights, self.points)
        return found

    def total(self, group: Tensor | None = None) -> Tally:
        """What rules ask of all these points together, in one row, or of those of every group that occurs."""
        (weight, owner), ascending, draws = self.weights, self.draws.ascending, self.draws.count
        # Without groups one row, however few the points.
        names, row = torch.zeros(1), torch.zeros(self.points, dtype=torch.int64)
        if group is not None:
            names, row = group.unique(return_inverse=True)
        rows, row = len(names), row.to(ascending.device)
        above = torch.zeros(rows * draws, len(GRID), dtype=torch.float64, device=ascending.device)
        position = torch.arange(draws, device=ascending.device).flip(0)  # ascending[:, N - j] is the j-th largest
        for part in _parts(ascending):
            lines = (row[owner[part]] * draws)[:, None] + position
            above += _above(places(ascending[part]), lines, weight[part][:, None].expand_as(lines), rows * draws)
        above = above.view(rows, draws, -1).transpose(1, 2).contiguous().cpu()
        count, group = row.bincount(minlength=rows).cpu(), None if group is None else names
        return Tally(above, _summed(weight, row[owner], rows).cpu(), count, GRID, group)

    def thinned(self, most: int) -> Items:
        """At most so many items of every point, at random, with the weight of all of its items."""
        weight, owner = self.weights
        order = torch.randperm(len(owner), generator=torch.Generator().manual_seed(0)).to(owner.device)
        order = order[owner[order].argsort(stable=True)]
        sizes = owner.bincount(minlength=self.points)
        within = torch.arange(len(owner), device=owner.device) - (sizes.cumsum(0) - sizes)[owner[order]]
        kept = order[within < most].sort().values
        total, left = (weight.new_zeros(self.points).index_add_(0, owner[at], weight[at]) for at in (order, kept))
        share = (total / left)[owner[kept]]
        return replace(self, draws=self.draws[kept], weight=weight[kept] * share, owner=owner[kept])

    @property
    def scores(self) -> Tensor:
        """Noisy scores ``[items, N]``."""
        return self.draws.values

    def tensors(self) -> dict[str, Any]:
        """What a file keeps of items, one per point."""
        return {"calibration": self.scores, "label": self.label, "group": self.group, "batch": self.batch}

    def unordered(self) -> Items:
        """In the order of their first draw: what is saved need not tell which point was which."""
        return self[self.draws.values[:, 0].argsort()]

    def numbered(self, batch: int) -> Items:
        """With the number of their batch, where they have none yet."""
        return self if self.batch is not None else replace(self, batch=torch.full((len(self.draws),), batch))

    def of_batches(self, numbers: Sequence[int]) -> Items:
        """Those of some batches."""
        assert self.batch is not None
        return self[torch.isin(self.batch, torch.tensor(numbers))]

    def plus(self, other: Items) -> Items:
        """Both, one item per point each."""
        made: list[Any] = [
            None if theirs is None else torch.cat([own.to(theirs.device), theirs])
            for own, theirs in zip(self.tensors().values(), other.tensors().values(), strict=True)
        ]
        return Items(Draws(made[0]), self.points + other.points, None, None, *made[1:])

    def __getitem__(self, some: Tensor) -> Items:
        """Some of the items, one for each of their points."""
        kept: list[Any] = [None if own is None else own[some.to(own.device)] for own in self.tensors().values()]
        return Items(Draws(kept[0], self.draws.unit), len(kept[0]), None, None, *kept[1:])


@dataclass(frozen=True)
class Tally:
    """The items of many points, as much of them as rules ask for: rows of points that are counted together.

    Attributes:
        above: the weight of items with at least j = 1..N draws above each number of the grid.
        weight: of all items of a row.
        count: points of every row, those without items among them.
        grid: thresholds to choose from, ascending, the last one safe for every point.
        group: of every row's points, where a promise is per group.
        batch: which entry of a predictor's history brought every row; None where one did.

    Example:
        >>> items = Items(Draws(torch.tensor([[0.0, 3.0]])), 2, torch.ones(1), torch.tensor([0]))    # the second point is empty
        >>> one = items.total()
        >>> losses = one.losses((0.0, 0.5, 1.0))[0]
        >>> losses[places(torch.tensor([-1.0, 0.0, 3.0]))], one.points
        (tensor([1.0000, 0.5000, 0.0000], dtype=torch.float64), 2)
    """

    above: Float[Tensor, "rows grid draws"]
    weight: Float[Tensor, " rows"]
    count: Int[Tensor, " rows"]
    grid: Float[Tensor, " grid"]
    group: Int[Tensor, " rows"] | None = None
    batch: Int[Tensor, " rows"] | None = None

    several = True
    label = None

    @property
    def points(self) -> int:
        """All points, those without items among them."""
        return int(self.count.sum())

    @property
    def draws(self) -> int:
        return self.above.shape[2]

    @property
    def scores(self) -> Tensor:
        """Weights above the grid, ``[rows, grid, N]``."""
        return self.above

    def tensors(self) -> dict[str, Tensor | None]:
        """What a file keeps; the grid is the task's."""
        columns = self._columns
        return {"calibration": columns.pop("above"), **columns}

    @property
    def _columns(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "grid"}

    def check(self) -> None:
        """Raise unless this may be what :meth:`Items.total` counted: weights of 1 per point at most, fewer above more."""
        most = torch.cat([self.weight[:, None, None].expand(-1, len(self.grid), 1), self.above], dim=2)
        fits = self.above.shape[:2] == (len(self.count), len(self.grid)) and self.weight.shape == self.count.shape
        if not (
            fits
            and bool((self.above >= 0).all() and (self.above[:, -1] <= 0).all())
            and bool((self.above.diff(dim=1) <= 1e-9).all() and (most.diff(dim=2) <= 1e-9).all())
            and bool((self.weight <= self.count.double() * (1 + 1e-9)).all() and (self.count > 0).all())
        ):
            raise InputError("expected weights above thresholds that fall with both, at most 1 per point; count again")

    def unordered(self) -> Tally:
        """As it is: rows do not tell their points."""
        return self

    def first(self, count: int) -> Tally:
        """The same: which draws were the first is not known any more."""
        if count != self.draws:
            raise InputError(f"the calibration points were counted with {self.draws} draws each, asked for {count}")
        return self

    def losses(self, g: Sequence[float]) -> Float[Tensor, "rows grid"]:
        r"""Every row's sum of :math:`w\,g(count(t))` on the grid."""
        _check_losses(g, self.draws)
        values = torch.tensor(g, dtype=torch.float64)
        return values[0] * self.weight[:, None] + self.above @ values.diff()

    def total(self, group: Tensor | None = None) -> Tally:
        """Rows of single points as one, or as one per group."""
        return replace(self, group=group, batch=None).merged()

    def merged(self) -> Tally:
        """Rows of the same group and batch as one."""
        keys = [torch.zeros_like(self.count) if key is None else key for key in (self.group, self.batch)]
        names, place = torch.stack(keys, dim=1).unique(dim=0, return_inverse=True)

        def summed(values: Tensor) -> Tensor:
            return values.new_zeros(len(names), *values.shape[1:]).index_add_(0, place, values)

        group, batch = (None if own is None else names[:, at] for at, own in enumerate((self.group, self.batch)))
        return Tally(summed(self.above), summed(self.weight), summed(self.count), self.grid, group, batch)

    def plus(self, other: Tally) -> Tally:
        """The rows of both, those of the same group and batch as one."""
        if not torch.equal(self.grid, other.grid) or self.draws != other.draws:
            raise InputError("expected points that were counted on the same thresholds with as many draws")
        columns, theirs = self._columns, other._columns
        for name, own in columns.items():
            columns[name] = None if own is None or theirs[name] is None else torch.cat([own, theirs[name]])
        return replace(self, **columns).merged()

    def numbered(self, batch: int) -> Tally:
        """With the number of their batch, where rows have none yet."""
        return self if self.batch is not None else replace(self, batch=torch.full_like(self.count, batch))

    def of_batches(self, numbers: Sequence[int]) -> Tally:
        """The rows of some batches."""
        assert self.batch is not None
        return self[torch.isin(self.batch, torch.tensor(numbers))]

    def __getitem__(self, some: Tensor) -> Tally:
        """Some of the rows."""
        return replace(self, **{name: value[some] for name, value in self._columns.items() if value is not None})
