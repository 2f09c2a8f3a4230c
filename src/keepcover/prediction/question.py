"""What is asked of a calibration, apart from data and model: task, method, levels, promise and budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from keepcover.bounds import exact_level
from keepcover.engine.inputs import in_order
from keepcover.errors import InputError, warn
from keepcover.methods import Asked, Method
from keepcover.noise import Noise, Threat, get_noise
from keepcover.promises import Promise, Sample
from keepcover.scores import Reading
from keepcover.tasks import Task

DRAWS = 16  # per query, where the user names none
Level = tuple[float, float]  # (alpha, epsilon)
Shape = tuple[int, ...] | None  # of one input, where it is known


@dataclass(frozen=True)
class Question:
    """What the user asked for, apart from data, model and noise.

    Attributes:
        task: what outputs mean.
        method: with its options.
        levels: every (alpha, epsilon), in the order they were named.
        norm: in which epsilon is measured; None for the noise's own.
        promise: for whom, how surely and despite what.
        draws: model evaluations per query.
        calibration_draws: model evaluations per calibration point that were asked for; None for the method's usual number.
    """

    task: Task
    method: Method
    levels: tuple[Level, ...]
    norm: str | None = None
    promise: Promise = Promise()
    draws: int = 1
    calibration_draws: int | None = None

    def __post_init__(self) -> None:
        if self.draws < 1 or (self.calibration_draws is not None and self.calibration_draws < 1):
            raise InputError(f"expected at least 1 draw, got {self.draws} (calibration {self.calibration_draws})")
        object.__setattr__(self, "method", self.method.suited(self.task))

    @property
    def reading(self) -> Reading:
        """How calibration items are kept: the score, or its order where that will do."""
        return Reading(self.method.compares_only or self.method.transform is not None)

    @property
    def needs_holdout(self) -> bool:
        """Whether the method, or the promise, chooses something on a holdout."""
        return self.method.needs_holdout or self.promise.needs_holdout

    @property
    def used(self) -> tuple[int, int]:
        """Model evaluations per query and per calibration point."""
        usual = self.method.usual_calibration_draws(self.draws)
        return self.method.draws_used(self.draws, usual if self.calibration_draws is None else self.calibration_draws)

    def asked(self, level: Level, noise: Noise, n: int, shape: Shape) -> Asked:
        threat = Threat(noise, level[1], self.norm, shape)
        return Asked(level[0], threat, self.draws, n, self.task.candidates, self.used[1], self.promise)

    def check(self, noise: Noise, n: int | None, shape: Shape) -> None:
        """Impossible promises are refused before the network runs; n is checked again once it is known exactly."""
        for level in self.levels:
            self.method.check(self.asked(level, noise, n or 10**9, shape), self.task)

    def groups(self, data: Any, calibrating: Tensor | slice) -> Tensor | None:
        """The groups of the calibration points among the data, or among so many, where the promise is per group."""
        if self.promise.groups is None:
            return None
        n = in_order(data)
        if n is None:
            raise InputError("a promise per group needs data whose number is known: arrays or a dataset, not a stream")
        codes = self.promise.groups.codes
        if codes is None or len(codes) != n:
            found = "only their names" if codes is None else f"{len(codes)} of them"
            raise InputError(f"expected the group of each of {n} points, Promise(per=groups), got {found}")
        return codes[calibrating]

    def warn_of_few(self, label: Tensor | None, group: Tensor | None) -> None:
        """Name the classes and groups with too few points for any threshold, before the network runs."""
        promise, known = self.promise, label if group is None else group
        if promise.partition is None or promise.needs_holdout or known is None:
            return
        names = promise.groups.per if group is not None else getattr(self.task, "class_names", None)
        classes = self.task.candidates or (len(names) if names else int(known.max()) + 1)
        if group is None and len(known) and int(known.max()) >= classes:
            raise InputError(f"expected labels between 0 and {classes - 1}, of {classes} classes, got {known.max()}")
        cell: Any = promise.partition.cells(Sample(known, label=label, group=group))
        points = cell.bincount(minlength=promise.cells(classes))
        least = min(promise.points_needed(promise.level(a) - exact_level(self.method.spent)) for a, _ in self.levels)
        unit = promise.partition.unit
        few = [(names[at] if names and unit != "cluster" else at, int(points[at])) for at in (points < least).nonzero()]
        if few:
            listed = ", ".join(f"{name} ({count})" for name, count in few[:12]) + (", ..." if len(few) > 12 else "")
            what = "sets are full" if unit == "group" else "labels are in every set"
            pool = "; clusters='auto' pools classes that behave alike" if unit == "class" else ""
            units = f"{len(few)} of {len(points)} {unit}{'e' if unit == 'class' else ''}s"
            less = f"fewer than the {least} calibration points that the promise needs"
            warn(f"{units} have {less}, so their {what}: {listed}{pool}")


def budget(
    noise: Noise, draws: int | None, calibration_draws: int | None, shape: Shape, usual: int = DRAWS
) -> tuple[int, int | None]:
    """Model evaluations per query and per calibration point: as asked for, or all that a deterministic noise has.

    Example:
        >>> from keepcover.noise import Bands
        >>> budget(get_noise(0.25), None, None, None), budget(Bands(4), None, None, (3, 32, 32))
        ((16, None), (32, 32))
    """
    if not noise.deterministic:
        return usual if draws is None else draws, calibration_draws
    if shape is None:
        raise InputError(f"{noise} are as many as an image has columns: give shape=, or data in memory")
    every = noise.positions(shape)
    if {draws, calibration_draws} - {None, every}:
        raise InputError(f"{noise} of {list(shape)} are {every} evaluations, no more and no less; leave draws out")
    return every, every


def levels_of(alpha: Any, epsilon: Any) -> tuple[Level, ...]:
    """Every alpha with every epsilon."""
    return tuple((a, e) for a in numbers(alpha, "alpha") for e in numbers(epsilon, "epsilon"))


def numbers(values: Any, name: str) -> list[float]:
    """One or several levels as the user typed them: a float32 0.1 is meant as 1/10."""
    many = values if isinstance(values, Sequence) and not isinstance(values, str) else [values]
    try:
        listed = [float(str(np.asarray(v)[()])) for v in many]
    except (TypeError, ValueError):
        raise InputError(f"expected one or several numbers for {name}, got {values!r}") from None
    if not listed or len(set(listed)) != len(listed):
        raise InputError(f"expected one or several distinct values of {name}, got {values!r}")
    return listed


def one_noise(sigma: float | str | None, noise: Noise | str | None) -> Noise:
    """The noise that a user named, as sigma or as another."""
    if (sigma is None) == (noise is None) or isinstance(sigma, str):
        what = 'the standard deviation of Gaussian noise (epsilon to 2 epsilon works well; calibrate takes "auto" too)'
        raise InputError(f"expected sigma, {what}, or another noise=..., and not both")
    return get_noise(noise if noise is not None else float(sigma or 0.0))
