"""The store itself: a folder of chunk files and an index that can always be derived from them.

Workers write chunk files and nothing else, each under a temporary name that is then renamed; a chunk counts only if
its checksum is right. There is no lock: whoever finishes writes the index, from what the folder holds. So several
processes or machines may fill one store at once, at worst computing a chunk twice.

The stored logits are rounded to float16. Whatever is certified on them is certified for the function "network, then
rounding": that is a function of the noisy image like any other, so nothing is lost but a little resolution.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keepcover.engine.smoother import Smoother, evaluation_mode
from keepcover.errors import InputError
from keepcover.files import make_folder, write_atomically
from keepcover.sealing import DamagedError
from keepcover.store.chunk import encode
from keepcover.store.filling import Filled, Filling, compute_chunk, read_chunk
from keepcover.store.grid import Chunk, Grid
from keepcover.store.index import INDEX, Facts, find_facts, index_bytes, listing
from keepcover.store.key import StoreKey
from keepcover.store.reader import StoreReader
from keepcover.tasks.metrics import check_labels

CHUNK_DRAWS = 64
SECONDS_TO_BE_STALE = 86400.0  # a temporary file this old has lost its writer: writing one takes seconds
CHUNK_ROWS = {"cpu": 2048, "cuda": 16384}  # noisy images per chunk unless asked otherwise: a minute, or one pass


class _Aside:
    """One call at a time behind the caller's back: a chunk is written while the GPU computes the next.

    What a call raises comes out of :meth:`wait` or of leaving the context, so a failure costs one more chunk at most.
    """

    def __init__(self, apart: bool) -> None:
        self._thread = ThreadPoolExecutor(1) if apart else None
        self._last: Future[None] | None = None

    def call(self, work: Callable[..., None], *arguments: Any) -> None:
        if self._thread is None:
            work(*arguments)
        else:
            self._last = self._thread.submit(work, *arguments)

    def wait(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def __enter__(self) -> _Aside:
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            with self._thread:
                self.wait()


class LogitStore(StoreReader):
    """Noisy logits of one model on one dataset, in a folder.

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
            chunk_images, chunk_draws: images and draws per file, fixed by whoever fills the store first.
            restart: delete the chunks and the index of this key first; nothing else is touched.
            progress: show a bar while checksums are compared.
        """
        for name, value in (("chunk_images", chunk_images), ("chunk_draws", chunk_draws)):
            if value is not None and value < 1:
                raise InputError(f"expected {name} of at least 1, got {value}")
        folder = Path(root) / key.folder
        if restart:
            _clear(folder)
        facts = find_facts(folder)
        if facts is None:
            tall = chunk_draws or CHUNK_DRAWS
            rows = CHUNK_ROWS.get(key.device, CHUNK_ROWS["cuda"])
            wide = chunk_images or max(1, rows // min(tall, draws or tall))
            return cls(folder, Facts(key, Grid(key.images, wide, tall)), progress)
        if facts.key != key:
            raise InputError(f"{folder} holds the store of another key; move it away, stores are never mixed")
        for name, asked in (("chunk_images", chunk_images), ("chunk_draws", chunk_draws)):
            there = getattr(facts.grid, name)
            if asked is not None and asked != there:
                raise InputError(f"the store was made with {name} {there}, not {asked}; leave it out, or restart it")
        return cls(folder, facts, progress)

    def fill(self, smoother: Smoother, data: Any, draws: int | range) -> Filled:
        """Compute what is missing or damaged, chunk by chunk; stop at any moment and call again to go on.

        Args:
            smoother: the model under noise, the one of the key.
            data: the images and labels of the key: ``(images, labels)`` or a dataset.
            draws: how many draws every image shall have, or which.
        """
        self.key.refuse_other(smoother, data)
        with (
            Filling(self, draws, smoother.progress) as work,
            evaluation_mode(smoother.model),
            _Aside(smoother.device.type == "cuda") as aside,
        ):
            chunk = work.next()
            while chunk is not None:
                batch = read_chunk(data, chunk.rows)
                logits = compute_chunk(smoother, batch.images, chunk, self.key.stream, work.bar.advance)
                aside.wait()  # nobody else looks at the store while the next chunk is chosen
                following = work.next()
                aside.call(work.put, chunk, logits, torch.as_tensor(batch.labels))
                chunk = following
        return Filled(**work.facts)

    def has(self, chunk: Chunk) -> bool:
        """Whether this very chunk is there and intact, whoever wrote it and however recently."""
        with contextlib.suppress(FileNotFoundError, DamagedError):
            self.entries[chunk] = self._inspect(chunk, self.entries.get(chunk))
            self.damaged.pop(chunk, None)
            return True
        return False

    def write(self, chunk: Chunk, logits: Float[Tensor, "n draws k"], labels: Int[Tensor, " n"]) -> int:
        """Store one chunk and read it back; returns its size in bytes. All that a worker elsewhere needs to call."""
        if not self.grid.fits(chunk):
            raise InputError(f"{chunk} are no block of this store; take chunks from missing()")
        labels = check_labels(labels, len(logits), logits.shape[2])
        content = encode(chunk, logits, labels, self.facts.to_dict())
        path = self.folder / chunk.name
        try:
            make_folder(self.folder)
            write_atomically(path, content)
        except OSError as error:
            raise self._unwritable(f"{chunk.name} ({size_in_words(len(content))})", error) from None
        try:
            entry = self._inspect(chunk)
        except DamagedError as reason:
            raise InputError(f"{path} was written and cannot be read back: {reason}; is the disk failing?") from None
        if self._entries is not None:
            self._entries[chunk] = entry
            self.damaged.pop(chunk, None)
        return len(content)

    def _unwritable(self, name: str, error: OSError) -> InputError:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        why, what = ("the disk is full", "free some space") if full else (error.strerror or str(error), "mend that")
        return InputError(
            f"cannot write {name} into {self.folder}: {why}. What is stored there is intact "
            f"({len(self.entries)} chunks); {what} and run the same again, it goes on from there"
        )

    def refuse_too_large(self, needed: int) -> None:
        """Better now than after hours of computing."""
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise InputError(
                f"the rest of this store needs {size_in_words(needed)} and {self.folder} has {size_in_words(free)} left; free some "
                "space, ask for fewer images or draws, or stream statistics instead of storing logits "
                "(keepcover.evaluation.streaming)"
            )

    def write_index(self) -> None:
        """Write ``index.json`` from the chunks there are, unless that is what it says already.

        On a store that is not there yet it makes one without chunks, so that all workers find the same.
        """
        content, path = index_bytes(self.facts, list(self.entries.values()), self.classes), self.folder / INDEX
        try:
            make_folder(self.folder)
            if not path.is_file() or path.read_bytes() != content:
                write_atomically(path, content)
        except OSError as error:
            raise self._unwritable(INDEX, error) from None

    def check_writable(self) -> None:
        """Say before any work that files cannot be made here."""
        try:
            with tempfile.TemporaryFile(dir=make_folder(self.folder)) as file:
                file.write(b"0" * 4096)
        except OSError as error:
            raise self._unwritable("files", error) from None

    def remove(self, chunk: Chunk) -> None:
        """Delete the file of a chunk, or say why not."""
        _remove(self.folder / chunk.name)

    def finish(self) -> None:
        """The index of all there is, whoever wrote it, and no leftovers of writers that were killed."""
        # A full disk or a read-only store is no reason to fail: the chunks are there, and the index follows from them.
        with contextlib.suppress(InputError, OSError):
            self.refresh()
            self.write_index()
            for path in self.folder.glob(".*.tmp"):
                if _is_ours(path.name[1:].rsplit(".", 2)[0]) and _is_stale(path):
                    path.unlink(missing_ok=True)


def _is_ours(name: str) -> bool:
    return name == INDEX or Chunk.of_name(name) is not None


def _is_stale(temporary: Path) -> bool:
    """Whether a temporary file is too old to have a writer. Others of other writers are never touched: they may be alive."""
    with contextlib.suppress(FileNotFoundError):
        return time.time() - temporary.stat().st_mtime > SECONDS_TO_BE_STALE
    return False


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"cannot delete {path} ({error.strerror}); mend that and run the same again") from None


def _clear(folder: Path) -> None:
    for name in listing(folder):
        if _is_ours(name):
            _remove(folder / name)


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
