"""Size and coverage of the lineup on the gallery, computed in the background while the page stays usable."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from keepcover.errors import InputError
from keepcover.explore.attacking import craft
from keepcover.explore.lineup import Lineup
from keepcover.noise import get_norm
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
    so_far: dict[str, Any] = field(default_factory=dict)  # the curves as far as they are known
    error: str | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None

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
                job.thread = threading.Thread(target=self._run, args=(job,), daemon=True)
                job.thread.start()
            if job.error is not None:
                self._job = None  # asking again tries again
                return {"state": "failed", "message": job.error}
            return {"state": "running", "stage": job.stage, "done": job.done, "total": job.total, **job.so_far}

    @property
    def busy(self) -> bool:
        """Whether something is being computed."""
        job = self._job
        return job is not None and job.thread is not None and job.thread.is_alive()

    def stop(self) -> None:
        with self._lock:
            if self._job is not None:
                self._job.cancelled.set()

    def _run(self, job: Job) -> None:
        try:
            self.compute(job)
            with self._lock:
                self._done[job.alpha, job.draws] = job.so_far
        except Stopped:
            pass
        except InputError as error:
            job.error = str(error)
        except Exception as error:  # a model of the user's may raise anything; the page must hear of it
            job.error = f"the computation failed ({type(error).__name__})"
            raise

    def compute(self, job: Job) -> None:
        """Mean size and coverage of every method at every epsilon, clean and attacked with radius epsilon.

        What is known is in ``job.so_far`` at once: methods one by one, then the attacked radii.
        """
        lineup, images, radii = self.lineup, self.images, self.radii
        gallery = lineup.subject.gallery
        kinds = ("plain", "smoothed") if lineup.subject.noise.certifies else ("plain",)
        attacks = len(radii) * len(kinds) * images
        job.total = len(lineup.contenders) * (len(gallery) + attacks) + attacks
        rows: dict[str, dict[str, Any]] = {}

        def publish() -> None:
            methods = {key: {**row, "attacked": list(row["attacked"])} for key, row in rows.items()}
            about = {"alpha": job.alpha, "draws": job.draws, "epsilons": list(lineup.epsilons)}
            job.so_far = {**about, "images": len(gallery), "attacked_images": images, "methods": methods}

        def masks(key: str, pixels: Tensor, upto: float) -> Tensor:
            parts = []
            for part in torch.arange(len(pixels)).split(CHUNK):
                parts.append(lineup.sets(key, job.alpha, job.draws, pixels[part], part, upto))
                job.step(len(part))
            return torch.cat(parts, dim=1)

        for contender in lineup.contenders:
            job.stage = f"{contender.title} on {len(gallery)} clean images"
            sets = masks(contender.key, gallery.images, lineup.epsilons[-1])
            measured = [measure(mask, gallery.labels) for mask in sets]
            sizes = [{"mean": one.size, "low": one.size_interval[0], "high": one.size_interval[1]} for one in measured]
            clean = [one.coverage.__dict__ for one in measured]
            rows[contender.key] = {"size": sizes, "clean": clean, "attacked": []}
            publish()
        reach = get_norm(lineup.subject.norm).reach
        for radius in radii:
            found: dict[str, list[dict[str, Any]]] = {key: [] for key in rows}
            for kind in kinds:
                job.stage = f"attacking {images} images within {reach(radius)}"
                pixels = self._attacked(kind, radius, job)
                for contender in lineup.contenders:
                    job.stage = f"{contender.title} on images attacked within {reach(radius)}"
                    covered = measure(masks(contender.key, pixels, radius)[-1], gallery.labels[:images]).coverage
                    found[contender.key].append({"radius": radius, "aim": kind, **covered.__dict__})
            for key, attempts in found.items():
                rows[key]["attacked"].append(min(attempts, key=lambda one: one["mean"]))  # the worse of the attacks
            publish()

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
