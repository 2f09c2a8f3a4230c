r"""The first seam: what the defender adds to a query, and what an attack can then do.

A certificate needs one function of the noise, ``up``: the largest probability that a set of clean probability q can have
after an admissible attack. Whatever bounds, methods and promises compute, they compute from that.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from numpy import ndarray
from scipy.special import expit
from torch import Tensor

from keepcover.errors import InputError
from keepcover.noise.norms import get_norm
from keepcover.noise.stream import Stream

Shape = tuple[int, ...]
FRESH = "The noise of the query is fresh and unknown to the attacker, who may know everything else."


class Noise(ABC):
    """A frozen, hashable value; subclasses are dataclasses whose fields are plain numbers.

    Attributes:
        name: in the command line, JSON and saved predictors.
        norms: what it certifies; the first is its own, which ``norm=None`` means.
        assumptions: what a guarantee says of it.
        concave: whether ``up`` is concave in q, which RSCP+ needs.
    """

    name: ClassVar[str]
    norms: ClassVar[tuple[str, ...]]
    concave: ClassVar[bool] = True
    assumptions: ClassVar[tuple[str, ...]] = (
        FRESH,
        "Pseudo-random numbers of a secret seed (Philox) stand in for real noise.",
    )

    @abstractmethod
    def noisy(self, images: Tensor, stream: Stream, ids: Tensor, draws: range) -> Tensor:
        """Images ``[b, ...]`` under keyed noise, ``[b, len(draws), ...]``: independent over ids and draws."""

    @abstractmethod
    def up(self, q: Any, epsilon: float, norm: str | None = None, shape: Shape | None = None) -> Any:
        """The largest attacked probability of a set of clean probability q, rounded up; nondecreasing, up(1) = 1.

        Args:
            q: clean probabilities, a number or an array.
            epsilon: radius of the attack.
            norm: in which the radius is measured; the noise's own by default.
            shape: of one input, where the norm's bound depends on it.
        """

    def through(self, images: Tensor, noisy: Tensor) -> Tensor:
        """``noisy``, with the gradient that an attack may use: by default that of an addition, as if it rounded nothing."""
        return noisy + (images - images.detach())[:, None].to(noisy.dtype)

    def grid(self) -> ndarray:
        """Ascending probabilities at which bounds look, 0 and 1 and the places where ``up`` bends included."""
        return np.concatenate([[0.0], expit(np.linspace(-200.0, 34.0, 641)), [1.0]])

    @property
    def certifies(self) -> bool:
        """Whether there is any noise at all."""
        return True

    def needs_shape(self, norm: str) -> bool:
        """Whether ``up`` depends on the shape of the inputs in this norm."""
        return False

    def check_norm(self, norm: str | None) -> str:
        """The norm meant, or an error that says what this noise certifies."""
        if norm is None:
            return self.norms[0]
        if norm not in self.norms:
            raise InputError(f"{self.name} noise certifies the norms {', '.join(self.norms)}, got {norm!r}")
        return norm

    def config(self) -> dict[str, Any]:
        """Name and numbers, for JSON; :func:`keepcover.noise.get_noise` reads it back."""
        return {"name": self.name, **asdict(self)}  # type: ignore[call-overload]

    @property
    def spec(self) -> str:
        """Name and numbers as the command line takes them: ``gaussian:0.25``."""
        return f"{self.name}:{','.join(repr(value) for value in asdict(self).values())}"  # type: ignore[call-overload]

    @abstractmethod
    def __str__(self) -> str:
        """In words, as a guarantee names it."""


@dataclass(frozen=True)
class Threat:
    """An attack of up to ``epsilon`` in a norm against a noise: all that bounds ever see.

    Example:
        >>> from keepcover.noise import Gaussian
        >>> threat = Threat(Gaussian(0.25), 0.125)
        >>> round(float(threat.up(0.1)), 4), round(float(threat.down(0.1)), 4)
        (0.2172, 0.0374)
    """

    noise: Noise
    epsilon: float
    norm: str | None = None
    shape: Shape | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.epsilon) and self.epsilon >= 0):
            raise InputError(f"expected a finite epsilon >= 0, the radius of the attack, got {self.epsilon}")
        norm = self.noise.check_norm(self.norm)
        object.__setattr__(self, "norm", norm)
        object.__setattr__(self, "epsilon", float(self.epsilon))
        object.__setattr__(self, "shape", tuple(self.shape) if self.shape and self.noise.needs_shape(norm) else None)

    def up(self, q: Any) -> Any:
        """The largest attacked probability of a set of clean probability q."""
        return self.noise.up(q, self.epsilon, self.norm, self.shape)

    def down(self, p: Any) -> Any:
        """The smallest attacked probability of a set of clean probability p: 1 - up(1 - p), rounded down."""
        attacked = self.up(1 - np.asarray(p, dtype=np.float64))
        # Two differences are rounded, by at most 2^-53 each: down errs downwards.
        return np.where(attacked == 0, 1.0, np.maximum(1 - attacked - 2.0**-52, 0.0))[()]

    def most(self, alpha: float) -> float:
        """The largest clean probability that no attack lifts above ``alpha``, rounded down.

        Example:
            >>> from keepcover.noise import Gaussian
            >>> round(Threat(Gaussian(0.25), 0.125).most(0.1), 4)
            0.0374
        """
        return _most(self, alpha)

    def grid(self) -> ndarray:
        """Where bounds look; see :meth:`Noise.grid`."""
        return self.noise.grid()

    def config(self) -> dict[str, Any]:
        """For JSON; :func:`keepcover.noise.get_threat` reads it back."""
        return {
            "noise": self.noise.config(),
            "epsilon": self.epsilon,
            "norm": self.norm,
            "shape": None if self.shape is None else list(self.shape),
        }

    @property
    def reach(self) -> str:
        """How far the attacker may go, in few words: ``L2 0.125``."""
        return f"{get_norm(str(self.norm)).short} {self.epsilon:g}"

    def __str__(self) -> str:
        return f"has moved it by up to {self.epsilon:g} {get_norm(str(self.norm)).words}"


@lru_cache(maxsize=4096)
def _most(threat: Threat, alpha: float) -> float:
    low, high = 0.0, 1.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if threat.up(middle) <= alpha else (low, middle)
    return low


def probabilities(q: Any) -> ndarray:
    """q as float64, or an error: what every ``up`` checks first.

    Example:
        >>> probabilities(0.5)
        array(0.5)
    """
    q = np.asarray(q, dtype=np.float64)
    if np.isnan(q).any() or np.any((q < 0) | (q > 1)):
        raise InputError(f"expected probabilities in [0, 1], got range [{q.min()}, {q.max()}]")
    return q
