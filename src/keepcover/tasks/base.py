"""The third seam: what an output of the model means, what must not be missed, and what a set is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from numpy import ndarray
from torch import Tensor

from keepcover.errors import InputError
from keepcover.guarantee import Guarantee
from keepcover.noise import Stream
from keepcover.scores import Items, Reading

Rule = Any  # a keepcover.methods.Rule: tasks are handed rules, and methods come after tasks


@runtime_checkable
class Measured(Protocol):
    """What measuring sets against the truth gives, whatever the task."""

    coverage: Any
    size: float

    def to_dict(self) -> dict[str, Any]: ...


@runtime_checkable
class Sets(Protocol):
    """What a predictor returns: one set per query, with the guarantee that they carry."""

    guarantee: Guarantee

    @property
    def size(self) -> Tensor: ...
    def covers(self, truth: Any) -> Tensor: ...
    def measure(self, truth: Any) -> Measured: ...
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
    """

    name: ClassVar[str]
    words: ClassVar[str]
    assumptions: ClassVar[tuple[str, ...]] = ()
    open_labels: bool = False

    @abstractmethod
    def seen(self, outputs: Tensor) -> Task:
        """The task with everything that the model's outputs ``[n, N, ...]`` fix, or an error where they do not fit."""

    @abstractmethod
    def check_truth(self, truth: Any, n: int) -> Tensor:
        """The truth of n points as a tensor, or an error that says what is wrong with it."""

    @property
    @abstractmethod
    def candidates(self) -> int | None:
        """How many labels a full set holds; None where sets are not finite."""

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

    @abstractmethod
    def union(self, first: Tensor, second: Tensor) -> Tensor:
        """Sets that hold what either holds: a superset keeps the promise."""

    @abstractmethod
    def sets(self, inside: Tensor, guarantee: Guarantee, draws_used: Tensor | None = None) -> Any:
        """What users read."""

    @abstractmethod
    def profile(self, outputs: Tensor, u: Tensor, thresholds: ndarray) -> ndarray:
        """How large the sets of count rules would be, ``[thresholds, N + 1]``: the mean measure of candidates whose scores
        exceed each threshold in exactly j of the N draws.
        """

    def right(self, outputs: Tensor, truth: Tensor) -> Tensor | None:
        """The share of draws on which each point is right, for warnings; None where the task has no such notion."""
        return None

    def groups(self, truth: Tensor) -> Tensor | None:
        """The class of every point, for breakdowns; None where there are none."""
        return None

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
    @abstractmethod
    def from_config(cls, config: dict[str, Any], score: Any = None) -> Task:
        """The task of a saved predictor; ``score`` is the user's own where it is code."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Name and numbers, for JSON; :meth:`from_config` reads it back."""
