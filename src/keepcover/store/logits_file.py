"""Noisy logits on disk, from any framework: a safetensors or npz file with ``logits`` [n, N, K] and ``labels`` [n]."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from keepcover.errors import InputError
from keepcover.store.zipped import refuse_exploding


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
        raise InputError(
            f"{path}: expected numbers in {name!r}, got text such as {values.ravel()[:1].tolist()}; number it with "
            "np.unique(values, return_inverse=True)"
        )
    return torch.from_numpy(values)


def _read(path: Path, names: tuple[str, ...]) -> tuple[list[str], dict[str, Tensor]]:
    """Every name in the file, and those of the wanted arrays that it holds."""
    if not path.is_file():
        raise InputError(f"no file at {path}")
    try:
        if path.suffix == ".npz":
            with zipfile.ZipFile(path) as packed:
                refuse_exploding(packed, path.stat().st_size, str(path))
            with np.load(path, allow_pickle=False) as archive:
                return list(archive.files), {n: _numbers(path, n, archive[n]) for n in names if n in archive.files}
        with safe_open(path, framework="pt") as file:
            present = list(file.keys())
            return present, {name: file.get_tensor(name) for name in names if name in present}
    except InputError:
        raise
    except Exception as error:  # zip files, compressed streams, headers and arrays are each damaged in their own way
        raise InputError(f"{path} is not a readable safetensors or npz file ({error})") from None
