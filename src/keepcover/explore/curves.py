"""Size and coverage of the lineup on the gallery, computed in the background while the page stays usable."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from keepcover.errors import InputError
from keepcover.explore.attacking import craft
from keepcover.explore.lineup import Lineup
from keepcover.explore.look import nested, own_sets
from keepcover.tasks import Evaluation
from keepcover.tasks.metrics import measure

ATTACKED, RADII, CHUNK = 200, 4, 16


class Stopped(Exception):  # noqa: N818, nothing went wrong
    """The page asked for other curves, or the explorer ends."""


@dataclass
class Job:
    """One computation and where it stands."""

    alpha: float
    draws: int
    stage: str = "waiting"
    done: int = 0
    total: int = 1
    running: bool = True
    so_far: dict[str, Any] = field(default_factory=dict)  # the curves as far as they are known
    error: str | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)

    def step(self, count: int = 1) -> None:
        self.done += count
        if self.cancelled.is_set():
            raise Stopped


class Curves:
    """Curves by (alpha, draws). One job runs at a time; asking for another one stops it."""

    def __init__(self, lineup: Lineup) -> None:
        self.lineup = lineup
        self.images = min(ATTACKED, len(lineup.subject.gallery))
        self.radii = spread([e for e in lineup.epsilons if e > 0], RADII)
        self._done: dict[tuple[float, int], dict[str, Any]] = {}
        self._crafted: dict[tuple[str, float], Tensor] = {}
        self._job: Job | None = None
        self._lock = threading.Lock()

    def ask(self, alpha: float, draws: int) -> dict[str, Any]:
        """The curves, or where their computation stands; the first call starts it."""
        with self._lock:
            known = self._done.get((alpha, draws))
            if known is not None:
                return {"state": "done", **known}
            job = self._job
            if job is None or (job.alpha, job.draws) != (alpha, draws) or job.cancelled.is_set():
                if job is not None:
                    job.cancelled.set()
                job = self._job = Job(alpha, draws)
                threading.Thread(target=self._run, args=(job,), daemon=True).start()
            if job.error is not None:
                self._job = None  # asking again tries again
                return {"state": "failed", "message": job.error}
            return {"state": "running", "stage": job.stage, "done": job.done, "total": job.total, **job.so_far}

    @property
    def busy(self) -> bool:
        """Whether something is being computed."""
        with self._lock:
            job = self._job
            return job is not None and job.running

    def stop(self) -> None:
        with self._lock:
            if self._job is not None:
                self._job.cancelled.set()

    def _run(self, job: Job) -> None:
        try:
            compute(self.lineup, job, self.images, self.radii, self._attacked)
            with self._lock:
                self._done[job.alpha, job.draws] = job.so_far
        except Stopped:
            pass
        except InputError as error:
            job.error = str(error)
        except Exception as error:  # a model of the user's may raise anything; the page must hear of it
            job.error = f"the computation failed ({type(error).__name__})"
            raise
        finally:
            job.running = False

    def _attacked(self, aim: str, radius: float, job: Job) -> Tensor:
        """Attacked gallery images: the same for every alpha and number of draws, so kept."""
        if (aim, radius) not in self._crafted:
            gallery, parts = self.lineup.subject.gallery, []
            for part in torch.arange(self.images).split(CHUNK):
                parts.append(craft(self.lineup, aim, gallery.images[part], gallery.labels[part], part, radius))
                job.step(len(part))
            self._crafted[aim, radius] = torch.cat(parts)
        else:
            job.step(self.images)
        return self._crafted[aim, radius]


def spread(values: list[float], count: int) -> list[float]:
    """``count`` of the values at even distances, the last among them.

    Example:
        >>> spread([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 3)
        [2.0, 4.0, 6.0]
    """
    if len(values) <= count:
        return list(values)
    return [values[round((i + 1) * len(values) / count) - 1] for i in range(count)]


def compute(
    lineup: Lineup, job: Job, images: int, radii: list[float], attacked: Callable[[str, float, Job], Tensor]
) -> None:
    """Mean size and coverage of every method at every epsilon, clean and attacked with radius epsilon.

    What is known is in ``job.so_far`` at once: methods one by one, then the attacked radii.
    """
    gallery, every = lineup.subject.gallery, len(lineup.contenders)
    kinds = ("plain", "smoothed") if lineup.subject.noise.certifies else ("plain",)
    job.total = every * (len(gallery) + len(radii) * len(kinds) * images) + len(radii) * len(kinds) * images
    rows: dict[str, dict[str, Any]] = {}

    def publish() -> None:
        job.so_far = {
            "alpha": job.alpha,
            "draws": job.draws,
            "epsilons": list(lineup.epsilons),
            "images": len(gallery),
            "attacked_images": images,
            "methods": {key: {**row, "attacked": list(row["attacked"])} for key, row in rows.items()},
        }

    def masks(key: str, pixels: Tensor, upto: float) -> Tensor:
        epsilons, parts = [e for e in lineup.epsilons if e <= upto], []
        predictor = lineup.predictor(key, job.alpha, job.draws)
        for part in torch.arange(len(pixels)).split(CHUNK):
            parts.append(own_sets(predictor, pixels[part], part, job.alpha, epsilons, lineup.stream))
            job.step(len(part))
        return nested(torch.cat(parts, dim=1))

    for contender in lineup.contenders:
        job.stage = f"{contender.title} on {len(gallery)} clean images"
        sets = masks(contender.key, gallery.images, lineup.epsilons[-1])
        measured = [measure(mask, gallery.labels) for mask in sets]
        rows[contender.key] = {
            "size": [_size(one) for one in measured],
            "clean": [one.coverage.__dict__ for one in measured],
            "attacked": [],
        }
        publish()
    for radius in radii:
        found: dict[str, list[dict[str, Any]]] = {key: [] for key in rows}
        for kind in kinds:
            job.stage = f"attacking {images} images within L2 {radius:g}"
            pixels = attacked(kind, radius, job)
            for contender in lineup.contenders:
                job.stage = f"{contender.title} on images attacked within L2 {radius:g}"
                covered = measure(masks(contender.key, pixels, radius)[-1], gallery.labels[:images]).coverage
                found[contender.key].append({"radius": radius, "aim": kind, **covered.__dict__})
        for key, attempts in found.items():
            rows[key]["attacked"].append(min(attempts, key=lambda one: one["mean"]))  # the worse of the attacks
        publish()


def _size(measured: Evaluation) -> dict[str, float]:
    low, high = measured.size_interval
    return {"mean": measured.size, "low": low, "high": high}
