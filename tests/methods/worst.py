"""Attacked coverage where the attack is the worst there can be, and tests that cannot be argued with.

One dimension, score of the true label increasing in x + sigma * noise, attack x + epsilon. Exceeding a threshold is then
a half-space event, so the attacked exceedance probability is exactly up(q): no classifier can do worse.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from scipy import stats
from torch import Tensor

from keepcover.methods import METHODS, Asked, Holdout, Method, Rule, get_method
from keepcover.noise import Gaussian, Threat
from keepcover.promises import Sample
from keepcover.scores import CustomScore, Draws, Items
from keepcover.tasks import Classification

SIGMA = 0.25
LEVEL = 5e-8

Law = Callable[[tuple[int, ...], torch.Generator], Tensor]
Map = Callable[[Tensor], Tensor]

OWN = {
    name: method
    for name, method in METHODS.items()
    if type(method).__module__.startswith("keepcover.")
    and not (method.unfit(Gaussian(1.0)) or method.things == "several")
}
"""The library's methods for random noise and one thing per point, without those that other tests register."""

AS_THEY_ARE = Classification(CustomScore(lambda outputs: outputs, "output", bounded=True))
"""Outputs that are scores already."""


def two_points(low: float, high: float, weight: float) -> Law:
    """``high`` with probability ``weight``, else ``low``."""
    return lambda shape, generator: torch.where(torch.rand(shape, generator=generator) < weight, high, low)


LAWS: dict[str, Law] = {
    "point": lambda shape, generator: torch.zeros(shape),
    "narrow": lambda shape, generator: 0.05 * torch.randn(shape, generator=generator),
    "wide": lambda shape, generator: torch.randn(shape, generator=generator),
    "mixture": two_points(-0.4, 0.1, 0.12),
    "steps": lambda shape, generator: torch.randint(-4, 3, shape, generator=generator) / 4,
}
"""Laws of x. Scores of "steps" are rounded as well, so that they are full of ties."""

BOUNDED: dict[str, Map] = {"smooth": lambda s: torch.special.ndtr(s / SIGMA), "step": lambda s: (s > 0).float()}
"""Increasing maps into [0, 1]; under "step" the smoothed score is q itself."""


def rounded(law: str, increasing: Map) -> Map:
    return (lambda s: increasing((4 * s).floor() / 4)) if law == "steps" else increasing


def plainly(method: str | Method) -> Method:
    """The method without PTT, for scores that are in [0, 1] already."""
    method = get_method(method)
    return method if method.transform is None else get_method(method, transform=None)


def asked_for(
    n: int, draws: int, r: float = 0.5, alpha: float = 0.1, calibration_draws: int | None = None, **more: Any
) -> Asked:
    return Asked(alpha, Threat(Gaussian(SIGMA), r * SIGMA), draws, n, 2, calibration_draws, **more)


def holdout_of(scores: Tensor, labels: Tensor) -> Holdout:
    """Scores [points, labels, draws] as a holdout."""
    outputs = scores.transpose(1, 2).contiguous()
    return Holdout(AS_THEY_ARE.seen(outputs), outputs, labels)


def fit(method: str | Method, asked: Asked, law: Law, increasing: Map, seed: int = 0) -> Rule:
    """Fit on 100 holdout points; the second label is what the sets would like to leave out."""
    generator = torch.Generator().manual_seed(1000 + seed)
    draws = max(asked.draws, asked.per_point)
    x = torch.stack([law((100,), generator), law((100,), generator) + 1], dim=1)
    scores = increasing(x[..., None] + SIGMA * torch.randn(100, 2, draws, generator=generator))
    return get_method(method).fit(asked, holdout_of(scores, torch.zeros(100, dtype=torch.int64)))


def read(rule: Rule, scores: Tensor) -> Draws:
    """Scores [..., draws] as the rule reads them: through its transform, where it has one."""
    return rule.read(Items.single(Draws(scores))).draws


def kept(rule: Rule, draws: Draws, threshold: float, v: Tensor | None = None) -> Tensor:
    return rule.test_statistic(draws, v) <= threshold


def calibrated(rule: Rule, true: Draws) -> float:
    """The threshold that these calibration points give."""
    return float(rule.threshold(Items.single(true)))


def attacked_misses(
    rule: Rule, law: Law, increasing: Map, epsilon: float, repetitions: int, seed: int = 0, shared_noise: bool = False
) -> int:
    """In how many independent repetitions the attacked test point's label was left out."""
    generator = torch.Generator().manual_seed(seed)
    n, cal, test = rule.asked.n, rule.calibration_draws, rule.test_draws
    misses, at_once = 0, max(1, 2_000_000 // (n * cal))
    for start in range(0, repetitions, at_once):
        some = min(at_once, repetitions - start)
        x, attacked = law((some, n, 1), generator), law((some, 1, 1), generator) + epsilon
        cal_noise = torch.randn(some, 1 if shared_noise else n, cal, generator=generator)
        test_noise = cal_noise[:, :1, :test] if shared_noise else torch.randn(some, 1, test, generator=generator)
        statistic = rule.statistic(read(rule, increasing(x + SIGMA * cal_noise).flatten(0, 1)))
        v = torch.rand(some, generator=generator)
        query = rule.test_statistic(read(rule, increasing(attacked + SIGMA * test_noise)), v)[:, 0]
        misses += int((~(query.double() <= thresholds(rule, statistic.unflatten(0, (some, n))))).sum())
    return misses


def thresholds(rule: Rule, statistic: Tensor) -> Tensor:
    """The rule's own threshold in every repetition: statistics [repetitions, n, ...] -> [repetitions].

    Asking the rule once per repetition is most of what these tests take. So a guess is made for all of them at once, compared
    with the rule's own answer in every twentieth, and dropped for the rule itself if one of those differs.
    """
    repetitions = len(statistic)
    own = {i: rule.threshold_of(Sample(statistic[i])) for i in range(0, repetitions, 20)}
    guess = (_order_statistics if statistic.ndim == 2 else _risk_controlled)(rule, statistic.double())
    if guess is None or any(float(guess[i]) != t for i, t in own.items()):
        return torch.tensor([rule.threshold_of(Sample(points)) for points in statistic], dtype=torch.float64)
    return guess


def _order_statistics(rule: Rule, statistic: Tensor) -> Tensor | None:
    """If the threshold is a function of one order statistic: which one shows in vectors of two values, bisected."""
    n, (low, high) = statistic.shape[1], (float(end) for end in statistic.aminmax())

    @cache
    def function(value: float) -> float:
        return rule.threshold_of(Sample(torch.full((n,), value, dtype=torch.float64)))

    if function(low) == function(high):
        return torch.full((len(statistic),), function(low), dtype=torch.float64)
    above, rank = 0, n
    while rank - above > 1:
        middle = (above + rank) // 2
        two = torch.where(torch.arange(n) < middle, low, high).double()
        above, rank = (above, middle) if rule.threshold_of(Sample(two)) == function(low) else (middle, rank)
    ranked = statistic.kthvalue(rank, dim=1).values
    values = ranked.unique()
    if len(values) > 200:
        return ranked
    return torch.tensor([function(float(value)) for value in values], dtype=torch.float64)[
        torch.searchsorted(values, ranked)
    ]


def _risk_controlled(rule: Any, statistic: Tensor) -> Tensor:
    """If the threshold is the smallest at which the sum of g keeps its budget."""
    n, (_, rise) = statistic.shape[1], rule._rises
    scores, order = statistic.flatten(1).sort(dim=1, descending=True)
    spent = torch.as_tensor(rise).repeat(n)[order].cumsum(dim=1)
    budget = rule.asked.promise.budget(n, rule.asked.promise.level(rule.asked.alpha), rule.g[-1]) - n * rule.g[0]
    broke = (spent <= budget).sum(dim=1)
    padded = torch.cat([scores, torch.full_like(scores[:, :1], -torch.inf)], dim=1)
    found = padded.gather(1, broke[:, None])[:, 0]
    return found if budget >= 0 else torch.full_like(found, torch.inf)


def violated(misses: int, repetitions: int, rate: float, level: float = LEVEL) -> bool:
    """Exact one-sided binomial test: so many misses have probability below ``level`` if their rate is at most ``rate``."""
    return bool(stats.binom.sf(misses - 1, repetitions, rate) < level)


def attacked_by(rule: Rule, epsilon: float) -> Rule:
    """The same rule, stored as if for another attack."""
    return replace(rule, asked=replace(rule.asked, threat=replace(rule.asked.threat, epsilon=epsilon)))
