"""Classification: outputs are logits, one label per point is true, and a set holds labels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from keepcover.assumption import Assumption
from keepcover.errors import InputError
from keepcover.guarantee import Guarantee
from keepcover.noise import Stream
from keepcover.noise.stream import probes
from keepcover.scores import SCORES, CustomScore, Draws, Items, Reading, Score, get_score, top_label
from keepcover.scores.draws import in_pieces
from keepcover.tasks.base import Task
from keepcover.tasks.candidates import Candidates
from keepcover.tasks.metrics import check_labels
from keepcover.tasks.sets import PredictionSets


class Labels(Candidates):
    """A set holds labels ``[n, K]``."""

    early = True

    def sets(self, inside: Tensor, guarantee: Guarantee, draws_used: Tensor | None = None) -> PredictionSets:
        return PredictionSets(inside, guarantee, self.class_names, draws_used)

    def everything(self, n: int) -> Tensor | None:
        return None if self.classes is None else torch.ones(n, self.classes, dtype=torch.bool)


@dataclass(frozen=True)
class Classification(Labels):
    """Label sets from logits ``[n, N, K]``.

    Attributes:
        score: non-conformity of labels: a name, a :class:`Score` or a function of logits.
        class_names: for reading sets.
        classes: K, once outputs have been seen.
        open_labels: allow the label -1 for a point whose class the model does not have. Every set misses it, so it counts as
            missed, and the promise then includes queries of unknown classes.

    Example:
        >>> task = Classification("hps").seen(torch.zeros(5, 2, 3))
        >>> task.classes, task.items(torch.zeros(5, 2, 3), torch.zeros(5).long(), Reading(True), torch.zeros(5)).points
        (3, 5)
    """

    score: Score | str | Callable[..., Tensor] = "hps"
    class_names: tuple[str, ...] | None = None
    classes: int | None = None
    open_labels: bool = False

    name = "classification"
    attacks = ("softmax", "margin")
    words = "the set contains the true label of a query"

    def __post_init__(self) -> None:
        object.__setattr__(self, "score", get_score(self.score))
        super().__post_init__()

    @property
    def _score(self) -> Score:
        assert isinstance(self.score, Score)
        return self.score

    @property
    def score_name(self) -> str:
        return self._score.name

    @property
    def bounded(self) -> bool:
        return self._score.bounded

    @property
    def assumptions(self) -> tuple[str, ...]:  # type: ignore[override]
        closed = Assumption(
            "The true label is one of the classes that the model has: a query of another class is missed by every set.",
            "you",
            "A query of another class is a miss, so keepcover.monitor raises an alarm when they are many; open_labels counts those "
            "among the calibration points.",
        )
        return () if self.open_labels else (closed,)

    def check_truth(self, truth: Any, n: int) -> Tensor:
        return check_labels(truth, n, self.classes, -int(self.open_labels))

    def counted(self, truth: Tensor) -> int:
        return int(truth.max()) + 1

    def uniform(self, stream: Stream, ids: Tensor) -> Tensor:
        return stream.uniform(ids, "aps") if self._score.randomized else torch.zeros(len(ids), device=ids.device)

    def prepare(self, outputs: Tensor, reading: Reading, u: Tensor) -> Draws:
        """Noisy scores of every label: logits ``[n, N, K]`` -> ``[n, K, N]``."""
        score, unit = self._score, reading.transform is not None or (not reading.order and self._score.unfailing)
        function = score.order if reading.order else score

        def read(some: Tensor, u: Tensor) -> Tensor:
            found = function(some, u[:, None])
            return (found if reading.transform is None else reading.transform(found)).transpose(1, 2).contiguous()

        values = in_pieces(outputs, read, u)
        if not score.unfailing and values.isnan().any():
            raise InputError(f"score {score.name!r} returned NaN; a NaN has no rank, so it carries no guarantee")
        return Draws(values, unit=unit)

    def items(self, outputs: Tensor, truth: Tensor, reading: Reading, u: Tensor) -> Items:
        if self.open_labels and bool((truth < 0).any()):
            known = replace(self, open_labels=False).items(outputs, truth.clamp_min(0), reading, u)
            # No class that the model has scores higher than a class that it does not have.
            worst = torch.inf if reading.order and reading.transform is None else 1.0
            return Items.single(Draws(known.draws.values.masked_fill((truth < 0)[:, None], worst), known.draws.unit))
        if not reading.order or not self._score.unfailing:  # what may be NaN is looked at as a whole
            return Items.single(self.prepare(outputs, reading, u).of_label(truth))
        values = in_pieces(outputs, self._score.order_of, truth[:, None].expand(outputs.shape[:2]), u[:, None])
        return Items.single(Draws(values if reading.transform is None else reading.transform(values)))

    def fit(self, scores: Tensor, reading: Reading) -> Tensor:
        """How well labels fit, in [0, 1], from their scores as rules of this reading see them: what people are shown."""
        return self._score.support(scores) if reading.order and reading.transform is None else 1 - scores

    def right(self, outputs: Tensor, truth: Tensor) -> Tensor:
        return (top_label(outputs) == truth[:, None]).double().mean(dim=1)

    @property
    def classed(self) -> bool:
        return not self.open_labels

    def probe(self) -> Tensor:
        logits, u = probes((self.classes or 2,), -4.0, 4.0), torch.tensor([0.2, 0.4, 0.6, 0.8])
        return torch.stack([self._score(logits, u), self._score.order(logits, u)])

    def config(self) -> dict[str, Any]:
        return {**super().config(), "score": self._score.config()}

    @classmethod
    def from_config(cls, config: dict[str, Any], score: Any = None) -> Task:
        """The task of a saved predictor. A score of the user's own is code and not in the file: it is given again."""
        saved = config["score"]
        if not saved.get("custom"):
            known: Score = SCORES[saved["name"]](**{key: value for key, value in saved.items() if key != "name"})
            score = known if score is None else get_score(score)
        elif score is None:
            raise InputError(
                f"this predictor uses the custom score {saved['name']!r}; pass it: load(path, model, score=...)"
            )
        else:
            score = get_score(score) if isinstance(score, str | Score) else CustomScore(score, saved["name"])
        if score.config() != saved:
            raise InputError(f"this predictor was calibrated with score {saved}, not {score.config()}")
        return super().from_config({**config, "score": score})
