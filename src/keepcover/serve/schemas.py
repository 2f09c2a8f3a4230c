"""What goes over the wire: the JSON request for one predictor, the answers, and how a bad request is explained."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Collection, Sequence
from dataclasses import fields
from typing import Annotated, Any, get_type_hints

from pydantic import BaseModel, ConfigDict, FailFast, Field, WithJsonSchema, create_model
from pydantic_core import ErrorDetails

from keepcover.prediction.predictor import Level
from keepcover.web.requests import STATUS, Problem, invalid
from keepcover.web.settings import Settings

PER_QUERY = (
    "The promise holds for each query separately; the guarantee says for whom, and over what it is an average. It does not hold for "
    "several alpha or epsilon at once or one picked after seeing sets, and not for the best of many repeated queries about one "
    "image: every answer draws fresh noise, so a client that asks often enough sees a set miss."
)
SEED = "noise is drawn fresh from the operating system for every answer and cannot be set"


FIELDS = ("images", "alpha", "epsilon")
GROUPED = (*FIELDS, "groups")  # of a predictor whose promise is per group
LONGEST = 200  # characters of a group's name
_NAME = re.compile(rb'"([^"\\]*+)"\s*+:')


class Set(BaseModel):
    """A prediction set for one image."""

    labels: list[str] = Field(description="Class names, or indices as text where the predictor has no names.")
    indices: list[int] = Field(description="Class indices, ascending.")
    size: int = Field(description="How many labels.")
    trivial: bool = Field(description="Whether it holds every label: true, but it says nothing.")


class Intervals(BaseModel):
    """A union of intervals for one input."""

    intervals: list[Any] = Field(
        description="[lower, upper] of every piece, null at infinity; one list per target where there are several."
    )
    size: float | None = Field(description="Length, the mean over targets; null where it is infinite.")
    trivial: bool = Field(description="Whether it has no end: true, but it says nothing.")


class Runs(BaseModel):
    """A mask of one class."""

    label: str
    index: int
    runs: list[int] = Field(description="Lengths of runs of pixels, row by row, the first of them outside the mask.")


class Scene(BaseModel):
    """Labels of the pixels of one image."""

    height: int
    width: int
    certain: float = Field(description="Share of pixels where one label alone is kept.")
    possible: float = Field(description="Share of pixels where a label is kept beside others.")
    excluded: float = Field(description="Share of pixels where no label, or none of those in masks, is kept.")
    masks: list[Runs] = Field(description="Where each class is kept; classes kept nowhere are left out.")
    size: float = Field(description="Labels kept per pixel.")
    trivial: bool = Field(description="Whether every label is kept at every pixel: true, but it says nothing.")


class Parameter(BaseModel):
    """What a loss of the operator's own is controlled at."""

    parameter: float
    size: float
    trivial: bool


class Answer(BaseModel):
    """One prediction set per image, in order, and the promise they carry."""

    request_id: str
    guarantee: str = Field(description="The promise each of these sets carries, on its own.")
    alpha: float
    epsilon: float
    certified: bool
    sets: list[Set]
    ticket: str | None = Field(description="Send it to /v1/outcomes with the true labels, once they are known.")


# How the sets of every task are sent; of others, as they give their rows.
SETS = {"classification": Set, "multilabel": Set, "regression": Intervals, "segmentation": Scene, "loss": Parameter}


def answer_model(task: str) -> type[BaseModel]:
    """The answer of a service for one task.

    Example:
        >>> answer_model("regression").model_fields["sets"].annotation
        list[keepcover.serve.schemas.Intervals]
    """
    kind: Any = SETS.get(task, dict[str, Any])
    return create_model("Answer", __base__=Answer, __doc__=Answer.__doc__, sets=(list[kind], ...))  # pyright: ignore[reportInvalidTypeForm]


_Label = Annotated[int, Field(strict=True)] | str


class Outcomes(BaseModel):
    """The truth about the sets of one answer."""

    model_config = ConfigDict(extra="forbid")

    ticket: Annotated[str, Field(strict=True)]
    # One bad label is enough: every one of a long list would be explained, at a thousand times its bytes.
    labels: list[_Label | Annotated[list[_Label], Field(fail_fast=True)] | None] = Field(
        fail_fast=True,
        description="One per set, in order: a class name, its index, -1 for a class that the model does not have, a list of names or "
        "indices where several may be true, or null where the truth stays unknown.",
    )


class Counted(BaseModel):
    """What was counted of them."""

    counted: int
    missed: float = Field(
        description="Sets that miss the truth; where several labels may be true, the sum of the shares missed."
    )


_told: dict[str, Any] = {
    one.name: (get_type_hints(Settings)[one.name], Field(description=one.metadata["help"]))
    for one in fields(Settings)
    if one.metadata["told"]
}
Limits = create_model("Limits", __doc__="What one client may ask.", **_told)


class Description(BaseModel):
    """The predictor behind this service."""

    version: str = Field(description="Version of keepcover.")
    guarantees: list[dict[str, Any]] = Field(description="One per (alpha, epsilon) served; the first is the default.")
    per_query: str
    warning: str | None = Field(description="Why these sets may be of little use: what noise does to the model.")
    classes: int | None
    class_names: list[str] | None
    groups: list[str | int] | None = Field(description="Where the promise is per group: those that it is made to.")
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
    shape: tuple[int, ...], max_images: int, levels: Collection[Level], tokens: Any = None, grouped: bool = False
) -> type[BaseModel]:
    """The JSON request for images of one shape: nested lists of exactly that shape, finite numbers in [0, 1]; or whole numbers
    from the first to the last of the ``tokens`` that were calibrated on. Where the promise is per group, every image has one.

    Example:
        >>> model = request_model((1, 1, 2), 4, [(0.1, 0.5)])
        >>> model.model_validate_json('{"images": [[[[0, 0.5]]]]}').images
        [[[[0.0, 0.5]]]]
    """
    image: Any = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
    if tokens is not None:
        image = Annotated[int, Field(strict=True, ge=tokens[0], le=tokens[1])]
    for size in reversed(shape):
        image = Annotated[list[image], Field(min_length=size, max_length=size), FailFast()]

    def level(values: Sequence[float]) -> Any:
        listed = {"type": "number", "enum": list(dict.fromkeys(values))}
        schema = {"anyOf": [listed, {"type": "null"}], "default": None}
        return Annotated[float | None, Field(strict=True), WithJsonSchema(schema)]

    images: Any = Annotated[list[image], Field(min_length=1, max_length=max_images), FailFast()]
    name = Annotated[str, Field(strict=True, max_length=LONGEST)] | Annotated[int, Field(strict=True)]
    about = Field(max_length=max_images, description="The group of every image, in order.")
    groups: dict[str, Any] = {"groups": (Annotated[list[name], about, FailFast()], ...)} if grouped else {}
    return create_model(
        "PredictRequest",
        __config__=ConfigDict(extra="forbid", json_schema_extra={"description": "Images as nested lists of numbers."}),
        images=(images, ...),
        alpha=(level([alpha for alpha, _ in levels]), None),
        epsilon=(level([epsilon for _, epsilon in levels]), None),
        **groups,
    )


def check_structure(body: bytes, shape: tuple[int, ...], max_images: int, names: Sequence[str] = FIELDS) -> None:
    """Refuse what no request can hold, in one pass over the bytes, before the parser builds it.

    The first unknown or repeated name ends it. Twice the lists and numbers of a full request are let through, so that a
    request a little too large is still told what exactly is wrong with it.

    Example:
        >>> check_structure(b'{"images": [[[[0, 0.5]]]]}', (1, 1, 2), 4)
        >>> check_structure(b'{"images": [[[[0, 0.5]]]], "draws": 9}', (1, 1, 2), 4)
        Traceback (most recent call last):
        keepcover.web.requests.Problem: unknown field 'draws'; the fields are images, alpha and epsilon
    """
    seen: set[str] = set()
    for found in _NAME.finditer(body):
        name = found[1][:200].decode("utf-8", "replace")
        if name not in names:
            raise unknown(name, names)
        if name in seen:
            raise invalid(f"expected the field {name} once, got it again")
        seen.add(name)
    lists = 1 + max_images * sum(math.prod(shape[:depth]) for depth in range(len(shape)))
    groups = max_images if "groups" in names else 0
    for what, mark, most in (
        ("commas", b",", max_images * math.prod(shape) + 2 + groups),
        ("lists", b"[", lists + (groups > 0)),
        ("objects", b"{", 1),
        ("quotation marks", b'"', 2 * (len(names) + groups)),
    ):
        if (count := body.count(mark)) > 2 * most + 10:
            expected = f"expected 1 to {max_images} images of shape {' x '.join(map(str, shape))}"
            raise invalid(f"{expected}, which take {most} {what} at most, got {count}")


def unknown(name: str, names: Sequence[str], what: str = "unknown field") -> Problem:
    """The refusal of a field that is not there; of a long name only its beginning."""
    hint = SEED if name == "seed" else f"the fields are {', '.join(names[:-1])} and {names[-1]}"
    if name == "groups":
        hint = f"the promise is not per group; {hint}"
    return invalid(f"{what} {reprlib.repr(name)}; {hint}")


def explain(error: ErrorDetails, shape: tuple[int, ...], max_images: int, names: Sequence[str] = FIELDS) -> Problem:
    """One validation error as a refusal that says where, what was expected, what was found, and what to do."""
    kind, path, context = error["type"], error["loc"], error.get("ctx", {})
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".") or "the body"
    given, found, sizes = error["input"], reprlib.repr(error["input"])[:60], " x ".join(map(str, shape))
    if kind == "json_invalid":
        return Problem("bad_request", f"expected JSON: {context.get('error', 'it cannot be parsed')}")
    if kind == "extra_forbidden":
        return unknown(str(path[-1]), names)
    if path[:1] == ("groups",):
        each = f"as names of at most {LONGEST} characters or whole numbers"
        return invalid(f"expected the field groups: the group of every image, in order, {each}")
    shaped = f"expected images of shape {sizes}, channels first"
    if kind in ("too_short", "too_long"):
        actual = context.get("actual_length")
        actual = len(given) if actual is None else actual  # pydantic stops counting at the first too many
        if len(path) == 1:
            return invalid(f"expected 1 to {max_images} images in one request, got {actual}")
        return invalid(f"{shaped}: {where} has {actual} entries, not {shape[len(path) - 2]}")
    if kind == "missing":
        return invalid(f"expected the field {where}: a list of images of shape {sizes}, channels first")
    if kind == "list_type":
        return invalid(f"{shaped}: {where} is {found}, not a list")
    if isinstance(bound := context.get("le", context.get("ge")), int):
        most = "most" if "le" in context else "least"
        return invalid(f"expected tokens at {most} {bound}, as calibrated on, got {found} at {where}")
    if kind in ("less_than_equal", "greater_than_equal"):
        hint = "; divide 0-255 by 255" if isinstance(given, int | float) and given > 1 else ""
        return invalid(f"expected pixels in [0, 1], got {found} at {where}{hint}")
    if kind in ("int_type", "int_from_float"):
        return invalid(f"expected a token, a whole number, at {where}, got {found}")
    if kind in ("finite_number", "float_type"):
        return invalid(f"expected a finite number at {where}, got {found}")
    return invalid(f"{where}: {error['msg']}")
