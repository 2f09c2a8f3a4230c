r"""Conformal training: ConfTr (Stutz et al. 2022), RCT (the paper, Section 4.2), and a loss matched to the exact rule.

All three split a batch in halves, take a soft conformal threshold from the first half, form soft sets on the second, and
ask for small sets that hold the true label:

.. math:: L = \log\bigl(\operatorname{mean}(1 - c_y) + \lambda \operatorname{mean}(\max(0, \textstyle\sum_k c_k - s))
    + 10^{-8}\bigr), \qquad c_k = \mathrm{sigmoid}((\tau - S_k) / T)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keepcover.errors import InputError
from keepcover.scores.scores import log_odds

# Soft sorting and soft quantiles (Blondel et al. 2020): projections onto the permutahedron, L2-regularised. The projection
# reduces to an isotonic regression, which is solved here by its minimax formula instead of the sequential
# pool-adjacent-violators loop: the same blocks, but batched, on any device, without a host synchronisation, and with the
# exact gradient from autograd. It takes O(n^2) memory, fine for the few hundred scores of a training batch.


def isotonic(values: Float[Tensor, "*b n"]) -> Float[Tensor, "*b n"]:
    r"""The nonincreasing vector nearest to ``values`` in L2.

    .. math:: v_i = \min_{a \le i} \max_{b \ge i} \frac{1}{b - a + 1} \sum_{j=a}^{b} y_j

    Example:
        >>> isotonic(torch.tensor([3.0, 1.0, 2.0, 0.0]))
        tensor([3.0000, 1.5000, 1.5000, 0.0000])
    """
    n = values.shape[-1]
    total = torch.nn.functional.pad(values.cumsum(dim=-1), (1, 0))
    at = torch.arange(n, device=values.device)
    count = (at[None, :] - at[:, None] + 1).clamp_min(1)
    means = (total[..., None, 1:] - total[..., :-1, None]) / count  # [a, b]
    means = means.masked_fill(at[None, :] < at[:, None], -torch.inf)
    best = means.flip(-1).cummax(dim=-1).values.flip(-1)  # [a, i]: max over b >= i
    return best.masked_fill(at[None, :] < at[:, None], torch.inf).min(dim=-2).values


def soft_sort(values: Float[Tensor, "*b n"], strength: float = 0.1) -> Float[Tensor, "*b n"]:
    r"""Values in ascending order, differentiably; the hard sort as ``strength`` goes to 0, their mean as it grows.

    :math:`s_\epsilon(\theta) = P(\rho / \epsilon, \theta)` with :math:`\rho = (n, \dots, 1)`, sorted descending there.

    Example:
        >>> soft_sort(torch.tensor([2.0, 0.0, 1.0]), strength=0.01)
        tensor([0., 1., 2.])
    """
    if strength <= 0:
        raise InputError(f"expected a regularisation strength > 0, got {strength}")
    n = values.shape[-1]
    descending = values.sort(dim=-1, descending=True).values
    anchor = torch.arange(n, 0, -1, device=values.device, dtype=values.dtype) / strength
    # rho / eps is large: its differences are exact in the regression's blocks, but subtracting it twice is not, so the
    # residual is pooled directly. Within a block of isotonic(anchor - descending) the result is anchor minus the mean.
    return (anchor - isotonic(anchor - descending)).flip(-1)


def soft_quantile(values: Float[Tensor, " n"], level: float, strength: float = 0.1) -> Tensor:
    r"""The :math:`level\,(1 + 1/n)`-quantile of soft-sorted values, as conformal training uses it.

    The position :math:`level\,(n + 1)` among the ascending values is interpolated between its neighbours and stops at the
    largest; where it is whole it is the conformal order statistic.

    Example:
        >>> soft_quantile(torch.arange(1.0, 10.0), level=0.9, strength=0.01)
        tensor(9.)
    """
    n = len(values)
    position = min(max(level * (n + 1), 1.0), float(n))
    low = min(int(position), n - 1)
    share = position - low
    ascending = soft_sort(values, strength)
    return (1 - share) * ascending[low - 1] + share * ascending[low] if n > 1 else ascending[0]


@dataclass(frozen=True)
class SoftSets:
    """What a conformal loss saw: for logging beside the loss itself."""

    loss: Tensor
    soft_size: Tensor
    hard_size: Tensor
    coverage: Tensor


@dataclass(frozen=True)
class ConformalLoss(ABC):
    """The common part: soft threshold, soft sets, class and size loss. ``logits`` are [examples, noisy copies, classes].

    Attributes:
        alpha: miscoverage that training simulates.
        temperature: T of the soft sets.
        size_weight: lambda.
        free_size: set size s that costs nothing.
        strength: regularisation of the soft sort.
        log: take the logarithm, as the public code does and the paper does not say.
    """

    alpha: float = 0.1
    temperature: float = 0.1
    size_weight: float = 1.0
    free_size: float = 1.0
    strength: float = 0.1
    log: bool = True

    def threshold(self, known: Float[Tensor, " h"]) -> Tensor:
        """Of the sets, from the calibration statistics of true labels."""
        return soft_quantile(known, 1 - self.alpha, self.strength)

    @abstractmethod
    def scores(self, logits: Float[Tensor, "b n k"]) -> tuple[Float[Tensor, "b k"], Float[Tensor, "b k"]]:
        """Statistics of all labels, as calibration takes them and as sets are made of."""

    def __call__(self, logits: Float[Tensor, "b n k"], labels: Int[Tensor, " b"]) -> SoftSets:
        """The loss of a batch, and what its sets look like."""
        half = len(logits) // 2
        if not half:
            raise InputError(f"every batch is split in two: expected at least 2 examples, got {len(logits)}")
        calibration, scores = self.scores(logits)
        known = calibration[:half].gather(1, labels[:half, None])[:, 0]
        tau = self.threshold(known)
        scores, truth = scores[half:], labels[half:, None]
        soft = ((tau - scores) / self.temperature).sigmoid()
        size = soft.sum(dim=1)
        total = (1 - soft.gather(1, truth)).mean() + self.size_weight * (size - self.free_size).clamp_min(0).mean()
        loss = (total + 1e-8).log() if self.log else total
        hard = (scores.detach() <= tau.detach()).double()
        return SoftSets(loss, size.detach().mean(), hard.sum(dim=1).mean(), hard.gather(1, truth).mean())


@dataclass(frozen=True)
class ConfTr(ConformalLoss):
    """Conformal training for vanilla conformal prediction, on negative log-probabilities of clean images, one copy each.

    Example:
        >>> logits, labels = 2 * torch.eye(2).repeat(2, 1), torch.tensor([0, 1, 0, 1])
        >>> bool(ConfTr()(logits[:, None], labels).hard_size <= 2)
        True
    """

    def scores(self, logits: Float[Tensor, "b n k"]) -> tuple[Tensor, Tensor]:
        scores = -logits[:, 0].log_softmax(dim=-1)
        return scores, scores


@dataclass(frozen=True)
class RCT(ConformalLoss):
    r"""Robust conformal training: RSCP simulated in the batch, on :math:`\Phi^{-1}` of the smoothed HPS score.

    Attributes:
        r: epsilon / sigma, the inflation of the threshold.
    """

    r: float = 0.5

    def threshold(self, known: Float[Tensor, " h"]) -> Tensor:
        return super().threshold(known) + self.r

    def scores(self, logits: Float[Tensor, "b n k"]) -> tuple[Tensor, Tensor]:
        scores = torch.special.ndtri((1 - logits.softmax(dim=-1).mean(dim=1)).clamp(1e-7, 1 - 1e-7))
        return scores, scores


@dataclass(frozen=True)
class ExactRCT(ConformalLoss):
    """Beyond the paper: trains for the exact certificate instead of RSCP's rule.

    The calibration statistic is the soft (c+1)-th largest log-odds among the noisy copies, the test statistic the soft
    (kappa+1)-th largest, and the threshold the soft quantile at the certified level alpha'.

    Attributes:
        c, kappa, level: the rule, for as many draws as there are noisy copies in training.
    """

    c: int = 1
    kappa: int = 3
    level: float = 0.1
    temperature: float = 1.0

    def threshold(self, known: Float[Tensor, " h"]) -> Tensor:
        return soft_quantile(known, 1 - self.level, self.strength)

    def scores(self, logits: Float[Tensor, "b n k"]) -> tuple[Tensor, Tensor]:
        draws = logits.shape[1]
        if not (0 <= self.c < draws and 0 <= self.kappa < draws):
            raise InputError(f"expected c and kappa below the {draws} noisy copies, got {self.c} and {self.kappa}")
        ordered = soft_sort(log_odds(logits).transpose(1, 2), self.strength)  # [b, k, n]
        return ordered[..., draws - 1 - self.c], ordered[..., draws - 1 - self.kappa]
