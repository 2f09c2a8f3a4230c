"""A clause of a promise: what it may change, and the calibration statistics that it may look at."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from keepcover.errors import InputError
from keepcover.noise import Threat

NEVER = 2**62  # points that no one has: what would be needed where no number is enough


@dataclass(frozen=True)
class Sample:
    """Calibration statistics, and what is known of the points behind them.

    Attributes:
        statistic: what a rule keeps of every item, ``[items]`` or ``[items, j]``; where points have several, the losses of every
            row on a grid, ``[rows, grid]``.
        count: points of every row, where points have several items.
        grid: the thresholds of those losses.
        label, group: the class and the group of every item's or row's points, where a promise asks.
        importance: of every item's point under label shift; None where all count the same.
        own: the importance of the query, were the candidate its label.
    """

    statistic: Tensor
    count: Tensor | None = None
    grid: Tensor | None = None
    label: Tensor | None = None
    group: Tensor | None = None
    importance: Tensor | None = None
    own: float = 1.0

    @property
    def points(self) -> int:
        """How many points there are: one per item, or as many as ``count`` says."""
        return len(self.statistic) if self.count is None else int(self.count.sum())

    def __getitem__(self, some: Tensor) -> Sample:
        """Some of the items or rows."""
        rows = {name: value for name, value in vars(self).items() if isinstance(value, Tensor) and name != "grid"}
        return replace(self, **{name: value[some.to(value.device)] for name, value in rows.items()})


class Clause:
    """One thing a promise says beyond the marginal one: a frozen dataclass whose first field is named as in ``Promise(...)``.

    Every hook returns what it is given unless the clause changes it.

    Attributes:
        keyword: its name in ``Promise(keyword=value)``, on the command line and in saved predictors.
        expected: which values it takes, in words.
        absent: the value besides None that says nothing.
        settles: what the promise is no longer an average over, among ``AVERAGED``.
        assumptions: what the clause itself rests on.
        without: what a promise without it does not cover; nothing where the marginal promise says so itself.
        reads: what it must know of calibration points, among ``label`` and ``group``.
        excludes: clauses that do not hold together with it, each with the reason.
        requires: the unit of a clause that it builds on, with what to say where it is missing.
        unit: what has a threshold of its own, ``class`` or ``group``; nothing where the clause leaves that alone.
        needs_holdout: whether it chooses something on the holdout.
        moves_inputs: whether it allows for moved calibration inputs, which only certificates can.
        departs: whether it allows calibration points and queries not to be exchangeable as they come.
    """

    keyword: ClassVar[str]
    expected: ClassVar[str] = ""
    absent: ClassVar[Any] = None
    settles: ClassVar[tuple[str, ...]] = ()
    assumptions: ClassVar[tuple[str, ...]] = ()
    without: ClassVar[str] = ""
    reads: ClassVar[tuple[str, ...]] = ()
    excludes: ClassVar[dict[str, str]] = {}
    requires: ClassVar[tuple[str, str] | None] = None
    unit: ClassVar[str] = ""
    needs_holdout: ClassVar[bool] | property = False
    moves_inputs: ClassVar[bool] = False
    departs: ClassVar[bool] = False

    @classmethod
    def of(cls, value: Any) -> Clause:
        """The clause with this value, as a user gives it."""
        return cls(value)  # type: ignore[call-arg]

    def level(self, alpha: Fraction) -> Fraction:
        """The miscoverage left to spend of ``alpha``."""
        return alpha

    def rank(self, rank: int, n: int, level: Fraction) -> int:
        """Which order statistic of n is the threshold; above n there is none. ``rank`` is the one without this clause."""
        return rank

    def budget(self, budget: float, n: int | float, level: Fraction, top: float) -> float:
        """How large the sum of n losses in [0, top] may be; below 0 no threshold will do."""
        return budget

    def tampering(self, threat: Threat) -> Threat | None:
        """What an attacker may have done to calibration inputs; None for nothing."""
        return None

    def cells(self, sample: Sample) -> Tensor | None:
        """Which threshold every item belongs to, 0 and up, where the clause has a :attr:`unit`."""
        return None

    def count(self, classes: int | None) -> int | None:
        """How many thresholds there are, where the clause has a :attr:`unit`; None where K is not known yet."""
        return None

    def of_label(self, classes: int) -> Tensor | None:
        """The threshold of every candidate label, ``[K]``; None where that does not depend on the label."""
        return None

    def importance(self) -> Tensor | None:
        """How much a point of every class counts, ``[K]``; None where all count the same."""
        return None

    def suspects(self) -> int:
        """Calibration points that may not be what they were: an audit does not count on them."""
        return 0

    def moved(self) -> float:
        """How much coverage the population may have lost since calibration: an audit allows for it."""
        return 0.0

    def check(self, task: Any) -> None:
        """Refuse a task that the clause means nothing for: one whose points have no class, where the clause reads it."""
        if "label" in self.reads and not task.classed:
            raise InputError(
                f"{self.keyword} speaks of the class of every point: it needs a classification task whose labels are all known"
            )

    def settled(self, holdout: Any, n: int, alpha: float) -> Clause:
        """The clause with everything chosen that it leaves to the holdout."""
        return self

    def confidence(self) -> str:
        """How the guarantee's sentence begins, where the promise holds with confidence only: ``with confidence 95 % ...``."""
        return ""

    def whom(self) -> str:
        """For whom the probability is promised, after its number: `` for every group``."""
        return f" for every {self.unit}" if self.unit else ""

    def sentence(self) -> str:
        """A part of the guarantee's sentence, or nothing; it follows a comma."""
        return ""

    def short(self) -> str:
        """The clause in two or three words, for tables."""
        return f"{self.keyword.replace('_', ' ')} {self.stated()}"

    def stated(self) -> Any:
        """The clause's value for JSON."""
        return getattr(self, fields(self)[0].name)  # type: ignore[arg-type]


CLAUSES: dict[str, type[Clause]] = {}
"""What a promise may say, by keyword; hooks run in this order."""


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


def number(value: Any, expected: str) -> float:
    """A number as the user typed it, from any library: a float32 0.05 is meant as 1/20.

    Example:
        >>> number(np.float32(0.05), "a share")
        0.05
    """
    try:
        return float(str(np.asarray(value)[()]))
    except (TypeError, ValueError):
        raise InputError(f"expected {expected}, got {value!r}") from None


def smallest(holds: Callable[[int], Any], low: int, high: int = NEVER) -> int:
    """The smallest whole number from ``low`` on where ``holds`` is true, true from there on; ``high`` where there is none below.

    Example:
        >>> smallest(lambda n: n * n >= 50, 1), smallest(lambda n: n > 20, 1, 16)
        (8, 16)
    """
    step, end = 1, min(low, high)
    while end < high and not holds(end):
        low, step = end + 1, 2 * step
        end = min(end + step, high)
    while low < end:
        middle = (low + end) // 2
        low, end = (low, middle) if holds(middle) else (middle + 1, end)
    return low
