"""Noisy outputs on their way through an evaluation: read piece by piece, the holdout first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from keepcover.prediction.collecting import Kept
from keepcover.prediction.source import Piece, Source
from keepcover.scores import Draws, Items, Reading
from keepcover.tasks import Task


@dataclass(frozen=True)
class Attacked:
    """Attacked versions of some points, in the order of ``positions``, and the attack's name."""

    name: str
    positions: Tensor
    source: Source


class Scored:
    """Noisy outputs of some points, and their scores: computed once per task and reading, shared by methods and splits."""

    def __init__(self, piece: Piece, uniform: Tensor) -> None:
        self.rows, self.outputs, self.truth = piece
        self.u, self.v = uniform[:, self.rows].to(self.outputs.device)
        self._scores: dict[tuple[Task, Reading], tuple[Any, Items]] = {}

    def known(self, task: Task) -> Tensor:
        """The truth, checked."""
        return task.check_truth(self.truth, len(self.rows)).to(self.outputs.device)

    def scores(self, task: Task, reading: Reading) -> tuple[Any, Any]:
        """What sets are made of, and the items of the truth."""
        if (task, reading) not in self._scores:
            transform = reading.transform
            if transform is None:
                every = task.prepare(self.outputs, reading, self.u)
                own = task.items(self.outputs, self.known(task), reading, self.u)
            else:  # from the order, which several transforms share
                every, own = self.scores(task, Reading(order=True))
                every = Draws(transform(every.values), unit=True)
                own = replace(own, draws=Draws(transform(own.draws.values), unit=True))
            self._scores[task, reading] = every, own
        return self._scores[task, reading]

    def forget(self) -> None:
        """Drop what a transform made: another holdout fits another."""
        self._scores = {key: made for key, made in self._scores.items() if key[1].transform is None}


class Held:
    """The holdout of a source, as every task keeps it: ``holdouts`` by task, each with the task that has seen the outputs.

    Where reading costs something the holdout is read once and stays in memory, unless no task needs all of it: then it is thinned as
    it is read, and read again with the other points.
    """

    def __init__(self, source: Source, rows: Tensor, uniform: Tensor, tasks: set[Task]) -> None:
        self.source, self.rows, self.uniform = source, rows, uniform
        self.pieces: list[Scored] | None = [] if not source.kept and any(task.single for task in tasks) else None
        kept, seen = {task: Kept() for task in tasks}, {task: task for task in tasks}
        for piece in source.read(rows):
            scored = Scored(piece, uniform)
            for task in tasks:
                seen[task] = known = task.seen(scored.outputs)
                truth = scored.known(known)
                items = None if task.single else known.items(scored.outputs, truth, Reading(order=True), scored.u)
                kept[task].add(known, scored.outputs, truth, scored.u, items)
            if self.pieces is not None:
                self.pieces.append(scored)
        self.holdouts: dict[Task, Any] = {task: kept[task].holdout(seen[task]) for task in tasks}

    def and_rest(self, attacked: Attacked | None) -> Iterator[Scored]:
        """Every point of the source once, then the attacked ones, with the truth of the clean ones."""
        truth: list[tuple[Tensor, Tensor]] = []
        for scored in self._clean():
            if attacked is not None:
                truth.append((scored.rows, torch.as_tensor(scored.truth).cpu()))
            yield scored
        if attacked is None:
            return
        rows, known = (torch.cat(part) for part in zip(*truth, strict=True))
        place = torch.empty_like(rows)
        place[rows] = torch.arange(len(rows))
        for piece in attacked.source.read(torch.arange(attacked.source.points)):
            own = known[place[attacked.positions[piece.rows]]]
            yield Scored(Piece(self.source.points + piece.rows, piece.outputs, own), self.uniform)

    def _clean(self) -> Iterable[Scored]:
        """The holdout is not read again where it is in memory and reading costs something."""
        rows = torch.arange(self.source.points)
        if self.pieces is not None:
            yield from self.pieces
            rows = rows[~torch.isin(rows, self.rows)]
        for piece in self.source.read(rows):
            yield Scored(piece, self.uniform)
