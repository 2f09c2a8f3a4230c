"""One predict request -> a tensor of checked images and a level, or a refusal. Nothing is queued before this."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from torch import Tensor

from keepcover.errors import InputError
from keepcover.prediction.predictor import Level, Predictor
from keepcover.serve.images import decode, takes_files
from keepcover.serve.limits import ReadingPool
from keepcover.serve.schemas import SEED, check_structure, explain, request_model
from keepcover.web.bodies import form_of, media_type
from keepcover.web.images import FORMATS, PASSES
from keepcover.web.problems import Problem, invalid
from keepcover.web.settings import KIB, Settings


@dataclass(frozen=True)
class Query:
    """Images [n, ...] in [0, 1] and the (alpha, epsilon) to answer for."""

    images: Tensor
    level: Level


class Reader:
    """Reads requests for one predictor: bodies as they arrive, what they say on threads of its own."""

    def __init__(self, predictor: Predictor, shape: tuple[int, ...], settings: Settings) -> None:
        self.predictor, self.shape, self.settings = predictor, shape, settings
        alphas, epsilons = (list(dict.fromkeys(values)) for values in zip(*predictor.levels, strict=True))
        self.promises = {level: predictor.at(*level).guarantee for level in predictor.levels}
        self.model = request_model(shape, settings.max_images, alphas, epsilons)
        self.pool = ReadingPool(settings.max_queue)

    async def receive(self, request: Request) -> Callable[[], Query]:
        """Wait for the whole body; what is returned understands it, at a cost, and is for :attr:`pool`."""
        if request.query_params:
            raise invalid(f"expected no query parameters, got {', '.join(sorted(request.query_params))[:80]}; {SEED}")
        kind = media_type(request)
        if kind == "application/json":
            return partial(self._json, await request.body())
        if kind == "multipart/form-data" and takes_files(self.shape):
            async with form_of(request, self.settings.max_images, max_part_size=KIB) as form:
                level = self._level(*(_number(form, name) for name in ("alpha", "epsilon")))
                return partial(self._decode, await self._files(form), level)
        files = " or multipart/form-data with image files" if takes_files(self.shape) else ""
        raise Problem(
            "unsupported_media_type", f"expected content type application/json{files}, got {kind[:80] or 'none'}"
        )

    def _level(self, alpha: float | None, epsilon: float | None) -> Level:
        try:
            return next(iter(self.predictor.at(alpha, epsilon).levels))
        except InputError as error:
            raise invalid(str(error)) from None

    def _json(self, body: bytes) -> Query:
        check_structure(body, self.shape, self.settings.max_images)
        try:
            parsed: Any = self.model.model_validate_json(body)
        except ValidationError as error:
            raise explain(error.errors(include_url=False)[0], self.shape, self.settings.max_images) from None
        level = self._level(parsed.alpha, parsed.epsilon)
        return Query(torch.from_numpy(np.array(parsed.images, dtype=np.float64)), level)

    async def _files(self, form: FormData) -> list[tuple[str, bytes]]:
        files: list[tuple[str, bytes]] = []
        for name, value in form.multi_items():
            if name == "images" and isinstance(value, UploadFile):
                files.append((f"images[{len(files)}]", await value.read()))
            elif name == "images":
                raise invalid("expected files in the form field images: every part needs a filename")
            elif name not in ("alpha", "epsilon"):
                hint = SEED if name == "seed" else "the fields are images (files), alpha and epsilon"
                raise invalid(f"unexpected form field {name[:40]!r}; {hint}")
        if not files:
            raise invalid(f"expected at least one file in the form field images ({', '.join(FORMATS)})")
        return files

    def _decode(self, files: list[tuple[str, bytes]], level: Level) -> Query:
        channels, height, width = self.shape
        settings = self.settings
        # The files of one request share its work; one of exactly the model's size may always have its passes.
        work = PASSES * max(settings.max_pixels // len(files), height * width)
        arrays = [
            decode(content, (channels, height, width), name, settings.resize, settings.max_pixels, work)
            for name, content in files
        ]
        return Query(torch.from_numpy(np.stack(arrays)), level)

    def openapi(self) -> dict[str, Any]:
        """The request body, for OpenAPI."""
        schema = self.model.model_json_schema()
        content: dict[str, Any] = {"application/json": {"schema": schema}}
        if takes_files(self.shape):
            fields = {name: schema["properties"][name] for name in ("alpha", "epsilon")}
            kinds = ", ".join(f"image/{name.lower()}" for name in FORMATS)
            images = {
                "type": "array",
                "minItems": 1,
                "maxItems": self.settings.max_images,
                "items": {"type": "string", "format": "binary", "contentMediaType": kinds},
            }
            number = {name: {"type": "number", "enum": field["anyOf"][0]["enum"]} for name, field in fields.items()}
            form = {
                "type": "object",
                "properties": {"images": images, **number},
                "required": ["images"],
                "additionalProperties": False,
            }
            content["multipart/form-data"] = {"schema": form, "encoding": {"images": {"contentType": kinds}}}
        return {"required": True, "content": content}


def _number(form: FormData, name: str) -> float | None:
    values = form.getlist(name)
    if not values:
        return None
    try:
        (value,) = values
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise invalid(f"expected one number in the form field {name}") from None
