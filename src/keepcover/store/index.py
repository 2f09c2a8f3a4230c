"""The index of a store, ``index.json``: a convenience that follows from the chunk files, sealed like them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepcover.errors import KeepcoverWarning
from keepcover.store.chunk import FORMAT, JSON_MARK, DamagedError, checksum, describe, seal
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
    head = {"checksum": "0" * 64, "format": FORMAT, **facts.to_dict(), "classes": classes, "draws": draws}
    return seal((json.dumps({**head, "chunks": chunks}, indent=1) + "\n").encode(), JSON_MARK)


def read_index(folder: Path) -> dict[str, Any]:
    """The index of a store, if there is one and its checksum is right."""
    content = (folder / INDEX).read_bytes()
    checksum(content, JSON_MARK)
    index = json.loads(content)
    if index.get("format") != FORMAT:
        raise DamagedError(f"it has format {index.get('format')}, this version reads {FORMAT}")
    return index


def is_store(folder: Path) -> bool:
    return (folder / INDEX).is_file() or any(Chunk.of_name(path.name) for path in folder.iterdir())


def find_facts(folder: Path) -> Facts | None:
    """Key and grid of the store in a folder, from its index or, where that is gone, from a chunk; None without either."""
    if not folder.is_dir():
        return None
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
    for path in sorted(folder.iterdir()):
        if Chunk.of_name(path.name) is not None:
            try:
                return Facts.from_dict(describe(path.read_bytes())[1])
            except (DamagedError, OSError):
                continue
    return None
