r"""Non-conformity scores of every label at once: HPS, APS, RAPS, and yours. Small means that the label fits.

A score maps logits ``[..., K]`` (any leading shape, any float dtype, any device) to scores ``[..., K]``. Probabilities
enter as logits through their logarithm: ``score(probs.log())``.

Methods that only compare scores use :meth:`Score.order`, an increasing function of the score that does not saturate:
in float32 a tenth of a confident network's HPS values are exactly 1, their log-odds are all distinct.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from keepcover.errors import InputError


def top_label(logits: Float[Tensor, "*b k"]) -> Int[Tensor, "*b"]:
    """The label with the largest logit, the first of several.

    Example:
        >>> top_label(torch.tensor([[1.0, 3.0, 3.0], [2.0, 0.0, 1.0]]))
        tensor([1, 0])
    """
    if logits.device.type != "cpu" or logits.dtype == torch.bfloat16:
        return logits.argmax(dim=-1)
    # numpy's argmax is vectorised where torch's goes number by number: ten times faster for a thousand classes.
    return torch.from_numpy(np.asarray(logits.detach().numpy().argmax(axis=-1)))


_LEAST = 1e-30  # exp(-69): far below what a float32 softmax tells from 0, and still a normal number


def as_logits(probabilities: Float[Tensor, "*b k"]) -> Float[Tensor, "*b k"]:
    """Probabilities as logits: their logarithm, finite also where one is 0, in float32 at least.

    Example:
        >>> as_logits(torch.tensor([0.25, 0.75, 0.0])).softmax(dim=-1)
        tensor([2.5000e-01, 7.5000e-01, 1.0000e-30])
    """
    wide = torch.promote_types(probabilities.dtype, torch.float32)
    return probabilities.to(wide).clamp_min(_LEAST).log()


def hps(logits: Float[Tensor, "*b k"]) -> Float[Tensor, "*b k"]:
    r"""Homogeneous prediction set score, :math:`1 - \pi_k`, without cancellation for confident logits.

    Only the top label's probability can be near one; its score is summed from the other labels instead.

    Example:
        >>> hps(torch.tensor([40.0, 0.0, 0.0]))
        tensor([8.4967e-18, 1.0000e+00, 1.0000e+00])
    """
    top = top_label(logits)[..., None]
    others = (logits - logits.gather(-1, top)).exp().scatter(-1, top, 0.0)
    rest = others.sum(dim=-1, keepdim=True)
    return (1 - others / (1 + rest)).scatter(-1, top, rest / (1 + rest))


def log_odds(logits: Float[Tensor, "*b k"]) -> Float[Tensor, "*b k"]:
    r"""Log-odds of HPS, :math:`\log \sum_{j \ne k} e^{l_j} - l_k`: the same order, and it never saturates.

    Example:
        >>> logits = torch.tensor([2.0, 1.0, -1.0])
        >>> torch.allclose(log_odds(logits).sigmoid(), hps(logits))
        True
    """
    top, others, shares, second, rest = _beside_the_top(logits)
    return _odds_against(shares, others, second, rest).scatter_(-1, top, rest.log() + second)


def log_odds_of(logits: Float[Tensor, "*b k"], labels: Int[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """:func:`log_odds` of one label each by the same arithmetic, so equal to the last bit, at half the cost.

    Example:
        >>> logits, labels = torch.randn(5, 3), torch.tensor([0, 2, 1, 1, 0])
        >>> torch.equal(log_odds_of(logits, labels), log_odds(logits)[torch.arange(5), labels])
        True
    """
    top, others, shares, second, rest = _beside_the_top(logits)
    own = labels[..., None]
    odds = _odds_against(shares.gather(-1, own), others.gather(-1, own), second, rest)
    return torch.where(own == top, rest.log() + second, odds)[..., 0]


def _beside_the_top(logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The top label; logits minus the top's, -inf at the top; their exponentials as multiples of the largest one; the
    logarithm of that one, and the sum of the multiples.

    The top label's odds are the sum over the others as it stands, so they neither cancel nor underflow.
    """
    if logits.shape[-1] < 2:
        raise InputError(f"expected at least 2 classes, got {logits.shape[-1]}")
    top = top_label(logits)[..., None]
    others = (logits - logits.gather(-1, top)).scatter_(-1, top, -torch.inf)
    second = others.amax(dim=-1, keepdim=True).clamp_min(torch.finfo(others.dtype).min)  # all others may be impossible
    shares = (others - second).exp_()
    return top, others, shares, second, shares.sum(dim=-1, keepdim=True)


def _odds_against(shares: Tensor, others: Tensor, second: Tensor, rest: Tensor) -> Tensor:
    """Log-odds of labels other than the top one, which dominates the sum: log(1 + rest - own) loses nothing."""
    return (rest - shares).mul_(second.exp()).log1p_().sub_(others)


def aps(logits: Float[Tensor, "*b k"], u: Float[Tensor, "*#b"] | float) -> Float[Tensor, "*b k"]:
    r"""Adaptive prediction set score: the mass of strictly larger probabilities plus ``u`` times one's own.

    .. math:: S(x, k) = \sum_j \pi_j 1\{\pi_j > \pi_k\} + u \pi_k, \qquad u \sim U[0, 1]

    ``u`` is one number per image, shared by all its labels and draws, and never a function of the image.

    Example:
        >>> aps(torch.tensor([0.5, 0.3, 0.2]).log(), u=1.0)
        tensor([0.5000, 0.8000, 1.0000])
    """
    if logits.shape[-1] <= _FEW:
        return _aps_of_few(logits.softmax(dim=-1), _last(u, logits))
    ordered, order, first = _ranked(logits)
    before = (ordered.cumsum(dim=-1) - ordered).gather(-1, first)
    mass = before + _last(u, ordered) * ordered
    return torch.empty_like(mass).scatter_(-1, order, mass).clamp_(0, 1)


def raps(
    logits: Float[Tensor, "*b k"], u: Float[Tensor, "*#b"] | float, penalty: float = 0.01, k_reg: int = 1
) -> Float[Tensor, "*b k"]:
    r"""Regularised APS, rescaled to stay in [0, 1].

    .. math:: \frac{APS + \lambda (rank - k_{reg})_+}{1 + \lambda (K - k_{reg})_+}, \qquad
        rank = 1 + \#\{j : \pi_j > \pi_k\}

    Example:
        >>> raps(torch.tensor([0.5, 0.3, 0.2]).log(), u=1.0, penalty=0.1)
        tensor([0.4167, 0.7500, 1.0000])
    """
    classes = logits.shape[-1]
    _, order, first = _ranked(logits)
    rank = torch.empty_like(first).scatter_(-1, order, first) + 1
    excess = (rank - k_reg).clamp_min(0).to(logits.dtype)
    return ((aps(logits, u) + penalty * excess) / (1 + penalty * max(classes - k_reg, 0))).clamp_max(1)


_FEW = 16  # classes up to which comparing every pair is faster than sorting


def _aps_of_few(probabilities: Tensor, u: Tensor) -> Tensor:
    """APS by comparing every pair of labels, labels first in memory: no sort, no gather, nothing but long vectors."""
    first = probabilities.movedim(-1, 0).contiguous()
    mass = u.movedim(-1, 0) * first
    for one in first:
        mass += torch.where(first < one, one, 0)
    return mass.clamp_(0, 1).movedim(0, -1)


def _last(u: Tensor | float, like: Tensor) -> Tensor:
    return torch.as_tensor(u, dtype=like.dtype, device=like.device)[..., None]


def _ranked(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities in descending order, the labels in that order, and where each run of ties begins."""
    ordered, order = logits.softmax(dim=-1).sort(dim=-1, descending=True)
    position = torch.arange(ordered.shape[-1], device=ordered.device).expand_as(order)
    starts = torch.ones_like(ordered, dtype=torch.bool)
    starts[..., 1:] = ordered[..., 1:] < ordered[..., :-1]
    first = torch.where(starts, position, 0).cummax(dim=-1).values
    return ordered, order, first


class Score(ABC):
    """A non-conformity score of every label. Subclass it, or hand any function to :func:`get_score`.

    Attributes:
        name: what reports and saved predictors call it.
        bounded: whether values always lie in [0, 1]; RSCP and RSCP+ assume it, the count rules do not.
        randomized: whether it uses ``u``, one uniform number per image; other scores are handed zeros.
        unfailing: exactly a score of ``SCORES``: in [0, 1] and never NaN by construction, so that values need no check. A
            subclass of one is code of your own like any other score.
    """

    name: str
    bounded: bool = True
    randomized: bool = False

    @property
    def unfailing(self) -> bool:
        return SCORES.get(self.name) is type(self)

    @abstractmethod
    def __call__(self, logits: Tensor, u: Tensor | float) -> Tensor:
        """Scores ``[..., K]`` from logits ``[..., K]`` and ``u`` broadcastable to the leading shape."""

    def order(self, logits: Tensor, u: Tensor | float) -> Tensor:
        """An increasing function of the score, for methods that only compare; by default the score itself."""
        return self(logits, u)

    def order_of(self, logits: Tensor, labels: Tensor, u: Tensor | float) -> Tensor:
        """:meth:`order` of one label each ``[...]``, to the last bit: tied calibration and test scores must stay tied."""
        return self.order(logits, u).gather(-1, labels[..., None])[..., 0]

    def support(self, order: Tensor) -> Tensor:
        """How well labels fit, in [0, 1] for bounded scores, from :meth:`order`: what people are shown."""
        return 1 - order

    def config(self) -> dict[str, Any]:
        """What a saved predictor needs to build the same score again; scores of your own are code and not saved."""
        return {"name": self.name, **(vars(self) if self.unfailing else {"custom": True})}


@dataclass(frozen=True)
class HPS(Score):
    """:func:`hps`, ordered by :func:`log_odds`."""

    name = "hps"

    def __call__(self, logits: Tensor, u: Tensor | float = 0.0) -> Tensor:
        return hps(logits)

    def order(self, logits: Tensor, u: Tensor | float = 0.0) -> Tensor:
        if type(self).__call__ is not HPS.__call__:  # a subclass scores otherwise
            return super().order(logits, u)
        return log_odds(logits)

    def support(self, order: Tensor) -> Tensor:
        return 1 - order.sigmoid()

    def order_of(self, logits: Tensor, labels: Tensor, u: Tensor | float = 0.0) -> Tensor:
        return log_odds_of(logits, labels) if self.unfailing else super().order_of(logits, labels, u)


@dataclass(frozen=True)
class APS(Score):
    """:func:`aps`."""

    name = "aps"
    randomized = True

    def __call__(self, logits: Tensor, u: Tensor | float) -> Tensor:
        return aps(logits, u)


@dataclass(frozen=True)
class RAPS(Score):
    """:func:`raps` with its penalty and the rank from which it applies."""

    penalty: float = 0.01
    k_reg: int = 1

    name = "raps"
    randomized = True

    def __post_init__(self) -> None:
        if self.penalty < 0 or self.k_reg < 0:
            raise InputError(f"expected penalty >= 0 and k_reg >= 0, got {self.penalty} and {self.k_reg}")

    def __call__(self, logits: Tensor, u: Tensor | float) -> Tensor:
        return raps(logits, u, self.penalty, self.k_reg)


class CustomScore(Score):
    """Your function ``logits -> scores`` or ``(logits, u) -> scores``, with what it promises.

    Example:
        >>> margin = CustomScore(lambda logits: -logits, name="negative-logit")
        >>> margin.bounded, margin(torch.tensor([1.0, 2.0]), 0.5)
        (False, tensor([-1., -2.]))
    """

    def __init__(self, function: Callable[..., Tensor], name: str | None = None, bounded: bool = False) -> None:
        self.function = function
        self.name = name or getattr(function, "__name__", type(function).__name__)
        self.bounded = bounded
        try:
            parameters = inspect.signature(function).parameters.values()
            positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
            required = sum(p.default is p.empty for p in positional)
        except ValueError:  # builtins do not say; logits alone is what they can take
            required = 1
        self.randomized = required == 2
        if required not in (1, 2):
            raise InputError(f"expected a score of (logits) or (logits, u), got {required} required arguments")

    def __call__(self, logits: Tensor, u: Tensor | float) -> Tensor:
        scores = self.function(logits, u) if self.randomized else self.function(logits)
        if scores.shape != logits.shape:
            raise InputError(f"score {self.name!r} must return {tuple(logits.shape)}, got {tuple(scores.shape)}")
        return scores


SCORES: dict[str, type[Score]] = {"hps": HPS, "aps": APS, "raps": RAPS}


def get_score(score: str | Score | Callable[..., Tensor]) -> Score:
    """A score by name, as it is, or from a function.

    Example:
        >>> get_score("raps")
        RAPS(penalty=0.01, k_reg=1)
    """
    if isinstance(score, Score):
        return score
    if isinstance(score, str):
        if score not in SCORES:
            raise InputError(f"expected a score among {', '.join(SCORES)} or a function, got {score!r}")
        return SCORES[score]()
    if callable(score):
        return CustomScore(score)
    raise InputError(f"expected a score name, a Score or a function, got {type(score).__name__}")
