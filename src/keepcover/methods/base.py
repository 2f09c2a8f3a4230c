"""The common interface: every method is a statistic of the draws and one threshold.

fit on the holdout -> calibration statistic -> threshold -> test statistic <= threshold
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any, ClassVar

import torch
from jaxtyping import Bool
from torch import Tensor

from keepcover.bounds.bounds import conformal_law, covered_at_most, covered_at_most_given
from keepcover.errors import InputError
from keepcover.guarantee import Guarantee, conformal_rank, exact_level
from keepcover.methods.holdout import Holdout
from keepcover.scores.draws import Draws


@dataclass(frozen=True)
class Setting:
    """What is asked of a method: the promise and the budget, all fixed before calibration data are looked at."""

    alpha: float
    epsilon: float
    sigma: float
    draws: int
    n: int
    classes: int
    calibration_draws: int | None = None
    beta: float = 0.001

    @property
    def r(self) -> float:
        """epsilon / sigma: how many noise standard deviations the attacker may move the input."""
        return self.epsilon / self.sigma if self.sigma else 0.0

    @property
    def cal_draws(self) -> int:
        return self.draws if self.calibration_draws is None else self.calibration_draws


@dataclass(frozen=True)
class Method(ABC):
    """A method fitted to its setting. Subclasses state their theorem in three functions.

    Attributes:
        name: the name in the command line, JSON and saved predictors.
        certified: whether coverage is proved under attack.
        compares_only: uses only the order of scores, so :meth:`Score.order` serves it and PTT cannot help it.
        uses_holdout: looks at the holdout; methods that do not may add it to their calibration points.
        pays_beta: spends the Monte Carlo budget beta.
        draw_rule: ``free``, ``same`` (calibration and test draws must agree for the statistics to be exchangeable) or
            ``one``.
        least_draws: draws per query without which the method is undefined.
    """

    setting: Setting

    name: ClassVar[str]
    certified: ClassVar[bool]
    compares_only: ClassVar[bool] = False
    uses_holdout: ClassVar[bool] = False
    pays_beta: ClassVar[bool] = False
    draw_rule: ClassVar[str] = "free"
    least_draws: ClassVar[int] = 1

    @classmethod
    def fit(cls, setting: Setting, holdout: Holdout | None = None) -> Method:
        """Choose whatever the method may choose, on the holdout alone."""
        return cls(setting)

    @classmethod
    def draws_used(cls, draws: int, calibration_draws: int) -> tuple[int, int]:
        """Model evaluations per query and per calibration point, of those asked for."""
        if draws < cls.least_draws:
            raise InputError(f"{cls.name} needs at least {cls.least_draws} draws per query, got {draws}")
        return {"free": (draws, calibration_draws), "same": (draws, draws), "one": (1, 1)}[cls.draw_rule]

    @property
    def test_draws(self) -> int:
        """Model evaluations per query that this method really uses."""
        return self.draws_used(self.setting.draws, self.setting.cal_draws)[0]

    @property
    def calibration_draws(self) -> int:
        return self.draws_used(self.setting.draws, self.setting.cal_draws)[1]

    @abstractmethod
    def calibration_statistic(self, true: Draws) -> Tensor:
        """What is kept of a calibration point: ``[n, N]`` scores of true labels -> ``[n]`` or ``[n, j]``."""

    @abstractmethod
    def threshold(self, statistic: Tensor) -> float:
        """The threshold that the calibration points' statistics give; +inf means every label."""

    @abstractmethod
    def test_statistic(self, draws: Draws, v: Tensor | None = None) -> Tensor:
        """``[n, K, N]`` scores -> ``[n, K]``; a label is in the set iff its statistic is at most the threshold."""

    def decide(self, draws: Draws, threshold: float, v: Tensor | None = None) -> Bool[Tensor, "n k"]:
        """The prediction sets."""
        return self.test_statistic(draws, v) <= threshold

    @property
    def randomized(self) -> bool:
        """Whether sets depend on ``v``, one uniform number per image."""
        return False

    def always_full(self, threshold: float) -> bool:
        """Whether this threshold keeps every label, whatever the query."""
        return threshold == math.inf

    @property
    def spent(self) -> Fraction:
        """The part of alpha that pays for Monte Carlo error; the conformal quantile is taken at what is left."""
        return 2 * exact_level(self.setting.beta) if self.pays_beta else Fraction(0)

    def p_value(self, covered: int, m: int, n: int) -> float:
        """Probability that a **correct** rule for this setting, calibrated on n points, covers at most this many of m.

        The luck of the calibration draw is included. Nothing here may read what the rule itself computed (a level, a
        threshold): a rule that is wrong must not be compared with its own mistake. By default the law of a conformal
        quantile at alpha less what is :attr:`spent`, which is added again: the query is missed if its clean statistic
        exceeds the quantile or if a Monte Carlo bound fails. Exactly beta-binomial where nothing is spent.
        """
        rank = conformal_rank(n, exact_level(self.setting.alpha) - self.spent)
        if self.spent == 0:
            return covered_at_most(covered, m, n, rank)
        return covered_at_most_given(covered, m, *conformal_law(n, rank, lambda clean: clean + float(self.spent)))

    def supports(self, true: Draws, threshold: float) -> bool:
        """Whether the calibration points support the threshold: computed again from them, it is no larger."""
        again = self.threshold(self.calibration_statistic(true))
        return threshold >= again or math.isclose(threshold, again, rel_tol=1e-9)

    def estimated_size(self, holdout: Holdout) -> float:
        """Mean set size to expect, from the holdout alone (its own points serve as calibration points)."""
        threshold = self.threshold(self.calibration_statistic(holdout.true.first(self.calibration_draws)))
        every = holdout.draws.first(self.test_draws)
        v = torch.linspace(0, 1, len(holdout), device=every.values.device)
        return float(self.decide(every, threshold, v).sum() / len(holdout))

    def guarantee(self, score: str = "hps", transform: str = "none") -> Guarantee:
        s = self.setting
        return Guarantee(
            method=self.name,
            certified=self.certified,
            alpha=s.alpha,
            epsilon=s.epsilon,
            sigma=s.sigma,
            draws=self.test_draws,
            n=s.n,
            calibration_draws=self.calibration_draws,
            beta=s.beta if self.pays_beta else None,
            score=score,
            transform=transform,
        )

    def verify(self) -> None:
        """Raise unless setting and parameters are such that the theorem holds: a file may state anything."""
        self.guarantee()

    def parameters(self) -> dict[str, Any]:
        """What fit chose, as plain JSON values."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "setting"}

    def _unit_interval(self, draws: Draws) -> Draws:
        if draws.unit:
            return draws
        low, high = draws.extremes
        if not (low >= 0 and high <= 1):
            raise InputError(
                f"{self.name} expects scores in [0, 1] (its bound assumes it), got [{low:.3g}, {high:.3g}]; "
                "use transform 'ptt', choose hps/aps/raps, or a count rule (exact, exact_asymmetric)"
            )
        return draws
