"""The conformal quantile and the Guarantee: one place each."""

from __future__ import annotations

import math
import warnings
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from jaxtyping import Float
from torch import Tensor

from keepcover.errors import InputError, KeepcoverWarning

ASSUMPTIONS = (
    "Calibration and test points are exchangeable before the attack; the holdout is disjoint from both.",
    "The true label is one of the classes that the model has: a query of another class is missed by every set.",
    "The noise of the query is fresh and unknown to the attacker, who may know everything else.",
    "The same model, numerics, score and transform ran at calibration and run at prediction.",
    "Everything tuned (rule, transform, sigma, draws) was tuned on the holdout, never on the calibration points.",
    "The promise is marginal and per query: not per class, not simultaneous over several alpha or epsilon, "
    "not for a level picked after seeing sets, and not for the best of many repeated queries.",
    "Pseudo-random numbers of a secret seed (Philox), added to the input and rounded with it to a grid of about sigma / 1024, "
    "stand in for real Gaussian noise.",
)


def exact_level(level: float | str | Fraction) -> Fraction:
    """A level as the user typed it, without binary rounding: 0.1 is 1/10.

    Example:
        >>> exact_level(0.1)
        Fraction(1, 10)
    """
    return level if isinstance(level, Fraction) else Fraction(str(level))


def warn_of_coverage(*alphas: float) -> None:
    """Say so where alpha looks like the coverage that is wanted.

    Example:
        >>> warn_of_coverage(0.1)
    """
    for alpha in alphas:
        if 0.5 < alpha < 1:
            warnings.warn(
                f"alpha is miscoverage: {alpha:g} promises that {100 * (1 - alpha):.6g} % of sets hold the truth; for "
                f"{100 * alpha:.6g} % coverage give alpha {float(1 - exact_level(alpha)):g}",
                KeepcoverWarning,
                stacklevel=3,
            )


def conformal_rank(n: int, alpha: Fraction) -> int:
    r"""Which order statistic of n calibration scores is the threshold: :math:`n + 1 - \lfloor (n+1) \alpha \rfloor`.

    Equal to ceil((n+1)(1-alpha)), in exact arithmetic. A rank above n means that no finite threshold will do.

    Example:
        >>> conformal_rank(9, exact_level(0.1)), conformal_rank(8, exact_level(0.1))
        (9, 9)
    """
    return n + 1 - math.floor((n + 1) * alpha)


def conformal_quantile(scores: Float[Tensor, " n"], alpha: Fraction | float) -> float:
    """The conformal threshold at miscoverage alpha: an order statistic, never interpolated; +inf if n is too small.

    A ``float`` is taken as typed (:func:`exact_level`); computed levels come as ``Fraction(value)``.

    Example:
        >>> import torch
        >>> conformal_quantile(torch.arange(1.0, 10.0), 0.1)
        9.0
        >>> conformal_quantile(torch.arange(1.0, 9.0), 0.1)
        inf
    """
    if scores.ndim != 1 or len(scores) == 0:
        raise InputError(f"expected a non-empty vector of calibration scores, got shape {tuple(scores.shape)}")
    if scores.isnan().any():
        raise InputError("calibration scores contain NaN; a NaN has no rank, so no guarantee can be given")
    rank = conformal_rank(len(scores), exact_level(alpha))
    if rank > len(scores):
        return math.inf
    return -math.inf if rank < 1 else float(scores.kthvalue(rank).values)


@dataclass(frozen=True)
class Guarantee:
    """What is promised, in numbers and as a sentence; impossible combinations are refused when it is built.

    Example:
        >>> print(Guarantee("exact", certified=True, alpha=0.1, epsilon=0.125, sigma=0.25, draws=16, n=4750))
        With probability at least 90 %, the set contains the true label of a query even if an adversary has moved it by up to 0.125 in L2 norm (method exact, Gaussian noise sigma 0.25, 16 draws per query, 4750 calibration points).
    """

    method: str
    certified: bool
    alpha: float
    epsilon: float
    sigma: float
    draws: int
    n: int
    calibration_draws: int | None = None
    beta: float | None = None
    score: str = "hps"
    transform: str = "none"
    norm: str = "l2"

    def __post_init__(self) -> None:
        for name in ("alpha", "epsilon", "sigma"):
            if not math.isfinite(getattr(self, name)):
                raise InputError(f"expected a finite {name}, got {getattr(self, name)}")
        if not 0 < self.alpha < 1:
            raise InputError(f"expected alpha strictly between 0 and 1, got {self.alpha}; 0.1 promises 90 % coverage")
        if self.epsilon < 0:
            raise InputError(f"expected epsilon >= 0, the L2 radius in pixel units, got {self.epsilon}")
        if self.sigma < 0:
            raise InputError(f"expected sigma >= 0, got {self.sigma}")
        if self.certified and self.sigma == 0:
            raise InputError(
                f"{self.method} certifies through Gaussian noise and sigma is 0; give sigma > 0 (epsilon to 2 epsilon "
                "works well) or choose the uncertified method cp"
            )
        if self.draws < 1 or (self.calibration_draws is not None and self.calibration_draws < 1):
            raise InputError(f"expected at least 1 draw, got {self.draws} (calibration {self.calibration_draws})")
        if self.norm != "l2":
            raise InputError(f"expected norm 'l2', the only one Gaussian noise certifies, got {self.norm!r}")
        if self.beta is not None:
            if not 0 < self.beta < 1:
                raise InputError(f"expected the Monte Carlo budget beta in (0, 1), got {self.beta}")
            if 2 * exact_level(self.beta) >= exact_level(self.alpha):
                raise InputError(
                    f"2 beta = {2 * self.beta:g} leaves nothing of alpha = {self.alpha:g}: choose beta below "
                    f"{self.alpha / 2:g} (0.001 is usual)"
                )
        level = exact_level(self.alpha) - 2 * exact_level(self.beta or 0.0)
        if conformal_rank(self.n, level) > self.n:
            raise InputError(
                f"{self.n} calibration points cannot certify miscoverage {float(level):g}: at least "
                f"{math.ceil(1 / level) - 1} are needed; add data or raise alpha"
            )

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the promise rests on; show it wherever the promise is shown."""
        return ASSUMPTIONS

    def __str__(self) -> str:
        coverage = f"{100 * (1 - self.alpha):.6g} %"
        points = f"{self.n} calibration points"
        if not self.certified:
            return (
                f"With probability at least {coverage}, the set contains the true label of a query that nobody has "
                f"attacked (method {self.method}, {points}); under attack {self.method} promises nothing."
            )
        noise = f"Gaussian noise sigma {self.sigma:g}, {self.draws} draw{'s' if self.draws != 1 else ''} per query"
        budget = (
            "" if self.beta is None else f", Monte Carlo budget 2 x {self.beta:g} inside the {100 * self.alpha:g} %"
        )
        return (
            f"With probability at least {coverage}, the set contains the true label of a query even if an adversary "
            f"has moved it by up to {self.epsilon:g} in L2 norm (method {self.method}, {noise}{budget}, {points})."
        )

    def to_dict(self) -> dict[str, Any]:
        """The numbers and the sentence, for JSON."""
        return {**asdict(self), "statement": str(self), "assumptions": list(self.assumptions)}
