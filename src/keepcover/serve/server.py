"""uvicorn around the application: one process or several, JSON logs, and an end that answers what it accepted.

Several processes on one port have a supervisor of ours: uvicorn's own replaces for ever what crashes at every start, waits for
ever for a worker that hangs at its end, and its workers outlive a parent that is killed.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging.config
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any

from fastapi import FastAPI
from prometheus_client.multiprocess import mark_process_dead

from keepcover.errors import InputError
from keepcover.serve.app import Deployment, warm_up
from keepcover.serve.observing import FOLDER, HEAD, config, log
from keepcover.web.server import Server, bind

STARTUP_FAILURE = 3  # uvicorn's exit code for it: what failed at the first start would fail at every other
ATTEMPTS = 3


def run(
    deployment: Deployment, *, host: str, port: int, workers: int, trusted_proxies: str | None, log_level: str
) -> int:
    """Serve until SIGTERM or SIGINT, answer what was accepted, and return the exit code.

    Args:
        deployment: what to serve.
        host, port: where; port 0 takes a free one and logs it.
        workers: processes that share the port, each with its own model and queue.
        trusted_proxies: addresses and networks whose ``X-Forwarded-For`` is believed, comma separated. The client is the
            last address in it that is not one of these.
        log_level: debug, info, warning or error.
    """
    if workers < 1:
        raise InputError(f"expected at least 1 worker, got {workers}")
    logging.config.dictConfig(config(log_level))
    logging.captureWarnings(True)
    if deployment.threads is None:
        deployment = replace(deployment, threads=max(1, (os.cpu_count() or 1) // workers))
    options: dict[str, Any] = {
        "lifespan": "on",
        "loop": "asyncio",
        "log_config": config(log_level),
        "log_level": log_level,
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
            os.environ[FOLDER] = folder
            own = deployment.settings
            settings = replace(own, monitor_file=own.monitor_file or f"{folder}/monitor.sqlite")
            deployment, patience = replace(deployment, settings=settings), 2 * own.shutdown_timeout + 5
            try:
                return supervise(_worker, (deployment, listener, options), workers, patience)
            finally:
                del os.environ[FOLDER]


def _proxies(given: str | None) -> str | None:
    """Refuse what uvicorn would take as every address, or as a name that no client has."""
    for part in (given or "127.0.0.1").split(","):
        with contextlib.suppress(ValueError):
            if ipaddress.ip_network(part.strip()).prefixlen:
                continue
        expected = "expected --trusted-proxies as addresses or networks like 10.0.0.5,10.1.0.0/16"
        why = "if every address is trusted, a client can pretend to be any other"
        raise InputError(f"{expected}, got {part.strip()!r}; {why}")
    return given


def _serve(app: FastAPI, listener: socket.socket, options: dict[str, Any], announce: Any = lambda: None) -> int:
    # uvicorn raises the signal again once it has shut down; by then nothing is left to end.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    Server(app, announce, **options).run(sockets=[listener])
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
    except Exception as error:  # a model of the user's may raise anything
        known = isinstance(error, InputError)
        why = str(error) if known else f"{type(error).__name__}: {error}"
        log.error("cannot start", exc_info=not known, extra={"fields": {"error": why}})
        sys.exit(STARTUP_FAILURE)
    sys.exit(_serve(app, listener, options, lambda: ready.send(os.getpid())))


def _announce(listener: socket.socket, deployment: Deployment, workers: int) -> None:
    (host, port, *_), token = listener.getsockname(), deployment.settings.token is not None
    exposed = not token and not ipaddress.ip_address(host).is_loopback
    fields = {"host": host, "port": port, "workers": workers, "token": token}
    tell, event = (log.warning, "serving, open to the network without a token") if exposed else (log.info, "serving")
    tell(event, extra={"fields": fields})


# -- several processes -------------------------------------------------------------------------------------------------


def supervise(target: Callable[..., None], arguments: tuple[Any, ...], workers: int, patience: float) -> int:
    """Run ``target`` in so many processes until SIGTERM or SIGINT, then end them and return the exit code.

    A worker that ends is replaced. When the first fails to start, or when several in a row end before one is ready, what
    they say in the log would be said for ever: this ends as well.

    Args:
        target: a function of a module, called with ``arguments`` and a connection to send on when ready, in fresh processes.
        arguments: values that pickle between parent and child, sockets included.
        workers: how many.
        patience: seconds between SIGTERM and SIGKILL for the workers.
    """
    context = multiprocessing.get_context("spawn")
    stop = threading.Event()
    reports, ready = context.Pipe(duplex=False)  # no event: its semaphore would outlive a parent that is killed
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())

    def begin() -> Any:
        process = context.Process(target=target, args=(*arguments, ready))
        process.start()
        return process

    processes = [begin() for _ in range(workers)]
    failed, served, failures = False, False, 0
    while not stop.is_set():
        gone = wait([process.sentinel for process in processes], timeout=0.2)
        for at, process in enumerate(processes):
            if process.sentinel not in gone or stop.is_set():
                continue
            process.join()
            mark_process_dead(process.pid)
            log.error("worker ended", extra={"fields": {"pid": process.pid, "code": process.exitcode}})
            failures += 1
            while reports.poll():
                reports.recv()
                served, failures = True, 0
            if failures == ATTEMPTS or (process.exitcode == STARTUP_FAILURE and not served):
                log.error("gave up: workers end before they are ready", extra={"fields": {"attempts": failures}})
                failed = True
                stop.set()
            elif not stop.wait(1.0):
                processes[at] = begin()
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + patience
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            log.error("worker does not end", extra={"fields": {"pid": process.pid}})
            process.kill()
            process.join()
    return STARTUP_FAILURE if failed else int(any(process.exitcode for process in processes))


def end_with_parent() -> None:
    """In a worker: end as if by SIGTERM when the parent is gone, however it went."""
    parent: Any = multiprocessing.parent_process()

    def watch() -> None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True, name="keepcover-parent").start()
