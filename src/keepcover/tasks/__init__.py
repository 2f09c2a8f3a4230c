"""Tasks: what an output means, what must not be missed, what a set is, and how sets are measured."""

from __future__ import annotations

from typing import Any

from keepcover.errors import InputError
from keepcover.tasks.base import Sets, Task
from keepcover.tasks.classification import Classification
from keepcover.tasks.metrics import Evaluation, Proportion, Spread
from keepcover.tasks.sets import PredictionSets

TASKS: dict[str, type[Task]] = {task.name: task for task in (Classification,)}


def get_task(task: str | Task, **options: Any) -> Task:
    """A task as it is, or by name with its options.

    Example:
        >>> get_task("classification", score="aps").score_name
        'aps'
    """
    if isinstance(task, Task):
        return task
    if task not in TASKS:
        raise InputError(f"expected a task among {', '.join(TASKS)}, got {task!r}")
    return TASKS[task](**options)


__all__ = [
    "TASKS",
    "Classification",
    "Evaluation",
    "PredictionSets",
    "Proportion",
    "Sets",
    "Spread",
    "Task",
    "get_task",
]
