"""From data to what calibration keeps of them: the holdout's noisy outputs, and the scores of what must not be missed."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor

from keepcover.engine.arrivals import Gathered
from keepcover.engine.inputs import Batch, InputRange, Rows, batches, check_ids, in_memory, length
from keepcover.engine.smoother import Smoother
from keepcover.errors import InputError, KeepcoverWarning, warn
from keepcover.methods import Holdout
from keepcover.noise import Stream
from keepcover.prediction.question import Question
from keepcover.prediction.report import Accuracy
from keepcover.prediction.source import Source, check_outputs
from keepcover.scores import Draws, Items, Tally
from keepcover.tasks import Task

SAMPLE = 200  # points whose sets tell how large sets will be, where there is no holdout


def chosen_rows(n: int, size: int | None, seed: int) -> Tensor:
    """Which of n points are held out; that is no secret, only the noise is."""
    size = min(500, n // 10) if size is None else size
    if n == 0:
        raise InputError("expected labelled points to calibrate on, got none")
    if not 1 <= size < n:
        what = f"expected a holdout of 1 to {n - 1} of the {n} points, got {size}"
        raise InputError(f"{what}; give more data or holdout=(images, labels)")
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed % 2**63))[:size]


class Parts:
    """The data as (role, batch) pairs: holdout points and calibration points, disjoint, decided by position alone."""

    def __init__(self, data: Any, holdout: Any, ids: Any, seed: int, needed: bool) -> None:
        size = int(holdout) if isinstance(holdout, Integral) else None
        self.data, self.ids, self.given = data, ids, None if size is not None else holdout
        self.chosen = torch.zeros(0, dtype=torch.int64)
        if self.given is None and needed:
            n = length(data)
            if n is None:
                raise InputError("the data have no length, so no holdout can be drawn from them: give one as holdout=")
            self.chosen = chosen_rows(n, size, seed)
        self.watched = self.given is not None
        if self.given is not None and in_memory(data) and in_memory(self.given):  # no need to run the network first
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", KeepcoverWarning)  # of pixels: they come when the data are used
                for _ in self.batches():
                    pass
            self.watched = False

    @property
    def calibrating(self) -> Tensor | slice:
        """The positions of the calibration points in the data, in order."""
        n = length(self.data)
        return slice(None) if n is None else ~torch.isin(torch.arange(n), self.chosen)

    def batches(self, only_holdout: bool = False) -> Iterator[tuple[str, Batch]]:
        """Every batch once; what streams by is compared when all of it has passed."""
        rows = {"holdout": Rows(), "calibration": Rows()}
        for role, batch in self._batches(only_holdout):
            if self.watched:
                rows[role].add(batch)
            yield role, batch
        if shared := rows["calibration"].shared(rows["holdout"]):
            why = "what is tuned on a point must not be calibrated on it, or the promise is void"
            advice = "Split the data into disjoint parts (holdout=500 does it), and drop duplicates first"
            raise InputError(f"{shared} of the calibration points are in holdout= too: {why}. {advice}")

    def _batches(self, only_holdout: bool) -> Iterator[tuple[str, Batch]]:
        if self.given is not None:
            yield from (("holdout", batch) for batch in batches(self.given, labelled=True))
            if only_holdout:
                return
        position = 0
        for batch in batches(self.data, self.ids, labelled=True):
            held = torch.isin(torch.arange(position, position + len(batch)), self.chosen)
            position += len(batch)
            for role, mask in (("holdout", held), ("calibration", ~held)):
                if mask.any() and not (only_holdout and role == "calibration"):
                    yield role, batch if mask.all() else batch[mask.nonzero()[:, 0]]


class Chunk(NamedTuple):
    """Noisy outputs of some points in one role, whose name is that of their stream, and some of them without noise."""

    stream: Stream
    ids: Tensor
    outputs: Tensor
    truth: Any
    clean: Tensor | None = None  # [points, 1, ...] of one of every few points, see _step


@dataclass(frozen=True)
class Collected:
    """What calibration keeps: the holdout's noisy outputs, and of calibration points the scores of what they must cover."""

    holdout: Holdout | None
    items: Items | Tally | None
    task: Task
    accuracy: Accuracy | None = None  # where the task knows what is right
    sample: Holdout | None = None  # the holdout, or some calibration points where there is none: how large sets will be
    inputs: InputRange | None = None
    shape: tuple[int, ...] = ()
    unknown: int = 0  # calibration points of classes that the model does not have


def run(
    smoother: Smoother, parts: Parts, question: Question, seed: int, group: Any = None, only_holdout: bool = False
) -> Collected:
    """One pass of the network over the data."""
    streams = {role: Stream(seed, role) for role in ("holdout", "calibration")}
    spans = {"holdout": range(max(question.used)), "calibration": range(question.used[1])}
    total, seen = length(parts.data), []

    def wanted() -> Iterator[tuple[Batch, range, Stream]]:
        for role, batch in parts.batches(only_holdout):
            seen.append(InputRange.of(batch.images))
            yield batch, spans[role], streams[role]

    passes = smoother.streams(wanted(), None if only_holdout else total)
    collected = collect((chunk_of(smoother, *one) for one in passes), question, total, group)
    return replace(collected, inputs=reduce(InputRange.union, seen), shape=seen[-1].shape)


def chunk_of(smoother: Smoother, batch: Batch, stream: Stream, outputs: Tensor) -> Chunk:
    """What a network gave for a batch, with what it gives for some of it without noise."""
    clean = smoother.clean(batch.images[:: _step(outputs)])[:, None] if smoother.noise.certifies else None
    return Chunk(stream, batch.ids, outputs, batch.labels, clean)


def chunks_of(source: Source, rows: Tensor, stream: Stream, ids: Any, draws: int) -> Iterator[Chunk]:
    """What a source has of some points; ``ids`` are those of all of its points, positions by default."""
    keys = torch.arange(source.points) if ids is None else check_ids(ids, source.points)
    for piece in source.read(rows) if len(rows) else ():
        values = (piece.outputs if source.kept else check_outputs(piece.outputs))[:, :draws]
        yield Chunk(stream, keys[piece.rows].to(values.device), values, piece.truth)


def _step(outputs: Tensor) -> int:
    """One of how many points is looked at without noise: at most one evaluation beside eight under noise."""
    return max(1, 8 // outputs.shape[1])


class Kept:
    """Noisy outputs of some points that stay in memory, as many of them as choosing a rule takes."""

    def __init__(self) -> None:
        self.points, self.outputs = 0, Gathered()
        self.rest: list[tuple[Tensor, Tensor]] = []
        self.items: list[Items] = []

    def add(self, task: Task, outputs: Tensor, truth: Tensor, u: Tensor, items: Items | Tally | None) -> None:
        self.points += len(outputs)
        if isinstance(items, Items):
            outputs, thin = task.thinned(outputs, items)
            self.items.append(thin.to("cpu"))
        self.outputs.add(outputs)
        self.rest.append((truth.cpu(), u.cpu()))

    def holdout(self, task: Task) -> Holdout | None:
        if not self.rest:
            return None
        truth, u = map(torch.cat, zip(*self.rest, strict=True))
        return Holdout(task, self.outputs.whole(), truth, u, Items.joined(self.items) if self.items else None)


def collect(
    chunks: Iterable[Chunk], question: Question, total: int | None, group: Tensor | None = None, renewing: bool = False
) -> Collected:
    """Read noisy outputs once and keep what calibration needs of them; there is no holdout where a predictor is renewed.

    ``group`` is that of every calibration point, where the promise is per group.
    """
    found: Items | Tally | None = None
    labels: list[Tensor] = []
    right: tuple[list[Tensor], ...] = [], []  # under noise, and without
    values, kept = Gathered(total), {"holdout": Kept(), "calibration": Kept()}
    task, points, unknown = question.task, 0, 0
    for number, (stream, ids, outputs, given, clean) in enumerate(chunks):
        task = task.seen(outputs)
        if number == 0:
            warn_of_probabilities(outputs)
        known = task.check_truth(given, len(outputs))
        truth = known.to(outputs.device, non_blocking=True)
        for shares, some, their in zip(right, (outputs, clean), (truth, truth[:: _step(outputs)])):
            if some is not None and (share := task.right(some, their)) is not None:
                shares.append(share)
        uniform, beside, aside = task.uniform(stream, ids), kept[stream.role], stream.role == "holdout"
        own: Any = None if aside and task.single else task.items(outputs, truth, question.reading, uniform)
        if aside or (beside.points < SAMPLE and (renewing or not question.method.needs_holdout)):
            beside.add(task, outputs, known, uniform, None if task.single else own)
        if aside:
            continue
        points += len(outputs)
        if own.several:
            part = own.first(question.used[1]).total(None if group is None else group[points - len(outputs) : points])
            found = found.plus(part) if isinstance(found, Tally) else part
            continue
        found = own
        if "label" in question.promise.reads and (label := task.label_of(known)) is not None:
            labels.append(label.cpu())
        unknown += int((known < 0).sum()) if task.open_labels else 0
        values.add(own.draws.values)
    if isinstance(found, Items):
        draws = Draws(values.whole(), found.draws.unit)
        found = Items(draws, points, label=torch.cat(labels) if labels else None, group=group)
    means = [float(torch.cat(some).mean()) for some in right if some]
    holdout, sample = (some.holdout(task) for some in kept.values())
    return Collected(holdout, found, task, Accuracy(*means) if means else None, holdout or sample, unknown=unknown)


def warn_of_probabilities(outputs: Tensor) -> None:
    """Say so where every output is a distribution over the classes: a softmax too many."""
    if outputs.ndim == 3 and bool(outputs.amin() >= 0) and bool(((outputs.sum(dim=-1) - 1).abs() < 1e-3).all()):
        why = "the model seems to return probabilities where logits are expected"
        large = "so its scores are squeezed together and sets will be large"
        warn(f"{why}, {large}; return logits, or the logarithm of the probabilities")
