"""One predict request -> a tensor of checked images and a level, or a refusal. Nothing is queued before this."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image, ImageOps
from pydantic import ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request

from keepcover.errors import InputError
from keepcover.prediction.predictor import Level, Predictor
from keepcover.serve.batching import Groups, Query
from keepcover.serve.limits import ReadingPool
from keepcover.serve.schemas import FIELDS, GROUPED, LONGEST, SEED, check_structure, explain, request_model, unknown
from keepcover.web.images import FORMATS, JPEG, PASSES, opened, values
from keepcover.web.requests import Problem, form_of, invalid, media_type
from keepcover.web.settings import KIB, Settings

# What a file's mode may become without the choice of a formula: grey is the same in three channels, a palette is looked up.
# Colour to grey and transparency are choices, so they are the client's.
_MODES = {1: {"L": "L", "1": "L"}, 3: {"RGB": "RGB", "P": "RGB", "L": "RGB", "1": "RGB"}, 4: {"RGBA": "RGBA"}}
_COLOURS = {1: "greyscale", 3: "RGB", 4: "RGBA"}


class Reader:
    """Reads requests for one predictor: bodies as they arrive, what they say on threads of its own."""

    def __init__(self, predictor: Predictor, shape: tuple[int, ...], settings: Settings) -> None:
        self.predictor, self.shape, self.settings = predictor, shape, settings
        self.promises = {level: predictor.at(*level).guarantee for level in predictor.levels}
        seen = predictor.inputs
        self.tokens = (int(seen.low), int(seen.high)) if seen is not None and seen.tokens else None
        clause = predictor.rule.asked.promise.groups
        self.groups = None if clause is None else {str(name): name for name in clause.per}
        self.names = FIELDS if clause is None else GROUPED
        self.model = request_model(shape, settings.max_images, predictor.levels, self.tokens, clause is not None)
        self.pool = ReadingPool(settings.max_queue)

    async def receive(self, request: Request) -> Callable[[], Query]:
        """Wait for the whole body; what is returned understands it, at a cost, and is for :attr:`pool`."""
        if request.query_params:
            raise invalid(f"expected no query parameters, got {', '.join(sorted(request.query_params))[:80]}; {SEED}")
        kind = media_type(request)
        if kind == "application/json":
            return partial(self._json, await request.body())
        if kind == "multipart/form-data" and takes_files(self.shape):
            most = self.settings.max_images
            async with form_of(request, most, KIB, 2 if self.groups is None else 2 + most) as form:
                alpha, epsilon = (_number(form, name) for name in ("alpha", "epsilon"))
                files, groups = await self._files(form), None
                if self.groups is not None:  # a form carries text alone: names of groups that are numbers are looked up
                    groups = [self.groups.get(name, name) for name in map(str, form.getlist("groups"))]
                return partial(self._decode, files, *self._asked(alpha, epsilon, groups, len(files)))
        files = " or multipart/form-data with image files" if takes_files(self.shape) else ""
        message = f"expected content type application/json{files}, got {kind[:80] or 'none'}"
        raise Problem("unsupported_media_type", message)

    def _asked(self, alpha: float | None, epsilon: float | None, groups: Groups, images: int) -> tuple[Level, Groups]:
        """The level and the groups of so many images, as they came, checked."""
        if groups is not None and len(groups) != images:
            raise invalid(f"expected the group of each of {images} images in the field groups, got {len(groups)}")
        try:
            self.predictor.grouped(groups, images, self.settings.unknown)
            return next(iter(self.predictor.at(alpha, epsilon).levels)), groups
        except InputError as error:
            raise invalid(str(error)) from None

    def _json(self, body: bytes) -> Query:
        check_structure(body, self.shape, self.settings.max_images, self.names)
        try:
            parsed: Any = self.model.model_validate_json(body)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise explain(first, self.shape, self.settings.max_images, self.names) from None
        kind = np.float64 if self.tokens is None else np.int64
        asked = self._asked(parsed.alpha, parsed.epsilon, getattr(parsed, "groups", None), len(parsed.images))
        return Query(torch.from_numpy(np.array(parsed.images, dtype=kind)), *asked)

    async def _files(self, form: FormData) -> list[tuple[str, bytes]]:
        files: list[tuple[str, bytes]] = []
        for name, value in form.multi_items():
            if name == "images" and isinstance(value, UploadFile):
                files.append((f"images[{len(files)}]", await value.read()))
            elif name == "images":
                raise invalid("expected files in the form field images: every part needs a filename")
            elif name not in self.names:
                raise unknown(name, ("images (files)", *self.names[1:]), "unexpected form field")
        if not files:
            raise invalid(f"expected at least one file in the form field images ({', '.join(FORMATS)})")
        return files

    def _decode(self, files: list[tuple[str, bytes]], level: Level, groups: Groups) -> Query:
        most, own = self.settings.max_pixels, math.prod(self.shape[1:])
        # The files of one request share its work; one of exactly the model's size may always have its passes.
        how = (self.settings.resize, most, PASSES * max(most // len(files), own))
        arrays = [decode(content, self.shape, name, *how) for name, content in files]
        return Query(torch.from_numpy(np.stack(arrays)), level, groups)

    def openapi(self) -> dict[str, Any]:
        """What the request body may be, by content type, for OpenAPI."""
        schema = self.model.model_json_schema()
        content: dict[str, Any] = {"application/json": {"schema": schema}}
        if takes_files(self.shape):
            kinds = ", ".join(f"image/{name.lower()}" for name in FORMATS)
            file = {"type": "string", "format": "binary", "contentMediaType": kinds}
            own = {name: about.get("anyOf", [about])[0] for name, about in schema["properties"].items()}
            own["images"] = {"type": "array", "minItems": 1, "maxItems": self.settings.max_images, "items": file}
            if self.groups is not None:
                own["groups"] = {**own["groups"], "items": {"type": "string", "maxLength": LONGEST}}
            form = {key: schema[key] for key in ("type", "required", "additionalProperties")} | {"properties": own}
            content["multipart/form-data"] = {"schema": form, "encoding": {"images": {"contentType": kinds}}}
        return content


def _number(form: FormData, name: str) -> float | None:
    values: Any = form.getlist(name)
    try:
        return float(*values) if values else None
    except (TypeError, ValueError):
        raise invalid(f"expected one number in the form field {name}") from None


def takes_files(shape: tuple[int, ...]) -> bool:
    """Whether an image file can have this shape: channels first, 1, 3 or 4 of them."""
    return len(shape) == 3 and shape[0] in _MODES


def decode(
    content: bytes,
    shape: tuple[int, ...],
    name: str,
    resize: str = "refuse",
    max_pixels: int = 2**24,
    work: int = 2**28,
) -> Float[np.ndarray, "c h w"]:
    """Decode one file to float32 ``[c, h, w]``, or raise a 422 that says what is wrong with it, or that it is too much work.

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
    with opened(content, name, work) as image:
        if image.size != size:
            odd = f"{name}: expected an image {width} wide and {height} high, got {image.size[0]} x {image.size[1]}"
            if resize == "refuse":
                raise invalid(f"{odd}; resize it as the calibration images were (resizing changes what epsilon means)")
            if image.size[0] * image.size[1] > max_pixels:
                raise invalid(f"{odd}; at most {max_pixels} pixels are resized")
        mode, clear = _MODES[channels].get(image.mode), "transparency" in image.info
        if mode is None or (channels != 4 and clear):
            odd = f"{name}: expected {_COLOURS[channels]} with 8 bits per channel, got mode {image.mode}"
            raise invalid(f"{odd}{' with transparency' if clear else ''}; convert it as the calibration images were")
        image.load()
        plain = image.convert(mode)
        if plain.size != size:
            plain = ImageOps.fit(plain, size, bilinear) if resize == "crop" else plain.resize(size, bilinear)
        return values(plain, shape)
