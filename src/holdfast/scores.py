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

import torch
from jaxtyping import Float
from torch import Tensor

from holdfast.errors import InputError


def hps(logits: Float[Tensor, "*b k"]) -> Float[Tensor, "*b k"]:
    r"""Homogeneous prediction set score, :math:`1 - \pi_k`, without cancellation for confident logits.

    Only the top label's probability can be near one; its score is summed from the other labels instead.

    Example:
        >>> hps(torch.tensor([40.0, 0.0, 0.0]))
        tensor([8.4967e-18, 1.0000e+00, 1.0000e+00])
    """
    peak, top = logits.max(dim=-1, keepdim=True)
    others = (logits - peak).exp().scatter(-1, top, 0.0)
    rest = others.sum(dim=-1, keepdim=True)
    return (1 - others / (1 + rest)).scatter(-1, top, rest / (1 + rest))


def log_odds(logits: Float[Tensor, "*b k"]) -> Float[Tensor, "*b k"]:
    r"""Log-odds of HPS, :math:`\log \sum_{j \ne k} e^{l_j} - l_k`: the same order, and it never saturates.

    Example:
        >>> logits = torch.tensor([2.0, 1.0, -1.0])
        >>> torch.allclose(log_odds(logits).sigmoid(), hps(logits))
        True
    """
    if logits.shape[-1] < 2:
        raise InputError(f"expected at least 2 classes, got {logits.shape[-1]}")
    peak, top = logits.max(dim=-1, keepdim=True)
    others = (logits - peak).scatter(-1, top, -torch.inf)
    # Without the top label the sum over the others is taken as it stands; for every other label the top dominates it,
    # so log(1 + rest - own) loses nothing.
    rest = others.logsumexp(dim=-1, keepdim=True)
    without = torch.log1p((rest.exp() - others.exp()).clamp_min(0)) - others
    return without.scatter(-1, top, rest)


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
        randomized: whether it uses ``u``, one uniform number per image.
        sound: in [0, 1] and never NaN by construction, for any finite logits, so that nobody has to look at the values.
    """

    name: str
    bounded: bool = True
    sound: bool = False
    randomized: bool = False

    @abstractmethod
    def __call__(self, logits: Tensor, u: Tensor | float) -> Tensor:
        """Scores ``[..., K]`` from logits ``[..., K]`` and ``u`` broadcastable to the leading shape."""

    def order(self, logits: Tensor, u: Tensor | float) -> Tensor:
        """An increasing function of the score, for methods that only compare; by default the score itself."""
        return self(logits, u)

    def config(self) -> dict[str, Any]:
        """What a saved predictor needs to build the same score again; scores of your own are code and not saved."""
        return {"name": self.name, "custom": True}


@dataclass(frozen=True)
class HPS(Score):
    """:func:`hps`, ordered by :func:`log_odds`."""

    name = "hps"
    sound = True

    def config(self) -> dict[str, Any]:
        return {"name": self.name}

    def __call__(self, logits: Tensor, u: Tensor | float = 0.0) -> Tensor:
        return hps(logits)

    def order(self, logits: Tensor, u: Tensor | float = 0.0) -> Tensor:
        return log_odds(logits)


@dataclass(frozen=True)
class APS(Score):
    """:func:`aps`."""

    name = "aps"
    sound = True
    randomized = True

    def config(self) -> dict[str, Any]:
        return {"name": self.name}

    def __call__(self, logits: Tensor, u: Tensor | float) -> Tensor:
        return aps(logits, u)


@dataclass(frozen=True)
class RAPS(Score):
    """:func:`raps` with its penalty and the rank from which it applies."""

    penalty: float = 0.01
    k_reg: int = 1

    name = "raps"
    sound = True
    randomized = True

    def __post_init__(self) -> None:
        if self.penalty < 0 or self.k_reg < 0:
            raise InputError(f"expected penalty >= 0 and k_reg >= 0, got {self.penalty} and {self.k_reg}")

    def __call__(self, logits: Tensor, u: Tensor | float) -> Tensor:
        return raps(logits, u, self.penalty, self.k_reg)

    def config(self) -> dict[str, Any]:
        return {"name": self.name, "penalty": self.penalty, "k_reg": self.k_reg}


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
        except ValueError:  # builtins do not say; logits alone is what they can take
            parameters = inspect.signature(lambda logits: logits).parameters.values()
        positional = [
            p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
        ]
        self.randomized = len(positional) == 2
        if len(positional) not in (1, 2):
            raise InputError(f"expected a score of (logits) or (logits, u), got {len(positional)} required arguments")

    def __call__(self, logits: Tensor, u: Tensor | float) -> Tensor:
        scores = self.function(logits, u) if self.randomized else self.function(logits)
        if scores.shape != logits.shape:
            raise InputError(f"score {self.name!r} must return {tuple(logits.shape)}, got {tuple(scores.shape)}")
        return scores

    def config(self) -> dict[str, Any]:
        return {"name": self.name, "custom": True}


SCORES: dict[str, Callable[..., Score]] = {"hps": HPS, "aps": APS, "raps": RAPS}


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
