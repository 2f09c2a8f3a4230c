"""A second noise, in one file: Laplace noise against L1 attacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keepcover.noise import NOISES, NORMS, Noise, Norm, Stream
from keepcover.noise.base import Shape, probabilities


class L1(Norm):
    """The sum of absolute changes."""

    name = "l1"
    words = "in L1 norm"
    short = "L1"

    def length(self, delta: Tensor) -> Tensor:
        return delta.flatten(1).abs().sum(dim=1)

    def direction(self, gradient: Tensor) -> Tensor:
        """All of the step on the steepest coordinate."""
        flat = gradient.flatten(1)
        at = flat.abs().argmax(dim=1, keepdim=True)
        return torch.zeros_like(flat).scatter(1, at, flat.gather(1, at).sign()).view_as(gradient)

    def project(self, delta: Tensor, radius: float) -> Tensor:
        """Scaled down: inside the ball, if not the nearest point of it."""
        scale = (radius / self.length(delta).clamp_min(1e-30)).clamp_max(1.0)
        return delta * scale.view(-1, *[1] * (delta.ndim - 1))

    def random(self, like: Tensor, radius: float, generator: torch.Generator) -> Tensor:
        return self.project(torch.randn(like.shape, generator=generator), radius)


@dataclass(frozen=True)
class Laplace(Noise):
    """Independent Laplace noise of ``scale``: up of the half-line, which is the worst set by log-concavity."""

    scale: float

    name = "laplace"
    norms = ("l1",)

    def noisy(self, images: Tensor, stream: Stream, ids: Tensor, draws: range) -> Tensor:
        u = torch.special.ndtr(stream.gaussian(ids, draws, tuple(images.shape[1:])).double())
        centred = (u - 0.5).clamp(-0.5 + 1e-16, 0.5 - 1e-16)
        return (images[:, None] - self.scale * centred.sign() * torch.log1p(-2 * centred.abs())).float()

    def up(self, q: Any, epsilon: float, norm: str | None = None, shape: Shape | None = None) -> Any:
        self.check_norm(norm)
        q, rho = probabilities(q), epsilon / self.scale
        with np.errstate(divide="ignore"):
            middle = 1 - np.exp(-rho) / (4 * np.maximum(q, 1e-300))
        moved = np.where(q <= np.exp(-rho) / 2, q * np.exp(rho), np.where(q <= 0.5, middle, 1 - (1 - q) * np.exp(-rho)))
        return np.clip(np.maximum(q, moved * (1 + 1e-12)), 0.0, 1.0)[()]

    def __str__(self) -> str:
        return f"Laplace noise scale {self.scale:g}"


NOISES[Laplace.name] = Laplace
NORMS[L1.name] = L1()
