"""CIFAR-10 and CIFAR-100 from the official binary files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from holdfast.datasets.base import Labelled
from holdfast.errors import InputError

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

_FOLDERS = {"cifar10": "cifar-10-batches-bin", "cifar100": "cifar-100-binary"}
_FILES = {
    ("cifar10", "train"): [f"data_batch_{i}.bin" for i in range(1, 6)],
    ("cifar10", "test"): ["test_batch.bin"],
    ("cifar100", "train"): ["train.bin"],
    ("cifar100", "test"): ["test.bin"],
}


def cifar(name: str, folder: str | Path, part: str = "test") -> Labelled:
    """CIFAR from the official binary version: images [n, 3, 32, 32] in [0, 1].

    Args:
        name: ``cifar10`` or ``cifar100`` (fine labels).
        folder: holds the extracted archive's folder (``cifar-10-batches-bin``), or is that folder.
        part: ``train`` or ``test``.
    """
    if (name, part) not in _FILES:
        raise InputError(f"expected cifar10 or cifar100 and train or test, got {name!r} and {part!r}")
    folder = Path(folder)
    inner = folder / _FOLDERS[name]
    folder = inner if inner.is_dir() else folder
    label_bytes = 1 if name == "cifar10" else 2
    rows = []
    for file in _FILES[name, part]:
        path = folder / file
        if not path.is_file():
            raise InputError(f"{path} is missing; extract the binary version of {name} from the official archive there")
        raw = np.fromfile(path, dtype=np.uint8)
        if len(raw) == 0 or len(raw) % (label_bytes + 3072):
            raise InputError(f"{path} has {len(raw)} bytes, not a multiple of {label_bytes + 3072}; it is damaged")
        rows.append(raw.reshape(-1, label_bytes + 3072))
    data = np.concatenate(rows)
    classes = 10 if name == "cifar10" else 100
    labels = torch.from_numpy(data[:, label_bytes - 1].astype(np.int64))
    if int(labels.max()) >= classes:
        raise InputError(
            f"{folder} holds a label {int(labels.max())}, {name} has {classes} classes; is it the other CIFAR?"
        )
    images = torch.from_numpy(data[:, label_bytes:]).reshape(-1, 3, 32, 32).float() / 255
    return Labelled(name, images, labels, _names(name, folder))


def _names(name: str, folder: Path) -> tuple[str, ...]:
    if name == "cifar10":
        return CIFAR10_CLASSES
    listed = folder / "fine_label_names.txt"
    return tuple(listed.read_text().split()) if listed.is_file() else tuple(f"class {k}" for k in range(100))
