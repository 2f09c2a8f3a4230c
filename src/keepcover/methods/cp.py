"""Split conformal prediction: valid on clean data, promising nothing under attack."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from keepcover.methods.base import Explanation, Fit, Method, Rule
from keepcover.promises import Sample
from keepcover.scores import PTT, Draws


class QuantileRule(Rule):
    """The threshold is a conformal quantile of the calibration statistics, at what is left of alpha."""

    def threshold_of(self, sample: Sample) -> float:
        return self.asked.promise.quantile(sample, self.method.left(self.asked))


class FirstDraw(QuantileRule):
    """Keep a candidate iff the score of its one draw is at most the quantile."""

    @property
    def counting(self) -> tuple[int, float]:
        return 0, 0.0

    def statistic(self, true: Draws) -> Tensor:
        return true.values[..., 0]

    def explain(self, draws: Draws, threshold: Tensor, fit: Fit, v: Tensor | None = None) -> Explanation:
        return Explanation.of(fit(draws.values[..., 0].double()), fit(threshold.double()), "probability")


class MeanRule(QuantileRule):
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
