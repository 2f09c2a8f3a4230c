"""What an operator may set: one list, from which the command line's options, environment variables and the schema are made.

Nothing here touches the noise: no setting, and no request, carries a seed.
"""

# ruff: noqa: RUF009, every default is a field

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_type_hints

from keepcover.errors import InputError

KIB, MIB = 2**10, 2**20
RESIZE = ("refuse", "stretch", "crop")


def _about(help: str, kind: Any = None, least: int | None = None, told: bool = False, **options: Any) -> Any:
    """A field that describes itself.

    Args:
        help: what it means.
        kind: its type on the command line, where that is another than the field's.
        least: its lower bound; a float without one is a time above 0.
        told: whether clients may know it.
        options: of the field.
    """
    return field(metadata={"help": help, "kind": kind, "least": least, "told": told}, **options)


@dataclass(frozen=True)
class Settings:
    """Limits and policies of one service process; :func:`offered` explains each.

    Example:
        >>> Settings(max_images=4, shape="3x32x32").shape
        (3, 32, 32)
        >>> Settings(max_images=0)
        Traceback (most recent call last):
        keepcover.errors.InputError: expected max_images of at least 1, got 0
    """

    shape: Any = _about("Image shape like 3x32x32, for files that do not say it.", str, default=None)
    max_images: int = _about("Images in one request.", least=1, told=True, default=32)
    max_batch: int = _about("Images in one call of the model, over several requests.", least=1, told=True, default=64)
    batch_wait: float = _about("Seconds that a lone request waits for company.", least=0, default=0.002)
    max_queue: int = _about("Images that may wait; beyond it 503 with Retry-After.", least=1, told=True, default=256)
    max_body: int = _about("Bytes of one request body.", least=1, told=True, default=8 * MIB)
    max_bodies: int = _about("Bytes of all request bodies held at one time.", least=1, default=256 * MIB)
    body_timeout: float = _about("Seconds that a client may take to send its body.", told=True, default=20.0)
    answer_timeout: float = _about("Seconds from the arrival of the body to the answer.", told=True, default=30.0)
    shutdown_timeout: float = _about("Seconds to answer what was accepted, after SIGTERM.", default=30.0)
    resize: str = _about("What happens to image files of another size.", Literal[RESIZE], told=True, default="refuse")
    max_pixels: int = _about("Pixels of the largest image file that is resized.", least=1, default=2**24)
    token: str | None = _about("Bearer token that clients must send.", repr=False, default=None)
    repeat_limit: int | None = _about("Answers to one image per client and window.", least=1, told=True, default=None)
    repeat_window: float = _about("Seconds of that window.", told=True, default=60.0)
    repeat_entries: int = _about("Images that the repeat limit remembers.", least=1, default=100_000)

    def __post_init__(self) -> None:
        for one in fields(self):
            value, least = getattr(self, one.name), one.metadata["least"]
            if least is not None and value is not None and not least <= value < float("inf"):
                raise InputError(f"expected {one.name} of at least {least}, got {value}")
            if least is None and one.type == "float" and not (value and 0 < value < float("inf")):
                raise InputError(f"expected {one.name} in seconds, above 0, got {value}")
        if self.batch_wait > 1:
            raise InputError(f"expected batch_wait between 0 and 1 second, got {self.batch_wait}")
        if self.max_images > self.max_queue:
            raise InputError(
                f"a request of {self.max_images} images never fits a queue of {self.max_queue}; raise max_queue"
            )
        if self.max_body > self.max_bodies:
            raise InputError(f"max_body {self.max_body} exceeds max_bodies {self.max_bodies}, the bound of them all")
        if self.resize not in RESIZE:
            raise InputError(f"expected resize among {', '.join(RESIZE)}, got {self.resize!r}")
        if self.token is not None and not re.fullmatch(r"[!-~]{16,}", self.token):
            found = f"{len(self.token)} characters" if self.token else "an empty one"
            raise InputError(
                f"expected a token of at least 16 ASCII characters without spaces, got {found}: openssl rand -hex 32"
            )
        object.__setattr__(self, "shape", _shape(self.shape))

    def limits(self) -> dict[str, Any]:
        """What clients are told."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.metadata["told"]}


def offered() -> dict[str, tuple[Any, Any, str]]:
    """Type, default and help of every setting that a command line may offer, by its name.

    Example:
        >>> offered()["max_images"]
        (<class 'int'>, 32, 'Images in one request.')
    """
    types = get_type_hints(Settings)
    settings = [one for one in fields(Settings) if one.repr]  # a secret is no option: other users could read it
    return {one.name: (one.metadata["kind"] or types[one.name], one.default, one.metadata["help"]) for one in settings}


def _shape(given: Any) -> tuple[int, ...] | None:
    if given is None:
        return None
    if isinstance(given, str):
        if not re.fullmatch(r"\d{1,9}(x\d{1,9})*", given):
            raise InputError(f"expected a shape like 3x32x32, got {given!r}")
        given = [int(part) for part in given.split("x")]
    sizes = tuple(int(size) for size in given)
    if not sizes or min(sizes) < 1:
        raise InputError(f"expected an image shape of positive sizes like (3, 32, 32), got {sizes}")
    return sizes
