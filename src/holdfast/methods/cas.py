"""CAS (Zargarbashi, Akhondzadeh & Bojchevski, ICML 2024) in its test-time form, for comparison."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.bounds import dkw, gaussian_shift, hoeffding
from holdfast.conformal import exact_level
from holdfast.draws import Draws
from holdfast.methods.base import Method


@dataclass(frozen=True)
class CAS(Method):
    r"""Cdf-aware smoothing of the conformity :math:`s = 1 - S`: the attacked mean is bounded through its whole cdf.

    .. math:: \overline{s} = \sum_j (b_{j+1} - b_j)\, \mathrm{shift}(1 - F_{low}(b_j), r)

    on the sorted draws :math:`b_j`, with :math:`F_{low}` the DKW lower bound of the cdf. Include k iff
    :math:`\overline{s} \ge p^*`, the conformal quantile of the calibration means' Hoeffding lower bounds.
    """

    eta: float = 0.001

    name = "cas"
    certified = True

    @property
    def _level(self) -> float:
        return self.eta / (self.setting.n + self.setting.classes)

    def calibration_statistic(self, true: Draws) -> Tensor:
        return self._unit_interval(true).mean

    def threshold(self, statistic: Tensor) -> float:
        rank = math.floor((exact_level(self.setting.alpha) - exact_level(self.eta)) * (len(statistic) + 1))
        if rank < 1:
            return math.inf
        p_star = (
            1 - float(statistic.sort(descending=True).values[rank - 1]) - hoeffding(self.calibration_draws, self._level)
        )
        return math.inf if p_star <= 0 else -p_star

    def always_full(self, threshold: float) -> bool:
        least = gaussian_shift(min(dkw(self.test_draws, self._level), 1.0), self.setting.r)
        return bool(threshold >= -least)

    def test_statistic(self, draws: Draws, v: Tensor | None = None) -> Tensor:
        """Minus the upper bound, so that small means that the label fits."""
        ascending = 1 - self._unit_interval(draws).ascending.flip(-1)
        edges = torch.nn.functional.pad(ascending, (1, 0), value=0.0)
        edges = torch.nn.functional.pad(edges, (0, 1), value=1.0)
        cdf = torch.arange(draws.count + 1, dtype=torch.float64) / draws.count
        low = (cdf - dkw(draws.count, self._level)).clamp_min(0)
        weight = torch.as_tensor(gaussian_shift((1 - low).numpy(), self.setting.r), device=edges.device)
        return -(edges.diff(dim=-1).double() @ weight)
