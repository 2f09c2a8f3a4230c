r"""Soft sorting and soft quantiles (Blondel et al. 2020): projections onto the permutahedron, L2-regularised.

The projection reduces to an isotonic regression, which is solved here by its minimax formula instead of the sequential
pool-adjacent-violators loop: the same blocks, but batched, on any device, without a host synchronisation, and with the
exact gradient from autograd. It takes :math:`O(n^2)` memory, fine for the few hundred scores of a training batch.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from keepcover.errors import InputError


def isotonic(values: Float[Tensor, "*b n"]) -> Float[Tensor, "*b n"]:
    r"""The nonincreasing vector nearest to ``values`` in L2.

    .. math:: v_i = \min_{a \le i} \max_{b \ge i} \frac{1}{b - a + 1} \sum_{j=a}^{b} y_j

    Example:
        >>> isotonic(torch.tensor([3.0, 1.0, 2.0, 0.0]))
        tensor([3.0000, 1.5000, 1.5000, 0.0000])
    """
    n = values.shape[-1]
    total = torch.nn.functional.pad(values.cumsum(dim=-1), (1, 0))
    at = torch.arange(n, device=values.device)
    count = (at[None, :] - at[:, None] + 1).clamp_min(1)
    means = (total[..., None, 1:] - total[..., :-1, None]) / count  # [a, b]
    means = means.masked_fill(at[None, :] < at[:, None], -torch.inf)
    best = means.flip(-1).cummax(dim=-1).values.flip(-1)  # [a, i]: max over b >= i
    return best.masked_fill(at[None, :] < at[:, None], torch.inf).min(dim=-2).values


def soft_sort(values: Float[Tensor, "*b n"], strength: float = 0.1) -> Float[Tensor, "*b n"]:
    r"""Values in ascending order, differentiably; the hard sort as ``strength`` goes to 0, their mean as it grows.

    :math:`s_\epsilon(\theta) = P(\rho / \epsilon, \theta)` with :math:`\rho = (n, \dots, 1)`, sorted descending there.

    Example:
        >>> soft_sort(torch.tensor([2.0, 0.0, 1.0]), strength=0.01)
        tensor([0., 1., 2.])
    """
    if strength <= 0:
        raise InputError(f"expected a regularisation strength > 0, got {strength}")
    n = values.shape[-1]
    descending = values.sort(dim=-1, descending=True).values
    anchor = torch.arange(n, 0, -1, device=values.device, dtype=values.dtype) / strength
    # rho / eps is large: its differences are exact in the regression's blocks, but subtracting it twice is not, so the
    # residual is pooled directly. Within a block of isotonic(anchor - descending) the result is anchor minus the mean.
    return (anchor - isotonic(anchor - descending)).flip(-1)


def soft_quantile(values: Float[Tensor, " n"], level: float, strength: float = 0.1) -> Tensor:
    r"""The :math:`level\,(1 + 1/n)`-quantile of soft-sorted values, as conformal training uses it.

    The position :math:`level\,(n + 1)` among the ascending values is interpolated between its neighbours and stops at the
    largest; where it is whole it is the conformal order statistic.

    Example:
        >>> soft_quantile(torch.arange(1.0, 10.0), level=0.9, strength=0.01)
        tensor(9.)
    """
    n = len(values)
    position = min(max(level * (n + 1), 1.0), float(n))
    low = min(int(position), n - 1)
    share = position - low
    ascending = soft_sort(values, strength)
    return (1 - share) * ascending[low - 1] + share * ascending[low] if n > 1 else ascending[0]
