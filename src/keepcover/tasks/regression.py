"""Regression: outputs are numbers, and a set is a union of intervals for each target, found among the ends of many intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from torch import Tensor

from keepcover.errors import InputError
from keepcover.guarantee import Guarantee
from keepcover.noise.stream import probes
from keepcover.scores import Draws, Items, Reading
from keepcover.scores.draws import on_device
from keepcover.tasks.base import Rule, Task
from keepcover.tasks.metrics import Proportion, Sized, Spread
from keepcover.tasks.shown import Shown, leading

SCORES = {"residual": 1, "quantiles": 2, "scaled": 2}
"""How many numbers the model returns for a target: f; a lower and an upper quantile; a mean and a scale."""


def depth(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The 2N ends of intervals ``[..., N]`` in ascending order, +1 or -1 for each, and in how many intervals one is behind it.

    Intervals are closed, so starts come before ends where they meet. One whose ends are the wrong way round, or NaN, holds
    nothing: its ends are at infinity and count 0.
    """
    right = low <= high
    ends = torch.cat([low.where(right, torch.inf), high.where(right, torch.inf)], dim=-1)
    steps = torch.cat([right.int(), -right.int()], dim=-1)
    # A stable sort leaves starts, which come first, before ends of the same value.
    ends, order = ends.sort(dim=-1, stable=True)
    steps = steps.gather(-1, order)
    return ends, steps, steps.cumsum(dim=-1)


def deep(low: Tensor, high: Tensor, need: Tensor, pieces: int) -> Tensor:
    """Where at least ``need`` of the intervals ``[..., N]`` hold a point, as a union ``[..., pieces, 2]``, NaN where there are
    fewer pieces; everything where none is needed.

    A piece starts where the depth rises to ``need`` and ends where it falls below. Each piece but the last uses an interval
    up, so N - need + 1 pieces will do.

    Example:
        >>> low, high = torch.tensor([[0.0, 2.0, 1.0]]), torch.tensor([[3.0, 4.0, 0.0]])      # the last holds nothing
        >>> deep(low, high, torch.tensor([2]), 1), deep(low, high, torch.tensor([1]), 2)[0, 0]
        (tensor([[[2., 3.]]]), tensor([0., 4.]))
    """
    ends, steps, found = depth(low, high)
    need = need[..., None]
    union = ends.new_full((*ends.shape[:-1], pieces + 1, 2), torch.nan)
    for side, at in enumerate(((steps > 0) & (found == need), (steps < 0) & (found == need - 1))):
        place = torch.where(at, at.cumsum(dim=-1) - 1, pieces)  # the last place is for what starts and ends nothing
        union[..., side].scatter_(-1, place, ends)
    union = union[..., :pieces, :]
    everything = torch.full_like(union, torch.nan)
    everything[..., 0, 0], everything[..., 0, 1] = -torch.inf, torch.inf
    return torch.where((need <= 0)[..., None], everything, union)


def lengths(union: Tensor) -> Tensor:
    """The length of every union ``[..., pieces, 2]`` of disjoint pieces.

    Example:
        >>> lengths(torch.tensor([[0.0, 1.0], [2.0, 2.5], [torch.nan, torch.nan]]))
        tensor(1.5000)
    """
    return (union[..., 1] - union[..., 0]).nan_to_num(nan=0.0, posinf=torch.inf).sum(dim=-1)


@dataclass(frozen=True)
class IntervalEvaluation(Sized):
    """Intervals against the truth.

    Attributes:
        coverage: share of points whose every target is in its union, with a 95 % Clopper-Pearson interval.
        size: mean length, over targets where there are several; ``size_std`` is the spread between points.
        median: of the lengths, which one whole line does not make infinite.
        empty, full: shares of points with an empty union, and with one of infinite length.
    """

    median: float
    empty: float
    full: float

    def __str__(self) -> str:
        return f"coverage {self.coverage}   length {self.size:.4g}   median {self.median:.4g}   {self.coverage.count} points"


@dataclass(frozen=True, repr=False)
class PredictionIntervals(Shown):
    """Unions of intervals for n points and D targets: ``pieces[i, d, j]`` is (lower, upper), NaN where there is no j-th piece.

    Example:
        >>> from keepcover import calibrate_outputs
        >>> predictor = calibrate_outputs(torch.zeros(99, 1), torch.arange(99.0), task="regression", method="cp", epsilon=0, sigma=1)
        >>> sets = predictor.predict_outputs(torch.zeros(1, 1))
        >>> sets.hull.round().tolist(), sets.contains([90.0]).item(), sets.contains([-91.0]).item()
        ([[-89.0, 89.0]], False, False)
    """

    pieces: Float[Tensor, "n targets pieces 2"]
    guarantee: Guarantee
    draws_used: Int[Tensor, " n"] | None = None

    @property
    def lengths(self) -> Float[Tensor, "n targets"]:
        """The length of every target's union."""
        return lengths(self.pieces)

    @property
    def length(self) -> Float[Tensor, " n"]:
        """The length of every point's union, averaged over targets."""
        return self.lengths.mean(dim=1)

    size = length  # type: ignore[override]

    @property
    def hull(self) -> Tensor:
        """The smallest interval around each union, [n, 2], or [n, targets, 2] where there are several; NaN where it is empty.
        It is a superset, so it keeps the promise too.
        """
        low, high = self.pieces.unbind(dim=-1)
        ends = low.where(~low.isnan(), torch.inf).amin(dim=-1), high.where(~high.isnan(), -torch.inf).amax(dim=-1)
        hull = torch.stack(ends, dim=-1).where((ends[0] <= ends[1])[..., None], torch.nan)
        return hull[:, 0] if hull.shape[1] == 1 else hull

    @property
    def trivial(self) -> Bool[Tensor, " n"]:
        """Unions without an end: true, but they say nothing."""
        return self.lengths.isinf().any(dim=1)

    @property
    def empty(self) -> Bool[Tensor, " n"]:
        """Points without any value: every one misses too many draws."""
        return self.pieces.isnan().all(dim=-1).all(dim=-1).any(dim=1)

    def contains(self, truth: Any) -> Bool[Tensor, " n"]:
        """Whether every target of a point is in its union."""
        y = check_values(truth, *self.pieces.shape[:2]).to(self.pieces.device)[..., None]
        return ((self.pieces[..., 0] <= y) & (y <= self.pieces[..., 1])).any(dim=-1).all(dim=1)

    covers = contains

    def measure(self, truth: Any) -> IntervalEvaluation:
        """Coverage and length against the truth."""
        coverage, size = Proportion.of(int(self.contains(truth).sum()), len(self)), Spread.of(self.length)
        std, median = size.std if math.isfinite(size.mean) else 0.0, float(self.length.double().median())
        empty, full = (float(which.double().mean()) for which in (self.empty, self.trivial))
        return IntervalEvaluation(coverage, size.mean, std, median, empty, full)

    def rows(self) -> list[dict[str, Any]]:
        """One dictionary per point: its intervals (one list per target where there are several), their length, and whether they
        say nothing. An end at infinity is None, which JSON has a word for.
        """
        rows = []
        for point, size, trivial in zip(self.pieces.tolist(), self.length.tolist(), self.trivial.tolist(), strict=True):
            own = [[[*map(_number, piece)] for piece in target if piece[0] == piece[0]] for target in point]
            rows.append({"intervals": own[0] if len(own) == 1 else own, "size": _number(size), "trivial": trivial})
        return rows

    @property
    def traits(self) -> ndarray:
        """The leading bits of the length and of the middle, which need no unit to be chosen."""
        middle = self.hull.mean(dim=-1).view(len(self), -1).mean(dim=1)
        return np.stack([leading(one.double().cpu().numpy()) for one in (self.length, middle)], axis=1)

    def __repr__(self) -> str:
        mean, kept = float(self.length.mean()) if len(self) else 0.0, f"{100 * (1 - self.guarantee.alpha):g} %"
        head = f"{len(self)} prediction intervals, mean length {mean:.4g}; {kept} {self.held}"
        return self.listed(head, (str(row["intervals"]) for row in self[:8].rows()))


def _number(value: float) -> float | None:
    return value if abs(value) < math.inf else None


def check_values(truth: Any, n: int, targets: int) -> Tensor:
    """True values as float64 [n, targets], or an error that says what is wrong with them."""
    try:
        values = torch.as_tensor(truth)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(
            f"expected numbers to predict, got {type(truth).__name__}; columns of text are no targets"
        ) from None
    if values.ndim == 1 and targets == 1:
        values = values[:, None]
    if values.shape != (n, targets) or values.is_complex() or values.dtype == torch.bool:
        wanted = f"[{n}]" if targets == 1 else f"[{n}, {targets}]"
        raise InputError(f"expected true values {wanted}, got {values.dtype} {tuple(torch.as_tensor(truth).shape)}")
    if not values.isfinite().all():
        raise InputError("expected finite true values, got NaN or infinity; drop those points first")
    return values.double()


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
