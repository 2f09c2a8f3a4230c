"""Official files over HTTP: resumed where they stopped, checked, and only then given their names."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urljoin, urlsplit

from keepcover.data.known import SOURCES, File, md5_of, official_md5, owner_of, source_of
from keepcover.engine.progress import Bar, Report
from keepcover.errors import InputError
from keepcover.files import check_place, make_folder, target

CHUNK = 1 << 18
CONNECTIONS = 20  # a download that drops more often than this is left to the user


def download(
    name: str,
    folder: str | Path,
    form: str = "binary",
    *,
    mirror: str | None = None,
    timeout: float = 30.0,
    progress: bool | Report = True,
) -> list[Path]:
    """Download a dataset from its official address and return its verified files.

    What is there and has the official checksum is not downloaded again. An unfinished file is kept with the ending ``.part``
    and continued by the next call. A file gets its own name when it is complete and its checksum is right.

    Args:
        name: ``cifar10``, ``cifar100``, ``mnist`` or ``fashion-mnist``.
        folder: where to put the files; it is created if need be. MNIST and Fashion-MNIST get a folder of their own in it.
        form: ``binary``, or for CIFAR also ``python``.
        mirror: another address that holds the same files; checksums are compared all the same.
        timeout: seconds without an answer after which a connection counts as lost.
        progress: show a bar, or report ``(done, total)`` bytes of each file.
    """
    source = source_of(name, form)
    address = source.address if mirror is None else mirror.rstrip("/") + "/"
    if urlsplit(address).scheme not in ("http", "https"):
        raise InputError(f"expected an address that begins with http:// or https://, got {address!r}")
    places = source.places(Path(folder))
    for file, place in zip(source.files, places):
        make_folder(place.parent)
        if not (place.is_file() and _state(place, file) == "verified"):
            check_place(place)
            _Download(urljoin(address, file.name), target(place), file, timeout, progress).run()
    return places


@dataclass(frozen=True)
class _Download:
    url: str
    place: Path
    file: File
    timeout: float
    progress: bool | Report

    @property
    def part(self) -> Path:
        return self.place.with_name(self.place.name + ".part")

    @property
    def have(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    def run(self) -> None:
        begun_earlier = self.have > 0
        self.receive()
        if md5_of(self.part) != self.file.md5 and begun_earlier:
            self.part.unlink()  # perhaps its beginning was of another file: once more, from the start
            self.receive()
        found = md5_of(self.part)
        if found != self.file.md5:
            self.part.unlink()
            raise InputError(
                f"{self.url} gave a file with the MD5 sum {found}, the official one has {self.file.md5}; it was deleted. Try "
                "another mirror"
            )
        self.part.replace(self.place)

    def receive(self) -> None:
        """Connect until the file is complete; give up when a connection brings nothing."""
        for _ in range(CONNECTIONS):
            before = self.have
            if before > self.file.size:
                self.part.unlink()
            elif before < self.file.size:
                self.connect(before)
            if self.have == self.file.size:
                return
            if self.have == before:
                break
        raise InputError(
            f"{self.url} ended after {self.have} of {self.file.size} bytes; they are kept in {self.part}, and the same command "
            "continues from there"
        )

    def connect(self, have: int) -> None:
        """One connection: append what the server sends from ``have`` on, or start over where it cannot do that."""
        headers = {"User-Agent": "keepcover", **({"Range": f"bytes={have}-"} if have else {})}
        try:
            answer = urllib.request.urlopen(urllib.request.Request(self.url, headers=headers), timeout=self.timeout)
        except urllib.error.HTTPError as error:
            error.close()
            if have and error.code == 416:  # no such range: what we have is not the beginning of this file
                self.part.unlink()
                return
            raise InputError(f"{self.url} answered {error.code} {error.reason}; try another mirror") from None
        except (OSError, http.client.HTTPException) as error:
            raise InputError(
                f"cannot reach {self.url} ({getattr(error, 'reason', error)}). Where there is no network, download it elsewhere "
                f"and put it at {self.place}"
            ) from None
        with answer:
            partial = answer.status == 206
            if partial and not answer.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
                self.part.unlink(missing_ok=True)
                return
            self.write(answer, have if partial else 0)

    def write(self, answer: http.client.HTTPResponse, at: int) -> None:
        left = self.file.size - at
        try:
            with self.part.open("ab" if at else "wb") as out, Bar(self.place.name, left, self.progress) as bar:
                for chunk in _chunks(answer):
                    out.write(chunk[: left - bar.done])
                    bar.advance(len(chunk))
                    if bar.done > left:
                        break
        except OSError as error:
            raise InputError(
                f"cannot write {self.part} ({error.strerror}); make room or choose another folder"
            ) from None
        if bar.done > left:
            self.part.unlink()
            raise InputError(
                f"{self.url} sends more than {self.file.size} bytes: it is another file; try another mirror"
            )


def _chunks(answer: http.client.HTTPResponse) -> Iterator[bytes]:
    """What comes before the end, or before the connection is lost."""
    while True:
        try:
            chunk = answer.read(CHUNK)
        except (OSError, http.client.HTTPException):
            return
        if not chunk:
            return
        yield chunk


# -- what is there -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """A file of a dataset and what its checksum says: ``verified``, ``unfinished``, ``damaged`` or whose it is."""

    path: Path
    form: str
    state: str


def inventory(name: str, folder: str | Path) -> list[Found]:
    """Every official file of a dataset at a place, archives and extracted ones, compared with its checksum."""
    source_of(name)
    found: list[Found] = []
    for form, source in SOURCES[name].items():
        homes = source.homes(Path(folder))
        expected = [(file, home) for file in source.files for home in ([homes[-1]] if source.inside else homes)]
        expected += [(file, home) for file in source.inside for home in homes]
        for file, home in expected:
            paths = [home / name for name in file.names if (home / name).is_file()]
            found += [Found(path, form, _state(path, file)) for path in paths]
            if (part := home / f"{file.name}.part").is_file():
                found.append(Found(part, form, "unfinished"))
    return found


def complete_forms(name: str, found: list[Found]) -> list[str]:
    """The forms of which every archive, or every extracted file, is there and verified."""
    verified = {(one.form, one.path.name) for one in found if one.state == "verified"}
    return [
        form
        for form, source in SOURCES[name].items()
        if any(
            files and all(any((form, name) in verified for name in file.names) for file in files)
            for files in (source.files, source.inside)
        )
    ]


def _state(path: Path, file: File) -> str:
    found, expected = official_md5(path, file)
    if found == expected:
        return "verified"
    owner = owner_of(found)
    return f"this is {owner}" if owner else "damaged"
