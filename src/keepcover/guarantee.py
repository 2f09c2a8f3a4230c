"""The Guarantee: what is promised, assembled from a task, a threat, a promise and a method."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from keepcover.assumption import Assumption
from keepcover.bounds import exact_level
from keepcover.errors import InputError, warn
from keepcover.noise import Threat
from keepcover.promises import Promise
from keepcover.promises.clause import NEVER

GENERAL = (
    Assumption(
        "Calibration and test points are exchangeable before the attack; the holdout is disjoint from both.",
        "you",
        "Calibrate on a random sample of what will be asked. A holdout that keepcover splits off is disjoint; one that you bring "
        "is not compared with other points. In production keepcover.monitor raises an alarm when outcomes contradict it.",
    ),
    Assumption(
        "The same model, numerics, score and transform ran at calibration and run at prediction.",
        "library",
        "A predictor's file keeps the fingerprint of the weights, the structure, the numerics, and what model and score give on "
        "fixed inputs; loading refuses whatever differs.",
    ),
    Assumption(
        "Everything tuned (rule, transform, noise, draws) was tuned on the holdout, never on the calibration points.",
        "you",
        "What keepcover chooses, it chooses on the holdout alone. Your own choices (model, alpha, epsilon, which data) must not "
        "have looked at calibration points.",
    ),
)
DEPARTING = Assumption(
    "Apart from what the promise allows for, calibration and test points are exchangeable before the attack; the holdout is "
    "disjoint from both.",
    "you",
    GENERAL[0].how,
)


def warn_of_coverage(alpha: float) -> None:
    """Say so where alpha looks like the coverage that is wanted.

    Example:
        >>> warn_of_coverage(0.1)
    """
    if 0.5 < alpha < 1:
        promised = f"{alpha:g} promises that {100 * (1 - alpha):.6g} % of sets hold the truth"
        meant = f"for {100 * alpha:.6g} % coverage give alpha {float(1 - exact_level(alpha)):g}"
        warn(f"alpha is miscoverage: {promised}; {meant}")


@dataclass(frozen=True)
class Guarantee:
    """What is promised, in numbers and as a sentence; impossible combinations are refused when it is built.

    Attributes:
        method: its name; ``certified`` says whether it holds under attack.
        alpha: miscoverage.
        threat: what the attacker may do, and the noise that answers it.
        draws, calibration_draws: model evaluations per query and per calibration point.
        n: calibration points.
        promise: for whom, how surely and despite what.
        spent: what the method pays of alpha for Monte Carlo error before it takes a quantile.
        task: when a set is right, in words; or what is missed, where ``shares``.
        assumed: what task and method rest on beyond the general assumptions.
        score, transform: as results name them.
        least: calibration points that a class or group needs for a threshold of its own; 0 where there is one threshold.
        always: labels that are in every set, or groups whose sets are full, because they have fewer.
        shares: whether alpha bounds an expected share, a risk, instead of the probability of a miss.

    Example:
        >>> from keepcover.noise import Gaussian, Threat
        >>> print(Guarantee("exact", True, 0.1, Threat(Gaussian(0.25), 0.125), draws=16, n=4750))
        With probability at least 90 %, the set contains the true label of a query even if an adversary has moved it by up to 0.125 in L2 norm (method exact, Gaussian noise sigma 0.25, 16 draws per query, 4750 calibration points).
    """

    method: str
    certified: bool
    alpha: float
    threat: Threat
    draws: int
    n: int
    calibration_draws: int | None = None
    promise: Promise = Promise()
    spent: float = 0.0
    task: str = "the set contains the true label of a query"
    assumed: tuple[str, ...] = ()
    score: str = "hps"
    transform: str = "none"
    least: int = 0
    always: tuple[str, ...] = ()
    shares: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.alpha) and 0 < self.alpha < 1):
            raise InputError(f"expected alpha strictly between 0 and 1, got {self.alpha}; 0.1 promises 90 % coverage")
        if self.certified and not self.threat.noise.certifies:
            advice = "give sigma > 0 (epsilon to 2 epsilon works well) or choose the uncertified method cp"
            raise InputError(f"{self.method} certifies through noise, and there is none; {advice}")
        if self.draws < 1 or (self.calibration_draws is not None and self.calibration_draws < 1):
            raise InputError(f"expected at least 1 draw, got {self.draws} (calibration {self.calibration_draws})")
        level = self.promise.level(self.alpha) - exact_level(self.spent)
        if level <= 0:
            spent = f"the promise and the method spend all of alpha = {self.alpha:g} before a quantile is taken"
            raise InputError(f"{spent}; ask less of the promise, choose a smaller beta (0.001 is usual) or raise alpha")
        least = self.promise.points_needed(level)
        if self.n < least:
            few = f"{self.n} calibration points cannot certify miscoverage {float(level):g}"
            raise InputError(f"{few}: at least {least} are needed; add data or raise alpha")

    @property
    def epsilon(self) -> float:
        """Radius of the attack."""
        return self.threat.epsilon

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """What the promise rests on, each with how it is checked; show it wherever the promise is shown."""
        noise = self.threat.noise.assumptions if self.certified else ()
        general = (DEPARTING, *GENERAL[1:]) if self.promise.departs else GENERAL
        return tuple(map(Assumption.of, general + self.assumed + noise + self.promise.assumptions))

    def __str__(self) -> str:
        promise, how, points = self.promise, f"method {self.method}", f"{self.n} calibration points{self._few}"
        start = f"with probability at least {100 * (1 - self.alpha):.6g} %{promise.whom}, {self.task}"
        if self.shares:
            start = f"{self.task} is at most {100 * self.alpha:.6g} %{promise.whom},"
        start = promise.confidence + start
        start = start[0].upper() + start[1:]
        if not self.certified:
            unattacked = f"{start} that is not attacked{promise.sentence} ({how}, {points})"
            return f"{unattacked}; under attack {self.method} promises nothing."
        noise, plural = self.threat.noise, "s" if self.draws != 1 else ""
        how += f", {noise}, {self.draws} {noise.each}{plural} per query"
        how += f", Monte Carlo budget {self.spent:g} inside the {100 * self.alpha:g} %" if self.spent else ""
        return f"{start} even if an adversary {self.threat}{promise.sentence} ({how}, {points})."

    @property
    def _few(self) -> str:
        """What becomes of classes and groups with too few points."""
        if not self.promise.partition:
            return f"; always in the set: {_some(self.always)}" if self.always else ""
        unit, here = self.promise.partition.unit, f", here {_some(self.always)}" if self.always else ""
        rest = {"group": "a full set", "cluster": "its labels in every set"}.get(unit, "its label in every set")
        if self.least >= NEVER:
            return f"; every {unit}, however many its points, has {rest}{here}"
        return f"; a {unit} with fewer than {self.least} has {rest}{here}"

    def to_dict(self) -> dict[str, Any]:
        """The numbers and the sentence, for JSON."""
        names = ("method", "certified", "alpha", "draws", "calibration_draws", "n", "score", "transform")
        stated = {"promise": self.promise.config(), "statement": str(self), "assumptions": list(self.assumptions)}
        return {**{name: getattr(self, name) for name in names}, **self.threat.config(), **stated}


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
