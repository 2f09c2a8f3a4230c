"""Which noise, norm, method, promise and task go together: read off the registries, refused in their own words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

import torch

from keepcover.errors import InputError
from keepcover.methods import METHODS, Asked, Method
from keepcover.noise import NOISES, NORMS, Noise, Threat, get_norm
from keepcover.promises import Promise
from keepcover.tasks import TASKS, Loss, Task

SHAPE = (1, 4, 4)  # of the inputs that combinations are tried on

PROMISES: dict[str, dict[str, Any]] = {
    "marginal": {},
    "delta": {"delta": 0.2},
    "per class": {"per": "class"},
    "per group": {"per": ("a", "b")},
    "clusters": {"per": "class", "clusters": (0, 0, 1)},
    "poisoned": {"poisoned": 1},
    "calibration_epsilon": {"calibration_epsilon": 1.0},
    "drift": {"drift": 0.05},
    "label_weights": {"label_weights": (1.0, 2.0, 0.5)},
}
"""Every clause alone, with a value that means something for three classes."""


@dataclass(frozen=True)
class Combination:
    """One cell of the table: a member of every seam."""

    noise: Noise
    norm: str
    method: Method
    promise: str
    task: Task

    def asked(self, n: int = 10**6, draws: int = 4) -> Asked:
        """The question that this combination asks of its method."""
        threat = Threat(self.noise, epsilon_of(self.norm), self.norm, SHAPE)
        return Asked(0.2, threat, draws, n, 3, draws, Promise(**PROMISES[self.promise]))

    @property
    def why_not(self) -> str:
        """Why this is refused, in the words that users are told; empty where it is allowed.

        Example:
            >>> from keepcover import Gaussian, Multilabel
            >>> Combination(Gaussian(0.5), "l2", METHODS["exact_asymmetric"], "per class", Multilabel()).why_not
            'per speaks of the class of every point: it needs a classification task whose labels are all known'
        """
        try:
            self.method.check(self.asked(), self.task)
        except InputError as error:
            return str(error)
        return ""


def epsilon_of(norm: str) -> float:
    """A small attack: one pixel, or a twentieth."""
    return 1.0 if get_norm(norm).replaces else 0.05


def missed(outputs: torch.Tensor, truth: torch.Tensor, parameter: float) -> torch.Tensor:
    """A loss to try: which of the true labels have a logit below minus the parameter."""
    return ((outputs < -parameter) & truth).double().mean(dim=1)


def combinations() -> Iterator[Combination]:
    """Every cell: the library's own members only, whatever else is registered, with numbers that suit small inputs."""
    noises = [kind(*(2 if field.type == "int" else 0.5 for field in fields(kind))) for kind in own(NOISES)]
    tasks = [Loss(missed, (-2.0, 0.0, 2.0, 1e9)) if kind is Loss else kind() for kind in own(TASKS)]
    every = product(noises, own(NORMS, names=True), own(METHODS), PROMISES, tasks)
    return (Combination(*cell) for cell in every)


def own(registry: Mapping[str, Any], names: bool = False) -> list[Any]:
    """The members of a registry that the library brings, or their names."""
    kinds = {name: one if isinstance(one, type) else type(one) for name, one in registry.items()}
    found = [name for name, kind in kinds.items() if kind.__module__.startswith("keepcover.")]
    return found if names else [registry[name] for name in found]
