"""What the service tells: JSON logs, metrics, and for every request an id, a line and a count.

Logs are one JSON object per line on stderr; pixels, sets, tokens and noise are never written. Metrics are counted by
``prometheus_client``, in its multiprocess mode where several workers share a folder: the worker that is asked adds up the files of
all workers. Counters of workers that have ended keep counting; their gauges end with them.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from keepcover.web.requests import Problem
from keepcover.web.settings import KIB

log = logging.getLogger("keepcover.serve")
HEAD = 16 * KIB  # bytes of address and headers
FOLDER = "PROMETHEUS_MULTIPROC_DIR"  # the library reads it when it is first imported
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
LENGTHS = tuple(10.0**power for power in range(-4, 7))  # of intervals, in whatever unit
IMAGES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SHARE = """\
# HELP keepcover_trivial_share Share of all sets so far that hold every label.
# TYPE keepcover_trivial_share gauge
keepcover_trivial_share {}
"""
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class JsonFormatter(logging.Formatter):
    """A log record as one line of JSON; ``extra={"fields": {...}}`` adds fields.

    Example:
        >>> record = logging.makeLogRecord({"msg": "request", "levelname": "INFO", "fields": {"status": 200}})
        >>> line = json.loads(JsonFormatter().format(record))
        >>> line["event"], line["level"], line["status"]
        ('request', 'info', 200)
    """

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"time": at, "level": record.levelname.lower(), "event": record.getMessage()}
        line |= getattr(record, "fields", {"logger": record.name})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class Seldom(logging.Filter):
    """Lets a complaint that may come by the thousand through once in ``pause`` seconds, and counts the others.

    The service's own lines, one per request, all pass: it is the server, the event loop and warnings that clients can
    make repeat themselves.

    Example:
        >>> seldom = Seldom()
        >>> record = logging.makeLogRecord({"name": "asyncio", "levelno": logging.ERROR, "msg": "out of resources"})
        >>> seldom.filter(record), seldom.filter(record)
        (True, False)
    """

    def __init__(self, pause: float = 10.0) -> None:
        super().__init__()
        self.pause, self._seen = pause, dict[tuple[str, int, str], list[float]]()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name == log.name or record.levelno < logging.WARNING:
            return True
        place = (record.name, record.lineno, str(record.msg)[:30])  # few of them: what varies comes later in a message
        now = time.monotonic()
        until, held = self._seen.get(place, (0.0, 0.0))
        if now < until:
            self._seen[place] = [until, held + 1]
            return False
        self._seen[place] = [now + self.pause, 0.0]
        if held:
            record.fields = {**getattr(record, "fields", {"logger": record.name}), "not_shown": int(held)}
        return True


def config(level: str = "info") -> dict[str, Any]:
    """For ``logging.config.dictConfig``; uvicorn's own messages go the same way."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"json": {"()": "keepcover.serve.observing.JsonFormatter"}},
        "filters": {"seldom": {"()": "keepcover.serve.observing.Seldom"}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "json", "filters": ["seldom"]}},
        "root": {"level": level.upper(), "handlers": ["stderr"]},
        "loggers": {name: {"level": level.upper()} for name in ("uvicorn", "uvicorn.error", "keepcover.serve")},
    }


class Metrics:
    """The counters of one application, in a registry of its own.

    Example:
        >>> metrics = Metrics(classes=10)
        >>> metrics.sets([1, 3, 10], draws=16, trivial=1)
        >>> metrics.own("draws_total")
        48
    """

    def __init__(self, classes: int | None) -> None:
        self.registry = CollectorRegistry()
        own: dict[str, Any] = {"namespace": "keepcover", "registry": self.registry}
        timed = {"buckets": SECONDS, **own}
        usual = (0, 1, 2, 3, 5, 10, 20, 50, 100, 200, 500)
        sizes = LENGTHS if classes is None else (*(size for size in usual if size < classes), classes)
        self.requests = Counter("requests", "Requests answered.", ("route", "status"), **own)
        self.seconds = Histogram("request_seconds", "Seconds from the first byte to the answer.", ("route",), **timed)
        self.refusals = Counter("refusals", "Requests refused, by reason.", ("code",), **own)
        self.accepted = Counter("accepted", "Requests that entered the queue.", **own)
        self.answered = Counter("answered", "Requests that left the queue with sets.", **own)
        self.queue = Gauge("queue_images", "Images waiting in the queue.", multiprocess_mode="livesum", **own)
        self.batch_images = Histogram("batch_images", "Images per call of the model.", buckets=IMAGES, **own)
        self.batch_seconds = Histogram("batch_seconds", "Seconds per call of the model.", **timed)
        self.draws = Counter("draws", "Noisy model evaluations spent on answers.", **own)
        unit = "Size of prediction sets: labels, labels per pixel, or lengths."
        self.set_size = Histogram("set_size", unit, buckets=sizes, **own)
        self.trivial = Counter("trivial_sets", "Sets that hold everything: true, but they say nothing.", **own)

    def sets(self, sizes: Sequence[float], draws: int, trivial: int) -> None:
        """The sets of one answer, so many of which say nothing."""
        for size in sizes:
            self.set_size.observe(size)
        self.draws.inc(draws * len(sizes))
        self.trivial.inc(trivial)

    def own(self, name: str) -> int:
        """A number without labels, of this process alone."""
        return int(self.registry.get_sample_value(f"keepcover_{name}") or 0)

    def render(self) -> bytes:
        """Every metric of every worker, as Prometheus reads it; label pairs that never occurred are left out."""
        registry = self.registry
        if os.environ.get(FOLDER):
            registry = CollectorRegistry()
            MultiProcessCollector(registry)
        sets, trivial = (registry.get_sample_value(f"keepcover_{n}") for n in ("set_size_count", "trivial_sets_total"))
        return generate_latest(registry) + SHARE.format((trivial or 0.0) / sets if sets else 0.0).encode()


class Observe:
    """ASGI middleware. A client's own ``X-Request-ID`` is kept where it is short and plain."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        start, status = time.perf_counter(), 0
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")
        state = scope.setdefault("state", {})
        state["request_id"] = given if _ID.fullmatch(given) else secrets.token_hex(8)

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                # Not to be kept: the next answer to the same request is another draw.
                own = {"x-request-id": state["request_id"], "cache-control": "no-store"}
                MutableHeaders(scope=message).update(own)
            await send(message)

        async def refuse(problem: Problem) -> None:
            state["code"] = problem.code
            await problem.response(request_id=state["request_id"])(scope, receive, watched)

        # However they arrive; a header is followed by ": " and the end of the line.
        head = len(scope.get("raw_path") or b"") + len(scope["query_string"])
        head += sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        try:
            if head > HEAD:
                raise Problem("headers_too_large", f"the address and the headers exceed {HEAD} bytes")
            await self.app(scope, receive, watched)
        except ClientDisconnect:
            pass
        except Problem as problem:
            await refuse(problem)
        except Exception:
            log.exception("failure", extra={"fields": {"request_id": state["request_id"]}})
            if not status:
                await refuse(Problem("internal", "the service failed on this request; it is logged under its id"))
        finally:
            self._note(scope, str(status or "gone"), time.perf_counter() - start)

    def _note(self, scope: Scope, status: str, seconds: float) -> None:
        """The route as the application names it, so that there are few of them."""
        state, client = scope["state"], scope.get("client")
        route = getattr(scope.get("route"), "path", "other")
        self.metrics.requests.labels(route, status).inc()
        self.metrics.seconds.labels(route).observe(seconds)
        if "code" in state:
            self.metrics.refusals.labels(state["code"]).inc()
        fields = {"request_id": state["request_id"], "client": client[0] if client else None, "method": scope["method"]}
        fields |= {"route": route, "status": status, "ms": round(1000 * seconds, 2)}
        fields |= {name: state[name] for name in ("images", "code") if name in state}
        log.info("request", extra={"fields": fields})
