"""What a table is made of: where its numbers come from, how each is computed, and what the paper printed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from keepcover.evaluation import Entry
from keepcover.methods import get_method
from keepcover.scores import PTT
from keepcover.tasks import Classification

CALIBRATION_DRAWS = 64  # of the exact certificates with few draws per query


@dataclass(frozen=True)
class Origin:
    """A network under noise on a dataset: its noisy outputs are all that a table needs.

    Attributes:
        dataset: ``cifar10``, ``cifar100`` or ``imagenet``.
        sigma: the noise at calibration and test; 0 runs the network as it is.
        head: ``base``, or a conformally trained last layer: ``conftr``, ``rct`` or ``exact``.
        epsilon: the radius that head was trained for.
        trained: the noise its weights were trained at, where it differs.
    """

    dataset: str
    sigma: float
    head: str = "base"
    epsilon: float = 0.0
    trained: float | None = None

    @property
    def weights(self) -> str:
        """The name of the base weights."""
        network = "resnet50" if self.dataset == "imagenet" else "resnet110"
        return f"{self.dataset}-{network}-sigma{self.trained or self.sigma:g}"


def head_name(base: str, kind: str, epsilon: float) -> str:
    """The file name of a head without its suffix; ConfTr knows no epsilon.

    Example:
        >>> head_name("cifar10-resnet110-sigma0.25", "rct", 0.125)
        'cifar10-resnet110-sigma0.25-rct-epsilon0.125'
    """
    return f"{base}-conftr" if kind == "conftr" else f"{base}-{kind}-epsilon{epsilon:g}"


@dataclass(frozen=True)
class Printed:
    """What the paper prints; None where it prints nothing."""

    size: float | None = None
    size_std: float | None = None
    coverage: float | None = None
    coverage_std: float | None = None


@dataclass(frozen=True)
class Cell:
    """One place of a table: how to compute it, and what was printed there."""

    row: str
    column: str
    origin: Origin
    entry: Entry
    attacked: bool = False
    paper: Printed = Printed()
    beyond: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {"row": self.row, "column": self.column, "head": self.origin.head, "beyond": self.beyond}


@dataclass(frozen=True)
class Table:
    """A table of the paper."""

    name: str
    title: str
    where: str
    cells: tuple[Cell, ...]
    note: str = ""

    @property
    def datasets(self) -> set[str]:
        return {cell.origin.dataset for cell in self.cells}

    @property
    def rows(self) -> list[str]:
        return list(dict.fromkeys(cell.row for cell in self.cells))


def entry(
    method: str,
    epsilon: float,
    score: str,
    draws: int,
    transform: PTT | None = None,
    calibration_draws: int | None = None,
) -> Entry:
    """A method as the paper runs it: without a transform unless one is given, which methods that only compare ignore.

    Example:
        >>> entry("rscp", 0.125, "aps", 256, PTT(T=1 / 100)).method
        RSCP(transform=PTT(T=0.01))
    """
    known = get_method(method)
    chosen = known if known.compares_only else get_method(known, transform=transform)
    return Entry(chosen, epsilon, draws, calibration_draws, task=Classification(score))


def beyond(
    column: str, origin: Origin, score: str, epsilon: float, attacked: bool = False, draws: int = 256
) -> list[Cell]:
    """What goes beyond the paper, in the same column: the exact certificates from one draw on, and other published ones."""
    few = min(CALIBRATION_DRAWS, draws)
    every = {
        f"exact, {n} draw{'s' if n > 1 else ''}": entry("exact_asymmetric", epsilon, score, n, calibration_draws=few)
        for n in (1, 4, 16)
    }
    every |= {f"exact, {n} draws": entry("exact", epsilon, score, n) for n in (64, 256)}
    every |= {
        "RCP1, 1 draw": entry("rcp1", epsilon, score, 1),
        "BinCP, 256 draws": entry("bincp", epsilon, score, 256),
        "CAS, 256 draws": entry("cas", epsilon, score, 256),
    }
    return [
        Cell(row, column, origin, one, attacked, beyond=True) for row, one in every.items() if (one.draws or 1) <= draws
    ]
