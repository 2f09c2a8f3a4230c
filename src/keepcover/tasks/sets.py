"""Label sets as people read them, as tables hold them and as they are measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Int
from numpy import ndarray
from torch import Tensor

from keepcover.guarantee import Guarantee
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
