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

from safetensors.torch import load as parse
from safetensors.torch import save as serialize
from torch import Tensor

JSON_MARK = b'"checksum": "'
HEADER_MARK = rb"\"checksum\": \""  # the same inside a string of a safetensors header
CHECKSUM = "0" * 64  # what stands for the checksum until it is known
_ZEROS = CHECKSUM.encode()


class DamagedError(ValueError):
    """A file that is not as it was written; the text says how."""


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


def pack(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> bytes:
    """A sealed safetensors file whose one metadata entry, ``keepcover``, is ``about`` as JSON.

    One entry: safetensors writes several in no particular order, and equal contents must be equal files.
    """
    plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    text = json.dumps({**about, "checksum": CHECKSUM}, sort_keys=True)
    return seal(serialize(plain, {"keepcover": text}), HEADER_MARK)


def unpack(path: Path, sealed: bool = True) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What :func:`pack` was given; a SafetensorError, an OSError or a ValueError where the file is not as it was written.

    Args:
        path: the file.
        sealed: refuse a file without a checksum. Otherwise a file of another origin is read as it is.
    """
    content = path.read_bytes()
    about = description(content)
    if sealed or "checksum" in about:
        checksum(content, HEADER_MARK)
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
