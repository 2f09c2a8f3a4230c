"""Pixels in and out: uploads become the model's input with a word on what was done to them, tensors become PNG."""

from __future__ import annotations

import base64
import io

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from keepcover.web.images import PASSES, opened
from keepcover.web.problems import invalid

MAX_PIXELS = 2**24
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_COLOURS = {"L": "greyscale", "RGB": "colour", "RGBA": "colour with transparency"}


def read_upload(content: bytes, shape: tuple[int, int, int], invert: bool = False) -> tuple[Tensor, list[str]]:
    """A file as float32 [1, c, h, w] in [0, 1], and what was done to make it fit, in words.

    Size and frames are checked on the header, before a pixel is decoded. Whatever is not an image is refused (422).

    Example:
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
        fitted = _fit(ImageOps.exif_transpose(image), shape, notices)
    values = np.asarray(fitted, dtype=np.float32).reshape(*shape[1:], shape[0]) / np.float32(255)
    pixels = torch.from_numpy(np.ascontiguousarray(values.transpose(2, 0, 1)))[None]
    if invert:
        notices.append("inverted: dark became light")
        pixels[:, :3] = 1 - pixels[:, :3]
    return pixels, notices


def _fit(image: Image.Image, shape: tuple[int, int, int], notices: list[str]) -> Image.Image:
    channels, height, width = shape
    mode = _MODES[channels]
    deep = image.mode.startswith(("I", "F"))  # 16 bits and more: the decoder's own scale, brought to 8 bits
    if deep:
        values = np.asarray(image, dtype=np.float64)
        span = 65535.0 if values.max() > 255 else 255.0
        image = Image.fromarray((values.clip(0, span) * (255 / span)).astype(np.uint8))
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


def png(image: Tensor) -> bytes:
    """One image [c, h, w] in [0, 1] as a PNG file."""
    values = (image.detach().cpu().clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy()
    out = io.BytesIO()
    Image.fromarray(values[..., 0] if values.shape[2] == 1 else values).save(out, "PNG")
    return out.getvalue()


def data_uri(image: Tensor) -> str:
    return "data:image/png;base64," + base64.b64encode(png(image)).decode()


def amplified(change: Tensor) -> tuple[Tensor, float]:
    """A difference of two images around middle grey, stretched to the whole range, and by how much."""
    change = change[:3] if len(change) == 4 else change
    largest = float(change.abs().max())
    gain = 0.5 / largest if largest > 0 else 1.0
    return 0.5 + gain * change, gain
