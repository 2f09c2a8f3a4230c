"""The datasets that keepcover knows: official addresses, files and checksums, names of classes.

The MD5 sums are those their authors publish. They tell a damaged download from a good one; they are no defence against a
forger, which is why nothing is ever unpickled or extracted either.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepcover.errors import InputError


@dataclass(frozen=True)
class File:
    """A file as its authors published it."""

    name: str
    md5: str
    size: int = 0  # bytes, of what is downloaded
    content: str = ""  # MD5 sum of what a compressed file holds: the same however it was compressed

    @property
    def names(self) -> tuple[str, ...]:
        """What it may be called: a single compressed file may have been unpacked."""
        return (self.name, self.name.removesuffix(".gz")) if self.content else (self.name,)


@dataclass(frozen=True)
class Source:
    """One official form of a dataset.

    ``files`` are downloaded from ``address``, into ``folder`` unless they are archives. ``inside`` are the files of an archive
    that hold images; they lie in ``folder``, extracted or not. ``also`` is where another library keeps the files.
    """

    address: str
    folder: str
    files: tuple[File, ...]
    inside: tuple[File, ...] = ()
    also: str = ""

    def homes(self, root: Path) -> list[Path]:
        """The folders in which files may lie, the most likely one first; ``root`` may be that folder itself."""
        return [root / folder for folder in (self.folder, self.also) if folder] + [root]


def _source(files: list[dict[str, Any]], inside: Sequence[dict[str, Any]] = (), **place: str) -> Source:
    return Source(**place, files=tuple(File(**file) for file in files), inside=tuple(File(**file) for file in inside))


_MOST = 2**26  # bytes that a single compressed file may hold; the largest official one holds 47 million

_OFFICIAL = json.loads((Path(__file__).parent / "official.json").read_text(encoding="utf-8"))
CLASSES: dict[str, tuple[str, ...]] = {name: tuple(about["classes"]) for name, about in _OFFICIAL.items()}
SOURCES: dict[str, dict[str, Source]] = {
    name: {form: _source(**stated) for form, stated in about["forms"].items()} for name, about in _OFFICIAL.items()
}


def source_of(name: str, form: str = "binary") -> Source:
    """One form of one dataset, or an error that lists what there is."""
    if name not in SOURCES:
        raise InputError(f"expected a dataset among {', '.join(SOURCES)}, got {name!r}")
    if form not in SOURCES[name]:
        raise InputError(f"{name} comes in the form {' or '.join(SOURCES[name])}, not {form!r}")
    return SOURCES[name][form]


def md5_of(path: Path) -> str:
    """The MD5 sum of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def state_of(path: Path, file: File) -> str:
    """What the checksum says, that of the content where it is known: ``verified``, ``damaged`` or whose file it is."""
    found = "" if file.content else md5_of(path)
    if file.content:
        with (
            contextlib.suppress(OSError, EOFError, zlib.error),
            gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream,
        ):
            digest = hashlib.md5(stream.read(_MOST), usedforsecurity=False)
            found = "" if stream.read(1) else digest.hexdigest()
    if found == (file.content or file.md5):
        return "verified"
    owner = owner_of(found)
    return f"this is {owner}" if owner else "damaged"


def owner_of(md5: str) -> str | None:
    """Which official file has this sum: to say what a file is when it is not what was asked for."""
    sources = ((name, source) for name, forms in SOURCES.items() for source in forms.values())
    files = ((name, file) for name, source in sources for file in (*source.files, *source.inside))
    return next((f"{file.name} of {name}" for name, file in files if md5 and md5 in (file.md5, file.content)), None)


def check_md5(path: Path, found: str, *expected: str) -> None:
    """Refuse a file whose sum is none of the official ones, of which the first is the likeliest."""
    if found not in expected:
        other = owner_of(found)
        what = f"it is {other}" if other else "it is damaged or was made elsewhere"
        sums = f"{path} has the MD5 sum {found}, the official file has {expected[0]}"
        raise InputError(f"{sums}: {what}. Download it again; in Python, verify=False reads a file of your own")
