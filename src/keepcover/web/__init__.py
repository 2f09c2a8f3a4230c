"""What the HTTP service and the explorer share: refusals, bodies, image files, the server; and the service's settings."""

from __future__ import annotations

from importlib.util import find_spec

from keepcover.errors import InputError, install


def require(what: str, extra: str, *more: str) -> None:
    """Refuse to go on where a library of the extra is missing, and name it.

    Example:
        >>> require("The service", "serve", "no_such_library")
        Traceback (most recent call last):
        keepcover.errors.InputError: The service needs no_such_library: ...
    """
    for module in (*more, "fastapi", "uvicorn", "python_multipart", "PIL"):
        if find_spec(module) is None:
            raise InputError(f"{what} needs {module}: {install(extra)}")
