"""One chunk of noisy logits: a safetensors file that says what it holds and carries its own checksum.

A chunk file has two tensors, ``logits`` [images, draws, classes] in float16 and ``labels`` [images], so it is a logits
file like any other. Its one metadata entry, ``keepcover``, is a JSON object with the key of its store, its rows and
draws, and the SHA-256 of the whole file as it was when the 64 digits of the checksum were still zeros. So no byte of
it can change unnoticed, and no index is needed to know what it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from keepcover.errors import InputError
from keepcover.sealing import HEADER_MARK, DamagedError, checksum, description, pack
from keepcover.store.grid import Chunk

FORMAT = 2  # 1: logits of noise that was not rounded to a lattice
LARGEST = torch.finfo(torch.float16).max


def to_half(logits: Tensor, chunk: Chunk) -> Tensor:
    """Logits rounded to float16; what does not fit is refused, never clamped."""
    fits = logits.abs() <= LARGEST
    if not fits.all():
        row, draw, label = (int(at) for at in (~fits).nonzero()[0])
        raise InputError(
            f"a logit of image {chunk.rows[row]}, draw {chunk.draws[draw]} is {float(logits[row, draw, label]):g}, beyond the "
            f"{LARGEST:g} that float16 can hold; scale the model's logits down (a temperature inside it) before storing them"
        )
    return logits.to(torch.float16)


def encode(chunk: Chunk, logits: Tensor, labels: Tensor, about: dict[str, Any]) -> bytes:
    """The bytes of a chunk file. ``about`` is what all chunks of a store share: its key and grid."""
    expected = (len(chunk.rows), len(chunk.draws))
    if logits.ndim != 3 or tuple(logits.shape[:2]) != expected or labels.shape != expected[:1]:
        raise InputError(
            f"expected logits [{expected[0]}, {expected[1]}, classes] and {expected[0]} labels for {chunk}, got "
            f"{tuple(logits.shape)} and {tuple(labels.shape)}"
        )
    rows, draws = ([span.start, span.stop] for span in (chunk.rows, chunk.draws))
    stated = {**about, "format": FORMAT, "rows": rows, "draws": draws, "classes": logits.shape[2]}
    return pack({"logits": to_half(logits, chunk), "labels": labels.long()}, stated)


def describe(content: bytes) -> tuple[str, dict[str, Any]]:
    """The checksum and description of a chunk file's bytes, or :class:`DamagedError`."""
    digest = checksum(content, HEADER_MARK)  # from here on everything is as it was written
    about = description(content)
    version = about.get("format")
    if version != FORMAT:
        raise DamagedError(f"it has format {version}, this version reads {FORMAT}")
    return digest, about
