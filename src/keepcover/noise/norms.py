"""How far an attacker may move an input: one small object per norm, shared by guarantees and attacks."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from keepcover.errors import InputError


class Norm(ABC):
    """A norm as attacks and guarantees need it: the length of a move, its ball, and how to start inside it.

    Attributes:
        name: in the command line, JSON and saved predictors.
        words: in sentences, after the radius.
        short: in tables, before the radius.
    """

    name: str
    words: str
    short: str

    @abstractmethod
    def length(self, delta: Tensor) -> Tensor:
        """The length of every move ``[b, ...]`` -> ``[b]``."""

    @abstractmethod
    def direction(self, gradient: Tensor) -> Tensor:
        """The step of length 1 that raises the loss fastest."""

    @abstractmethod
    def project(self, delta: Tensor, radius: float) -> Tensor:
        """The nearest move within the radius."""

    @abstractmethod
    def random(self, like: Tensor, radius: float, generator: torch.Generator) -> Tensor:
        """A random move within the radius, of the shape of ``like``."""


class L2(Norm):
    """Euclidean length.

    Example:
        >>> L2().project(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), 1.0)
        tensor([[0.6000, 0.8000],
                [0.3000, 0.4000]])
    """

    name = "l2"
    words = "in L2 norm"
    short = "L2"

    def length(self, delta: Tensor) -> Tensor:
        return delta.flatten(1).norm(dim=1)

    def direction(self, gradient: Tensor) -> Tensor:
        return gradient / _beside(self.length(gradient).clamp_min(1e-30), gradient)

    def project(self, delta: Tensor, radius: float) -> Tensor:
        return delta * _beside((radius / self.length(delta).clamp_min(1e-30)).clamp_max(1.0), delta)

    def random(self, like: Tensor, radius: float, generator: torch.Generator) -> Tensor:
        """Uniform in the ball."""
        direction = self.direction(torch.randn(like.shape, generator=generator, device=like.device))
        u = torch.rand(len(like), generator=generator, device=like.device)
        return direction * radius * _beside(u.pow(1 / like[0].numel()), like)


def _beside(values: Tensor, images: Tensor) -> Tensor:
    """One number per image, shaped to multiply images."""
    return values.view(-1, *[1] * (images.ndim - 1))


NORMS: dict[str, Norm] = {norm.name: norm for norm in (L2(),)}


def get_norm(name: str) -> Norm:
    """A norm by name.

    Example:
        >>> get_norm("l2").words
        'in L2 norm'
    """
    if name not in NORMS:
        raise InputError(f"expected a norm among {', '.join(NORMS)}, got {name!r}")
    return NORMS[name]
