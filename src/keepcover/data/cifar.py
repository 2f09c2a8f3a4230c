"""CIFAR-10 and CIFAR-100 from any official form: binary or python version, extracted or as the archive itself."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int, UInt8

from keepcover.data.archive import read_members
from keepcover.data.base import Labelled
from keepcover.data.known import CLASSES, SOURCES, Source, check_md5, md5_of
from keepcover.data.plain_pickle import loads
from keepcover.errors import InputError, refusing

PIXELS = 3 * 32 * 32
MOST_BYTES = 1 << 28  # of a whole archive, decompressed; the official ones have 185 MB

Rows = tuple[UInt8[np.ndarray, "n 3072"], Int[np.ndarray, " n"]]


def cifar(name: str, folder: str | Path, part: str = "test", verify: bool = True) -> Labelled:
    """CIFAR as its authors published it: images [n, 3, 32, 32] in [0, 1]. Every form gives the same tensors.

    Args:
        name: ``cifar10`` or ``cifar100`` (fine labels).
        folder: holds, or is, an extracted folder (``cifar-10-batches-bin``, ``cifar-10-batches-py``, ``cifar-100-binary``,
            ``cifar-100-python``) or an official ``.tar.gz`` of one. Archives are read without extracting them, pickles
            without unpickling them.
        part: ``train`` or ``test``.
        verify: compare an archive's MD5 sum with the official one.
    """
    if name not in ("cifar10", "cifar100") or part not in ("train", "test"):
        raise InputError(f"expected cifar10 or cifar100 and train or test, got {name!r} and {part!r}")
    with refusing(f"cannot read {name} at {folder}", OSError):
        form, files = _find(name, Path(folder), part, verify)
    decode = _decode_binary if form == "binary" else _decode_python
    pixels, labels = zip(*(_checked(name, where, *decode(name, content, where)) for where, content in files.items()))
    images = torch.from_numpy(np.concatenate(pixels)).reshape(-1, 3, 32, 32).float() / 255
    return Labelled(name, images, torch.from_numpy(np.concatenate(labels)), CLASSES[name])


def _names(source: Source, part: str) -> list[str]:
    """The files of one part, in the order of their images."""
    return [file.name for file in source.inside[slice(-1, None) if part == "test" else slice(-1)]]


def _find(name: str, where: Path, part: str, verify: bool) -> tuple[str, dict[str, bytes]]:
    """The first complete form there is, and its files of one part by their names, in the order of their images."""
    missing: list[Path] = []
    for form, source in SOURCES[name].items():
        for base in source.homes(where):
            paths = [base / file for file in _names(source, part)]
            absent = [path for path in paths if not path.is_file()]
            if not absent:
                return form, {str(path): path.read_bytes() for path in paths}
            if len(absent) < len(paths) or (base.name == source.folder and base.is_dir()):
                missing += absent
    forms = SOURCES[name].values()
    for path in [where] if where.is_file() else [where / source.files[0].name for source in forms]:
        if path.is_file():
            return _in_archive(name, path, part, verify)
    if missing:
        raise InputError(f"{missing[0]} is missing; extract the official archive of {name} again, or keep it beside")
    folders, archives = (" or ".join(names) for names in zip(*((form.folder, form.files[0].name) for form in forms)))
    expected = f"expected a folder {folders}, or an archive {archives}"
    raise InputError(f"found no {name} at {where}: {expected}; `keepcover data {name} --out DIR` downloads one")


def _in_archive(name: str, path: Path, part: str, verify: bool) -> tuple[str, dict[str, bytes]]:
    forms = SOURCES[name]
    if verify:
        likely = sorted((source.files[0] for source in forms.values()), key=lambda file: file.name != path.name)
        check_md5(path, md5_of(path), *(file.md5 for file in likely))
    wanted = {form: [f"{source.folder}/{file}" for file in _names(source, part)] for form, source in forms.items()}
    content = read_members(path, {*chain(*wanted.values())}.__contains__, MOST_BYTES)
    for form, members in wanted.items():
        if content.keys() >= set(members):
            return form, {f"{path}, {member}": content[member] for member in members}
    firsts = " or ".join(members[0] for members in wanted.values())
    raise InputError(f"{path} does not hold {firsts}; is it the archive of {name}?")


# -- one file ----------------------------------------------------------------------------------------------------------


def _checked(name: str, where: str, pixels: np.ndarray, labels: np.ndarray) -> Rows:
    classes = len(CLASSES[name])
    bad = [label for label in (int(labels.max()), int(labels.min())) if not 0 <= label < classes]
    if bad:
        raise InputError(f"{where} holds a label {bad[0]}, {name} has {classes} classes; is it the other CIFAR?")
    return pixels, labels


def _decode_binary(name: str, content: bytes, where: str) -> Rows:
    """Rows of one label byte (CIFAR-100: the coarse one, then the fine one) and 3072 pixels."""
    head = 1 if name == "cifar10" else 2
    if len(content) == 0 or len(content) % (head + PIXELS):
        raise InputError(f"{where} has {len(content)} bytes, not a multiple of {head + PIXELS}; it is damaged")
    rows = np.frombuffer(content, np.uint8).reshape(-1, head + PIXELS)
    return rows[:, head:], rows[:, head - 1].astype(np.int64)


def _decode_python(name: str, content: bytes, where: str) -> Rows:
    """A pickled dict with the pixels of all images as ``data`` and a list of labels, read as plain data."""
    batch = loads(content, where)
    if not isinstance(batch, dict):
        raise InputError(f"{where} holds a {type(batch).__name__}, expected a dict; it is no file of {name}")
    entries = {key.decode("latin-1") if isinstance(key, bytes) else key: value for key, value in batch.items()}
    key = "labels" if name == "cifar10" else "fine_labels"
    for entry in ("data", key):
        if entry not in entries:
            raise InputError(f"{where} has no entry {entry!r}; is it the other CIFAR?")
    pixels, labels = entries["data"], entries[key]
    if not isinstance(pixels, np.ndarray) or pixels.shape[1:] != (PIXELS,) or len(pixels) == 0:
        raise InputError(f"{where}: expected 'data' to be a uint8 array [n, {PIXELS}]; it is damaged")
    if not isinstance(labels, list) or len(labels) != len(pixels) or any(type(label) is not int for label in labels):
        raise InputError(f"{where}: expected {key!r} to be a list of {len(pixels)} integers; it is damaged")
    within = [min(max(label, -1), 2**31) for label in labels]  # a pickle has no largest integer
    return pixels, np.array(within, np.int64)
