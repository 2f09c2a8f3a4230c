"""A second promise, in one file: with confidence 1 - delta over the calibration data."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from scipy.special import bdtr, betainc, rel_entr

from keepcover.errors import InputError
from keepcover.promises import CLAUSES, Clause


@dataclass(frozen=True)
class PAC(Clause):
    """With probability at least 1 - delta over the calibration data, coverage is at least 1 - alpha.

    A quantile takes the smallest rank k with P[Beta(k, n+1-k) >= 1 - alpha'] >= 1 - delta. Risk control takes the largest sum
    that a Hoeffding-Bentkus test still tells from a mean of alpha; that test is monotone in the sum.
    """

    delta: float

    keyword = "delta"
    assumptions = ("Calibration points are independent and identically distributed.",)

    def __post_init__(self) -> None:
        if not 0 < self.delta < 1:
            raise InputError(f"expected delta strictly between 0 and 1, got {self.delta}")

    def rank(self, rank: int, n: int, level: Fraction) -> int:
        k = np.arange(1, n + 1)
        enough = np.flatnonzero(betainc(k, n + 1 - k, float(1 - level)) <= self.delta)
        return int(k[enough[0]]) if len(enough) else n + 1

    def budget(self, budget: float, n: int, level: Fraction, top: float) -> float:
        mean, low, high = min(float(level) / top, 1.0), 0.0, float(n)

        def told(total: float) -> bool:
            x = min(total / n, mean)
            chernoff = np.exp(-n * (rel_entr(x, mean) + rel_entr(1 - x, 1 - mean)))
            return min(chernoff, np.e * bdtr(np.ceil(total), n, mean)) <= self.delta

        if not told(0.0):
            return -1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if told(middle) else (low, middle)
        return low * top

    def confidence(self) -> str:
        return f"with confidence {100 * (1 - self.delta):g} % over the calibration data"


CLAUSES[PAC.keyword] = PAC
