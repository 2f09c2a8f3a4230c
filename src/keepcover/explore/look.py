"""One image or many under one calibrated method: nested sets over the epsilons, and the bars that explain them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from keepcover.methods import CAS, BinCP, BinCPThreshold
from keepcover.methods.exact import CountRule
from keepcover.noise.stream import Stream
from keepcover.prediction.predictor import Calibrated, Predictor, noisy_scores, score_uniform
from keepcover.scores.draws import Draws


def own_sets(
    predictor: Predictor,
    images: Float[Tensor, "n c h w"],
    ids: Int[Tensor, " n"],
    alpha: float,
    epsilons: Sequence[float],
    stream: Stream,
) -> Bool[Tensor, "e n k"]:
    """The sets of every epsilon, each as its own rule gives it, from the same noise."""
    wanted = [(alpha, epsilon) for epsilon in epsilons]
    parts = []
    for at in range(0, len(images), 32):
        logits = predictor.smoother.logits(images[at : at + 32], predictor.draws, stream, ids[at : at + 32])
        masks = predictor.decide(logits, ids[at : at + 32], stream, wanted)
        parts.append(torch.stack([masks[level] for level in wanted]).cpu())
    return torch.cat(parts, dim=1)


def nested(own: Bool[Tensor, "e n k"]) -> Bool[Tensor, "e n k"]:
    """Running unions over growing epsilon: a superset keeps the guarantee, and no label leaves as epsilon grows.

    Example:
        >>> own = torch.tensor([[[True, False]], [[False, True]]])
        >>> nested(own)[1].tolist()
        [[True, True]]
    """
    return own.to(torch.uint8).cummax(dim=0).values.bool()


@dataclass(frozen=True)
class Bars:
    """How well every label fits, and what the rule asks: a label is in the set of this epsilon iff support >= needed.

    Attributes:
        support: [K] in [0, 1]; more fits better.
        needed: may lie outside [0, 1]: then every label, or none, is in the set.
        rule: the rule in words.
        full: whether this threshold keeps every label of every image.
    """

    support: Float[Tensor, " k"]
    needed: float
    rule: str
    full: bool


def bars(
    predictor: Predictor,
    image: Float[Tensor, "1 c h w"],
    id: Int[Tensor, "1"],
    alpha: float,
    epsilons: Sequence[float],
    stream: Stream,
) -> list[Bars]:
    """The bars of one image at every epsilon."""
    logits = predictor.smoother.logits(image, predictor.draws, stream, id)
    u, v = score_uniform(predictor.score, stream, id.to(logits.device)), float(stream.uniform(id, "boundary"))
    scores = {}
    found = []
    for epsilon in epsilons:
        calibrated = predictor.levels[alpha, epsilon]
        kind = calibrated.kind
        if kind not in scores:
            scores[kind] = noisy_scores(predictor.score, kind, logits, u, predictor.ptt(alpha, logits.device))
        draws = scores[kind].first(calibrated.rule.test_draws)
        log_odds = kind == "order" and predictor.score.name == "hps"
        support, needed, rule = _explain(calibrated, draws, v, log_odds)
        full = calibrated.rule.always_full(calibrated.threshold)
        needed = min(max(needed, -1.0), 2.0)  # JSON knows no infinity
        found.append(Bars(support.double().cpu(), needed, "every label is in every set" if full else rule, full))
    return found


def _explain(calibrated: Calibrated, draws: Draws, v: float, log_odds: bool) -> tuple[Tensor, float, str]:
    """Support, what is needed and the rule in words, such that support >= needed says what the rule decides."""
    rule, threshold, n = calibrated.rule, calibrated.threshold, draws.count
    if isinstance(rule, CountRule | BinCP | BinCPThreshold):
        if isinstance(rule, BinCPThreshold):
            above, allowed = draws.above(rule.t), min(threshold, n)
        else:
            forgiven = isinstance(rule, CountRule) and v < rule.gamma
            above, allowed = draws.above(threshold), rule.kappa + forgiven
        least = round(n - allowed)
        what = "the draw must vote for it" if n == 1 else f"at least {least} of {n} draws must vote for it"
        return 1 - above[0] / n, least / n, what
    statistic = rule.test_statistic(draws)[0].double()
    if isinstance(rule, CAS):
        support, needed = -statistic, -threshold
    elif log_odds:
        support = 1 - statistic.sigmoid()
        needed = 1 - float(torch.tensor(threshold, dtype=torch.float64).sigmoid())
        return support, needed, f"probability at least {needed:.2g}"
    else:  # a mean score in [0, 1], from which RSCP+ has subtracted its Monte Carlo allowance: shown on the other side
        allowance = float((draws.mean[0] - statistic).min())
        support, needed = 1 - statistic - allowance, 1 - threshold - allowance
    return support, needed, f"mean support at least {max(needed, 0.0):.2g}"
