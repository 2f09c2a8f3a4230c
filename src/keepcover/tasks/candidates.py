"""Tasks whose sets hold candidates, each of which a rule keeps or not: labels, or labels of pixels."""

from __future__ import annotations

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from keepcover.scores import Draws, Reading
from keepcover.scores.draws import on_device, pieces
from keepcover.scores.tally import kept
from keepcover.tasks.base import Rule, Task


class Candidates(Task):
    """:meth:`prepare` gives noisy scores ``[n, ..., N]``; a rule keeps a candidate iff its statistic is at most the threshold."""

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
