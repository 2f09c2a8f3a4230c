"""Split conformal prediction: valid on clean data, promising nothing under attack."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from keepcover.methods.base import Asked, Explanation, Method, Rule
from keepcover.methods.holdout import Holdout
from keepcover.promises import Sample
from keepcover.scores import PTT, Draws, Steps


class QuantileRule(Rule):
    """The threshold is a conformal quantile of the calibration statistics at alpha."""

    def threshold_of(self, sample: Sample) -> float:
        return self.asked.promise.quantile(sample, self.asked.promise.level(self.asked.alpha))


@dataclass(frozen=True)
class SplitCP(Method):
    """Vanilla conformal prediction on one evaluation of the model, clean (no noise) or with one noisy draw."""

    name = "cp"
    certified = False
    compares_only = True
    counts = True
    draw_rule = "one"

    def fit(self, asked: Asked, holdout: Holdout | None = None) -> Rule:
        return self.rule(asked)

    def rule(self, asked: Asked, transform: Steps | None = None, **parameters: Any) -> Rule:
        return FirstDraw(self, asked, **parameters)


class FirstDraw(QuantileRule):
    """Keep a candidate iff the score of its one draw is at most the quantile."""

    @property
    def counting(self) -> tuple[int, float]:
        return 0, 0.0

    def statistic(self, true: Draws) -> Tensor:
        return true.values[..., 0]

    def test_statistic(self, draws: Draws, v: Tensor | None = None) -> Tensor:
        return draws.values[..., 0]

    def explain(
        self, draws: Draws, threshold: Tensor, fit: Callable[[Tensor], Tensor], v: Tensor | None = None
    ) -> Explanation:
        return Explanation.of(fit(draws.values[..., 0].double()), fit(threshold.double()), "probability")


@dataclass(frozen=True)
class SmoothedCP(Method):
    """Conformal prediction on the Monte Carlo mean of the score: the sets that robustness is paid from."""

    transform: PTT | None = PTT()

    name = "cp_smoothed"
    certified = False
    draw_rule = "same"

    def fit(self, asked: Asked, holdout: Holdout | None = None) -> Rule:
        return self.rule(asked, self.steps(asked, holdout))

    def rule(self, asked: Asked, transform: Steps | None = None, **parameters: Any) -> Rule:
        return MeanRule(self, asked, transform, **parameters)


class MeanRule(QuantileRule):
    """Keep a candidate iff its mean noisy score is at most the quantile of such means."""

    def statistic(self, true: Draws) -> Tensor:
        return true.mean

    def test_statistic(self, draws: Draws, v: Tensor | None = None) -> Tensor:
        return draws.mean
