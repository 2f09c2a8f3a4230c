"""Where to compute, checked before any work is done there."""

from __future__ import annotations

import torch

from keepcover.errors import InputError


def checked_device(device: torch.device | str) -> torch.device:
    """A device that is there, or an error that says what to write instead.

    Example:
        >>> checked_device("cpu")
        device(type='cpu')
        >>> checked_device("gpu")
        Traceback (most recent call last):
        ...
        keepcover.errors.InputError: no device 'gpu' here (Expected one of cpu, cuda, ...); use cpu, or cuda where there is a GPU
    """
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError, TypeError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"no device {str(device)!r} here ({reason}); use cpu, or cuda where there is a GPU") from None
