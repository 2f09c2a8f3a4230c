"""One chunk of noisy logits: a safetensors file that says what it holds and carries its own checksum.

A chunk file has two tensors, ``logits`` [images, draws, classes] in float16 and ``labels`` [images], so it is a logits
file like any other. Its one metadata entry, ``keepcover``, is a JSON object with the key of its store, its rows and
draws, and the SHA-256 of the whole file as it was when the 64 digits of the checksum were still zeros. So no byte of
it can change unnoticed, and no index is needed to know what it is.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import torch
from safetensors.torch import save as serialize
from torch import Tensor

from keepcover.errors import InputError
from keepcover.store.grid import Chunk

FORMAT = 1
LARGEST = torch.finfo(torch.float16).max

JSON_MARK = b'"checksum": "'
CHUNK_MARK = rb"\"checksum\": \""  # the same inside a JSON string
_ZEROS = b"0" * 64


class DamagedError(ValueError):
    """A file of a store that is not as it was written; the text says how."""


def seal(content: bytes, mark: bytes) -> bytes:
    """``content`` with its SHA-256 in place of the 64 zeros that follow ``mark`` in it.

    Example:
        >>> checksum(seal(b'{"checksum": "' + b"0" * 64 + b'"}', JSON_MARK), JSON_MARK)[:8]
        '6afc7a99'
    """
    at = content.index(mark + _ZEROS) + len(mark)
    return content[:at] + hashlib.sha256(content).hexdigest().encode() + content[at + 64 :]


def checksum(content: bytes, mark: bytes) -> str:
    """The checksum that sealed content carries, if it is right; :class:`DamagedError` if it is not."""
    found = re.search(re.escape(mark) + rb"([0-9a-f]{64})", content)
    if found is None:
        raise DamagedError("it carries no checksum")
    digest = hashlib.sha256(content[: found.start(1)])
    digest.update(_ZEROS)
    digest.update(memoryview(content)[found.end(1) :])
    if digest.hexdigest().encode() != found[1]:
        raise DamagedError("it does not match its checksum")
    return found[1].decode()


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
    description = {
        **about,
        "format": FORMAT,
        "checksum": _ZEROS.decode(),
        "rows": [chunk.rows.start, chunk.rows.stop],
        "draws": [chunk.draws.start, chunk.draws.stop],
        "classes": logits.shape[2],
    }
    tensors = {"logits": to_half(logits, chunk).cpu().contiguous(), "labels": labels.cpu().long().contiguous()}
    # One metadata entry: safetensors writes several in no particular order, and equal chunks must be equal files.
    return seal(serialize(tensors, {"keepcover": json.dumps(description, sort_keys=True)}), CHUNK_MARK)


def describe(content: bytes) -> tuple[str, dict[str, Any]]:
    """The checksum and description of a chunk file's bytes, or :class:`DamagedError`."""
    digest = checksum(content, CHUNK_MARK)  # from here on everything is as it was written
    try:
        size = int.from_bytes(content[:8], "little")
        about = json.loads(json.loads(content[8 : 8 + size])["__metadata__"]["keepcover"])
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"it is not a chunk of noisy logits ({error})") from None
    if about.get("format") != FORMAT:
        raise DamagedError(f"it has format {about.get('format')}, this version reads {FORMAT}")
    return digest, about
