"""Noisy logits on disk, from any framework: a safetensors or npz file with ``logits`` [n, N, K] and ``labels`` [n]."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from holdfast.errors import InputError


def read_arrays(path: str | Path, *names: str) -> tuple[Tensor, ...]:
    """Named arrays of a ``.safetensors`` or ``.npz`` file; object arrays are never unpickled."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"no file at {path}")
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as archive:
                found = {name: torch.from_numpy(archive[name]) for name in names if name in archive.files}
                present = list(archive.files)
        else:
            with safe_open(path, framework="pt") as file:
                present = list(file.keys())
                found = {name: file.get_tensor(name) for name in names if name in present}
    except (SafetensorError, ValueError, OSError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(f"{path} is not a readable safetensors or npz file ({error})") from None
    missing = [name for name in names if name not in found]
    if missing:
        raise InputError(f"{path} has no array {missing[0]!r}; it holds {', '.join(present) or 'nothing'}")
    return tuple(found[name] for name in names)
