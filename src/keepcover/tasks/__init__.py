"""Tasks: what an output means, what must not be missed, what a set is, and how sets are measured."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from keepcover.errors import InputError
from keepcover.tasks.base import Sets, Task
from keepcover.tasks.classification import Classification
from keepcover.tasks.intervals import IntervalEvaluation, PredictionIntervals
from keepcover.tasks.loss import Loss, LossSets
from keepcover.tasks.metrics import Evaluation, Proportion, RiskEvaluation, Spread
from keepcover.tasks.multilabel import Multilabel
from keepcover.tasks.pixels import PixelSets
from keepcover.tasks.regression import Regression
from keepcover.tasks.segmentation import Segmentation
from keepcover.tasks.sets import PredictionSets

TASKS: dict[str, type[Task]] = {
    task.name: task for task in (Classification, Regression, Multilabel, Segmentation, Loss)
}


def get_task(task: str | Task, **options: Any) -> Task:
    """A task as it is, or by name with those of its options that are not None.

    Example:
        >>> get_task("classification", score="aps").score_name
        'aps'
    """
    given = {name: value for name, value in options.items() if value is not None}
    if isinstance(task, Task):
        if given:
            raise InputError("the task brings its own score and class names; give them there")
        return task
    if task not in TASKS:
        raise InputError(f"expected a task among {', '.join(TASKS)}, got {task!r}")
    kind, own = TASKS[task], {f.name: f for f in fields(TASKS[task])}  # type: ignore[arg-type]
    if missing := [f.name for f in own.values() if f.default is MISSING and f.default_factory is MISSING]:
        raise InputError(
            f"{task} is given as a value, which brings {' and '.join(missing)} of yours: task={kind.__name__}(...)"
        )
    if unknown := sorted(given.keys() - own):
        raise InputError(f"{task} has no {unknown[0]}; leave it out")
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


__all__ = [
    "TASKS",
    "Classification",
    "Evaluation",
    "IntervalEvaluation",
    "Loss",
    "LossSets",
    "Multilabel",
    "PixelSets",
    "PredictionIntervals",
    "PredictionSets",
    "Proportion",
    "Regression",
    "RiskEvaluation",
    "Segmentation",
    "Sets",
    "Spread",
    "Task",
    "get_task",
]
