"""The FastAPI application, one page, its files and the few questions it asks; and uvicorn around it."""

from __future__ import annotations

import inspect
import ipaddress
import logging
import threading
import time
import webbrowser
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from pydantic import ConfigDict, create_model
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders, UploadFile
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from keepcover.errors import InputError
from keepcover.explore.answers import Explorer
from keepcover.pages.plots import pixels
from keepcover.web.requests import Problem, form_of, invalid, json_of, media_type
from keepcover.web.server import Server, bare_app, bind
from keepcover.web.settings import Settings

STATIC = Path(__file__).parent / "static"
LIMITS = Settings(max_body=2**23, max_bodies=2**26, body_timeout=30.0)
MAX_QUESTION = 2**12
TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
AGAIN = {"cache-control": "no-cache"}  # kept, and asked for again: another version may have come
LOOPBACK = ("127.0.0.1", "localhost", "::1")
HEADERS = {
    # Nothing from elsewhere, and no page elsewhere around it.
    "content-security-policy": "default-src 'self'; img-src 'self' data: blob:; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
log = logging.getLogger("keepcover.explore")


class Guard:
    """ASGI middleware: sends the headers above, answers refusals, and refuses what another site's page asks, by its origin or
    its name.
    """

    def __init__(self, app: ASGIApp, hosts: tuple[str, ...] | None) -> None:
        self.app, self.hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        given = {name: value.decode("latin-1") for name, value in scope["headers"]}
        origin, host = given.get(b"origin"), given.get(b"host", "")
        try:
            elsewhere = origin is not None and urlsplit(origin).netloc != host
            elsewhere |= self.hosts is not None and urlsplit(f"//{host}").hostname not in self.hosts
        except ValueError:  # brackets that do not match
            elsewhere = True
        # Where browsers send no origin they say whence; a link from elsewhere may lead to the page, and to nothing else.
        site = given.get(b"sec-fetch-site", "none")
        elsewhere |= site not in ("none", "same-origin") and scope["path"] != "/"

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("cache-control", "no-store")  # answers hold the pictures of who asked
            await send(message)

        try:
            if elsewhere:
                raise Problem("bad_request", "requests from pages of other sites are not answered")
            await self.app(scope, receive, with_headers)
        except (Problem, InputError) as error:
            await Problem.of(error).response()(scope, receive, with_headers)


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

    app = bare_app("keepcover explorer", LIMITS, lifespan)
    app.add_middleware(Guard, hosts=hosts)
    app.add_exception_handler(Exception, _fail)
    _routes(app, explorer)
    answers = {"sets": explorer.sets, "curves": explorer.curves.ask, "attack": explorer.attack, "find": explorer.find}
    for name, answer in answers.items():
        _question(app, explorer, name, answer)
    return app


async def _fail(_: Request, error: Exception) -> Response:
    return Problem("internal", f"something went wrong here ({type(error).__name__}); the terminal says more").response()


def _question(app: FastAPI, explorer: Explorer, path: str, answer: Callable[..., dict[str, Any]]) -> None:
    """A POST, because answers may start a computation and stop another: no address that a link could hold. The fields of a
    question are the parameters of what answers it.
    """
    fields: dict[str, Any] = {
        name: (one.annotation, ... if one.default is one.empty else one.default)
        for name, one in inspect.signature(answer, eval_str=True).parameters.items()
    }
    model = create_model("Question", __config__=ConfigDict(extra="forbid", strict=True), **fields)

    @app.post(f"/api/{path}")
    async def question(request: Request) -> Response:
        asked = (await json_of(request, model, MAX_QUESTION)).model_dump()
        explorer.check(asked)
        return JSONResponse(await run_in_threadpool(answer, **asked))


def _routes(app: FastAPI, explorer: Explorer) -> None:
    files = {path.name: path for path in STATIC.iterdir() if path.suffix in TYPES}

    @app.get("/")
    async def page() -> Response:
        return FileResponse(STATIC / "index.html", headers=AGAIN)

    @app.get("/static/{name}")
    async def file(name: str) -> Response:
        if name not in files:
            raise Problem("not_found", "no such file")
        return FileResponse(files[name], media_type=TYPES[files[name].suffix], headers=AGAIN)

    @app.get("/api/subject")
    async def subject() -> Response:
        return JSONResponse(await run_in_threadpool(explorer.describe))

    @app.get("/api/images/{name}.png")
    async def image(name: str) -> Response:
        content = pixels(explorer.images.get(name).pixels[0])
        return Response(content, media_type="image/png", headers={"cache-control": "max-age=300"})

    @app.get("/api/progress")
    async def progress() -> Response:
        return JSONResponse(explorer.lineup.progress)

    @app.post("/api/uploads")
    async def upload(request: Request) -> Response:
        if media_type(request) != "multipart/form-data":
            raise Problem("unsupported_media_type", "expected multipart/form-data with the image in the field file")
        async with form_of(request, max_files=1, max_part_size=LIMITS.max_body) as form:
            file, invert = form.get("file"), form.get("invert")
            if not isinstance(file, UploadFile):
                raise invalid("expected an image file in the form field file")
            content = await file.read()
        return JSONResponse(await run_in_threadpool(explorer.upload, content, invert == "yes"))


# -- the server --------------------------------------------------------------------------------------------------------


def run(explorer: Explorer, *, tell: Callable[[str], None], host: str, port: int, open_page: bool) -> None:
    """Show the page until interrupted. Port 0 takes a free one; ``tell`` is told the address once it answers."""
    with bind(host, port) as listener:
        bound, number = listener.getsockname()[:2]
        local = ipaddress.ip_address(bound).is_loopback
        name = f"[{bound}]" if ":" in bound else bound
        if not local:
            log.warning("open to the network on %s: every machine that reaches this port can use the model", name)
        address = f"http://{'127.0.0.1' if bound == '0.0.0.0' else name}:{number}/"
        app = create_app(explorer, LOOPBACK if local else None)

        def announce() -> None:
            tell(address)
            if open_page:
                threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()

        server = Server(app, announce, log_level="warning")
        if explorer.subject.cheap:
            threading.Thread(target=_warm, args=(explorer, server), daemon=True).start()
        server.run(sockets=[listener])


def _warm(explorer: Explorer, server: Server) -> None:
    """Calibrate what the controls offer before it is asked for: the usual alpha first, cheap draws first."""
    lineup = explorer.lineup
    alphas = sorted(lineup.alphas, key=lambda alpha: alpha != lineup.default[0])
    for alpha, draws, contender in product(alphas, lineup.draws, lineup.contenders):
        while explorer.curves.busy and not server.should_exit:  # the page waits for those
            time.sleep(0.5)
        if server.should_exit:
            return
        try:
            lineup.predictor(contender.key, alpha, draws)
        except InputError:
            return  # the page will say it when it asks
