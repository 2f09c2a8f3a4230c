"""Methods over random splits of noisy logits that are too many to keep.

ImageNet with 256 draws is 25 GB of logits. Two passes need none of them kept: the holdout's logits, a few hundred
images, fit every transform and rule; then the rest streams by, and of each image only the statistics remain that its
methods threshold, one number per label. Splits are arithmetic on those. Rows are the ones that
:func:`keepcover.evaluation.splits.evaluate_methods` gives on the same logits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from keepcover.data.splits import Split, random_splits
from keepcover.engine.inputs import length, take
from keepcover.engine.smoother import Smoother
from keepcover.errors import InputError
from keepcover.evaluation.splits import (
    Request,
    Row,
    Runner,
    Scored,
    Statistics,
    check_logits,
    make_runners,
    requests_for,
    uniforms,
)
from keepcover.methods import METHODS
from keepcover.noise.stream import Stream
from keepcover.scores.scores import Score, get_score
from keepcover.store import StoreReader

PIECE = 2**24  # logits looked at together where nobody else decides


@dataclass(frozen=True)
class Question:
    """What is asked of one pass: methods under one promise. The arguments of ``evaluate_methods`` that may vary, or
    ``requests`` in their place.
    """

    epsilon: float = 0.0
    alpha: float = 0.1
    beta: float = 0.001
    score: str | Score = "hps"
    methods: tuple[str, ...] = tuple(METHODS)
    transforms: tuple[str, ...] = ("none", "ptt")
    draws: int | None = None
    calibration_draws: int | None = None
    requests: tuple[Request, ...] | None = None

    def spelled_out(self, available: int) -> Sequence[Request]:
        """The requests, one per method and transform."""
        if self.requests is not None:
            return self.requests
        return requests_for(self.methods, self.transforms, self.epsilon, self.draws, self.calibration_draws, available)


@dataclass(frozen=True)
class AttackedImages:
    """Attacked versions [m, ...] of the images at these positions, and the attack's name."""

    name: str
    positions: Tensor
    images: Tensor


def evaluate_streaming(
    smoother: Smoother,
    data: Any,
    questions: Question | Sequence[Question],
    *,
    draws: int,
    splits: int = 50,
    holdout: int = 500,
    seed: int = 0,
    attacked: AttackedImages | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Row]:
    """Every question on the same splits, from one pass of the network over the data.

    Args:
        smoother: the model under noise.
        data: ``(images, labels)`` or a dataset with a length, which is read in two passes.
        questions: one or several; their rows come in order.
        draws: model evaluations per image, as many as a file of logits would have.
        splits, holdout: random halves of what a fixed holdout leaves.
        seed: of splits, noise and randomised scores.
        attacked: versions of some images to judge beside the clean ones; each method then has two rows.
        progress: called with (done, total) while splits are judged; the smoother shows its own progress.

    Memory grows with images x classes (8 bytes per label for each method that averages scores, 4 for the others), and with
    holdout x draws x classes, never with images x draws x classes. ``exact_asymmetric`` also keeps up to 4 bytes per image
    and calibration draw, of the true label.

    Example:
        >>> smoother = Smoother(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3)), sigma=0.5)
        >>> data = (torch.rand(80, 1, 2, 2), torch.arange(80) % 3)
        >>> (row,) = evaluate_streaming(smoother, data, Question(0.1, methods=("rcp1",)), draws=2, splits=3, holdout=20)
        >>> row.method, row.splits
        ('rcp1', 3)
    """
    source = _Network(smoother, data, draws, Stream(seed, "test"))
    return _evaluate(source, questions, splits, holdout, seed, progress, attacked)


def evaluate_store(
    store: StoreReader,
    questions: Question | Sequence[Question],
    *,
    draws: int | None = None,
    splits: int = 50,
    holdout: int = 500,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> list[Row]:
    """The same from a store, for logits that fit on the disk but not into memory."""
    return _evaluate(
        _Stored(store, store.sound_draws if draws is None else draws), questions, splits, holdout, seed, progress
    )


# -- where logits come from --------------------------------------------------------------------------------------------


class _Source(ABC):
    """Noisy logits of any images, a piece at a time."""

    images: int
    draws: int
    sigma: float

    @abstractmethod
    def pieces(self, rows: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Positions, logits and labels of these images, in this order."""


class _Network(_Source):
    def __init__(self, smoother: Smoother, data: Any, draws: int, stream: Stream) -> None:
        count = length(data)
        if count is None:
            raise InputError("expected data whose length is known: (images, labels) or a dataset with a length")
        self.smoother, self.data, self.stream = smoother, data, stream
        self.images, self.draws, self.sigma = count, draws, smoother.sigma

    def pieces(self, rows: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        at = 0
        for batch, logits in self.smoother.stream(take(self.data, rows), self.draws, self.stream, rows, labelled=True):
            assert batch.labels is not None
            yield rows[at : at + len(batch)], logits, batch.labels
            at += len(batch)

    def versions(self, attacked: AttackedImages) -> Iterator[tuple[Tensor, Tensor]]:
        """Places among the attacked and their logits, under the noise of the images they were."""
        at = 0
        for batch, logits in self.smoother.stream(attacked.images, self.draws, self.stream, attacked.positions):
            yield torch.arange(at, at + len(batch)), logits
            at += len(batch)


class _Stored(_Source):
    def __init__(self, store: StoreReader, draws: int) -> None:
        self.store, self.labels = store, store.labels
        self.images, self.draws, self.sigma = store.key.images, draws, store.key.sigma

    def pieces(self, rows: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        step = _step(self.draws, self.store.classes or 1)
        for at in range(0, len(rows), step):
            part = rows[at : at + step]
            yield part, self.store.read(part, self.draws, torch.float32), self.labels[part]


def _step(draws: int, classes: int) -> int:
    return max(1, PIECE // (draws * classes))


# -- the two passes ----------------------------------------------------------------------------------------------------


class _Pass:
    """One question: its methods, fitted on the holdout, and what they keep of the images that stream by."""

    def __init__(self, question: Question, source: _Source, classes: int, uniform: Tensor) -> None:
        self.alpha, self.images, self.uniform = question.alpha, uniform.shape[1], uniform
        self.score = get_score(question.score)
        self.runners = make_runners(
            question.spelled_out(source.draws),
            self.score,
            alpha=question.alpha,
            sigma=source.sigma,
            beta=question.beta,
            available=source.draws,
            classes=classes,
        )
        self.reference: Tensor | None = None

    def _scored(self, rows: Tensor, logits: Tensor, labels: Tensor) -> Scored:
        return Scored(logits, labels, self.score, self.alpha, self.uniform[:, rows])

    def fit(self, split: Split, logits: Tensor, labels: Tensor) -> None:
        scored, everything = self._scored(split.holdout, logits, labels), torch.arange(len(logits))
        if any(run.transform == "ptt" for run in self.runners):
            self.reference = scored.fit(everything)
        for run in self.runners:
            run.fit(scored, everything, split)

    def keep(self, rows: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Statistics of one piece, into their places among those of all images."""
        scored = self._scored(rows, logits, labels)
        scored.reference = None if self.reference is None else self.reference.to(logits.device)
        for run in self.runners:
            found = run.measure(scored)
            if not hasattr(run, "statistics"):
                run.statistics = Statistics(
                    *(part.new_empty(self.images, *part.shape[1:], device="cpu") for part in _parts(found))
                )
            for whole, part in zip(_parts(run.statistics), _parts(found), strict=True):
                whole[rows] = part.cpu()


def _parts(statistics: Statistics) -> list[Tensor]:
    return [getattr(statistics, field.name) for field in fields(statistics)]


def _evaluate(
    source: _Source,
    questions: Question | Sequence[Question],
    count: int,
    holdout: int,
    seed: int,
    progress: Callable[[int, int], None] | None,
    attacked: AttackedImages | None = None,
) -> list[Row]:
    splits = list(random_splits(source.images, count, holdout, seed))
    split = splits[0]
    held = [(logits.cpu(), labels.cpu()) for _, logits, labels in source.pieces(split.holdout)]
    logits, labels = check_logits(*(torch.cat(parts) for parts in zip(*held, strict=True)))
    del held
    uniform, classes = uniforms(source.images, seed), logits.shape[2]
    if attacked is not None:  # their statistics stand behind those of the clean images
        uniform = torch.cat([uniform, uniform[:, attacked.positions]], dim=1)
    asked = [questions] if isinstance(questions, Question) else list(questions)
    passes = [_Pass(question, source, classes, uniform) for question in asked]
    for one in passes:
        one.fit(split, logits, labels)
    step, truth = _step(source.draws, classes), torch.zeros(source.images, dtype=torch.int64)
    truth[split.holdout] = labels
    for at in range(0, holdout, step):
        part = slice(at, at + step)
        for one in passes:
            one.keep(split.holdout[part], logits[part], labels[part])
    del logits, labels
    for rows, some, known in source.pieces(torch.cat([split.calibration, split.test]).sort().values):
        some, known = check_logits(some, known)
        truth[rows] = known.cpu()
        for one in passes:
            one.keep(rows, some, known)
    where = torch.full((source.images,), -1)
    if attacked is not None:
        assert isinstance(source, _Network)
        where[attacked.positions] = torch.arange(source.images, uniform.shape[1])
        for places, some in source.versions(attacked):
            some, known = check_logits(some, truth[attacked.positions[places]])
            for one in passes:
                one.keep(source.images + places, some, known)
    runners: list[Runner] = [run for one in passes for run in one.runners]
    for index, split in enumerate(splits):
        for at, run in enumerate(runners):
            run.judge(split)
            if attacked is not None:
                hit = where[split.test]
                run.judge(split, hit[hit >= 0], attacked.name)
            if progress:
                progress(index * len(runners) + at + 1, count * len(runners))
    return [row for run in runners for row in run.rows()]
