"""What the service counts, by ``prometheus_client``, in its multiprocess mode where several workers share a folder.

The worker that is asked adds up the files of all workers. Counters of workers that have ended keep counting; their gauges
end with them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.multiprocess import MultiProcessCollector

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
FOLDER = "PROMETHEUS_MULTIPROC_DIR"  # the library reads it when it is first imported
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
LENGTHS = tuple(10.0**power for power in range(-4, 7))  # of intervals, in whatever unit
IMAGES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SHARE = """\
# HELP keepcover_trivial_share Share of all sets so far that hold every label.
# TYPE keepcover_trivial_share gauge
keepcover_trivial_share {}
"""


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
        own = {"namespace": "keepcover", "registry": self.registry}
        usual = (0, 1, 2, 3, 5, 10, 20, 50, 100, 200, 500)
        sizes = LENGTHS if classes is None else (*(size for size in usual if size < classes), classes)
        self.requests = Counter("requests", "Requests answered.", ("route", "status"), **own)
        self.seconds = Histogram(
            "request_seconds", "Seconds from the first byte to the answer.", ("route",), buckets=SECONDS, **own
        )
        self.refusals = Counter("refusals", "Requests refused, by reason.", ("code",), **own)
        self.accepted = Counter("accepted", "Requests that entered the queue.", **own)
        self.answered = Counter("answered", "Requests that left the queue with sets.", **own)
        self.queue = Gauge("queue_images", "Images waiting in the queue.", multiprocess_mode="livesum", **own)
        self.batch_images = Histogram("batch_images", "Images per call of the model.", buckets=IMAGES, **own)
        self.batch_seconds = Histogram("batch_seconds", "Seconds per call of the model.", buckets=SECONDS, **own)
        self.draws = Counter("draws", "Noisy model evaluations spent on answers.", **own)
        self.set_size = Histogram(
            "set_size", "Size of prediction sets: labels, labels per pixel, or lengths.", buckets=sizes, **own
        )
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
