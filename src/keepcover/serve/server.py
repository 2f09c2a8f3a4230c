"""uvicorn around the application: one process or several, JSON logs, and an end that answers what it accepted."""

from __future__ import annotations

import asyncio
import dataclasses
import ipaddress
import logging.config
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from keepcover.errors import InputError
from keepcover.serve import logs
from keepcover.serve.app import warm_up
from keepcover.serve.deployment import Deployment
from keepcover.serve.limits import HEAD, plain_address
from keepcover.serve.logs import log
from keepcover.serve.workers import STARTUP_FAILURE, end_with_parent, supervise

BACKLOG = 128
full = logging.getLogger("keepcover.serve.connections")


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
    h11 rather than httptools, because it bounds the size of headers.
    """

    most = most_connections()

    idle = 20.0  # seconds between looks; a connection with no request in progress at two looks is closed
    longest = 600.0  # seconds one request may be in progress, whatever it waits for

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


def run(
    deployment: Deployment,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    workers: int = 1,
    trusted_proxies: str | None = None,
    log_level: str = "info",
) -> int:
    """Serve until SIGTERM or SIGINT, answer what was accepted, and return the exit code.

    Args:
        deployment: what to serve.
        host, port: where; port 0 takes a free one and logs it.
        workers: processes that share the port, each with its own model and queue.
        trusted_proxies: addresses and networks whose ``X-Forwarded-For`` is believed, comma separated; nobody's by
            default. The client is the last address in it that is not one of these.
        log_level: debug, info, warning or error.
    """
    if workers < 1:
        raise InputError(f"expected at least 1 worker, got {workers}")
    logging.config.dictConfig(logs.config(log_level))
    logging.captureWarnings(True)
    if deployment.threads is None:
        deployment = dataclasses.replace(deployment, threads=max(1, (os.cpu_count() or 1) // workers))
    options: dict[str, Any] = {
        "lifespan": "on",
        "http": Protocol,
        "ws": "none",
        "loop": "asyncio",
        "log_config": logs.config(log_level),
        "log_level": log_level,
        "access_log": False,
        "server_header": False,
        "backlog": BACKLOG,
        "h11_max_incomplete_event_size": 2 * HEAD,  # the application refuses at HEAD; this bounds what never ends
        "proxy_headers": trusted_proxies is not None,
        "forwarded_allow_ips": _proxies(trusted_proxies),
        "timeout_graceful_shutdown": max(1, round(deployment.settings.shutdown_timeout)),
    }
    with bind(host, port) as listener:
        if workers == 1:
            app = deployment.build()  # before the port listens: what is wrong is an error here, not an answer there
            warm_up(app.state.service.predictor, app.state.service.shape)
            _announce(listener, deployment, workers)
            return _serve(app, listener, options)
        _announce(listener, deployment, workers)
        with tempfile.TemporaryDirectory(prefix="keepcover-") as folder:  # the parent never loads the model
            shared = dataclasses.replace(deployment, metrics_folder=folder)
            patience = 2 * deployment.settings.shutdown_timeout + 5
            return supervise(_worker, (shared, listener, options), workers, patience)


def _proxies(given: str | None) -> str | None:
    """Refuse what uvicorn would take as everybody, or as the name of nobody."""
    for part in (given or "127.0.0.1").split(","):
        try:
            everybody = ipaddress.ip_network(part.strip()).prefixlen == 0
        except ValueError:
            everybody = True
        if everybody:
            raise InputError(
                f"expected --trusted-proxies as addresses or networks like 10.0.0.5,10.1.0.0/16, got {part.strip()!r}; where "
                "everybody is trusted, a client can pretend to be any other"
            )
    return given


class Announcing(uvicorn.Server):
    """Tells when it answers, not before."""

    def __init__(self, config: uvicorn.Config, announce: Callable[[], object]) -> None:
        super().__init__(config)
        self.announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.announce()


def _serve(
    app: FastAPI, listener: socket.socket, options: dict[str, Any], announce: Callable[[], object] = lambda: None
) -> int:
    # uvicorn raises the signal again once it has shut down; by then nothing is left to end.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    Announcing(uvicorn.Config(app, **options), announce).run(sockets=[listener])
    if app.state.service.batcher.busy_since is not None:
        os._exit(1)  # the model hangs, and Python would wait for its thread for ever
    return 0


def _worker(deployment: Deployment, listener: socket.socket, options: dict[str, Any], ready: Connection) -> None:
    """In a process of its own."""
    logging.config.dictConfig(options["log_config"])
    logging.captureWarnings(True)
    end_with_parent()
    try:
        app = deployment.build()
    except InputError as error:
        log.error("cannot start", extra={"fields": {"error": str(error)}})
        sys.exit(STARTUP_FAILURE)
    except Exception as error:  # a model of the user's may raise anything
        log.exception("cannot start", extra={"fields": {"error": f"{type(error).__name__}: {error}"}})
        sys.exit(STARTUP_FAILURE)
    sys.exit(_serve(app, listener, options, lambda: ready.send(os.getpid())))


def _announce(listener: socket.socket, deployment: Deployment, workers: int) -> None:
    host, port = listener.getsockname()[:2]
    token = deployment.settings.token is not None
    fields = {"host": host, "port": port, "workers": workers, "token": token}
    if token or ipaddress.ip_address(host).is_loopback:
        log.info("serving", extra={"fields": fields})
    else:
        log.warning("serving, open to the network without a token", extra={"fields": fields})


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
