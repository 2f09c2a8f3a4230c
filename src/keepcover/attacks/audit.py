"""Attack predictors and compare what they promise with what is observed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from keepcover.attacks.losses import Margin, mean_softmax
from keepcover.attacks.pgd import NoisyModel, pgd
from keepcover.engine.inputs import batches
from keepcover.engine.progress import Report
from keepcover.errors import InputError
from keepcover.noise import Stream, fresh_seed, get_norm
from keepcover.prediction.predictor import Predictor
from keepcover.tasks import Sets

VIOLATION = 0.001
ATTACKS = ("softmax", "margin", "random")

CustomAttack = Callable[[Tensor, Tensor, float], Tensor]


@dataclass(frozen=True)
class AuditRow:
    """One predictor under one attack at one radius.

    Attributes:
        promised: whether the predictor promises 1 - alpha under this attack (certified, and radius within epsilon).
        p_value: probability that a correct rule covers this few points or fewer, including the luck of the calibration
            draw (:meth:`Rule.p_value`); 0 where the calibration points contradict the threshold of a promise
            (:meth:`Rule.supports`).
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
    sets: dict[tuple[str, str, float], Sets] = field(repr=False)

    @property
    def broken(self) -> tuple[AuditRow, ...]:
        """Promises that did not hold: a finding, not noise."""
        return tuple(row for row in self.rows if row.verdict == "violated")

    def summary(self, radius: float) -> list[dict[str, Any]]:
        """One dictionary per predictor, with the worst of the attacks at one radius."""
        made = []
        for name in dict.fromkeys(row.name for row in self.rows):
            mine = [row for row in self.rows if row.name == name]
            clean = next(row for row in mine if row.attack == "none")
            attacked = [row for row in mine if row.attack != "none" and row.radius == radius]
            worst = min(attacked, key=lambda row: row.coverage["mean"], default=clean)
            made.append(
                {
                    "name": name,
                    "method": clean.method,
                    "transform": clean.transform,
                    "certified": clean.certified,
                    "draws": clean.draws,
                    "coverage": clean.coverage,
                    "size": clean.size,
                    "attack": worst.attack,
                    "attacked_coverage": worst.coverage,
                    "attacked_size": worst.size,
                    "p_value": worst.p_value,
                    "verdict": worst.verdict,
                }
            )
        return made

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


def judge(predictor: Predictor, covered: int, m: int, radius: float) -> tuple[bool, float, str]:
    """Whether 1 - alpha was promised, the p-value of the observed coverage under it, and the verdict."""
    # What is promised and the noise really drawn, in case the rule's own question says otherwise.
    (alpha, epsilon), stated = next(iter(predictor.levels)), predictor.rule
    threat = replace(stated.asked.threat, noise=predictor.noise, epsilon=epsilon)
    rule = replace(stated, asked=replace(stated.asked, alpha=alpha, threat=threat))
    items = rule.read(predictor.items)
    promised = radius == 0 or (rule.method.certified and radius <= rule.asked.threat.epsilon * (1 + 1e-9))
    p_value = rule.p_value(covered, m, items.points)
    if promised and not rule.supports(items, float(predictor.threshold.min())):
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
            around another attack library or :func:`keepcover.attacks.transfer`.
        radii: L2 radii; by default each predictor's own epsilon.
        steps, draws, restarts, clip, rows: of the attack, see :func:`keepcover.attacks.pgd`.
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
    for predictor in named.values():
        labels = predictor.task.check_truth(labels, len(images))
    seed = fresh_seed() if seed is None else seed
    stream = Stream(seed, "attack")
    options: dict[str, Any] = {"steps": steps, "restarts": restarts, "clip": clip, "rows": rows, "progress": progress}
    shared: dict[tuple[Any, ...], Tensor] = {}
    found: list[AuditRow] = []
    attacked: dict[tuple[str, str, float], Tensor] = {}
    sets: dict[tuple[str, str, float], Sets] = {}

    def craft(predictor: Predictor, attack: str, radius: float) -> Tensor:
        smoother, norm = predictor.running, str(predictor.rule.asked.threat.norm)
        noisy = NoisyModel(smoother.model, smoother.noise, draws, stream, smoother.autocast)
        shaped = {**options, "norm": norm, "device": smoother.device}
        if attack == "softmax":  # the same for every predictor on this model and noise
            key = (id(smoother.model), smoother.noise, norm, radius)
            if key not in shared:
                shared[key] = pgd(noisy, images, labels, radius, loss=mean_softmax, **shaped)
            return shared[key]
        return pgd(
            noisy, images, labels, radius, loss=Margin(predictor, stream), gradients=attack == "margin", **shaped
        )

    def record(name: str, predictor: Predictor, attack: str, radius: float, inputs: Tensor) -> None:
        result = predictor.predict(inputs, seed=seed)
        measured, guarantee = result.measure(labels), result.guarantee
        promised, p_value, verdict = judge(predictor, int(result.covers(labels).sum()), len(labels), radius)
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

    for name, several in named.items():
        predictor = several.at()
        record(name, predictor, "none", 0.0, images)
        for radius in radii if radii is not None else [predictor.guarantee.epsilon]:
            if radius == 0:
                continue
            for attack, function in wanted.items():
                if not isinstance(function, str):
                    inputs = _checked(function(images, labels, radius), images, radius, attack, predictor)
                else:
                    inputs = craft(predictor, function, radius)
                record(name, predictor, attack, radius, inputs)
    return Audit(tuple(found), images, labels, attacked, sets)


def _checked(attacked: Tensor, images: Tensor, radius: float, name: str, predictor: Predictor) -> Tensor:
    attacked, norm = torch.as_tensor(attacked).detach().cpu(), get_norm(str(predictor.rule.asked.threat.norm))
    if attacked.shape != images.shape or not attacked.isfinite().all():
        raise InputError(f"attack {name!r} must return finite images of shape {tuple(images.shape)}")
    distance = norm.length(attacked.double() - images.double())
    if float(distance.max()) > radius * (1 + 1e-6):
        raise InputError(
            f"attack {name!r} moved an image by {norm.short} {float(distance.max()):.6g}, allowed are {radius:g}"
        )
    return attacked
