"""Classes with too few points of their own, pooled with classes that behave alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keepcover.assumption import Assumption
from keepcover.errors import InputError
from keepcover.promises.clause import Clause, Sample

POINTS = 200  # per cluster, where there are so many: fewer make the level of a quantile coarse


@dataclass(frozen=True)
class Clusters(Clause):
    """Per cluster of classes instead of per class (Ding et al. 2023).

    ``"auto"`` sorts classes by the level that their noisy scores on the holdout reach and cuts the row into clusters of some
    200 calibration points; or the cluster of every class, fixed before any calibration point was looked at.
    """

    clusters: str | tuple[int, ...]

    keyword = "clusters"
    expected = "clusters='auto' or the cluster of every class, 0 and up"
    requires = ("class", "clusters pool classes, so the promise must be per class; say per='class' too")
    unit = "cluster"
    assumptions = (
        Assumption(
            "Within a cluster of classes the promise is an average over them.",
            "you",
            "It bounds what the promise says; keepcover report shows the coverage of every class.",
        ),
    )

    def __post_init__(self) -> None:
        given = self.clusters
        if given == "auto":
            return
        if isinstance(given, str) or not given or not all(type(c) is int and c >= 0 for c in given):
            raise InputError(f"expected {self.expected}, got {given!r}")
        if set(given) != set(range(max(given) + 1)):
            raise InputError(f"expected clusters numbered 0, 1, ... without gaps, got {sorted(set(given))}")

    @classmethod
    def of(cls, value: Any) -> Clusters:
        listed = value.tolist() if isinstance(value, np.ndarray | Tensor) else value
        if not isinstance(listed, str | list | tuple):
            raise InputError(f"expected {cls.expected}, got {value!r}")
        return cls(listed if isinstance(listed, str) else tuple(listed))

    @property
    def needs_holdout(self) -> bool:
        return self.clusters == "auto"

    @property
    def _map(self) -> Tensor:
        if isinstance(self.clusters, str):
            raise InputError("clusters='auto' are chosen on a holdout; give one")
        return torch.tensor(self.clusters)

    def check(self, task: Any) -> None:
        if self.clusters != "auto" and task.candidates not in (None, len(self.clusters)):
            raise InputError(f"expected the cluster of each of {task.candidates} classes, got {len(self.clusters)}")

    def settled(self, holdout: Any, n: int, alpha: float) -> Clause:
        if not self.needs_holdout:
            return self
        scores, label = holdout.items().draws.values.double().cpu().numpy(), holdout.truth.cpu().numpy()
        classes = holdout.task.candidates
        reached = np.full(classes, np.quantile(scores, 1 - alpha))  # of a class that the holdout never shows
        for k in np.unique(label):
            reached[k] = np.quantile(scores[label == k], 1 - alpha)
        pooled, place = max(1, min(classes, n // POINTS)), np.empty(classes, dtype=np.int64)
        place[reached.argsort(kind="stable")] = np.arange(classes) * pooled // classes
        return Clusters(tuple(place.tolist()))

    def cells(self, sample: Sample) -> Tensor | None:
        assert sample.label is not None
        own, most = self._map.to(sample.label.device), int(sample.label.max()) if len(sample.label) else 0
        if most >= len(own):
            raise InputError(f"expected the cluster of each of {most + 1} classes or more, got {len(own)}")
        return own[sample.label]

    def count(self, classes: int | None) -> int | None:
        return None if classes is None else 1 if self.needs_holdout else int(self._map.max()) + 1

    def of_label(self, classes: int) -> Tensor | None:
        return self._map

    def whom(self) -> str:
        return f" for every one of {self._many}clusters of true classes"

    def short(self) -> str:
        return f"{self._many}clusters"

    @property
    def _many(self) -> str:
        return "" if self.needs_holdout else f"{len(set(self.clusters))} "
