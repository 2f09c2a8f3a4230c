"""Despite a population that has moved a little since calibration."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from keepcover.assumption import Assumption
from keepcover.bounds import exact_level
from keepcover.promises.clause import Amount


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
