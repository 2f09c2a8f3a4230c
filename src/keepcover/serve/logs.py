"""Structured logs: one JSON object per line on stderr. Pixels, sets, tokens and noise are never written."""

from __future__ import annotations

import json
import logging
import time
from datetime import UTC, datetime
from typing import Any

log = logging.getLogger("keepcover.serve")


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
        "formatters": {"json": {"()": "keepcover.serve.logs.JsonFormatter"}},
        "filters": {"seldom": {"()": "keepcover.serve.logs.Seldom"}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "json", "filters": ["seldom"]}},
        "root": {"level": level.upper(), "handlers": ["stderr"]},
        "loggers": {name: {"level": level.upper()} for name in ("uvicorn", "uvicorn.error", "keepcover.serve")},
    }
