"""With confidence over the calibration data, instead of on average over them (PAC)."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from scipy.special import betainc

from keepcover.assumption import Assumption
from keepcover.bounds import hoeffding_bentkus
from keepcover.bounds.concentration import bisect
from keepcover.promises.clause import Amount, smallest


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
