"""Holdout, calibration and test points: disjoint index sets, drawn by seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from keepcover.errors import InputError


@dataclass(frozen=True)
class Split:
    """Disjoint index sets."""

    holdout: Tensor
    calibration: Tensor
    test: Tensor

    @property
    def calibration_with_holdout(self) -> Tensor:
        """What methods that never look at the holdout calibrate on."""
        return torch.cat([self.calibration, self.holdout])


def random_splits(
    n: int, count: int, holdout: int, seed: int, redraw_holdout: bool = False, calibration: int | None = None
) -> Iterator[Split]:
    """A holdout, fixed per seed unless redrawn, and random halves of the rest; or so many calibration points.

    Example:
        >>> split = next(random_splits(10_000, 1, holdout=500, seed=0))
        >>> len(split.holdout), len(split.calibration), len(split.test)
        (500, 4750, 4750)
    """
    if not 0 < holdout <= n - 2:
        raise InputError(f"expected a holdout of 1 to {n - 2} of the {n} points, got {holdout}")
    if count < 1:
        raise InputError(f"expected at least one split, got {count}")
    generator = torch.Generator().manual_seed(seed)
    order, half = torch.randperm(n, generator=generator), (n - holdout) // 2 if calibration is None else calibration
    if not 0 < half < n - holdout:
        raise InputError(f"expected 1 to {n - holdout - 1} calibration points beside {holdout} held out, got {half}")
    for _ in range(count):
        if redraw_holdout:
            order = torch.randperm(n, generator=generator)
        mixed = order[holdout:][torch.randperm(n - holdout, generator=generator)]
        yield Split(order[:holdout], mixed[:half], mixed[half:])
