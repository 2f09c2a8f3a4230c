"""Several processes on one port: start them, replace one that dies, end them gently."""

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

STARTUP_FAILURE = 3  # uvicorn's exit code for it: what failed once at startup would fail at every restart


def supervise(target: Callable[..., None], arguments: tuple[Any, ...], workers: int, patience: float) -> int:
    """Run ``target`` in so many processes until SIGTERM or SIGINT, then end them and return the exit code.

    Args:
        target: a function of a module, called with ``arguments`` in fresh processes.
        arguments: whatever pickles between parent and child, sockets included.
        workers: how many.
        patience: seconds between SIGTERM and SIGKILL for the workers.
    """
    context = multiprocessing.get_context("spawn")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())

    def begin() -> Any:
        process = context.Process(target=target, args=arguments)
        process.start()
        return process

    processes = [begin() for _ in range(workers)]
    failed = False
    while not stop.is_set():
        ended = wait([process.sentinel for process in processes], timeout=0.2)
        for at, process in enumerate(processes):
            if process.sentinel not in ended or stop.is_set():
                continue
            process.join()
            log.error("worker ended", extra={"fields": {"pid": process.pid, "code": process.exitcode}})
            if process.exitcode == STARTUP_FAILURE:
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
