r"""Early exit for count rules: stop drawing for an image once no further draw can change its set.

A count rule keeps label k iff at most :math:`\kappa` of its N noisy scores exceed t. After m draws with count c the label
is out for good if :math:`c > \kappa`, and in for good if :math:`c + N - m \le \kappa`. Noise is keyed by draw, so the
draws that are made are the ones that full drawing would have made, and the sets are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from keepcover.engine.inputs import Batch
from keepcover.errors import InputError
from keepcover.methods import Method
from keepcover.methods.exact import CountRule
from keepcover.scores.draws import Draws

_STAGES = 4  # rounds after the first: more save draws, fewer keep batches large


@dataclass(frozen=True)
class Vote:
    """Count rules of one predictor, all decided from the same draws."""

    rules: tuple[CountRule, ...]
    thresholds: tuple[float, ...]

    @classmethod
    def of(cls, rules: Sequence[Method], thresholds: Sequence[float]) -> Vote:
        counting = tuple(rule for rule in rules if isinstance(rule, CountRule))
        if len(counting) != len(rules):
            other = next(rule.name for rule in rules if not isinstance(rule, CountRule))
            raise InputError(
                f"early exit needs a rule that counts draws (exact, exact_asymmetric); {other} averages them and needs all"
            )
        return cls(counting, tuple(thresholds))

    @property
    def stages(self) -> list[range]:
        """Draws to make together. No label can be in before the first stage is over: N - kappa draws must not exceed.

        Example:
            >>> from keepcover.methods import Setting
            >>> from keepcover.methods.exact import Exact
            >>> rule = Exact(Setting(alpha=0.1, epsilon=0.1, sigma=0.2, draws=16, n=100, classes=3), kappa=6, c=2)
            >>> Vote((rule,), (0.5,)).stages
            [range(0, 10), range(10, 12), range(12, 14), range(14, 16)]
        """
        last = max(rule.test_draws for rule in self.rules)
        first = max(1, *(rule.test_draws - rule.kappa - (rule.gamma > 0) for rule in self.rules))
        step = max(1, -(-(last - first) // _STAGES))
        edges = [0, *range(first, last, step), last]
        return [range(a, b) for a, b in pairwise(edges)]

    def above(self, draws: Draws, span: range) -> Tensor:
        """How many of these draws exceed each rule's threshold, [rules, b, K]; draws past a rule's own do not count."""
        return torch.stack(
            [
                Draws(draws.values[..., : max(0, rule.test_draws - span.start)]).above(t)
                if rule.test_draws > span.start
                else draws.values.new_zeros(draws.values.shape[:-1], dtype=torch.int64)
                for rule, t in zip(self.rules, self.thresholds, strict=True)
            ]
        )

    def run(self, batch: Batch, v: Tensor, exceeded: Callable[[Batch, range], Tensor]) -> tuple[list[Tensor], Tensor]:
        """Masks [b, K] of every rule and the draws each image took.

        Args:
            batch: images and ids.
            v: one uniform number per image, for randomised boundaries.
            exceeded: :meth:`above` of some of the images and draws.
        """
        limit = torch.stack([rule.kappa + (v < rule.gamma).long() for rule in self.rules])[:, :, None]
        total = torch.tensor([rule.test_draws for rule in self.rules], device=v.device)[:, None, None]
        open_ = torch.arange(len(batch), device=v.device)
        used = torch.zeros(len(batch), dtype=torch.int64, device=v.device)
        count: Tensor | None = None
        for span in self.stages:
            found = exceeded(batch[open_], span)
            count = found if count is None else count.index_add(1, open_, found)
            used[open_] = span.stop
            now, most = count[:, open_], limit[:, open_]
            settled = (now > most) | (now + (total - span.stop).clamp_min(0) <= most)
            open_ = open_[~settled.all(dim=0).all(dim=1)]
            if len(open_) == 0:
                break
        assert count is not None
        return list(count <= limit), used
