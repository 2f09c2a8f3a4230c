"""RSCP (Gendler et al. 2022) and RSCP+ (the paper, Section 3): thresholds on the smoothed score, inflated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from keepcover.bounds import bernstein, exact_level, hoeffding
from keepcover.errors import InputError
from keepcover.methods.base import Asked, Method, Rule
from keepcover.methods.holdout import Holdout
from keepcover.promises import Sample
from keepcover.scores import PTT, Draws, Steps


@dataclass(frozen=True)
class RSCP(Method):
    r"""Include k iff :math:`\hat S(\tilde x, k) \le up(\tau)`.

    Not certified: the proof needs the exact smoothed score, the rule uses its Monte Carlo estimate.
    """

    transform: PTT | None = PTT()

    name = "rscp"
    certified = False
    draw_rule = "same"
    needs_concave = True
    clauses = ()

    def fit(self, asked: Asked, holdout: Holdout | None = None) -> Rule:
        return self.rule(asked, self.steps(asked, holdout))

    def rule(self, asked: Asked, transform: Steps | None = None, **parameters: Any) -> Rule:
        return SmoothedRule(self, asked, transform, **parameters)


class SmoothedRule(Rule):
    """The mean score at most what an attack can make of the calibrated mean."""

    def statistic(self, true: Draws) -> Tensor:
        return self._unit_interval(true).mean

    def threshold_of(self, sample: Sample) -> float:
        tau = self.asked.promise.quantile(sample, self.asked.promise.level(self.asked.alpha))
        return tau if math.isinf(tau) else float(self.asked.threat.up(min(tau, 1.0)))

    def always_full(self, threshold: float) -> bool:
        return threshold >= 1

    def test_statistic(self, draws: Draws, v: Tensor | None = None) -> Tensor:
        return self._unit_interval(draws).mean


@dataclass(frozen=True)
class RSCPPlus(Method):
    r"""Include k iff :math:`\hat S(\tilde x, k) - b \le up(\min(\tau + b_H, 1))`, b of Hoeffding or of Bernstein.

    :math:`\tau` is taken at level :math:`1 - \alpha + 2\beta`: the two Monte Carlo errors are paid by a union bound.

    Attributes:
        bound: ``hoeffding``, or ``bernstein`` for the empirical Bernstein radius of that very image and label.
        beta: Monte Carlo failure budget of each side.
    """

    bound: str = "hoeffding"
    beta: float = 0.001
    transform: PTT | None = PTT()

    certified = True
    needs_concave = True

    def __post_init__(self) -> None:
        if self.bound not in ("hoeffding", "bernstein"):
            raise InputError(f"expected the bound hoeffding or bernstein, got {self.bound!r}")
        if not 0 < self.beta < 1:
            raise InputError(f"expected the Monte Carlo budget beta in (0, 1), got {self.beta}")

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"rscp_plus_{self.bound}"

    @property
    def least_draws(self) -> int:  # type: ignore[override]
        return 2 if self.bound == "bernstein" else 1

    @property
    def spent(self) -> float:
        return 2 * self.beta

    def fit(self, asked: Asked, holdout: Holdout | None = None) -> Rule:
        return self.rule(asked, self.steps(asked, holdout))

    def rule(self, asked: Asked, transform: Steps | None = None, **parameters: Any) -> Rule:
        return InflatedRule(self, asked, transform, **parameters)

    def allowance(self, draws: Draws) -> Any:
        """The one-sided Monte Carlo radius of every mean."""
        if self.bound == "bernstein":
            return bernstein(draws.variance, draws.count, self.beta)
        return hoeffding(draws.count, self.beta)

    def least_allowance(self, draws: int) -> float:
        """The smallest radius that can occur."""
        return float(bernstein(0.0, draws, self.beta)) if self.bound == "bernstein" else hoeffding(draws, self.beta)


class InflatedRule(Rule):
    """RSCP+: both means with their Monte Carlo radius."""

    method: RSCPPlus

    def statistic(self, true: Draws) -> Tensor:
        return self._unit_interval(true).mean

    def threshold_of(self, sample: Sample) -> float:
        promise, beta = self.asked.promise, self.method.beta
        tau = promise.quantile(sample, promise.level(self.asked.alpha) - 2 * exact_level(beta))
        if math.isinf(tau):
            return tau
        clean, moved = min(tau + hoeffding(self.calibration_draws, beta), 1.0), promise.tampering(self.asked.threat)
        return float(self.asked.threat.up(clean if moved is None else moved.up(clean)))

    def always_full(self, threshold: float) -> bool:
        return threshold >= 1 - self.method.least_allowance(self.test_draws)

    def test_statistic(self, draws: Draws, v: Tensor | None = None) -> Tensor:
        return self._unit_interval(draws).mean - self.method.allowance(draws)
