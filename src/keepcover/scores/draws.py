"""Scores under noise and the few things every rule asks of them: mean, variance, order statistics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from keepcover.errors import InputError

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


def in_pieces(values: Tensor, function: Callable[..., Tensor], *beside: Tensor) -> Tensor:
    """``function`` of some points at a time, see :func:`pieces`, and of what is known beside them.

    Example:
        >>> in_pieces(torch.ones(5, 2**20), lambda part: part.sum(dim=1))[0]
        tensor(1048576.)
    """
    return joined([function(values[part], *(other[part] for other in beside)) for part in pieces(values)])


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
            raise InputError(f"expected noisy scores [..., draws], at least one draw, got shape {tuple(values.shape)}")
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
            raise InputError(f"asked for {count} draws, only {self.count} are there; smooth with more or ask for fewer")
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
class Reading:
    """Which noisy scores a rule reads.

    Attributes:
        order: an increasing function of the score will do, as rules that only compare say.
        transform: what is applied to every draw first; None for nothing. It reads the order.
    """

    order: bool
    transform: Callable[[Tensor], Tensor] | None = None
