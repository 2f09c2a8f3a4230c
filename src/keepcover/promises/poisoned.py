"""Despite calibration points that an attacker replaced, added or removed."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from keepcover.assumption import Assumption
from keepcover.errors import InputError
from keepcover.promises.clause import Amount, Clause, number


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
