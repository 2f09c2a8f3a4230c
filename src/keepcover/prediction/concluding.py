"""What collected outputs give: a rule per level, its thresholds, and an entry of the history."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from keepcover.engine.smoother import Smoother
from keepcover.errors import InputError, warn
from keepcover.methods import Holdout, Rule
from keepcover.noise import Noise
from keepcover.prediction.artifact import digest
from keepcover.prediction.collecting import Collected
from keepcover.prediction.predictor import Calibrated, Predictor
from keepcover.prediction.question import Level, Question, Shape
from keepcover.scores import Draws, Items, Tally


def conclude(
    question: Question, collected: Collected, noise: Noise, shape: Shape, smoother: Smoother | None = None
) -> Predictor:
    """Fit every level's rule on the holdout, then look at the calibration points once."""
    if collected.items is None:
        raise InputError("no calibration points are left after the holdout; give more data")
    items, holdout, question = collected.items, collected.holdout, replace(question, task=collected.task)
    question.promise.check(question.task)
    levels: dict[Level, Calibrated] = {}
    for level in question.levels:
        asked = question.asked(level, noise, items.points, shape).settled(holdout)
        rule = question.method.fit(asked, holdout)
        rule.guarantee(question.task)
        levels[level] = calibrated(rule, items, collected.sample, collected.unknown)
    made = Predictor(
        question.task,
        levels,
        items.unordered(),
        noise,
        smoother,
        reference=holdout.reference.sort().values.cpu() if holdout and question.method.transform else None,
        holdout_size=0 if holdout is None else len(holdout),
        inputs=collected.inputs,
        accuracy=collected.accuracy,
        history=(entry("calibrate", items, collected.unknown, [0]),),
    )
    return announced(made)


def announced(made: Predictor) -> Predictor:
    """The predictor, once nothing that it promises is refused; a warning where its sets may be of little use."""
    for one in made.levels.values():
        made.promised(one)
    if made.warning is not None:
        warn(made.warning)
    return made


def calibrated(rule: Rule, items: Any, sample: Holdout | None, unknown: int) -> Calibrated:
    """The thresholds that calibration points give a rule, ``unknown`` of them of classes that the model does not have."""
    own = rule.read(items)
    threshold, alpha = rule.threshold(own), rule.asked.alpha
    made = Calibrated(rule, threshold, _size(rule, sample, threshold, items))
    worst = torch.full((1, rule.test_draws), torch.inf if rule.reading.order else 1.0)
    draws = Draws(worst if rule.transform is None else rule.transform(worst))
    # A class that the model does not have is in no set: a threshold that counts its points as covered promises too much.
    if unknown and bool((rule.test_statistic(draws, torch.zeros(1)) <= threshold).any()):
        what = f"{unknown} of {items.points} calibration points have a label that the model does not know"
        missed = f"its sets miss every such query: {rule.name} cannot promise {1 - alpha:.6g}"
        advice = "Train on more rows so that every label is met, merge rare labels, or raise alpha"
        raise InputError(f"{what}, and {missed}. {advice}")
    if made.full:
        threat, where = rule.asked.threat, f"{rule.name} at alpha {alpha:g}, epsilon {rule.asked.threat.epsilon:g}"
        advice = f"{_advice(rule, own)}more calibration points, {threat.noise.weaker} or a smaller epsilon may help"
        warn(f"{where} can only return everything here; {advice}")
    return made


def _size(rule: Rule, sample: Holdout | None, threshold: Tensor, items: Items | Tally) -> float | None:
    """Mean size to expect, with groups as frequent as among the calibration points."""
    if sample is None:
        return None
    if items.group is None:
        return float(rule.sizes(sample, threshold).mean())
    shares = (items.group.bincount(items.count, minlength=len(threshold)) / items.points).tolist()
    return sum(share * float(rule.sizes(sample, row).mean()) for share, row in zip(shares, threshold, strict=True))


def _advice(rule: Rule, items: Items | Tally) -> str:
    """How many draws would help, where that can be told."""
    if rule.method.compares_only or not isinstance(items, Items):
        return "" if rule.asked.threat.noise.deterministic else "more draws, "
    draws = rule.enough_draws(items.first(rule.calibration_draws))
    return "more draws alone will not help: " if draws is None else f"it takes about draws={draws} to do better, or "


def entry(how: str, items: Items | Tally, unknown: int, of: Sequence[int]) -> dict[str, Any]:
    """One line of a predictor's history: how, when and with what, which points came, and which batches thresholds come from."""
    import keepcover

    when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    made = {"how": how, "created": when, "keepcover": keepcover.__version__, "torch": str(torch.__version__)}
    return {**made, "points": items.points, "unknown": unknown, "scores": digest(items.scores), "of": list(of)}
