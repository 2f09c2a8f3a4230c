"""One runner for every table: group the cells by what they need, evaluate each group once, fill the places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from keepcover.errors import InputError
from keepcover.evaluation import Entry, Row, evaluate_entries
from keepcover.paper.reproduce.cells import Cell, Origin, Table
from keepcover.paper.reproduce.material import Material
from keepcover.tasks import Task

BASE_DRAWS = 256  # what the paper uses, and what rules are tuned on unless a cell asks for more

Computed = dict[tuple[Origin, Entry, bool], Row]
Say = Callable[[str], None]


def capped(cells: Sequence[Cell], most: int | None) -> list[Cell]:
    """The cells with at most so many draws, and their rows named accordingly.

    Those whose place names its draws, and those that mean nothing with so few, are left out.
    """
    if most is None:
        return list(cells)
    fewer = []
    for cell in cells:
        asked = cell.entry
        draws = min(asked.draws or most, most)
        named = "draws" in cell.row + cell.column or cell.column.startswith("N =")
        if draws < asked.method.least_draws or (named and (asked.draws or 0) > most):
            continue
        row = cell.row if draws == asked.draws else f"{cell.row}, {draws} draw{'s' if draws > 1 else ''}"
        calibration = asked.calibration_draws and min(asked.calibration_draws, most)
        fewer.append(replace(cell, row=row, entry=replace(asked, draws=draws, calibration_draws=calibration)))
    return fewer


def available(cell: Cell, most: int | None) -> int:
    """Draws of the outputs that a cell is evaluated on; without noise all draws are one."""
    base = min(BASE_DRAWS, most or BASE_DRAWS)
    return max(base, cell.entry.draws or base) if cell.origin.sigma else 1


def compute(
    cells: Sequence[Cell],
    material: Material,
    known: Computed,
    *,
    splits: int = 50,
    most: int | None = None,
    say: Say = print,
) -> None:
    """Add to ``known`` the rows of every cell that lacks one."""
    new = [cell for cell in cells if (cell.origin, cell.entry, cell.attacked) not in known]
    longest = {
        origin: max(available(cell, most) for cell in new if cell.origin == origin)
        for origin in {cell.origin for cell in new}
    }
    groups: dict[tuple[Origin, int, Task | None], list[Cell]] = {}
    for cell in new:
        # A rule tuned on the holdout sees the draws it is tuned on; the others look at the first of however many there are.
        draws = available(cell, most) if cell.entry.method.uses_holdout else longest[cell.origin]
        # One pass of ImageNet's network serves all scores; in memory, the scores of one are dropped before the next.
        task = None if cell.origin.dataset == "imagenet" else cell.entry.task
        groups.setdefault((cell.origin, draws, task), []).append(cell)

    def order(group: tuple[Origin, int, Task | None]) -> tuple[Any, ...]:
        """Origin by origin and the most draws first, so that features are loaded once."""
        origin, draws, _ = group
        return origin.dataset, origin.sigma, -draws, origin.head, origin.epsilon

    for origin, draws, task in sorted(groups, key=order):
        mine = groups[origin, draws, task]
        say(f"  {origin.weights} {origin.head}, {draws} draws: {len(mine)} cells")
        radii = sorted({cell.entry.epsilon for cell in mine if cell.attacked})
        if len(radii) > 1:
            raise InputError(f"a network is attacked at one radius per table, got {radii}")
        entries = list(dict.fromkeys(cell.entry for cell in mine))
        found = evaluate_entries(
            material.noisy(origin, draws),
            entries,
            splits=splits,
            holdout=material.holdout,
            seed=material.seed,
            attacked=material.attacked(origin, radii[0], draws) if radii else None,
        )
        for one, rows in zip(entries, found, strict=True):
            for row, hit in zip(rows, (False, True), strict=False):
                known[origin, one, hit] = row


def rows_of(cells: Sequence[Cell], table: Table, known: Computed) -> list[dict[str, Any]]:
    """The table's cells with their numbers, as plain values."""
    rows = []
    for cell in cells:
        transform = cell.entry.method.transform
        rows.append(
            {
                "table": table.name,
                **cell.to_dict(),
                "dataset": cell.origin.dataset,
                "weights": cell.origin.weights,
                **known[cell.origin, cell.entry, cell.attacked].to_dict(),
                **({} if transform is None else {"T": transform.T}),
                "paper": asdict(cell.paper),
            }
        )
    return rows
