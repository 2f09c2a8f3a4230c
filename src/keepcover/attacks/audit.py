"""Attack predictors and compare what they promise with what is observed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from keepcover.attacks.attacks import NoisyModel, margin_loss, mean_softmax, pgd
from keepcover.engine.inputs import batches
from keepcover.engine.progress import Report
from keepcover.errors import InputError
from keepcover.noise.stream import Stream, fresh_seed
from keepcover.prediction.predictor import Predictor
from keepcover.tasks.metrics import Evaluation, check_labels
from keepcover.tasks.sets import PredictionSets

VIOLATION = 0.001
ATTACKS = ("softmax", "margin", "random")

CustomAttack = Callable[[Tensor, Tensor, float], Tensor]


@dataclass(frozen=True)
class AuditRow:
    """One predictor under one attack at one radius.

    Attributes:
        promised: whether the predictor promises 1 - alpha under this attack (certified, and radius within epsilon).
        p_value: probability that a correct rule covers this few points or fewer, including the luck of the calibration
            draw (:meth:`Method.p_value`); 0 where the calibration points contradict the threshold of a promise
            (:meth:`Method.supports`).
        verdict: ``consistent`` or ``violated`` (p below 0.001) where 1 - alpha is promised; ``no promise`` elsewhere,
            with ``lost`` added where coverage fell significantly below 1 - alpha.
    """

    name: str
    method: str
    score: str
    transform: str
    certified: bool
    draws: int
    alpha: float
    epsilon: float
    attack: str
    radius: float
    coverage: dict[str, Any]
    size: float
    promised: bool
    p_value: float
    verdict: str


@dataclass(frozen=True)
class Audit:
    """Rows per predictor and attack, and the images behind them."""

    rows: tuple[AuditRow, ...]
    images: Tensor
    labels: Tensor
    attacked: dict[tuple[str, str, float], Tensor] = field(repr=False)
    sets: dict[tuple[str, str, float], PredictionSets] = field(repr=False)

    @property
    def broken(self) -> tuple[AuditRow, ...]:
        """Promises that did not hold: a finding, not noise."""
        return tuple(row for row in self.rows if row.verdict == "violated")

    def to_dict(self) -> dict[str, Any]:
        return {"rows": [row.__dict__ for row in self.rows], "images": len(self.images), "violated": len(self.broken)}

    def __str__(self) -> str:
        lines = [f"{'predictor':<24}{'attack':<12}{'radius':>8}{'coverage':>24}{'size':>8}{'p-value':>10}  verdict"]
        for row in self.rows:
            c = row.coverage
            interval = f"{c['mean']:.3f} [{c['low']:.3f}, {c['high']:.3f}]"
            lines.append(
                f"{row.name:<24}{row.attack:<12}{row.radius:>8g}{interval:>24}{row.size:>8.2f}{row.p_value:>10.2g}  {row.verdict}"
            )
        return "\n".join(lines)


def judge(
    predictor: Predictor, evaluation: Evaluation, radius: float, level: tuple[float, float]
) -> tuple[bool, float, str]:
    """Whether 1 - alpha was promised, the p-value of the observed coverage under it, and the verdict."""
    (alpha, epsilon), calibrated, sigma = level, predictor.levels[level], predictor.smoother.sigma
    # What is promised and the noise really drawn, in case the rule's own setting says otherwise.
    stated = calibrated.rule
    rule = replace(stated, setting=replace(stated.setting, alpha=alpha, epsilon=epsilon, sigma=sigma))
    promised = radius == 0 or (rule.certified and radius <= epsilon * (1 + 1e-9))
    m = evaluation.coverage.count
    true = predictor.calibration_draws(level).first(rule.calibration_draws)
    p_value = rule.p_value(round(evaluation.coverage.mean * m), m, len(true))
    if promised and not rule.supports(true, calibrated.threshold):
        p_value = 0.0  # calibration points as these never give a correct rule such a threshold
    if not 0 <= p_value <= 1:
        raise RuntimeError(f"the law of {rule.name} gave the p-value {p_value}; a verdict needs a number in [0, 1]")
    low = p_value < VIOLATION
    if promised:
        return promised, p_value, "violated" if low else "consistent"
    return promised, p_value, "no promise, lost" if low else "no promise"


def audit(
    predictors: Predictor | Mapping[str, Predictor],
    data: Any,
    *,
    attacks: Sequence[str] | Mapping[str, str | CustomAttack] = ("softmax", "margin"),
    radii: Sequence[float] | None = None,
    steps: int = 20,
    draws: int = 32,
    restarts: int = 1,
    clip: tuple[float, float] | None = None,
    rows: int | None = None,
    seed: int | None = None,
    progress: bool | Report = True,
) -> Audit:
    """Clean and attacked coverage of one or several predictors on the same labelled images.

    Args:
        predictors: one predictor, or several by name.
        data: labelled test images, disjoint from calibration.
        attacks: ``softmax`` (SmoothAdv, the paper's; plain PGD where sigma is 0) and ``margin`` (the predictor's own
            rule: the smoothed score, or the count margin); ``random``, the same by queries alone, for models without
            gradients. Or your own, by name: functions ``(images, labels, epsilon) -> attacked images``, for instance
            around another attack library or :func:`keepcover.attacks.attacks.transfer`.
        radii: L2 radii; by default each predictor's own epsilon.
        steps, draws, restarts, clip, rows: of the attack, see :func:`keepcover.attacks.attacks.pgd`.
        seed: reproducible attack and defence noise, in separate streams; operating-system entropy by default.
    """
    named = {predictors.guarantee.method: predictors} if isinstance(predictors, Predictor) else dict(predictors)
    if not named:
        raise InputError("expected at least one predictor to audit")
    wanted = dict(attacks) if isinstance(attacks, Mapping) else {attack: attack for attack in attacks}
    unknown = [attack for attack in wanted.values() if isinstance(attack, str) and attack not in ATTACKS]
    if unknown:
        raise InputError(f"expected attacks among {', '.join(ATTACKS)}, or functions by name, got {unknown[0]!r}")
    parts = list(batches(data, labelled=True))
    images = torch.cat([part.images for part in parts])
    labels = torch.cat([part.labels for part in parts if part.labels is not None])
    labels = check_labels(labels, len(images), next(iter(named.values())).classes)
    seed = fresh_seed() if seed is None else seed
    stream = Stream(seed, "attack")
    options: dict[str, Any] = {"steps": steps, "restarts": restarts, "clip": clip, "rows": rows, "progress": progress}
    shared: dict[tuple[Any, ...], Tensor] = {}
    found: list[AuditRow] = []
    attacked: dict[tuple[str, str, float], Tensor] = {}
    sets: dict[tuple[str, str, float], PredictionSets] = {}

    def craft(predictor: Predictor, attack: str, radius: float) -> Tensor:
        smoother = predictor.smoother
        noisy = NoisyModel(smoother.model, smoother.sigma, draws, stream, smoother.autocast)
        if attack == "softmax":  # the same for every predictor on this model and noise
            key = (id(smoother.model), smoother.sigma, attack, radius)
            if key not in shared:
                shared[key] = pgd(noisy, images, labels, radius, loss=mean_softmax, device=smoother.device, **options)
            return shared[key]
        loss, gradients = margin_loss(predictor, stream), attack == "margin"
        return pgd(noisy, images, labels, radius, loss=loss, device=smoother.device, gradients=gradients, **options)

    def record(name: str, predictor: Predictor, attack: str, radius: float, inputs: Tensor) -> None:
        level = next(iter(predictor.levels))
        result = predictor.predict(inputs, seed=seed)
        measured = result.evaluate(labels)
        promised, p_value, verdict = judge(predictor, measured, radius, level)
        guarantee = result.guarantee
        attacked[name, attack, radius], sets[name, attack, radius] = inputs, result
        found.append(
            AuditRow(
                name,
                guarantee.method,
                guarantee.score,
                guarantee.transform,
                guarantee.certified,
                guarantee.draws,
                guarantee.alpha,
                guarantee.epsilon,
                attack,
                radius,
                dict(measured.coverage.__dict__),
                measured.size,
                promised,
                p_value,
                verdict,
            )
        )

    for name, predictor in named.items():
        record(name, predictor, "none", 0.0, images)
        for radius in radii if radii is not None else [next(iter(predictor.levels))[1]]:
            if radius == 0:
                continue
            for attack, function in wanted.items():
                if not isinstance(function, str):
                    inputs = _checked(function(images, labels, radius), images, radius, attack)
                else:
                    inputs = craft(predictor, function, radius)
                record(name, predictor, attack, radius, inputs)
    return Audit(tuple(found), images, labels, attacked, sets)


def _checked(attacked: Tensor, images: Tensor, radius: float, name: str) -> Tensor:
    attacked = torch.as_tensor(attacked).detach().cpu()
    if attacked.shape != images.shape or not attacked.isfinite().all():
        raise InputError(f"attack {name!r} must return finite images of shape {tuple(images.shape)}")
    distance = (attacked.double() - images.double()).flatten(1).norm(dim=1)
    if float(distance.max()) > radius * (1 + 1e-6):
        raise InputError(f"attack {name!r} moved an image by {float(distance.max()):.6g} in L2, allowed are {radius:g}")
    return attacked
