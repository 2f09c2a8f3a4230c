"""One image or many under one calibrated method: nested sets over the epsilons, and the bars that explain them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from keepcover.methods import Explanation
from keepcover.noise import Stream
from keepcover.prediction.predictor import Predictor
from keepcover.scores import Reading


def own_sets(
    predictor: Predictor,
    images: Float[Tensor, "n c h w"],
    ids: Int[Tensor, " n"],
    alpha: float,
    epsilons: Sequence[float],
    stream: Stream,
) -> Bool[Tensor, "e n k"]:
    """The sets of every epsilon, each as its own rule gives it, from the same noise."""
    wanted = [(alpha, epsilon) for epsilon in epsilons]
    parts = []
    for at in range(0, len(images), 32):
        outputs = predictor.running.logits(images[at : at + 32], predictor.draws, stream, ids[at : at + 32])
        inside = predictor.decide(outputs, ids[at : at + 32], stream, wanted)
        parts.append(torch.stack([inside[level] for level in wanted]).cpu())
    return torch.cat(parts, dim=1)


def nested(own: Bool[Tensor, "e n k"]) -> Bool[Tensor, "e n k"]:
    """Running unions over growing epsilon: a superset keeps the guarantee, and no label leaves as epsilon grows.

    Example:
        >>> own = torch.tensor([[[True, False]], [[False, True]]])
        >>> nested(own)[1].tolist()
        [[True, True]]
    """
    return own.to(torch.uint8).cummax(dim=0).values.bool()


def bars(
    predictor: Predictor,
    image: Float[Tensor, "1 c h w"],
    id: Int[Tensor, "1"],
    alpha: float,
    epsilons: Sequence[float],
    stream: Stream,
) -> list[Explanation]:
    """The bars [K] of one image at every epsilon: a label is in the set iff its support reaches what is needed, which may
    lie outside [0, 1] where every label, or none, is in the set.
    """
    task: Any = predictor.task
    outputs = predictor.running.logits(image, predictor.draws, stream, id)
    ids = id.to(outputs.device)
    u, v = task.uniform(stream, ids), stream.uniform(ids, "boundary")
    prepared: dict[Reading, Any] = {}
    found = []
    for epsilon in epsilons:
        calibrated = predictor.levels[alpha, epsilon]
        rule, reading = calibrated.rule, calibrated.rule.reading
        if reading not in prepared:
            prepared[reading] = task.prepare(outputs, reading, u)
        draws, fit = prepared[reading].first(rule.test_draws), partial(task.fit, reading=reading)
        shown = rule.explain(draws, float(calibrated.threshold), fit, v)
        needed = min(max(shown.needed, -1.0), 2.0)  # JSON knows no infinity
        words = "every label is in every set" if calibrated.full else shown.words
        found.append(replace(shown, support=shown.support[0].double().cpu(), needed=needed, words=words))
    return found
