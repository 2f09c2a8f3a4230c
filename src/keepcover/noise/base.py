r"""The first seam: what the defender adds to a query, and what an attack can then do.

A certificate needs one function of the noise, ``up``: the largest probability that a set of clean probability q can have
after an admissible attack. Whatever bounds, methods and promises compute, they compute from that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import torch
from numpy import ndarray
from scipy.special import expit
from torch import Tensor

from keepcover.assumption import Assumption
from keepcover.errors import InputError
from keepcover.noise.norms import Shape, get_norm
from keepcover.noise.stream import Stream

FRESH = Assumption(
    "The noise of the query is fresh and unknown to the attacker, who may know everything else.",
    "library",
    "Every call draws its key from the operating system, and no request can set one. A seed, which predict takes for "
    "experiments, breaks it: give none in production.",
)

PHILOX = "Pseudo-random numbers of a secret seed (Philox)"


def pseudorandom(text: str) -> Assumption:
    """A sentence on random numbers that are computed."""
    how = "That Philox cannot be told from chance without its key is believed, not proved; tests compare its draws with the law."
    return Assumption(text, "none", how)


def added_noise(step: str, law: str) -> tuple[Assumption, Assumption]:
    """The assumptions of noise that is added to every number of an input."""
    added = f"{PHILOX}, added to the input and rounded with it to a grid of about {step}"
    return FRESH, pseudorandom(f"{added}, stand in for real {law} noise.")


class Noise(ABC):
    """A frozen, hashable value; subclasses are dataclasses whose fields are plain numbers.

    Attributes:
        name: in the command line, JSON and saved predictors.
        norms: what it certifies; the first is its own, which ``norm=None`` means.
        assumptions: what a guarantee says of it.
        concave: whether ``up`` is concave in q, which RSCP+ needs.
        hides: whether parts of the input become absent, which the model must be able to see: NaN, or -1 among tokens.
        deterministic: whether draws are not random: all of :meth:`positions`, one after the other.
        each: what one evaluation of the model is called.
        weaker: what makes attacks weaker, for advice: ``a larger sigma``.
        remedy: what to do with a model that fails under it; ``before`` that, where it has none, something that undoes the noise.
    """

    name: ClassVar[str]
    norms: ClassVar[tuple[str, ...]]
    concave: ClassVar[bool] = True
    hides: ClassVar[bool] = False
    deterministic: ClassVar[bool] = False
    each: ClassVar[str] = "draw"
    weaker: ClassVar[str] = "more noise"
    before: ClassVar[str] = ""
    remedy: ClassVar[str] = "train it under this noise (keepcover.training.fit_under_noise), or hide or add less"
    assumptions: ClassVar[tuple[Assumption, ...]] = (FRESH, pseudorandom(f"{PHILOX} stand in for real noise."))

    @abstractmethod
    def noisy(self, images: Tensor, stream: Stream, ids: Tensor, draws: range) -> Tensor:
        """Images ``[b, ...]`` under keyed noise, ``[b, len(draws), ...]``: independent over ids and draws."""

    def fresh(self, images: Tensor) -> Tensor:
        """One draw of every image from torch's own generator: for training, where noise needs no key."""
        ids = torch.randint(2**62, (len(images),), device=images.device)
        return self.noisy(images, Stream(0, "train"), ids, range(1))[:, 0]

    @abstractmethod
    def worst(self, q: ndarray, epsilon: float, norm: str, shape: Shape) -> Any:
        """The largest probability to which an attack lifts a set of probability q; :meth:`up` checks and rounds."""

    def up(self, q: Any, epsilon: float, norm: str | None = None, shape: Shape | None = None) -> Any:
        """The largest attacked probability of a set of clean probability q, rounded up; nondecreasing, up(1) = 1.

        Args:
            q: clean probabilities, a number or an array.
            epsilon: radius of the attack.
            norm: in which the radius is measured; the noise's own by default.
            shape: of one input, where the norm's bound depends on it.
        """
        norm, q = self.check_norm(norm), probabilities(q)
        if get_norm(norm).check(epsilon) == 0:
            return q[()]
        with np.errstate(all="ignore"):
            moved = self.worst(q, epsilon, norm, self.check_shape(norm, shape))
        # A formula may round below q or below the truth: up errs upwards. Zero stays zero.
        return np.where(q == 1, 1.0, np.clip(np.maximum(q, moved * (1 + 1e-12)), 0.0, 1.0))[()]

    def through(self, images: Tensor, noisy: Tensor) -> Tensor:
        """``noisy``, with the gradient that an attack may use: by default that of an addition, as if it rounded nothing."""
        return noisy + (images - images.detach())[:, None].to(noisy.dtype)

    def grid(self) -> ndarray:
        """Ascending probabilities at which bounds look, 0 and 1 included."""
        odds = [np.linspace(-200.0, -14.0, 94)[:-1], np.linspace(-14.0, 14.0, 561), np.linspace(14.0, 34.0, 21)[1:]]
        return np.concatenate([[0.0], expit(np.concatenate(odds)), [1.0]])

    def kinks(self, epsilon: float, norm: str, shape: Shape) -> tuple[float, ...]:
        """Where ``up`` bends: bounds look there too."""
        return ()

    def positions(self, shape: Shape) -> int:
        """How many evaluations a deterministic noise needs of one input."""
        raise InputError(f"{self} is random: it may be drawn any number of times")

    @property
    def certifies(self) -> bool:
        """Whether there is any noise at all."""
        return True

    def needs_shape(self, norm: str) -> bool:
        """Whether ``up`` depends on the shape of the inputs in this norm."""
        return False

    def check_shape(self, norm: str, shape: Shape | None) -> Shape:
        """The shape of an input, or an error where it is needed and not known."""
        if shape is None and not self.needs_shape(norm):
            return ()
        if shape is None:
            give = "give shape=(3, 32, 32) (--shape 3x32x32)"
            raise InputError(f"what an attack in {norm} can do under {self} depends on the inputs: {give}")
        # An empty one would be an attack on nothing, which changes nothing.
        if min(shape, default=0) < 1:
            raise InputError(f"expected the shape of one input, for instance (3, 32, 32), got {shape!r}")
        return tuple(shape)

    def check_norm(self, norm: str | None) -> str:
        """The norm meant, or an error that says what this noise certifies."""
        if norm is None:
            return self.norms[0]
        if norm not in self.norms:
            known = f"{self.name} noise certifies attacks in {', '.join(self.norms)}"
            raise InputError(f"{known}, got {norm!r}; use {get_norm(norm).answer}")
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
        norm = self.noise.check_norm(self.norm)
        needed = self.noise.needs_shape(norm) and self.shape is not None
        shape = self.noise.check_shape(norm, self.shape) if needed else None
        vars(self).update(norm=norm, epsilon=get_norm(norm).check(self.epsilon), shape=shape)

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
        """Where bounds look: the noise's own probabilities, and where ``up`` bends."""
        norm, shape = str(self.norm), self.noise.check_shape(str(self.norm), self.shape)
        bends = self.noise.kinks(self.epsilon, norm, shape) if self.epsilon else ()
        return np.union1d(self.noise.grid(), np.clip(np.array(bends, dtype=np.float64), 0.0, 1.0))

    def config(self) -> dict[str, Any]:
        """For JSON; :func:`keepcover.noise.get_threat` reads it back."""
        return {**vars(self), "noise": self.noise.config(), "shape": self.shape and list(self.shape)}

    @property
    def reach(self) -> str:
        """How far the attacker may go, in few words: ``L2 0.125``."""
        return get_norm(str(self.norm)).reach(self.epsilon)

    def __str__(self) -> str:
        return get_norm(str(self.norm)).deed(self.epsilon, self.shape)


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
