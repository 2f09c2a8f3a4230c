"""Chosen members of a tar.gz archive, read as a stream into memory. Nothing is extracted to disk."""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Collection
from pathlib import Path

from keepcover.errors import InputError

MOST_BYTES = 1 << 28  # of a whole archive, decompressed; the official ones have 185 MB


class _Bounded:
    """A stream that ends in an error rather than in a full memory."""

    def __init__(self, stream: gzip.GzipFile, path: Path) -> None:
        self.stream, self.path, self.left = stream, path, MOST_BYTES

    def read(self, size: int) -> bytes:
        content = self.stream.read(size)
        self.left -= len(content)
        if self.left < 0:
            raise InputError(
                f"{self.path} holds more than {MOST_BYTES >> 20} MB, the official archives 185 MB; it is another archive"
            )
        return content


def read_members(path: Path, wanted: Collection[str]) -> dict[str, bytes]:
    """The contents of those regular files of an archive whose full names are wanted.

    Names are compared, never used as paths. Links, sparse files (a few bytes may claim any length) and everything else that is
    not a plain file are passed over.
    """
    found: dict[str, bytes] = {}
    try:
        with gzip.open(path) as unzipped, tarfile.open(fileobj=_Bounded(unzipped, path), mode="r|") as archive:  # type: ignore[arg-type]
            for member in archive:
                name = member.name.removeprefix("./")
                if not member.isreg() or member.issparse() or name not in wanted:
                    continue
                if name in found:
                    raise InputError(f"{path} holds {name} twice; it is not the official archive")
                stream = archive.extractfile(member)
                found[name] = stream.read() if stream else b""
                if len(found[name]) != member.size:
                    raise InputError(f"{path} ends within {name}; download it again")
    except InputError:
        raise
    except (tarfile.TarError, OSError, EOFError, zlib.error, ValueError, OverflowError, RecursionError) as error:
        raise InputError(f"{path} is not a complete tar.gz archive ({error}); download it again") from None
    return found
