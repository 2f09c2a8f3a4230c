"""Attacks on what is on show, by the library's own attacks, and curves of size and coverage under them.

The attacker's noise is its own stream. Curves are computed in the background while the page stays usable.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from keepcover.attacks import Margin, NoisyModel, mean_softmax, pgd
from keepcover.errors import InputError
from keepcover.explore.lineup import Contender, Lineup
from keepcover.noise import Stream, get_norm
from keepcover.prediction.predictor import Predictor
from keepcover.tasks.metrics import measure

ATTACKED, RADII, CHUNK = 200, 4, 16  # of the curves: images, radii, images at a time
STEPS, DRAWS = 20, 32
TITLES = {
    "plain": "PGD on the plain model",
    "smoothed": "SmoothAdv on the model under noise",
    "margin": "PGD on the certified rule's own margin",
}
# What became of a label, by whether it was in the set before and is after.
FATES = {(True, True): "kept", (True, False): "lost", (False, False): "missed", (False, True): "gained"}


def craft(
    lineup: Lineup, aim: str, images: Tensor, labels: Tensor, ids: Tensor, radius: float, target: Any = mean_softmax
) -> Tensor:
    """Attacked images within the radius; ``target`` is the one-level predictor whose margin is attacked, if any."""
    subject, stream = lineup.subject, Stream(lineup.seed + 2, "attack")
    smoother = lineup.smoothers[aim != "plain"]
    noisy = NoisyModel(smoother.model, smoother.noise, DRAWS, stream, smoother.autocast)
    how: dict[str, Any] = {"clip": subject.clip, "device": smoother.device, "gradients": subject.gradients}
    how |= {"steps": STEPS if subject.gradients else 5 * STEPS, "ids": ids, "progress": False, "norm": subject.norm}
    loss = Margin(target, stream) if isinstance(target, Predictor) else target
    with lineup.lock:
        return pgd(noisy, images, labels, radius, loss=loss, **how)


@dataclass(frozen=True)
class Attempt:
    """One attack on one image: what it made, and each method's nested set before and after, as lists of labels."""

    aim: str
    attacked: Tensor
    change: Tensor
    distance: float
    before: dict[str, list[int]]
    after: dict[str, list[int]]

    def fates(self, label: int) -> dict[str, str]:
        """Per method: ``kept``, ``lost``, ``missed`` (never in the set) or ``gained``."""
        return {key: FATES[label in self.before[key], label in self.after[key]] for key in self.before}


def attack_one(
    lineup: Lineup, image: Tensor, label: int, id: int, alpha: float, draws: int, epsilon: float
) -> list[Attempt]:
    """Every attack on one image [1, c, h, w] at one epsilon: the plain model's always, the others where there is noise."""
    labels, ids, norm = torch.tensor([label]), torch.tensor([id]), get_norm(lineup.subject.norm)

    def sets(pixels: Tensor) -> dict[str, list[int]]:
        masks = {one.key: lineup.sets(one.key, alpha, draws, pixels, ids, epsilon) for one in lineup.contenders}
        return {key: mask[-1, 0].nonzero()[:, 0].tolist() for key, mask in masks.items()}

    attempts, before = [], sets(image)
    last = lineup.predictor(lineup.contenders[-1].key, alpha, draws)  # the exact one, or the saved one
    for aim in TITLES if lineup.subject.noise.certifies else ["plain"]:
        target = last.at(alpha, epsilon) if aim == "margin" else mean_softmax
        attacked = craft(lineup, aim, image, labels, ids, epsilon, target)
        change = attacked.double() - image.double()
        attempts.append(Attempt(aim, attacked, change, float(norm.length(change)[0]), before, sets(attacked)))
    return attempts


def find_lost(lineup: Lineup, alpha: float, draws: int, epsilon: float, after: int) -> dict[str, Any]:
    """The next gallery image from which the attack on the plain model drives the first method's label out.

    Images whose label was not in the clean set do not count. Returns its index (None where there is none) and how many
    images were tried.
    """
    gallery, first, tried = lineup.subject.gallery, lineup.contenders[0], 0
    for part in torch.arange(len(gallery)).roll(-(after + 1)).split(16):
        images, labels = gallery[part].pair
        attacked = craft(lineup, "plain", images, labels, part, epsilon)
        masks = [lineup.sets(first.key, alpha, draws, some, part, epsilon)[-1] for some in (images, attacked)]
        clean, hit = (mask.gather(1, labels[:, None])[:, 0] for mask in masks)
        lost = (clean & ~hit).nonzero()[:, 0]
        if len(lost):
            return {"index": int(part[lost[0]]), "tried": tried + int(lost[0]) + 1}
        tried += len(part)
    return {"index": None, "tried": tried}


# -- curves -------------------------------------------------------------------------------------------------------------


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
    thread: threading.Thread = field(default_factory=threading.Thread)

    def step(self, count: int) -> None:
        self.done += count
        if self.cancelled.is_set():
            raise Stopped

    def parts(self, stage: str, images: int) -> Iterator[Tensor]:
        """The positions of so many images, a few at a time; after each of them a step."""
        self.stage = stage
        for part in torch.arange(images).split(CHUNK):
            yield part
            self.step(len(part))


class Curves:
    """Curves by (alpha, draws). One job runs at a time; asking for another one stops it."""

    def __init__(self, lineup: Lineup) -> None:
        self.lineup = lineup
        self.images = min(ATTACKED, len(lineup.subject.gallery))
        self.radii = spread([e for e in lineup.epsilons if e > 0], RADII)
        self._done: dict[tuple[float, int], dict[str, Any]] = {}
        self._crafted: dict[tuple[str, float], Tensor] = {}
        self._job = Job(0.0, 0)  # of nothing yet
        self._lock = threading.Lock()

    def ask(self, alpha: float, draws: int) -> dict[str, Any]:
        """The curves, or where their computation stands; the first call starts it."""
        with self._lock:
            known = self._done.get((alpha, draws))
            if known is not None:
                return {"state": "done", **known}
            job = self._job
            if (job.alpha, job.draws) != (alpha, draws) or job.cancelled.is_set():
                job.cancelled.set()
                job = self._job = Job(alpha, draws)
                job.thread = threading.Thread(target=self._run, args=(job,), daemon=True)
                job.thread.start()
            if job.error is not None:
                job.cancelled.set()  # asking again tries again
                return {"state": "failed", "message": job.error}
            return {"state": "running", "stage": job.stage, "done": job.done, "total": job.total, **job.so_far}

    @property
    def busy(self) -> bool:
        """Whether something is being computed."""
        return self._job.thread.is_alive()

    def stop(self) -> None:
        with self._lock:
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
        lineup, images, gallery = self.lineup, self.images, self.lineup.subject.gallery
        kinds = ("plain", "smoothed") if lineup.subject.noise.certifies else ("plain",)
        attacks = len(self.radii) * len(kinds) * images
        job.total = len(lineup.contenders) * (len(gallery) + attacks) + attacks
        about = {"alpha": job.alpha, "draws": job.draws, "epsilons": list(lineup.epsilons)}
        about |= {"images": len(gallery), "attacked_images": images}
        rows: dict[str, dict[str, Any]] = {}

        def masks(one: Contender, where: str, pixels: Tensor, upto: float) -> Tensor:
            asked, parts = (one.key, job.alpha, job.draws), job.parts(f"{one.title} on {where}", len(pixels))
            return torch.cat([lineup.sets(*asked, pixels[part], part, upto) for part in parts], dim=1)

        for one in lineup.contenders:
            sets = masks(one, f"{len(gallery)} clean images", gallery.images, lineup.epsilons[-1])
            measured = [measure(mask, gallery.labels) for mask in sets]
            sizes = [{"mean": m.size, "low": m.size_interval[0], "high": m.size_interval[1]} for m in measured]
            rows[one.key] = {"size": sizes, "clean": [m.coverage.__dict__ for m in measured], "attacked": []}
            job.so_far = {**about, "methods": dict(rows)}
        for radius in self.radii:
            found: dict[str, list[dict[str, Any]]] = {key: [] for key in rows}
            within = f"within {get_norm(lineup.subject.norm).reach(radius)}"
            for kind in kinds:
                pixels = self._attacked(kind, radius, f"attacking {images} images {within}", job)
                for one in lineup.contenders:
                    sets = masks(one, f"images attacked {within}", pixels, radius)
                    covered = measure(sets[-1], gallery.labels[:images]).coverage
                    found[one.key].append({"radius": radius, "aim": kind, **covered.__dict__})
            for key, attempts in found.items():
                worst = min(attempts, key=lambda attempt: attempt["mean"])
                rows[key] = {**rows[key], "attacked": [*rows[key]["attacked"], worst]}
            job.so_far = {**about, "methods": dict(rows)}

    def _attacked(self, aim: str, radius: float, stage: str, job: Job) -> Tensor:
        """Attacked gallery images: the same for every alpha and number of draws, so kept."""
        if (aim, radius) in self._crafted:
            job.step(self.images)
        else:
            gallery, parts = self.lineup.subject.gallery, job.parts(stage, self.images)
            made = [craft(self.lineup, aim, *gallery[part].pair, part, radius) for part in parts]
            self._crafted[aim, radius] = torch.cat(made)
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
