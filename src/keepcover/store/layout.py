"""The files of a store: chunks of noisy logits, each with its own checksum.

A chunk has two tensors, ``logits`` [images, draws, classes] in float16 and ``labels`` [images], so it is a logits file like any
other. Its one metadata entry, ``keepcover``, is a JSON object with the key of its store, its rows and draws, and the SHA-256 of
the whole file as it was when the 64 digits of the checksum were still zeros. So no byte of it can change unnoticed, and what a
store is of follows from any of its files.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keepcover.errors import InputError, reason, refusing
from keepcover.sealing import DamagedError, check_seal, description, pack
from keepcover.store.grid import Chunk, Grid
from keepcover.store.key import StoreKey

FORMAT = 3  # 1: noise that was not rounded to a lattice; 2: a structure without plain attributes
LARGEST = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class Facts:
    """What all files of a store agree on."""

    key: StoreKey
    grid: Grid

    def to_dict(self) -> dict[str, Any]:
        grid = {"chunk_images": self.grid.chunk_images, "chunk_draws": self.grid.chunk_draws}
        return {"key": self.key.to_dict(), **grid}


def to_half(logits: Tensor, chunk: Chunk) -> Tensor:
    """Logits rounded to float16; what does not fit is refused, never clamped."""
    fits = logits.abs() <= LARGEST
    if not fits.all():
        row, draw, label = (int(at) for at in (~fits).nonzero()[0])
        where = f"a logit of image {chunk.rows[row]}, draw {chunk.draws[draw]} is {float(logits[row, draw, label]):g}"
        advice = "scale the model's logits down (a temperature inside it) before storing them"
        raise InputError(f"{where}, beyond the {LARGEST:g} that float16 can hold; {advice}")
    return logits.to(torch.float16)


def encode(chunk: Chunk, logits: Tensor, labels: Tensor, facts: Facts) -> bytes:
    """The bytes of a chunk file."""
    n, draws = len(chunk.rows), len(chunk.draws)
    if logits.ndim != 3 or logits.shape[:2] != (n, draws) or labels.shape != (n,):
        found = f"{tuple(logits.shape)} and {tuple(labels.shape)}"
        raise InputError(f"expected logits [{n}, {draws}, classes] and {n} labels for {chunk}, got {found}")
    spans = {name: [span.start, span.stop] for name, span in vars(chunk).items()}
    about = {**facts.to_dict(), "format": FORMAT, **spans, "classes": logits.shape[2]}
    return pack({"logits": to_half(logits, chunk), "labels": labels.long()}, about)


def stated(path: Path) -> tuple[Facts, Chunk, int]:
    """What an intact file says of its store, its own place and its classes; :class:`DamagedError` where it is not intact."""
    content = path.read_bytes()
    try:
        check_seal(content)  # from here on everything is as it was written
        about = description(content)
        if about["format"] != FORMAT:
            raise DamagedError(f"it has format {about['format']}, this version reads {FORMAT}")
        key = StoreKey.from_dict(about["key"])
        place = Chunk(range(*about["rows"]), range(*about["draws"]))
        return Facts(key, Grid(key.images, about["chunk_images"], about["chunk_draws"])), place, int(about["classes"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedError(reason(error)) from None


def listing(folder: Path) -> list[str]:
    """Names in a folder, sorted; none where there is no folder, an error where it cannot be read."""
    with refusing(f"cannot list {folder}", OSError, advice="expected a folder that you may read"):
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def chunks_in(folder: Path) -> list[Chunk]:
    """The chunks that have a file in a folder, intact or not."""
    return [chunk for chunk in map(Chunk.of_name, listing(folder)) if chunk is not None]


def find_facts(folder: Path) -> Facts | None:
    """Key and grid of the store in a folder, from a file that belongs there, else from any; None without an intact one."""
    found = None
    for chunk in chunks_in(folder):
        with contextlib.suppress(DamagedError, OSError):
            facts = stated(folder / chunk.name)[0]
            if facts.key.folder == folder.name:
                return facts
            found = found or facts
    return found


def remove(path: Path) -> None:
    """Delete a file of a store, or say why not."""
    with refusing(f"cannot delete {path}", OSError, advice="mend that and run the same again"):
        path.unlink(missing_ok=True)
