r"""Patches without any randomness: all w bands are evaluated, and an attack touches at most a of them, which are neighbours.

For a window W of a neighbouring bands let :math:`S_W` be the (c+1)-th largest score outside of it. t is the conformal quantile of
:math:`\max_W S_W` at :math:`1 - \alpha`, and a candidate is kept iff :math:`\min_W S_W \le t`.

Proof. A clean query has :math:`\max_W S_W \le t` but for probability alpha. An attack changes scores inside one window
:math:`W^*` only, so that the attacked :math:`S_{W^*}` is the clean one and at most t. Nothing is random after calibration: one
event covers all attacks at once, whatever the attacker knows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keepcover.errors import InputError
from keepcover.methods.base import Asked, Explanation, Fit, Method, Rule, around
from keepcover.methods.holdout import Holdout
from keepcover.noise import Noise
from keepcover.promises import Sample
from keepcover.scores import Draws
from keepcover.scores.draws import in_pieces

_MOST = 24  # values of c that are tried


@dataclass(frozen=True)
class BandsRule(Rule):
    """At most ``c`` of the bands outside some window of those that an attack can touch exceed t."""

    c: int = 0

    def __post_init__(self) -> None:
        threat = self.asked.threat
        noise, shape = threat.noise, threat.noise.check_shape(str(threat.norm), threat.shape)
        if (bands := noise.positions(shape)) != self.asked.draws:
            raise InputError(f"{noise} of inputs {list(shape)} are {bands}, got {self.asked.draws} evaluations")
        if not 0 <= self.c <= max(self.most, 0):
            raise InputError(f"expected 0 <= c <= {self.most}, got {self.c}")

    @property
    def window(self) -> int:
        """How many neighbouring bands an attack of a query can touch."""
        return _touched(self.asked.threat)

    @property
    def tampered(self) -> int:
        """How many bands of a calibration point may have been touched: so many more of a query's may exceed t."""
        return _touched(self.asked.promise.tampering(self.asked.threat))

    @property
    def most(self) -> int:
        """The largest c that says anything; negative where an attack touches every band."""
        return self.asked.draws - self.window - self.tampered - 1

    @property
    def words(self) -> str:
        return f"at most {self.c + self.tampered} of {self.test_draws} bands above t, not counting {self.window} neighbours"

    def statistic(self, true: Draws) -> Tensor:
        return outside(true.values, self.window, self.c, every=True)

    def test_statistic(self, draws: Draws, v: Tensor | None = None) -> Tensor:
        return outside(draws.values, self.window, self.c + self.tampered, every=False)

    def threshold_of(self, sample: Sample) -> float:
        return math.inf if self.most < 0 else super().threshold_of(sample)

    def climb(self, true: Draws, threshold: Tensor) -> Tensor:
        """The score that decides if the attacked bands are the largest ones, with its neighbours in rank, minus t."""
        return around(true, self.window + self.c + self.tampered, threshold)

    def explain(self, draws: Draws, threshold: Tensor, fit: Fit, v: Tensor | None = None) -> Explanation:
        return Explanation(fit(self.test_statistic(draws).double()), fit(threshold.double()), self.words)


@dataclass(frozen=True)
class AllBands(Method):
    """The deterministic patch rule, in its form with neighbouring bands; c is chosen on the holdout."""

    name = "bands"
    makes = BandsRule
    certified = True
    compares_only = True
    uses_holdout = True
    draw_rule = "same"

    def unfit(self, noise: Noise) -> str:
        if noise.deterministic:
            return ""
        return f"{self.name} reads every band, and {noise} is random; use noise=Bands(width)"

    def fit(self, asked: Asked, holdout: Holdout | None = None) -> Rule:
        held, most = self.held(holdout), BandsRule(self, asked).most
        tried = np.unique(np.linspace(0, max(most, 0), _MOST).round().astype(int))
        return min((self.rule(asked, c=int(c)) for c in tried), key=lambda rule: rule.estimated_size(held))


def _touched(threat: Any) -> int:
    return 0 if threat is None else threat.noise.touched(threat.epsilon, threat.shape or ())


def outside(values: Tensor, window: int, c: int, every: bool) -> Tensor:
    """The smallest t such that at most ``c`` of the scores outside of every (or of some) cyclic window exceed t.

    Scores ``[..., w]`` -> ``[...]``; for every window that is the maximum of the (c+1)-th largest scores outside, for some
    window their minimum.

    Example:
        >>> scores = torch.tensor([[5.0, 4.0, 0.0, 3.0, 0.0]])
        >>> outside(scores, 2, 0, every=True), outside(scores, 2, 0, every=False)
        (tensor([5.]), tensor([3.]))
    """
    return in_pieces(values, lambda part: _outside(part, window, c, every))


def _outside(values: Tensor, window: int, c: int, every: bool) -> Tensor:
    """t is one of the scores: bisect among them."""
    ordered = values.sort(dim=-1).values
    total = values.shape[-1]
    low = torch.zeros_like(values[..., :1], dtype=torch.int64)
    high = torch.full_like(low, total - 1)
    for _ in range(math.ceil(math.log2(total)) if total > 1 else 0):
        middle = (low + high) // 2
        above = (values > ordered.gather(-1, middle)).to(torch.int32)
        round_ = torch.cat([above, above[..., :window]], dim=-1).cumsum(dim=-1)
        inside = round_[..., window:] - round_[..., :total] if window else torch.zeros_like(above)
        left = above.sum(dim=-1, keepdim=True) - (inside.amin if every else inside.amax)(dim=-1, keepdim=True)
        holds = left <= c
        low, high = torch.where(holds, low, middle + 1), torch.where(holds, middle, high)
    return ordered.gather(-1, high)[..., 0]
