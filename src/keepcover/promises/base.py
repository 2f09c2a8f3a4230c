r"""The second seam: for whom a promise is made, how surely, and despite what.

The plain promise is marginal: on average over calibration points and query. Each clause changes one of three numbers that
thresholds are made of, and says so in words:

- the level: the miscoverage that is left to spend;
- the rank: which order statistic of n calibration statistics is the threshold;
- the budget: how large the sum of n bounded losses may be under risk control.

Clauses combine because each maps the number that it is given.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Any, ClassVar

from torch import Tensor

from keepcover.bounds import conformal_rank, exact_level, order_statistic
from keepcover.errors import InputError
from keepcover.noise import Threat

MARGINAL = (
    "The promise is marginal and per query: not per class, not simultaneous over several alpha or epsilon, not for a level "
    "picked after seeing sets, and not for the best of many repeated queries."
)


class Clause:
    """One thing a promise says beyond the marginal one: a frozen dataclass with one field, named as in ``Promise(...)``.

    Every hook returns what it is given unless the clause changes it.

    Attributes:
        keyword: its name in ``Promise(keyword=value)``, on the command line and in saved predictors.
        marginal: whether the promise is still one on average, for which the marginal assumption must be said.
        assumptions: what the clause itself rests on.
    """

    keyword: ClassVar[str]
    marginal: ClassVar[bool] = True
    assumptions: ClassVar[tuple[str, ...]] = ()

    def level(self, alpha: Fraction) -> Fraction:
        """The miscoverage left to spend of ``alpha``."""
        return alpha

    def rank(self, rank: int, n: int, level: Fraction) -> int:
        """Which order statistic of n is the threshold; above n there is none. ``rank`` is the one without this clause."""
        return rank

    def budget(self, budget: float, n: int, level: Fraction, top: float) -> float:
        """How large the sum of n losses in [0, top] may be; below 0 no threshold will do."""
        return budget

    def tampering(self, threat: Threat) -> Threat | None:
        """What an attacker may have done to calibration inputs; None for nothing."""
        return None

    def confidence(self) -> str:
        """How the guarantee's sentence begins, where the promise holds with confidence only: ``with confidence 95 % ...``."""
        return ""

    def sentence(self) -> str:
        """A part of the guarantee's sentence, or nothing; it follows a comma."""
        return ""


@dataclass(frozen=True, init=False)
class Promise:
    """Clauses that hold together. ``Promise()`` is the marginal promise.

    Example:
        >>> promise = Promise()
        >>> promise.rank(99, exact_level(0.1)), promise.budget(99, exact_level(0.1), 1.0)
        (90, 9.0)
        >>> promise
        Promise()
    """

    clauses: tuple[Clause, ...] = field(default=())

    def __init__(self, **clauses: Any) -> None:
        from keepcover.promises import CLAUSES

        unknown = [name for name in clauses if name not in CLAUSES]
        if unknown:
            known = ", ".join(CLAUSES) or "nothing"
            raise InputError(f"a promise may say {known} beyond the marginal one, got {unknown[0]!r}")
        # In the order of the registry, whatever the order of the arguments: equal promises are equal values.
        made = tuple(kind(clauses[name]) for name, kind in CLAUSES.items() if clauses.get(name) is not None)
        object.__setattr__(self, "clauses", made)

    def level(self, alpha: float | Fraction) -> Fraction:
        """The miscoverage that calibration may spend of ``alpha``, in exact arithmetic."""
        level = exact_level(alpha)
        for clause in self.clauses:
            level = clause.level(level)
        return level

    def rank(self, n: int, level: Fraction) -> int:
        """Which order statistic of n calibration statistics certifies ``level``; a rank above n means none."""
        rank = conformal_rank(n, level)
        for clause in self.clauses:
            rank = clause.rank(rank, n, level)
        return rank

    def quantile(self, statistic: Tensor, level: Fraction) -> float:
        """The threshold at this miscoverage: an order statistic, never interpolated; +inf if there is none."""
        return order_statistic(statistic, self.rank(len(statistic), level))

    def budget(self, n: int, level: Fraction, top: float) -> float:
        """How large the sum of n calibration losses in [0, top] may be: the next point may add ``top``."""
        budget = float(level) * (n + 1) - top
        for clause in self.clauses:
            budget = clause.budget(budget, n, level, top)
        return budget

    def tampering(self, threat: Threat) -> Threat | None:
        """What an attacker may have done to calibration inputs."""
        return next((t for t in (clause.tampering(threat) for clause in self.clauses) if t is not None), None)

    def least_level(self, n: int) -> float:
        """The smallest miscoverage that n points can have a finite threshold for, rounded up.

        Example:
            >>> round(Promise().least_level(99), 6)
            0.01
        """
        low, high = 0.0, 1.0
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (low, middle) if self.rank(n, Fraction(middle)) <= n else (middle, high)
        return high

    def points_needed(self, level: Fraction) -> int:
        """The least number of calibration points with a finite threshold at this miscoverage.

        Example:
            >>> Promise().points_needed(exact_level(0.1))
            9
        """
        high = 1
        while self.rank(high, level) > high:
            high *= 2
        low = high // 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.rank(middle, level) > middle else (low, middle)
        return high

    @property
    def confidence(self) -> str:
        """How the guarantee's sentence begins."""
        return "".join(f"{words}, " for words in (clause.confidence() for clause in self.clauses) if words)

    @property
    def sentence(self) -> str:
        """What the clauses add to the guarantee's sentence."""
        return "".join(f", {words}" for words in (clause.sentence() for clause in self.clauses) if words)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the promise rests on."""
        own = (MARGINAL,) if all(clause.marginal for clause in self.clauses) else ()
        return own + tuple(line for clause in self.clauses for line in clause.assumptions)

    def config(self) -> dict[str, Any]:
        """The clauses by keyword, for JSON: ``Promise(**config)`` is the same promise."""
        return {clause.keyword: next(iter(asdict(clause).values())) for clause in self.clauses}  # type: ignore[call-overload]

    def __repr__(self) -> str:
        return f"Promise({', '.join(f'{name}={value!r}' for name, value in self.config().items())})"
