"""Rows through a model that takes only some image sizes and batch sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from keepcover.errors import InputError


def check_sizes(name: str, images: Tensor, sizes: Sequence[int | None]) -> None:
    """Refuse images of other sizes than a model takes; None is any size."""
    found = images.shape[1:]
    if len(found) != len(sizes) or any(size not in (None, own) for size, own in zip(sizes, found, strict=True)):
        expected = ", ".join("any" if size is None else str(size) for size in sizes)
        raise InputError(f"{name} takes images [n, {expected}], got [n, {', '.join(map(str, found))}]")


def in_batches(run: Callable[[Tensor], Tensor], images: Tensor, least: int = 1, most: int | None = None) -> Tensor:
    """``run`` on batches of ``least`` to ``most`` rows; a short last batch is padded, and the padding's rows are dropped.

    Example:
        >>> seen = []
        >>> out = in_batches(lambda x: seen.append(len(x)) or 2 * x, torch.arange(5.0)[:, None], least=2, most=2)
        >>> seen, out[:, 0].tolist()
        ([2, 2, 2], [0.0, 2.0, 4.0, 6.0, 8.0])
    """
    outputs = []
    for part in images.split(most or max(len(images), 1)):
        missing = max(0, least - len(part))
        padded = torch.cat([part, part[-1:].expand(missing, *part.shape[1:])]) if missing else part
        out = run(padded)
        if len(out) != len(padded):
            raise InputError(f"expected one row of outputs per image, got {len(out)} rows for {len(padded)} images")
        outputs.append(out[: len(part)])
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]
