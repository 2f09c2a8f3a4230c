"""What keepcover raises and warns: bad input is one exception type, dangerous input one warning type."""

from __future__ import annotations

import contextlib
import importlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any


class InputError(ValueError):
    """Input that cannot carry a guarantee; the message says what was expected, what was found and what to do."""


# What models raise at inputs that do not fit them.
MISFITS = (RuntimeError, ValueError, TypeError, IndexError)


class KeepcoverWarning(UserWarning):
    """Input that is accepted but is known to ruin results (train mode, wrong pixel range, useless accuracy)."""


def warn(message: str) -> None:
    """A :class:`KeepcoverWarning` that points at the line outside the library that led here."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "keepcover":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, KeepcoverWarning, stacklevel=level)


def reason(error: BaseException) -> str:
    """The first line of what an exception says, its type where it says nothing: for messages of one line.

    Example:
        >>> reason(ValueError("no such layer\\n  at line 3")), reason(KeyError()), reason(KeyError("promise"))
        ('no such layer', 'KeyError', "no 'promise'")
    """
    said = str(getattr(error, "strerror", None) or error)  # of the operating system: without number and path
    said = f"no {said}" if isinstance(error, KeyError) and said else said  # which says the key alone
    return (said.strip().splitlines() or [type(error).__name__])[0]


@contextlib.contextmanager
def refusing(what: str, *kinds: type[Exception], advice: str = "") -> Iterator[None]:
    """What goes wrong inside as one line of an :class:`InputError`: ``what``, what the exception says, and the advice.

    Args:
        what: that cannot be done.
        kinds: of exceptions; all of them by default. An :class:`InputError` passes as it is.
        advice: what to do.

    Example:
        >>> with refusing("numbers.json is not JSON", ValueError, advice="write it again"):
        ...     int("one")
        Traceback (most recent call last):
        keepcover.errors.InputError: numbers.json is not JSON (invalid literal for int() with base 10: 'one'); write it again
    """
    caught = kinds or (Exception,)
    try:
        yield
    except InputError:
        raise
    except caught as error:
        raise InputError(f"{what} ({reason(error)})" + (advice and f"; {advice}")) from None


def optional(module: str, what: str, extra: str) -> Any:
    """A module of an optional part of the library, or an error that says ``what`` needs it and how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise InputError(f"{what}: {install(extra)}") from None


def install(extra: str) -> str:
    """How to get an optional part of the library: every message that names one ends with this.

    Example:
        >>> install("serve")
        "pip install '.[serve]' in a checkout"
    """
    return f"pip install '.[{extra}]' in a checkout"
