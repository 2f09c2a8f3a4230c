"""New thresholds for old rules: what the holdout chose stays, calibration points come and go in batches.

A rule that was fixed before a point was seen is as valid on that point as on those it was first calibrated on: given the
holdout, the kept points and the next query are exchangeable, and that is all a threshold needs. Which batches stay depends on
their order alone, never on their scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from keepcover.engine.inputs import in_order, length
from keepcover.errors import InputError
from keepcover.methods import Rule
from keepcover.noise import Stream, fresh_seed
from keepcover.prediction.collecting import Chunk, chunk_of, chunks_of, collect
from keepcover.prediction.concluding import announced, calibrated, entry
from keepcover.prediction.predictor import Predictor
from keepcover.prediction.question import Level, Question
from keepcover.prediction.source import source_of
from keepcover.store import LogitStore

Read = Callable[[int, Stream], Iterable[Chunk]]  # so many draws of every new point, under this noise


def from_network(old: Predictor, data: Any, ids: Any, **asked: Any) -> Predictor:
    """From new inputs: one pass of the network over them alone."""
    smoother = old.running

    def read(draws: int, stream: Stream) -> Iterable[Chunk]:
        for batch, outputs in smoother.stream(old.checked(data), draws, stream, ids, labelled=True):
            yield chunk_of(smoother, batch, stream, outputs)

    return renewed(old, read, length(data) if asked["groups"] is None else in_order(data), **asked)


def from_outputs(old: Predictor, outputs: Any, truth: Any, ids: Any, **asked: Any) -> Predictor:
    """From noisy outputs that were drawn elsewhere."""
    source = source_of(outputs, truth, old.noise)
    if isinstance(outputs, LogitStore) and old.identity and outputs.key.model != old.identity.fingerprint:
        raise InputError("the store holds the outputs of another model; smooth with the one that was calibrated")

    def read(draws: int, stream: Stream) -> Iterable[Chunk]:
        if source.draws < draws or (old.noise.deterministic and source.draws != draws):
            raise InputError(f"expected at least {draws} noisy outputs per point, as calibrated, got {source.draws}")
        return chunks_of(source, torch.arange(source.points), stream, ids, draws)

    return renewed(old, read, source.points, **asked)


def renewed(
    old: Predictor, read: Read, n: int | None, how: str, window: int | None, groups: Any, seed: int | None
) -> Predictor:
    """The predictor with thresholds from the batches that stay and from n new points, where n is known before they are read.

    What can be refused without them is refused first. See :meth:`Predictor.recalibrate` for the rest.
    """
    if how not in ("replace", "add", "window"):
        raise InputError(f"expected how to be 'replace', 'add' or 'window', got {how!r}")
    if (how == "window") != (window is not None) or (window is not None and window < 1):
        what = "expected how='window' together with window, the number of batches that stay, at least 1"
        raise InputError(f"{what}; got how={how!r}, window={window}")
    group, before, number = old.grouped(groups, n), old.provenance["of"], len(old.history)
    kept = {"replace": [], "add": before, "window": before[max(0, len(before) + 1 - (window or 1)) :]}[how]
    points, unknown = (sum(old.history[at][what] for at in kept) for what in ("points", "unknown"))

    def rules(points: int) -> dict[Level, Rule]:
        grown = ((level, one.rule, replace(one.rule.asked, n=points)) for level, one in old.levels.items())
        return {level: replace(rule, asked=asked) for level, rule, asked in grown}

    for rule in rules(points + n).values() if n is not None else ():
        rule.verify(old.task)
    widest = max((one.rule for one in old.levels.values()), key=lambda rule: rule.calibration_draws)
    asked, width = widest.asked, widest.calibration_draws  # so many draws are kept of every point
    question = Question(old.task, widest.method, tuple(old.levels), None, asked.promise, asked.draws, width)
    # Noise that no earlier batch has had, for the same seed either.
    stream = Stream(((fresh_seed() if seed is None else seed) + (number << 100)) % 2**128, "calibration")
    collected = collect(read(max(width, old.draws), stream), question, n, group, renewing=True)
    if collected.items is None:
        raise InputError("expected new labelled points, got none")
    new: Any = collected.items.first(width)
    old.grouped(groups, new.points)
    stay: Any = old.items.numbered(before[0]).first(width).of_batches(kept) if kept else None
    items = stay.plus(new.numbered(number)) if kept else new
    question.warn_of_few(items.label, None if items.group is None else items.group.repeat_interleave(items.count))
    missed, grown = collected.unknown + unknown, rules(items.points)
    levels = {level: calibrated(rule, items, collected.sample, missed) for level, rule in grown.items()}
    history = (*old.history, entry(how, new, collected.unknown, [*kept, number]))
    return announced(replace(old, levels=levels, items=items.unordered(), accuracy=collected.accuracy, history=history))
