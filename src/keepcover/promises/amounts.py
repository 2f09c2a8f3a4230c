"""Clauses whose value is one number: how surely, and despite how much."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from scipy.special import betainc

from keepcover.assumption import Assumption
from keepcover.bounds import exact_level, hoeffding_bentkus
from keepcover.bounds.concentration import bisect
from keepcover.errors import InputError
from keepcover.noise import Threat
from keepcover.promises.base import Clause, number, smallest


class Amount(Clause):
    """A clause whose value is one number: :attr:`expected` says in words what :meth:`fits`."""

    @abstractmethod
    def fits(self, value: float) -> bool:
        """Whether the clause may have this value."""

    def __post_init__(self) -> None:
        if not self.fits(self.stated()):
            raise InputError(f"expected {self.expected}, got {self.stated()}")

    @classmethod
    def of(cls, value: Any) -> Clause:
        return cls(number(value, cls.expected))  # type: ignore[call-arg]


@dataclass(frozen=True)
class Confidence(Amount):
    r"""With probability at least 1 - delta over the calibration data, coverage is at least 1 - alpha.

    A quantile takes the smallest rank k with :math:`P[\mathrm{Beta}(k, n+1-k) \ge 1 - \alpha'] \ge 1 - \delta`: that is the law
    of the share of fresh points below the k-th of n. Risk control takes the largest sum that a Hoeffding-Bentkus test still
    tells from a mean of alpha. The test depends on the losses through their sum alone, which falls as t grows, so the smallest
    t that fits is one beyond which every t fits.

    Example:
        >>> Confidence(0.05).rank(90, 99, Fraction(1, 10))
        95
    """

    delta: float

    keyword = "delta"
    expected = "delta strictly between 0 and 1; 0.05 promises with confidence 95 %"
    settles = ("the calibration data",)
    assumptions = (
        Assumption(
            "Calibration points and query are independent draws from one law, not only exchangeable.",
            "you",
            "Draw calibration points independently: no repeats, no bursts of one client, no neighbouring frames of a video.",
        ),
    )

    def fits(self, value: float) -> bool:
        return 0 < value < 1

    def rank(self, rank: int, n: int, level: Fraction) -> int:
        # Rounded against us: betainc is right to about 1e-13.
        most = self.delta * (1 - 1e-9)
        return max(rank, smallest(lambda k: betainc(k, n + 1 - k, float(1 - level)) <= most, 1, n + 1))

    def budget(self, budget: float, n: int | float, level: Fraction, top: float) -> float:
        mean, points = min(float(level) / top, 1.0), round(n)
        if hoeffding_bentkus(0.0, points, mean) > self.delta:
            return min(budget, -1.0)
        told, _ = bisect(lambda share: hoeffding_bentkus(share, points, mean) <= self.delta, 0.0, 1.0)
        return min(budget, told * n * top)

    def confidence(self) -> str:
        return f"with confidence {100 * (1 - self.delta):.6g} % over the calibration data"


@dataclass(frozen=True)
class Poisoned(Amount):
    """Even if up to ``poisoned`` calibration points were replaced, added or removed at will, their noise known.

    An order statistic of n points is at least the one m ranks lower of the clean points; a sum of losses is at most
    m times the largest loss below that of the clean points. With thresholds per class every class pays for all m.
    """

    poisoned: int

    keyword = "poisoned"
    absent = 0
    expected = "poisoned as a number of calibration points, 0 or more"
    departs = True
    without = "calibration points that were replaced, added or removed: not one"
    assumptions = (
        Assumption(
            "The holdout is clean, or was altered without knowledge of the calibration points; thresholds per class or "
            "group allow all altered points to be in one of them.",
            "you",
            "Keep the holdout where those who collect calibration points cannot write; its altered points cannot be told apart.",
        ),
    )

    def fits(self, value: float) -> bool:
        return value >= 0

    @classmethod
    def of(cls, value: Any) -> Clause:
        points = number(value, cls.expected)
        if points % 1 != 0:  # of infinity too
            raise InputError(f"expected {cls.expected}, got {value!r}")
        return cls(round(points))

    def rank(self, rank: int, n: int, level: Fraction) -> int:
        return rank + self.poisoned

    def budget(self, budget: float, n: int | float, level: Fraction, top: float) -> float:
        return budget - self.poisoned * top

    def suspects(self) -> int:
        return self.poisoned

    def sentence(self) -> str:
        points = f"{self.poisoned} calibration points were" if self.poisoned > 1 else "1 calibration point was"
        return f"even if up to {points} replaced, added or removed"


@dataclass(frozen=True)
class Moved(Amount):
    """Even if every calibration input was moved by up to ``calibration_epsilon`` before its noise was drawn.

    A calibration draw exceeds t with probability at least down(q) where the untouched input has q, so the count at
    calibration is taken for one of Bin(N_cal, down(q)).
    """

    calibration_epsilon: float

    keyword = "calibration_epsilon"
    absent = 0
    expected = "a finite calibration_epsilon >= 0"
    moves_inputs = True
    departs = True
    without = "calibration inputs that were moved: by no distance"
    assumptions = (
        Assumption(
            "The noise of calibration points was drawn afresh after their inputs were moved, and those who moved them "
            "did not know it.",
            "library",
            "Calibration draws its key from the operating system when it runs; give it no seed. Outputs that were drawn elsewhere "
            "are for you to vouch for.",
        ),
    )

    def fits(self, value: float) -> bool:
        return 0 <= value < math.inf

    def tampering(self, threat: Threat) -> Threat | None:
        try:
            return replace(threat, epsilon=self.calibration_epsilon)
        except InputError as error:
            raise InputError(f"calibration_epsilon is measured as epsilon is: {error}") from None

    def check(self, task: Any) -> None:
        if not task.single:
            raise InputError(
                f"calibration_epsilon is proved for one thing to cover per point, and {task.name} has several"
            )

    def sentence(self) -> str:
        return f"even if every calibration input was moved by up to {self.calibration_epsilon:g} in that norm too"


@dataclass(frozen=True)
class Drift(Amount):
    r"""Clean queries follow a law within ``drift`` of the calibration points', :math:`\sup_A |P(A) - Q(A)| \le \rho`.

    A miss is one event, so its probability moves by at most rho: everything runs at :math:`\alpha - \rho`.
    """

    drift: float

    keyword = "drift"
    absent = 0
    expected = "drift, a distance in total variation, in [0, 1)"
    departs = True
    without = "any drift of the population: none is allowed for"
    assumptions = (
        Assumption(
            "Before the attack the law of queries is within the stated total variation of that of calibration points; where the "
            "promise is per class or group, within each of them.",
            "none",
            "A distance between laws cannot be told from samples of images. What it costs can: keepcover.monitor is told the "
            "allowance and raises an alarm when there are more misses than it explains.",
        ),
    )

    def fits(self, value: float) -> bool:
        return 0 <= value < 1

    def level(self, alpha: Fraction) -> Fraction:
        return alpha - exact_level(self.drift)

    def moved(self) -> float:
        return self.drift

    def sentence(self) -> str:
        return f"even if the population has drifted by up to {self.drift:g} in total variation"
