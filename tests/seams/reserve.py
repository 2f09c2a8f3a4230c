"""Another clause of a promise, in one file: a share of alpha is kept in reserve."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from keepcover.bounds import exact_level
from keepcover.promises import CLAUSES, Clause


@dataclass(frozen=True)
class Reserve(Clause):
    """Runs at (1 - reserve) alpha."""

    reserve: float

    keyword = "reserve"

    def level(self, alpha: Fraction) -> Fraction:
        return alpha * (1 - exact_level(self.reserve))

    def sentence(self) -> str:
        return f"with {self.reserve:.0%} of the allowed misses in reserve"


CLAUSES[Reserve.keyword] = Reserve
