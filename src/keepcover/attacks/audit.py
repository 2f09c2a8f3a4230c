"""Attack predictors and compare what they promise with what is observed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from keepcover.attacks.pgd import CustomAttack, Margin, NoisyModel, mean_softmax, pgd
from keepcover.engine.inputs import batches, extremes, in_order
from keepcover.engine.progress import Progress
from keepcover.errors import InputError
from keepcover.methods import Rule
from keepcover.noise import Stream, fresh_seed, get_norm
from keepcover.prediction.predictor import Predictor
from keepcover.promises import Sample
from keepcover.scores import Items, Tally
from keepcover.tasks import Sets

VIOLATION = 0.001
ATTACKS = ("softmax", "margin", "random")


@dataclass(frozen=True)
class AuditRow:
    """One predictor under one attack at one radius.

    Attributes:
        promised: whether the predictor promises 1 - alpha under this attack (certified, and radius within epsilon).
        coverage: mean and interval; of the share of true things that sets hold, where a point has several.
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
    """Rows per predictor and attack, and the images behind them; ``digests`` say which predictors they were."""

    rows: tuple[AuditRow, ...]
    images: Tensor
    labels: Tensor
    attacked: dict[tuple[str, str, float], Tensor] = field(repr=False)
    sets: dict[tuple[str, str, float], Sets] = field(repr=False)
    digests: dict[str, str] = field(repr=False)

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
            own = ("name", "method", "transform", "certified", "draws", "coverage", "size")
            attack = {field: getattr(worst, field) for field in ("attack", "p_value", "verdict")}
            attack |= {"attacked_coverage": worst.coverage, "attacked_size": worst.size}
            made.append({**{field: getattr(clean, field) for field in own}, **attack})
        return made

    def to_dict(self) -> dict[str, Any]:
        counts = {"images": len(self.images), "violated": len(self.broken)}
        return {"rows": [vars(row) for row in self.rows], **counts, "predictors": self.digests}

    def __str__(self) -> str:
        lines = [f"{'predictor':<24}{'attack':<12}{'radius':>8}{'coverage':>24}{'size':>8}{'p-value':>10}  verdict"]
        for row in self.rows:
            interval = "{mean:.3f} [{low:.3f}, {high:.3f}]".format(**row.coverage)
            measured = f"{interval:>24}{row.size:>8.2f}{row.p_value:>10.2g}  {row.verdict}"
            lines.append(f"{row.name:<24}{row.attack:<12}{row.radius:>8g}{measured}")
        return "\n".join(lines)


def judge(
    predictor: Predictor, covered: Tensor, truth: Tensor, radius: float, group: Tensor | None = None
) -> tuple[bool, float, str]:
    """Whether 1 - alpha was promised, the p-value of the observed coverage under it, and the verdict. ``covered`` are booleans, or
    the shares of true things that sets hold where a point has several.

    A promise per class or group is judged in each of them, and the smallest p-value is multiplied by their number.
    """
    # What is promised and the noise really drawn, in case the rule's own question says otherwise.
    (alpha, epsilon), stated = next(iter(predictor.levels)), predictor.rule
    threat = replace(stated.asked.threat, noise=predictor.noise, epsilon=epsilon)
    rule = replace(stated, asked=replace(stated.asked, alpha=alpha, threat=threat))
    items = rule.read(predictor.items)  # type: ignore[arg-type]
    promised = radius == 0 or (rule.method.certified and radius <= rule.asked.threat.epsilon * (1 + 1e-9))
    p_values = []
    for part, hit, threshold in _parts(rule, items, predictor, covered, truth, group):
        held = float(hit.sum()) if predictor.task.shares else int(hit.sum())
        one = rule.p_value(held, len(hit), part.points) if len(hit) else 1.0
        if not 0 <= one <= 1:
            raise RuntimeError(f"the law of {rule.name} gave the p-value {one}; a verdict needs a number in [0, 1]")
        # Calibration points that contradict the threshold never give a correct rule such a one.
        p_values.append(one if not promised or rule.supports(part, threshold) else 0.0)
    p_value = min(1.0, len(p_values) * min(p_values))
    verdicts = ("consistent", "violated") if promised else ("no promise", "no promise, lost")
    return promised, p_value, verdicts[p_value < VIOLATION]


def _parts(
    rule: Rule, items: Items | Tally, predictor: Predictor, covered: Tensor, truth: Tensor, group: Tensor | None
) -> Iterator[tuple[Any, Tensor, float]]:
    """Calibration items, covered queries and the smallest threshold of every cell that the promise is made to."""
    promise, threshold = rule.asked.promise, predictor.threshold
    if any(clause.importance() is not None for clause in promise.clauses):
        why = "the law of a weighted quantile is not known"
        raise InputError(f"{why}, so label_weights cannot be audited; evaluate measures its coverage")
    if promise.partition is None:
        yield items, covered, float(threshold)
        return
    queries = Sample(covered, label=predictor.task.label_of(truth), group=group)
    cells: Any = promise.partition.cells
    mine, theirs = cells(rule.sample(items)), cells(queries)
    place = promise.partition.of_label(predictor.task.candidates or 0)
    for at in range(promise.cells(predictor.task.candidates)):
        own = threshold[at] if place is None else threshold[place == at]
        yield items[mine == at], covered[theirs.cpu() == at], float(own.min())


def audit(
    predictors: Predictor | Mapping[str, Predictor],
    data: Any,
    *,
    attacks: Sequence[str] | Mapping[str, str | CustomAttack] | None = None,
    radii: Sequence[float] | None = None,
    steps: int = 20,
    draws: int = 32,
    restarts: int = 1,
    clip: tuple[float, float] | None = None,
    rows: int | None = None,
    seed: int | None = None,
    progress: Progress = True,
    groups: Any = None,
) -> Audit:
    """Clean and attacked coverage of one or several predictors on the same labelled images.

    Args:
        predictors: one predictor, or several by name.
        data: labelled test images, disjoint from calibration.
        attacks: ``softmax`` (SmoothAdv, the paper's; plain PGD where sigma is 0; for one class per point only) and ``margin`` (the
            predictor's own rule: the smoothed score, the count margin, or the margins of all true things together), the task's own
            by default; ``random``, the same by queries alone, for models without
            gradients. Or your own, by name: functions ``(images, labels, epsilon) -> attacked images``, for instance
            around another attack library or :func:`keepcover.attacks.transfer`.
        radii: in the predictor's norm; by default its own epsilon.
        steps, draws, restarts, clip, rows: of the attack, see :func:`keepcover.attacks.pgd`.
        seed: reproducible attack and defence noise, in separate streams; operating-system entropy by default.
        groups: the group of every image, where a promise is per group.
    """
    named = {predictors.guarantee.method: predictors} if isinstance(predictors, Predictor) else dict(predictors)
    if not named:
        raise InputError("expected at least one predictor to audit")
    known = [predictor.task.attacks for predictor in named.values()]
    attacks = [attack for attack in known[0] if all(attack in each for each in known)] if attacks is None else attacks
    wanted = dict(attacks) if isinstance(attacks, Mapping) else {attack: attack for attack in attacks}
    if "softmax" in wanted.values() and not all("softmax" in each for each in known):
        raise InputError(
            "softmax attacks the probability of the true class, and there is none; choose margin or random"
        )
    unknown = [attack for attack in wanted.values() if isinstance(attack, str) and attack not in ATTACKS]
    if unknown:
        raise InputError(f"expected attacks among {', '.join(ATTACKS)}, or functions by name, got {unknown[0]!r}")
    if groups is not None:
        in_order(data)
    parts = list(batches(data, labelled=True))
    images = torch.cat([part.images for part in parts])
    labels = torch.cat([part.labels for part in parts if part.labels is not None])
    for predictor in named.values():
        labels = predictor.task.check_truth(labels, len(images))
    seed = fresh_seed() if seed is None else seed
    stream = Stream(seed, "attack")
    options: dict[str, Any] = {"steps": steps, "restarts": restarts, "rows": rows, "progress": progress}
    shared: dict[tuple[Any, ...], Tensor] = {}
    found: list[AuditRow] = []
    attacked: dict[tuple[str, str, float], Tensor] = {}
    sets: dict[tuple[str, str, float], Sets] = {}

    def craft(name: str, predictor: Predictor, attack: str, radius: float) -> Tensor:
        smoother, norm = predictor.running, str(predictor.rule.asked.threat.norm)
        noisy = NoisyModel(smoother.scaled_model, smoother.noise, draws, stream, smoother.autocast)
        # Steps and radius are in the units of the noise.
        inputs, units = smoother.scaled(images), smoother.input_scale
        # Where the norm leaves pixels free: the range of the images, far beyond which a query is refused.
        free = get_norm(norm).replaces and inputs.is_floating_point()
        bounds = clip or (extremes(inputs) if free else None)
        how = {**options, "norm": norm, "device": smoother.device, "clip": bounds}
        loss = mean_softmax if attack == "softmax" else Margin(predictor, stream)
        # The softmax attack is the same for every predictor on this model and noise.
        own = None if attack == "softmax" else (name, attack)
        key = (id(smoother.model), smoother.noise, units, norm, radius, own)
        if key not in shared:
            shared[key] = pgd(noisy, inputs, labels, radius, loss=loss, gradients=attack != "random", **how)
        moved = shared[key]
        if units is None:
            return moved
        # In float64, and what did not move as it was: rounding must not add to the attack.
        return torch.where(moved == inputs, images.double(), moved.double() * torch.tensor(units).double())

    def record(name: str, predictor: Predictor, attack: str, radius: float, inputs: Tensor) -> None:
        own = groups if predictor.rule.asked.promise.groups else None
        result = predictor.predict(inputs, seed=seed, groups=own)
        measured, guarantee = result.measure(labels), result.guarantee
        group = predictor.grouped(own, len(labels))
        promised, p_value, verdict = judge(predictor, result.covers(labels).cpu(), labels, radius, group)
        attacked[name, attack, radius], sets[name, attack, radius] = inputs, result
        stated = ("method", "score", "transform", "certified", "draws", "alpha", "epsilon")
        row: dict[str, Any] = {field: getattr(guarantee, field) for field in stated}
        row |= {"attack": attack, "radius": radius, "coverage": dict(measured.coverage.__dict__), "size": measured.size}
        found.append(AuditRow(name, **row, promised=promised, p_value=p_value, verdict=verdict))

    for name, several in named.items():
        predictor = several.at()
        record(name, predictor, "none", 0.0, images)
        for radius in radii if radii is not None else [predictor.guarantee.epsilon]:
            if radius == 0:
                continue
            for attack, function in wanted.items():
                ours = isinstance(function, str)
                inputs = craft(name, predictor, function, radius) if ours else function(images, labels, radius)
                record(name, predictor, attack, radius, _checked(inputs, images, radius, attack, predictor))
    digests = {name: predictor.digest for name, predictor in named.items()}
    return Audit(tuple(found), images, labels, attacked, sets, digests)


def _checked(attacked: Tensor, images: Tensor, radius: float, name: str, predictor: Predictor) -> Tensor:
    attacked, norm = torch.as_tensor(attacked).detach().cpu(), get_norm(str(predictor.rule.asked.threat.norm))
    if attacked.shape != images.shape or not attacked.isfinite().all():
        raise InputError(f"attack {name!r} must return finite images of shape {tuple(images.shape)}")
    scaled = predictor.running.scaled
    clean, moved = scaled(images.double()), scaled(attacked.double())
    distance = norm.length(moved - clean)
    # Both images are rounded: neighbouring pixels of 8 bits are 1/255 apart but for that.
    slack = 0.0 if norm.replaces else norm.length(torch.finfo(images.dtype).eps / 2 * (clean.abs() + moved.abs()))
    if bool((distance > radius * (1 + 1e-6) + slack).any()):
        found = f"{norm.short} {float(distance.max()):.6g}"
        raise InputError(f"attack {name!r} moved an image by {found}, allowed are {radius:g}")
    return attacked
