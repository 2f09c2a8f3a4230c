"""Image files -> pixels in [0, 1]. Size and mode are checked on the header, before a single pixel is decoded."""

from __future__ import annotations

import io

import numpy as np
from jaxtyping import Float
from PIL import Image, ImageOps

from keepcover.serve.problems import Problem, invalid

FORMATS = ("PNG", "JPEG", "WEBP")
# What a file's mode may become without anybody choosing a formula: grey is the same in three channels, a palette is
# looked up. Colour to grey and transparency are choices, so they are the client's.
_MODES = {1: {"L": "L", "1": "L"}, 3: {"RGB": "RGB", "P": "RGB", "L": "RGB", "1": "RGB"}, 4: {"RGBA": "RGBA"}}
_COLOURS = {1: "greyscale", 3: "RGB", 4: "RGBA"}


def takes_files(shape: tuple[int, ...]) -> bool:
    """Whether an image file can have this shape: channels first, 1, 3 or 4 of them."""
    return len(shape) == 3 and shape[0] in _MODES


def decode(
    content: bytes, shape: tuple[int, int, int], name: str, resize: str = "refuse", max_pixels: int = 2**24
) -> Float[np.ndarray, "c h w"]:
    """Decode one file to float32 ``[c, h, w]``, or raise a 422 that says what is wrong with it.

    EXIF orientation is not applied. JPEG is lossy: epsilon is a distance between decoded pixels.

    Example:
        >>> file = io.BytesIO()
        >>> Image.new("L", (8, 8), 255).save(file, "PNG")
        >>> decode(file.getvalue(), (1, 8, 8), "white.png").mean()
        np.float32(1.0)
    """
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            mode = _check_header(image, shape, name, resize, max_pixels)
            image.load()
            pixels = _fit(image.convert(mode), shape, resize)
    except Problem:
        raise
    except Image.DecompressionBombError:
        raise invalid(f"{name}: the image claims far more pixels than this service reads") from None
    except (
        Exception
    ) as error:  # decoders of untrusted bytes raise anything: OSError, SyntaxError, ValueError, struct.error
        raise invalid(
            f"{name}: not a readable image ({type(error).__name__}); expected a complete {', '.join(FORMATS)} file"
        ) from None
    values = np.asarray(pixels, dtype=np.uint8).reshape(*shape[1:], shape[0])
    return np.ascontiguousarray(values.transpose(2, 0, 1), dtype=np.float32) / np.float32(255)


def _check_header(image: Image.Image, shape: tuple[int, int, int], name: str, resize: str, max_pixels: int) -> str:
    channels, height, width = shape
    if image.size != (width, height):
        found = f"{name}: expected an image {width} wide and {height} high, got {image.size[0]} x {image.size[1]}"
        if resize == "refuse":
            raise invalid(f"{found}; resize it as the calibration images were (resizing changes what epsilon means)")
        if image.size[0] * image.size[1] > max_pixels:
            raise invalid(f"{found}; at most {max_pixels} pixels are resized")
    if getattr(image, "n_frames", 1) > 1:
        raise invalid(f"{name}: expected one image, got an animation of {image.n_frames} frames")  # type: ignore[attr-defined]
    mode = _MODES[channels].get(image.mode)
    if mode is None or (channels != 4 and "transparency" in image.info):
        raise invalid(
            f"{name}: expected {_COLOURS[channels]} with 8 bits per channel, got mode {image.mode}"
            + (" with transparency" if "transparency" in image.info else "")
            + "; convert it as the calibration images were"
        )
    return mode


def _fit(image: Image.Image, shape: tuple[int, int, int], resize: str) -> Image.Image:
    size = (shape[2], shape[1])
    if image.size == size:
        return image
    bilinear = Image.Resampling.BILINEAR
    return ImageOps.fit(image, size, bilinear) if resize == "crop" else image.resize(size, bilinear)
