"""Labels: outputs are logits, one label per point is true, or any number of them, and a set holds labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from numpy import ndarray
from torch import Tensor

from keepcover.assumption import Assumption
from keepcover.errors import InputError
from keepcover.guarantee import Guarantee
from keepcover.noise import Stream
from keepcover.noise.stream import probes
from keepcover.scores import SCORES, CustomScore, Draws, Items, Reading, Score, get_score, top_label
from keepcover.scores.draws import in_pieces
from keepcover.tasks.base import Candidates, Task
from keepcover.tasks.metrics import Evaluation, RiskEvaluation, as_labels, check_labels, check_several, measure
from keepcover.tasks.shown import BINS, Shown, by_row


@dataclass(frozen=True, repr=False)
class PredictionSets(Shown):
    """Sets for n images: ``mask[i, k]`` says whether label k is in set i.

    Iterating gives each set as a list of class names (or indices where there are none). ``draws_used`` says how many model
    evaluations each image took where they may differ, with early exit.
    """

    mask: Bool[Tensor, "n k"]
    guarantee: Guarantee
    class_names: tuple[str, ...] | None = None
    draws_used: Int[Tensor, " n"] | None = None

    @property
    def size(self) -> Int[Tensor, " n"]:
        """Labels per set."""
        return self.mask.sum(dim=1)

    @property
    def trivial(self) -> Bool[Tensor, " n"]:
        """Sets that hold every label: true, but they say nothing."""
        return self.mask.all(dim=1)

    def labels(self, names: Sequence[str] | None = None) -> list[list[str]] | list[list[int]]:
        """The sets as lists, with class names where they are known."""
        names = names if names is not None else self.class_names
        rows = [row.nonzero()[:, 0].tolist() for row in self.mask.cpu()]
        return rows if names is None else [[str(names[k]) for k in row] for row in rows]

    def covers(self, truth: Any) -> Tensor:
        """Whether each set contains the true label, which none does that is -1, of a class that the model does not have; with a
        table [n, K] of several, the share of them that it contains.
        """
        if as_labels(truth).ndim == 2:
            true = check_several(truth, *self.mask.shape).to(self.mask.device)
            return (self.mask & true).sum(dim=1).double().where(true.any(dim=1), 1.0) / true.sum(dim=1).clamp_min(1)
        labels = check_labels(truth, *self.mask.shape, least=-1).to(self.mask.device)
        return self.mask.gather(1, labels.clamp_min(0)[:, None])[:, 0] & (labels >= 0)

    def measure(self, truth: Any, groups: Sequence[Any] | None = None) -> Evaluation | RiskEvaluation:
        """Coverage, size and breakdowns against the true labels; with a table [n, K] of several, the share of them missed."""
        if as_labels(truth).ndim != 2:
            return measure(self.mask, truth, groups)
        true = check_several(truth, *self.mask.shape).to(self.mask.device)
        seen, held = (each.sum(dim=0) for each in (true, true & self.mask))
        by_class = {k: float(held[k] / seen[k]) for k in seen.nonzero()[:, 0].tolist()}
        return RiskEvaluation.of(self.covers(true), self.size, ~true.any(dim=1), by_class)

    def rows(self) -> list[dict[str, Any]]:
        """One dictionary per set: its labels (names where they are known), its size, and whether it holds every label."""
        return by_row(labels=self.labels(), size=self.size.tolist(), trivial=self.trivial.tolist())

    @property
    def traits(self) -> ndarray:
        """Size and first label."""
        mask = self.mask.cpu().numpy()
        first = mask.argmax(axis=1) * BINS // max(mask.shape[1], BINS)
        return np.stack([np.minimum(mask.sum(axis=1), BINS - 1), first], axis=1)

    def answers(self) -> list[dict[str, Any]]:
        """Labels as text, and their indices beside them."""
        numbers = replace(self, class_names=None).labels()
        return [
            {**row, "labels": [str(label) for label in row["labels"]], "indices": indices}
            for row, indices in zip(self.rows(), numbers, strict=True)
        ]

    def __iter__(self) -> Iterator[list[str] | list[int]]:
        yield from self.labels()

    def __repr__(self) -> str:
        n, classes = self.mask.shape
        mean = float(self.size.double().mean()) if n else 0.0
        full, none = int(self.trivial.sum()), int((self.size == 0).sum())
        kept = f"{100 * (1 - self.guarantee.alpha):g} %"
        if self.guarantee.shares:
            kept = f"at most {100 * self.guarantee.alpha:g} % of true labels missed on average,"
        made = f"{n} prediction {'set' if n == 1 else 'sets'} over {classes} classes, mean size {mean:.2f}"
        extreme = f"{full} of them the full label set" + (f", {none} empty" if none else "")
        return self.listed(
            f"{made}, {extreme}; {kept} {self.held}", (f"{{{', '.join(map(str, row))}}}" for row in self[:8])
        )


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


@dataclass(frozen=True)
class Multilabel(Labels):
    r"""Label sets from logits ``[n, N, K]``, one sigmoid each; the truth is a table ``[n, K]`` of booleans.

    The score of a label is minus its logit. The items of a point are its true labels with weight 1 / their number, so that its loss
    is the share of them that the set misses, the false negative rate; a point without true labels misses nothing.

    Attributes:
        class_names: for reading sets.
        classes: K, once outputs have been seen.

    Example:
        >>> task = Multilabel().seen(torch.zeros(2, 1, 3))
        >>> truth = task.check_truth([[1, 0, 1], [0, 0, 0]], 2)
        >>> items = task.items(torch.zeros(2, 1, 3), truth, Reading(True), torch.zeros(2))
        >>> items.weight, items.owner, items.points
        (tensor([0.5000, 0.5000], dtype=torch.float64), tensor([0, 0]), 2)
    """

    class_names: tuple[str, ...] | None = None
    classes: int | None = None

    name = "multilabel"
    axes = ("points", "draws", "labels")
    fewest = 1
    words = "the expected share of a query's true labels that its set misses"
    shares = True
    single = False
    assumptions = ("A query without true labels misses nothing: it counts as 0 in the expected share.",)

    @property
    def score_name(self) -> str:
        return "logit"

    def check_truth(self, truth: Any, n: int) -> Tensor:
        return check_several(truth, n, self.classes)

    def counted(self, truth: Tensor) -> int:
        return truth.shape[1] if truth.ndim == 2 else 1

    def prepare(self, outputs: Tensor, reading: Reading, u: Tensor) -> Draws:
        return Draws(-outputs.transpose(1, 2))

    def items(self, outputs: Tensor, truth: Tensor, reading: Reading, u: Tensor) -> Items:
        owner, label = truth.nonzero(as_tuple=True)
        weight = 1 / truth.sum(dim=1).double()[owner]
        return Items(Draws(-outputs.transpose(1, 2)[owner, label]), len(truth), weight, owner)

    def probe(self) -> Tensor:
        return self.prepare(probes((self.classes or 2,), -4.0, 4.0)[:, None], Reading(True), torch.zeros(4)).values
