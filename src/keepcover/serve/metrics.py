"""Prometheus metrics in the text format, summed over worker processes.

Every series that can occur has its slot in one array of float64. A worker writes its own array only; with a folder the
array is a file mapped into memory, and whichever worker is asked sums the files. Counters of workers that have ended
keep counting; their gauges do not.
"""

from __future__ import annotations

import math
import os
import secrets
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from keepcover.serve.problems import STATUS

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
IMAGES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
ROUTES = ("/v1/predict", "/v1/predictor", "/healthz", "/readyz", "/metrics", "/openapi.json", "other")
STATUSES = (*(str(code) for code in sorted({200, *STATUS.values()})), "gone", "other")


@dataclass(frozen=True)
class Family:
    """One metric: its name, its kind, what it means, and every combination of labels it may have."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()
    series: tuple[tuple[str, ...], ...] = ((),)
    buckets: tuple[float, ...] = ()

    @property
    def width(self) -> int:
        """Slots per series: one, or one per bucket, one beyond the last and one for the sum."""
        return len(self.buckets) + 2 if self.kind == "histogram" else 1


class Metrics:
    """What the service counts.

    Example:
        >>> metrics = Metrics(classes=10)
        >>> metrics.sets([1, 3, 10], draws=16)
        >>> print(metrics.render().split("# HELP keepcover_draws_total")[1].splitlines()[2])
        keepcover_draws_total 48
    """

    def __init__(self, classes: int, folder: str | None = None) -> None:
        self.classes = classes
        sizes = (*(float(s) for s in (0, 1, 2, 3, 5, 10, 20, 50, 100, 200, 500) if s < classes), float(classes))
        pairs = tuple((route, status) for route in ROUTES for status in STATUSES)
        families = (
            Family("keepcover_requests_total", "counter", "Requests answered.", ("route", "status"), pairs),
            Family(
                "keepcover_request_seconds",
                "histogram",
                "Seconds from the first byte to the answer.",
                ("route",),
                tuple((route,) for route in ROUTES),
                SECONDS,
            ),
            Family(
                "keepcover_refusals_total",
                "counter",
                "Requests refused, by reason.",
                ("code",),
                tuple((code,) for code in STATUS),
            ),
            Family("keepcover_accepted_total", "counter", "Requests that entered the queue."),
            Family("keepcover_answered_total", "counter", "Requests that left the queue with sets."),
            Family("keepcover_queue_images", "gauge", "Images waiting in the queue."),
            Family("keepcover_batch_images", "histogram", "Images per call of the model.", (), ((),), IMAGES),
            Family("keepcover_batch_seconds", "histogram", "Seconds per call of the model.", (), ((),), SECONDS),
            Family("keepcover_draws_total", "counter", "Noisy model evaluations spent on answers."),
            Family("keepcover_set_size", "histogram", "Labels per prediction set.", (), ((),), sizes),
            Family(
                "keepcover_trivial_sets_total", "counter", "Sets that hold every label: true, but they say nothing."
            ),
        )
        self.families = {family.name: family for family in families}
        self._slot: dict[tuple[str, tuple[str, ...]], int] = {}
        slots = 0
        for family in families:
            for values in family.series:
                self._slot[family.name, values] = slots
                slots += family.width
        self._folder = None if folder is None else Path(folder)
        if self._folder is None:
            self._own = np.zeros(slots)
        else:
            path = self._folder / f"{os.getpid()}-{secrets.token_hex(4)}.metrics"
            self._own = np.memmap(path, np.float64, "w+", shape=(slots,))

    # -- counting ------------------------------------------------------------------------------------------------------

    def add(self, name: str, *values: str, by: float = 1.0) -> None:
        self._own[self._slot[f"keepcover_{name}", values]] += by

    def observe(self, name: str, value: float, *values: str) -> None:
        family, at = self.families[f"keepcover_{name}"], self._slot[f"keepcover_{name}", values]
        self._own[at + bisect_left(family.buckets, value)] += 1
        self._own[at + family.width - 1] += value

    def request(self, route: str, status: str, seconds: float, code: str | None = None) -> None:
        """One request answered."""
        route = route if route in ROUTES else "other"
        self.add("requests_total", route, status if status in STATUSES else "other")
        self.observe("request_seconds", seconds, route)
        if code is not None:
            self.add("refusals_total", code)

    def batch(self, images: int, seconds: float) -> None:
        """One call of the model."""
        self.observe("batch_images", float(images))
        self.observe("batch_seconds", seconds)

    def sets(self, sizes: Sequence[int], draws: int) -> None:
        """The sets of one answer."""
        for size in sizes:
            self.observe("set_size", float(size))
        self.add("draws_total", by=float(draws * len(sizes)))
        self.add("trivial_sets_total", by=float(sum(size == self.classes for size in sizes)))

    def queue(self, images: int) -> None:
        """How many images wait now."""
        self._own[self._slot["keepcover_queue_images", ()]] = images

    def own(self, name: str) -> int:
        """A counter without labels, of this process alone."""
        return int(self._own[self._slot[f"keepcover_{name}", ()]])

    # -- showing -------------------------------------------------------------------------------------------------------

    def render(self) -> str:
        """Every metric of every worker, as Prometheus reads it; label pairs that never occurred are left out."""
        values, lines = self._sum(), []
        for family in self.families.values():
            lines += [f"# HELP {family.name} {family.help}", f"# TYPE {family.name} {family.kind}"]
            for labels in family.series:
                at = self._slot[family.name, labels]
                part = values[at : at + family.width]
                if not labels or part.any():
                    lines += _lines(family, labels, part)
        size = self.families["keepcover_set_size"]
        at = self._slot[size.name, ()]
        sets = values[at : at + size.width - 1].sum()
        share = values[self._slot["keepcover_trivial_sets_total", ()]] / sets if sets else 0.0
        lines += [
            "# HELP keepcover_trivial_share Share of all sets so far that hold every label.",
            "# TYPE keepcover_trivial_share gauge",
            f"keepcover_trivial_share {_number(share)}",
        ]
        return "\n".join(lines) + "\n"

    def _sum(self) -> np.ndarray:
        if self._folder is None:
            return self._own
        gauges = [
            self._slot[f.name, values] for f in self.families.values() if f.kind == "gauge" for values in f.series
        ]
        total = np.zeros(len(self._own))
        for path in self._folder.glob("*.metrics"):
            values = np.fromfile(path, np.float64)
            if len(values) != len(total):  # being created
                continue
            if not _runs(int(path.name.split("-")[0])):
                values[gauges] = 0
            total += values
        return total


def _lines(family: Family, labels: tuple[str, ...], part: np.ndarray) -> Iterator[str]:
    pairs = [f'{name}="{value}"' for name, value in zip(family.labels, labels, strict=True)]

    def sample(suffix: str, value: float, more: str = "") -> str:
        inside = ",".join([*pairs, more] if more else pairs)
        return f"{family.name}{suffix}{'{' + inside + '}' if inside else ''} {_number(value)}"

    if family.kind != "histogram":
        yield sample("", part[0])
        return
    counts = part[:-1].cumsum()
    for bound, count in zip((*family.buckets, math.inf), counts, strict=True):
        yield sample("_bucket", count, f'le="{_number(bound)}"')
    yield sample("_sum", part[-1])
    yield sample("_count", counts[-1])


def _number(value: float) -> str:
    """
    Example:
        >>> _number(3.0), _number(0.25), _number(math.inf)
        ('3', '0.25', '+Inf')
    """
    if math.isinf(value):
        return "+Inf"
    return str(int(value)) if value == int(value) else repr(float(value))


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
