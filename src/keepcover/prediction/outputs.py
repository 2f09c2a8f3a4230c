"""Noisy outputs that are already there: tensors and arrays of any framework."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from keepcover.errors import InputError
from keepcover.scores.draws import in_pieces


def check_outputs(outputs: Any) -> Tensor:
    """Noisy outputs [n, N, ...] as a tensor, or an error that says what is wrong with them.

    Example:
        >>> check_outputs([[[0.0, 1.0]]]).shape
        torch.Size([1, 1, 2])
    """
    try:
        values = torch.as_tensor(outputs).detach()
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"expected noisy outputs as a tensor or array, got {type(outputs).__name__}") from None
    if values.ndim < 2 or not values.is_floating_point() or 0 in values.shape:
        raise InputError(
            f"expected float noisy outputs [points, draws, ...], at least one of each, got {values.dtype} "
            f"{tuple(values.shape)}"
        )
    if values.dtype == torch.float16 or values.dtype == torch.bfloat16:
        values = values.float()
    if not in_pieces(values, lambda part: part.isfinite().all()[None]).all():
        bad = int((~values.isfinite()).flatten(1).any(dim=1).nonzero()[0, 0])
        raise InputError(f"outputs contain NaN or infinity, first at point {bad}; no guarantee survives a NaN")
    return values
