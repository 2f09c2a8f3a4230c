"""Image files -> pixels in [0, 1], of exactly the shape and mode that was calibrated."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float
from PIL import Image, ImageOps

from keepcover.web.images import JPEG, PASSES, opened, values
from keepcover.web.problems import invalid

# What a file's mode may become without the choice of a formula: grey is the same in three channels, a palette is looked up.
# Colour to grey and transparency are choices, so they are the client's.
_MODES = {1: {"L": "L", "1": "L"}, 3: {"RGB": "RGB", "P": "RGB", "L": "RGB", "1": "RGB"}, 4: {"RGBA": "RGBA"}}
_COLOURS = {1: "greyscale", 3: "RGB", 4: "RGBA"}


def takes_files(shape: tuple[int, ...]) -> bool:
    """Whether an image file can have this shape: channels first, 1, 3 or 4 of them."""
    return len(shape) == 3 and shape[0] in _MODES


def decode(
    content: bytes,
    shape: tuple[int, int, int],
    name: str,
    resize: str = "refuse",
    max_pixels: int = 2**24,
    max_work: int = PASSES * 2**24,
) -> Float[np.ndarray, "c h w"]:
    """Decode one file to float32 ``[c, h, w]``, or raise a 422 that says what is wrong with it.

    EXIF orientation is not applied. JPEG is lossy: epsilon is a distance between decoded pixels.

    Example:
        >>> import io
        >>> file = io.BytesIO()
        >>> Image.new("L", (8, 8), 255).save(file, "PNG")
        >>> decode(file.getvalue(), (1, 8, 8), "white.png").mean()
        np.float32(1.0)
    """
    if content.startswith(JPEG):  # what is not used is not parsed: the parsers of these are slow, and loud in the log
        for kind in (b"Exif\0\0", b"MPF\0", b"Photoshop 3.0\0"):
            content = content.replace(kind, bytes(len(kind)))
    channels, height, width = shape
    size, bilinear = (width, height), Image.Resampling.BILINEAR
    with opened(content, name, max_work) as image:
        if image.size != size:
            found = f"{name}: expected an image {width} wide and {height} high, got {image.size[0]} x {image.size[1]}"
            if resize == "refuse":
                raise invalid(
                    f"{found}; resize it as the calibration images were (resizing changes what epsilon means)"
                )
            if image.size[0] * image.size[1] > max_pixels:
                raise invalid(f"{found}; at most {max_pixels} pixels are resized")
        mode, clear = _MODES[channels].get(image.mode), "transparency" in image.info
        if mode is None or (channels != 4 and clear):
            found = (
                f"mode {image.mode}{' with transparency' if clear else ''}; convert it as the calibration images were"
            )
            raise invalid(f"{name}: expected {_COLOURS[channels]} with 8 bits per channel, got {found}")
        image.load()
        plain = image.convert(mode)
        if plain.size != size:
            plain = ImageOps.fit(plain, size, bilinear) if resize == "crop" else plain.resize(size, bilinear)
        return values(plain, shape)
