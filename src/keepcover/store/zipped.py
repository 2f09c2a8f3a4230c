"""What a zip file may grow to when it is read: a few megabytes can hold terabytes of zeros."""

from __future__ import annotations

import zipfile

from keepcover.errors import InputError

ALWAYS = 1 << 30  # bytes that compressed arrays may have, whatever the file's size
RATIO = 100  # and how many times the file's size beyond that; numbers that were measured shrink to a tenth at best


def refuse_packed(archive: zipfile.ZipFile, length: int, name: str) -> None:
    """Raise unless the members are stored as they are and have together no more bytes than the file.

    torch writes its archives like that. A member that is compressed, or listed twice, could have any number of bytes.
    """
    infos = archive.infolist()
    if (
        any(info.compress_type != zipfile.ZIP_STORED for info in infos)
        or sum(info.file_size for info in infos) > length
    ):
        raise InputError(f"{name} holds compressed members, which torch never writes; save it again with torch")


def refuse_exploding(archive: zipfile.ZipFile, length: int, name: str) -> None:
    """Raise where compressed arrays would take far more memory than arrays of that file size do."""
    size = sum(info.file_size for info in archive.infolist())
    if size > max(ALWAYS, RATIO * length):
        raise InputError(
            f"{name} has {length} bytes and would take {size / 2**30:.0f} GiB when read: too much to be data; save the arrays "
            "without compression"
        )
