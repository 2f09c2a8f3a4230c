"""Requests: limits on bytes and seconds while their bodies arrive, JSON and forms; and refusals.

A refusal is a status, a code for programs and a sentence for readers; never a stack trace.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from pydantic import BaseModel, ValidationError
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from keepcover.web.settings import Settings

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


class BodyLimit:
    """ASGI middleware: counts bytes as they arrive, of one body and of all of them, and watches the clock.

    Refusals are raised where the application reads the body, so they are answered like any other.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app, self.settings = app, settings
        self.held = 0  # bytes of every request that is not answered yet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        most, seconds = self.settings.max_body, self.settings.body_timeout
        size, complete, deadline = 0, False, 0.0
        too_large = f"the body exceeds {most} bytes; send fewer images per request"
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
        expected = int(declared) if declared.isdigit() and len(declared) < 19 else 0

        async def counted() -> Message:
            nonlocal size, complete, deadline
            if complete:  # what is left to hear is that the client hung up
                return await receive()
            if expected > most:
                raise Problem("body_too_large", too_large)
            deadline = deadline or asyncio.get_running_loop().time() + seconds
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise Problem("slow_body", f"the body did not arrive within {seconds:g} s") from None
            arrived = len(message.get("body", b""))
            size, self.held, complete = size + arrived, self.held + arrived, not message.get("more_body", False)
            if size > most:
                raise Problem("body_too_large", too_large)
            if self.held > self.settings.max_bodies:
                raise Problem("overloaded", "too many bytes are being received; try again later", retry_after=1.0)
            return message

        try:
            await self.app(scope, counted, send)
        finally:
            self.held -= size


def media_type(request: Request) -> str:
    """What the client says the body is, without parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def json_of(request: Request, model: type[BaseModel], most: int) -> Any:
    """The JSON body of a request as a value of the model, of at most so many bytes, or a refusal that says what is wrong with it."""
    if media_type(request) != "application/json":
        raise Problem("unsupported_media_type", "expected content type application/json")
    body = await request.body()
    if len(body) > most:
        raise Problem("body_too_large", f"expected a body of at most {most} bytes, got {len(body)}")
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "json_invalid":
            raise Problem("bad_request", "expected a JSON object") from None
        raise invalid(f"{'.'.join(map(str, first['loc']))[:80] or 'the body'}: {first['msg']}") from None


@asynccontextmanager
async def form_of(request: Request, max_files: int, max_part_size: int, max_fields: int = 2) -> AsyncIterator[FormData]:
    """The multipart form of a request, or a refusal (400) where its parser raises."""
    try:
        form = await request.form(max_files=max_files, max_fields=max_fields, max_part_size=max_part_size)
    except HTTPException as error:  # Starlette's parser
        raise Problem("bad_request", f"expected multipart/form-data: {error.detail}") from None
    except ValueError:  # charsets that are codecs but not for text, like punycode
        raise Problem("bad_request", "expected multipart/form-data in UTF-8; name no other charset") from None
    try:
        yield form
    finally:
        await form.close()
