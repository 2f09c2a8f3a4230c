"""Images with a mask each, in two folders or in an archive: what segmentation is trained and calibrated on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import numpy as np
import torch

from keepcover.data.archive import read_members
from keepcover.data.base import Labelled
from keepcover.data.decode import SUFFIXES, images_among, opened, pillow
from keepcover.engine.progress import Bar, Progress
from keepcover.errors import InputError, refusing

MOST_BYTES = 1 << 32  # of an archive's images, and of the tensors
ANNOTATED = "annot"


def scenes(
    images: str | Path,
    masks: str | Path | None = None,
    *,
    classes: Sequence[str] | str | Path,
    ignore: int | None = None,
    size: tuple[int, int] | None = None,
    progress: Progress = True,
) -> Labelled:
    """Images [n, 3, h, w] in [0, 1] and the class of every pixel [n, h, w], ordered by name.

    A mask is an image of one channel, or of a palette, whose values are indices of classes. It has the name of its image, up to
    the suffix, and its size.

    Args:
        images: a folder, or a .tar archive.
        masks: another one. None: the masks of the images in a folder ``NAME`` are beside it in ``NAMEannot``, as in CamVid.
        classes: names in the order of the indices, or a text file of one name per line.
        ignore: index of pixels without a label; a name for it may stand at the end of ``classes``.
        size: width and height to shrink to: images by the average over areas, masks by the nearest pixel.
        progress: show a bar.

    Example:
        >>> import tempfile
        >>> from PIL import Image
        >>> with tempfile.TemporaryDirectory() as root:
        ...     for folder, image in {"seen": Image.new("RGB", (6, 4), (255, 0, 0)), "true": Image.new("L", (6, 4), 1)}.items():
        ...         (Path(root) / folder).mkdir()
        ...         image.save(Path(root) / folder / "one.png")
        ...     data = scenes(Path(root) / "seen", Path(root) / "true", classes=["road", "car"])
        >>> tuple(data.images.shape), data.labels.unique().tolist(), data.class_names
        ((1, 3, 4, 6), [1], ('road', 'car'))
    """
    pillow()
    names = _names(classes, ignore)
    if size is not None and min(size) < 1:
        raise InputError(f"expected a size of at least 1 x 1 pixels, got {size}")
    root = Path(images)
    pairs = _beside(root) if masks is None else _matched(root, _files(root), Path(masks), _files(Path(masks)))
    first = _scene(pairs[0], size, len(names), ignore)[1].shape
    if (needed := len(pairs) * int(np.prod(first)) * 20) > MOST_BYTES:
        taken = f"{len(pairs)} scenes of {first[1]} x {first[0]} pixels take {needed >> 20} MB"
        raise InputError(f"{taken}; give a smaller size")
    pixels, truth = torch.empty(len(pairs), 3, *first), torch.empty(len(pairs), *first, dtype=torch.int64)
    with Bar("decoding", len(pairs), progress) as bar:
        for row, pair in enumerate(pairs):
            image, mask = _scene(pair, size, len(names), ignore)
            if mask.shape != first:
                here, there = (f"{width} x {height}" for height, width in (mask.shape, first))
                both = f"{pair[0][0]} has {here} pixels, {pairs[0][0][0]} has {there}"
                raise InputError(f"{both}; make all of one size, or give size")
            pixels[row], truth[row] = torch.from_numpy(image) / 255, torch.from_numpy(mask)
            bar.advance()
    return Labelled(root.resolve().stem, pixels, truth, names)


_File = tuple[Path, bytes | None]  # where it is, for messages; its content where it came from an archive
_Pair = tuple[_File, _File]


def _scene(
    pair: _Pair, size: tuple[int, int] | None, classes: int, ignore: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Pixels [3, h, w] and indices [h, w], bytes both."""
    (path, content), (mask_path, mask_content) = pair
    with opened(path, content) as image, opened(mask_path, mask_content) as mask:
        if mask.mode not in ("L", "P", "1"):
            colours = f"{mask_path} has colours (mode {mask.mode})"
            raise InputError(f"{colours}; expected a mask of one channel whose values are indices of classes")
        if image.size != mask.size:
            sides = [f"{width} x {height}" for width, height in (image.size, mask.size)]
            raise InputError(f"{path} has {sides[0]} pixels, its mask {sides[1]}")
        indices = np.asarray(mask)
        unknown = [value for value in np.unique(indices).tolist() if value >= classes and value != ignore]
        if unknown:
            ignored = "" if ignore is None else f", or {ignore} for pixels without a label"
            found = f"{mask_path} has the index {unknown[0]}, expected 0 to {classes - 1}{ignored}"
            raise InputError(f"{found}; name all classes, or give ignore")
        kinds, image = pillow().Resampling, image.convert("RGB")
        if size is not None:
            image, mask = image.resize(size, kinds.BOX), mask.resize(size, kinds.NEAREST)
        return np.asarray(image, np.uint8).transpose(2, 0, 1).copy(), np.asarray(mask).astype(np.uint8)


def _names(classes: Sequence[str] | str | Path, ignore: int | None) -> tuple[str, ...]:
    if isinstance(classes, str | Path):
        what = f"cannot read the names of classes in {classes}"
        with refusing(what, OSError, ValueError, advice="expected one per line"):
            classes = Path(classes).read_text(encoding="utf-8").splitlines()
    listed = [line.strip() for line in classes if line.strip()]
    if ignore is not None and ignore == len(listed) - 1:
        listed.pop()
    if len(listed) < 2 or len(set(listed)) < len(listed):
        raise InputError(f"expected the names of 2 classes or more, none of them twice, got {listed}")
    return tuple(listed)


# -- what is in a folder or an archive ---------------------------------------------------------------------------------


def _files(root: Path) -> dict[str, _File]:
    """Images by their path under the root without the suffix."""
    if not root.exists():
        raise InputError(f"there is no folder or archive {root}")
    if root.is_file():
        entries = read_members(root, lambda name: name.lower().endswith(SUFFIXES), MOST_BYTES)
    else:
        entries = {path.relative_to(root).as_posix(): None for path in images_among(root.rglob("*"), root)}
    found: dict[str, _File] = {}
    for name, content in entries.items():
        stem = str(PurePosixPath(name).with_suffix(""))
        if stem in found:
            both = f"{found[stem][0].name} and {Path(name).name}"
            raise InputError(f"{root} holds {both}; expected one image of that name")
        found[stem] = root / name, content
    if not found:
        raise InputError(f"{root} holds no images; expected files that end in {', '.join(SUFFIXES)}")
    return found


def _beside(root: Path) -> list[_Pair]:
    """Pairs of ``NAME/one`` and ``NAMEannot/one``."""
    images, masks = {}, {}
    for stem, file in _files(root).items():
        folder, _, name = stem.rpartition("/")
        if folder.endswith(ANNOTATED):
            masks[f"{folder.removesuffix(ANNOTATED)}/{name}"] = file
        else:
            images[stem] = file
    return _matched(root, images, root, masks)


def _matched(root: Path, images: dict[str, _File], other: Path, masks: dict[str, _File]) -> list[_Pair]:
    for here, there, what, where in ((images, masks, "mask", other), (masks, images, "image", root)):
        lonely = sorted(set(here) - set(there))
        if lonely:
            more = f" (and {len(lonely) - 1} more)" if len(lonely) > 1 else ""
            raise InputError(f"{here[lonely[0]][0]}{more} has no {what} of its name in {where}; add or move it")
    return [(images[stem], masks[stem]) for stem in sorted(images)]
