r"""Conformal training: ConfTr (Stutz et al. 2022), RCT (the paper, Section 4.2), and a loss matched to the exact rule.

All three split a batch in halves, take a soft conformal threshold from the first half, form soft sets on the second, and
ask for small sets that hold the true label:

.. math:: L = \log\bigl(\operatorname{mean}(1 - c_y) + \lambda \operatorname{mean}(\max(0, \textstyle\sum_k c_k - \kappa))
    + 10^{-8}\bigr), \qquad c_k = \mathrm{sigmoid}((\tau - S_k) / T)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keepcover.errors import InputError
from keepcover.scores.scores import log_odds
from keepcover.training.soft import soft_quantile, soft_sort


@dataclass(frozen=True)
class SoftSets:
    """What a conformal loss saw: for logging beside the loss itself."""

    loss: Tensor
    soft_size: Tensor
    hard_size: Tensor
    coverage: Tensor


@dataclass(frozen=True)
class ConformalLoss:
    """The common part: soft threshold, soft sets, class and size loss.

    Attributes:
        alpha: miscoverage that training simulates.
        temperature: T of the soft sets.
        size_weight: lambda.
        kappa: set size that costs nothing.
        strength: regularisation of the soft sort.
        log: take the logarithm, as the public code does and the paper does not say.
    """

    alpha: float = 0.1
    temperature: float = 0.1
    size_weight: float = 1.0
    kappa: float = 1.0
    strength: float = 0.1
    log: bool = True

    def from_scores(
        self,
        calibration: Float[Tensor, " m"],
        scores: Float[Tensor, "b k"],
        labels: Int[Tensor, " b"],
        shift: float = 0.0,
        level: float | None = None,
    ) -> SoftSets:
        """True-label scores of one half, all scores of the other; the threshold moves by ``shift``."""
        tau = soft_quantile(calibration, 1 - self.alpha if level is None else level, self.strength) + shift
        soft = ((tau - scores) / self.temperature).sigmoid()
        own = soft.gather(1, labels[:, None])[:, 0]
        size = soft.sum(dim=1)
        total = (1 - own).mean() + self.size_weight * (size - self.kappa).clamp_min(0).mean()
        hard = scores.detach() <= tau.detach()
        return SoftSets(
            (total + 1e-8).log() if self.log else total,
            size.detach().mean(),
            hard.sum(dim=1).double().mean(),
            hard.gather(1, labels[:, None]).double().mean(),
        )


def _halves(count: int) -> int:
    if count < 2:
        raise InputError(f"conformal training splits every batch in two: expected at least 2 examples, got {count}")
    return count // 2


@dataclass(frozen=True)
class ConfTr(ConformalLoss):
    """Conformal training for vanilla conformal prediction, on negative log-probabilities of clean images.

    Example:
        >>> logits, labels = torch.tensor([[2.0, 0.0], [0.0, 2.0], [2.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 1, 0, 1])
        >>> bool(ConfTr()(logits, labels).hard_size <= 2)
        True
    """

    def __call__(self, logits: Float[Tensor, "b k"], labels: Int[Tensor, " b"]) -> SoftSets:
        half = _halves(len(logits))
        scores = -logits.log_softmax(dim=-1)
        return self.from_scores(scores[:half].gather(1, labels[:half, None])[:, 0], scores[half:], labels[half:])


@dataclass(frozen=True)
class RCT(ConformalLoss):
    r"""Robust conformal training: RSCP simulated in the batch, on :math:`\Phi^{-1}` of the smoothed HPS score.

    Attributes:
        r: epsilon / sigma, the inflation of the threshold.
    """

    r: float = 0.5

    def __call__(self, logits: Float[Tensor, "b n k"], labels: Int[Tensor, " b"]) -> SoftSets:
        """``logits`` are those of several noisy copies of every image."""
        half = _halves(len(logits))
        smoothed = (1 - logits.softmax(dim=-1).mean(dim=1)).clamp(1e-7, 1 - 1e-7)
        scores = torch.special.ndtri(smoothed)
        own = scores[:half].gather(1, labels[:half, None])[:, 0]
        return self.from_scores(own, scores[half:], labels[half:], shift=self.r)


@dataclass(frozen=True)
class ExactRCT(ConformalLoss):
    """Beyond the paper: trains for the exact certificate instead of RSCP's rule.

    The calibration statistic is the soft (c+1)-th largest log-odds among the noisy copies, the test statistic the soft
    (kappa_count+1)-th largest, and the threshold the soft quantile at the certified level alpha'.

    Attributes:
        c, kappa_count, level: the rule, for as many draws as there are noisy copies in training.
    """

    c: int = 1
    kappa_count: int = 3
    level: float = 0.1
    temperature: float = 1.0

    def __call__(self, logits: Float[Tensor, "b n k"], labels: Int[Tensor, " b"]) -> SoftSets:
        half, draws = _halves(len(logits)), logits.shape[1]
        if not (0 <= self.c < draws and 0 <= self.kappa_count < draws):
            raise InputError(
                f"expected c and kappa below the {draws} noisy copies, got {self.c} and {self.kappa_count}"
            )
        scores = log_odds(logits).transpose(1, 2)  # [b, k, n]
        ordered = soft_sort(scores, self.strength)
        calibration = ordered[:half, :, draws - 1 - self.c].gather(1, labels[:half, None])[:, 0]
        test = ordered[half:, :, draws - 1 - self.kappa_count]
        return self.from_scores(calibration, test, labels[half:], level=1 - self.level)
