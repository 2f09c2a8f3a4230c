"""A calibrated model: what most users touch after :func:`keepcover.calibrate`."""

from __future__ import annotations

import hashlib
import json
import time
import timeit
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keepcover.assumption import Assumption
from keepcover.engine.arrivals import Gathered
from keepcover.engine.fingerprint import Identity
from keepcover.engine.inputs import Batch, InputRange, batches, check_ids, check_shape, in_order, length, watched
from keepcover.engine.progress import Bar
from keepcover.engine.smoother import Classifier, Smoother, numeric_options
from keepcover.errors import InputError
from keepcover.guarantee import Guarantee
from keepcover.methods import Rule
from keepcover.methods.early_exit import Vote
from keepcover.noise import Noise, Stream, fresh_seed
from keepcover.prediction.question import Level
from keepcover.prediction.report import Accuracy, Report, levels_table, warning
from keepcover.prediction.source import check_outputs
from keepcover.promises import for_queries
from keepcover.scores import Items, Reading, Tally
from keepcover.scores.draws import joined, pieces
from keepcover.tasks import Task

ELSEWHERE = "Look at the code that drew them; a store that keepcover filled keeps noise, model and data in its key."
DRAWN = Assumption(
    "The noisy outputs of calibration points and queries, which came from elsewhere, were drawn under this noise, independently "
    "over points and draws; those of a query are fresh and secret.",
    "you",
    ELSEWHERE,
)
ENUMERATED = Assumption(
    "The outputs of calibration points and queries, which came from elsewhere, are those of every position, in their order.",
    "you",
    ELSEWHERE,
)


@dataclass(frozen=True)
class Calibrated:
    """One promise of a predictor: a rule and the threshold that its calibration gave, which broadcasts over candidates; and
    the mean size of sets on its holdout.
    """

    rule: Rule
    threshold: Tensor
    size: float | None = None

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
        items: the calibration points' noisy scores of what must not be missed, or what rules ask of them.
        smoother: the model under noise; None where only its noisy outputs are known.
        noise: what the outputs were drawn under.
        reference: the holdout scores that PTT ranks by; None without PTT.
        identity: what it knows of the model: fingerprint, structure, and outputs of fixed inputs.
        holdout_size: points that were set aside for tuning.
        inputs: shape and range of the calibration inputs.
        numerics: what changes the function besides the weights.
        accuracy: of the model under noise and without, where the task knows what is right.
        among: the noises that the holdout chose from, in words; empty where the user named one.
        history: how, when and with what it was calibrated and renewed, one entry each; see :meth:`recalibrate`.
    """

    task: Task
    levels: dict[Level, Calibrated]
    items: Items | Tally
    noise: Noise
    smoother: Smoother | None = None
    reference: Tensor | None = None
    identity: Identity | None = None
    holdout_size: int = 0
    inputs: InputRange | None = None
    numerics: dict[str, Any] = field(default_factory=dict)
    accuracy: Accuracy | None = None
    among: tuple[str, ...] = ()
    history: tuple[dict[str, Any], ...] = ()

    @property
    def provenance(self) -> dict[str, Any]:
        """The newest entry of the history: where the thresholds come from."""
        return self.history[-1]

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
        return self.promised(self._first)

    def promised(self, calibrated: Calibrated) -> Guarantee:
        """What a rule promises on what this predictor was calibrated with."""
        made, assumed = calibrated.rule.guarantee(self.task, calibrated.threshold), []
        if self.inputs is None and self.noise.certifies:  # no input was ever seen: the outputs came from elsewhere
            assumed.append(ENUMERATED if self.noise.deterministic else DRAWN)
        if scale := self.numerics.get("input_scale"):
            text = f"Noise and attack are measured in {len(scale)} units, one per feature: see input_scale."
            how = "The file keeps the units, and every input is divided by them before noise is added."
            assumed.append(Assumption(text, "library", how))
        if self.among:
            text = f"The holdout alone chose {self.noise}, among {', '.join(self.among)}."
            how = "Calibration sets the holdout aside before it looks at any point."
            assumed.append(Assumption(text, "library", how))
        return replace(made, assumed=(*made.assumed, *assumed))

    @property
    def digest(self) -> str:
        """SHA-256 of model, calibration scores, promises and thresholds: what an audit, a monitor and a ticket are about. A renewed
        predictor has another.
        """
        model = None if self.identity is None else self.identity.fingerprint
        levels = [[str(self.promised(one)), one.threshold.tolist()] for one in self.levels.values()]
        batches = [entry["scores"] for entry in self.history]
        return hashlib.sha256(json.dumps([model, batches, *levels]).encode()).hexdigest()

    @property
    def full(self) -> bool:
        """Whether every set of the first level holds everything."""
        return self._first.full

    @property
    def warning(self) -> str | None:
        """Why sets may be of little use, in a sentence: what noise does to the model, and how large sets are; else None."""
        if self.accuracy is None or not self.noise.certifies:
            return None
        sizes = [one.size for one in self.levels.values() if one.size is not None and not one.full]
        return warning(self.noise, self.accuracy, max(sizes, default=None), self.task.candidates or 2, self._denoisable)

    @property
    def _denoisable(self) -> bool:
        """Whether a denoiser could go before the model: inputs are images, and it has none. A file alone knows it too."""
        known = None if self.identity is None else self.identity.structure
        denoised = "denoises" in (known or {}).get("", {})
        denoised |= self.smoother is not None and hasattr(self.smoother.model, "under_noise")
        shape = None if self.inputs is None else self.inputs.shape
        return not denoised and (shape is None or len(shape) == 3)

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

    def grouped(self, groups: Any, queries: Any, unknown: str = "error") -> Tensor | None:
        """The groups of queries, or of so many, as the thresholds are numbered, where the promise is per group."""
        clause = self.rule.asked.promise.groups
        if clause is None:
            if groups is not None:
                raise InputError("the promise is not per group; leave groups out or calibrate with Promise(per=groups)")
            return None
        if groups is None:
            raise InputError("the promise is per group, so every query says its group: give groups=, one per query")
        codes, n = clause.encode(groups, unknown), in_order(queries)
        if n is not None and len(codes) != n:
            raise InputError(f"expected the groups of {n} queries, got {len(codes)}")
        return codes

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
        groups: Any = None,
        unknown: str = "error",
    ) -> Any:
        """Sets for new inputs.

        Args:
            images: a tensor or array [n, ...], a dataset or a loader (labels are ignored).
            alpha, epsilon: one of the levels named at calibration; the first of them by default.
            nested: take the union with the sets of all smaller epsilon, so that sets grow with epsilon.
            ids: integers that key each image's noise; positions by default.
            seed: for experiments only. Without it every call draws fresh noise from the operating system, which is what
                the guarantee assumes: an attacker who can guess the noise is not covered.
            early_exit: stop drawing for an image once every label is decided; the sets are those of full drawing. On a
                GPU, where a stage has a cost of its own, two short measurements decide whether to stop at all. For count
                rules (``exact``, ``exact_asymmetric``); ``draws_used`` of the result says what each image took.
            groups: the group of every image, where the promise is per group.
            unknown: ``error``, or ``widest``: an image of a group that calibration never saw gets the largest threshold
                of all groups, without a promise.
        """
        if early_exit and not self.task.early:
            raise InputError(f"early exit decides a query label by label; {self.task.name} does not, leave it out")
        level, group = self._level(alpha, epsilon), self.grouped(groups, images, unknown)
        found, used = self._run(images, self._wanted(level, nested), ids, seed, group, early_exit)
        return self._sets(found, level, nested, used)

    def predict_all(
        self,
        images: Any,
        *,
        nested: bool = False,
        ids: Any = None,
        seed: int | None = None,
        groups: Any = None,
        unknown: str = "error",
    ) -> dict[Level, Any]:
        """Sets for every (alpha, epsilon) from one pass of the network."""
        found, _ = self._run(images, list(self.levels), ids, seed, self.grouped(groups, images, unknown))
        return {level: self._sets(found, level, nested) for level in self.levels}

    def predict_outputs(
        self,
        outputs: Any,
        *,
        alpha: float | None = None,
        epsilon: float | None = None,
        nested: bool = False,
        ids: Any = None,
        seed: int | None = None,
        groups: Any = None,
        unknown: str = "error",
    ) -> Any:
        """Sets from noisy outputs [n, N, ...] that were drawn elsewhere, under the noise that was calibrated: those that
        :meth:`predict` gives where the model returns these outputs.

        Args:
            outputs: at least as many draws as the predictor spends per query; the first of them are used.
            alpha, epsilon, nested: as for :meth:`predict`.
            ids, seed: key the random numbers of randomised scores and boundaries, as in :meth:`predict`.
            groups, unknown: as for :meth:`predict`.
        """
        outputs, level, least = check_outputs(outputs), self._level(alpha, epsilon), self.draws
        n, have = outputs.shape[:2]
        if have < least:
            raise InputError(f"expected at least {least} noisy outputs per query, as calibrated, got {have}; draw more")
        keys, group = torch.arange(n) if ids is None else check_ids(ids, n), self.grouped(groups, n, unknown)
        found = self.decide(outputs[:, :least], keys, self._stream(seed), self._wanted(level, nested), group)
        return self._sets(found, level, nested)

    def _wanted(self, level: Level, nested: bool) -> list[Level]:
        return [(a, e) for a, e in self.levels if a == level[0] and e <= level[1]] if nested else [level]

    def _sets(self, found: dict[Level, Tensor], level: Level, nested: bool, used: Tensor | None = None) -> Any:
        inside = reduce(self.task.union, (found[other] for other in self._wanted(level, nested)))
        return self.task.sets(inside, self.promised(self.levels[level]), used)

    def decide(
        self, outputs: Tensor, ids: Tensor, stream: Stream, wanted: Sequence[Level] = (), group: Tensor | None = None
    ) -> dict[Level, Tensor]:
        """Sets as plain tensors, from noisy outputs [n, N, ...] of queries with these ids, of these groups (:meth:`grouped`)."""
        self.task.seen(outputs)
        levels, ids = list(wanted or self.levels), ids.to(outputs.device)
        u = self.task.uniform(stream, ids)
        randomized = any(self.levels[level].rule.randomized for level in levels)
        v = stream.uniform(ids, "boundary") if randomized else torch.zeros_like(u)
        found: dict[Level, list[Tensor]] = {level: [] for level in levels}
        for part in pieces(outputs):
            own, prepared = None if group is None else group[part], {}
            for level, sets in found.items():
                rule, threshold = self.levels[level].rule, for_queries(self.levels[level].threshold, own)
                if rule.reading not in prepared:
                    prepared[rule.reading] = self.task.prepare(outputs[part], rule.reading, u[part])
                summary = self.task.summary(prepared[rule.reading], rule, v[part])
                sets.append(self.task.inside(summary, rule, threshold))
        return {level: joined(sets) for level, sets in found.items()}

    # -- running the model -----------------------------------------------------------------------------------------------

    @property
    def running(self) -> Smoother:
        """The model under noise, or an error that says what is missing."""
        if self.smoother is None:
            attach = "attach the model that gave the calibration outputs with predictor.with_model(model)"
            raise InputError(f"this predictor has no model: use predict_outputs, or {attach}")
        return self.smoother

    def with_model(self, model: Classifier | Smoother, fingerprint: str | None = None) -> Predictor:
        """The same promises with a model to keep them: the very function that gave the calibration outputs.

        A predictor that knows its model refuses another, and other numerics.

        Args:
            model: the model, or a smoother around it with this predictor's noise.
            fingerprint: a string that identifies a model that is not an ``nn.Module``.
        """
        options = numeric_options(self.numerics)
        smoother = model if isinstance(model, Smoother) else Smoother(model, self.noise, **options)
        if smoother.noise != self.noise:
            raise InputError(f"the outputs were drawn under {self.noise}, the smoother adds {smoother.noise}")
        if self.identity is None:  # calibrated on outputs: nothing is known of the model yet
            identity = Identity.of(smoother, None, fingerprint)
            return replace(self, smoother=smoother, identity=identity, numerics=smoother.numerics)
        if (found := smoother.numerics) != self.numerics:
            raise InputError(f"expected the numerics of calibration, {self.numerics}, the smoother has {found}")
        self.identity.refuse_other(smoother, fingerprint)
        return replace(self, smoother=smoother)

    def checked(self, images: Any) -> Any:
        """The images, each batch compared with what the predictor was calibrated on before the network sees it."""
        shape, largest = self.rule.asked.threat.shape, max(epsilon for _, epsilon in self.levels)
        if (seen := self.inputs) is not None:
            return watched(images, lambda batch: seen.check(batch, largest))
        return images if shape is None else watched(images, lambda batch: check_shape(shape, batch))

    def _stream(self, seed: int | None) -> Stream:
        """The noise of queries: secret, unless a seed is given or there is nothing random to keep secret."""
        return Stream(0 if self.noise.deterministic else fresh_seed(), "test") if seed is None else Stream(seed, "test")

    def _run(
        self, images: Any, wanted: list[Level], ids: Any, seed: int | None, group: Tensor | None, early: bool = False
    ) -> tuple[dict[Level, Any], Tensor | None]:
        """Sets of some levels from one pass of the network, and what early exit drew for every query."""
        asked, everything = [self.levels[level] for level in wanted], self.task.everything
        vote = Vote.of([one.rule for one in asked], [one.threshold for one in asked]) if early else None
        images, total = self.checked(images), length(images)
        if everything(0) is not None and all(one.full for one in asked):  # the inputs are checked, nothing runs
            n = sum(map(len, batches(images, ids)))
            return dict.fromkeys(wanted, everything(n)), torch.zeros(n, dtype=torch.int64) if early else None
        smoother, stream, draws = self.running, self._stream(seed), max(one.rule.test_draws for one in asked)
        found, used, at = {level: Gathered(total) for level in wanted}, Gathered(total), 0
        # Elsewhere than on a CPU a stage has a cost of its own, which small networks do not win back: measured on the first batch.
        gains = True if smoother.device.type == "cpu" else None
        # Many images at a time: those still open after a stage must fill the next one's forward passes.
        together = max(256, 16 * smoother.most_rows // draws)
        parts: Any = smoother.stream(images, draws, stream, ids)
        if early:
            parts = ((batch.to(smoother.device), None) for batch in batches(images, ids, size=together))
        with Bar("smoothing", total, early and smoother.progress) as bar:
            for batch, outputs in parts:
                own, at = _part(group, at, at + len(batch)), at + len(batch)
                if vote is None:
                    sets = self.decide(outputs, batch.ids, stream, wanted, own).values()
                else:
                    here = replace(vote, thresholds=tuple(for_queries(t, own) for t in vote.thresholds))
                    gains = self._pays(batch, here, stream) if gains is None else gains
                    here, v = replace(here, staged=gains), stream.uniform(batch.ids, "boundary")
                    exceeded = partial(self._exceeded, batch, here, stream)
                    sets, took = here.run(torch.arange(len(batch), device=v.device), v, exceeded)
                    used.add(took)
                for kept, inside in zip(found.values(), sets, strict=True):
                    kept.add(inside)
                bar.advance(len(batch))
        _part(group, 0, at, whole=True)
        return {level: kept.whole() for level, kept in found.items()}, used.whole() if early else None

    def _pays(self, batch: Batch, vote: Vote, stream: Stream) -> bool:
        """Whether early exit can be faster on this device, measured: one draw of one image, and some draws of some."""
        some = torch.arange(min(len(batch), max(2, 1024 // self.draws)), device=batch.images.device)

        def seconds(positions: Tensor, span: range) -> float:
            def work() -> int:
                return int(self._exceeded(batch, vote, stream, positions, span).sum())  # waits for the device

            return min(timeit.repeat(work, timer=time.perf_counter, repeat=3, number=1))

        fixed, more = seconds(some[:1], range(1)), seconds(some, range(self.draws))
        return vote.pays(len(batch), fixed, max(0.0, more - fixed) / (len(some) * self.draws))

    def _exceeded(self, batch: Batch, vote: Vote, stream: Stream, positions: Tensor, span: range) -> Tensor:
        some = batch[positions]
        outputs = self.running.logits(some.images, span, stream, some.ids)
        self.task.seen(outputs)
        u = self.task.uniform(stream, some.ids.to(outputs.device))
        return vote.above(self.task.prepare(outputs, Reading(order=True), u), span, positions)

    # -- renewing --------------------------------------------------------------------------------------------------------

    def recalibrate(
        self,
        data: Any,
        *,
        how: str = "replace",
        window: int | None = None,
        groups: Any = None,
        ids: Any = None,
        seed: int | None = None,
        fingerprint: str | None = None,
    ) -> Predictor:
        """The same promises with thresholds from new points. Rule, transform, score and clusters stay as the first holdout
        chose them; only the new points run through the network.

        The next query must be exchangeable with all points that thresholds come from, and none of them may have been in the
        holdout; ``Promise(delta=...)`` needs them independent and identically distributed. See the page on renewing.

        Args:
            data: new labelled inputs, as for :func:`calibrate`.
            how: ``replace`` the calibration points, ``add`` to them, or keep a rolling ``window`` of batches.
            window: with ``how="window"``: how many batches stay, the new one included. Every calibration is one batch.
            groups: the group of every new point, where the promise is per group.
            ids, seed: as for :func:`calibrate`.
            fingerprint: the string given at calibration for a model that is not an ``nn.Module``.

        Example:
            >>> import keepcover
            >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
            >>> images = torch.rand(600, 1, 2, 2)
            >>> labels = model(images).argmax(dim=1)
            >>> old = keepcover.calibrate(model, (images[:400], labels[:400]), epsilon=0.1, sigma=0.1, draws=4)
            >>> new = old.recalibrate((images[400:], labels[400:]), how="add")
            >>> old.guarantee.n, new.guarantee.n, [entry["how"] for entry in new.history]
            (360, 560, ['calibrate', 'add'])
        """
        from keepcover.prediction.renewal import from_network

        if self.identity is not None and (self.identity.structure is not None or fingerprint):
            self.identity.refuse_other(self.running, fingerprint)  # it may have been trained since
        return from_network(self, data, ids, how=how, window=window, groups=groups, seed=seed)

    def recalibrate_outputs(
        self,
        outputs: Any,
        truth: Any = None,
        *,
        how: str = "replace",
        window: int | None = None,
        groups: Any = None,
        ids: Any = None,
        seed: int | None = None,
    ) -> Predictor:
        """:meth:`recalibrate` from noisy outputs of new points, as for :func:`calibrate_outputs`."""
        from keepcover.prediction.renewal import from_outputs

        return from_outputs(self, outputs, truth, ids, how=how, window=window, groups=groups, seed=seed)

    def save(self, path: str | Path, *, fingerprint: str | None = None) -> None:
        """Write one safetensors file with everything but the model; see :func:`keepcover.load`.

        ``fingerprint`` names a callable that has none of its own, where calibration did not; loading takes the same string.
        """
        from keepcover.prediction.artifact import save

        save(self, path, fingerprint)

    def report(self, path: str | Path | None = None) -> Report:
        """Every promise, what it rests on and where it comes from: shown by a notebook, printed, or written as a page.

        ``keepcover report`` adds coverage, sizes and examples on labelled data.
        """
        report = Report(self)
        if path is not None:
            report.write(path)
        return report

    def _repr_html_(self) -> str:
        return levels_table(self)

    def __repr__(self) -> str:
        title = f"Predictor for {self.task.name}, score {self.task.score_name}, {self.draws} draws per query"
        states = {True: "every set holds everything", False: "ready"}
        lines = [f"{self.promised(one)}  [{states[one.full]}]" for one in self.levels.values()]
        lines += [] if self.warning is None else [f"Warning: {self.warning}"]
        return "\n  ".join([title, *lines])


def _part(group: Tensor | None, start: int, end: int, whole: bool = False) -> Tensor | None:
    """The groups of the queries from ``start`` to ``end``, all there are where ``whole``: of a stream their number shows as it goes."""
    if group is not None and (len(group) < end or (whole and len(group) != end)):
        found = f"{len(group)} groups for {end} queries{'' if whole else ' or more'}"
        raise InputError(f"expected one group per query, got {found}")
    return None if group is None else group[start:end]
