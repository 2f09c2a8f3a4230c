"""The store itself: a folder of chunk files, each of which says what the store is of.

Writers write chunk files, each under a temporary name that is then renamed; a chunk counts only if its checksum is right.
There is no lock: several processes or machines may fill one store at once, at worst computing a chunk twice.

The stored logits are rounded to float16. Whatever is certified on them is certified for the function "network, then
rounding": that is a function of the noisy image like any other, so nothing is lost but a little resolution.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from safetensors import safe_open
from torch import Tensor

from keepcover.engine.arrivals import Gathered
from keepcover.engine.inputs import Batch, batches, take
from keepcover.engine.progress import Bar, Progress
from keepcover.engine.smoother import Draws, Smoother, as_range, evaluation_mode
from keepcover.errors import InputError, reason, refusing
from keepcover.files import check_folder, make_folder, write_atomically
from keepcover.noise.stream import Stream
from keepcover.sealing import DamagedError
from keepcover.store.grid import Chunk, Grid, cover
from keepcover.store.key import StoreKey
from keepcover.store.layout import Facts, chunks_in, encode, find_facts, listing, remove, stated
from keepcover.store.logits_file import read_arrays
from keepcover.tasks.metrics import check_labels

Rows = slice | range | Sequence[int] | Tensor | None

CHUNK_DRAWS = 64
CHUNK_ROWS = {"cpu": 2048, "cuda": 16384}  # noisy images per chunk unless asked otherwise: a minute, or one pass
SECONDS_TO_BE_STALE = 86400.0  # a temporary file this old has lost its writer: writing one takes seconds


# -- the store ---------------------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """A chunk file whose checksum was right when it had this size and time."""

    classes: int
    bytes: int
    modified: int


class LogitStore:
    """Noisy logits of one model on one dataset, in a folder. Every chunk is compared with its checksum before it is used.

    Example:
        >>> import tempfile
        >>> smoother = Smoother(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3)), 0.5)
        >>> data = (torch.rand(6, 1, 2, 2), torch.zeros(6).long())
        >>> key = StoreKey.of(smoother, data, seed=0)
        >>> with tempfile.TemporaryDirectory() as root:
        ...     store = LogitStore.open(root, key)
        ...     first, more = store.fill(smoother, data, draws=4), store.fill(smoother, data, draws=16)
        ...     store.read(rows=slice(0, 2), draws=range(4, 16)).shape, store.labels.shape, more.reused
        (torch.Size([2, 12, 3]), torch.Size([6]), 1)
    """

    def __init__(self, folder: Path, facts: Facts, progress: bool = True) -> None:
        self.folder, self.facts, self.progress = folder, facts, progress
        self.key, self.grid = facts.key, facts.grid
        self.damaged: dict[Chunk, str] = {}  # what is wrong with a chunk
        self._entries: dict[Chunk, Entry] = {}
        self._listed = False

    @classmethod
    def at(cls, path: str | Path, progress: bool = True) -> LogitStore:
        """A store that exists, by its own folder or by a folder that holds no other store."""
        path = Path(path)
        if not path.is_dir():
            raise InputError(f"no folder at {path}; make a store with `keepcover smooth`")
        inner = [one for one in (path, *(path / name for name in listing(path))) if chunks_in(one)]
        if not inner:
            raise InputError(f"{path} holds no store of noisy logits; make one with `keepcover smooth --out {path}`")
        if len(inner) > 1 and inner[0] != path:
            raise InputError(f"{path} holds several stores, name one of {', '.join(p.name for p in inner)}")
        facts = find_facts(inner[0])
        if facts is None:
            raise InputError(f"{inner[0]} has no intact chunk; fill it again with `keepcover smooth`")
        return cls(inner[0], facts, progress)

    @classmethod
    def open(
        cls,
        root: str | Path,
        key: StoreKey,
        *,
        draws: int | None = None,
        chunk_images: int | None = None,
        chunk_draws: int | None = None,
        restart: bool = False,
        progress: bool = True,
    ) -> LogitStore:
        """The store of this key under ``root``; it need not be there yet.

        Args:
            root: a folder for any number of stores.
            key: what the logits depend on.
            draws: how many will be asked for first; only helps to choose ``chunk_images``.
            chunk_images, chunk_draws: images and draws per file, fixed when the store is made.
            restart: delete the chunks of this key first; nothing else is touched.
            progress: show a bar while checksums are compared.
        """
        folder = Path(root) / key.folder
        if restart:
            for chunk in chunks_in(folder):
                remove(folder / chunk.name)
        facts = find_facts(folder)
        if facts is not None and facts.key != key:
            raise InputError(f"{folder} holds the store of another key; move it away, stores are never mixed")
        for name, asked in (("chunk_images", chunk_images), ("chunk_draws", chunk_draws)):
            if asked is not None and asked < 1:
                raise InputError(f"expected {name} of at least 1, got {asked}")
            if facts is not None and asked not in (None, there := getattr(facts.grid, name)):
                raise InputError(f"the store was made with {name} {there}, not {asked}; leave it out, or restart it")
        if facts is None:
            tall = chunk_draws or CHUNK_DRAWS
            rows = CHUNK_ROWS.get(key.device, CHUNK_ROWS["cuda"])
            facts = Facts(key, Grid(key.images, chunk_images or max(1, rows // min(tall, draws or tall)), tall))
        return cls(folder, facts, progress)

    # -- what is there -------------------------------------------------------------------------------------------------

    @property
    def entries(self) -> dict[Chunk, Entry]:
        """The intact chunks; checksums are compared once, when they are first asked for."""
        if not self._listed:
            self.refresh()
        return self._entries

    def refresh(self) -> None:
        """Look at the folder again; files that have not changed since they were checked are not read again."""
        there = dict.fromkeys([*chunks_in(self.folder), *self._entries])
        self.damaged, self._listed = {}, True
        with Bar("checking", len(there), self.progress) as bar:
            for chunk in there:
                self.has(chunk)
                bar.advance()

    def has(self, chunk: Chunk) -> bool:
        """Whether the file of this chunk is there and intact now; if it is damaged, ``damaged`` says how."""
        path, known = self.folder / chunk.name, self._entries.get(chunk)
        self.damaged.pop(chunk, None)
        try:
            found = path.stat()
            if known is None or known[1:] != (found.st_size, found.st_mtime_ns):
                facts, place, classes = stated(path)
                if facts != self.facts:
                    raise DamagedError("it belongs to another store")
                if place != chunk or not self.grid.fits(chunk):
                    raise DamagedError(f"it holds {place}, which is not its place")
                self._entries[chunk] = Entry(classes, found.st_size, found.st_mtime_ns)
            return True
        except FileNotFoundError:
            pass
        except (DamagedError, OSError) as error:
            self.damaged[chunk] = reason(error)
        self._entries.pop(chunk, None)
        return False

    @property
    def classes(self) -> int | None:
        """Outputs of the model; None while nothing is stored."""
        return next((entry.classes for entry in self.entries.values()), None)

    @property
    def draws(self) -> int:
        """How many draws every image has, from the first on."""
        return self.grid.common_draws(self.entries)

    @property
    def checked_draws(self) -> int:
        """The same, unless a damaged chunk hides some, or there are none: then an error."""
        draws = self.draws
        before = self.grid.common_draws([*self.entries, *filter(self.grid.fits, self.damaged)])
        if draws == 0 or draws < before:
            raise self._absent(Chunk(range(self.key.images), range(draws, max(before, 1))))
        return draws

    def missing(self, draws: Draws) -> list[Chunk]:
        """The chunks still to be computed before every image has these draws, the first draws of all images first."""
        return self.grid.missing(self.entries, as_range(draws))

    def verify(self) -> dict[str, str]:
        """Read every file again: which are damaged, and how. Empty if all is well."""
        self._entries = {}
        self.refresh()
        return {chunk.name: why for chunk, why in self.damaged.items()}

    def summary(self) -> dict[str, Any]:
        """Where the store is, what it holds and what it is for, as plain values."""
        where = {"store": str(self.folder), "images": self.key.images, "draws": self.draws, "classes": self.classes}
        size = {"chunks": len(self.entries), "bytes": sum(entry.bytes for entry in self.entries.values())}
        return {**where, **size, **self.facts.to_dict()}

    # -- reading -------------------------------------------------------------------------------------------------------

    def read(
        self, rows: Rows = None, draws: Draws | None = None, dtype: torch.dtype = torch.float16
    ) -> Float[Tensor, "n draws k"]:
        """Noisy logits of some images and draws, compared with their checksums.

        Args:
            rows: a slice, range or tensor of positions in the dataset, in any order; all by default.
            draws: how many, or which; by default all that every image has, and an error if a chunk is damaged.
            dtype: float16 as they are stored, or anything that holds it.
        """
        index = self._positions(rows)
        span = as_range(self.checked_draws if draws is None else draws)
        out = torch.empty(len(index), len(span), self.classes or 0, dtype=dtype)
        for block, chunks, where, inside in self._blocks(index):
            low, high = int(inside.min()), int(inside.max()) + 1
            for chunk, piece in cover(chunks, span):
                with self._opened(chunk, Chunk(block, piece)) as file:
                    begin = chunk.draws.start if chunk else 0
                    found = file.get_slice("logits")[low:high, piece.start - begin : piece.stop - begin]
                out[where, piece.start - span.start : piece.stop - span.start] = found[inside - low].to(dtype)
        return out

    @property
    def labels(self) -> Int[Tensor, " n"]:
        """Labels of all images."""
        parts = []
        for block, chunks, *_ in self._blocks(torch.arange(self.key.images)):
            with self._opened(next(iter(chunks), None), Chunk(block, range(1))) as file:
                parts.append(file.get_tensor("labels"))
        return torch.cat(parts)

    def _positions(self, rows: Rows) -> Tensor:
        n = self.key.images
        if rows is None or isinstance(rows, slice):
            return torch.arange(n)[slice(None) if rows is None else rows]
        index = torch.as_tensor(rows)
        if index.ndim != 1 or index.is_floating_point() or index.dtype == torch.bool:
            raise InputError(f"expected rows as integers in one dimension, got {index.dtype} {tuple(index.shape)}")
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < n:
            raise InputError(f"expected rows between 0 and {n - 1}, got {int(index.min())} to {int(index.max())}")
        return index.long().cpu()

    def _blocks(self, index: Tensor) -> Iterator[tuple[range, list[Chunk], Tensor, Tensor]]:
        """For each block that holds some of these rows: its rows, its chunks, where its rows stand in ``index`` and in it."""
        there, blocks = self.grid.by_block(self.entries), index // self.grid.chunk_images
        for block in blocks.unique().tolist():
            where = (blocks == block).nonzero()[:, 0]
            yield self.grid.rows(block), there[block], where, index[where] - block * self.grid.chunk_images

    def _opened(self, chunk: Chunk | None, wanted: Chunk) -> Any:
        """The file of a chunk, read and compared again if it has changed since it was checked."""
        if chunk is None or not self.has(chunk):
            raise self._absent(wanted)
        return safe_open(self.folder / chunk.name, framework="pt")

    def _absent(self, wanted: Chunk) -> InputError:
        """Why these logits cannot be read: their file is damaged, or they have not been computed."""
        for chunk, why in self.damaged.items():
            if chunk.overlaps(wanted):
                again = "run the same `keepcover smooth` again, it computes that chunk anew"
                return InputError(f"{self.folder / chunk.name} is damaged: {why}; {again}")
        advice = "ask for those, or fill the store further with `keepcover smooth`"
        return InputError(f"{self.folder} has no {wanted}; every image has {self.draws} draws: {advice}")

    # -- writing -------------------------------------------------------------------------------------------------------

    def fill(self, smoother: Smoother, data: Any, draws: Draws) -> Filled:
        """Compute what is missing or damaged, chunk by chunk; stop at any moment and call again to go on.

        A chunk is written while the next is computed.

        Args:
            smoother: the model under noise, the one of the key.
            data: the images and labels of the key: ``(images, labels)`` or a dataset.
            draws: how many draws every image shall have, or which.
        """
        self.key.refuse_other(smoother, data)
        filling, running = Filling(self, draws, smoother.progress), evaluation_mode(smoother.model)
        with filling as work, running, ThreadPoolExecutor(1) as writer:
            writing, chunk = writer.submit(int), work.next()
            while chunk is not None:
                batch = read_chunk(data, chunk.rows)
                logits = compute_chunk(smoother, batch.images, chunk, self.key.stream, work.bar.advance)
                writing.result()  # the store is used by one thread at a time
                following = work.next()
                writing = writer.submit(work.put, chunk, logits, torch.as_tensor(batch.labels))
                chunk = following
            writing.result()
        return work.done

    def write(self, chunk: Chunk, logits: Float[Tensor, "n draws k"], labels: Int[Tensor, " n"]) -> int:
        """Store one chunk and read it back; returns its size in bytes. All that a worker elsewhere needs to call."""
        if not self.grid.fits(chunk):
            raise InputError(f"{chunk} are no block of this store; take chunks from missing()")
        labels = check_labels(labels, len(logits), logits.shape[2])
        content = encode(chunk, logits, labels, self.facts)
        path = make_folder(self.folder) / chunk.name
        advice = "what is stored there is intact: mend that and run the same again, it goes on from there"
        with refusing(f"cannot write {path}", OSError, advice=advice):
            write_atomically(path, content)
        if not self.has(chunk):
            why = self.damaged.get(chunk, "it is gone")
            raise InputError(f"{path} was written and cannot be read back: {why}; is the disk failing?")
        return len(content)

    def sweep(self) -> None:
        """Delete the leftovers of writers that were killed; younger temporary files may have a writer, so they stay."""
        for path in self.folder.glob(".*.tmp"):
            ours = Chunk.of_name(path.name[1:].rsplit(".", 2)[0])
            with contextlib.suppress(OSError):  # a disk that is read-only is no reason to fail
                if ours and time.time() - path.stat().st_mtime > SECONDS_TO_BE_STALE:
                    path.unlink()


def read_logits(path: str | Path) -> tuple[Tensor, Tensor]:
    """Noisy logits [n, N, K] and labels [n] of a store's folder, or of a safetensors or npz file."""
    if Path(path).is_dir():
        store = LogitStore.at(path)
        return store.read(), store.labels
    logits, labels = read_arrays(path, "logits", "labels")
    return logits, labels


# -- filling it --------------------------------------------------------------------------------------------------------

# Every engine goes through Filling, so that all of them skip, write, refuse and sum up alike. Engines decide only where.


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


def scattered(chunks: Sequence[Chunk]) -> list[Chunk]:
    """The same chunks: still the first draws of all images first, but the images in an order of this process's own.

    Example:
        >>> chunks = [Chunk(range(k, k + 1), range(draw, draw + 2)) for draw in (0, 2) for k in range(9)]
        >>> [chunk.draws.start for chunk in scattered(chunks)] == [0] * 9 + [2] * 9
        True
    """
    return sorted(random.SystemRandom().sample(chunks, len(chunks)), key=lambda chunk: chunk.draws.start)


class Filling(contextlib.AbstractContextManager["Filling"]):
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
