"""A calibrated classifier: what most users touch after :func:`keepcover.calibrate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keepcover.engine.arrivals import Gathered
from keepcover.engine.fingerprint import Identity
from keepcover.engine.inputs import Batch, InputRange, batches, length, watched
from keepcover.engine.progress import Bar
from keepcover.engine.smoother import Smoother
from keepcover.errors import InputError
from keepcover.guarantee import Guarantee
from keepcover.methods import Method
from keepcover.methods.early_exit import Vote
from keepcover.noise.stream import Stream, fresh_seed
from keepcover.scores.draws import Draws, joined, pieces
from keepcover.scores.scores import Score
from keepcover.scores.transforms import PTT
from keepcover.tasks.sets import PredictionSets

Level = tuple[float, float]  # (alpha, epsilon)


@dataclass(frozen=True)
class Calibrated:
    """One promise of a predictor: the rule, the kind of scores it reads and the threshold its calibration gave."""

    rule: Method
    transform: str
    threshold: float

    @property
    def kind(self) -> str:
        return score_kind(type(self.rule), self.transform)


def score_kind(method: type[Method], transform: str) -> str:
    """Which noisy scores a method reads: ``ptt``, ``order`` (it only compares) or ``plain``."""
    return "ptt" if transform == "ptt" else "order" if method.compares_only else "plain"


def noisy_scores(score: Score, kind: str, logits: Tensor, u: Tensor, ptt: PTT | None = None) -> Draws:
    """Noisy logits [n, N, K] -> noisy scores of every label [n, K, N]."""
    function = score if kind == "plain" else score.order
    scores = function(logits, u[:, None])
    if kind == "ptt":
        assert ptt is not None
        scores = ptt(scores)
    if not score.sound and scores.isnan().any():
        raise InputError(f"score {score.name!r} returned NaN; a NaN has no rank, so it carries no guarantee")
    return Draws(scores.transpose(1, 2).contiguous(), unit=kind == "ptt" or (kind == "plain" and score.sound))


def noisy_scores_of(labels: Tensor, score: Score, kind: str, logits: Tensor, u: Tensor) -> Draws:
    """:func:`noisy_scores` of one label per image [n, N], ``plain`` or ``order``."""
    if kind != "order" or not score.sound:  # what may be NaN is looked at as a whole
        return noisy_scores(score, kind, logits, u).of_label(labels)
    labels = labels[:, None].expand(logits.shape[:2])
    return Draws(joined([score.order_of(logits[p], labels[p], u[p, None]) for p in pieces(logits)]))


def score_uniform(score: Score, stream: Stream, ids: Tensor) -> Tensor:
    """The uniform number of every image that a randomised score uses; zeros for the others."""
    return stream.uniform(ids, "aps") if score.randomized else torch.zeros(len(ids), device=ids.device)


class Predictor:
    """A calibrated classifier: certified prediction sets for new images. Made by :func:`calibrate` or :func:`load`."""

    def __init__(
        self,
        smoother: Smoother,
        score: Score,
        levels: dict[Level, Calibrated],
        calibration: Tensor,
        holdout: Tensor | None,
        classes: int,
        class_names: tuple[str, ...] | None = None,
        identity: Identity | None = None,
        holdout_size: int = 0,
        inputs: InputRange | None = None,
        provenance: dict[str, Any] | None = None,
    ) -> None:
        self.smoother, self.score, self.levels = smoother, score, levels
        self.calibration, self.holdout = calibration, holdout
        self.classes, self.class_names = classes, class_names
        self.identity, self.holdout_size = identity, holdout_size
        self.inputs, self.provenance = inputs, provenance or {}
        self._ptt: dict[tuple[float, str], PTT] = {}

    @property
    def model_fingerprint(self) -> str | None:
        """What identifies the model in files; None for a callable without a fingerprint."""
        return None if self.identity is None else self.identity.fingerprint

    @property
    def image_shape(self) -> tuple[int, ...] | None:
        """Shape of one calibration image; None where it is not known or shapes differed."""
        return None if self.inputs is None else self.inputs.shape

    @property
    def guarantee(self) -> Guarantee:
        """The promise for the first (alpha, epsilon) named at calibration."""
        return self.guarantee_for()

    def guarantee_for(self, alpha: float | None = None, epsilon: float | None = None) -> Guarantee:
        calibrated = self.levels[self._level(alpha, epsilon)]
        return calibrated.rule.guarantee(self.score.name, calibrated.transform)

    @property
    def draws(self) -> int:
        """Model evaluations per query."""
        return max(calibrated.rule.test_draws for calibrated in self.levels.values())

    def ptt(self, alpha: float, device: torch.device | str = "cpu") -> PTT | None:
        """The transform for one alpha: the sigmoid sits at 1 - alpha."""
        if self.holdout is None:
            return None
        key = (alpha, str(device))
        if key not in self._ptt:
            self._ptt[key] = PTT(self.holdout, b=1 - alpha).to(device)
        return self._ptt[key]

    def calibration_draws(self, level: Level) -> Draws:
        """The calibration points' scores as one level's rule reads them."""
        ptt = self.ptt(level[0]) if self.levels[level].kind == "ptt" else None
        return Draws(ptt(self.calibration) if ptt else self.calibration)

    def _level(self, alpha: float | None, epsilon: float | None) -> Level:
        first = next(iter(self.levels))
        level = (first[0] if alpha is None else alpha, first[1] if epsilon is None else epsilon)
        if level not in self.levels:
            known = ", ".join(f"(alpha {a:g}, epsilon {e:g})" for a, e in self.levels)
            raise InputError(f"this predictor was calibrated for {known}; got alpha {level[0]:g}, epsilon {level[1]:g}")
        return level

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
    ) -> PredictionSets:
        """Prediction sets for new images.

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
        wanted = [level]
        if nested:
            wanted = [(a, e) for a, e in self.levels if a == level[0] and e <= level[1]]
        masks, used = (self._masks_early if early_exit else self._masks)(images, wanted, ids, seed)
        mask = reduce(torch.logical_or, masks.values())
        return PredictionSets(mask, self.guarantee_for(*level), self.class_names, used)

    predict_set = predict

    def predict_all(
        self, images: Any, *, nested: bool = False, ids: Any = None, seed: int | None = None
    ) -> dict[Level, PredictionSets]:
        """Sets for every (alpha, epsilon) from one pass of the network."""
        masks, _ = self._masks(images, list(self.levels), ids, seed)
        if nested:
            masks = {
                (a, e): reduce(torch.logical_or, (masks[b, f] for b, f in self.levels if b == a and f <= e))
                for a, e in self.levels
            }
        return {key: PredictionSets(mask, self.guarantee_for(*key), self.class_names) for key, mask in masks.items()}

    def _checked(self, images: Any) -> Any:
        """The images, each batch compared with what the predictor was calibrated on before the network sees it."""
        if self.inputs is None:
            return images
        expected, largest = self.inputs, max(epsilon for _, epsilon in self.levels)
        return watched(images, lambda batch: expected.check(batch, largest))

    def _masks(self, images: Any, wanted: list[Level], ids: Any, seed: int | None) -> tuple[dict[Level, Tensor], None]:
        stream = Stream(fresh_seed() if seed is None else seed, "test")
        draws = max(self.levels[level].rule.test_draws for level in wanted)
        masks = {level: Gathered(length(images)) for level in wanted}
        for batch, logits in self.smoother.stream(self._checked(images), draws, stream, ids):
            for level, mask in self.decide(logits, batch.ids, stream, wanted).items():
                masks[level].add(mask)
        return {level: kept.whole() for level, kept in masks.items()}, None

    def _masks_early(
        self, images: Any, wanted: list[Level], ids: Any, seed: int | None
    ) -> tuple[dict[Level, Tensor], Tensor]:
        stream = Stream(fresh_seed() if seed is None else seed, "test")
        rules, thresholds = ([getattr(self.levels[level], name) for level in wanted] for name in ("rule", "threshold"))
        vote = Vote.of(rules, thresholds)
        total = length(images)
        masks, used = {level: Gathered(total) for level in wanted}, Gathered(total)
        # Many images at a time: those still open after a stage must fill the next one's forward passes.
        together = max(256, 16 * self.smoother.most_rows // vote.stages[-1].stop)

        def exceeded(some: Batch, span: range) -> Tensor:
            logits = self.smoother.logits(some.images, span, stream, some.ids)
            self._expect_classes(logits)
            u = score_uniform(self.score, stream, some.ids.to(logits.device))
            scores = noisy_scores(self.score, "order", logits, u)
            return vote.above(scores, span)

        with Bar("smoothing", total, self.smoother.progress) as bar:
            for batch in batches(self._checked(images), ids, size=together):
                v = stream.uniform(batch.ids.to(self.smoother.device), "boundary")
                decided, took = vote.run(batch.to(self.smoother.device), v, exceeded)
                for level, mask in zip(wanted, decided, strict=True):
                    masks[level].add(mask)
                used.add(took)
                bar.advance(len(batch))
        return {level: kept.whole() for level, kept in masks.items()}, used.whole()

    def _expect_classes(self, logits: Tensor) -> None:
        if logits.shape[2] != self.classes:
            raise InputError(
                f"the predictor was calibrated on {self.classes} classes, the model returned {logits.shape[2]}"
            )

    def decide(
        self, logits: Tensor, ids: Tensor, stream: Stream, wanted: Sequence[Level] | None = None
    ) -> dict[Level, Tensor]:
        """Sets from noisy logits [n, N, K] that this predictor's smoother made."""
        self._expect_classes(logits)
        levels, ids = list(self.levels) if wanted is None else wanted, ids.to(logits.device)
        u = score_uniform(self.score, stream, ids)
        randomized = any(self.levels[level].rule.randomized for level in levels)
        v = stream.uniform(ids, "boundary") if randomized else torch.zeros_like(u)
        masks = {level: logits.new_empty(len(logits), self.classes, dtype=torch.bool) for level in levels}
        for part in pieces(logits):
            for level, mask in self._decide(logits[part], u[part], v[part], levels).items():
                masks[level][part] = mask
        return masks

    def _decide(self, logits: Tensor, u: Tensor, v: Tensor, levels: Sequence[Level]) -> dict[Level, Tensor]:
        cache: dict[tuple[str, float], Draws] = {}
        masks = {}
        for level in levels:
            calibrated = self.levels[level]
            key = (calibrated.kind, level[0] if calibrated.kind == "ptt" else 0.0)
            if key not in cache:
                cache[key] = noisy_scores(self.score, calibrated.kind, logits, u, self.ptt(level[0], logits.device))
            rule = calibrated.rule
            masks[level] = rule.decide(cache[key].first(rule.test_draws), calibrated.threshold, v)
        return masks

    def save(self, path: str | Path, *, fingerprint: str | None = None) -> None:
        """Write one safetensors file with everything but the model; see :func:`keepcover.load`.

        ``fingerprint`` names a callable that has none of its own, where calibration did not; loading takes the same string.
        """
        from keepcover.prediction.artifact import save

        save(self, path, fingerprint)

    def __repr__(self) -> str:
        lines = [f"Predictor over {self.classes} classes, score {self.score.name}, {self.draws} draws per query"]
        for level, calibrated in self.levels.items():
            full = calibrated.rule.always_full(calibrated.threshold)
            state = "every set is the full label set" if full else "ready"
            lines.append(f"  {self.guarantee_for(*level)}  [{state}]")
        return "\n".join(lines)
