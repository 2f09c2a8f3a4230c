"""New thresholds for old rules: what the holdout chose stays, calibration points come and go in batches.

A rule that was fixed before a point was seen is as valid on that point as on those it was first calibrated on: given the
holdout, the kept points and the next query are exchangeable, and that is all a threshold needs. Which batches stay depends on
their order alone, never on their scores.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from keepcover.engine.inputs import check_ids, in_order, length
from keepcover.errors import InputError, warn
from keepcover.methods import Rule
from keepcover.noise import Stream, fresh_seed
from keepcover.prediction.calibration import calibrated, entry
from keepcover.prediction.collecting import Chunk, chunk_of, collect
from keepcover.prediction.outputs import check_outputs
from keepcover.prediction.predictor import Predictor
from keepcover.prediction.question import Question
from keepcover.prediction.source import source_of
from keepcover.store import LogitStore


@dataclass(frozen=True)
class Renewal:
    """What is asked of a renewal, checked before any network runs.

    Attributes:
        predictor: whose thresholds are renewed.
        how, window, groups, seed: as for :meth:`Predictor.recalibrate`.
        n: new points, where their number is known.
    """

    predictor: Predictor
    how: str
    window: int | None
    n: int | None
    groups: Any
    seed: int | None

    def __post_init__(self) -> None:
        if self.how not in ("replace", "add", "window"):
            raise InputError(f"expected how to be 'replace', 'add' or 'window', got {self.how!r}")
        if (self.how == "window") != (self.window is not None) or (self.window is not None and self.window < 1):
            raise InputError(
                f"expected how='window' together with window, the number of batches that stay, at least 1; got how="
                f"{self.how!r}, window={self.window}"
            )
        self.predictor.grouped(self.groups, self.n)
        if self.n is not None:
            for rule in self.rules:
                self.grown(rule, self.points_of(self.kept) + self.n).verify(self.predictor.task)

    @property
    def rules(self) -> list[Rule]:
        return [one.rule for one in self.predictor.levels.values()]

    @property
    def widest(self) -> Rule:
        """The rule with the most draws per calibration point: so many are kept of every point."""
        return max(self.rules, key=lambda rule: rule.calibration_draws)

    @property
    def draws(self) -> int:
        """Noisy outputs per new point."""
        return max(self.widest.calibration_draws, self.predictor.draws)

    @property
    def stream(self) -> Stream:
        """Noise that no earlier batch has had, for the same seed either."""
        seed = fresh_seed() if self.seed is None else self.seed
        return Stream((seed + (len(self.predictor.history) << 100)) % 2**128, "calibration")

    @property
    def kept(self) -> list[int]:
        """The batches of the predictor that stay."""
        before = self.predictor.provenance["of"]
        return {"replace": [], "add": before, "window": before[max(0, len(before) + 1 - (self.window or 1)) :]}[
            self.how
        ]

    def points_of(self, batches: list[int]) -> int:
        return sum(self.predictor.history[at]["points"] for at in batches)

    def grown(self, rule: Rule, n: int) -> Rule:
        return replace(rule, asked=replace(rule.asked, n=n))

    def renewed(self, chunks: Iterable[Chunk]) -> Predictor:
        """The predictor with thresholds from the kept batches and from new noisy outputs."""
        old, rule, width = self.predictor, self.widest, self.widest.calibration_draws
        levels, promise = tuple(old.levels), rule.asked.promise
        question = Question(old.task, rule.method, levels, None, promise, rule.asked.draws, width)
        collected = collect(chunks, question, self.n, old.grouped(self.groups, self.n), renewing=True)
        if collected.items is None:
            raise InputError("expected new labelled points, got none")
        new = collected.items.first(width)
        old.grouped(self.groups, new.points)
        batch, number = [*self.kept, len(old.history)], len(old.history)
        items = self._joined(new, number) if self.kept else new
        unknown = collected.unknown + sum(old.history[at]["unknown"] for at in self.kept)
        group = None if items.group is None else items.group.repeat_interleave(items.count)
        question.warn_of_few(items.label, group)
        made = replace(
            old,
            levels={
                level: calibrated(self.grown(one.rule, items.points), items, collected.sample, unknown)
                for level, one in old.levels.items()
            },
            items=items.unordered(),
            accuracy=collected.accuracy,
            history=(*old.history, entry(self.how, new, collected.unknown, batch)),
        )
        for one in made.levels.values():
            made.promised(one)
        if made.warning is not None:
            warn(made.warning)
        return made

    def _joined(self, new: Any, number: int) -> Any:
        """The kept batches and the new one, which has this number."""
        old = self.predictor.items.numbered(self.predictor.provenance["of"][0])
        return old.first(self.widest.calibration_draws).of_batches(self.kept).plus(new.numbered(number))


def from_network(old: Predictor, data: Any, ids: Any, **asked: Any) -> Predictor:
    """From new inputs: one pass of the network over them alone."""
    n = length(data) if asked["groups"] is None else in_order(data)
    renewal, smoother = Renewal(old, n=n, **asked), old.running
    stream = renewal.stream

    def chunks() -> Iterable[Chunk]:
        for batch, outputs in smoother.stream(old.checked(data), renewal.draws, stream, ids, labelled=True):
            yield chunk_of(smoother, batch, stream, outputs)

    return renewal.renewed(chunks())


def from_outputs(old: Predictor, outputs: Any, truth: Any, ids: Any, **asked: Any) -> Predictor:
    """From noisy outputs that were drawn elsewhere."""
    source = source_of(outputs, truth, old.noise)
    if isinstance(outputs, LogitStore) and old.identity and outputs.key.model != old.identity.fingerprint:
        raise InputError("the store holds the outputs of another model; smooth with the one that was calibrated")
    renewal = Renewal(old, n=source.points, **asked)
    stream, n, wanted = renewal.stream, source.points, renewal.draws
    if source.draws < wanted or (old.noise.deterministic and source.draws != wanted):
        raise InputError(f"expected at least {wanted} noisy outputs per point, as calibrated, got {source.draws}")
    keys = torch.arange(n) if ids is None else check_ids(ids, n)

    def chunks() -> Iterable[Chunk]:
        for piece in source.read(torch.arange(n)):
            values = check_outputs(piece.outputs)[:, :wanted]
            yield Chunk(stream, keys[piece.rows].to(values.device), values, piece.truth)

    return renewal.renewed(chunks())
