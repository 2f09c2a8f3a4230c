"""What N draws buy before any data are seen: the exact certificates beside what RSCP+ pays."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from keepcover.bounds import exact_level, hoeffding
from keepcover.errors import InputError
from keepcover.methods import AllBands, Asked, Exact, ExactAsymmetric, Holdout, Method, get_method
from keepcover.noise import Noise, Threat, get_noise
from keepcover.promises import Promise
from keepcover.tasks import Classification


@dataclass(frozen=True)
class Plan:
    """One line per certificate. Sizes are estimates on the reference population (or on your holdout).

    ``least`` calibration points are needed, of every class or group where the promise is made to each.
    """

    method: str
    draws: int
    calibration_draws: int
    c: int | None
    kappa: int | None
    level: float | None
    estimated_size: float | None
    rule: str
    least: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def reference_holdout(draws: int) -> Holdout:
    """A stand-in population: log-odds of the true label N(-3, 3^2) over images, +3 for the others, noise of width 1.5.

    It resembles a CIFAR-10 ResNet under noise (noisy accuracy about 0.8). With your own noisy outputs the plan is exact
    for your model; this one only orders the candidates.
    """
    points, classes, generator = 500, 10, torch.Generator().manual_seed(0)
    centre = torch.randn(points, classes, 1, generator=generator) * 3 + 5
    centre[:, 0] -= 8
    noisy = centre + 1.5 * torch.randn(points, classes, draws, generator=generator)
    outputs = noisy.transpose(1, 2).contiguous()
    task = Classification(score=lambda scores: scores).seen(outputs)
    return Holdout(task, outputs, torch.zeros(points, dtype=torch.int64))


def make_plan(
    alpha: float,
    epsilon: float,
    noise: Noise | float,
    draws: int,
    *,
    calibration_draws: int | None = None,
    n: int = 4750,
    beta: float = 0.001,
    norm: str | None = None,
    shape: tuple[int, ...] | None = None,
    promise: Promise | None = None,
    holdout: Holdout | None = None,
) -> list[Plan]:
    """The best exact rules for these draws, RCP1, and what RSCP+ would pay for Monte Carlo error; of a noise that is not random,
    its own rule.
    """
    promised = Promise.of(promise)
    if get_noise(noise).deterministic:
        draws = calibration_draws = get_noise(noise).positions(shape or ())
    threat, plus = Threat(get_noise(noise), epsilon, norm, shape), get_method("rscp_plus_hoeffding", beta=beta)
    cal = max(calibration_draws or ExactAsymmetric().usual_calibration_draws(draws), draws)
    if holdout is not None:
        cal = min(cal, holdout.draws)
        if draws > cal:
            raise InputError(f"the holdout has {cal} draws per image, fewer than the {draws} asked for")
    held = holdout or reference_holdout(cal)

    def asked(per_query: int, per_point: int) -> Asked:
        return Asked(alpha, threat, per_query, n, held.task.candidates, per_point, promised).settled(held)

    own: list[Method] = [AllBands()] if threat.noise.deterministic else [Exact(), plus]
    for method in own:  # refused before anything is solved
        method.check(asked(draws, cal), Classification())
    wanted: list[tuple[Method, int, int]] = [(own[0], draws, per_point) for per_point in dict.fromkeys((draws, cal))]
    if not threat.noise.deterministic:
        wanted += [(ExactAsymmetric(), draws, cal), (get_method("rcp1"), 1, 1)]
    plans = []
    for method, per_query, per_point in wanted:
        rule = method.fit(asked(per_query, per_point), held)
        c, kappa = (rule.parameters().get(name) for name in ("c", "kappa"))
        level, size = getattr(rule, "level", None), rule.estimated_size(held)
        plans.append(Plan(method.name, per_query, per_point, c, kappa, level, size, rule.words, rule.least_points))
    if threat.noise.deterministic:
        return plans
    radius = hoeffding(draws, beta)
    # Non-trivial only if up(tau + b) + b < 1 for the calibrated tau.
    most = threat.most(1 - radius) - radius if radius < 1 else 0.0
    full = f"the full label set unless tau < {most:.3f}" if most > 0 else "always the full label set"
    words = f"pays 2 beta = {2 * beta:g} of alpha and {radius:.3f} on each side of the mean score; {full}"
    left = promised.level(alpha) - 2 * exact_level(beta)
    paid = Plan(plus.name, draws, draws, None, None, float(left), None, words, promised.points_needed(left))
    return [*plans, paid]
