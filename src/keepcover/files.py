"""Writing files: the place is checked before the work, links are followed, and a file appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
from pathlib import Path

from keepcover.errors import InputError, refusing


def make_folder(path: Path) -> Path:
    """Create a folder for output, or say why not."""
    with refusing(f"cannot create the folder {path}", OSError, ValueError, advice="choose another place"):
        path.mkdir(parents=True, exist_ok=True)
    return path


def target(path: str | Path) -> Path:
    """The file that writing to ``path`` makes or replaces: links are followed, so a link stays a link.

    Only a regular file is replaced: a rename onto a device, a pipe or a socket would destroy it.
    """
    with refusing(f"cannot write {str(path)!r}", OSError, ValueError, advice="choose another place"):
        found = Path(os.path.realpath(path))
        mode = os.lstat(found).st_mode if os.path.lexists(found) else stat.S_IFREG
        inside = found.parent.is_dir()
    if not inside:
        folder = found.parent if Path(path).is_symlink() else Path(path).parent
        raise InputError(f"no folder {folder} to write {found.name} into; create it first")
    if stat.S_ISDIR(mode):
        raise InputError(f"{path} is a folder; give the name of a file")
    if not stat.S_ISREG(mode):
        kinds = "a device, a pipe, a socket or a link to itself"
        raise InputError(f"{path} is no regular file but {kinds}, which writing would replace; give the name of a file")
    return found


def check_place(*paths: str | Path) -> None:
    """Say why a file cannot be written there, before any work is done for it: a trial file is made beside it and removed."""
    for path in paths:
        place = target(path)
        if os.access(place, os.F_OK) and not os.access(place, os.W_OK):
            raise InputError(f"{path} is read-only; change that or choose another name")
        trial = _temporary(place)
        with _writing(path):
            trial.touch(exist_ok=False)
        trial.unlink(missing_ok=True)


def check_folder(folder: Path, *names: str) -> None:
    """:func:`check_place` of files in a folder, which is created; of any file where none is named."""
    make_folder(folder)
    check_place(*(folder / name for name in names or ("file",)))


def write_atomically(path: str | Path, content: bytes) -> None:
    """Write beside the target, then rename: a reader sees the old file or the new one, never half of one.

    The content is on the disk before it gets its name, so that holds after a power failure too. Temporary names are
    random: writers in several processes or on several machines do not meet. A file that is replaced keeps its mode.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_atomically(Path(folder) / "file", b"content")
        ...     (Path(folder) / "file").read_bytes()
        b'content'
    """
    place = target(path)
    temporary = _temporary(place)
    try:
        temporary.write_bytes(content)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        with contextlib.suppress(FileNotFoundError):
            shutil.copymode(place, temporary)
        temporary.replace(place)
    finally:
        temporary.unlink(missing_ok=True)


def write_file(path: str | Path, content: bytes) -> None:
    """:func:`write_atomically` for people: a full or failing disk is one line, and the old file is still there."""
    with _writing(path):
        write_atomically(path, content)


def _temporary(place: Path) -> Path:
    return place.with_name(f".{place.name}.{secrets.token_hex(8)}.tmp")


def _writing(path: str | Path) -> contextlib.AbstractContextManager[None]:
    return refusing(f"cannot write {path}", OSError, advice="make room or choose another place")
