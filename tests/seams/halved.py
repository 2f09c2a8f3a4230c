"""A second method, in one file: one draw, at a share of the level that would do."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from torch import Tensor

from keepcover.methods import METHODS, Asked, Holdout, Method, Rule
from keepcover.promises import Sample
from keepcover.scores import Draws, Steps


@dataclass(frozen=True)
class Halved(Method):
    """RCP1 with a level that is ``share`` of its own: valid, and never as good."""

    share: float = 0.5

    name = "halved"
    certified = True
    compares_only = True
    draw_rule = "one"
    needs_concave = True

    def fit(self, asked: Asked, holdout: Holdout | None = None) -> Rule:
        return self.rule(asked)

    def rule(self, asked: Asked, transform: Steps | None = None, **parameters: Any) -> Rule:
        return HalvedRule(self, asked, **parameters)


class HalvedRule(Rule):
    method: Halved

    @property
    def counting(self) -> tuple[int, float]:
        return 0, 0.0

    def statistic(self, true: Draws) -> Tensor:
        return true.values[..., 0]

    def test_statistic(self, draws: Draws, v: Tensor | None = None) -> Tensor:
        return draws.values[..., 0]

    def threshold_of(self, sample: Sample) -> float:
        level = self.asked.threat.most(self.asked.alpha) * self.method.share
        return self.asked.promise.quantile(sample, Fraction(level))


METHODS[Halved.name] = Halved()
