"""Several labels: outputs are logits, any number of labels is true, and a set promises to miss few of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from keepcover.errors import InputError
from keepcover.guarantee import Guarantee
from keepcover.noise.stream import probes
from keepcover.scores import Draws, Items, Reading
from keepcover.tasks.candidates import Candidates
from keepcover.tasks.metrics import check_several
from keepcover.tasks.sets import PredictionSets


@dataclass(frozen=True)
class Multilabel(Candidates):
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
    words = "the expected share of a query's true labels that its set misses"
    shares = True
    single = False
    early = True
    assumptions = ("A query without true labels misses nothing: it counts as 0 in the expected share.",)

    def __post_init__(self) -> None:
        if self.class_names is not None:
            object.__setattr__(self, "class_names", tuple(str(name) for name in self.class_names))
            if self.classes not in (None, len(self.class_names)):
                raise InputError(
                    f"expected {self.classes} class names, one per output of the model, got {len(self.class_names)}"
                )

    @property
    def score_name(self) -> str:
        return "logit"

    @property
    def candidates(self) -> int | None:
        return self.classes

    def seen(self, outputs: Tensor) -> Multilabel:
        if outputs.ndim != 3 or not outputs.is_floating_point():
            raise InputError(
                f"expected float logits [points, draws, labels], got {outputs.dtype} {tuple(outputs.shape)}"
            )
        if self.classes not in (None, outputs.shape[2]):
            raise InputError(
                f"the predictor was calibrated on {self.classes} labels, the model returned {outputs.shape[2]}"
            )
        return self if self.classes else replace(self, classes=outputs.shape[2])

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

    def sets(self, inside: Tensor, guarantee: Guarantee, draws_used: Tensor | None = None) -> PredictionSets:
        return PredictionSets(inside, guarantee, self.class_names, draws_used)

    def everything(self, n: int) -> Tensor | None:
        return None if self.classes is None else torch.ones(n, self.classes, dtype=torch.bool)

    def probe(self) -> Tensor:
        return self.prepare(probes((self.classes or 2,), -4.0, 4.0)[:, None], Reading(True), torch.zeros(4)).values

    def config(self) -> dict[str, Any]:
        names = None if self.class_names is None else list(self.class_names)
        return {"name": self.name, "classes": self.classes, "class_names": names}

    @classmethod
    def from_config(cls, config: dict[str, Any], score: Any = None) -> Multilabel:
        if score is not None:
            raise InputError(f"{cls.name} has no score of its own; leave it out")
        names: Sequence[str] | None = config["class_names"]
        return cls(None if names is None else tuple(names), config["classes"])
