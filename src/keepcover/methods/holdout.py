"""What a holdout says about rules before the calibration set is looked at.

For a grid of thresholds t the holdout is reduced to two tables: how often the truth's draws exceed t, and how large the set
of candidates is whose draws exceed t so often. Averages over **every** way of picking N of the holdout's M draws then follow
from the hypergeometric law, so a holdout of 500 images with 64 draws speaks as loudly as it can about 1, 4 or 16 draws.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from keepcover.bounds import hypergeometric
from keepcover.errors import InputError
from keepcover.scores import PTT, Items, Reading, Steps
from keepcover.tasks import Task
from keepcover.tasks.candidates import exceedances

ORDER = Reading(order=True)
THRESHOLDS = 256


def between(table: ndarray, at: float) -> Any:
    """What a table of thresholds has at one of them, or between two.

    Example:
        >>> between(np.array([1.0, 2.0, np.inf]), 0.5), between(np.array([1.0, 2.0, np.inf]), 2)
        (np.float64(1.5), np.float64(inf))
    """
    low = int(at)
    return table[low] if low == at else (low + 1 - at) * table[low] + (at - low) * table[low + 1]


class Holdout:
    """Labelled points set aside for tuning, as noisy outputs ``[m, M, ...]``.

    Args:
        task: what the outputs mean.
        outputs: noisy outputs.
        truth: of every point.
        u: the random number of every point that a randomised score uses; zeros by default.
        items: what must not be missed, where it was read before outputs were thinned.

    Example:
        >>> from keepcover.tasks import Classification
        >>> logits = torch.tensor([[[2.0, 0.0], [1.0, 0.0]], [[0.0, 1.0], [0.0, 3.0]]])    # two points, two draws, two labels
        >>> holdout = Holdout(Classification().seen(logits), logits, torch.tensor([0, 1]))
        >>> holdout.size(draws=2, kappa=0)[-1]         # the last threshold is +inf: every label is in
        np.float64(2.0)
    """

    def __init__(
        self, task: Task, outputs: Tensor, truth: Tensor, u: Tensor | None = None, items: Items | None = None
    ) -> None:
        if len(outputs) == 0 or len(truth) != len(outputs):
            raise InputError(f"expected holdout outputs and as many truths, got {len(outputs)} and {len(truth)}")
        self.task, self.outputs, self.truth = task, outputs, truth
        self.u = torch.zeros(len(outputs), device=outputs.device) if u is None else u
        self._items: dict[Reading, Any] = {} if items is None else {ORDER: items}
        self._steps: dict[tuple[PTT, float], Steps] = {}

    def __len__(self) -> int:
        return len(self.outputs)

    @property
    def draws(self) -> int:
        """M, the noisy outputs per point."""
        return self.outputs.shape[1]

    def items(self, reading: Reading = ORDER) -> Items:
        """What must not be missed, as a rule reads it."""
        if reading not in self._items:
            self._items[reading] = self.task.items(self.outputs, self.truth, reading, self.u)
        return self._items[reading]

    @property
    def reference(self) -> Tensor:
        """Scores of the truth, one draw each, of points whose truth a set can hold: what PTT is fitted on."""
        first = self.items().draws.values[:, 0]
        return first[first < torch.inf] if self.task.open_labels else first

    def steps(self, ptt: PTT, alpha: float) -> Steps:
        """PTT fitted here, one value for all methods that ask for the same."""
        if (ptt, alpha) not in self._steps:
            self._steps[ptt, alpha] = ptt.fit(self.reference, alpha)
        return self._steps[ptt, alpha]

    @cached_property
    def _pooled(self) -> ndarray:
        """All scores of the truth, ascending."""
        return self.items().draws.values.flatten().double().sort().values.cpu().numpy()

    @cached_property
    def thresholds(self) -> Float[ndarray, " t"]:
        """Ascending candidates for t: quantiles of the truth's scores, dense towards the top, and +inf."""
        pooled = self._pooled
        if not len(pooled):
            return np.array([-np.inf, np.inf])  # nothing to miss anywhere
        exceed = np.geomspace(0.98, 1 / len(pooled), THRESHOLDS)
        at = np.clip((len(pooled) * (1 - exceed)).round().astype(int), 0, len(pooled) - 1)
        return np.append(np.unique(pooled[at]), np.inf)

    def crossing(self, excess: ndarray) -> Any:
        """Where along the thresholds an excess ``[t, ...]`` falls to 0, between two of them: one whole step is several percent of a set
        of many labels, more than good rules differ by. Where the truth's scores have no value between two thresholds no
        calibration will find one there, and beyond the last finite one nothing lies.
        """
        fits, last = excess <= 0, len(excess) - 1
        first = np.where(fits.any(axis=0), fits.argmax(axis=0), last)
        before, after = (np.take_along_axis(excess, np.maximum(at, 0)[None], axis=0)[0] for at in (first - 1, first))
        inside = self._dense[first]
        return first - np.where(inside, after / np.where(inside, after - before, 1.0), 0.0)

    @cached_property
    def _dense(self) -> ndarray:
        """Whether scores of the truth lie between each threshold and the one before it."""
        pooled, grid = self._pooled, self.thresholds[:-1]
        low, high = np.searchsorted(pooled, grid[:-1], side="right"), np.searchsorted(pooled, grid[1:])
        return np.concatenate([[False], low < high, [False]])

    @cached_property
    def _true(self) -> ndarray:
        """Share of points whose truth exceeds each threshold in exactly j draws, [t, M+1]; where points have several things to
        cover, the mean weight of those.
        """
        items = self.items()
        found = exceedances(items.draws.values, self.thresholds, items.weight).view(len(self.thresholds), -1)
        return found.double().cpu().numpy() / items.points

    @cached_property
    def _profile(self) -> ndarray:
        """Mean measure of the candidates that exceed each threshold in exactly j draws, [t, M+1]."""
        return self.task.profile(self.outputs, self.u, self.thresholds)

    def count_law(self, draws: int) -> Float[ndarray, "t counts"]:
        """Share of points, by weight, whose truth exceeds each threshold in exactly j of ``draws`` draws."""
        return self._true @ hypergeometric(self.draws, draws)

    def size(self, draws: int, kappa: int, gamma: float = 0.0) -> Float[ndarray, " t"]:
        """Mean set size of the rule "at most kappa of ``draws`` draws above t" at each threshold."""
        found = hypergeometric(self.draws, draws)
        accepted = found[:, : kappa + 1].sum(axis=1)
        if gamma > 0:
            accepted = accepted + gamma * found[:, kappa + 1]
        # A candidate that the rule never keeps may have infinite measure: the far ends of a line.
        return np.where(accepted > 0, self._profile, 0.0) @ accepted
