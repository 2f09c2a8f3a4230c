"""One runner for every table: group the cells by what they need, evaluate each group once, fill the places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from keepcover.errors import InputError
from keepcover.evaluation.splits import Request, Row, evaluate_requests
from keepcover.evaluation.streaming import AttackedImages, Question, evaluate_streaming
from keepcover.methods import get_method
from keepcover.paper.reproduce.cells import Cell, Source, Table
from keepcover.paper.reproduce.material import Material

BASE_DRAWS = 256  # what the paper uses, and what rules are tuned on unless a cell asks for more

Computed = dict[tuple[Source, str, Request, bool], Row]
Say = Callable[[str], None]


def capped(cells: Sequence[Cell], most: int | None) -> list[Cell]:
    """The cells with at most so many draws, and their rows named accordingly.

    Those whose place names its draws, and those that mean nothing with so few, are left out.
    """
    if most is None:
        return list(cells)
    fewer = []
    for cell in cells:
        asked = cell.request
        draws = min(asked.draws or most, most)
        named = "draws" in cell.row + cell.column or cell.column.startswith("N =")
        if draws < get_method(asked.method).least_draws or (named and (asked.draws or 0) > most):
            continue
        row = cell.row if draws == asked.draws else f"{cell.row}, {draws} draw{'s' if draws > 1 else ''}"
        calibration = asked.calibration_draws and min(asked.calibration_draws, most)
        fewer.append(replace(cell, row=row, request=replace(asked, draws=draws, calibration_draws=calibration)))
    return fewer


def available(cell: Cell, most: int | None) -> int:
    """Draws of the logits that a cell is evaluated on; without noise all draws are one."""
    base = min(BASE_DRAWS, most or BASE_DRAWS)
    return max(base, cell.request.draws or base) if cell.source.sigma else 1


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
    groups: dict[tuple[Source, int], dict[str, list[Cell]]] = {}
    new = [cell for cell in cells if (cell.source, cell.score, cell.request, cell.attacked) not in known]
    longest = {
        source: max(available(cell, most) for cell in new if cell.source == source)
        for source in {cell.source for cell in new}
    }
    for cell in new:
        # A rule tuned on the holdout sees the draws it is tuned on; the others look at the first of however many there are.
        tuned = get_method(cell.request.method).uses_holdout
        draws = available(cell, most) if tuned else longest[cell.source]
        groups.setdefault((cell.source, draws), {}).setdefault(cell.score, []).append(cell)
    # Source by source and the most draws first, so that features are loaded once.
    order = sorted(
        groups, key=lambda group: (group[0].dataset, group[0].sigma, -group[1], group[0].head, group[0].epsilon)
    )
    for source, draws in order:
        scores = groups[source, draws]
        say(f"  {source.weights} {source.head}, {draws} draws: {sum(map(len, scores.values()))} cells")
        work = _stream if source.dataset == "imagenet" else _from_store
        work(source, draws, scores, material, known, splits)


def _radii(cells: Sequence[Cell]) -> list[float]:
    """The radius of the attack, if there is one: a table attacks each source at one."""
    radii = sorted({cell.request.epsilon for cell in cells if cell.attacked})
    if len(radii) > 1:
        raise InputError(f"a source is attacked at one radius per table, got {radii}")
    return radii


def _requests(cells: Sequence[Cell]) -> list[Request]:
    return list(dict.fromkeys(cell.request for cell in cells))


def _from_store(
    source: Source, draws: int, scores: dict[str, list[Cell]], material: Material, known: Computed, splits: int
) -> None:
    logits, labels = material.logits(source, draws), material.dataset(source.dataset).labels
    for score, cells in scores.items():
        requests = _requests(cells)
        for attacked in [material.attacked(source, epsilon, draws) for epsilon in _radii(cells)] or [None]:
            results = evaluate_requests(
                logits,
                labels,
                requests,
                sigma=source.sigma,
                score=score,
                splits=splits,
                holdout=material.holdout,
                attacked=attacked,
                seed=material.seed,
            )
            for request, rows in zip(requests, results, strict=True):
                for row, hit in zip(rows, (False, True), strict=False):
                    known[source, score, request, hit] = row


def _stream(
    source: Source, draws: int, scores: dict[str, list[Cell]], material: Material, known: Computed, splits: int
) -> None:
    """The same from one pass of the network over images that are read as they are needed."""
    data = material.imagenet()
    smoother = material.smoother(material.model(source), source.sigma, material.compile)
    questions = [Question(score=score, requests=tuple(_requests(cells))) for score, cells in scores.items()]
    radii = _radii([cell for cells in scores.values() for cell in cells])
    attacked, names = None, (False,)
    if radii:
        chosen = material.victims(len(data))
        part = data.subset(chosen).load(progress=material.progress)
        attacked = AttackedImages("SmoothAdv", chosen, material.attack(source, *part.pair, chosen, radii[0]))
        names = (False, True)
    rows = iter(
        evaluate_streaming(
            smoother,
            data,
            questions,
            draws=draws,
            splits=splits,
            holdout=material.holdout,
            seed=material.seed,
            attacked=attacked,
        )
    )
    for question in questions:
        for request in question.requests or ():
            for hit in names:
                known[source, str(question.score), request, hit] = next(rows)


def rows_of(cells: Sequence[Cell], table: Table, known: Computed) -> list[dict[str, Any]]:
    """The table's cells with their numbers, as plain values."""
    rows = []
    for cell in cells:
        row = known[cell.source, cell.score, cell.request, cell.attacked]
        extra: dict[str, Any] = {"T": cell.request.T} if cell.request.transform == "ptt" else {}
        rows.append(
            {
                "table": table.name,
                **cell.to_dict(),
                "dataset": cell.source.dataset,
                "weights": cell.source.weights,
                **row.to_dict(),
                **extra,
                "paper": asdict(cell.paper),
            }
        )
    return rows
