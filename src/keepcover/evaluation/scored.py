"""Noisy outputs on their way through an evaluation: read piece by piece, the holdout first, and what is kept of every point."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from keepcover.methods import Holdout, Rule
from keepcover.prediction.collecting import Kept
from keepcover.prediction.source import Piece, Source
from keepcover.promises import Sample, for_queries, of_truth
from keepcover.scores import Draws, Items, Reading, Tally
from keepcover.tasks import Task

MANY = 256  # draws beyond which picking one order statistic is cheaper than sorting for a few


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
    """The holdout of a source, as every task keeps it.

    Where reading costs something the holdout is read once and stays in memory, unless no task needs all of it: then it is thinned as
    it is read, and read again with the other points.
    """

    def __init__(self, source: Source, rows: Tensor, uniform: Tensor, tasks: set[Task]) -> None:
        self.source, self.rows, self.uniform = source, rows, uniform
        self.whole = source.kept or any(task.single for task in tasks)
        self._kept = {task: Kept() for task in tasks}
        self._seen: dict[Task, Task] = {}
        self._holdouts: dict[Task, Holdout] = {}
        self.pieces: list[Scored] = []
        for piece in source.read(rows):
            scored = Scored(piece, uniform)
            for task in tasks:
                self._seen[task] = known = task.seen(scored.outputs)
                truth = scored.known(known)
                items = None if task.single else known.items(scored.outputs, truth, Reading(order=True), scored.u)
                self._kept[task].add(known, scored.outputs, truth, scored.u, items)
            if self.whole and not source.kept:
                self.pieces.append(scored)

    def seen(self, task: Task) -> Task:
        """The task with what the outputs fix."""
        return self._seen[task]

    def holdout(self, task: Task) -> Holdout:
        """What the task keeps of the holdout, one value for all who ask."""
        if task not in self._holdouts:
            made = self._kept.pop(task).holdout(self._seen[task])
            assert made is not None
            self._holdouts[task] = made
        return self._holdouts[task]

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
        if self.whole and not self.source.kept:
            yield from self.pieces
            rows = rows[~torch.isin(rows, self.rows)]
        for piece in self.source.read(rows):
            yield Scored(piece, self.uniform)


# -- what an evaluation keeps of every point, so that thresholds and sets of any split are arithmetic --------------------


class Seen(NamedTuple):
    """Some test points of a split: sizes of their sets, whether those hold the truth or which share of it, whether every set is
    full, and the points' classes and groups.
    """

    size: Tensor
    covered: Tensor
    trivial: bool
    label: Tensor | None
    group: Tensor | None


class Statistics:
    """One thing to cover per point: the statistics that thresholds are made of and compared with."""

    def __init__(self, total: int, group: Tensor | None) -> None:
        self.total = total
        self.kept: dict[str, Tensor] = {} if group is None else {"group": group}

    def add(self, scored: Scored, task: Task, rule: Rule) -> None:
        """Of one piece, into their places among those of all points."""
        for name, part in self.found(scored, task, rule).items():
            if name not in self.kept or self.kept[name].shape[1:] != part.shape[1:]:
                self.kept[name] = part.new_empty(self.total, *part.shape[1:], device="cpu")
            self.kept[name][scored.rows] = part.cpu()

    def found(self, scored: Scored, task: Task, rule: Rule) -> dict[str, Tensor]:
        prepared, items = scored.scores(task, rule.reading)
        own, test = items.draws.first(rule.calibration_draws), items.draws.first(rule.test_draws)
        if rule.counting is not None and test.count <= MANY:  # sorted once, looked up for every rule
            _ = own.ascending, prepared.first(rule.test_draws).ascending if hasattr(prepared, "first") else None
        label = task.label_of(scored.known(task))
        return {
            "calibration": rule.statistic(own),
            "summary": task.summary(prepared, rule, scored.v),
            "true": rule.test_statistic(test, scored.v),
            **({} if label is None else {"label": label}),
        }

    def judged(self, task: Task, rule: Rule, calibration: Tensor, test: Tensor) -> Seen:
        """Calibrate on some points and look at others."""
        kept = self.kept
        known = Sample(kept["true"], label=kept.get("label"), group=kept.get("group"))
        threshold = rule.thresholds(replace(known, statistic=kept["calibration"])[calibration])
        own = known[test]
        inside = task.inside(kept["summary"][test], rule, for_queries(threshold, own.group))
        size, covered = task.sizes(inside), own.statistic <= of_truth(threshold, own.label, own.group)
        full = task.candidates is not None and bool((size == task.candidates).all())
        return Seen(size, covered, full or bool(torch.isposinf(threshold).all()), own.label, own.group)


class Curves(Statistics):
    """Several things to cover per point: what each loses, misses and keeps at every threshold of the grid."""

    def found(self, scored: Scored, task: Task, rule: Rule) -> dict[str, Tensor]:
        prepared, items = scored.scores(task, rule.reading)
        return {
            "calibration": rule.losses(items.first(rule.calibration_draws)),
            "missed": self._missed(items, rule, scored.v),
            "size": task.sizes_on_grid(task.summary(prepared, rule, scored.v), rule).float(),
        }

    def _missed(self, items: Items | Tally, rule: Rule, v: Tensor) -> Tensor:
        """The share that every point misses with the draws of a query."""
        if not isinstance(items, Items):
            return rule.losses(items).float()
        statistic = rule.test_statistic(items.draws.first(rule.test_draws), v[items.weights[1]])
        return replace(items, draws=Draws(statistic[:, None])).losses((0.0, 1.0)).float()

    def judged(self, task: Task, rule: Rule, calibration: Tensor, test: Tensor) -> Seen:
        kept, grid = self.kept, task.thresholds
        losses = kept["calibration"]
        sample = Sample(losses, torch.ones(len(losses), dtype=torch.int64), grid, group=kept.get("group"))
        threshold, own = rule.thresholds(sample[calibration]), sample[test]
        at = torch.searchsorted(grid, for_queries(threshold, own.group).reshape(-1, 1)).expand(len(test), 1)
        size, missed = (kept[name][test].gather(1, at)[:, 0].double() for name in ("size", "missed"))
        return Seen(size, 1 - missed, bool(torch.isposinf(threshold).all()), None, own.group)
