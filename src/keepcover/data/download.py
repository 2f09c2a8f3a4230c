"""Official files over HTTP: resumed where they stopped, checked, and only then given their names.

Not by pooch, which begins every download again: CIFAR's archives have 170 MB, and their server is slow.
"""

from __future__ import annotations

import contextlib
import http.client
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urljoin, urlsplit

from keepcover.data.known import SOURCES, File, md5_of, source_of, state_of
from keepcover.engine.progress import Bar, Progress
from keepcover.errors import InputError, refusing
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
    progress: Progress = True,
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
    home = make_folder(Path(folder) if source.inside else Path(folder) / source.folder)
    places = [home / file.name for file in source.files]
    for file, place in zip(source.files, places):
        if not (place.is_file() and state_of(place, file) == "verified"):
            check_place(place)
            _fetch(urljoin(address, file.name), target(place), file, timeout, progress)
    return places


def _fetch(url: str, place: Path, file: File, timeout: float, progress: Progress) -> None:
    part, found = place.with_name(f"{place.name}.part"), ""
    for _ in range(1 + part.exists()):  # what was there before may be the beginning of another file: then once more
        _receive(url, part, file.size, timeout, progress)
        found = md5_of(part)
        if found == file.md5:
            part.replace(place)
            return
        part.unlink()
    sums = f"{url} gave a file with the MD5 sum {found}, the official one has {file.md5}"
    raise InputError(f"{sums}; it was deleted. Try another mirror")


def _receive(url: str, part: Path, size: int, timeout: float, progress: Progress) -> None:
    """Connect until ``part`` has ``size`` bytes; give up when a connection brings nothing."""
    for _ in range(CONNECTIONS):
        have = _size(part)
        if have >= size:
            return
        headers = {"User-Agent": "keepcover", **({"Range": f"bytes={have}-"} if have else {})}
        try:
            answer = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout)
        except urllib.error.HTTPError as error:
            error.close()
            if have and error.code == 416:  # no such range: what we have is not the beginning of this file
                part.unlink()
                continue
            raise InputError(f"{url} answered {error.code} {error.reason}; try another mirror") from None
        except (OSError, http.client.HTTPException) as error:
            advice = f"Where there is no network, download it elsewhere and put it at {part.with_suffix('')}"
            raise InputError(f"cannot reach {url} ({getattr(error, 'reason', error)}). {advice}") from None
        at = have if answer.status == 206 else 0
        if answer.status == 206 and not answer.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            answer.close()
            part.unlink(missing_ok=True)  # a server that sends another range is asked for all
            continue
        writing = refusing(f"cannot write {part}", OSError, advice="make room or choose another folder")
        with writing, answer, part.open("ab" if at else "wb") as out, Bar(part.stem, size - at, progress) as bar:
            for chunk in _chunks(answer):
                out.write(chunk[: size - at - bar.done])
                bar.advance(len(chunk))
                if bar.done >= size - at:
                    break
        if _size(part) <= have:
            break
    ended = f"{url} ended after {_size(part)} of {size} bytes"
    raise InputError(f"{ended}; they are kept in {part}, and the same command continues from there")


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _chunks(answer: http.client.HTTPResponse) -> Iterator[bytes]:
    """What comes before the end, or before the connection is lost."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        while chunk := answer.read(CHUNK):
            yield chunk


# -- what is there -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """A file of a dataset and what its checksum says: ``verified``, ``unfinished``, ``damaged`` or whose it is."""

    path: Path
    form: str
    file: File
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
            found += [Found(path, form, file, state_of(path, file)) for path in paths]
            if (part := home / f"{file.name}.part").is_file():
                found.append(Found(part, form, file, "unfinished"))
    return found


def complete_forms(name: str, found: list[Found]) -> list[str]:
    """The forms of which every archive, or every extracted file, is there and verified."""
    verified = {one.file for one in found if one.state == "verified"}
    ways = {form: (source.files, source.inside) for form, source in SOURCES[name].items()}
    return [form for form, ways_in in ways.items() if any(files and verified.issuperset(files) for files in ways_in)]
