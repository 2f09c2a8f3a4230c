"""The FastAPI application: one page, its files, and the few questions it asks."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from keepcover.errors import InputError
from keepcover.explore.answers import Explorer
from keepcover.explore.images import png
from keepcover.web.bodies import BodyLimit, form_of, media_type
from keepcover.web.problems import Problem, invalid
from keepcover.web.server import bare_app

STATIC = Path(__file__).parent / "static"
MAX_BODY, MAX_BODIES, BODY_TIMEOUT = 2**23, 2**26, 30.0
MAX_QUESTION = 2**12
LOOPBACK = ("127.0.0.1", "localhost", "::1")
HEADERS = {
    # Nothing from elsewhere, and no page elsewhere around it.
    "content-security-policy": "default-src 'self'; img-src 'self' data: blob:; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
log = logging.getLogger("keepcover.explore")


class Question(BaseModel):
    """What the controls say."""

    model_config = ConfigDict(extra="forbid", strict=True)

    alpha: float
    draws: int


class SetsQuestion(Question):
    image: str


class Levels(Question):
    epsilon: float = Field(ge=0, allow_inf_nan=False)


class AttackQuestion(Levels):
    image: str
    label: int | None = None


class FindQuestion(Levels):
    after: int = -1


class Guard:
    """ASGI middleware: sends the headers above, and refuses what another site's page asks, by its origin or its name."""

    def __init__(self, app: ASGIApp, hosts: tuple[str, ...] | None) -> None:
        self.app, self.hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = {name: value.decode("latin-1") for name, value in scope["headers"]}
        origin, host = given.get(b"origin"), given.get(b"host", "")
        elsewhere = origin is not None and _part(origin, "netloc") != host
        # Where browsers send no origin they say whence; a link from elsewhere may lead to the page, and to nothing else.
        site = given.get(b"sec-fetch-site", "none")
        elsewhere |= site not in ("none", "same-origin") and scope["path"] != "/"
        if elsewhere or (self.hosts is not None and _part(f"//{host}", "hostname") not in self.hosts):
            refusal = Problem("bad_request", "requests from pages of other sites are not answered")
            await refusal.response()(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *extra]
            await send(message)

        await self.app(scope, receive, with_headers)


def _part(address: str, name: str) -> str | None:
    try:
        return getattr(urlsplit(address), name)
    except ValueError:  # brackets that do not match
        return None


def create_app(explorer: Explorer, hosts: tuple[str, ...] | None = LOOPBACK) -> FastAPI:
    """The explorer as an ASGI application.

    Args:
        explorer: what is shown.
        hosts: names under which the page may be asked for; None for any.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        explorer.curves.stop()

    app = bare_app("keepcover explorer", lifespan)
    app.add_middleware(BodyLimit, max_body=MAX_BODY, max_bodies=MAX_BODIES, timeout=BODY_TIMEOUT)
    app.add_middleware(Guard, hosts=hosts)
    app.add_exception_handler(Problem, _refuse)
    app.add_exception_handler(InputError, _refuse)
    app.add_exception_handler(HTTPException, _refuse)
    app.add_exception_handler(Exception, _fail)
    _pages(app)
    _questions(app, explorer)
    return app


async def _refuse(_: Request, error: Exception) -> Response:
    return Problem.of(error).response()


async def _fail(_: Request, error: Exception) -> Response:
    return Problem("internal", f"something went wrong here ({type(error).__name__}); the terminal says more").response()


def _pages(app: FastAPI) -> None:
    files = {f"/{path.name}": path for path in STATIC.iterdir() if path.suffix in (".css", ".js", ".svg")}

    @app.get("/")
    async def page() -> Response:
        return FileResponse(STATIC / "index.html", headers={"cache-control": "no-cache"})

    @app.get("/static/{name}")
    async def file(name: str) -> Response:
        path = files.get(f"/{name}")
        if path is None:
            raise Problem("not_found", "no such file")
        kind = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}[path.suffix]
        return FileResponse(path, media_type=kind, headers={"cache-control": "no-cache"})


def _answer(value: Any) -> Response:
    return JSONResponse(value, headers={"cache-control": "no-store"})


async def _question(request: Request, model: type[Question]) -> Any:
    if media_type(request) != "application/json":
        raise Problem("unsupported_media_type", "expected content type application/json")
    asked = await request.body()
    if len(asked) > MAX_QUESTION:
        raise Problem("body_too_large", f"the question exceeds {MAX_QUESTION} bytes")
    try:
        return model.model_validate_json(asked)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "json_invalid":
            raise Problem("bad_request", "expected a JSON object") from None
        raise invalid(f"{'.'.join(map(str, first['loc']))[:80]!r}: {first['msg']}") from None


def _questions(app: FastAPI, explorer: Explorer) -> None:
    @app.get("/api/subject")
    async def subject() -> Response:
        return _answer(await run_in_threadpool(explorer.describe))

    @app.get("/api/images/{name}.png")
    async def image(name: str) -> Response:
        content = png(explorer.images.get(name).pixels[0])
        return Response(content, media_type="image/png", headers={"cache-control": "max-age=300"})

    @app.post("/api/sets")
    async def sets(request: Request) -> Response:
        asked = await _question(request, SetsQuestion)
        return _answer(await run_in_threadpool(explorer.sets, asked.image, *explorer.check(asked.alpha, asked.draws)))

    @app.get("/api/progress")
    async def progress() -> Response:
        return _answer(explorer.lineup.progress)

    @app.post("/api/curves")  # it starts a computation and stops another: no address that a link could hold
    async def curves(request: Request) -> Response:
        asked = await _question(request, Question)
        return _answer(explorer.curves.ask(*explorer.check(asked.alpha, asked.draws)))

    @app.post("/api/uploads")
    async def upload(request: Request) -> Response:
        if media_type(request) != "multipart/form-data":
            raise Problem("unsupported_media_type", "expected multipart/form-data with the image in the field file")
        async with form_of(request, max_files=1, max_part_size=MAX_BODY) as form:
            file, invert = form.get("file"), form.get("invert")
            if not isinstance(file, UploadFile):
                raise invalid("expected an image file in the form field file")
            content = await file.read()
        return _answer(await run_in_threadpool(explorer.upload, content, invert == "yes"))

    @app.post("/api/attack")
    async def attack(request: Request) -> Response:
        asked = await _question(request, AttackQuestion)
        levels = (*explorer.check(asked.alpha, asked.draws), explorer.check_epsilon(asked.epsilon))
        return _answer(await run_in_threadpool(explorer.attack, asked.image, asked.label, *levels))

    @app.post("/api/find")
    async def find(request: Request) -> Response:
        asked = await _question(request, FindQuestion)
        levels = (*explorer.check(asked.alpha, asked.draws), explorer.check_epsilon(asked.epsilon))
        return _answer(await run_in_threadpool(explorer.find, *levels, asked.after))
