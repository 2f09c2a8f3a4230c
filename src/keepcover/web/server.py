"""uvicorn around an application of ours: a protocol that hangs up on idle clients, a socket, and word of when it answers."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.h11_impl import H11Protocol

import keepcover
from keepcover.errors import InputError
from keepcover.web.requests import BodyLimit, Problem
from keepcover.web.settings import Settings

BACKLOG = 128
full = logging.getLogger("keepcover.web.connections")


def most_connections() -> int:
    """What the limit on open files leaves: the event loop may hold a backlog accepted and another one not yet closed."""
    try:
        import resource
    except ImportError:  # Windows
        return 512
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1024 if files == resource.RLIM_INFINITY else max(16, min(1024, files - 2 * BACKLOG - 64))


class Protocol(H11Protocol):
    """uvicorn's HTTP protocol, which hangs up on clients that neither ask nor leave.

    Between requests uvicorn waits for ever for the rest of a half-sent header, and for a client to take its answer, and
    takes connections until the process has no files left. Here a connection beyond the most there may be costs the one
    that has been idle for longest, those first that never asked anything.
    h11 rather than httptools, because it bounds the size of headers. uvicorn has a setting for none of these.
    """

    most = most_connections()

    idle = 20.0  # seconds between looks; a connection with no request in progress at two looks is closed
    longest = 600.0  # seconds one request may be in progress

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.client is not None:
            self.client = (plain_address(self.client[0]), self.client[1])
        self._last, self._since = self.cycle, self.loop.time()
        self._watch = self.loop.call_later(self.idle, self._look)
        if len(self.connections) > self.most:
            waiting: Any = (one for one in self.connections if not one._asking)  # type: ignore[union-attr]
            oldest = min(waiting, key=lambda one: (one.cycle is not None, one._since))
            self.connections.discard(oldest)
            oldest.transport.abort()
            full.warning("more than %d connections: the longest idle are closed", self.most)

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch.cancel()
        super().connection_lost(exc)

    @property
    def _asking(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _look(self) -> None:
        if self.cycle is not self._last:
            self._last, self._since = self.cycle, self.loop.time()
        elif not self._asking or self.loop.time() - self._since > self.longest:
            self.transport.abort()
            return
        self._watch = self.loop.call_later(self.idle, self._look)


def bare_app(title: str, settings: Settings, lifespan: Any, description: str = "") -> FastAPI:
    """An application with limits on bodies, without redirects and FastAPI's own pages, which load scripts from elsewhere.

    What it refuses, and what the web framework itself refuses, is raised as a :class:`Problem`: a layer around it answers.
    """
    about: dict[str, Any] = {"title": title, "version": keepcover.__version__, "description": description}
    app = FastAPI(**about, lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.add_middleware(BodyLimit, settings=settings)
    app.add_exception_handler(HTTPException, _refuse)
    return app


async def _refuse(_: Request, error: Exception) -> Response:
    raise Problem.of(error)


class Server(uvicorn.Server):
    """uvicorn with the protocol above; it tells when it answers, not before."""

    def __init__(self, app: FastAPI, announce: Callable[[], object], **options: Any) -> None:
        plain: dict[str, Any] = {"http": Protocol, "ws": "none", "access_log": False, "server_header": False}
        super().__init__(uvicorn.Config(app, backlog=BACKLOG, **plain, **options))
        self.announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.announce()


def bind(host: str, port: int) -> socket.socket:
    """Bound, not yet listening: connections are refused until the model is ready."""
    # The protocol is named because asyncio turns Nagle's algorithm off only where it is; 40 ms per answer otherwise.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise InputError(f"cannot listen on {host} port {port} ({error}); choose another --host or --port") from None
    listener.set_inheritable(True)
    return listener


def plain_address(host: str) -> str:
    """An IPv4 client of a socket that listens on IPv6 as what it is.

    Example:
        >>> plain_address("::ffff:192.0.2.1"), plain_address("2001:db8::1"), plain_address("a socket")
        ('192.0.2.1', '2001:db8::1', 'a socket')
    """
    try:
        mapped = getattr(ipaddress.ip_address(host), "ipv4_mapped", None)
    except ValueError:
        return host
    return host if mapped is None else str(mapped)
