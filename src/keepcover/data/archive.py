"""Files of a tar archive, read without extracting it."""

from __future__ import annotations

import bz2
import gzip
import lzma
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keepcover.errors import InputError, refusing

_OPENERS = {b"\x1f\x8b": gzip.open, b"BZ": bz2.open, b"\xfd7": lzma.open}  # by how a compressed file begins
_DAMAGES = (tarfile.TarError, OSError, EOFError, zlib.error, lzma.LZMAError, ValueError, OverflowError, RecursionError)


class _Limited:
    """A stream that ends in an error rather than in a full memory."""

    def __init__(self, stream: Any, path: Path, most: int) -> None:
        self.stream, self.path, self.most, self.left = stream, path, most, most

    def read(self, size: int) -> bytes:
        content = self.stream.read(size)
        self.left -= len(content)
        if self.left < 0:
            more = f"{self.path} holds more than {self.most >> 20} MB, the most that is read from it"
            raise InputError(f"{more}; is it another archive? Else unpack it into a folder")
        return content


def read_members(path: Path, wanted: Callable[[str], bool], most: int) -> dict[str, bytes]:
    """The contents of those regular files of an archive whose full names are wanted; ``most`` bytes are unpacked in all.

    Names are compared, never used as paths. Links, sparse files (a few bytes may claim any length) and everything else that is
    not a plain file are passed over.
    """
    found: dict[str, bytes] = {}
    with refusing(f"{path} is not a complete tar archive", *_DAMAGES, advice="get it again"):
        with path.open("rb") as file:
            unpack: Any = _OPENERS.get(file.read(2), open)
        with unpack(path, "rb") as stream, tarfile.open(fileobj=_Limited(stream, path, most), mode="r|") as archive:  # type: ignore[arg-type]
            for member in archive:
                name = member.name.removeprefix("./")
                if not member.isreg() or member.issparse() or not wanted(name):
                    continue
                if name in found:
                    raise InputError(f"{path} holds {name} twice; it is not the official archive")
                found[name] = archive.extractfile(member).read()  # type: ignore[union-attr]
                if len(found[name]) != member.size:
                    raise InputError(f"{path} ends within {name}; get it again")
    return found
