"""What a table is made of: where its numbers come from, how each is computed, and what the paper printed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from keepcover.evaluation.splits import Request

CALIBRATION_DRAWS = 64  # of the exact certificates with few draws per query


@dataclass(frozen=True)
class Source:
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


@dataclass(frozen=True)
class Printed:
    """What the paper prints; None where it prints nothing."""

    size: float | None = None
    size_std: float | None = None
    coverage: float | None = None
    coverage_std: float | None = None


@dataclass(frozen=True)
class Cell:
    """One entry of a table: its place, how to compute it, what was printed there."""

    row: str
    column: str
    source: Source
    score: str
    request: Request
    attacked: bool = False
    paper: Printed = Printed()
    beyond: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {"row": self.row, "column": self.column, "head": self.source.head, "beyond": self.beyond}


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
        return {cell.source.dataset for cell in self.cells}

    @property
    def rows(self) -> list[str]:
        return list(dict.fromkeys(cell.row for cell in self.cells))

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(cell.column for cell in self.cells))


def beyond(
    column: str, source: Source, score: str, epsilon: float, attacked: bool = False, draws: int = 256
) -> list[Cell]:
    """What goes beyond the paper, in the same column: the exact certificates from one draw on, and other published ones."""
    few: dict[str, Any] = {"calibration_draws": min(CALIBRATION_DRAWS, draws)}
    requests = {
        **{
            f"exact, {n} draw{'s' if n > 1 else ''}": Request("exact_asymmetric", epsilon, draws=n, **few)
            for n in (1, 4, 16)
        },
        **{f"exact, {n} draws": Request("exact", epsilon, draws=n) for n in (64, 256)},
        "RCP1, 1 draw": Request("rcp1", epsilon, draws=1),
        "BinCP, 256 draws": Request("bincp", epsilon, draws=256),
        "CAS, 256 draws": Request("cas", epsilon, draws=256),
    }
    return [
        Cell(row, column, source, score, request, attacked, beyond=True)
        for row, request in requests.items()
        if (request.draws or 1) <= draws
    ]
