"""Where to compute, checked before any work is done there."""

from __future__ import annotations

import torch

from keepcover.errors import refusing


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
    with refusing(f"no device {str(device)!r} here", advice="use cpu, or cuda where there is a GPU"):
        return torch.empty(0, device=device).device
