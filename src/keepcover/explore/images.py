"""Images on show by name: ``g12`` is the gallery's, ``u1a2b...`` an upload; uploads become the model's input, tensors become PNG."""

from __future__ import annotations

import hashlib
import re
import threading
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from keepcover.data import Labelled
from keepcover.web.images import PASSES, opened, values
from keepcover.web.requests import Problem, invalid

KEPT = 64  # uploads
MAX_PIXELS = 2**24
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_COLOURS = {"L": "greyscale", "RGB": "colour", "RGBA": "colour with transparency"}


def read_upload(content: bytes, shape: tuple[int, ...], invert: bool = False) -> tuple[Tensor, list[str]]:
    """A file as float32 [1, c, h, w] in [0, 1], and what was done to make it fit, in words.

    Size and frames are checked on the header, before a pixel is decoded. A file that is no image is refused (422).

    Example:
        >>> import io
        >>> file = io.BytesIO()
        >>> Image.new("RGB", (16, 12), (255, 255, 255)).save(file, "PNG")
        >>> image, notices = read_upload(file.getvalue(), (1, 8, 8))
        >>> tuple(image.shape), notices
        ((1, 1, 8, 8), ['turned from colour into greyscale', 'cropped and resized from 16 x 12 to 8 x 8 pixels'])
    """
    notices: list[str] = []
    with opened(content, "the upload", PASSES * MAX_PIXELS) as image:
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise invalid(f"the image has {width} x {height} pixels; at most {MAX_PIXELS} are read: make it smaller")
        image.load()
        pixels = torch.from_numpy(values(_fit(ImageOps.exif_transpose(image), shape, notices), shape))[None]
    if invert:
        notices.append("inverted: dark became light")
        pixels[:, :3] = 1 - pixels[:, :3]
    return pixels, notices


def _fit(image: Image.Image, shape: tuple[int, ...], notices: list[str]) -> Image.Image:
    channels, height, width = shape
    mode = _MODES[channels]
    if image.mode.startswith(("I", "F")):  # 16 bits and more: the decoder's own scale, brought to 8 bits
        depths = np.asarray(image, dtype=np.float64)
        span = 65535.0 if depths.max() > 255 else 255.0
        image = Image.fromarray((depths.clip(0, span) * (255 / span)).astype(np.uint8))
        notices.append("brought to 8 bits per channel")
    if channels != 4 and (image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info):
        canvas = Image.new("RGBA", image.size, (255, 255, 255, 255))
        canvas.alpha_composite(image.convert("RGBA"))
        image = canvas.convert("RGB")
        notices.append("transparency laid on white")
    if image.mode != mode:
        was = "greyscale" if image.mode in ("L", "1") else "colour"
        if was != _COLOURS[mode]:
            notices.append(f"turned from {was} into {_COLOURS[mode]}")
        image = image.convert(mode)
    if image.size != (width, height):
        notices.append(f"cropped and resized from {image.size[0]} x {image.size[1]} to {width} x {height} pixels")
        image = ImageOps.fit(image, (width, height), Image.Resampling.BOX)
    return image


def amplified(change: Tensor) -> tuple[Tensor, float]:
    """A difference of two images around middle grey, stretched to the whole range, and by how much."""
    change = change[:3] if len(change) == 4 else change
    largest = float(change.abs().max())
    gain = 0.5 / largest if largest > 0 else 1.0
    return 0.5 + gain * change, gain


@dataclass(frozen=True)
class Shown:
    """One image [1, c, h, w], the number that keys its noise, and its label; of an upload the label is not known."""

    pixels: Tensor
    id: int
    label: int | None


class Images:
    """The gallery and the latest uploads, in memory only."""

    def __init__(self, gallery: Labelled, kept: int = KEPT) -> None:
        self.kept, self._lock = kept, threading.Lock()
        labels = enumerate(gallery.labels.tolist())
        self._gallery = {f"g{i}": Shown(gallery.images[i : i + 1], i, int(label)) for i, label in labels}
        self._uploads: dict[str, Shown] = {}

    def add(self, pixels: Tensor) -> str:
        """Keep an upload; the same pixels have the same name, and so the same noise."""
        digest = hashlib.sha256(pixels.contiguous().numpy().tobytes()).hexdigest()[:12]
        with self._lock:
            self._uploads.pop(f"u{digest}", None)
            self._uploads[f"u{digest}"] = Shown(pixels, int(digest, 16) | 1 << 50, None)
            if len(self._uploads) > self.kept:
                del self._uploads[next(iter(self._uploads))]
        return f"u{digest}"

    def get(self, name: str) -> Shown:
        with self._lock:  # an upload that is sent again is away for a moment
            shown = self._gallery.get(name) or self._uploads.get(name)
        if shown is None and re.fullmatch("u[0-9a-f]{12}", name):
            raise Problem("not_found", "this upload is no longer kept; upload the image again")
        if shown is None:
            raise Problem("not_found", f"no image {name[:40]!r}; the gallery has g0 to g{len(self._gallery) - 1}")
        return shown
