"""Results on their way from a device to the host, so that neither waits for the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from keepcover.errors import InputError

IN_FLIGHT = 2  # results that may be under way from a GPU before the host waits for the first of them


def to_host(value: Tensor) -> Callable[[], Tensor]:
    """Begin to copy; the function that comes back waits for this copy alone, not for work that was queued after it.

    ``value.cpu()`` and ``bool(value)`` wait for everything queued so far, and the GPU then waits for the host.

    Example:
        >>> arrived = to_host(torch.ones(2))
        >>> arrived()
        tensor([1., 1.])
    """
    if not value.is_cuda:
        return lambda: value
    copy = value.to("cpu", non_blocking=True)  # torch allocates it pinned
    copied = torch.cuda.current_stream(value.device).record_event()

    def arrived() -> Tensor:
        copied.synchronize()
        return copy

    return arrived


class Gathered:
    """Results that come piece by piece, put together on the host while a GPU goes on.

    Args:
        total: how many there will be, if that is known; more or fewer may come.

    Example:
        >>> kept = Gathered(6)
        >>> for piece in torch.arange(6).split(2):
        ...     kept.add(piece)
        >>> kept.whole()
        tensor([0, 1, 2, 3, 4, 5])
    """

    def __init__(self, total: int | None = None) -> None:
        self._total, self._size = total or 0, 0
        self._buffer: Tensor | None = None
        self._coming: deque[Callable[[], Tensor]] = deque()

    def add(self, piece: Tensor) -> None:
        self._coming.append(to_host(piece))
        while len(self._coming) > (IN_FLIGHT if piece.is_cuda else 0):
            self._land()

    def _land(self) -> None:
        piece = self._coming.popleft()()
        end = self._size + len(piece)
        if self._buffer is None or end > len(self._buffer):
            larger = piece.new_empty(max(self._total, end, 2 * self._size), *piece.shape[1:])
            if self._buffer is not None:
                larger[: self._size] = self._buffer[: self._size]
            self._buffer = larger
        self._buffer[self._size : end] = piece
        self._size = end

    def whole(self) -> Tensor:
        """Everything added, on the CPU."""
        while self._coming:
            self._land()
        if self._buffer is None:
            raise InputError("expected at least one image, got none")
        return self._buffer if self._size == len(self._buffer) else self._buffer[: self._size].clone()
