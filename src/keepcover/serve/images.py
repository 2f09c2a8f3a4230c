"""Image files -> pixels in [0, 1]. Size, mode and work are checked before a single pixel is decoded."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from jaxtyping import Float
from PIL import Image, ImageOps

from keepcover.serve.problems import Problem, invalid

FORMATS = ("PNG", "JPEG", "WEBP")
PASSES = 16  # over the pixels of the largest image; usual progressive files have up to 12 scans
SCANS = 64
TEXT = 2**20  # bytes that Pillow inflates of one compressed chunk beside the pixels
_JPEG = b"\xff\xd8"
# What a file's mode may become without anybody choosing a formula: grey is the same in three channels, a palette is
# looked up. Colour to grey and transparency are choices, so they are the client's.
_MODES = {1: {"L": "L", "1": "L"}, 3: {"RGB": "RGB", "P": "RGB", "L": "RGB", "1": "RGB"}, 4: {"RGBA": "RGBA"}}
_COLOURS = {1: "greyscale", 3: "RGB", 4: "RGBA"}


def takes_files(shape: tuple[int, ...]) -> bool:
    """Whether an image file can have this shape: channels first, 1, 3 or 4 of them."""
    return len(shape) == 3 and shape[0] in _MODES


class _Metered(io.BytesIO):
    """A file that is read so often and no more: a header of a million tiny parts is a million steps in Python."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self.left = 4096 + len(content) // 128

    def read(self, size: int | None = -1) -> bytes:
        self.left -= 1
        if self.left < 0:
            raise ValueError("too many parts")
        return super().read(size)


@contextmanager
def opened(content: bytes, name: str, max_work: int) -> Iterator[Image.Image]:
    """An image that is cheap to decode, its header read; whatever it or its decoder does wrong within is a 422.

    Work is pixels times passes over them: a progressive JPEG goes over all pixels in every scan. A scan begins with a
    marker that occurs nowhere else but in embedded thumbnails, so counting it can only overstate the work. Compressed
    chunks of a PNG count for what they may inflate to.
    """
    scans = content.count(b"\xff\xda") if content.startswith(_JPEG) else 1
    kinds = (b"zTXt", b"iTXt", b"iCCP") if content.startswith(b"\x89PNG") else ()
    texts = sum(content.count(kind) for kind in kinds)
    try:
        if scans > SCANS or TEXT * texts > max_work:
            raise invalid(f"{name}: expected at most {SCANS} scans and {max_work // TEXT} compressed texts in one file")
        with Image.open(_Metered(content), formats=FORMATS) as image:
            pixels = image.size[0] * image.size[1]
            if pixels * scans + TEXT * texts > max_work:
                raise invalid(
                    f"{name}: {pixels} pixels in {scans} scans are more work than the {max_work} pixels a file of this request "
                    "may cost; save it without progressive scans, or send fewer or smaller files"
                )
            if (frames := getattr(image, "n_frames", 1)) > 1:
                raise invalid(f"{name}: expected one image, got an animation of {frames} frames")
            yield image
    except Problem:
        raise
    except Image.DecompressionBombError:
        raise invalid(f"{name}: the image claims far more pixels than are read here") from None
    except Exception as error:  # decoders of untrusted bytes raise anything: OSError, SyntaxError, struct.error
        raise invalid(
            f"{name}: not a readable image ({type(error).__name__}); expected a complete {', '.join(FORMATS)} file"
        ) from None


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
        >>> file = io.BytesIO()
        >>> Image.new("L", (8, 8), 255).save(file, "PNG")
        >>> decode(file.getvalue(), (1, 8, 8), "white.png").mean()
        np.float32(1.0)
    """
    if content.startswith(_JPEG):  # what is not used is not parsed: the parsers of these are slow, and loud in the log
        for kind in (b"Exif\0\0", b"MPF\0", b"Photoshop 3.0\0"):
            content = content.replace(kind, bytes(len(kind)))
    with opened(content, name, max_work) as image:
        mode = _check_header(image, shape, name, resize, max_pixels)
        image.load()
        pixels = _fit(image.convert(mode), shape, resize)
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
