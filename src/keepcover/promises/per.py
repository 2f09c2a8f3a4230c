"""Clauses on classes and groups: for every one of them, or for other shares of them than at calibration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from keepcover.assumption import Assumption
from keepcover.errors import InputError
from keepcover.promises.base import Clause, Sample, number

POINTS = 200  # per cluster, where there are so many: fewer make the level of a quantile coarse


@dataclass(frozen=True)
class PerClass(Clause):
    """For every true class: the threshold of a label comes from the calibration points of that class alone."""

    per: str = "class"

    keyword = "per"
    reads = ("label",)
    settles = ("classes",)
    unit = "class"

    @classmethod
    def of(cls, value: Any) -> Clause:
        """``"class"``, the group of every point, or ``{"groups": names}`` where only the names are known.

        Example:
            >>> PerClass.of(["north", "south", "north"]).per
            ('north', 'south')
        """
        if isinstance(value, str):
            if value != "class":
                raise InputError(f"expected per='class' or an array with the group of every point, got {value!r}")
            return PerClass()
        if isinstance(value, dict):
            names = plain(value.get("groups"))
            if set(value) != {"groups"} or len(set(names)) != len(names):
                raise InputError(f"expected {{'groups': names}} with every name once, got {value!r}")
            return PerGroup(tuple(names))
        listed = plain(value)
        known = PerGroup(tuple(sorted(set(listed), key=lambda name: (isinstance(name, str), name))))
        return replace(known, codes=known.encode(listed))

    def cells(self, sample: Sample) -> Tensor | None:
        return sample.label

    def count(self, classes: int | None) -> int | None:
        return classes

    def of_label(self, classes: int) -> Tensor | None:
        return torch.arange(classes)

    def whom(self) -> str:
        return " for every true class"


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


@dataclass(frozen=True)
class PerGroup(Clause):
    """For every group of points: hospital, camera, customer segment. A query says its group, which no attack can change.

    Given the groups, the points of one and a query of it are exchangeable, so each threshold keeps its promise on its own points,
    whether they have one thing to cover or several.

    Attributes:
        per: the names of the groups.
        codes: which of them every point of the data is of, where the promise was made with data at hand.
    """

    per: tuple[str | int, ...]
    codes: Tensor | None = field(default=None, compare=False, repr=False)

    keyword = "per"
    reads = ("group",)
    settles = ("groups",)
    unit = "group"
    assumptions = (
        Assumption(
            "The group of a query is known and not the attacker's to choose: metadata, never a function of the attacked input.",
            "you",
            "Let your system say the group, not the client. A group that calibration never saw is refused.",
        ),
        Assumption(
            "A group that calibration never saw has no promise, the widest sets or not.",
            "library",
            "An unknown group is refused, unless you ask for the widest sets for it.",
        ),
    )

    def cells(self, sample: Sample) -> Tensor | None:
        return sample.group

    def count(self, classes: int | None) -> int | None:
        return len(self.per)

    def encode(self, groups: Any, unknown: str = "error") -> Tensor:
        """The positions of groups among the names; -1 for unknown ones where they may be, as ``unknown="widest"`` says."""
        if unknown not in ("error", "widest"):
            raise InputError(f"expected unknown groups to be an 'error' or to get the 'widest' sets, got {unknown!r}")
        listed, place = plain(groups), {name: at for at, name in enumerate(self.per)}
        strange = [name for name in listed if name not in place]
        if strange and unknown == "error":
            known = ", ".join(map(repr, self.per[:8])) + (", ..." if len(self.per) > 8 else "")
            raise InputError(
                f"the group {strange[0]!r} was not among the calibration points ({known}), so nothing is promised for it; "
                "unknown='widest' gives it the largest threshold of all groups, without a promise"
            )
        return torch.tensor([place.get(name, -1) for name in listed], dtype=torch.int64)

    def short(self) -> str:
        return "per group"

    def stated(self) -> Any:
        return {"groups": list(self.per)}


def plain(groups: Any) -> list[str | int]:
    """Groups as plain strings or whole numbers, one per point.

    Example:
        >>> plain(np.array(["north", "south"]))
        ['north', 'south']
    """
    values = groups.tolist() if isinstance(groups, np.ndarray | Tensor) else groups
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise InputError(f"expected one group per point, as a sequence of names or whole numbers, got {groups!r}")
    listed = [value.item() if isinstance(value, np.generic) else value for value in values]
    strange = [value for value in listed if isinstance(value, bool) or not isinstance(value, str | int)]
    if strange or not listed:
        found = repr(strange[0]) if strange else "none"
        raise InputError(f"expected groups as names or whole numbers, one per point, got {found}")
    return listed


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
