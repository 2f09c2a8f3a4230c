"""Regression: outputs are numbers, and a set is a union of intervals for each target, found among the ends of many intervals."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from keepcover.errors import InputError
from keepcover.guarantee import Guarantee
from keepcover.noise.stream import probes
from keepcover.scores import Draws, Items, Reading
from keepcover.scores.draws import on_device
from keepcover.tasks.base import Rule, Task
from keepcover.tasks.intervals import PredictionIntervals, check_values, deep, depth, lengths

SCORES = {"residual": 1, "quantiles": 2, "scaled": 2}
"""How many numbers the model returns for a target: f; a lower and an upper quantile; a mean and a scale."""


@dataclass(frozen=True)
class Regression(Task):
    r"""Intervals from outputs ``[n, N]`` or ``[n, N, parts, targets]``, a missing last axis being one target.

    Every score is :math:`S(x, y) = \max(a - y, y - b) / s`, so draw j keeps :math:`[a_j - t s_j, b_j + t s_j]`, and y is in the
    union iff at most kappa of the N intervals miss it: a sweep over 2N ends, exact. Quantiles and scales are evaluated under
    the same noise as everything else.

    - ``residual``: a = b = f(x), s = 1. Outputs ``[n]``, or ``[n, targets]``.
    - ``quantiles`` (CQR): a and b are a lower and an upper quantile, s = 1. Outputs ``[n, 2]``, or ``[n, 2, targets]``.
    - ``scaled``: a = b is a mean, s > 0 a scale. Outputs as for quantiles. A draw whose scale is not positive
      keeps nothing at any finite threshold.

    **Several targets** are promised together: the score is the largest of theirs, and the intervals of each target, taken at
    that one threshold, hold all of them at once with probability 1 - alpha. Bring targets to one unit, or learn scales.

    Attributes:
        score: by name; ``residual`` by default for a model with one output, and named for any other.
        targets: D, once outputs have been seen.

    Example:
        >>> task = Regression("quantiles").seen(torch.tensor([[[0.0, 2.0]]]))
        >>> task.items(torch.tensor([[[0.0, 2.0]]]), torch.tensor([[3.0]]), Reading(True), torch.zeros(1)).draws.values
        tensor([[1.]], dtype=torch.float64)
    """

    score: str | None = None
    targets: int | None = None

    name = "regression"
    words = "the union of intervals contains the true value of a query"

    def __post_init__(self) -> None:
        if self.score is not None and self.score not in SCORES:
            raise InputError(f"expected a score for regression among {', '.join(SCORES)}, got {self.score!r}")

    @property
    def score_name(self) -> str:
        return self.score or "residual"

    def unfit(self, method: Any) -> str:
        if method.counts:
            return super().unfit(method)
        return f"{method.name} does not count draws, and intervals are found by counting; choose exact, exact_asymmetric, rcp1 or cp"

    def seen(self, outputs: Tensor) -> Regression:
        parts, shape = SCORES[self.score_name], tuple(outputs.shape)
        if self.score is None and outputs[0, 0].numel() != 1:
            raise InputError(
                f"the model returns {list(shape[2:])} numbers per input, which may mean several things; name one: "
                'score="residual" (one per target), "quantiles" (a lower and an upper one) or "scaled" (mean and scale)'
            )
        fits = outputs.ndim in (2, 3) if parts == 1 else outputs.ndim in (3, 4) and shape[2] == parts
        if not fits or not outputs.is_floating_point():
            wanted = "[n] or [n, targets]" if parts == 1 else "[n, 2] or [n, 2, targets]"
            raise InputError(
                f"the score {self.score_name!r} expects float outputs {wanted}, got {outputs.dtype} {[shape[0], *shape[2:]]}"
            )
        targets = self._parts(outputs).shape[1]
        if self.targets is None and self.score == "scaled" and not (self._parts(outputs)[:, :, 1] > 0).all():
            raise InputError("expected positive scales; end the model in softplus or exp of its second output")
        if self.targets not in (None, targets):
            raise InputError(f"the predictor was calibrated on {self.targets} targets, the model returned {targets}")
        return self if self.targets == targets else replace(self, targets=targets)

    def _parts(self, outputs: Tensor) -> Tensor:
        """Outputs as float64 ``[n, targets, parts, N]``: an end of an interval must not be rounded to float32."""
        n, draws, parts = *outputs.shape[:2], SCORES[self.score_name]
        return outputs.double().reshape(n, draws, parts, -1).permute(0, 3, 2, 1)

    def _bounds(self, parts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """a, b and s of every draw, each ``[n, targets, N]``."""
        first, last = parts[:, :, 0], parts[:, :, -1]
        if self.score == "scaled":
            return first, first, last
        return first, last, torch.ones_like(first)

    def _intervals(self, parts: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
        """What every draw keeps at a threshold, which broadcasts against ``[n, targets, N]``."""
        a, b, s = self._bounds(parts)
        # No score exceeds an infinite threshold, not even that of a scale which is no scale.
        reach = torch.where(s > 0, threshold * s, -torch.inf).where(threshold < torch.inf, torch.inf)
        # Wider by more than what rounding of the score and of the ends can take: the truth must not fall between them.
        slack = 2.0**-50 * (a.abs() + b.abs() + reach.abs()).nan_to_num(posinf=0.0)
        return a - reach - slack, b + reach + slack

    def check_truth(self, truth: Any, n: int) -> Tensor:
        return check_values(truth, n, self.targets or 1)

    def items(self, outputs: Tensor, truth: Tensor, reading: Reading, u: Tensor) -> Items:
        a, b, s = self._bounds(self._parts(outputs))
        y = truth.view(len(truth), -1, 1)
        scores = torch.where(s > 0, torch.maximum(a - y, y - b) / s, torch.inf)
        return Items.single(Draws(scores.amax(dim=1)))

    def prepare(self, outputs: Tensor, reading: Reading, u: Tensor) -> Tensor:
        return self._parts(outputs)

    def summary(self, prepared: Tensor, rule: Rule, v: Tensor) -> Tensor:
        """The parts of the rule's draws, and how many of them may miss, ``[n, targets * parts * N + 1]``."""
        kappa, gamma = rule.counting
        allowed = kappa + (v < gamma).to(prepared.dtype)
        return torch.cat([prepared[..., : rule.test_draws].flatten(1), allowed[:, None]], dim=1)

    def inside(self, summary: Tensor, rule: Rule, threshold: Tensor) -> Tensor:
        parts = summary[:, :-1].unflatten(1, (self.targets or 1, SCORES[self.score_name], -1))
        draws, (kappa, gamma) = parts.shape[-1], rule.counting
        need = (draws - summary[:, -1].long())[:, None].expand(-1, parts.shape[1])
        low, high = self._intervals(parts, on_device(threshold, summary).double().reshape(-1, 1, 1))
        return deep(low, high, need, kappa + 1 + (gamma > 0))

    def sizes(self, inside: Tensor) -> Tensor:
        return lengths(inside).mean(dim=1)

    def sized(self, size: float) -> str:
        return f"{size:.4g}, the mean length"

    def union(self, first: Tensor, second: Tensor) -> Tensor:
        low, high = torch.cat([first, second], dim=2).unbind(dim=-1)
        return deep(low, high, torch.ones_like(low[..., 0]), low.shape[2])

    def sets(self, inside: Tensor, guarantee: Guarantee, draws_used: Tensor | None = None) -> PredictionIntervals:
        return PredictionIntervals(inside, guarantee, draws_used)

    def everything(self, n: int) -> Tensor | None:
        return torch.tensor([-torch.inf, torch.inf], dtype=torch.float64).expand(n, self.targets or 1, 1, 2)

    def profile(self, outputs: Tensor, u: Tensor, thresholds: ndarray) -> ndarray:
        parts = self._parts(outputs)
        n, targets, _, draws = parts.shape
        table = np.zeros((len(thresholds), draws + 1))
        table[:, draws] = np.inf  # beyond all intervals
        for row, t in enumerate(thresholds):
            if np.isinf(t):
                table[row, 0 if t > 0 else draws] = np.inf
                continue
            ends, _, found = depth(*self._intervals(parts, torch.tensor(t, dtype=torch.float64)))
            held, gaps = found[..., :-1], ends.diff(dim=-1)
            lengths = torch.bincount((draws - held).flatten(), gaps.where(held > 0, 0.0).flatten(), draws + 1)
            table[row, :draws] = lengths[:draws].cpu().numpy() / (n * targets)
        return table

    def probe(self) -> Tensor:
        # Scales are positive here, and quantiles the right way round: what models return.
        outputs = probes((SCORES[self.score_name],), 0.5, 4.0)[:, None].sort(dim=-1).values
        return self.items(outputs, torch.ones(len(outputs), 1), Reading(True), torch.zeros(len(outputs))).draws.values

    @classmethod
    def from_config(cls, config: dict[str, Any], score: Any = None) -> Task:
        if score not in (None, config["score"]):
            raise InputError(f"this predictor was calibrated with score {config['score']!r}, not {score!r}")
        return super().from_config(config)
