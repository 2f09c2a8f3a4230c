"""What goes over the wire: the JSON request for one predictor, the answers, and how a bad request is explained."""

from __future__ import annotations

import math
import re
import reprlib
from typing import Annotated, Any, get_type_hints

from pydantic import BaseModel, ConfigDict, FailFast, Field, WithJsonSchema, create_model
from pydantic_core import ErrorDetails

from keepcover.web.problems import STATUS, Problem, invalid
from keepcover.web.settings import Settings, offered

PER_QUERY = (
    "The promise holds for each query separately, over the randomness of calibration, query and noise. It is not a promise "
    "per class, not for several alpha or epsilon at once or one picked after seeing sets, and not for the best of many "
    "repeated queries about one image: every answer draws fresh noise, so a client that asks often enough sees a set miss."
)
SEED = "noise is drawn fresh from the operating system for every answer and cannot be set"


FIELDS = ("images", "alpha", "epsilon")
_NAME = re.compile(rb'"([^"\\]*+)"\s*+:')


class Set(BaseModel):
    """A prediction set for one image."""

    labels: list[str] = Field(description="Class names, or indices as text where the predictor has no names.")
    indices: list[int] = Field(description="Class indices, ascending.")
    size: int = Field(description="How many labels.")
    trivial: bool = Field(description="Whether it holds every label: true, but it says nothing.")


class Answer(BaseModel):
    """One prediction set per image, in order, and the promise they carry."""

    request_id: str
    guarantee: str = Field(description="The promise each of these sets carries, on its own.")
    alpha: float
    epsilon: float
    certified: bool
    sets: list[Set]


_told: dict[str, Any] = {
    name: (get_type_hints(Settings)[name], Field(description=offered()[name][2])) for name in Settings().limits()
}
Limits = create_model("Limits", __doc__="What one client may ask.", **_told)


class Description(BaseModel):
    """The predictor behind this service."""

    version: str = Field(description="Version of keepcover.")
    guarantees: list[dict[str, Any]] = Field(description="One per (alpha, epsilon) served; the first is the default.")
    per_query: str
    classes: int
    class_names: list[str] | None
    image_shape: list[int] = Field(description="Channels first.")
    pixel_range: tuple[float, float]
    image_files: list[str] = Field(description="Formats that multipart requests may carry.")
    draws: int = Field(description="Model evaluations per image.")
    model_fingerprint: str | None
    limits: Limits  # pyright: ignore[reportInvalidTypeForm]


class State(BaseModel):
    """Health."""

    status: str
    detail: str | None = None


class ErrorBody(BaseModel):
    code: str = Field(json_schema_extra={"enum": list(STATUS)})
    message: str


class Refusal(BaseModel):
    """Why there is no answer."""

    error: ErrorBody
    request_id: str


def request_model(
    shape: tuple[int, ...], max_images: int, alphas: list[float], epsilons: list[float]
) -> type[BaseModel]:
    """The JSON request for images of one shape: nested lists of exactly that shape, finite numbers in [0, 1].

    Example:
        >>> model = request_model((1, 1, 2), 4, [0.1], [0.5])
        >>> model.model_validate_json('{"images": [[[[0, 0.5]]]]}').images
        [[[[0.0, 0.5]]]]
    """
    image: Any = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
    for size in reversed(shape):
        image = Annotated[list[image], Field(min_length=size, max_length=size), FailFast()]

    def level(values: list[float]) -> Any:
        schema = {"anyOf": [{"type": "number", "enum": values}, {"type": "null"}], "default": None}
        return Annotated[float | None, Field(strict=True), WithJsonSchema(schema)]

    images: Any = Annotated[list[image], Field(min_length=1, max_length=max_images), FailFast()]
    return create_model(
        "PredictRequest",
        __config__=ConfigDict(extra="forbid", json_schema_extra={"description": "Images as nested lists of numbers."}),
        images=(images, ...),
        alpha=(level(alphas), None),
        epsilon=(level(epsilons), None),
    )


def check_structure(body: bytes, shape: tuple[int, ...], max_images: int) -> None:
    """Refuse what no request can hold, in one pass over the bytes, before the parser builds it.

    The first unknown or repeated name ends it. Twice the lists and numbers of a full request are let through, so that a
    request a little too large is still told what exactly is wrong with it.

    Example:
        >>> check_structure(b'{"images": [[[[0, 0.5]]]]}', (1, 1, 2), 4)
        >>> check_structure(b'{"images": [[[[0, 0.5]]]], "draws": 9}', (1, 1, 2), 4)
        Traceback (most recent call last):
        keepcover.web.problems.Problem: unknown field 'draws'; the fields are images, alpha and epsilon
    """
    seen: set[str] = set()
    for found in _NAME.finditer(body):
        name = found[1][:200].decode("utf-8", "replace")
        if name not in FIELDS:
            raise unknown(name)
        if name in seen:
            raise invalid(f"expected the field {name} once, got it again")
        seen.add(name)
    lists = 1 + max_images * sum(math.prod(shape[:depth]) for depth in range(len(shape)))
    full = {"commas": max_images * math.prod(shape) + 2, "lists": lists, "objects": 1, "quotation marks": 6}
    for (what, most), mark in zip(full.items(), (b",", b"[", b"{", b'"'), strict=True):
        if (count := body.count(mark)) > 2 * most + 10:
            raise invalid(
                f"expected 1 to {max_images} images of shape {' x '.join(map(str, shape))}, which take {most} {what} at most, "
                f"got {count}"
            )


def unknown(name: str) -> Problem:
    """The refusal of a field that is not there; of a long name only its beginning."""
    hint = SEED if name == "seed" else "the fields are images, alpha and epsilon"
    return invalid(f"unknown field {reprlib.repr(name)}; {hint}")


def explain(error: ErrorDetails, shape: tuple[int, ...], max_images: int) -> Problem:
    """One validation error as a refusal that says where, what was expected, what was found, and what to do."""
    kind, path = error["type"], error["loc"]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".") or "the body"
    found = reprlib.repr(error["input"])[:60]
    sizes = " x ".join(map(str, shape))
    context = error.get("ctx", {})
    if kind == "json_invalid":
        return Problem("bad_request", f"expected JSON: {context.get('error', 'it cannot be parsed')}")
    if kind == "extra_forbidden":
        return unknown(str(path[-1]))
    if kind == "missing":
        return invalid(f"expected the field {where}: a list of images of shape {sizes}, channels first")
    if kind in ("too_short", "too_long"):
        actual = context.get("actual_length")
        actual = len(error["input"]) if actual is None else actual  # pydantic stops counting at the first too many
        if len(path) == 1:
            return invalid(f"expected 1 to {max_images} images in one request, got {actual}")
        return invalid(
            f"expected images of shape {sizes}, channels first: {where} has {actual} entries, not {shape[len(path) - 2]}"
        )
    if kind == "list_type":
        return invalid(f"expected images of shape {sizes}, channels first: {where} is {found}, not a list")
    if kind in ("less_than_equal", "greater_than_equal"):
        hint = "; divide 0-255 by 255" if isinstance(error["input"], int | float) and error["input"] > 1 else ""
        return invalid(f"expected pixels in [0, 1], got {found} at {where}{hint}")
    if kind in ("finite_number", "float_type"):
        return invalid(f"expected a finite number at {where}, got {found}")
    return invalid(f"{where}: {error['msg']}")
