"""Monitoring in the service: tickets that answers carry, outcomes that come back with them, and one state for all workers.

The state lies in one SQLite file, whose transactions make a ticket count once and an alarm be told once, whichever worker
answers. Nothing about a query is kept but sums.
"""

from __future__ import annotations

import base64
import hmac
import json
import re
import secrets
import sqlite3
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy import ndarray
from torch import Tensor

from keepcover.errors import InputError
from keepcover.monitoring import Monitor, monitor
from keepcover.prediction.predictor import Level, Predictor
from keepcover.serve.observing import log
from keepcover.web.requests import Problem, invalid
from keepcover.web.settings import KIB, Settings

HEAD = struct.Struct(">d12sHH")  # expires, a number used once, position of the level, sets
SEAL = 16  # bytes of HMAC-SHA256
CODE = np.dtype(">i4")  # position of a group among those of the promise; -1 for an unknown one
TABLES = (
    "PRAGMA journal_mode=WAL",
    "PRAGMA synchronous=NORMAL",
    "CREATE TABLE IF NOT EXISTS counted (number BLOB PRIMARY KEY, expires REAL) WITHOUT ROWID",
    "CREATE INDEX IF NOT EXISTS expiry ON counted (expires)",  # a month of tickets is not read through for every outcome
    "CREATE TABLE IF NOT EXISTS state (name TEXT PRIMARY KEY, monitors TEXT)",
)
PAUSE = 1.0  # seconds between writes of what queries leave


class Watch:
    """The monitors of one predictor, one per level."""

    def __init__(self, predictor: Predictor, settings: Settings, clock: Callable[[], float] = time.time) -> None:
        self.predictor, self.settings, self.clock = predictor, settings, clock
        self.levels, self.fresh, self.off = list(predictor.levels), list[Monitor](), ""
        if not predictor.task.early:
            self.off = f"tickets hold sets of labels, and {predictor.task.name} has others; watch it in Python"
        elif not settings.monitor:
            self.off = "it was switched off"
        else:
            rate = settings.false_alarm
            try:
                self.fresh = [monitor(predictor, alpha=a, epsilon=e, false_alarm=rate) for a, e in self.levels]
            except InputError as error:  # a promise that cannot be watched can be served
                self.off = str(error)
        # Tickets and state of another predictor, or of this one before it was recalibrated, are none of this one's.
        self.name = predictor.digest
        self.key = hmac.digest((settings.ticket_key or "").encode(), self.name.encode(), "sha256")
        self._lock = threading.Lock()
        self._new, self._written = deque[tuple[int, ndarray]](), 0.0  # a deque: answers add to it and wait for nothing
        path = settings.monitor_file
        try:
            self._file = sqlite3.connect(path or ":memory:", timeout=30, check_same_thread=False)
            self._file.isolation_level = None
            for line in TABLES:
                self._file.execute(line)
            self._change(lambda _: None)  # a state that cannot be read is found now
        except sqlite3.Error as error:
            why = f"cannot keep the monitor in {path} ({error}); name a file on a local disk that can be written"
            raise InputError(why) from None
        except (ValueError, TypeError) as error:
            why = f"{path} holds a state that no monitor wrote ({error}); move the file away to begin anew"
            raise InputError(why) from None

    # -- tickets -----------------------------------------------------------------------------------------------------------

    def ticket(self, level: Level, sets: Any, group: Tensor | None = None) -> str | None:
        """What proves these sets later: they, their groups, when it expires, and a number used once, sealed."""
        if self.off:
            return None
        expires, number = self.clock() + self.settings.ticket_lifetime, secrets.token_bytes(12)
        head = HEAD.pack(expires, number, self.levels.index(level), len(sets))
        content = head + np.packbits(sets.mask.cpu().numpy(), axis=1).tobytes()
        content += b"" if group is None else group.numpy().astype(CODE).tobytes()
        return base64.urlsafe_b64encode(content + hmac.digest(self.key, content, "sha256")[:SEAL]).decode()

    def _open(self, ticket: str) -> tuple[float, bytes, int, ndarray, ndarray]:
        try:
            raw = base64.b64decode(ticket.encode("ascii"), altchars=b"-_", validate=True)
        except ValueError:
            raw = b""
        content, seal = raw[:-SEAL], raw[-SEAL:]
        if not hmac.compare_digest(hmac.digest(self.key, content, "sha256")[:SEAL], seal):
            raise invalid("expected a ticket of this service and of the predictor it serves now")
        expires, number, at, sets = HEAD.unpack(content[: HEAD.size])
        classes = self.predictor.classes
        middle = HEAD.size + sets * -(-classes // 8)
        bits = np.frombuffer(content[HEAD.size : middle], np.uint8).reshape(sets, -1)
        group = np.frombuffer(content[middle:], CODE) if len(content) > middle else np.zeros(sets, CODE)
        return expires, number, at, np.unpackbits(bits, axis=1, count=classes).astype(bool), group

    @property
    def longest(self) -> int:
        """Bytes of the longest outcomes that make sense, with some room for the spaces of JSON."""
        if self.off:
            return KIB
        classes, sets = self.predictor.classes, self.settings.max_images
        ticket = HEAD.size + SEAL + sets * (-(-classes // 8) + CODE.itemsize)
        names = max((len(json.dumps(name)) for name in self.predictor.class_names or ()), default=0)
        return KIB + 2 * ticket + sets * (names + 32) * (1 if self.predictor.task.single else classes)

    # -- what comes in -----------------------------------------------------------------------------------------------------

    def outcomes(self, ticket: str, labels: Sequence[int | str | list[int | str] | None]) -> dict[str, float]:
        """Count the true labels of an answer's sets, None where one stays unknown; a ticket counts once. -1 is a class that the
        model does not have: a miss. Sets of unknown groups, and -1 where the promise is per class, have no promise to watch.
        """
        if self.off:
            raise invalid(f"this service has no monitor: {self.off}")
        expires, number, at, mask, group = self._open(ticket)
        if len(labels) != len(mask):
            raise invalid(f"expected the labels of {len(mask)} sets, null where one stays unknown, got {len(labels)}")
        fresh, missed, cells = self.fresh[at], list[float](), list[int]()
        for held, label, own in zip(mask, labels, group.tolist(), strict=True):
            true = None if label is None else self._true(label)
            cell = int(fresh.cell_of(true)[0]) if true and fresh.cells else own
            if true is not None and cell >= 0:
                missed.append(1 - float(np.mean([k >= 0 and held[k] for k in true])) if true else 0.0)
                cells.append(cell)

        def count(monitors: list[Monitor]) -> None:
            # One clock for both, within the transaction: a ticket that expires while it waits must not count again.
            now = self.clock()
            if expires < now:
                raise invalid(f"the ticket has expired; outcomes are taken for {self.settings.ticket_lifetime:g} s")
            self._file.execute("DELETE FROM counted WHERE expires < ?", (now,))
            if not self._file.execute("INSERT OR IGNORE INTO counted VALUES (?, ?)", (number, expires)).rowcount:
                raise Problem("counted", "the outcomes of this ticket have been counted; a ticket counts once")
            if missed:
                monitors[at].add_outcomes(missed, cells, now)

        self._change(count)
        return {"counted": len(missed), "missed": sum(missed) if self.predictor.task.shares else int(sum(missed))}

    def _true(self, label: int | str | list[int | str]) -> list[int]:
        """What is true of one query: one label, or a list of them where there may be several."""
        single, classes, names = self.predictor.task.single, self.predictor.classes, self.predictor.class_names or ()
        listed = label if isinstance(label, list) else [label]
        if single == isinstance(label, list) or len(listed) > classes:
            raise invalid(f"expected {'one label' if single else 'a list of true labels'} per set, got {label!r:.60}")
        found: list[Any] = [names.index(one) if one in names else one for one in listed]
        least = -1 if single else 0
        for one in found:
            if not isinstance(one, int) or not least <= one < classes:
                other = ", -1 for a class that the model does not have" if single else ""
                raise invalid(f"expected labels as class names or as indices below {classes}{other}, got {one!r:.60}")
        return sorted(set(found))

    def saw(self, level: Level, sets: Any) -> bool:
        """Note queries; whether it is time for :meth:`write`."""
        if self.off:
            return False
        at, now = self.levels.index(level), time.monotonic()
        self._new.append((at, self.fresh[at].statistics(sets)))
        due = now - self._written > PAUSE
        self._written = now if due else self._written  # once: the next answers must not ask for it too
        return due

    def write(self) -> list[Monitor]:
        """Count the queries noted so far; the monitors as they then are."""
        new = [self._new.popleft() for _ in range(len(self._new))]

        def count(monitors: list[Monitor]) -> None:
            for at in {at for at, _ in new}:
                monitors[at].add_queries(np.concatenate([some for where, some in new if where == at]), now=self.clock())

        return self._change(count)

    def _change(self, change: Callable[[list[Monitor]], None]) -> list[Monitor]:
        """One transaction over the state of all workers; alarms that are new in it are logged, once."""
        with self._lock, self._file:
            self._file.execute("BEGIN IMMEDIATE")
            row = self._file.execute("SELECT monitors FROM state WHERE name = ?", (self.name,)).fetchone()
            known = json.loads(row[0]) if row else map(Monitor.to_dict, self.fresh)
            monitors = [Monitor.from_dict(one) for one in known]
            before = [set(one.alarms) for one in monitors]
            change(monitors)
            text = json.dumps([one.to_dict() for one in monitors])
            self._file.execute("INSERT OR REPLACE INTO state VALUES (?, ?)", (self.name, text))
        for one, old in zip(monitors, before, strict=True):
            for kind in set(one.alarms) - old:
                log.warning("alarm", extra={"fields": {"kind": kind, **one.about, **one.report()[kind]}})
        return monitors

    # -- what goes out -----------------------------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """The state of every level, for JSON."""
        return {"off": self.off or None, "levels": [] if self.off else [one.report() for one in self.write()]}

    def render(self) -> bytes:
        """The same as Prometheus reads it: of all workers, whichever is asked."""
        lines = ["# TYPE keepcover_evidence gauge", "# TYPE keepcover_alarm gauge", "# TYPE keepcover_outcomes gauge"]
        for row in self.report()["levels"]:
            level = f'alpha="{row["alpha"]:g}",epsilon="{row["epsilon"]:g}"'
            for kind in ("promise", "queries"):
                labels = f'{{kind="{kind}",{level}}}'
                lines.append(f"keepcover_evidence{labels} {row[kind]['evidence']:.6g}")
                lines.append(f"keepcover_alarm{labels} {int(row[kind]['since'] is not None)}")
            numbers = row["promise"]
            lines += [f'keepcover_outcomes{{kind="{name}",{level}}} {numbers[name]}' for name in ("outcomes", "misses")]
        lines.sort(key=lambda line: (re.findall(r"keepcover_\w+", line)[0], line[0] != "#"))
        return ("\n".join(lines) + "\n").encode()
