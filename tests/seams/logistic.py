"""Another noise, in one file: logistic noise against L1 attacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy import ndarray
from scipy.special import expit, logit
from torch import Tensor

from keepcover.noise import NOISES, Noise, Stream
from keepcover.noise.norms import Shape
from keepcover.noise.stream import added


@dataclass(frozen=True)
class Logistic(Noise):
    """Independent logistic noise of ``scale``: log-concave, so half-lines along an axis are the worst sets."""

    scale: float

    name = "logistic"
    norms = ("l1",)

    def noisy(self, images: Tensor, stream: Stream, ids: Tensor, draws: range) -> Tensor:
        return added(images, self.scale * stream.unit(ids, draws, tuple(images.shape[1:])).logit(), self.scale)

    def worst(self, q: ndarray, epsilon: float, norm: str, shape: Shape) -> Any:
        return expit(logit(q) + epsilon / self.scale)

    def __str__(self) -> str:
        return f"logistic noise of scale {self.scale:g}"


NOISES[Logistic.name] = Logistic
