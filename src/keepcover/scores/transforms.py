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


def rank(scores: Float[Tensor, "..."], holdout: Float[Tensor, " m"]) -> Tensor:
    """Q_rank: the share of holdout scores that are at most s. ``holdout`` must be sorted.

    Example:
        >>> rank(torch.tensor([0.0, 0.5, 2.0]), torch.tensor([0.1, 0.5, 0.9, 1.0]))
        tensor([0.0000, 0.5000, 1.0000])
    """
    return torch.searchsorted(holdout, scores.contiguous(), right=True) / len(holdout)


def random_rank(scores: Tensor, holdout: Float[Tensor, " m"], generator: torch.Generator | None = None) -> Tensor:
    """Q_rank with the paper's random tie-breaking: uniform among the ranks that tied holdout scores occupy.

    Valid as a smoothed score because the tie-breaker is drawn afresh for every draw, independently of the input.
    """
    low = torch.searchsorted(holdout, scores.contiguous(), right=False)
    high = torch.searchsorted(holdout, scores.contiguous(), right=True)
    v = torch.rand(scores.shape, generator=generator, device=scores.device)
    return (low + (v * (high - low + 1)).floor()) / len(holdout)


def sigmoid(scores: Float[Tensor, "..."], b: float = 0.9, T: float = 1 / 400) -> Float[Tensor, "..."]:
    r"""Q_sig: :math:`1 / (1 + e^{-(s - b) / T})`; it also brings an unbounded score into [0, 1].

    Example:
        >>> sigmoid(torch.tensor([0.0, 0.9, 1.0]))
        tensor([0.0000, 0.5000, 1.0000])
    """
    return ((scores - b) / T).sigmoid()


@dataclass(frozen=True)
class PTT:
    """Rank, then sigmoid, as one table: ``PTT.fit(holdout_scores)(scores)``.

    Attributes:
        holdout: sorted scores of the holdout's true labels, **one** noisy draw each.
        b: centre of the sigmoid, 1 - alpha.
        T: its temperature; small is steep.
        ties: ``upper`` counts tied holdout scores as below; ``random`` breaks ties at random, per draw, as the paper does.
    """

    holdout: Float[Tensor, " m"]
    b: float = 0.9
    T: float = 1 / 400
    ties: str = "upper"
    table: Float[Tensor, " m1"] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.holdout.ndim != 1 or len(self.holdout) < 1:
            raise InputError(f"expected a vector of holdout scores, got shape {tuple(self.holdout.shape)}")
        if not self.holdout.isfinite().all():
            raise InputError("holdout scores contain NaN or infinity; check the model's logits on the holdout")
        if self.ties not in ("upper", "random"):
            raise InputError(f"expected ties 'upper' or 'random', got {self.ties!r}")
        if not self.T > 0:
            raise InputError(f"expected a temperature T > 0, got {self.T}")
        m = len(self.holdout)
        ranks = torch.arange(m + 1, dtype=torch.float64, device=self.holdout.device) / m
        object.__setattr__(self, "table", sigmoid(ranks, self.b, self.T).to(self.holdout.dtype))

    @classmethod
    def fit(cls, holdout: Float[Tensor, " m"], alpha: float = 0.1, T: float = 1 / 400) -> PTT:
        """The paper's transform: centred at 1 - alpha.

        Example:
            >>> ptt = PTT.fit(torch.linspace(0, 1, 101))
            >>> ptt(torch.tensor([0.5, 0.95]))
            tensor([0., 1.])
        """
        return cls(holdout.sort().values, b=1 - alpha, T=T)

    def __call__(self, scores: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        if self.ties == "random":
            return self.table[(random_rank(scores, self.holdout) * len(self.holdout)).round().long()]
        flat = scores.detach().contiguous().flatten()
        found = torch.empty_like(flat, dtype=self.table.dtype)
        size = PIECE if flat.device.type == "cpu" else max(1, len(flat))  # ranks of a piece stay in a CPU's cache
        for some, place in zip(flat.split(size), found.split(size), strict=True):
            place.copy_(self.table[torch.searchsorted(self.holdout, some, right=True)])
        return found.view(scores.shape)

    def to(self, device: torch.device | str) -> PTT:
        """The same table elsewhere: moved, not computed again, so that every device maps scores to the same numbers."""
        moved = PTT(self.holdout.to(device), self.b, self.T, self.ties)
        object.__setattr__(moved, "table", self.table.to(device))
        return moved
