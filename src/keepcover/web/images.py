"""Image files of clients: size and work are known before a single pixel is decoded."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from jaxtyping import Float
from PIL import Image

from keepcover.web.requests import Problem, invalid

FORMATS = ("PNG", "JPEG", "WEBP")
PASSES = 16  # over the pixels of the largest image; usual progressive files have up to 12 scans
SCANS = 64
TEXT = 2**20  # bytes that Pillow inflates of one compressed chunk beside the pixels
JPEG = b"\xff\xd8"


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


def values(image: Image.Image, shape: tuple[int, ...]) -> Float[np.ndarray, "c h w"]:
    """The pixels of a decoded image in [0, 1], channels first."""
    channels, height, width = shape
    pixels = np.asarray(image, dtype=np.uint8).reshape(height, width, channels)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1), dtype=np.float32) / np.float32(255)


@contextmanager
def opened(content: bytes, name: str, max_work: int) -> Iterator[Image.Image]:
    """An image that is cheap to decode, its header read; an exception within is a refusal (422).

    Work is pixels times passes over them: a progressive JPEG goes over all pixels in every scan. A scan begins with a
    marker that occurs nowhere else but in embedded thumbnails, so counting it can only overstate the work. Compressed
    chunks of a PNG count for what they may inflate to.
    """
    scans = content.count(b"\xff\xda") if content.startswith(JPEG) else 1
    kinds = (b"zTXt", b"iTXt", b"iCCP") if content.startswith(b"\x89PNG") else ()
    texts = sum(content.count(kind) for kind in kinds)
    try:
        if scans > SCANS or TEXT * texts > max_work:
            raise invalid(f"{name}: expected at most {SCANS} scans and {max_work // TEXT} compressed texts in one file")
        with Image.open(_Metered(content), formats=FORMATS) as image:
            pixels = image.size[0] * image.size[1]
            if pixels * scans + TEXT * texts > max_work:
                work = f"more work than the {max_work} pixels a file of this request may cost"
                instead = "save it without progressive scans, or send fewer or smaller files"
                raise invalid(f"{name}: {pixels} pixels in {scans} scans are {work}; {instead}")
            if (frames := getattr(image, "n_frames", 1)) > 1:
                raise invalid(f"{name}: expected one image, got an animation of {frames} frames")
            yield image
    except Problem:
        raise
    except Image.DecompressionBombError:
        raise invalid(f"{name}: the image claims far more pixels than are read here") from None
    except Exception as error:  # decoders of untrusted bytes raise anything: OSError, SyntaxError, struct.error
        expected = f"expected a complete {', '.join(FORMATS)} file"
        raise invalid(f"{name}: not a readable image ({type(error).__name__}); {expected}") from None
