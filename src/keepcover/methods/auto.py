"""The better of the certificates, as the holdout sees it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from keepcover.errors import InputError
from keepcover.methods.bands import AllBands
from keepcover.methods.base import Asked, Method, Rule
from keepcover.methods.counting import Chosen
from keepcover.methods.exact import Exact, ExactAsymmetric
from keepcover.methods.holdout import Holdout
from keepcover.methods.one_draw import OneDrawControl
from keepcover.noise import Noise
from keepcover.scores import Steps
from keepcover.tasks import Task


@dataclass(frozen=True)
class Auto(Chosen):
    """The better of both certificates by expected set size on the holdout: the hull with as many calibration draws as the
    majorant, the hull with as many as per query, or the majorant. Where nothing is random, the deterministic rule.
    """

    name = "auto"
    things = "any"

    def suited(self, task: Task) -> Method:
        """Itself where a point has one thing to cover, else the first certificate that the task allows."""
        if task.single:
            return self
        return next((one for one in (ExactAsymmetric(self.randomize), OneDrawControl()) if not task.unfit(one)), self)

    def usual_calibration_draws(self, draws: int) -> int:
        return ExactAsymmetric().usual_calibration_draws(draws)

    def fit(self, asked: Asked, holdout: Holdout | None = None) -> Rule:
        held = self.held(holdout)
        if asked.threat.noise.deterministic:
            return AllBands().fit(asked, held)
        short = replace(asked, calibration_draws=min(asked.draws, asked.per_point))
        rules: list[Rule] = [Exact(self.randomize).fit(each, held) for each in dict.fromkeys((asked, short))]
        rules.append(ExactAsymmetric(self.randomize).fit(asked, held))
        return min(rules, key=lambda rule: rule.estimated_size(held))

    def unfit(self, noise: Noise) -> str:
        return ""

    def check(self, asked: Asked, task: Task) -> None:
        (AllBands().check if asked.threat.noise.deterministic else super().check)(asked, task)

    def rule(self, asked: Asked, transform: Steps | None = None, **parameters: Any) -> Rule:
        raise InputError("auto chooses among exact, exact_asymmetric and bands: a rule is of one of them")
