"""Several processes on one port: start them, replace one that dies, end them gently.

uvicorn's own supervisor replaces for ever what crashes at every start, waits for ever for a worker that hangs at its end, and
its workers outlive a parent that is killed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

from keepcover.serve.logs import log

STARTUP_FAILURE = 3  # uvicorn's exit code for it: what failed at the first start would fail at every other
ATTEMPTS = 3


def supervise(
    target: Callable[..., None],
    arguments: tuple[Any, ...],
    workers: int,
    patience: float,
    ended: Callable[[int], object] = lambda _: None,
) -> int:
    """Run ``target`` in so many processes until SIGTERM or SIGINT, then end them and return the exit code.

    A worker that ends is replaced. When the first fails to start, or when several in a row end before one is ready, what
    they say in the log would be said for ever: this ends as well.

    Args:
        target: a function of a module, called with ``arguments`` and a connection to send on when ready, in fresh processes.
        arguments: values that pickle between parent and child, sockets included.
        workers: how many.
        patience: seconds between SIGTERM and SIGKILL for the workers.
        ended: told the id of a worker that has ended.
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
            ended(process.pid)
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
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True, name="keepcover-parent").start()
