"""The index of a store, ``index.json``: a convenience that follows from the chunk files, sealed like them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepcover.errors import InputError, KeepcoverWarning
from keepcover.sealing import CHECKSUM, JSON_MARK, DamagedError, checksum, seal
from keepcover.store.chunk import FORMAT, describe
from keepcover.store.grid import Chunk, Grid
from keepcover.store.key import StoreKey

INDEX = "index.json"


@dataclass(frozen=True)
class Entry:
    """A chunk file whose checksum was right when it had this size and time."""

    chunk: Chunk
    sha256: str
    classes: int
    bytes: int
    modified: int


@dataclass(frozen=True)
class Facts:
    """What all files of a store agree on."""

    key: StoreKey
    grid: Grid

    def to_dict(self) -> dict[str, Any]:
        return {"key": self.key.to_dict(), "chunk_images": self.grid.chunk_images, "chunk_draws": self.grid.chunk_draws}

    @classmethod
    def from_dict(cls, about: dict[str, Any]) -> Facts:
        """What a sealed chunk or index says about its store."""
        try:
            key = StoreKey.from_dict(about["key"])
            return cls(key, Grid(key.images, about["chunk_images"], about["chunk_draws"]))
        except (KeyError, TypeError, ValueError) as reason:
            raise DamagedError(str(reason)) from None


def index_bytes(facts: Facts, entries: Sequence[Entry], classes: int | None) -> bytes:
    """The same bytes for the same chunks: no times, no host names."""
    chunks = [
        {
            "file": entry.chunk.name,
            "rows": [entry.chunk.rows.start, entry.chunk.rows.stop],
            "draws": [entry.chunk.draws.start, entry.chunk.draws.stop],
            "bytes": entry.bytes,
            "sha256": entry.sha256,
        }
        for entry in sorted(entries, key=lambda entry: entry.chunk.name)
    ]
    draws = facts.grid.common_draws(entry.chunk for entry in entries)
    head = {"checksum": CHECKSUM, "format": FORMAT, **facts.to_dict(), "classes": classes, "draws": draws}
    return seal((json.dumps({**head, "chunks": chunks}, indent=1) + "\n").encode(), JSON_MARK)


def read_index(folder: Path) -> dict[str, Any]:
    """The index of a store, if there is one and its checksum is right."""
    content = (folder / INDEX).read_bytes()
    checksum(content, JSON_MARK)
    try:
        index = json.loads(content)
        version = index["format"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedError(f"it is not an index of noisy logits ({error})") from None
    if version != FORMAT:
        raise DamagedError(f"it has format {version}, this version reads {FORMAT}")
    return index


def listing(folder: Path) -> list[str]:
    """Names in a folder, sorted; none where there is no folder, an error where it cannot be read."""
    try:
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    except OSError as error:
        raise InputError(f"cannot list {folder} ({error.strerror}); expected a folder that you may read") from None


def is_store(folder: Path) -> bool:
    return any(name == INDEX or Chunk.of_name(name) for name in listing(folder))


def find_facts(folder: Path) -> Facts | None:
    """Key and grid of the store in a folder, from its index or, where that is gone, from a chunk; None without either."""
    names = listing(folder)
    try:
        return Facts.from_dict(read_index(folder))
    except FileNotFoundError:
        pass
    except (DamagedError, OSError) as reason:
        warnings.warn(
            f"the index {folder / INDEX} is damaged: {reason}. It is derived from the chunks instead",
            KeepcoverWarning,
            stacklevel=3,
        )
    for name in names:
        if Chunk.of_name(name) is not None:
            try:
                return Facts.from_dict(describe((folder / name).read_bytes())[1])
            except (DamagedError, OSError):
                continue
    return None
