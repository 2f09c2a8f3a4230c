"""Tasks whose sets hold candidates, each of which a rule keeps or not: labels, or labels of pixels."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, TypeVar

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from keepcover.errors import InputError
from keepcover.scores import Draws, Reading
from keepcover.scores.draws import on_device, pieces
from keepcover.scores.tally import kept
from keepcover.tasks.base import Rule, Task

Own = TypeVar("Own", bound="Candidates")


class Candidates(Task):
    """:meth:`prepare` gives noisy scores ``[n, ..., N]``; a rule keeps a candidate iff its statistic is at most the threshold.

    Attributes:
        axes: what the axes of outputs are; the third one has the candidates.
        fewest: candidates without which there is nothing to choose among.
        class_names: for reading sets.
        classes: K, once outputs have been seen.
    """

    axes: ClassVar[tuple[str, ...]] = ("images", "draws", "classes")
    fewest: ClassVar[int] = 2
    class_names: tuple[str, ...] | None
    classes: int | None

    def __post_init__(self) -> None:
        if (names := self.class_names) is not None:
            object.__setattr__(self, "class_names", tuple(map(str, names)))
            if self.classes not in (None, len(names)):
                raise InputError(f"expected {self.classes} class names, one per output of the model, got {len(names)}")

    @property
    def candidates(self) -> int | None:
        return self.classes

    def seen(self: Own, outputs: Tensor) -> Own:
        classes, what = outputs.shape[2] if outputs.ndim == len(self.axes) else 0, self.axes[2]
        if classes < self.fewest or not outputs.is_floating_point():
            raise InputError(
                f"expected float logits [{', '.join(self.axes)}] of at least {self.fewest} {what}, got {outputs.dtype} "
                f"{tuple(outputs.shape)}"
            )
        if self.classes not in (None, classes):
            raise InputError(f"the predictor was calibrated on {self.classes} {what}, the model returned {classes}")
        return self if self.classes else replace(self, classes=classes)  # type: ignore[type-var]

    def measured(self, candidates: Tensor) -> Tensor:
        """Those of ``[n, ...]`` candidates whose number is the size of a set; all of them unless said otherwise."""
        return candidates

    def unit(self, candidates: Tensor) -> float:
        """What one candidate adds to the size."""
        return 1.0

    def summary(self, prepared: Draws, rule: Rule, v: Tensor) -> Tensor:
        return rule.test_statistic(prepared.first(rule.test_draws), v)

    def inside(self, summary: Tensor, rule: Rule, threshold: Tensor) -> Tensor:
        own = on_device(threshold, summary)
        return summary <= (own.view(*own.shape, *[1] * (summary.ndim - 2)) if own.ndim == 2 else own)

    def sizes(self, inside: Tensor) -> Tensor:
        size = self.measured(inside).flatten(1).sum(dim=1)
        return size if self.unit(inside) == 1 else size * self.unit(inside)

    def sizes_on_grid(self, summary: Tensor, rule: Rule) -> Tensor:
        own = self.measured(summary).flatten(1)
        return kept(own) * (own.shape[1] * self.unit(summary))

    def union(self, first: Tensor, second: Tensor) -> Tensor:
        return first | second

    def profile(self, outputs: Tensor, u: Tensor, thresholds: ndarray) -> ndarray:
        total, unit = np.zeros(len(thresholds) * (outputs.shape[1] + 1)), 1.0
        for part in pieces(outputs):
            scores = self.prepare(outputs[part], Reading(order=True), u[part]).values
            unit = self.unit(scores[..., 0])
            rows = self.measured(scores).flatten(0, -2)
            total += exceedances(rows, thresholds).double().cpu().numpy()
        return total.reshape(len(thresholds), -1) * (unit / len(outputs))


def exceedances(rows: Tensor, thresholds: ndarray, weight: Tensor | None = None) -> Tensor:
    """How many rows ``[r, N]`` exceed each threshold in exactly j of their draws, flat ``[thresholds * (N + 1)]``; or how much
    they weigh together.

    Example:
        >>> exceedances(torch.tensor([[0.1, 0.9], [0.2, 0.3]]), np.array([0.5, np.inf])).view(2, 3)
        tensor([[1, 1, 0],
                [2, 0, 0]])
    """
    grid = torch.as_tensor(thresholds, device=rows.device).to(rows.dtype)
    bins = rows.shape[1] + 1
    offset = torch.arange(len(grid), device=rows.device) * bins
    kind = torch.int64 if weight is None else torch.float64
    total = torch.zeros(len(grid) * bins, device=rows.device, dtype=kind)
    step = max(1, 4_000_000 // len(grid))
    for at in range(0, len(rows), step):
        part = rows[at : at + step].sort(dim=-1).values.contiguous()
        count = rows.shape[1] - torch.searchsorted(part, grid.expand(len(part), -1).contiguous(), right=True)
        own = None if weight is None else weight[at : at + step, None].double().expand_as(count).flatten()
        total += torch.bincount((count + offset).flatten(), own, minlength=len(total))
    return total
