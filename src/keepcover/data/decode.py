"""One image file as pixels, by Pillow, or an error that names the file."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from keepcover.errors import InputError, install

# Formats that are decoded from their own bytes alone. Pillow knows others: EPS, for one, starts an interpreter.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
MOST_PIXELS = 1 << 26
DEEP = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")


def pillow() -> Any:
    """Pillow's Image module, or an error that says how to install it."""
    try:
        from PIL import Image
    except ImportError:
        raise InputError(f"image files are decoded by Pillow: {install('images')}") from None
    return Image


def decode(path: Path, resize: int | None, crop: int | None) -> UInt8[np.ndarray, "3 h w"]:
    """RGB pixels: the shorter side scaled to ``resize`` (bilinear), then the ``crop`` x ``crop`` centre.

    The arithmetic is that of the usual evaluation of ImageNet models. The orientation that a camera noted is ignored, as there.
    """
    image_module = pillow()
    try:
        # Pillow warns of odd metadata, which are not pixels, and of sizes beyond a limit above ours.
        with warnings.catch_warnings(action="ignore"), image_module.open(path, formats=FORMATS) as image:
            _refuse_large(path, image.size)
            if image.mode in DEEP:
                raise InputError(
                    f"{path} has more than 8 bits per channel (mode {image.mode}); convert it to 8 bits first"
                )
            image.load()
            rgb = image.convert("RGB")  # alpha is dropped, not mixed in
        rgb = rgb if resize is None else _resized(path, rgb, resize, image_module.Resampling.BILINEAR)
        rgb = rgb if crop is None else _cropped(path, rgb, crop)
    except InputError:
        raise
    except Exception as error:  # decoders meet damaged files with exceptions of every kind
        raise InputError(f"{path} cannot be decoded ({type(error).__name__}: {error}); repair or remove it") from None
    return np.ascontiguousarray(np.asarray(rgb, np.uint8).transpose(2, 0, 1))


def _refuse_large(path: Path, size: tuple[int, int]) -> None:
    if size[0] * size[1] > MOST_PIXELS:
        raise InputError(
            f"{path} would have {size[0]} x {size[1]} pixels, more than {MOST_PIXELS >> 20} million: too large to be decoded; "
            "shrink or remove it"
        )


def _resized(path: Path, image: Any, side: int, filter: Any) -> Any:
    width, height = image.size
    size = (side, side * height // width) if width <= height else (side * width // height, side)
    _refuse_large(path, size)  # a line of one pixel's height grows in both directions
    return image if size == image.size else image.resize(size, filter)


def _cropped(path: Path, image: Any, side: int) -> Any:
    width, height = image.size
    if min(width, height) < side:
        raise InputError(
            f"{path} has {width} x {height} pixels, too few for a centre of {side} x {side}; resize images first (resize=)"
        )
    left, top = round((width - side) / 2), round((height - side) / 2)
    return image.crop((left, top, left + side, top + side))
