"""A calibrated model: what most users touch after :func:`keepcover.calibrate`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keepcover.engine.arrivals import Gathered
from keepcover.engine.fingerprint import Identity
from keepcover.engine.inputs import Batch, InputRange, batches, check_ids, length, watched
from keepcover.engine.progress import Bar
from keepcover.engine.smoother import Classifier, Smoother, numeric_options
from keepcover.errors import InputError
from keepcover.guarantee import Guarantee
from keepcover.methods import Rule
from keepcover.methods.early_exit import Vote
from keepcover.noise import Noise, Stream, fresh_seed
from keepcover.prediction.outputs import check_outputs
from keepcover.scores import Items, Reading
from keepcover.scores.draws import pieces
from keepcover.tasks import Task

Level = tuple[float, float]  # (alpha, epsilon)
DRAWN = (
    "The noisy outputs of calibration points and queries, which came from elsewhere, were drawn under this noise, independently "
    "over points and draws; those of a query are fresh and secret."
)


@dataclass(frozen=True)
class Calibrated:
    """One promise of a predictor: a rule and the threshold that its calibration gave, which broadcasts over candidates."""

    rule: Rule
    threshold: Tensor

    @property
    def full(self) -> bool:
        """Whether every set holds everything, whatever the query."""
        return all(self.rule.always_full(t) for t in self.threshold.flatten().tolist())


@dataclass(frozen=True, repr=False, eq=False)
class Predictor:
    """A calibrated model: sets with a guarantee for new inputs. Made by ``calibrate``, ``calibrate_outputs`` or ``load``.

    Attributes:
        task: what outputs mean and what a set is.
        levels: the promises, by (alpha, epsilon) in the order they were asked for.
        items: the calibration points' noisy scores of what must not be missed.
        smoother: the model under noise; None where only its noisy outputs are known.
        noise: what the outputs were drawn under.
        reference: the holdout scores that PTT ranks by; None without PTT.
        identity: what it knows of the model: fingerprint, structure, and outputs of fixed inputs.
        holdout_size: points that were set aside for tuning.
        inputs: shape and range of the calibration inputs.
        numerics: what changes the function besides the weights.
        provenance: when and with what it was made.
    """

    task: Task
    levels: dict[Level, Calibrated]
    items: Items
    noise: Noise
    smoother: Smoother | None = None
    reference: Tensor | None = None
    identity: Identity | None = None
    holdout_size: int = 0
    inputs: InputRange | None = None
    numerics: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)

    # -- what is promised ------------------------------------------------------------------------------------------------

    def at(self, alpha: float | None = None, epsilon: float | None = None) -> Predictor:
        """The predictor of one level alone: of the first (alpha, epsilon) named at calibration unless said otherwise.

        Its :attr:`rule`, :attr:`threshold` and :attr:`guarantee` are those of that level.
        """
        level = self._level(alpha, epsilon)
        return replace(self, levels={level: self.levels[level]})

    def _level(self, alpha: float | None, epsilon: float | None) -> Level:
        first = next(iter(self.levels))
        level = (first[0] if alpha is None else alpha, first[1] if epsilon is None else epsilon)
        if level not in self.levels:
            known = ", ".join(f"(alpha {a:g}, epsilon {e:g})" for a, e in self.levels)
            raise InputError(f"this predictor was calibrated for {known}; got alpha {level[0]:g}, epsilon {level[1]:g}")
        return level

    @property
    def _first(self) -> Calibrated:
        return next(iter(self.levels.values()))

    @property
    def rule(self) -> Rule:
        """The rule of the first level; see :meth:`at`."""
        return self._first.rule

    @property
    def threshold(self) -> Tensor:
        """The threshold of the first level; see :meth:`at`."""
        return self._first.threshold

    @property
    def guarantee(self) -> Guarantee:
        """The promise of the first level; see :meth:`at`."""
        return self.promised(self.rule)

    def promised(self, rule: Rule) -> Guarantee:
        """What a rule promises on what this predictor was calibrated with."""
        made = rule.guarantee(self.task)
        # Where no input was ever seen, the outputs came from elsewhere.
        outside = self.inputs is None and self.noise.certifies
        return replace(made, assumed=(*made.assumed, DRAWN)) if outside else made

    @property
    def full(self) -> bool:
        """Whether every set of the first level holds everything."""
        return self._first.full

    @property
    def draws(self) -> int:
        """Model evaluations per query."""
        return max(calibrated.rule.test_draws for calibrated in self.levels.values())

    @property
    def classes(self) -> int:
        """Labels that a full set holds."""
        if self.task.candidates is None:
            raise InputError(f"{self.task.name} has no classes")
        return self.task.candidates

    @property
    def class_names(self) -> tuple[str, ...] | None:
        return getattr(self.task, "class_names", None)

    # -- sets ------------------------------------------------------------------------------------------------------------

    def predict(
        self,
        images: Any,
        *,
        alpha: float | None = None,
        epsilon: float | None = None,
        nested: bool = False,
        ids: Any = None,
        seed: int | None = None,
        early_exit: bool = False,
    ) -> Any:
        """Sets for new inputs.

        Args:
            images: a tensor or array [n, ...], a dataset or a loader (labels are ignored).
            alpha, epsilon: one of the levels named at calibration; the first of them by default.
            nested: take the union with the sets of all smaller epsilon, so that sets grow with epsilon.
            ids: integers that key each image's noise; positions by default.
            seed: for experiments only. Without it every call draws fresh noise from the operating system, which is what
                the guarantee assumes: an attacker who can guess the noise is not covered.
            early_exit: stop drawing for an image once every label is decided; the sets are those of full drawing. For
                count rules (``exact``, ``exact_asymmetric``); ``draws_used`` of the result says what each image took.
        """
        level = self._level(alpha, epsilon)
        found, used = (self._early if early_exit else self._all)(images, self._wanted(level, nested), ids, seed)
        return self.task.sets(reduce(self.task.union, found.values()), self.at(*level).guarantee, used)

    def predict_all(
        self, images: Any, *, nested: bool = False, ids: Any = None, seed: int | None = None
    ) -> dict[Level, Any]:
        """Sets for every (alpha, epsilon) from one pass of the network."""
        found, _ = self._all(images, list(self.levels), ids, seed)
        return {
            level: self.task.sets(
                reduce(self.task.union, (found[other] for other in self._wanted(level, nested))),
                self.at(*level).guarantee,
            )
            for level in self.levels
        }

    def predict_outputs(
        self,
        outputs: Any,
        *,
        alpha: float | None = None,
        epsilon: float | None = None,
        nested: bool = False,
        ids: Any = None,
        seed: int | None = None,
    ) -> Any:
        """Sets from noisy outputs [n, N, ...] that were drawn elsewhere, under the noise that was calibrated: those that
        :meth:`predict` gives where the model returns these outputs.

        Args:
            outputs: at least as many draws as the predictor spends per query; the first of them are used.
            alpha, epsilon, nested: as for :meth:`predict`.
            ids, seed: key the random numbers of randomised scores and boundaries, as in :meth:`predict`.
        """
        outputs, level, wanted = check_outputs(outputs), self._level(alpha, epsilon), self.draws
        if outputs.shape[1] < wanted:
            raise InputError(
                f"expected at least {wanted} noisy outputs per query, as calibrated, got {outputs.shape[1]}; draw more"
            )
        stream = Stream(fresh_seed() if seed is None else seed, "test")
        keys = torch.arange(len(outputs)) if ids is None else check_ids(ids, len(outputs))
        found = self.decide(outputs[:, :wanted], keys, stream, self._wanted(level, nested))
        return self.task.sets(reduce(self.task.union, found.values()), self.at(*level).guarantee)

    def _wanted(self, level: Level, nested: bool) -> list[Level]:
        return [(a, e) for a, e in self.levels if a == level[0] and e <= level[1]] if nested else [level]

    def decide(
        self, outputs: Tensor, ids: Tensor, stream: Stream, wanted: Sequence[Level] | None = None
    ) -> dict[Level, Tensor]:
        """Sets as plain tensors, from noisy outputs [n, N, ...] of queries with these ids."""
        self.task.seen(outputs)
        levels, ids = list(self.levels) if wanted is None else list(wanted), ids.to(outputs.device)
        u = self.task.uniform(stream, ids)
        randomized = any(self.levels[level].rule.randomized for level in levels)
        v = stream.uniform(ids, "boundary") if randomized else torch.zeros_like(u)
        found: dict[Level, Tensor] = {}
        for part in pieces(outputs):
            for level, inside in self._decide(outputs[part], u[part], v[part], levels).items():
                if level not in found:
                    found[level] = inside.new_empty(len(outputs), *inside.shape[1:])
                found[level][part] = inside
        return found

    def _decide(self, outputs: Tensor, u: Tensor, v: Tensor, levels: Sequence[Level]) -> dict[Level, Tensor]:
        prepared: dict[Reading, Any] = {}
        found = {}
        for level in levels:
            rule, threshold = self.levels[level].rule, self.levels[level].threshold
            if rule.reading not in prepared:
                prepared[rule.reading] = self.task.prepare(outputs, rule.reading, u)
            found[level] = self.task.inside(self.task.summary(prepared[rule.reading], rule, v), rule, threshold)
        return found

    # -- running the model -----------------------------------------------------------------------------------------------

    @property
    def running(self) -> Smoother:
        """The model under noise, or an error that says what is missing."""
        if self.smoother is None:
            raise InputError(
                "this predictor has no model: use predict_outputs, or attach the model that gave the calibration outputs with "
                "predictor.with_model(model)"
            )
        return self.smoother

    def with_model(self, model: Classifier | Smoother, fingerprint: str | None = None) -> Predictor:
        """The same promises with a model to keep them: the very function that gave the calibration outputs.

        A predictor that knows its model refuses another, and other numerics.

        Args:
            model: the model, or a smoother around it with this predictor's noise.
            fingerprint: a string that identifies a model that is not an ``nn.Module``.
        """
        own = self.numerics
        smoother = model if isinstance(model, Smoother) else Smoother(model, self.noise, **numeric_options(own))
        if smoother.noise != self.noise:
            raise InputError(f"the outputs were drawn under {self.noise}, the smoother adds {smoother.noise}")
        if self.identity is None:  # calibrated on outputs: nothing is known of the model yet
            identity = Identity.of(smoother, None, 0.0, 1.0, fingerprint)
            return replace(self, smoother=smoother, identity=identity, numerics=smoother.numerics)
        if smoother.numerics != own:
            raise InputError(f"expected the numerics of calibration, {own}, the smoother has {smoother.numerics}")
        self.identity.refuse_other(smoother, fingerprint)
        return replace(self, smoother=smoother)

    def _checked(self, images: Any) -> Any:
        """The images, each batch compared with what the predictor was calibrated on before the network sees it."""
        if self.inputs is None:
            return images
        expected, largest = self.inputs, max(epsilon for _, epsilon in self.levels)
        return watched(images, lambda batch: expected.check(batch, largest))

    def _all(self, images: Any, wanted: list[Level], ids: Any, seed: int | None) -> tuple[dict[Level, Tensor], None]:
        stream = Stream(fresh_seed() if seed is None else seed, "test")
        draws = max(self.levels[level].rule.test_draws for level in wanted)
        found = {level: Gathered(length(images)) for level in wanted}
        for batch, outputs in self.running.stream(self._checked(images), draws, stream, ids):
            for level, inside in self.decide(outputs, batch.ids, stream, wanted).items():
                found[level].add(inside)
        return {level: kept.whole() for level, kept in found.items()}, None

    def _early(
        self, images: Any, wanted: list[Level], ids: Any, seed: int | None
    ) -> tuple[dict[Level, Tensor], Tensor]:
        smoother, stream = self.running, Stream(fresh_seed() if seed is None else seed, "test")
        vote = Vote.of(
            *zip(*((self.levels[level].rule, self.levels[level].threshold) for level in wanted), strict=True)
        )
        total = length(images)
        found, used = {level: Gathered(total) for level in wanted}, Gathered(total)
        # Many images at a time: those still open after a stage must fill the next one's forward passes.
        together = max(256, 16 * smoother.most_rows // vote.stages[-1].stop)
        with Bar("smoothing", total, smoother.progress) as bar:
            for batch in batches(self._checked(images), ids, size=together):
                for level, inside in zip(
                    wanted, self._voted(batch.to(smoother.device), vote, stream, used), strict=True
                ):
                    found[level].add(inside)
                bar.advance(len(batch))
        return {level: kept.whole() for level, kept in found.items()}, used.whole()

    def _voted(self, batch: Batch, vote: Vote, stream: Stream, used: Gathered) -> Iterator[Tensor]:
        def exceeded(positions: Tensor, span: range) -> Tensor:
            some = batch[positions]
            outputs = self.running.logits(some.images, span, stream, some.ids)
            self.task.seen(outputs)
            u = self.task.uniform(stream, some.ids.to(outputs.device))
            return vote.above(self.task.prepare(outputs, Reading(order=True), u), span)

        v = stream.uniform(batch.ids, "boundary")
        decided, took = vote.run(torch.arange(len(batch), device=v.device), v, exceeded)
        used.add(took)
        yield from decided

    def save(self, path: str | Path, *, fingerprint: str | None = None) -> None:
        """Write one safetensors file with everything but the model; see :func:`keepcover.load`.

        ``fingerprint`` names a callable that has none of its own, where calibration did not; loading takes the same string.
        """
        from keepcover.prediction.artifact import save

        save(self, path, fingerprint)

    def __repr__(self) -> str:
        lines = [f"Predictor for {self.task.name}, score {self.task.score_name}, {self.draws} draws per query"]
        for level, calibrated in self.levels.items():
            state = "every set holds everything" if calibrated.full else "ready"
            lines.append(f"  {self.at(*level).guarantee}  [{state}]")
        return "\n".join(lines)
