"""Segmentation: outputs are logits of every pixel, and a set holds labels for pixels: all of them, or masks of some classes."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keepcover.errors import InputError
from keepcover.guarantee import Guarantee
from keepcover.noise.stream import probes
from keepcover.scores import Draws, Items, Reading
from keepcover.tasks.base import Rule
from keepcover.tasks.candidates import Candidates
from keepcover.tasks.pixels import PixelSets, check_map, wanted_pixels

PIXELS = 1024  # of every holdout image that sizes are estimated on, and as many items: a choice of rules takes no more


@dataclass(frozen=True)
class Segmentation(Candidates):
    r"""Labels of pixels from logits ``[n, N, K, h, w]``; the truth is a map ``[n, h, w]`` of classes.

    The score of a class at a pixel is the log-odds against it, :math:`\log \sum_{j \ne k} e^{l_j} - l_k`. The items of an image are
    its pixels with their true class, all of equal weight, 1 / their number, so that its loss is the share of them that are missed; pixels
    of the class ``ignore`` are none, and an image without items misses nothing.

    - ``of=()``: every pixel has a set of labels, and its true one should be in it.
    - ``of=("pedestrian", "car")``: masks of these classes. Items are the pixels of these classes alone, so that the promise is about
      the recall of each image's pedestrians and cars. Labels of other classes are not promised anything.

    Attributes:
        of: names or numbers of the classes whose pixels must not be missed; all of them by default.
        ignore: the number in the truth that stands for no class.
        class_names: for reading sets.
        classes: K, once outputs have been seen.

    Example:
        >>> task = Segmentation(of=(1,), ignore=255).seen(torch.zeros(1, 2, 3, 2, 2))
        >>> truth = task.check_truth(torch.tensor([[[1, 0], [1, 255]]]), 1)
        >>> task.items(torch.zeros(1, 2, 3, 2, 2), truth, Reading(True), torch.zeros(1)).weight
        tensor([0.5000, 0.5000], dtype=torch.float64)
    """

    of: tuple[str | int, ...] = ()
    ignore: int | None = None
    class_names: tuple[str, ...] | None = None
    classes: int | None = None

    name = "segmentation"
    axes = ("images", "draws", "classes", "height", "width")
    shares = True
    single = False

    def __post_init__(self) -> None:
        of = self.of.tolist() if isinstance(self.of, np.ndarray | Tensor) else self.of
        of = (of,) if isinstance(of, str | Integral) else of
        if not isinstance(of, tuple | list | range) or not all(isinstance(one, str | Integral) for one in of):
            raise InputError(f"expected of= as names or numbers of classes, got {self.of!r:.60}")
        of = tuple(one if isinstance(one, str) else int(one) for one in of)
        object.__setattr__(self, "of", of)
        super().__post_init__()
        strange = [one for one in of if isinstance(one, str) and one not in (self.class_names or ())]
        if strange:
            known = ", ".join(self.class_names) if self.class_names else "no class_names were given"
            raise InputError(f"there is no class {strange[0]!r} to make masks of: {known}")
        known = set(self.chosen) - {self.ignore}
        if len(known) != len(of) or any(k not in range(self.classes or 2**31) for k in known):
            raise InputError(f"expected of= as different classes of the model, none of them ignored, got {list(of)}")

    @property
    def chosen(self) -> tuple[int, ...]:
        """The numbers of the classes that masks are made of; none where every pixel has a set."""
        return tuple((self.class_names or ()).index(one) if isinstance(one, str) else one for one in self.of)

    @property
    def words(self) -> str:  # type: ignore[override]
        if not self.of:
            return "the expected share of a query's pixels whose true label is missing from their sets"
        names = self.class_names or ()
        listed = ", ".join(names[k] if names else f"class {k}" for k in self.chosen)
        return f"the expected share of a query's pixels of {listed} that the mask of their class misses"

    @property
    def assumptions(self) -> tuple[str, ...]:  # type: ignore[override]
        what = "pixels of these classes" if self.of else "labelled pixels"
        return (f"A query without {what} misses nothing: it counts as 0 in the expected share.",)

    @property
    def score_name(self) -> str:
        return "hps"

    def check_truth(self, truth: Any, n: int) -> Tensor:
        return check_map(truth, n, self.classes, self.ignore)

    def counted(self, truth: Tensor) -> int:
        known = truth if self.ignore is None else truth[truth != self.ignore]
        return int(known.max()) + 1 if known.numel() else 1

    def prepare(self, outputs: Tensor, reading: Reading, u: Tensor) -> Draws:
        """Noisy log-odds of every class at every pixel, those of masks first: ``[n, N, K, h, w]`` -> ``[n, K, h, w, N]``."""
        against = _against(outputs.logsumexp(dim=2, keepdim=True) - outputs)
        if self.of:
            order = [*self.chosen, *(k for k in range(outputs.shape[2]) if k not in self.chosen)]
            against = against[:, :, order]
        return Draws(against.movedim(1, -1))

    def items(self, outputs: Tensor, truth: Tensor, reading: Reading, u: Tensor) -> Items:
        if truth.shape != (len(outputs), *outputs.shape[3:]):
            raise InputError(
                f"expected a label for each of {list(outputs.shape[3:])} pixels that the model returns, got truth "
                f"{list(truth.shape)}; bring both to one size"
            )
        wanted = wanted_pixels(truth, self.chosen, self.ignore)
        owner, row, column = wanted.nonzero(as_tuple=True)
        own = truth.where(wanted, 0)[:, None, None].expand(-1, outputs.shape[1], 1, -1, -1)
        scores = _against(outputs.logsumexp(dim=2) - outputs.gather(2, own)[:, :, 0])
        weight = 1 / wanted.flatten(1).sum(dim=1).double()[owner]
        return Items(Draws(scores.movedim(1, -1)[owner, row, column]), len(truth), weight, owner)

    def thinned(self, outputs: Tensor, items: Items) -> tuple[Tensor, Items]:
        """Some pixels of every image, side by side, and some of its items."""
        flat = outputs.flatten(3)
        some = torch.randperm(flat.shape[3], generator=torch.Generator().manual_seed(0))[:PIXELS].to(flat.device)
        return flat[..., some][..., None, :], items.thinned(PIXELS)

    def summary(self, prepared: Draws, rule: Rule, v: Tensor) -> Tensor:
        """The statistics of every class, or of those that masks are made of and the smallest of all others."""
        every = super().summary(prepared, rule, v)
        if not self.of or every.shape[1] == len(self.of):
            return every
        return torch.cat([every[:, : len(self.of)], every[:, len(self.of) :].amin(dim=1, keepdim=True)], dim=1)

    def measured(self, candidates: Tensor) -> Tensor:
        return candidates[:, : len(self.of)] if self.of else candidates

    def unit(self, candidates: Tensor) -> float:
        return 1 / (candidates.shape[2] * candidates.shape[3])

    def sized(self, size: float) -> str:
        return f"{size:.3g} labels per pixel" + (" of those in masks" if self.of else "")

    def sets(self, inside: Tensor, guarantee: Guarantee, draws_used: Tensor | None = None) -> PixelSets:
        return PixelSets(inside, guarantee, self.chosen, self.ignore, self.class_names, draws_used)

    def probe(self) -> Tensor:
        logits = probes((1, self.classes or 2, 1, 1), -4.0, 4.0)
        return self.prepare(logits, Reading(True), torch.zeros(len(logits))).values


def _against(surprise: Tensor) -> Tensor:
    """The log-odds against a class from minus the logarithm of its probability: log(e^s - 1), without overflow."""
    positive = surprise.clamp_min(1e-7)  # what float32 can tell from 0
    return positive + (-torch.expm1(-positive)).log()
