"""What an attacker climbs: a function of noisy outputs and truth that is the higher, the nearer the truth is to being missed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from keepcover.noise import Stream
from keepcover.prediction.predictor import Predictor

# Noisy outputs [b, draws, ...], truth [b, ...] and ids [b] -> what is maximised, one number per input.
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def mean_softmax(logits: Tensor, labels: Tensor, ids: Tensor) -> Tensor:  # noqa: ARG001
    r"""The paper's SmoothAdv loss: :math:`-\log` of the **mean over draws** of the true label's probability.

    Example:
        >>> import torch
        >>> logits = torch.tensor([[[0.0, 0.0], [0.0, 0.0]]])
        >>> mean_softmax(logits, torch.tensor([1]), torch.tensor([0]))
        tensor([0.6931])
    """
    own = logits.log_softmax(dim=-1).gather(-1, labels[:, None, None].expand(-1, logits.shape[1], 1))[..., 0]
    return math.log(own.shape[1]) - own.logsumexp(dim=1)


@dataclass(frozen=True)
class Margin:
    """What the predictor's own rule compares, as :meth:`keepcover.tasks.Task.climb` states it: the attack on what is
    certified. ``stream`` is the attacker's.
    """

    predictor: Predictor
    stream: Stream

    def __call__(self, outputs: Tensor, truth: Tensor, ids: Tensor) -> Tensor:
        task, threshold = self.predictor.task, self.predictor.threshold
        while threshold.ndim > 1:  # the smallest of any group
            threshold = threshold.amin(dim=0)
        return task.climb(outputs, truth, self.predictor.rule, threshold, task.uniform(self.stream, ids))
