"""Filling a store: which chunks are left, and the one way in which a chunk is computed. Engines decide only where.

Whoever fills a store goes through :class:`Filling`, so that all engines skip, write, refuse and sum up alike.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keepcover.engine.arrivals import Gathered
from keepcover.engine.inputs import Batch, batches, take
from keepcover.engine.progress import Bar, Report
from keepcover.engine.smoother import Smoother
from keepcover.store.grid import Chunk

if TYPE_CHECKING:
    from keepcover.noise.stream import Stream
    from keepcover.store.folder import LogitStore

SECONDS_BETWEEN_INDICES = 10.0


@dataclass(frozen=True)
class Filled:
    """What one call did to a store."""

    computed: int
    reused: int
    damaged: dict[str, str]  # file -> what was wrong with it; all of them were computed again
    noisy_images: int
    seconds: float


def read_chunk(data: Any, rows: range) -> Batch:
    """The labelled images of a chunk, in one piece; their ids are their positions in the data.

    Example:
        >>> read_chunk((torch.rand(6, 1, 2, 2), torch.arange(6)), range(2, 5)).ids
        tensor([2, 3, 4])
    """
    ids = torch.arange(rows.start, rows.stop)
    parts = list(batches(take(data, ids), ids, size=len(ids), labelled=True))
    labels = [torch.as_tensor(part.labels) for part in parts]
    return Batch(torch.cat([part.images for part in parts]), torch.cat(labels), ids)


def compute_chunk(
    smoother: Smoother,
    images: Float[Tensor, "n ..."],
    chunk: Chunk,
    stream: Stream,
    advance: Callable[[int], None] | None = None,
) -> Float[Tensor, "n draws k"]:
    """Noisy logits of a chunk's images, on the CPU.

    How images share forward passes follows from the chunk, the shape of an image and the smoother's ``batch_size``, never
    from other chunks. So the same machine computes the same bits, whichever process does it and in whatever order.

    Args:
        smoother: the model under noise.
        images: those of ``chunk.rows``.
        chunk: its rows are the ids of the noise, its draws the draws.
        stream: the noise.
        advance: called with the number of noisy images done, pass by pass.
    """
    ids = torch.arange(chunk.rows.start, chunk.rows.stop)
    kept = Gathered(len(ids))
    for part, logits in smoother.stream(images, chunk.draws, stream, ids, progress=False):
        kept.add(logits)
        if advance is not None:
            advance(len(part) * len(chunk.draws))
    return kept.whole()


def scattered(chunks: Sequence[Chunk]) -> list[Chunk]:
    """The same chunks: still the first draws of all images first, but the images in an order that nobody else has.

    Example:
        >>> chunks = [Chunk(range(k, k + 1), range(draw, draw + 2)) for draw in (0, 2) for k in range(9)]
        >>> [chunk.draws.start for chunk in scattered(chunks)] == [0] * 9 + [2] * 9
        True
    """
    own = random.SystemRandom().sample(chunks, len(chunks))
    return sorted(own, key=lambda chunk: chunk.draws.start)


class Filling:
    """One call's share of the work on a store. Use it as a context: leaving it sums up, whatever happened.

    Others may be at work in the same folder. A chunk that has appeared before its turn is theirs, and every process goes
    through the images in an order of its own: two that began together would else compute the same chunks side by side.

    Args:
        store: what to fill.
        draws: how many draws every image shall have, or which.
        show: show a bar on a terminal; or a function called with (done, total) noisy images.
    """

    def __init__(self, store: LogitStore, draws: int | range, show: bool | Report) -> None:
        self.store, self.start = store, time.monotonic()
        store.refresh()
        self.todo, self.reused = scattered(store.missing(draws)), len(store.entries)
        self._asked = list(self.todo)
        self._damaged = {bad: why for bad, why in store.damaged.items() if any(bad.overlaps(one) for one in self.todo)}
        self.computed, self.noisy_images = 0, 0
        self._left, self._settled = sum(chunk.count for chunk in self.todo), 0
        self.bar = Bar("smoothing", self._left, show)
        self._indexed = self.start

    def __enter__(self) -> Filling:
        if self.todo:
            self.store.check_writable()
            self.store.write_index()
        return self

    def next(self) -> Chunk | None:
        """The next chunk to compute, one that nobody has stored yet; None when none is left."""
        while self.todo:
            chunk = self.todo.pop(0)
            if not self.store.has(chunk):
                return chunk
            self._settle(chunk)
            self.bar.advance(chunk.count)
        return None

    def again(self, chunk: Chunk) -> None:
        """Whoever was computing this chunk is lost: it is the next."""
        self.todo.insert(0, chunk)

    def put(self, chunk: Chunk, logits: Float[Tensor, "n draws k"], labels: Int[Tensor, " n"]) -> None:
        """Store a chunk that was computed, unless another process has stored it meanwhile."""
        self._settle(chunk)
        if not self.store.has(chunk):
            size = self.store.write(chunk, logits, labels)
            if not self.computed:
                self.store.refuse_too_large(self._left * size // chunk.count)
        self.computed += 1
        self.noisy_images += chunk.count
        rate = self.noisy_images / max(time.monotonic() - self.start, 1e-9)
        self.bar.label = f"smoothing {self._settled}/{len(self._asked)} chunks {rate:.0f}/s"
        if time.monotonic() - self._indexed > SECONDS_BETWEEN_INDICES:
            self.store.write_index()
            self._indexed = time.monotonic()

    def _settle(self, chunk: Chunk) -> None:
        self._left -= chunk.count
        self._settled += 1

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.bar.close()
        try:
            if kind is None:
                for bad in set(self._damaged) - set(self._asked):  # other chunks are in their place now
                    self.store.remove(bad)
        finally:
            self.store.finish()

    @property
    def facts(self) -> dict[str, Any]:
        """The fields of :class:`Filled`."""
        return {
            "computed": self.computed,
            "reused": self.reused,
            "damaged": {chunk.name: why for chunk, why in self._damaged.items()},
            "noisy_images": self.noisy_images,
            "seconds": time.monotonic() - self.start,
        }
