"""For every class, or for every group that is known beside the input, instead of on average over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keepcover.assumption import Assumption
from keepcover.errors import InputError
from keepcover.promises.clause import Clause, Sample


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
