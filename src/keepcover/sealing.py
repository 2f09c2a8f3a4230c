"""Files that carry their own checksum: the SHA-256 of all their bytes, in a place of its own among them.

The place holds 64 zeros while the checksum is computed, so no byte of the file can change unnoticed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as parse
from safetensors.torch import save as serialize
from torch import Tensor

MARK = rb"\"checksum\": \""  # as it stands inside a string of a safetensors header
ZEROS = "0" * 64  # what stands for the checksum until it is known


# What reading a file that is not as it was written may raise.
UNREADABLE = (SafetensorError, OSError, ValueError)


class DamagedError(ValueError):
    """A file that is not as it was written; the text says how."""


def seal(content: bytes) -> bytes:
    """``content`` with its SHA-256 in place of the 64 zeros that follow the mark in it.

    Example:
        >>> check_seal(seal(MARK + ZEROS.encode()))
        >>> check_seal(seal(MARK + ZEROS.encode()) + b"!")
        Traceback (most recent call last):
        keepcover.sealing.DamagedError: it does not match its checksum
    """
    at = content.index(MARK + ZEROS.encode()) + len(MARK)
    return content[:at] + hashlib.sha256(content).hexdigest().encode() + content[at + 64 :]


def check_seal(content: bytes) -> None:
    """:class:`DamagedError` unless sealed content is as it was."""
    found = re.search(re.escape(MARK) + rb"([0-9a-f]{64})", content)
    if found is None:
        raise DamagedError("it carries no checksum")
    digest = hashlib.sha256(content[: found.start(1)] + ZEROS.encode())
    digest.update(memoryview(content)[found.end(1) :])
    if digest.hexdigest().encode() != found[1]:
        raise DamagedError("it does not match its checksum")


def pack(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> bytes:
    """A sealed safetensors file whose one metadata entry, ``keepcover``, is ``about`` as JSON.

    One entry: safetensors writes several in no particular order, and equal contents must be equal files.
    """
    plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    text = json.dumps({**about, "checksum": ZEROS}, sort_keys=True)
    return seal(serialize(plain, {"keepcover": text}))


def unpack(path: Path, sealed: bool = True) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What :func:`pack` was given; one of :data:`UNREADABLE` where the file is not as it was written.

    Args:
        path: the file.
        sealed: refuse a file without a checksum. Otherwise a file of another origin is read as it is.
    """
    content = path.read_bytes()
    about = description(content)
    if sealed or "checksum" in about:
        check_seal(content)
    return parse(content), about


def description(content: bytes) -> dict[str, Any]:
    """The metadata entry ``keepcover`` of a safetensors file; empty where it has none.

    Example:
        >>> description(serialize({}, {"keepcover": '{"epoch": 3}'})), description(serialize({}))
        ({'epoch': 3}, {})
    """
    try:
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        metadata = header.get("__metadata__", {})
        about = json.loads(metadata.get("keepcover", "{}"))
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise DamagedError(f"it is not a safetensors file ({error})") from None
    if "holdfast" in metadata:
        raise DamagedError("it was written by holdfast 0.1.0, as keepcover was called before; make it again")
    if not isinstance(about, dict):
        raise DamagedError("its metadata are not an object")
    return about
