"""How everything here is timed: two sides in turn in one process, the ratio of neighbours, its median and its range."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.special import stdtrit

Work = Callable[[], object]
Row = dict[str, Any]


class SkippedError(Exception):
    """A measurement that this machine cannot make, and why."""


@dataclass(frozen=True)
class Options:
    """What one run of the driver asks of every measurement.

    Attributes:
        device: where networks run.
        compile: run them through ``torch.compile``.
        quick: tiny sizes, to see that the scripts work; the numbers mean nothing.
        data: a folder with CIFAR-10 as its authors published it; random images where there is none.
    """

    device: str = "cpu"
    compile: bool = False
    quick: bool = False
    data: Path | None = None

    @property
    def kind(self) -> str:
        """``cpu`` or ``cuda``, whichever of them."""
        return torch.device(self.device).type

    @property
    def gpu(self) -> bool:
        return self.kind == "cuda"

    def pick(self, quick: Any, cpu: Any, gpu: Any = None) -> Any:
        """A size that suits the machine."""
        return quick if self.quick else gpu if self.gpu and gpu is not None else cpu

    @property
    def repeats(self) -> int:
        return self.pick(1, 5, 7)


def seconds(work: Work, device: str = "cpu") -> float:
    """Wall-clock of one call, everything it started on a GPU included.

    Not CUDA events: those time one stream, and an engine that overlaps copies with computing uses several.
    """
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - start


def in_turn(sides: Mapping[str, Work], repeats: int, device: str = "cpu", warm_up: int = 1) -> dict[str, list[float]]:
    """Seconds of every side, A B A B ...: a machine that slows down slows both. The first rounds are not counted."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(warm_up + repeats):
        for name, work in sides.items():
            took = seconds(work, device)
            if turn >= warm_up:
                times[name].append(took)
    return times


def alone(name: str, times: Sequence[float], sizes: dict[str, Any], **more: Any) -> Row:
    """A row of something that has nothing beside it: seconds, and the range they lay in."""
    nothing = {"baseline": None, "baseline_seconds": None, "ratio": None, "spread": [min(times), max(times)]}
    return {"name": name, "seconds": statistics.median(times), **nothing, "sizes": sizes, **more}


def beside(
    name: str,
    times: Sequence[float],
    baseline: str,
    other: Sequence[float],
    sizes: dict[str, Any],
    work: float = 1.0,
    other_work: float = 1.0,
    inverse: bool = False,
    **more: Any,
) -> Row:
    """A row of two sides: medians, the median ratio of neighbouring runs and its range.

    Args:
        name, times: what is measured.
        baseline, other: what it is compared with.
        sizes: how large the work was.
        work, other_work: units of work that each side did in one run; seconds and ratio are per unit.
        inverse: the ratio is how many times faster we are, instead of how many times the baseline's time we take.
    """
    mine, theirs = [t / work for t in times], [t / other_work for t in other]
    ratios = [b / a if inverse else a / b for a, b in zip(mine, theirs, strict=True)]
    return {
        "name": name,
        "seconds": statistics.median(mine),
        "baseline": baseline,
        "baseline_seconds": statistics.median(theirs),
        "ratio": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
        "sizes": sizes,
        **({"inverse": True} if inverse else {}),
        **more,
    }


def goal(row: Row, *, at_most: float | None = None, at_least: float | None = None, of: str = "ratio") -> Row:
    """The row with what it is held to and whether it is met."""
    limit = at_most if at_most is not None else at_least
    met = row[of] <= limit if at_most is not None else row[of] >= limit  # type: ignore[operator]
    text = f"{of} {'<=' if at_most is not None else '>='} {limit:g}"
    return {**row, "goal": text, "met": bool(met)}


@dataclass(frozen=True)
class Exponent:
    """seconds ~ size ** exponent, with its 95 % interval."""

    exponent: float
    low: float
    high: float


def fit_exponent(sizes: Sequence[float], times: Sequence[float]) -> Exponent:
    """Least squares on logarithms; the interval is Student's.

    Example:
        >>> sizes = [1.0, 2.0, 4.0, 8.0]
        >>> found = fit_exponent(sizes, [3 * size**1.5 for size in sizes])
        >>> round(found.exponent, 6)
        1.5
    """
    if len(sizes) != len(times) or len(set(sizes)) < 3:
        raise ValueError(f"expected at least three sizes and a time for each, got {len(sizes)} and {len(times)}")
    x, y = np.log(sizes), np.log(times)
    spread = ((x - x.mean()) ** 2).sum()
    slope = float(((x - x.mean()) * y).sum() / spread)
    residual = y - y.mean() - slope * (x - x.mean())
    error = math.sqrt((residual**2).sum() / (len(x) - 2) / spread)
    half = float(stdtrit(len(x) - 2, 0.975)) * error
    return Exponent(slope, slope - half, slope + half)


def grown(name: str, variable: str, points: Mapping[int, Sequence[float]], sizes: dict[str, Any], **more: Any) -> Row:
    """A row of how time grows with one size: the exponent over every run, its interval, and the times."""
    pairs = [(size, one) for size, times in points.items() for one in times]
    found = fit_exponent([size for size, _ in pairs], [one for _, one in pairs])
    row = alone(name, points[max(points)], {**sizes, variable: list(points)}, spread=None, variable=variable)
    medians = [[size, statistics.median(times)] for size, times in points.items()]
    return {**row, "exponent": found.exponent, "interval": [found.low, found.high], "points": medians, **more}
