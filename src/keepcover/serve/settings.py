"""What an operator may set. Nothing here touches the noise: no setting, and no request, carries a seed."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from keepcover.errors import InputError

RESIZE = ("refuse", "stretch", "crop")
KIB, MIB = 2**10, 2**20


@dataclass(frozen=True)
class Settings:
    """Limits and policies of one service process.

    Args:
        image_shape: shape of one image, channels first; the predictor's own by default, needed for files that lack it.
        max_images: images in one request.
        max_batch: images in one call of the model, taken from several requests.
        batch_wait: seconds a lone request waits for company.
        max_queue: images that may wait for the model, and requests that may wait to be parsed; beyond it requests are
            answered 503 with Retry-After.
        max_body: bytes of one request body.
        max_bodies: bytes of all request bodies held at one time.
        body_timeout: seconds a client may take to send its body.
        answer_timeout: seconds from the arrival of the body to the answer; then 503.
        shutdown_timeout: seconds to answer what was accepted after SIGTERM.
        resize: image files of another size: ``refuse``, ``stretch`` to the size, or ``crop`` the centre to the shape and
            resize. epsilon is then a distance between resized images.
        max_pixels: largest image file that is decoded, in pixels, where resizing is allowed.
        token: bearer token that clients must send; None leaves the service open.
        repeat_limit: answers to the same image for the same client within ``repeat_window`` seconds; None for no limit.
        repeat_window: see ``repeat_limit``.
        repeat_entries: images the repeat limit remembers; the oldest are forgotten first.

    Example:
        >>> Settings(max_images=4).max_images
        4
        >>> Settings(max_images=0)
        Traceback (most recent call last):
        keepcover.errors.InputError: expected max_images of at least 1, got 0
    """

    image_shape: tuple[int, ...] | None = None
    max_images: int = 32
    max_batch: int = 64
    batch_wait: float = 0.002
    max_queue: int = 256
    max_body: int = 8 * MIB
    max_bodies: int = 256 * MIB
    body_timeout: float = 20.0
    answer_timeout: float = 30.0
    shutdown_timeout: float = 30.0
    resize: str = "refuse"
    max_pixels: int = 2**24
    token: str | None = field(default=None, repr=False)
    repeat_limit: int | None = None
    repeat_window: float = 60.0
    repeat_entries: int = 100_000

    def __post_init__(self) -> None:
        whole = ("max_images", "max_batch", "max_queue", "max_body", "max_bodies", "max_pixels", "repeat_entries")
        for name in (*whole, "repeat_limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"expected {name} of at least 1, got {value}")
        for name in ("body_timeout", "answer_timeout", "shutdown_timeout", "repeat_window"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InputError(f"expected {name} in seconds, above 0, got {getattr(self, name)}")
        if not 0 <= self.batch_wait <= 1:
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
        if self.image_shape is not None and (not self.image_shape or min(self.image_shape) < 1):
            raise InputError(f"expected an image shape of positive sizes like (3, 32, 32), got {self.image_shape}")

    def limits(self) -> dict[str, Any]:
        """What clients are told."""
        names = ("max_images", "max_batch", "max_queue", "max_body", "body_timeout", "answer_timeout")
        return {
            **{name: getattr(self, name) for name in names},
            "resize": self.resize,
            "repeat_limit": self.repeat_limit,
            "repeat_window": self.repeat_window if self.repeat_limit else None,
        }
