"""One runner for every table: group the cells by what they need, evaluate each group once, fill the places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from holdfast.experiments.reproduce.cells import Cell, Source, Table
from holdfast.experiments.reproduce.material import Material
from holdfast.experiments.splits import Request, Row, evaluate_requests

BASE_DRAWS = 256  # what the paper uses, and what rules are tuned on unless a cell asks for more

Computed = dict[tuple[Source, str, Request, bool], Row]


def available(cell: Cell) -> int:
    """Draws of the logits that a cell is evaluated on; without noise all draws are one."""
    return max(BASE_DRAWS, cell.request.draws or BASE_DRAWS) if cell.source.sigma else 1


def compute(
    cells: Sequence[Cell], material: Material, known: Computed, *, splits: int = 50, say: Callable[[str], None] = print
) -> None:
    """Add to ``known`` the rows of every cell that lacks one."""
    groups: dict[tuple[Source, int, str], list[Cell]] = {}
    for cell in cells:
        if (cell.source, cell.score, cell.request, cell.attacked) not in known:
            groups.setdefault((cell.source, available(cell), cell.score), []).append(cell)
    # Source by source, so that features and logits are loaded once.
    order = sorted(
        groups, key=lambda group: (group[0].dataset, group[0].sigma, group[1], group[0].head, group[0].epsilon)
    )
    for source, draws, score in order:
        mine = groups[source, draws, score]
        say(f"{source.weights} {source.head}, {score}, {draws} draws: {len(mine)} cells")
        requests = list(dict.fromkeys(cell.request for cell in mine))
        radii = {cell.request.epsilon for cell in mine if cell.attacked}
        attacks = [material.attacked(source, epsilon, draws) for epsilon in sorted(radii)] or [None]
        logits = material.logits(source, draws)
        labels = material.dataset(source.dataset).labels
        for attacked in attacks:
            results = evaluate_requests(
                logits, labels, requests, sigma=source.sigma, score=score, splits=splits, holdout=material.holdout,
                attacked=attacked, seed=material.seed,
            )  # fmt: skip
            for request, rows in zip(requests, results, strict=True):
                known[source, score, request, False] = rows[0]
                if attacked is not None:
                    known[source, score, request, True] = rows[1]


def rows_of(table: Table, known: Computed) -> list[dict[str, Any]]:
    """The table's cells with their numbers, as plain values."""
    rows = []
    for cell in table.cells:
        row = known[cell.source, cell.score, cell.request, cell.attacked]
        extra: dict[str, Any] = {"T": cell.request.T} if cell.request.transform == "ptt" else {}
        rows.append(
            {
                "table": table.name, **cell.to_dict(), "dataset": cell.source.dataset, "weights": cell.source.weights,
                **row.to_dict(), **extra, "paper": asdict(cell.paper),
            }
        )  # fmt: skip
    return rows
