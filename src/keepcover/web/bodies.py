"""Request bodies: limits on bytes and seconds while they arrive, and forms."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from keepcover.web.problems import Problem


class BodyLimit:
    """ASGI middleware: counts bytes as they arrive, of one body and of all of them, and watches the clock.

    Refusals are raised where the application reads the body, so they are answered like any other.
    """

    def __init__(self, app: ASGIApp, *, max_body: int, max_bodies: int, timeout: float) -> None:
        self.app, self.max_body, self.max_bodies, self.timeout = app, max_body, max_bodies, timeout
        self.held = 0  # bytes of every request that is not answered yet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body = _Body(self, scope, receive)
        try:
            await self.app(scope, body.receive, send)
        finally:
            self.held -= body.size


class _Body:
    """One request's body, as it is read."""

    def __init__(self, limit: BodyLimit, scope: Scope, receive: Receive) -> None:
        self.limit, self._receive, self.size, self.complete = limit, receive, 0, False
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
        self.declared = int(declared) if declared.isdigit() and len(declared) < 19 else 0
        self.deadline: float | None = None

    async def receive(self) -> Message:
        if self.complete:  # what is left to hear is that the client hung up
            return await self._receive()
        self._refuse_beyond(self.declared)
        loop = asyncio.get_running_loop()
        self.deadline = self.deadline or loop.time() + self.limit.timeout
        try:
            async with asyncio.timeout_at(self.deadline):
                message = await self._receive()
        except TimeoutError:
            raise Problem("slow_body", f"the body did not arrive within {self.limit.timeout:g} s") from None
        size = len(message.get("body", b""))
        self.size += size
        self.limit.held += size
        self.complete = not message.get("more_body", False)
        self._refuse_beyond(self.size)
        if self.limit.held > self.limit.max_bodies:
            raise Problem("overloaded", "too many bytes are being received; try again later", retry_after=1.0)
        return message

    def _refuse_beyond(self, size: int) -> None:
        if size > self.limit.max_body:
            raise Problem(
                "body_too_large", f"the body exceeds {self.limit.max_body} bytes; send fewer images per request"
            )


def media_type(request: Request) -> str:
    """What the client says the body is, without parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


@asynccontextmanager
async def form_of(request: Request, max_files: int, max_part_size: int) -> AsyncIterator[FormData]:
    """The multipart form of a request, or a refusal (400) of whatever its parser raises at it."""
    try:
        form = await request.form(max_files=max_files, max_fields=2, max_part_size=max_part_size)
    except HTTPException as error:  # Starlette's parser
        raise Problem("bad_request", f"expected multipart/form-data: {error.detail}") from None
    except ValueError:  # charsets that are codecs but not for text, like punycode
        raise Problem("bad_request", "expected multipart/form-data in UTF-8; name no other charset") from None
    try:
        yield form
    finally:
        await form.close()
