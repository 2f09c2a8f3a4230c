"""Holdout, calibration and test points: disjoint index sets, drawn by seed, and the sizes the paper uses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from keepcover.errors import InputError

PAPER_HOLDOUT = 500
PAPER_SPLITS = 50
TEST_SIZES = {"cifar10": 10_000, "cifar100": 10_000, "imagenet": 50_000}


@dataclass(frozen=True)
class Split:
    """Disjoint index sets. ``more`` is what methods that never look at the holdout calibrate on."""

    holdout: Tensor
    calibration: Tensor
    test: Tensor

    @property
    def more(self) -> Tensor:
        return torch.cat([self.calibration, self.holdout])

    def to(self, device: torch.device) -> Split:
        return Split(self.holdout.to(device), self.calibration.to(device), self.test.to(device))


def random_splits(n: int, count: int, holdout: int, seed: int, redraw_holdout: bool = False) -> Iterator[Split]:
    """A holdout, fixed per seed unless redrawn, and random halves of the rest.

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
    order = torch.randperm(n, generator=generator)
    held, rest = order[:holdout], order[holdout:]
    for _ in range(count):
        if redraw_holdout:
            order = torch.randperm(n, generator=generator)
            held, rest = order[:holdout], order[holdout:]
        mixed = rest[torch.randperm(len(rest), generator=generator)]
        yield Split(held, mixed[: len(rest) // 2], mixed[len(rest) // 2 :])


def paper_splits(name: str, seed: int = 0, count: int = PAPER_SPLITS) -> Iterator[Split]:
    """The paper's splits of a test set: 500 holdout points, fixed per seed, and random halves of the rest.

    Example:
        >>> split = next(paper_splits("imagenet"))
        >>> len(split.holdout), len(split.calibration), len(split.test)
        (500, 24750, 24750)
    """
    if name not in TEST_SIZES:
        raise InputError(f"the paper splits {', '.join(TEST_SIZES)}, got {name!r}; use random_splits for other data")
    return random_splits(TEST_SIZES[name], count, PAPER_HOLDOUT, seed)
