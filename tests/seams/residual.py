"""A second task, in one file: regression with the absolute residual, |y - f(x)|. Sets are unions of intervals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from keepcover.errors import InputError
from keepcover.guarantee import Guarantee
from keepcover.methods import Rule
from keepcover.scores import Draws, Items, Reading
from keepcover.tasks import TASKS, Proportion, Task


@dataclass(frozen=True)
class Intervals:
    """Unions of intervals: ``pieces[i, j]`` is (lower, upper), NaN where there is none."""

    pieces: Tensor
    guarantee: Guarantee
    draws_used: Tensor | None = None

    @property
    def size(self) -> Tensor:
        return length(self.pieces)

    @property
    def traits(self) -> ndarray:
        return self.size.double().log2().clamp(0, 31).int().numpy()[:, None]

    def covers(self, truth: Tensor) -> Tensor:
        y = torch.as_tensor(truth)[:, None]
        return ((self.pieces[..., 0] <= y) & (y <= self.pieces[..., 1])).any(dim=1)

    def measure(self, truth: Tensor) -> Measured:
        return Measured(Proportion.of(int(self.covers(truth).sum()), len(self)), float(self.size.mean()))

    def rows(self) -> list[dict[str, Any]]:
        return [{"size": float(size)} for size in self.size]

    def __len__(self) -> int:
        return len(self.pieces)


@dataclass(frozen=True)
class Measured:
    coverage: Proportion
    size: float

    def to_dict(self) -> dict[str, Any]:
        return {"coverage": vars(self.coverage), "size": self.size}


def length(pieces: Tensor) -> Tensor:
    """The length of a union of intervals, sorted by their lower ends."""
    lower, upper = pieces.nan_to_num(nan=-torch.inf).unbind(dim=-1)
    order = lower.argsort(dim=1)
    lower, upper = lower.gather(1, order), upper.gather(1, order)
    reached = torch.cat([torch.full_like(upper[:, :1], -torch.inf), upper.cummax(dim=1).values[:, :-1]], dim=1)
    return (upper - torch.maximum(lower, reached)).nan_to_num(nan=0.0).clamp_min(0).sum(dim=1)


@dataclass(frozen=True)
class Residual(Task):
    """y is kept iff at most kappa of the N intervals [f_j - t, f_j + t] miss it."""

    name = "residual"
    words = "the union of intervals contains the true value of a query"

    def seen(self, outputs: Tensor) -> Residual:
        if outputs.ndim == 3 and outputs.shape[2] == 1:
            return self
        if outputs.ndim != 2:
            raise InputError(f"expected one number per draw, got {tuple(outputs.shape)}")
        return self

    def check_truth(self, truth: Any, n: int) -> Tensor:
        values = torch.as_tensor(truth)
        if values.shape != (n,) or not values.isfinite().all():
            raise InputError(f"expected {n} finite numbers, got shape {tuple(values.shape)}")
        return values.float()

    @property
    def candidates(self) -> int | None:
        return None

    def items(self, outputs: Tensor, truth: Tensor, reading: Reading, u: Tensor) -> Items:
        return Items.single(Draws((truth[:, None] - outputs.flatten(1)).abs()))

    def prepare(self, outputs: Tensor, reading: Reading, u: Tensor) -> Tensor:
        return outputs.flatten(1)

    def summary(self, prepared: Tensor, rule: Rule, v: Tensor) -> Tensor:
        if rule.counting is None:
            raise InputError(f"{rule.name} does not count draws; use exact, exact_asymmetric, rcp1 or cp")
        kappa, gamma = rule.counting
        allowed = kappa + (v < gamma).to(prepared.dtype)
        return torch.cat([prepared[:, : rule.test_draws].sort(dim=1).values, allowed[:, None]], dim=1)

    def inside(self, summary: Tensor, rule: Rule, threshold: Tensor) -> Tensor:
        f, allowed, draws = summary[:, :-1], summary[:, -1:].long(), summary.shape[1] - 1
        i, t = torch.arange(draws), threshold.to(summary.dtype)
        low = f.gather(1, (i + draws - allowed - 1).clamp(0, draws - 1)) - t
        valid = (i <= allowed) & (low <= f + t)
        pieces = torch.stack([low, f + t], dim=2)
        return torch.where(valid[..., None], pieces, torch.nan)

    def sizes(self, inside: Tensor) -> Tensor:
        return length(inside)

    def union(self, first: Tensor, second: Tensor) -> Tensor:
        return torch.cat([first, second], dim=1)

    def sets(self, inside: Tensor, guarantee: Guarantee, draws_used: Tensor | None = None) -> Intervals:
        return Intervals(inside, guarantee, draws_used)

    def profile(self, outputs: Tensor, u: Tensor, thresholds: ndarray) -> ndarray:
        f = outputs.flatten(1).double().sort(dim=1).values.numpy()
        n, m = f.shape
        table = np.zeros((len(thresholds), m + 1))
        for row, t in enumerate(thresholds):
            if np.isinf(t):
                table[row, 0] = np.inf
                continue
            ends = np.concatenate([f - t, f + t], axis=1)
            order = ends.argsort(axis=1, kind="stable")
            steps = np.where(order < m, 1, -1).cumsum(axis=1)[:, :-1]
            gaps = np.diff(np.take_along_axis(ends, order, axis=1), axis=1)
            table[row] = np.bincount((m - steps).ravel(), weights=gaps.ravel(), minlength=m + 1) / n
        table[:, m] = np.inf
        return table

    def probe(self) -> Tensor:
        return torch.zeros(1)

    @classmethod
    def from_config(cls, config: dict[str, Any], score: Any = None) -> Residual:
        return cls()

    def config(self) -> dict[str, Any]:
        return {"name": self.name}


TASKS[Residual.name] = Residual
