"""Reading a store: what its folder holds, which of it is intact, and the logits themselves in slices."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from safetensors import safe_open
from torch import Tensor

from keepcover.engine.progress import Bar
from keepcover.engine.smoother import as_range
from keepcover.errors import InputError
from keepcover.sealing import DamagedError
from keepcover.store.chunk import describe
from keepcover.store.grid import Chunk, cover
from keepcover.store.index import INDEX, Entry, Facts, find_facts, is_store, listing, read_index
from keepcover.store.logits_file import read_arrays

Rows = slice | range | Sequence[int] | Tensor | None
Store = TypeVar("Store", bound="StoreReader")


class StoreReader:
    """A store as it lies on the disk. Every chunk is compared with its checksum before anything of it is used."""

    def __init__(self, folder: Path, facts: Facts, progress: bool = True) -> None:
        self.folder, self.facts, self.progress = folder, facts, progress
        self.key, self.grid = facts.key, facts.grid
        self.damaged: dict[Chunk, str] = {}  # what is wrong with the others
        self._entries: dict[Chunk, Entry] | None = None

    @classmethod
    def at(cls: type[Store], path: str | Path, progress: bool = True) -> Store:
        """A store that exists, by its own folder or by a folder that holds no other store."""
        path = Path(path)
        names = listing(path)
        if not path.is_dir():
            raise InputError(f"no folder at {path}; make a store with `keepcover smooth`")
        inner = [path] if is_store(path) else [path / name for name in names if is_store(path / name)]
        if not inner:
            raise InputError(f"{path} holds no store of noisy logits; make one with `keepcover smooth --out {path}`")
        if len(inner) > 1:
            raise InputError(f"{path} holds several stores, name one of {', '.join(p.name for p in inner)}")
        facts = find_facts(inner[0])
        if facts is None:
            raise InputError(f"{inner[0]} has no readable index and no intact chunk; fill it with `keepcover smooth`")
        return cls(inner[0], facts, progress)

    # -- what is there -------------------------------------------------------------------------------------------------

    @property
    def entries(self) -> dict[Chunk, Entry]:
        """The intact chunks; checksums are compared once, when they are first asked for."""
        if self._entries is None:
            self.refresh()
        assert self._entries is not None
        return self._entries

    def refresh(self) -> None:
        """Look at the folder again; files that have not changed since they were checked are not read again."""
        known, self._entries, self.damaged = self._entries or {}, {}, {}
        chunks = [chunk for chunk in map(Chunk.of_name, listing(self.folder)) if chunk is not None]
        with Bar("checking", len(chunks), self.progress) as bar:
            for chunk in chunks:
                with contextlib.suppress(FileNotFoundError):  # somebody restarts the store this very moment
                    try:
                        self._entries[chunk] = self._inspect(chunk, known.get(chunk))
                    except DamagedError as reason:
                        self.damaged[chunk] = str(reason)
                bar.advance()

    def _inspect(self, chunk: Chunk, known: Entry | None = None) -> Entry:
        """Read a chunk file and compare it with its checksum, its name and this store."""
        path = self.folder / chunk.name
        try:
            stat = path.stat()
            if known is not None and (known.bytes, known.modified) == (stat.st_size, stat.st_mtime_ns):
                return known
            digest, about = describe(path.read_bytes())
        except FileNotFoundError:
            raise
        except OSError as error:
            raise DamagedError(f"it cannot be read ({error.strerror})") from None
        if Facts.from_dict(about) != self.facts:
            raise DamagedError("it belongs to another store")
        try:
            stated, classes = Chunk(range(*about["rows"]), range(*about["draws"])), int(about["classes"])
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"it does not say what it holds ({error})") from None
        if stated != chunk or not self.grid.fits(chunk):
            raise DamagedError(f"it holds {stated}, which is not its place")
        return Entry(chunk, digest, classes, stat.st_size, stat.st_mtime_ns)

    @property
    def classes(self) -> int | None:
        """Outputs of the model; None while nothing is stored."""
        return next((entry.classes for entry in self.entries.values()), None)

    @property
    def draws(self) -> int:
        """How many draws every image has, from the first on."""
        return self.grid.common_draws(self.entries)

    @property
    def sound_draws(self) -> int:
        """The same, unless there are fewer than there were: then it names the damaged chunk."""
        draws = self.draws
        before = self.grid.common_draws([*self.entries, *(chunk for chunk in self.damaged if self.grid.fits(chunk))])
        if draws == 0 or draws < before:
            raise self._absent(Chunk(range(self.key.images), range(draws, max(before, 1))))
        return draws

    def missing(self, draws: int | range) -> list[Chunk]:
        """The chunks still to be computed before every image has these draws, the first draws of all images first."""
        return self.grid.missing(self.entries, as_range(draws))

    def verify(self) -> dict[str, str]:
        """Read every file again: which are damaged, and how. Empty if all is well."""
        self._entries = None
        self.refresh()
        damaged = {chunk.name: reason for chunk, reason in self.damaged.items()}
        try:
            Facts.from_dict(read_index(self.folder))
        except FileNotFoundError:
            pass  # a store without an index lacks nothing
        except (DamagedError, OSError) as reason:
            damaged[INDEX] = str(reason)
        return damaged

    def summary(self) -> dict[str, Any]:
        """Where the store is, what it holds and what it is for, as plain values."""
        return {
            "store": str(self.folder),
            "images": self.key.images,
            "draws": self.draws,
            "classes": self.classes,
            "chunks": len(self.entries),
            "bytes": sum(entry.bytes for entry in self.entries.values()),
            **self.facts.to_dict(),
        }

    # -- reading -------------------------------------------------------------------------------------------------------

    def read(
        self, rows: Rows = None, draws: int | range | None = None, dtype: torch.dtype = torch.float16
    ) -> Float[Tensor, "n draws k"]:
        """Noisy logits of some images and draws, compared with their checksums.

        Args:
            rows: a slice, range or tensor of positions in the dataset, in any order; all by default.
            draws: how many, or which; by default all that every image has, and an error if a chunk is damaged.
            dtype: float16 as they are stored, or anything that holds it.
        """
        index = self._positions(rows)
        span = as_range(self.sound_draws if draws is None else draws)
        out = torch.empty(len(index), len(span), self.classes or 0, dtype=dtype)
        there = self.grid.by_block(self.entries)
        for block in (index // self.grid.chunk_images).unique().tolist():
            where = (index // self.grid.chunk_images == block).nonzero()[:, 0]
            inside = index[where] - block * self.grid.chunk_images
            low, high = int(inside.min()), int(inside.max()) + 1
            for chunk, piece in cover(there.get(block, ()), span):
                if chunk is None:
                    raise self._absent(Chunk(self.grid.rows(block), piece))
                begin = chunk.draws.start
                with self._opened(chunk) as file:
                    found = file.get_slice("logits")[low:high, piece.start - begin : piece.stop - begin]
                out[where, piece.start - span.start : piece.stop - span.start] = found[inside - low].to(dtype)
        return out

    def labels_of(self, rows: Rows = None) -> Int[Tensor, " n"]:
        """Labels of some images: of those that have any draw."""
        index = self._positions(rows)
        out, there = torch.empty(len(index), dtype=torch.int64), self.grid.by_block(self.entries)
        for block in (index // self.grid.chunk_images).unique().tolist():
            where = index // self.grid.chunk_images == block
            if not there.get(block):
                raise self._absent(Chunk(self.grid.rows(block), range(1)))
            with self._opened(there[block][0]) as file:
                out[where] = file.get_tensor("labels")[index[where] - block * self.grid.chunk_images]
        return out

    @property
    def labels(self) -> Int[Tensor, " n"]:
        """Labels of all images."""
        return self.labels_of()

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

    def _opened(self, chunk: Chunk) -> Any:
        """The file of a chunk, read and compared again if it has changed since it was checked."""
        try:
            self.entries[chunk] = self._inspect(chunk, self.entries[chunk])
        except (DamagedError, FileNotFoundError) as reason:
            self.damaged[chunk] = str(reason) if isinstance(reason, DamagedError) else "it is gone"
            raise self._absent(chunk) from None
        return safe_open(self.folder / chunk.name, framework="pt")

    def _absent(self, wanted: Chunk) -> InputError:
        """Why these logits cannot be read: their file is damaged, or nobody has computed them."""
        for chunk, reason in self.damaged.items():
            if chunk.overlaps(wanted):
                return InputError(
                    f"{self.folder / chunk.name} is damaged: {reason}; run the same `keepcover smooth` again, it computes that chunk anew"
                )
        return InputError(
            f"{self.folder} has no {wanted}; every image has {self.draws} draws: ask for those, or fill the store further with "
            "`keepcover smooth`"
        )


def read_logits(path: str | Path) -> tuple[Tensor, Tensor]:
    """Noisy logits [n, N, K] and labels [n] of a store's folder, or of a safetensors or npz file."""
    if Path(path).is_dir():
        store = StoreReader.at(path)
        return store.read(), store.labels
    logits, labels = read_arrays(path, "logits", "labels")
    return logits, labels
