"""Scores under noise and the few things every rule asks of them: mean, variance, order statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keepcover.errors import InputError
from keepcover.scores.tally import GRID, Tally, losses_of

PIECE = 2**18  # numbers looked at together on a CPU


def pieces(values: Tensor) -> list[slice]:
    """So many points at a time that what is allocated in between stays in a CPU's cache.

    Fresh memory is what large computations wait for on a CPU; a GPU has its own pool and takes all at once.

    Example:
        >>> pieces(torch.ones(5, PIECE // 2))
        [slice(0, 2, None), slice(2, 4, None), slice(4, 6, None)]
    """
    if values.device.type != "cpu" or values.numel() <= PIECE:
        return [slice(0, len(values))]
    rows = max(1, PIECE // values[0].numel())
    return [slice(at, at + rows) for at in range(0, len(values), rows)]


def in_pieces(values: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """``function`` of some points at a time, see :func:`pieces`.

    Example:
        >>> in_pieces(torch.ones(5, 2**20), lambda part: part.sum(dim=1))[0]
        tensor(1048576.)
    """
    return joined([function(values[part]) for part in pieces(values)])


def joined(parts: list[Tensor]) -> Tensor:
    """What pieces gave, as one; no copy where there was one piece."""
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def on_device(threshold: Tensor, like: Tensor) -> Tensor:
    """A threshold beside what it is compared with. One number stays on the CPU: a GPU takes it along without a wait."""
    return threshold if threshold.ndim == 0 else threshold.to(like.device)


class Draws:
    """Noisy scores ``[..., N]``, draws last, with reductions computed once and kept together with N.

    Items that must not be missed carry ``[items, N]``, candidates of a query ``[n, K, N]``. Because mean, variance and N
    travel in one value, a bound can never be paired with another image's mean. ``unit`` says that the scores are known to
    lie in [0, 1], so that they need not be looked at (on a GPU, waited for).

    Example:
        >>> draws = Draws(torch.tensor([[3.0, 1.0, 2.0]]))
        >>> draws.mean, draws.largest(1), draws.largest(4)
        (tensor([2.], dtype=torch.float64), tensor([3.]), tensor([-inf]))
    """

    def __init__(self, values: Tensor, unit: bool = False) -> None:
        if values.ndim < 2 or values.shape[-1] < 1:
            raise InputError(
                f"expected noisy scores [..., draws] with at least one draw, got shape {tuple(values.shape)}"
            )
        self.values, self.unit = values, unit
        self._fewer: dict[int, Draws] = {}

    @property
    def count(self) -> int:
        """N, the number of draws."""
        return self.values.shape[-1]

    def __len__(self) -> int:
        return self.values.shape[0]

    def __getitem__(self, index: Tensor | slice) -> Draws:
        """Some of the points, all of their draws."""
        return Draws(self.values[index], self.unit)

    def first(self, count: int) -> Draws:
        """The first ``count`` draws of every point."""
        if count > self.count:
            raise InputError(
                f"asked for {count} draws, only {self.count} are there; smooth with more draws or ask for fewer"
            )
        if count == self.count:
            return self
        if count not in self._fewer:  # kept, with whatever is computed from it: several rules may ask for the same
            self._fewer[count] = Draws(self.values[..., :count].contiguous(), self.unit)
        return self._fewer[count]

    def of_label(self, labels: Tensor) -> Draws:
        """``[n, K, N]`` -> ``[n, N]``: the draws of one label per point."""
        return Draws(self.values[torch.arange(len(labels), device=labels.device), labels], self.unit)

    @cached_property
    def mean(self) -> Tensor:
        # In float64: Monte Carlo means are compared to thresholds, and a reduction's rounding depends on its order.
        return in_pieces(self.values, lambda values: values.mean(dim=-1, dtype=torch.float64))

    @cached_property
    def variance(self) -> Tensor:
        """Unbiased sample variance."""
        if self.count < 2:
            raise InputError("a sample variance needs at least 2 draws")
        return in_pieces(self.values, lambda values: values.double().var(dim=-1))

    @cached_property
    def extremes(self) -> tuple[float, float]:
        """The smallest and the largest score."""
        low, high = self.values.aminmax()
        return float(low), float(high)

    @cached_property
    def ascending(self) -> Tensor:
        return in_pieces(self.values, lambda values: values.sort(dim=-1).values)

    def largest(self, position: int) -> Tensor:
        """The ``position``-th largest draw (1 is the maximum); -inf past the last, where nothing is left to exceed."""
        if position < 1:
            raise InputError(f"expected a position of at least 1, got {position}")
        if position > self.count:
            return torch.full_like(self.values[..., 0], -torch.inf)
        if "ascending" in self.__dict__:
            return self.ascending[..., self.count - position]
        if position == 1:
            return self.values.amax(dim=-1)
        return in_pieces(self.values, lambda values: values.kthvalue(self.count - position + 1, dim=-1).values)

    def above(self, threshold: float | Tensor) -> Tensor:
        """How many draws exceed the threshold, one number or one that broadcasts against ``[...]``."""
        if isinstance(threshold, Tensor) and threshold.ndim:
            threshold = threshold.to(self.values.device)[..., None]
        return (self.values > threshold).sum(dim=-1)


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
        >>> from keepcover.scores.tally import places
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
        return losses_of(self.draws.ascending, *self.weights, self.points, g)

    def total(self, group: Tensor | None = None) -> Tally:
        """What rules ask of all these points together, or of those of every group."""
        return Tally.of(self.draws.ascending, *self.weights, self.points, group)

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
class Reading:
    """Which noisy scores a rule reads.

    Attributes:
        order: an increasing function of the score will do, as rules that only compare say.
        transform: what is applied to every draw first; None for nothing. It reads the order.
    """

    order: bool
    transform: Callable[[Tensor], Tensor] | None = None
