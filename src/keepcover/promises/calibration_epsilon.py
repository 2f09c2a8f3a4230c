"""Despite calibration inputs that an attacker moved."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from keepcover.assumption import Assumption
from keepcover.errors import InputError
from keepcover.noise import Threat
from keepcover.promises.clause import Amount


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
