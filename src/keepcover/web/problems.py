"""Refusals: a status, a code for programs and a sentence for readers; never a stack trace."""

from __future__ import annotations

import math
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

STATUS = {
    "bad_request": 400,
    "unauthorized": 401,
    "not_found": 404,
    "method_not_allowed": 405,
    "slow_body": 408,
    "counted": 409,
    "body_too_large": 413,
    "unsupported_media_type": 415,
    "invalid": 422,
    "repeated": 429,
    "headers_too_large": 431,
    "internal": 500,
    "overloaded": 503,
    "timeout": 503,
    "stopping": 503,
}


class Problem(Exception):  # noqa: N818, it is the client's
    """A request that is not answered.

    Example:
        >>> problem = Problem("overloaded", "256 images are waiting", retry_after=0.2)
        >>> problem.status, problem.headers
        (503, {'retry-after': '1'})
    """

    def __init__(self, code: str, message: str, retry_after: float | None = None, headers: Any = None) -> None:
        super().__init__(message)
        self.code, self.message, self.status = code, message, STATUS[code]
        self.headers: dict[str, str] = dict(headers or {})
        if retry_after is not None:
            self.headers["retry-after"] = str(max(1, math.ceil(retry_after)))

    @classmethod
    def of(cls, error: Exception) -> Problem:
        """A problem as it is; a refusal of the web framework's, such as an unknown route; any other as invalid input."""
        if isinstance(error, Problem):
            return error
        if not isinstance(error, HTTPException):
            return invalid(str(error))
        code = next((code for code, status in STATUS.items() if status == error.status_code), "bad_request")
        return cls(code, str(error.detail), headers=error.headers)

    def response(self, **more: Any) -> JSONResponse:
        """The refusal as it is sent."""
        error = {"code": self.code, "message": self.message}
        return JSONResponse({"error": error, **more}, self.status, self.headers)


def invalid(message: str) -> Problem:
    """422: understood, but not something that can be answered."""
    return Problem("invalid", message)
