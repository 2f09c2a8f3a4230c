"""Noisy logits on disk, from any framework: a safetensors or npz file with ``logits`` [n, N, K] and ``labels`` [n].

A few megabytes of a zip file can hold terabytes of zeros, so what it may grow to is bounded before it is read.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from keepcover.errors import InputError, refusing

ALWAYS = 1 << 30  # bytes that compressed arrays may have, whatever the file's size
RATIO = 100  # and how many times the file's size beyond that; numbers that were measured shrink to a tenth at best


def names_in(path: str | Path) -> list[str]:
    """Names of the arrays in a file."""
    return _read(Path(path), ())[0]


def read_arrays(path: str | Path, *names: str) -> tuple[Tensor, ...]:
    """Named arrays of a ``.safetensors`` or ``.npz`` file; object arrays are never unpickled."""
    present, found = _read(Path(path), names)
    missing = [name for name in names if name not in found]
    if missing:
        raise InputError(f"{path} has no array {missing[0]!r}; it holds {', '.join(present) or 'nothing'}")
    return tuple(found[name] for name in names)


def _numbers(path: Path, name: str, values: np.ndarray) -> Tensor:
    if values.dtype.kind in "US":
        found = f"text such as {values.ravel()[:1].tolist()}; number it with np.unique(values, return_inverse=True)"
        raise InputError(f"{path}: expected numbers in {name!r}, got {found}")
    return torch.from_numpy(values)


def _read(path: Path, names: tuple[str, ...]) -> tuple[list[str], dict[str, Tensor]]:
    """Every name in the file, and those of the wanted arrays that it holds."""
    if not path.is_file():
        raise InputError(f"no file at {path}")
    with refusing(f"{path} is not a readable safetensors or npz file"):  # each kind is damaged in ways of its own
        if path.suffix == ".npz":
            with zipfile.ZipFile(path) as packed:
                refuse_exploding(packed, path.stat().st_size, str(path))
            with np.load(path, allow_pickle=False) as archive:
                return list(archive.files), {n: _numbers(path, n, archive[n]) for n in names if n in archive.files}
        with safe_open(path, framework="pt") as file:
            present = list(file.keys())
            return present, {name: file.get_tensor(name) for name in names if name in present}


def refuse_packed(archive: zipfile.ZipFile, length: int, name: str) -> None:
    """Raise unless the members are stored as they are and have together no more bytes than the file.

    torch writes its archives like that. A member that is compressed, or listed twice, could have any number of bytes.
    """
    infos = archive.infolist()
    packed = any(info.compress_type != zipfile.ZIP_STORED for info in infos)
    if packed or sum(info.file_size for info in infos) > length:
        raise InputError(f"{name} holds compressed members, which torch never writes; save it again with torch")


def refuse_exploding(archive: zipfile.ZipFile, length: int, name: str) -> None:
    """Raise where compressed arrays would take far more memory than arrays of that file size do."""
    size = sum(info.file_size for info in archive.infolist())
    if size > max(ALWAYS, RATIO * length):
        grown = f"{size / 2**30:.0f} GiB when read"
        raise InputError(f"{name} has {length} bytes and would take {grown}; save the arrays without compression")
