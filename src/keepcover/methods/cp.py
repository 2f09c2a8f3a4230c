"""Split conformal prediction: valid on clean data, promising nothing under attack."""

from __future__ import annotations

from torch import Tensor

from keepcover.guarantee import conformal_quantile
from keepcover.methods.base import Method
from keepcover.scores.draws import Draws


class SplitCP(Method):
    """Vanilla conformal prediction on one evaluation of the model, clean (sigma = 0) or with one noisy draw."""

    name = "cp"
    certified = False
    compares_only = True
    draw_rule = "one"

    def calibration_statistic(self, true: Draws) -> Tensor:
        return true.values[..., 0]

    def threshold(self, statistic: Tensor) -> float:
        return conformal_quantile(statistic, self.setting.alpha)

    def test_statistic(self, draws: Draws, v: Tensor | None = None) -> Tensor:
        return draws.values[..., 0]


class SmoothedCP(Method):
    """Conformal prediction on the Monte Carlo mean of the score: the sets that robustness is paid from."""

    name = "cp_smoothed"
    certified = False
    draw_rule = "same"

    def calibration_statistic(self, true: Draws) -> Tensor:
        return true.mean

    def threshold(self, statistic: Tensor) -> float:
        return conformal_quantile(statistic, self.setting.alpha)

    def test_statistic(self, draws: Draws, v: Tensor | None = None) -> Tensor:
        return draws.mean
