r"""Post-training transformation (PTT): a monotone map of the score, fitted on a holdout, that steepens it at the threshold.

The smoothed score of a step function moves least under attack, so PTT turns any score into nearly a step at the
quantile it will be thresholded at: :math:`Q = Q_{sig} \circ Q_{rank}`. It applies to every noisy draw **before**
averaging, and costs one table look-up.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from keepcover.errors import InputError
from keepcover.scores.draws import PIECE


def rank(scores: Float[Tensor, "..."], reference: Float[Tensor, " m"]) -> Tensor:
    """Q_rank: the share of reference scores that are at most s. ``reference`` must be sorted.

    Example:
        >>> rank(torch.tensor([0.0, 0.5, 2.0]), torch.tensor([0.1, 0.5, 0.9, 1.0]))
        tensor([0.0000, 0.5000, 1.0000])
    """
    return torch.searchsorted(reference, scores.contiguous(), right=True) / len(reference)


def sigmoid(scores: Float[Tensor, "..."], b: float = 0.9, T: float = 1 / 400) -> Float[Tensor, "..."]:
    r"""Q_sig: :math:`1 / (1 + e^{-(s - b) / T})`; it also brings an unbounded score into [0, 1].

    Example:
        >>> sigmoid(torch.tensor([0.0, 0.9, 1.0]))
        tensor([0.0000, 0.5000, 1.0000])
    """
    return ((scores - b) / T).sigmoid()


@dataclass(frozen=True)
class PTT:
    """The transformation before it has seen a holdout: an option of methods that average scores.

    Attributes:
        T: temperature of the sigmoid; small is steep. The paper's is 1/400.
    """

    T: float = 1 / 400

    name = "ptt"

    def __post_init__(self) -> None:
        if not self.T > 0:
            raise InputError(f"expected a temperature T > 0, got {self.T}")

    def fit(self, reference: Float[Tensor, " m"], alpha: float = 0.1) -> Steps:
        """Fitted to scores of the holdout's truth, **one** noisy draw each; the sigmoid is centred at 1 - alpha.

        Example:
            >>> steps = PTT().fit(torch.linspace(0, 1, 101))
            >>> steps(torch.tensor([0.5, 0.95]))
            tensor([0., 1.])
        """
        if reference.ndim != 1 or len(reference) < 1:
            raise InputError(f"expected a vector of holdout scores, got shape {tuple(reference.shape)}")
        if not reference.isfinite().all():
            raise InputError("holdout scores contain NaN or infinity; check the model's outputs on the holdout")
        ranks = torch.arange(len(reference) + 1, dtype=torch.float64, device=reference.device) / len(reference)
        return Steps(reference.sort().values, sigmoid(ranks, 1 - alpha, self.T).to(reference.dtype))


@dataclass(frozen=True, eq=False)
class Steps:
    """PTT fitted: ``table[j]`` for a score that exceeds j of the sorted reference scores. Compared by identity."""

    reference: Float[Tensor, " m"]
    table: Float[Tensor, " m1"]
    _elsewhere: dict[torch.device, Steps] = field(default_factory=dict, repr=False)

    def __call__(self, scores: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        own = self.to(scores.device)
        flat = scores.detach().contiguous().flatten()
        found = torch.empty_like(flat, dtype=self.table.dtype)
        size = PIECE if flat.device.type == "cpu" else max(1, len(flat))  # ranks of a piece stay in a CPU's cache
        for some, place in zip(flat.split(size), found.split(size), strict=True):
            place.copy_(own.table[torch.searchsorted(own.reference, some, right=True)])
        return found.view(scores.shape)

    def smooth(self, scores: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """The table with straight lines between its steps: the gradient that an attack climbs."""
        own = self.to(scores.device)
        at = torch.searchsorted(own.reference, scores.detach().contiguous()).clamp(1, len(own.reference) - 1)
        left, right = own.reference[at - 1], own.reference[at]
        share = ((scores - left) / (right - left).clamp_min(1e-9)).clamp(0, 1)
        return own.table[at] + share * (own.table[at + 1] - own.table[at])

    def to(self, device: torch.device) -> Steps:
        """The same table elsewhere: moved, not computed again, so that every device maps scores to the same numbers."""
        if device == self.table.device:
            return self
        if device not in self._elsewhere:
            self._elsewhere[device] = Steps(self.reference.to(device), self.table.to(device))
        return self._elsewhere[device]
