"""Several things to cover per point where the attack is the worst there can be.

One dimension, the score of every item x + its own offset + sigma * noise, one noise per draw for all items of a point: missing
an item is a half-space event, so an attack x + epsilon attains up(q) for all items of a point at once, and items of a point
are as dependent as can be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keepcover.bounds import hoeffding_bentkus
from keepcover.methods import Asked, Holdout, Rule, get_method
from keepcover.noise import Gaussian, Threat
from keepcover.scores import Reading
from keepcover.tasks import Loss, Multilabel, Segmentation, Task
from tests.methods.worst import LEVEL, SIGMA, Law

ITEMS = 4


@dataclass(frozen=True)
class Form:
    """A task, its outputs from scores [n, N, items], and its truth from which of the items there are [n, items]."""

    task: Task
    outputs: Callable[[Tensor], Tensor]
    truth: Callable[[Tensor], Tensor]


def above(outputs: Tensor, truth: Tensor, parameter: float) -> Tensor:
    return ((outputs > parameter) & truth).sum(dim=1) / truth.sum(dim=1).clamp_min(1)


def pixels(scores: Tensor) -> Tensor:
    """Two classes: the log-odds against the second are the scores."""
    return torch.stack([torch.zeros_like(scores), -scores], dim=2).unflatten(3, (2, -1))


FORMS = {
    "multilabel": Form(Multilabel(), torch.neg, lambda there: there),
    "pixels": Form(Segmentation(ignore=7), pixels, lambda there: torch.where(there, 1, 7).unflatten(1, (2, -1))),
    "masks": Form(Segmentation(of=(1,)), pixels, lambda there: there.long().unflatten(1, (2, -1))),
    "loss": Form(Loss(above, (*torch.linspace(-3, 3, 201).tolist(), 1e9)), lambda s: s, lambda there: there),
}


def points(
    form: Form, law: Law, n: int, draws: int, generator: torch.Generator, move: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Noisy outputs and truth of n points: of every tenth nothing is there, of the others each item with probability 0.7."""
    x = law((n, 1, 1), generator) + move
    offsets = 0.05 * torch.arange(ITEMS)
    scores = x + offsets + SIGMA * torch.randn(n, draws, 1, generator=generator)
    there = (torch.rand(n, ITEMS, generator=generator) < 0.7) & (torch.rand(n, 1, generator=generator) < 0.9)
    return form.outputs(scores), form.truth(there)


def fitted(form: Form, method: str, law: Law, asked: Asked) -> tuple[Task, Rule]:
    outputs, truth = points(form, law, 150, max(asked.draws, asked.per_point), torch.Generator().manual_seed(11))
    task = form.task.seen(outputs)
    return task, get_method(method).fit(asked, Holdout(task, outputs, task.check_truth(truth, len(truth))))


def attacked_losses(
    form: Form, rule: Rule, law: Law, repetitions: int, move: float, seed: int = 0, task: Task | None = None
) -> Tensor:
    """The loss of one attacked query in each of many calibrations, as its set is measured."""
    generator, n, draws = torch.Generator().manual_seed(seed), rule.asked.n, rule.calibration_draws
    losses = []
    for start in range(0, repetitions, 200):
        some = min(200, repetitions - start)
        outputs, truth = points(form, law, some * n, draws, generator)
        known = (form.task if task is None else task).seen(outputs)
        items = known.items(outputs, known.check_truth(truth, len(truth)), Reading(True), torch.zeros(len(truth)))
        sample = rule.sample(items.total(torch.arange(some).repeat_interleave(n)))
        t = torch.tensor([rule.threshold_of(sample[torch.tensor([i])]) for i in range(some)], dtype=torch.float64)
        query, true = points(form, law, some, rule.test_draws, generator, move)
        prepared, v = known.prepare(query, rule.reading, torch.zeros(some)), torch.rand(some, generator=generator)
        inside = known.inside(known.summary(prepared, rule, v), rule, t[:, None])
        losses.append(1 - known.sets(inside, rule.guarantee(known)).covers(true))
    return torch.cat(losses)


def exceeds(losses: Tensor, alpha: float, level: float = LEVEL) -> bool:
    """Whether independent losses in [0, 1] with this mean have probability below ``level`` if the risk is at most alpha."""
    return bool(hoeffding_bentkus(1 - float(losses.double().mean()), len(losses), 1 - alpha) < level)


def asked_for(n: int, draws: int, calibration_draws: int, r: float = 0.5, alpha: float = 0.2, **more: Any) -> Asked:
    return Asked(alpha, Threat(Gaussian(SIGMA), r * SIGMA), draws, n, None, calibration_draws, **more)
