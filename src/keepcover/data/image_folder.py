"""Folders of images, one per class, decoded as they are needed."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from keepcover.data.base import Labelled
from keepcover.data.decode import SUFFIXES, decode, pillow
from keepcover.engine.progress import Bar, Progress
from keepcover.errors import InputError, refusing

MOST_IN_MEMORY = 4 << 30


def image_folder(
    path: str | Path,
    *,
    resize: int | None = 256,
    crop: int | None = 224,
    names: str | Path | None = None,
    flat: bool = False,
) -> ImageFolder:
    """Images in one folder per class (``root/n01440764/*.JPEG``), ImageNet's layout or any other. Nothing is decoded yet.

    Args:
        path: the folder of the class folders. Names that begin with a dot are passed over.
        resize: scale the shorter side to this; None leaves images as they are.
        crop: keep this square from the centre; None keeps all, and all images must then have one size.
        names: a file that names the classes by folder: a JSON object, or lines ``n01440764 tench, Tinca tinca``.
        flat: the images are in the folder itself and have no classes, as new ones have none.

    Example:
        >>> import tempfile
        >>> from PIL import Image
        >>> with tempfile.TemporaryDirectory() as root:
        ...     for name, colour in {"blue": (0, 0, 255), "red": (255, 0, 0)}.items():
        ...         (Path(root) / name).mkdir()
        ...         Image.new("RGB", (40, 30), colour).save(Path(root) / name / "one.png")
        ...     data = image_folder(root, resize=16, crop=8)
        ...     image, label = data[1]
        >>> len(data), data.class_names, label, tuple(image.shape), image[:, 0, 0].tolist()
        (2, ('blue', 'red'), 1, (3, 8, 8), [1.0, 0.0, 0.0])
    """
    for value, option in ((resize, "resize"), (crop, "crop")):
        if value is not None and value < 1:
            raise InputError(f"expected {option} to be at least 1 pixel, or None for none, got {value}")
    if resize is not None and crop is not None and crop > resize:
        misfit = f"a centre of {crop} pixels does not fit in images whose shorter side is {resize}"
        raise InputError(f"{misfit}; enlarge resize")
    pillow()
    return ImageFolder(Path(path), resize, crop, None if names is None else Path(names), flat)


def usual_folder(path: str | Path, flat: bool = False) -> ImageFolder:
    """A folder of images of at most 224 pixels as they are, which must then have one size; of larger ones as ImageNet's."""
    images = image_folder(path, resize=None, crop=None, flat=flat)
    return images if min(images.shape[1:]) <= 224 else image_folder(path, flat=flat)


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Images and labels in a fixed order: folders by name, files by name within.

    A label is the position of its folder among the folders found, so a model of K classes needs all K folders. Give the
    dataset itself, or its :meth:`loader` for decoding in several processes, wherever keepcover takes data.
    """

    def __init__(self, root: Path, resize: int | None, crop: int | None, names: Path | None, flat: bool) -> None:
        self.root, self.resize, self.crop = root, resize, crop
        folders = ["."] if flat else _class_folders(root)
        self.class_names = () if flat else tuple(folders) if names is None else _read_names(names, folders)
        self._files: list[tuple[str, int]] = []  # path under the root, bytes
        labels, seen = [], {_number(root): "."}
        for label, folder in enumerate(folders):
            listed = sorted(_images_in(root, folder, seen))
            if not listed:
                raise InputError(f"{root / folder} holds no images; remove it, or put images of that class there")
            self._files += listed
            labels += [label] * len(listed)
        self.labels = torch.tensor(labels)
        self.shape = (3, crop, crop) if crop else decode(self.path(0), resize, crop).shape

    def __len__(self) -> int:
        return len(self._files)

    def path(self, index: int) -> Path:
        """The file of one image."""
        return self.root / self._files[index][0]

    def pixels(self, index: int) -> UInt8[Tensor, "3 h w"]:
        """One image as bytes."""
        found = decode(self.path(index), self.resize, self.crop)
        if found.shape != self.shape:
            here, first = (f"{width} x {height}" for _, height, width in (found.shape, self.shape))
            both = f"{self.path(index)} has {here} pixels, {self.path(0)} has {first}"
            raise InputError(f"{both}; give resize and crop, or make all images of one size")
        return torch.from_numpy(found)

    def __getitem__(self, index: int) -> tuple[Float[Tensor, "3 h w"], int]:
        return self.pixels(index).float() / 255, int(self.labels[index])

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of what decides the tensors: paths under the root, sizes of files, resize and crop.

        Contents are not read: an image replaced by another of exactly its length goes unnoticed.
        """
        how = json.dumps({"resize": self.resize, "crop": self.crop})
        return hashlib.sha256((how + "".join(f"{json.dumps(file)}\n" for file in self._files)).encode()).hexdigest()

    def subset(self, rows: Sequence[int] | Tensor) -> ImageFolder:
        """The images at these positions, in this order, with the classes of the whole folder."""
        index = torch.as_tensor(rows, dtype=torch.int64)
        some = copy.copy(self)
        some.__dict__.pop("fingerprint", None)
        some._files = [self._files[row] for row in index.tolist()]
        some.labels = self.labels[index]
        return some

    def loader(self, batch_size: int = 64, workers: int | None = None) -> DataLoader[Any]:
        """Batches in order, decoded ahead by worker processes (one per core, at most 8; none for a handful of images); 0
        workers decode in this process.
        """
        if workers is None:
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            workers = min(8, cores) if len(self) > 128 else 0
        rows: Any = range(len(self))
        return _Loader(rows, min(batch_size, 256), num_workers=workers, collate_fn=self._read)

    def _read(self, rows: list[int]) -> tuple[UInt8[Tensor, "n 3 h w"], Tensor]:
        """What workers send: bytes, a quarter of what floats would take in shared memory."""
        return torch.stack([self.pixels(row) for row in rows]), self.labels[rows]

    def load(self, most_bytes: int = MOST_IN_MEMORY, workers: int | None = None, progress: Progress = True) -> Labelled:
        """All images as tensors in memory, for small folders."""
        images = len(self) * int(np.prod(self.shape)) * 4
        if images > most_bytes:
            taken = f"{len(self)} images of {self.shape[2]} x {self.shape[1]} pixels take {images / 2**30:.1f} GiB"
            advice = "read them as they are needed with loader(), or choose a smaller crop"
            raise InputError(f"{taken}, more than {most_bytes / 2**30:.1f}; {advice}")
        out = torch.empty(len(self), *self.shape)
        with Bar("decoding", len(self), progress) as bar:
            for batch, _ in self.loader(workers=workers):
                out[bar.done : bar.done + len(batch)] = batch
                bar.advance(len(batch))
        return Labelled(self.root.resolve().name, out, self.labels, self.class_names)


class _Loader(DataLoader[Any]):
    """Float images from the workers' bytes, and their errors in one line instead of in a traceback."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:  # type: ignore[override]
        try:
            for pixels, labels in super().__iter__():
                yield pixels.float() / 255, labels
        except InputError as error:
            raise InputError(str(error).rsplit("InputError: ", 1)[-1].strip()) from None


# -- what is in the folder ---------------------------------------------------------------------------------------------


def _entries(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Names that do not begin with a dot, and what they are once links are followed."""
    with refusing(f"cannot list {folder}", OSError, advice="expected a folder of class folders"):
        names = [path.name for path in folder.iterdir() if not path.name.startswith(".")]
    for name in names:
        with refusing(f"{folder / name} cannot be read", OSError, advice="is it a broken link? Remove it"):
            found = (folder / name).stat()
        yield name, found


def _number(folder: Path) -> tuple[int, int]:
    """What a folder is, whichever path leads to it. Resolving a path looks at every folder above it: quadratic in the depth."""
    with refusing(f"cannot list {folder}", OSError, advice="expected a folder of class folders"):
        found = folder.stat()
    return found.st_dev, found.st_ino


def _class_folders(root: Path) -> list[str]:
    folders = sorted(name for name, found in _entries(root) if stat.S_ISDIR(found.st_mode))
    if len(folders) < 2:
        found = f"{len(folders)} folder{'' if len(folders) == 1 else 's'}"
        raise InputError(f"{root} holds {found}, expected at least 2 classes: one folder of images per class")
    return folders


def _images_in(root: Path, folder: str, seen: dict[tuple[int, int], str]) -> Iterator[tuple[str, int]]:
    """Every image below a folder, with its size in bytes.

    ``seen`` are the folders listed so far. Each is listed once: links would else let a few folders hold images without end,
    or a power of two of them.
    """
    todo = [folder]
    while todo:
        here = todo.pop()
        earlier = seen.setdefault(_number(root / here), here)
        if earlier != here:
            linked = f"{root / here} is a link to {root / earlier}"
            raise InputError(f"{linked}, so its images would come twice or never end; remove the link")
        for name, found in _entries(root / here):
            relative = f"{here}/{name}"
            if stat.S_ISDIR(found.st_mode):
                todo.append(relative)
            elif stat.S_ISREG(found.st_mode) and relative.lower().endswith(SUFFIXES):
                yield relative, found.st_size
            else:
                expected = f"expected files that end in {', '.join(SUFFIXES)}"
                raise InputError(f"{root / relative} is no image: {expected}; move it elsewhere")


def _read_names(path: Path, folders: list[str]) -> tuple[str, ...]:
    """The names of the classes, in the order of their folders."""
    with refusing(f"cannot read the names of classes in {path}", OSError, ValueError, RecursionError):
        text = path.read_text(encoding="utf-8")
        listed = json.loads(text) if path.suffix == ".json" else _pairs(text)
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise InputError(f"{path}: expected a JSON object that maps folders to names")
    if unnamed := [folder for folder in folders if folder not in listed]:
        raise InputError(f"{path} has no name for the folder {unnamed[0]!r}; add it, or leave names out")
    return tuple(listed[folder] for folder in folders)


def _pairs(text: str) -> dict[str, str]:
    pairs = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    if alone := [pair[0] for pair in pairs if len(pair) != 2]:
        raise InputError(f"expected lines of a folder and its name, got {alone[0]!r} alone")
    return dict(pairs)
