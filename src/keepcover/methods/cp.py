"""Conformal prediction on clean data: quantiles of scores, or of smoothed scores."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from keepcover.methods.base import Explanation, Fit, Method, Rule
from keepcover.promises import Sample
from keepcover.scores import PTT, Draws


class FirstDraw(Rule):
    """Keep a candidate iff the score of its one draw is at most the quantile."""

    @property
    def counting(self) -> tuple[int, float]:
        return 0, 0.0

    def statistic(self, true: Draws) -> Tensor:
        return true.values[..., 0]

    def explain(self, draws: Draws, threshold: Tensor, fit: Fit, v: Tensor | None = None) -> Explanation:
        return Explanation.of(fit(draws.values[..., 0].double()), fit(threshold.double()), "probability")


class MeanRule(Rule):
    """Keep a candidate iff its mean noisy score is at most the quantile of such means."""

    def statistic(self, true: Draws) -> Tensor:
        return true.mean


@dataclass(frozen=True)
class SplitCP(Method):
    """Vanilla conformal prediction on one evaluation of the model, clean (no noise) or with one noisy draw."""

    name = "cp"
    makes = FirstDraw
    certified = False
    compares_only = True
    counts = True
    draw_rule = "one"


@dataclass(frozen=True)
class SmoothedCP(Method):
    """Conformal prediction on the Monte Carlo mean of the score: the sets that robustness is paid from."""

    transform: PTT | None = PTT()

    name = "cp_smoothed"
    makes = MeanRule
    certified = False
    draw_rule = "same"


class SmoothedRule(Rule):
    """The mean score at most what an attack can make of the calibrated mean."""

    def statistic(self, true: Draws) -> Tensor:
        return self._unit_interval(true).mean

    def threshold_of(self, sample: Sample) -> float:
        tau = super().threshold_of(sample)
        return tau if math.isinf(tau) else self.attacked(tau)

    def attacked(self, tau: float) -> float:
        """The threshold that a finite quantile of means gives."""
        return float(self.asked.threat.up(min(tau, 1.0)))

    def always_full(self, threshold: float) -> bool:
        return threshold >= 1
