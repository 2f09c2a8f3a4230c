r"""Early exit for count rules: stop drawing for an image once no further draw can change its set.

A count rule keeps candidate k iff at most :math:`\kappa` of its N noisy scores exceed t. After m draws with count c it is out
for good if :math:`c > \kappa`, and in for good if :math:`c + N - m \le \kappa`. Noise is keyed by draw, so the draws that are
made are the ones that full drawing would have made, and the sets are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from keepcover.errors import InputError
from keepcover.methods.base import Rule
from keepcover.scores import Draws
from keepcover.scores.draws import on_device

_STAGES = 4  # rounds after the first: more save draws, fewer keep batches large


@dataclass(frozen=True)
class Vote:
    """Count rules of one predictor with their thresholds, all decided from the same draws."""

    rules: tuple[Rule, ...]
    thresholds: tuple[Tensor, ...]
    staged: bool = True  # else all draws at once

    @classmethod
    def of(cls, rules: Sequence[Rule], thresholds: Sequence[Tensor]) -> Vote:
        other = next((rule.name for rule in rules if rule.counting is None), None)
        if other is not None:
            raise InputError(
                f"early exit needs a rule that counts draws (exact, exact_asymmetric); {other} averages them and needs all"
            )
        return cls(tuple(rules), tuple(thresholds))

    @property
    def _limits(self) -> list[tuple[int, int, float]]:
        """N, kappa and gamma of every rule."""
        return [(rule.test_draws, *rule.counting) for rule in self.rules if rule.counting is not None]

    @property
    def stages(self) -> list[range]:
        """Draws to make together. No label can be in before the first stage is over: N - kappa draws must not exceed."""
        last = max(draws for draws, *_ in self._limits)
        first = max(1, *(draws - kappa - (gamma > 0) for draws, kappa, gamma in self._limits)) if self.staged else last
        step = max(1, -(-(last - first) // _STAGES))
        return [range(a, b) for a, b in pairwise([0, *range(first, last, step), last])]

    def pays(self, images: int, fixed: float, each: float) -> bool:
        """Whether stages can be faster than all draws at once, where a stage takes ``fixed`` seconds and ``each`` per draw.

        At best every draw after the first stage is saved; half of that must pay for the stages.
        """
        rest = self.stages[1:]
        return each * images * sum(map(len, rest)) / 2 > fixed * len(rest)

    def above(self, draws: Draws, span: range, positions: Tensor) -> Tensor:
        """How many of these draws exceed each rule's threshold, [rules, b, K]; draws past a rule's own do not count.

        ``positions`` are those of the queries, where each has thresholds of its own.
        """
        counts = []
        for rule, threshold in zip(self.rules, self.thresholds, strict=True):
            own = draws.values[..., : max(0, rule.test_draws - span.start)]
            limit = on_device(threshold, own)
            limit = limit[positions.to(limit.device)] if limit.ndim == 2 and len(limit) > 1 else limit
            counts.append((own > (limit if limit.ndim == 0 else limit[..., None])).sum(dim=-1))
        return torch.stack(counts)

    def run(self, open_: Tensor, v: Tensor, exceeded: Callable[[Tensor, range], Tensor]) -> tuple[list[Tensor], Tensor]:
        """Masks [b, K] of every rule and the draws each image took.

        Args:
            open_: positions of the images, 0 to b - 1.
            v: one uniform number per image, for randomised boundaries.
            exceeded: :meth:`above` of the images at some positions, for some draws.
        """
        limit = torch.stack([kappa + (v < gamma).long() for _, kappa, gamma in self._limits])[:, :, None]
        total = torch.tensor([draws for draws, *_ in self._limits], device=v.device)[:, None, None]
        used = torch.zeros_like(open_)
        count: Tensor | None = None
        for span in self.stages:
            found = exceeded(open_, span)
            count = found if count is None else count.index_add(1, open_, found)
            used[open_] = span.stop
            now, most = count[:, open_], limit[:, open_]
            settled = (now > most) | (now + (total - span.stop).clamp_min(0) <= most)
            open_ = open_[~settled.all(dim=0).all(dim=1)]
            if len(open_) == 0:
                break
        assert count is not None
        return list(count <= limit), used
