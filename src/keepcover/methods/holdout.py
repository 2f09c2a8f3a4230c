"""What a holdout says about count rules before the calibration set is looked at.

For a grid of thresholds t the holdout is reduced to two tables: how many of an image's draws exceed t, for the true
label and for all labels. Averages over **every** way of picking N of the holdout's M draws then follow from the
hypergeometric law, so a holdout of 500 images with 64 draws speaks as loudly as it can about 1, 4 or 16 draws.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from keepcover.bounds.bounds import hypergeometric
from keepcover.errors import InputError
from keepcover.scores.draws import Draws


class Holdout:
    """Labelled points set aside for tuning, as noisy scores ``[m, K, M]`` of every label.

    Example:
        >>> scores = torch.tensor([[[0.1, 0.2], [0.9, 0.8]], [[0.7, 0.6], [0.3, 0.5]]])    # two points, two labels
        >>> holdout = Holdout(Draws(scores), torch.tensor([0, 1]))
        >>> holdout.size(draws=2, kappa=0)[-1]         # the last threshold is +inf: every label is in
        np.float64(2.0)
    """

    def __init__(self, draws: Draws, labels: Tensor, thresholds: int = 256) -> None:
        if draws.values.ndim != 3 or len(labels) != len(draws):
            raise InputError(
                f"expected holdout scores [points, classes, draws] and as many labels, got {tuple(draws.values.shape)} "
                f"and {len(labels)}"
            )
        self.draws = draws
        self.labels = labels
        self._grid = thresholds

    def __len__(self) -> int:
        return len(self.draws)

    @cached_property
    def true(self) -> Draws:
        """The true labels' draws ``[m, M]``."""
        return self.draws.of_label(self.labels)

    @cached_property
    def thresholds(self) -> Float[ndarray, " t"]:
        """Ascending candidates for t: quantiles of the true labels' scores, dense towards the top, and +inf."""
        pooled = self.true.values.flatten().double().sort().values.cpu().numpy()
        exceed = np.geomspace(0.98, 1 / len(pooled), self._grid)
        at = np.clip((len(pooled) * (1 - exceed)).round().astype(int), 0, len(pooled) - 1)
        return np.append(np.unique(pooled[at]), np.inf)

    @cached_property
    def _tables(self) -> tuple[ndarray, ndarray]:
        """Points (true label) and labels (all) per point whose draws exceed each threshold exactly j times: [t, M+1]."""
        rows = self.draws.values.flatten(0, 1)
        grid = torch.as_tensor(self.thresholds, device=rows.device).to(rows.dtype)
        classes, bins = self.draws.values.shape[1], self.draws.count + 1
        true_row = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        true_row[torch.arange(len(self), device=rows.device) * classes + self.labels] = True
        offset = torch.arange(len(grid), device=rows.device) * bins
        total = torch.zeros(2, len(grid) * bins, device=rows.device, dtype=torch.int64)
        step = max(1, 4_000_000 // len(grid))
        for at in range(0, len(rows), step):
            part = rows[at : at + step].sort(dim=-1).values
            count = self.draws.count - torch.searchsorted(part, grid.expand(len(part), -1).contiguous(), right=True)
            cell = count + offset
            total[0] += torch.bincount(cell.flatten(), minlength=total.shape[1])
            total[1] += torch.bincount(cell[true_row[at : at + step]].flatten(), minlength=total.shape[1])
        every, true = (table.reshape(len(grid), bins).double().cpu().numpy() / len(self) for table in total)
        return true, every

    def count_law(self, draws: int) -> Float[ndarray, "t counts"]:
        """Share of points whose true label exceeds each threshold in exactly j of ``draws`` draws."""
        return self._tables[0] @ hypergeometric(self.draws.count, draws)

    def size(self, draws: int, kappa: int, gamma: float = 0.0) -> Float[ndarray, " t"]:
        """Mean set size of the rule "at most kappa of ``draws`` draws above t" at each threshold."""
        found = hypergeometric(self.draws.count, draws)
        accepted = found[:, : kappa + 1].sum(axis=1)
        if gamma > 0:
            accepted = accepted + gamma * found[:, kappa + 1]
        return self._tables[1] @ accepted
