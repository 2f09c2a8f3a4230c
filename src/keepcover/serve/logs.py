"""Structured logs: one JSON object per line on stderr. Pixels, sets, tokens and noise are never written."""

from __future__ import annotations

import json
import logging
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


def config(level: str = "info") -> dict[str, Any]:
    """For ``logging.config.dictConfig``; uvicorn's own messages go the same way."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"json": {"()": "keepcover.serve.logs.JsonFormatter"}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "json"}},
        "root": {"level": level.upper(), "handlers": ["stderr"]},
        "loggers": {name: {"level": level.upper()} for name in ("uvicorn", "uvicorn.error", "keepcover.serve")},
    }
