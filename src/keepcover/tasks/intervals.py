"""Unions of intervals: how they come out of many intervals, how people read them and how they are measured."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from torch import Tensor

from keepcover.errors import InputError
from keepcover.guarantee import Guarantee
from keepcover.tasks.metrics import Proportion, Sized, Spread
from keepcover.tasks.shown import Shown, leading


def check_values(truth: Any, n: int, targets: int) -> Tensor:
    """True values as float64 [n, targets], or an error that says what is wrong with them."""
    try:
        values = torch.as_tensor(truth)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(
            f"expected numbers to predict, got {type(truth).__name__}; columns of text are no targets"
        ) from None
    if values.ndim == 1 and targets == 1:
        values = values[:, None]
    if values.shape != (n, targets) or values.is_complex() or values.dtype == torch.bool:
        wanted = f"[{n}]" if targets == 1 else f"[{n}, {targets}]"
        raise InputError(f"expected true values {wanted}, got {values.dtype} {tuple(torch.as_tensor(truth).shape)}")
    if not values.isfinite().all():
        raise InputError("expected finite true values, got NaN or infinity; drop those points first")
    return values.double()


def depth(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The 2N ends of intervals ``[..., N]`` in ascending order, +1 or -1 for each, and in how many intervals one is behind it.

    Intervals are closed, so starts come before ends where they meet. One whose ends are the wrong way round, or NaN, holds
    nothing: its ends are at infinity and count 0.
    """
    right = low <= high
    ends = torch.cat([low.where(right, torch.inf), high.where(right, torch.inf)], dim=-1)
    steps = torch.cat([right.int(), -right.int()], dim=-1)
    # A stable sort leaves starts, which come first, before ends of the same value.
    ends, order = ends.sort(dim=-1, stable=True)
    steps = steps.gather(-1, order)
    return ends, steps, steps.cumsum(dim=-1)


def deep(low: Tensor, high: Tensor, need: Tensor, pieces: int) -> Tensor:
    """Where at least ``need`` of the intervals ``[..., N]`` hold a point, as a union ``[..., pieces, 2]``, NaN where there are
    fewer pieces; everything where none is needed.

    A piece starts where the depth rises to ``need`` and ends where it falls below. Each piece but the last uses an interval
    up, so N - need + 1 pieces will do.

    Example:
        >>> low, high = torch.tensor([[0.0, 2.0, 1.0]]), torch.tensor([[3.0, 4.0, 0.0]])      # the last holds nothing
        >>> deep(low, high, torch.tensor([2]), 1), deep(low, high, torch.tensor([1]), 2)[0, 0]
        (tensor([[[2., 3.]]]), tensor([0., 4.]))
    """
    ends, steps, found = depth(low, high)
    need = need[..., None]
    union = ends.new_full((*ends.shape[:-1], pieces + 1, 2), torch.nan)
    for side, at in enumerate(((steps > 0) & (found == need), (steps < 0) & (found == need - 1))):
        place = torch.where(at, at.cumsum(dim=-1) - 1, pieces)  # the last place is for what starts and ends nothing
        union[..., side].scatter_(-1, place, ends)
    union = union[..., :pieces, :]
    everything = torch.full_like(union, torch.nan)
    everything[..., 0, 0], everything[..., 0, 1] = -torch.inf, torch.inf
    return torch.where((need <= 0)[..., None], everything, union)


def lengths(union: Tensor) -> Tensor:
    """The length of every union ``[..., pieces, 2]`` of disjoint pieces.

    Example:
        >>> lengths(torch.tensor([[0.0, 1.0], [2.0, 2.5], [torch.nan, torch.nan]]))
        tensor(1.5000)
    """
    return (union[..., 1] - union[..., 0]).nan_to_num(nan=0.0, posinf=torch.inf).sum(dim=-1)


@dataclass(frozen=True)
class IntervalEvaluation(Sized):
    """Intervals against the truth.

    Attributes:
        coverage: share of points whose every target is in its union, with a 95 % Clopper-Pearson interval.
        size: mean length, over targets where there are several; ``size_std`` is the spread between points.
        median: of the lengths, which one whole line does not make infinite.
        empty, full: shares of points with an empty union, and with one of infinite length.
    """

    median: float
    empty: float
    full: float

    def __str__(self) -> str:
        return f"coverage {self.coverage}   length {self.size:.4g}   median {self.median:.4g}   {self.coverage.count} points"


@dataclass(frozen=True, repr=False)
class PredictionIntervals(Shown):
    """Unions of intervals for n points and D targets: ``pieces[i, d, j]`` is (lower, upper), NaN where there is no j-th piece.

    Example:
        >>> from keepcover import calibrate_outputs
        >>> predictor = calibrate_outputs(torch.zeros(99, 1), torch.arange(99.0), task="regression", method="cp", epsilon=0, sigma=1)
        >>> sets = predictor.predict_outputs(torch.zeros(1, 1))
        >>> sets.hull.round().tolist(), sets.contains([90.0]).item(), sets.contains([-91.0]).item()
        ([[-89.0, 89.0]], False, False)
    """

    pieces: Float[Tensor, "n targets pieces 2"]
    guarantee: Guarantee
    draws_used: Int[Tensor, " n"] | None = None

    @property
    def lengths(self) -> Float[Tensor, "n targets"]:
        """The length of every target's union."""
        return lengths(self.pieces)

    @property
    def length(self) -> Float[Tensor, " n"]:
        """The length of every point's union, averaged over targets."""
        return self.lengths.mean(dim=1)

    size = length  # type: ignore[override]

    @property
    def hull(self) -> Tensor:
        """The smallest interval around each union, [n, 2], or [n, targets, 2] where there are several; NaN where it is empty.
        It is a superset, so it keeps the promise too.
        """
        low, high = self.pieces.unbind(dim=-1)
        ends = low.where(~low.isnan(), torch.inf).amin(dim=-1), high.where(~high.isnan(), -torch.inf).amax(dim=-1)
        hull = torch.stack(ends, dim=-1).where((ends[0] <= ends[1])[..., None], torch.nan)
        return hull[:, 0] if hull.shape[1] == 1 else hull

    @property
    def trivial(self) -> Bool[Tensor, " n"]:
        """Unions without an end: true, but they say nothing."""
        return self.lengths.isinf().any(dim=1)

    @property
    def empty(self) -> Bool[Tensor, " n"]:
        """Points without any value: every one misses too many draws."""
        return self.pieces.isnan().all(dim=-1).all(dim=-1).any(dim=1)

    def contains(self, truth: Any) -> Bool[Tensor, " n"]:
        """Whether every target of a point is in its union."""
        y = check_values(truth, *self.pieces.shape[:2]).to(self.pieces.device)[..., None]
        return ((self.pieces[..., 0] <= y) & (y <= self.pieces[..., 1])).any(dim=-1).all(dim=1)

    covers = contains

    def measure(self, truth: Any) -> IntervalEvaluation:
        """Coverage and length against the truth."""
        coverage, size = Proportion.of(int(self.contains(truth).sum()), len(self)), Spread.of(self.length)
        std, median = size.std if math.isfinite(size.mean) else 0.0, float(self.length.double().median())
        empty, full = (float(which.double().mean()) for which in (self.empty, self.trivial))
        return IntervalEvaluation(coverage, size.mean, std, median, empty, full)

    def rows(self) -> list[dict[str, Any]]:
        """One dictionary per point: its intervals (one list per target where there are several), their length, and whether they
        say nothing. An end at infinity is None, which JSON has a word for.
        """
        rows = []
        for point, size, trivial in zip(self.pieces.tolist(), self.length.tolist(), self.trivial.tolist(), strict=True):
            own = [[[*map(_number, piece)] for piece in target if piece[0] == piece[0]] for target in point]
            rows.append({"intervals": own[0] if len(own) == 1 else own, "size": _number(size), "trivial": trivial})
        return rows

    @property
    def traits(self) -> ndarray:
        """The leading bits of the length and of the middle, which need no unit to be chosen."""
        middle = self.hull.mean(dim=-1).view(len(self), -1).mean(dim=1)
        return np.stack([leading(one.double().cpu().numpy()) for one in (self.length, middle)], axis=1)

    def __repr__(self) -> str:
        mean, kept = float(self.length.mean()) if len(self) else 0.0, f"{100 * (1 - self.guarantee.alpha):g} %"
        head = f"{len(self)} prediction intervals, mean length {mean:.4g}; {kept} {self.held}"
        return self.listed(head, (str(row["intervals"]) for row in self[:8].rows()))


def _number(value: float) -> float | None:
    return value if abs(value) < math.inf else None
