"""Several labels: outputs are logits, any number of labels is true, and a set promises to miss few of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keepcover.noise.stream import probes
from keepcover.scores import Draws, Items, Reading
from keepcover.tasks.classification import Labels
from keepcover.tasks.metrics import check_several


@dataclass(frozen=True)
class Multilabel(Labels):
    r"""Label sets from logits ``[n, N, K]``, one sigmoid each; the truth is a table ``[n, K]`` of booleans.

    The score of a label is minus its logit. The items of a point are its true labels with weight 1 / their number, so that its loss
    is the share of them that the set misses, the false negative rate; a point without true labels misses nothing.

    Attributes:
        class_names: for reading sets.
        classes: K, once outputs have been seen.

    Example:
        >>> task = Multilabel().seen(torch.zeros(2, 1, 3))
        >>> truth = task.check_truth([[1, 0, 1], [0, 0, 0]], 2)
        >>> items = task.items(torch.zeros(2, 1, 3), truth, Reading(True), torch.zeros(2))
        >>> items.weight, items.owner, items.points
        (tensor([0.5000, 0.5000], dtype=torch.float64), tensor([0, 0]), 2)
    """

    class_names: tuple[str, ...] | None = None
    classes: int | None = None

    name = "multilabel"
    axes = ("points", "draws", "labels")
    fewest = 1
    words = "the expected share of a query's true labels that its set misses"
    shares = True
    single = False
    assumptions = ("A query without true labels misses nothing: it counts as 0 in the expected share.",)

    @property
    def score_name(self) -> str:
        return "logit"

    def check_truth(self, truth: Any, n: int) -> Tensor:
        return check_several(truth, n, self.classes)

    def counted(self, truth: Tensor) -> int:
        return truth.shape[1] if truth.ndim == 2 else 1

    def prepare(self, outputs: Tensor, reading: Reading, u: Tensor) -> Draws:
        return Draws(-outputs.transpose(1, 2))

    def items(self, outputs: Tensor, truth: Tensor, reading: Reading, u: Tensor) -> Items:
        owner, label = truth.nonzero(as_tuple=True)
        weight = 1 / truth.sum(dim=1).double()[owner]
        return Items(Draws(-outputs.transpose(1, 2)[owner, label]), len(truth), weight, owner)

    def probe(self) -> Tensor:
        return self.prepare(probes((self.classes or 2,), -4.0, 4.0)[:, None], Reading(True), torch.zeros(4)).values
