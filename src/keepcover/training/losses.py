"""What a network under training pays for each example: the truth's shape says which cross-entropy it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from keepcover.errors import InputError


@dataclass(frozen=True)
class CrossEntropy:
    """Of a label [n], of the label of every pixel [n, h, w], or of several labels at once, bool [n, K].

    Args:
        ignore: index of pixels without a label: they cost nothing. An image counts by the mean over its other pixels.
        weights: what a miss of each class costs, for classes that are rare (:func:`rarity`).

    Example:
        >>> pixels = torch.tensor([[[0, 9], [9, 9]]])
        >>> round(float(CrossEntropy(ignore=9)(torch.zeros(1, 2, 2, 2), pixels)), 4)  # log 2, of the one labelled pixel
        0.6931
        >>> CrossEntropy()(torch.zeros(3, 5), torch.ones(3, 5).bool()).shape
        torch.Size([3])
    """

    ignore: int | None = None
    weights: tuple[float, ...] | None = None

    def __call__(self, outputs: Tensor, truth: Tensor) -> Float[Tensor, " n"]:
        """The loss of every example."""
        several = truth.dtype == torch.bool
        wanted = outputs.shape if several else (outputs.shape[0], *outputs.shape[2:])
        if tuple(truth.shape) != tuple(wanted):
            shapes = f"shape {list(wanted)} for outputs {list(outputs.shape)}, got {list(truth.shape)} ({truth.dtype})"
            kinds = "one label [n], one per pixel [n, h, w], or bool [n, classes] for several"
            raise InputError(f"expected labels of {shapes}: {kinds}")
        weights = None if self.weights is None else torch.tensor(self.weights, device=outputs.device)
        if several:
            return F.binary_cross_entropy_with_logits(outputs, truth.float(), weights, reduction="none").mean(dim=1)
        ignored = -100 if self.ignore is None else self.ignore
        losses = F.cross_entropy(outputs, truth, weights, reduction="none", ignore_index=ignored)
        if truth.ndim == 1:
            return losses
        return losses.flatten(1).sum(dim=1) / self.counted(truth).flatten(1).sum(dim=1).clamp(min=1)

    def counted(self, truth: Tensor) -> Tensor:
        """Where there is a truth to learn."""
        return torch.ones_like(truth, dtype=torch.bool) if self.ignore is None else truth != self.ignore

    def right(self, outputs: Tensor, truth: Tensor) -> Tensor:
        """Where the outputs say what is true, among what counts, flat."""
        said = outputs > 0 if truth.dtype == torch.bool else outputs.argmax(dim=1)
        return (said == truth)[self.counted(truth)]


def rarity(truth: Tensor, classes: int, power: float = 0.5) -> tuple[float, ...]:
    """Weights for rare classes: frequency to the power of -0.5, at least one example of each taken, with mean 1 over examples.

    Example:
        >>> [round(weight, 2) for weight in rarity(torch.tensor([0, 0, 0, 0, 1]), 2)]
        [0.83, 1.67]
    """
    listed = truth[(truth >= 0) & (truth < classes)]
    share = torch.bincount(listed.flatten(), minlength=classes).clamp(min=1).double()
    share /= share.sum()
    return tuple((share**-power / (share ** (1 - power)).sum()).tolist())
