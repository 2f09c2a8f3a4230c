"""Filling a store: which chunks are left, and the one way in which a chunk is computed. Engines decide only where.

Every engine goes through :class:`Filling`, so that all of them skip, write, refuse and sum up alike.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keepcover.engine.arrivals import Gathered
from keepcover.engine.inputs import Batch, batches, take
from keepcover.engine.progress import Bar, Progress
from keepcover.engine.smoother import Smoother
from keepcover.errors import InputError, refusing
from keepcover.files import check_folder
from keepcover.store.grid import Chunk

if TYPE_CHECKING:
    from keepcover.noise.stream import Stream
    from keepcover.store.folder import LogitStore

LARGEST = torch.finfo(torch.float16).max


@dataclass
class Filled:
    """What one call did to a store, here or on a cluster."""

    computed: int = 0
    reused: int = 0
    damaged: dict[str, str] = field(default_factory=dict)  # file -> what was wrong; all of them were computed again
    noisy_images: int = 0
    seconds: float = 0.0
    workers: int = 0  # of a cluster, that computed something
    lost_workers: int = 0
    repeated_chunks: int = 0  # those that lost workers had
    most_in_flight: int = 0  # chunks that were in the cluster at one time


def read_chunk(data: Any, rows: range) -> Batch:
    """The labelled images of a chunk, in one piece; their ids are their positions in the data.

    Example:
        >>> read_chunk((torch.rand(6, 1, 2, 2), torch.arange(6)), range(2, 5)).ids
        tensor([2, 3, 4])
    """
    ids = torch.tensor(rows)
    parts = list(batches(take(data, ids), ids, size=len(ids), labelled=True))
    labels = [torch.as_tensor(part.labels) for part in parts]
    return Batch(torch.cat([part.images for part in parts]), torch.cat(labels), ids)


def compute_chunk(
    smoother: Smoother, images: Tensor, chunk: Chunk, stream: Stream, advance: Callable[[int], None] = lambda _: None
) -> Float[Tensor, "n draws k"]:
    """Noisy logits of a chunk's images, on the CPU; ``advance`` is told how many noisy images are done, pass by pass.

    How images share forward passes follows from the chunk, the shape of an image and the smoother's ``batch_size``, never
    from other chunks. So the same machine computes the same bits, whichever process does it and in whatever order.
    """
    batch, kept = Batch(images, None, torch.tensor(chunk.rows)), Gathered(len(chunk.rows))
    for part, _, logits in smoother.streams([(batch, chunk.draws, stream)], progress=False, steady=True):
        kept.add(logits)
        advance(len(part) * len(chunk.draws))
    return kept.whole()


def to_half(logits: Tensor, chunk: Chunk) -> Tensor:
    """Logits rounded to float16; what does not fit is refused, never clamped."""
    fits = logits.abs() <= LARGEST
    if not fits.all():
        row, draw, label = (int(at) for at in (~fits).nonzero()[0])
        where = f"a logit of image {chunk.rows[row]}, draw {chunk.draws[draw]} is {float(logits[row, draw, label]):g}"
        advice = "scale the model's logits down (a temperature inside it) before storing them"
        raise InputError(f"{where}, beyond the {LARGEST:g} that float16 can hold; {advice}")
    return logits.to(torch.float16)


def scattered(chunks: Sequence[Chunk]) -> list[Chunk]:
    """The same chunks: still the first draws of all images first, but the images in an order of this process's own.

    Example:
        >>> chunks = [Chunk(range(k, k + 1), range(draw, draw + 2)) for draw in (0, 2) for k in range(9)]
        >>> [chunk.draws.start for chunk in scattered(chunks)] == [0] * 9 + [2] * 9
        True
    """
    return sorted(random.SystemRandom().sample(chunks, len(chunks)), key=lambda chunk: chunk.draws.start)


class Filling(AbstractContextManager["Filling"]):
    """One call's share of the work on a store. Use it as a context: leaving it sums up, whatever happened.

    Other processes may be at work in the same folder. A chunk that has appeared before its turn is theirs, and every process
    goes through the images in an order of its own: two that began together would else compute the same chunks side by side.

    Args:
        store: what to fill.
        draws: how many draws every image shall have, or which.
        show: show a bar on a terminal; or a function called with (done, total) noisy images.
    """

    def __init__(self, store: LogitStore, draws: int | range, show: Progress) -> None:
        self.store, self.start = store, time.monotonic()
        store.refresh()
        self.todo, self.done = scattered(store.missing(draws)), Filled(reused=len(store.entries))
        self.bar = Bar("smoothing", sum(chunk.count for chunk in self.todo), show)
        if self.todo:  # else a store that is read-only is as good as any
            check_folder(self.store.folder)
        for bad, why in list(self.store.damaged.items()):
            if any(bad.overlaps(chunk) for chunk in self.todo):
                self.done.damaged[bad.name] = why
                remove(self.store.folder / bad.name)

    def next(self) -> Chunk | None:
        """The next chunk to compute, one that is not stored yet; None when none is left."""
        while self.todo:
            chunk = self.todo.pop(0)
            if not self.store.has(chunk):
                return chunk
            self.bar.advance(chunk.count)
        return None

    def put(self, chunk: Chunk, logits: Float[Tensor, "n draws k"], labels: Int[Tensor, " n"]) -> None:
        """Store a chunk that was computed, unless another process has stored it meanwhile."""
        if not self.store.has(chunk):
            size = self.store.write(chunk, logits, labels)
            if not self.done.computed:  # the size of the others is known now: better than after hours of computing
                needed = size // chunk.count * sum(other.count for other in self.todo)
                if needed > (free := shutil.disk_usage(self.store.folder).free):
                    has = f"{size_in_words(needed)} and {self.store.folder} has {size_in_words(free)} left"
                    instead = "evaluate the network without storing its logits (keepcover.evaluation.Network)"
                    advice = f"free some space, ask for fewer images or draws, or {instead}"
                    raise InputError(f"the rest of this store needs {has}; {advice}")
        self.done.computed += 1
        self.done.noisy_images += chunk.count
        self.bar.label = f"smoothing {self.done.noisy_images / max(time.monotonic() - self.start, 1e-9):.0f}/s"

    def __exit__(self, *_: object) -> None:
        self.bar.close()
        self.store.sweep()
        self.done.seconds = time.monotonic() - self.start


def remove(path: Path) -> None:
    """Delete a file of a store, or say why not."""
    with refusing(f"cannot delete {path}", OSError, advice="mend that and run the same again"):
        path.unlink(missing_ok=True)


def size_in_words(count: int) -> str:
    """Bytes for people.

    Example:
        >>> size_in_words(51_200_000)
        '51.2 MB'
    """
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} bytes"
