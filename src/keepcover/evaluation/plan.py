"""What N draws buy before any data are seen: the exact certificates beside what RSCP+ pays."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from keepcover.bounds.bounds import gaussian_shift, hoeffding
from keepcover.errors import InputError
from keepcover.guarantee import Guarantee, warn_of_coverage
from keepcover.methods import Setting
from keepcover.methods.exact import RCP1, Exact, ExactAsymmetric
from keepcover.methods.holdout import Holdout
from keepcover.scores.draws import Draws


@dataclass(frozen=True)
class Plan:
    """One line per certificate. Sizes are estimates on the reference population (or on your holdout)."""

    method: str
    draws: int
    calibration_draws: int
    c: int | None
    kappa: int | None
    level: float | None
    estimated_size: float | None
    rule: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def reference_holdout(classes: int = 10, points: int = 500, draws: int = 64, seed: int = 0) -> Holdout:
    """A stand-in population: log-odds of the true label N(-3, 3^2) over images, +3 for the others, noise of width 1.5.

    It resembles a CIFAR-10 ResNet under noise (noisy accuracy about 0.8). With your own noisy logits the plan is exact
    for your model; this one only orders the candidates.
    """
    generator = torch.Generator().manual_seed(seed)
    centre = torch.randn(points, classes, 1, generator=generator) * 3 + 5
    centre[:, 0] -= 8
    noisy = centre + 1.5 * torch.randn(points, classes, draws, generator=generator)
    return Holdout(Draws(noisy), torch.zeros(points, dtype=torch.int64))


def make_plan(
    alpha: float,
    epsilon: float,
    sigma: float,
    draws: int,
    *,
    calibration_draws: int = 64,
    n: int = 4750,
    beta: float = 0.001,
    holdout: Holdout | None = None,
) -> list[Plan]:
    """The best exact rules for these draws, RCP1, and what RSCP+ would pay for Monte Carlo error."""
    warn_of_coverage(alpha)
    for method, budget in (("exact", None), ("rscp_plus_hoeffding", beta)):  # refused before anything is solved
        Guarantee(method, True, alpha, epsilon, sigma, draws, n, calibration_draws, budget)
    cal = max(calibration_draws, draws)
    if holdout is not None:
        cal = min(cal, holdout.draws.count)
        if draws > cal:
            raise InputError(f"the holdout has {cal} draws per image, fewer than the {draws} asked for")
    holdout = holdout or reference_holdout(draws=cal)
    classes = holdout.draws.values.shape[1]
    plans = []
    for calibration in dict.fromkeys((draws, cal)):
        rule = Exact.fit(Setting(alpha, epsilon, sigma, draws, n, classes, calibration), holdout)
        words = f"at most {rule.kappa} of {draws} draws above t, the quantile of the draw ranked {rule.c + 1} of {calibration}"
        size = rule.estimated_size(holdout)
        plans.append(Plan("exact", draws, calibration, rule.c, rule.kappa, rule.level, size, words))
    majorant = ExactAsymmetric.fit(Setting(alpha, epsilon, sigma, draws, n, classes, cal), holdout)
    words = (
        f"at most {majorant.kappa} of {draws} draws above t, by risk control; g rises from {majorant.g[0]:.4f} "
        f"to {majorant.g[-1]:.3f}"
    )
    size = majorant.estimated_size(holdout)
    plans.append(Plan("exact_asymmetric", draws, cal, None, majorant.kappa, None, size, words))
    one = RCP1(Setting(alpha, epsilon, sigma, 1, n, classes, 1))
    plans.append(Plan("rcp1", 1, 1, 0, 0, one.level, one.estimated_size(holdout), "the one draw is at most t"))
    radius = hoeffding(draws, beta)
    # Non-trivial only if shift(tau + b, r) + b < 1 for the calibrated tau.
    most = float(gaussian_shift(1 - radius, -epsilon / sigma)) - radius if radius < 1 else 0.0
    words = f"pays 2 beta = {2 * beta:g} of alpha and {radius:.3f} on each side of the mean score; " + (
        f"the full label set unless tau < {most:.3f}" if most > 0 else "always the full label set"
    )
    plans.append(Plan("rscp_plus_hoeffding", draws, draws, None, None, alpha - 2 * beta, None, words))
    return plans
