"""Label sets as people read them, as tables hold them and as they are measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Bool, Int
from torch import Tensor

from keepcover.guarantee import Guarantee
from keepcover.tasks.metrics import Evaluation, check_labels, measure


@dataclass(frozen=True, repr=False)
class PredictionSets:
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

    def covers(self, truth: Any) -> Bool[Tensor, " n"]:
        """Whether each set contains the true label."""
        labels = check_labels(truth, *self.mask.shape).to(self.mask.device)
        return self.mask.gather(1, labels[:, None])[:, 0]

    def measure(self, truth: Any) -> Evaluation:
        """Coverage, size and breakdowns against the true labels."""
        return measure(self.mask, truth)

    def rows(self) -> list[dict[str, Any]]:
        """One dictionary per set: its labels (names where they are known), its size, and whether it holds every label."""
        return [
            {"labels": labels, "size": len(labels), "trivial": trivial}
            for labels, trivial in zip(self.labels(), self.trivial.tolist(), strict=True)
        ]

    def __len__(self) -> int:
        return len(self.mask)

    def __iter__(self) -> Iterator[list[str] | list[int]]:
        yield from self.labels()

    def __getitem__(self, index: int | Tensor | slice) -> PredictionSets:
        """Some of the sets; an integer gives one, still as :class:`PredictionSets`."""
        if isinstance(index, int):
            index = slice(index, index + 1 or None)
        used = None if self.draws_used is None else self.draws_used[index]
        return PredictionSets(self.mask[index], self.guarantee, self.class_names, used)

    def __repr__(self) -> str:
        n, classes = self.mask.shape
        mean = float(self.size.double().mean()) if n else 0.0
        full, none = int(self.trivial.sum()), int((self.size == 0).sum())
        lines = [
            f"{n} prediction sets over {classes} classes, mean size {mean:.2f}, "
            f"{full} of them the full label set{f', {none} empty' if none else ''}; {100 * (1 - self.guarantee.alpha):g} % "
            + (f"certified within {self.guarantee.threat.reach}" if self.guarantee.certified else "on clean data only")
        ]
        lines += [f"  {i}: {{{', '.join(map(str, row))}}}" for i, row in enumerate(self[:8])]
        return "\n".join([*lines, f"  ... {n - 8} more"] if n > 8 else lines)
