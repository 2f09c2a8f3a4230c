"""MNIST and Fashion-MNIST from their official IDX files, compressed or not."""

from __future__ import annotations

import gzip
import hashlib
import math
import zlib
from pathlib import Path

import numpy as np
import torch

from keepcover.data.base import Labelled
from keepcover.data.known import CLASSES, SOURCES, File, check_md5
from keepcover.errors import InputError, refusing

MOST_IMAGES = 60_000
SIDE = 28


def idx(name: str, folder: str | Path, part: str = "test", verify: bool = True) -> Labelled:
    """MNIST or Fashion-MNIST: images [n, 1, 28, 28] in [0, 1].

    Args:
        name: ``mnist`` or ``fashion-mnist``.
        folder: holds the four official files (``t10k-images-idx3-ubyte.gz``, ...), with or without ``.gz``, or a folder
            ``mnist`` or ``fashion-mnist`` of them, or torchvision's ``MNIST/raw`` or ``FashionMNIST/raw``.
        part: ``train`` or ``test``.
        verify: compare the MD5 sums of what the files hold with the official ones, however they are compressed. The two
            datasets name their files alike; their sums tell them apart.
    """
    if name not in ("mnist", "fashion-mnist") or part not in ("train", "test"):
        raise InputError(f"expected mnist or fashion-mnist and train or test, got {name!r} and {part!r}")
    files = SOURCES[name]["binary"].files[slice(0, 2) if part == "train" else slice(2, 4)]
    read = (_read(name, Path(folder), file, dimensions, verify) for file, dimensions in zip(files, (3, 1)))
    (images_at, images), (labels_at, labels) = read
    if len(images) != len(labels):
        found = f"{images_at} has {len(images)} images, {labels_at} has {len(labels)} labels"
        raise InputError(f"{found}; download them again")
    if int(labels.max()) >= len(CLASSES[name]):
        raise InputError(f"{labels_at} holds a label {int(labels.max())}, {name} has 10 classes; download it again")
    pixels = torch.from_numpy(images)[:, None].float() / 255
    return Labelled(name, pixels, torch.from_numpy(labels).long(), CLASSES[name])


def _read(name: str, root: Path, file: File, dimensions: int, verify: bool) -> tuple[Path, np.ndarray]:
    """Where a file lies, and its uint8 array; its header says 0, 0, 8 (unsigned bytes), the number of dimensions, and their sizes."""
    places = (home / one for home in SOURCES[name]["binary"].homes(root) for one in file.names)
    path, head = next(filter(Path.is_file, places), None), 4 + 4 * dimensions
    if path is None:
        looked = f"found no {file.name} of {name} at {root} or in its folder {name}"
        raise InputError(f"{looked}; `keepcover data {name} --out {root}` downloads it")
    with (
        refusing(f"{path} cannot be read", OSError, EOFError, zlib.error, advice="download it again"),
        gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream,
    ):
        header = stream.read(head)
        if header[:4] != bytes([0, 0, 8, dimensions]) or len(header) < head:
            start = header[:4].hex()
            raise InputError(f"{path} is no IDX file of {dimensions}-dimensional bytes; its start is {start}")
        shape = np.frombuffer(header[4:], ">u4").tolist()
        if not 1 <= shape[0] <= MOST_IMAGES or shape[1:] != [SIDE] * (dimensions - 1):
            expected = " x ".join(["n", *["28"] * (dimensions - 1)])
            raise InputError(f"{path} says it holds {' x '.join(map(str, shape))} values, expected {expected}")
        size = math.prod(shape)
        content = stream.read(size + 1)
    if len(content) != size:
        more = "more" if len(content) > size else f"{len(content)}"
        raise InputError(f"{path} says it holds {size} values and has {more}; download it again")
    if verify:
        check_md5(path, hashlib.md5(header + content, usedforsecurity=False).hexdigest(), file.content)
    return path, np.frombuffer(content, np.uint8).reshape(shape).copy()
