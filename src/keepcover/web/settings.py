"""What an operator may set: one list, from which the command line's options, environment variables and the schema are made.

Nothing here touches the noise: no setting, and no request, carries a seed.
"""

# ruff: noqa: RUF009, every default is a field

from __future__ import annotations

import math
import re
import secrets
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from keepcover.errors import InputError

KIB, MIB = 2**10, 2**20
RESIZE = ("refuse", "stretch", "crop")
UNKNOWN = ("error", "widest")


def _about(default: Any, help: str, *, kind: Any = None, told: bool = False, **options: Any) -> Any:
    """A field that describes itself: ``kind`` is its type on the command line, and clients are told it where ``told``."""
    return field(default=default, metadata={"help": help, "kind": kind, "told": told}, **options)


def _check(fine: Any, otherwise: str) -> None:
    if not fine:
        raise InputError(otherwise)


@dataclass(frozen=True)
class Settings:
    """Limits and policies of one service process.

    Example:
        >>> Settings(max_images=4, shape="3x32x32").shape
        (3, 32, 32)
        >>> Settings(max_images=0)
        Traceback (most recent call last):
        keepcover.errors.InputError: expected max_images of at least 1, got 0
    """

    shape: Any = _about(None, "Image shape like 3x32x32, for files that do not say it.", kind=str | None)
    max_images: int = _about(32, "Images in one request.", told=True)
    max_batch: int = _about(64, "Images in one call of the model, over several requests.", told=True)
    batch_wait: float = _about(0.002, "Seconds that a lone request waits for company.")
    max_queue: int = _about(256, "Images that may wait; beyond it 503 with Retry-After.", told=True)
    max_body: int = _about(8 * MIB, "Bytes of one request body.", told=True)
    max_bodies: int = _about(256 * MIB, "Bytes of all request bodies held at one time.")
    body_timeout: float = _about(20.0, "Seconds that a client may take to send its body.", told=True)
    answer_timeout: float = _about(30.0, "Seconds from the arrival of the body to the answer.", told=True)
    shutdown_timeout: float = _about(30.0, "Seconds to answer what was accepted, after SIGTERM.")
    resize: str = _about("refuse", "What happens to image files of another size.", kind=Literal[RESIZE], told=True)
    unknown: str = _about(
        "error",
        "What an image of a group that calibration never saw gets: an error, or the widest sets, without a promise.",
        kind=Literal[UNKNOWN],
        told=True,
    )
    max_pixels: int = _about(2**24, "Pixels of the largest image file that is resized.")
    token: str | None = _about(None, "Bearer token that clients must send.", repr=False)
    repeat_limit: int | None = _about(None, "Answers to one image per client and window.", told=True)
    repeat_window: float = _about(60.0, "Seconds of that window.", told=True)
    repeat_entries: int = _about(100_000, "Images that the repeat limit remembers.")
    monitor: bool = _about(True, "Watch the promise: answers carry tickets, outcomes are taken.")
    monitor_file: str | None = _about(
        None, "SQLite file in which the monitor keeps its state; lost at the end by default."
    )
    false_alarm: float = _about(0.01, "Probability of a false alarm of either kind, per level, ever.")
    ticket_lifetime: float = _about(30 * 86_400.0, "Seconds for which outcomes of an answer are taken.", told=True)
    ticket_key: str | None = _about(None, "Secret that seals tickets; drawn by default.", repr=False, compare=False)

    def __post_init__(self) -> None:
        from keepcover.specs import read_shape

        object.__setattr__(self, "shape", read_shape(self.shape))
        if self.ticket_key is None:  # one for all workers and replicas, who get these settings as they are
            object.__setattr__(self, "ticket_key", secrets.token_hex(32))
        for one in fields(self):
            value: Any = getattr(self, one.name)
            if "int" in str(one.type):
                _check(value is None or 1 <= value < math.inf, f"expected {one.name} of at least 1, got {value}")
            elif one.type == "float" and one.name not in ("batch_wait", "false_alarm"):
                _check(
                    value is not None and 0 < value < math.inf, f"expected {one.name} in seconds, above 0, got {value}"
                )
        rate, pause = self.false_alarm, self.batch_wait
        _check(0 < rate < 1, f"expected false_alarm strictly between 0 and 1, got {rate}")
        _check(0 <= pause <= 1, f"expected batch_wait between 0 and 1 second, got {pause}")
        crowd = f"a request of {self.max_images} images never fits a queue of {self.max_queue}; raise max_queue"
        _check(self.max_images <= self.max_queue, crowd)
        bodies = f"max_body {self.max_body} exceeds max_bodies {self.max_bodies}, the bound of them all"
        _check(self.max_body <= self.max_bodies, bodies)
        for name, listed in (("resize", RESIZE), ("unknown", UNKNOWN)):
            value = getattr(self, name)
            _check(value in listed, f"expected {name} among {', '.join(listed)}, got {value!r}")
        for name in ("token", "ticket_key"):
            secret = getattr(self, name)
            expected = f"expected a {name} of at least 16 ASCII characters without spaces"
            found = f"{len(secret)} characters" if secret else "an empty one"
            _check(
                secret is None or re.fullmatch(r"[!-~]{16,}", secret), f"{expected}, got {found}: openssl rand -hex 32"
            )

    def limits(self) -> dict[str, Any]:
        """What clients are told."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.metadata["told"]}
