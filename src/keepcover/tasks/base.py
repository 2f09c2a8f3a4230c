"""The third seam: what an output of the model means, what must not be missed, and what a set is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import fields
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from numpy import ndarray
from torch import Tensor

from keepcover.errors import InputError
from keepcover.guarantee import Guarantee
from keepcover.noise import Stream
from keepcover.promises import of_truth
from keepcover.scores import GRID, Items, Reading

Rule = Any  # a keepcover.methods.Rule: tasks are handed rules, and methods come after tasks


@runtime_checkable
class Sets(Protocol):
    """What a predictor returns: one set per query, with the guarantee that they carry. What measuring them against the truth gives
    has a ``coverage``, a ``size`` and ``to_dict()``, whatever the task.
    """

    guarantee: Guarantee

    @property
    def size(self) -> Tensor: ...
    @property
    def traits(self) -> ndarray: ...
    def covers(self, truth: Any) -> Tensor: ...
    def measure(self, truth: Any) -> Any: ...
    def rows(self) -> list[dict[str, Any]]: ...
    def __len__(self) -> int: ...


class Task(ABC):
    """A frozen value. It turns noisy outputs ``[n, N, ...]`` into noisy scores, and numbers that rules decide on into sets.

    Sets travel as plain tensors with one row per query (``inside``), so that streams and splits can collect them;
    :meth:`sets` makes of them what users read.

    Attributes:
        name: in the command line, JSON and saved predictors.
        words: when a set is right, as the guarantee says it.
        assumptions: what the promise rests on because of the task.
        open_labels: whether -1 stands for the truth of a point that no set can hold.
        single: whether every point has one thing to cover; else its :meth:`items` have weights.
        shares: whether the promise bounds an expected share of what is missed, which ``words`` name, instead of a probability.
        attacks: what an audit tries unless told otherwise.
        early: whether a set holds labels ``[n, K]`` that are decided one by one, so that drawing can stop when all are.
    """

    name: ClassVar[str]
    words: ClassVar[str]
    assumptions: ClassVar[tuple[str, ...]] = ()
    open_labels: bool = False
    single: ClassVar[bool] = True
    shares: ClassVar[bool] = False
    attacks: ClassVar[tuple[str, ...]] = ("margin",)
    early: ClassVar[bool] = False

    @abstractmethod
    def seen(self, outputs: Tensor) -> Task:
        """The task with everything that the model's outputs ``[n, N, ...]`` fix, or an error where they do not fit."""

    def unfit(self, method: Any) -> str:
        """Why a method cannot make sets for this task, and what can; empty where it can."""
        if method.things == "one" and not self.single:
            return f"{method.name} needs one thing to cover per point, and {self.name} has several; choose exact_asymmetric or one_draw"
        if method.things == "several" and self.single:
            return f"{method.name} is for several things to cover per point, and {self.name} has one; choose rcp1, which is the same"
        return ""

    @abstractmethod
    def check_truth(self, truth: Any, n: int) -> Tensor:
        """The truth of n points as a tensor, or an error that says what is wrong with it."""

    def counted(self, truth: Tensor) -> int:
        """How many outputs a model for this truth has, as far as the truth tells."""
        return 1

    @property
    def candidates(self) -> int | None:
        """How many labels a full set holds; None where sets are not finite."""
        return None

    @property
    def score_name(self) -> str:
        """The score, as results name it."""
        return self.name

    @property
    def bounded(self) -> bool:
        """Whether scores lie in [0, 1], which some methods assume."""
        return False

    def uniform(self, stream: Stream, ids: Tensor) -> Tensor:
        """The random number of every point that a randomised score uses; zeros where there is none."""
        return torch.zeros(len(ids), device=ids.device)

    @abstractmethod
    def items(self, outputs: Tensor, truth: Tensor, reading: Reading, u: Tensor) -> Items:
        """The noisy scores of what must not be missed."""

    @property
    def thresholds(self) -> Tensor:
        """What thresholds are chosen from where :attr:`single` is not: fixed before any data, the last one safe for every query."""
        return GRID

    def thinned(self, outputs: Tensor, items: Items) -> tuple[Tensor, Items]:
        """As much of noisy outputs and items as choosing a rule takes: of large outputs a sample."""
        return outputs, items

    @abstractmethod
    def prepare(self, outputs: Tensor, reading: Reading, u: Tensor) -> Any:
        """Noisy outputs as rules of this reading look at them: once for all rules."""

    @abstractmethod
    def summary(self, prepared: Any, rule: Rule, v: Tensor) -> Tensor:
        """All that a query's set depends on apart from the threshold, ``[n, ...]``; ``v`` randomises boundaries."""

    @abstractmethod
    def inside(self, summary: Tensor, rule: Rule, threshold: Tensor) -> Tensor:
        """The sets at a threshold, one row per query; the threshold broadcasts against ``[n, 1]``."""

    @abstractmethod
    def sizes(self, inside: Tensor) -> Tensor:
        """The size of every set, ``[n]``."""

    def sized(self, size: float) -> str:
        """A mean size in words."""
        return f"{size:.2f} of {self.candidates} labels"

    def sizes_on_grid(self, summary: Tensor, rule: Rule) -> Tensor:
        """The size of every set at every threshold of the grid, ``[n, grid]``, where :attr:`single` is not."""
        raise InputError(f"{self.name} has one thing to cover per point: its thresholds are on no grid")

    @abstractmethod
    def union(self, first: Tensor, second: Tensor) -> Tensor:
        """Sets that hold what either holds: a superset keeps the promise."""

    @abstractmethod
    def sets(self, inside: Tensor, guarantee: Guarantee, draws_used: Tensor | None = None) -> Any:
        """What users read."""

    def everything(self, n: int) -> Tensor | None:
        """The largest sets of n queries, where they are known without running the model."""
        return None

    @abstractmethod
    def profile(self, outputs: Tensor, u: Tensor, thresholds: ndarray) -> ndarray:
        """How large the sets of count rules would be, ``[thresholds, N + 1]``: the mean measure of candidates whose scores
        exceed each threshold in exactly j of the N draws.
        """

    def climb(self, outputs: Tensor, truth: Tensor, rule: Rule, threshold: Tensor, u: Tensor) -> Tensor:
        """What an attacker raises, one differentiable number per point: the nearer to a miss the higher, as
        :meth:`keepcover.methods.Rule.climb` states it.
        """
        items = self.items(outputs, truth, Reading(rule.reading.order), u)
        own = of_truth(threshold, self.label_of(truth), None)
        margin = rule.climb(items.draws, own.to(outputs.device) if own.ndim else own)
        if not items.several:
            return margin
        weight, owner = items.weights
        # What is missed already need not be missed by more; what is far from it pulls a little.
        reached = torch.sigmoid(margin) + 0.1 * margin.clamp_max(0.0)
        return reached.new_zeros(items.points).index_add(0, owner, weight.to(reached.dtype) * reached)

    def right(self, outputs: Tensor, truth: Tensor) -> Tensor | None:
        """The share of draws on which each point is right, for warnings; None where the task has no such notion."""
        return None

    def label_of(self, truth: Tensor) -> Tensor | None:
        """The class of every point, for promises per class and for breakdowns; None where there are none."""
        return truth if self.classed else None

    @property
    def classed(self) -> bool:
        """Whether every point has a class, which :meth:`label_of` tells."""
        return False

    @abstractmethod
    def probe(self) -> Tensor:
        """What the task's score gives on fixed outputs: it tells other settings, and other code under the same name."""

    def check_probe(self, expected: Tensor) -> None:
        """Raise unless :meth:`probe` gives what it gave at calibration."""
        found = self.probe()
        if found.shape != expected.shape or not torch.allclose(found.double(), expected.double(), rtol=1e-4, atol=1e-6):
            raise InputError(
                f"the score {self.score_name!r} gives other values than it did at calibration; pass the one that was "
                "calibrated with"
            )

    @classmethod
    def from_config(cls, config: dict[str, Any], score: Any = None) -> Task:
        """The task of a saved predictor; ``score`` is the user's own where it is code."""
        if score is not None:
            raise InputError(f"{cls.name} has no score of its own; leave it out")
        saved = {f.name: config[f.name] for f in fields(cls)}  # type: ignore[arg-type]
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()})

    def config(self) -> dict[str, Any]:
        """Name and fields, for JSON; :meth:`from_config` reads it back."""
        own = ((f.name, getattr(self, f.name)) for f in fields(self))  # type: ignore[arg-type]
        return {"name": self.name, **{name: list(value) if isinstance(value, tuple) else value for name, value in own}}
