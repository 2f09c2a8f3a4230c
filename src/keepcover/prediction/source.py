"""Where noisy outputs come from: memory, a store on disk, or the network itself. One interface, read piece by piece."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from keepcover.engine.inputs import length, take
from keepcover.engine.smoother import Smoother
from keepcover.errors import InputError
from keepcover.noise import Noise, Stream
from keepcover.scores.draws import in_pieces
from keepcover.store import LogitStore
from keepcover.tasks.metrics import as_labels

PIECE = 2**24  # outputs read together
IN_MEMORY = 2**28  # outputs; scores of several kinds take a few times 4 bytes of each


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
        found = f"{values.dtype} {tuple(values.shape)}"
        raise InputError(f"expected float noisy outputs [points, draws, ...], at least one of each, got {found}")
    values = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
    if not in_pieces(values, lambda part: part.isfinite().all()[None]).all():
        bad = int((~values.isfinite()).flatten(1).any(dim=1).nonzero()[0, 0])
        raise InputError(f"outputs contain NaN or infinity, first at point {bad}; no guarantee survives a NaN")
    return values


class Piece(NamedTuple):
    """Noisy outputs of some points: their positions, outputs [b, N, ...] and truth."""

    rows: Tensor
    outputs: Tensor
    truth: Any


class Source(ABC):
    """Noisy outputs of n points, ``draws`` each, under one noise.

    Attributes:
        kept: whether a piece, once read, stays in memory anyway, so that what is computed from it may stay too.
    """

    points: int
    draws: int
    noise: Noise
    kept = False

    @abstractmethod
    def read(self, rows: Tensor) -> Iterator[Piece]:
        """The points at these positions, in this order."""


class InMemory(Source):
    """Outputs and truth as tensors."""

    kept = True

    def __init__(self, outputs: Any, truth: Any, noise: Noise) -> None:
        self.outputs, self.truth, self.noise = check_outputs(outputs), as_labels(truth), noise
        self.points, self.draws = self.outputs.shape[:2]
        found = len(self.truth) if self.truth.ndim else "one number"
        if found != self.points:
            raise InputError(f"expected the truth of {self.points} points, got {found}")

    def read(self, rows: Tensor) -> Iterator[Piece]:
        everything = len(rows) == self.points and torch.equal(rows, torch.arange(self.points))
        where = rows.to(self.outputs.device)
        yield Piece(rows, self.outputs if everything else self.outputs[where], self.truth[rows])


class Stored(Source):
    """A store that is read in slices: memory does not grow with points x draws."""

    def __init__(self, store: LogitStore, draws: int | None = None) -> None:
        self.store, self.truth, self.noise = store, store.labels, store.key.added
        self.points, self.draws = store.key.images, store.checked_draws if draws is None else draws

    def read(self, rows: Tensor) -> Iterator[Piece]:
        step = max(1, PIECE // (self.draws * (self.store.classes or 1)))
        for some in rows.split(step):
            yield Piece(some, self.store.read(some, self.draws, torch.float32), self.truth[some])


class Network(Source):
    """The model under noise, run as points are asked for: ``ids`` key their noise, positions by default.

    ``labelled`` is False for attacked images, whose truth is that of the clean ones.
    """

    def __init__(
        self, smoother: Smoother, data: Any, draws: int, stream: Stream, ids: Any = None, labelled: bool = True
    ) -> None:
        count = length(data)
        if count is None:
            raise InputError("expected data whose length is known: (images, labels) or a dataset with a length")
        self.smoother, self.data, self.stream, self.labelled = smoother, data, stream, labelled
        self.ids = torch.arange(count) if ids is None else ids
        self.points, self.draws, self.noise = count, draws, smoother.noise

    def read(self, rows: Tensor) -> Iterator[Piece]:
        at, some = 0, take(self.data, rows)
        for batch, outputs in self.smoother.stream(some, self.draws, self.stream, self.ids[rows], self.labelled):
            yield Piece(rows[at : at + len(batch)], outputs, batch.labels)
            at += len(batch)


def source_of(outputs: Any, truth: Any, noise: Noise | None) -> Source:
    """Any outputs as a source; a store brings its truth and its noise, and stays on the disk where it is large."""
    if truth is not None and isinstance(outputs, Source | LogitStore):
        raise InputError("a store brings the truth of its points along; leave truth out")
    if isinstance(outputs, Source):
        return outputs
    if isinstance(outputs, LogitStore):
        if noise is not None and noise != outputs.key.added:
            raise InputError(f"the store holds outputs under {outputs.key.added}, not {noise}")
        if outputs.key.images * outputs.draws * (outputs.classes or 0) > IN_MEMORY:
            return Stored(outputs)
        return InMemory(outputs.read(), outputs.labels, outputs.key.added)
    if noise is None:
        raise InputError("expected sigma or noise=..., under which the outputs were computed")
    if truth is None:
        raise InputError("expected the truth of every point, as the second argument")
    return InMemory(outputs, truth, noise)
