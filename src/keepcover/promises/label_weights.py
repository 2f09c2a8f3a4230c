"""For a population whose classes have other shares than at calibration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from keepcover.assumption import Assumption
from keepcover.errors import InputError
from keepcover.promises.clause import Clause, number


@dataclass(frozen=True)
class LabelWeights(Clause):
    """Label shift with known weights, one per class: its share among queries over its share at calibration.

    A calibration point counts as much as its class weighs, and the query as much as its candidate label would
    (Tibshirani et al. 2019, Podkopaev & Ramdas 2021), so every candidate label has a threshold of its own.
    """

    label_weights: tuple[float, ...]

    keyword = "label_weights"
    expected = "finite label_weights of 0 or more, one per class"
    reads = ("label",)
    departs = True
    excludes: ClassVar[dict[str, str]] = {
        "delta": "the law of a weighted quantile over calibration draws is not known",
        "poisoned": "a replaced point may carry the weight of any class, and a rank m higher does not make up for it",
    }
    without = "other shares of the classes than at calibration: as part of a drift only"
    assumptions = (
        Assumption(
            "Queries of every class are as at calibration, only their shares differ, by the weights given; the weights were not "
            "estimated from inputs that an attacker can move.",
            "you",
            "Take the weights from known shares, and compare them with the classes of labelled queries from time to time.",
        ),
    )

    def __post_init__(self) -> None:
        if not all(0 <= w < math.inf for w in self.label_weights) or not sum(self.label_weights) > 0:
            raise InputError(f"expected {self.expected}, got {self.label_weights}")

    @classmethod
    def of(cls, value: Any) -> LabelWeights:
        # Of a mapping the keys would be taken, of a set an order of its own.
        listed = isinstance(value, Sequence | np.ndarray | Tensor) and not isinstance(value, str | bytes)
        if not listed or getattr(value, "ndim", 1) != 1:
            raise InputError(f"expected {cls.expected}, got {value!r}")
        return cls(tuple(number(w, cls.expected) for w in value))

    def check(self, task: Any) -> None:
        super().check(task)
        if task.candidates not in (None, len(self.label_weights)):
            raise InputError(f"expected {task.candidates} label_weights, one per class, got {len(self.label_weights)}")

    def importance(self) -> Tensor | None:
        return torch.tensor(self.label_weights, dtype=torch.float64)

    def short(self) -> str:
        return "label weights"

    def sentence(self) -> str:
        low, high = min(self.label_weights), max(self.label_weights)
        return f"for a population whose classes are {low:g} to {high:g} times as frequent as at calibration"
