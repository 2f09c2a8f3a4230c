"""RSCP (Gendler et al. 2022) and RSCP+ (the paper, Section 3): thresholds on the smoothed score, inflated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from keepcover.bounds import bernstein, hoeffding
from keepcover.errors import InputError
from keepcover.methods.base import Method
from keepcover.methods.cp import SmoothedRule
from keepcover.scores import PTT, Draws


@dataclass(frozen=True)
class RSCP(Method):
    r"""Include k iff :math:`\hat S(\tilde x, k) \le up(\tau)`.

    Not certified: the proof needs the exact smoothed score, the rule uses its Monte Carlo estimate.
    """

    transform: PTT | None = PTT()

    name = "rscp"
    makes = SmoothedRule
    certified = False
    draw_rule = "same"
    needs_concave = True
    clauses = ()


class InflatedRule(SmoothedRule):
    """RSCP+: both means with their Monte Carlo radius."""

    method: RSCPPlus

    def attacked(self, tau: float) -> float:
        clean = min(tau + hoeffding(self.calibration_draws, self.method.beta), 1.0)
        moved = self.asked.promise.tampering(self.asked.threat)
        return super().attacked(clean if moved is None else moved.up(clean))

    def always_full(self, threshold: float) -> bool:
        return threshold >= 1 - self.method.radius(0.0, self.test_draws)

    def test_statistic(self, draws: Draws, v: Tensor | None = None) -> Tensor:
        variance = draws.variance if self.method.bound == "bernstein" else None
        return self.statistic(draws) - self.method.radius(variance, draws.count)


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

    makes = InflatedRule
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

    def radius(self, variance: Any, draws: int) -> Any:
        """The one-sided Monte Carlo radius of a mean of draws with this variance, which Hoeffding does not ask for."""
        return bernstein(variance, draws, self.beta) if self.bound == "bernstein" else hoeffding(draws, self.beta)
