"""The conformal quantile: an order statistic, at a level kept exact."""

from __future__ import annotations

import math
from fractions import Fraction

from jaxtyping import Float
from torch import Tensor

from keepcover.errors import InputError


def exact_level(level: float | str | Fraction) -> Fraction:
    """A level as the user typed it, without binary rounding: 0.1 is 1/10.

    Example:
        >>> exact_level(0.1)
        Fraction(1, 10)
    """
    return level if isinstance(level, Fraction) else Fraction(str(level))


def conformal_rank(n: int, alpha: Fraction) -> int:
    r"""Which order statistic of n calibration scores is the threshold: :math:`n + 1 - \lfloor (n+1) \alpha \rfloor`.

    Equal to ceil((n+1)(1-alpha)), in exact arithmetic. A rank above n means that no finite threshold will do.

    Example:
        >>> conformal_rank(9, exact_level(0.1)), conformal_rank(8, exact_level(0.1))
        (9, 9)
    """
    return n + 1 - math.floor((n + 1) * alpha)


def order_statistic(scores: Float[Tensor, " n"], rank: int) -> float:
    """The ``rank``-th smallest score: +inf above n, -inf below 1, never interpolated.

    Example:
        >>> import torch
        >>> order_statistic(torch.tensor([3.0, 1.0, 2.0]), 2), order_statistic(torch.tensor([3.0, 1.0, 2.0]), 4)
        (2.0, inf)
    """
    if scores.ndim != 1 or len(scores) == 0:
        raise InputError(f"expected a non-empty vector of calibration scores, got shape {tuple(scores.shape)}")
    if scores.isnan().any():
        raise InputError("calibration scores contain NaN; a NaN has no rank, so no guarantee can be given")
    if rank > len(scores):
        return math.inf
    return -math.inf if rank < 1 else float(scores.kthvalue(rank).values)


def conformal_quantile(scores: Float[Tensor, " n"], alpha: Fraction | float) -> float:
    """The conformal threshold at miscoverage alpha: an order statistic; +inf if n is too small.

    A ``float`` is taken as typed (:func:`exact_level`); computed levels come as ``Fraction(value)``.

    Example:
        >>> import torch
        >>> conformal_quantile(torch.arange(1.0, 10.0), 0.1)
        9.0
        >>> conformal_quantile(torch.arange(1.0, 9.0), 0.1)
        inf
    """
    return order_statistic(scores, conformal_rank(len(scores), exact_level(alpha)))
