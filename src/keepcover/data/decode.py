"""One image file as pixels, by Pillow, or an error that names the file."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from keepcover.errors import InputError, optional, refusing

# Formats that are decoded from their own bytes alone. Pillow knows others: EPS, for one, starts an interpreter.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
MOST_PIXELS = 1 << 26
DEEP = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")


def pillow() -> Any:
    """Pillow's Image module, or an error that says how to install it."""
    optional("PIL", "image files are decoded by Pillow", "images")
    from PIL import Image

    return Image


def images_among(paths: Iterable[Path], where: str | Path) -> list[Path]:
    """The files that end like images, in order; names that begin with a dot are passed over."""
    found = (path for path in paths if path.name.lower().endswith(SUFFIXES) and not path.name.startswith("."))
    images = sorted(path for path in found if path.is_file())
    if not images:
        raise InputError(f"{where} holds no images; expected files that end in {', '.join(SUFFIXES)}")
    return images


@contextmanager
def opened(path: Path, content: bytes | None = None) -> Iterator[Any]:
    """Pillow's image, loaded; ``content`` in place of the file's where it was read already. Errors within name the file."""
    source = path if content is None else io.BytesIO(content)
    with (
        refusing(f"{path} cannot be decoded", advice="repair or remove it"),
        # Pillow warns of odd metadata, which are not pixels, and of sizes beyond a limit above ours.
        warnings.catch_warnings(action="ignore"),
        pillow().open(source, formats=FORMATS) as image,
    ):
        _refuse_large(path, image.size)
        if image.mode in DEEP:
            raise InputError(f"{path} has more than 8 bits per channel (mode {image.mode}); convert it to 8 bits first")
        image.load()
        yield image


def decode(path: Path, resize: int | None, crop: int | None) -> UInt8[np.ndarray, "3 h w"]:
    """RGB pixels: the shorter side scaled to ``resize`` (bilinear), then the ``crop`` x ``crop`` centre.

    The arithmetic is that of the usual evaluation of ImageNet models. The orientation that a camera noted is ignored, as there.
    """
    with opened(path) as image:
        rgb = image.convert("RGB")  # alpha is dropped, not mixed in
        if resize is not None:
            width, height = rgb.size
            size = (resize, resize * height // width) if width <= height else (resize * width // height, resize)
            _refuse_large(path, size)  # a line of one pixel's height grows in both directions
            rgb = rgb if size == rgb.size else rgb.resize(size, pillow().Resampling.BILINEAR)
        if crop is not None:
            width, height = rgb.size
            if min(width, height) < crop:
                small = f"{path} has {width} x {height} pixels, too few for a centre of {crop} x {crop}"
                raise InputError(f"{small}; resize images first (resize=)")
            left, top = round((width - crop) / 2), round((height - crop) / 2)
            rgb = rgb.crop((left, top, left + crop, top + crop))
        return np.ascontiguousarray(np.asarray(rgb, np.uint8).transpose(2, 0, 1))


def _refuse_large(path: Path, size: tuple[int, int]) -> None:
    if size[0] * size[1] > MOST_PIXELS:
        large = f"{path} would have {size[0]} x {size[1]} pixels, more than {MOST_PIXELS >> 20} million"
        raise InputError(f"{large}: too large to be decoded; shrink or remove it")
