"""Segmentation: outputs are logits of every pixel, and a set holds labels for pixels: all of them, or masks of some classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from keepcover.errors import InputError
from keepcover.guarantee import Guarantee
from keepcover.noise.stream import probes
from keepcover.scores import Draws, Items, Reading
from keepcover.tasks.base import Candidates, Rule
from keepcover.tasks.metrics import RiskEvaluation, as_labels
from keepcover.tasks.shown import Shown, by_row

PIXELS = 1024  # of every holdout image that sizes are estimated on, and as many items: a choice of rules takes no more
STATES = ("certain", "possible", "excluded")  # of a pixel


def check_map(truth: Any, n: int, classes: int | None, ignore: int | None) -> Int[Tensor, "n h w"]:
    """The class of every pixel of n images, or an error that says what is wrong.

    Example:
        >>> check_map([[[0, 255]]], 1, 2, 255)
        tensor([[[  0, 255]]])
    """
    given = as_labels(truth)
    if given.ndim != 3 or len(given) != n:
        raise InputError(f"expected a class for every pixel, [{n}, height, width], got {list(given.shape)}")
    if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
        raise InputError(f"expected whole numbers as classes of pixels, got {given.dtype}")
    labels = given.long()
    wrong = (labels < 0) | (labels >= (classes or 2**31))
    wrong = wrong if ignore is None else wrong & (labels != ignore)
    if wrong.any():
        known = "" if classes is None else f" to {classes - 1}"
        raise InputError(
            f"expected classes 0{known} in the truth, got {int(labels[wrong][0])}; if that stands for pixels without a label, say "
            f"ignore={int(labels[wrong][0])}"
        )
    return labels


def wanted_pixels(truth: Tensor, of: tuple[int, ...], ignore: int | None) -> Bool[Tensor, "n h w"]:
    """Which pixels must not be missed: those of the chosen classes, or all that have a label."""
    if of:
        return torch.isin(truth, torch.tensor(of, device=truth.device))
    return torch.ones_like(truth, dtype=torch.bool) if ignore is None else truth != ignore


def runs(mask: Bool[Tensor, "h w"]) -> list[int]:
    """A mask as the lengths of its runs, row by row, the first of them outside.

    Example:
        >>> runs(torch.tensor([[True, True], [False, True]]))
        [0, 2, 1, 1]
    """
    flat = torch.cat([torch.zeros(1, dtype=torch.bool), mask.flatten().cpu()])
    ends = (flat[1:] != flat[:-1]).nonzero()[:, 0]
    return torch.cat([torch.zeros(1, dtype=torch.int64), ends, torch.tensor([mask.numel()])]).diff().tolist()


@dataclass(frozen=True, repr=False)
class PixelSets(Shown):
    """Which labels are kept at every pixel of n images.

    Attributes:
        mask: ``[n, K, h, w]``; or, for masks of some classes, ``[n, C + 1, h, w]``: those classes, and whether any other is kept.
        of: the classes that masks are made of; none where every pixel has a set of labels.
        ignore: the number in the truth that stands for no class.

    A pixel is **certain** where one label alone is kept, **possible** where a chosen label is kept beside others, and **excluded**
    where no chosen label is kept; each for one class, or for any of them.

    Example:
        >>> import keepcover
        >>> logits = torch.zeros(60, 4, 2, 2, 2)
        >>> logits[:, :, 1] = 2.0
        >>> truth = torch.ones(60, 2, 2).long()
        >>> predictor = keepcover.calibrate_outputs(logits, truth, task="segmentation", epsilon=0.1, sigma=0.5)
        >>> sets = predictor.predict_outputs(logits[:2])
        >>> sets.certain(1).all().item(), sets.excluded(0).all().item(), sets.size
        (True, True, tensor([1., 1.]))
    """

    mask: Bool[Tensor, "n planes h w"]
    guarantee: Guarantee
    of: tuple[int, ...] = ()
    ignore: int | None = None
    class_names: tuple[str, ...] | None = None
    draws_used: Int[Tensor, " n"] | None = None

    @property
    def planes(self) -> tuple[int, ...]:
        """The class of every plane of the mask that is one."""
        return self.of or tuple(range(self.mask.shape[1]))

    @property
    def names(self) -> tuple[str | int, ...]:
        """What classes are called: their numbers where they have no names."""
        return self.class_names or tuple(range(max(self.planes) + 1))

    @property
    def own(self) -> Bool[Tensor, "n c h w"]:
        """The planes of classes: without the one for all others."""
        return self.mask[:, : len(self.planes)]

    @property
    def size(self) -> Tensor:
        """Labels kept per pixel, of those that masks are made of, averaged over each image."""
        return self.own.flatten(1).sum(dim=1) / (self.mask.shape[2] * self.mask.shape[3])

    @property
    def area(self) -> Tensor:
        """The share of each image's pixels that are not excluded."""
        return self.own.any(dim=1).flatten(1).double().mean(dim=1)

    @property
    def trivial(self) -> Bool[Tensor, " n"]:
        """Images where every label is kept at every pixel: true, but it says nothing."""
        return self.own.flatten(1).all(dim=1)

    def kept(self, label: str | int | None = None) -> Bool[Tensor, "n h w"]:
        """The mask of one class, or of all together."""
        return self.own.any(dim=1) if label is None else self.own[:, self._plane(label)]

    def certain(self, label: str | int | None = None) -> Bool[Tensor, "n h w"]:
        """Where this label alone is kept, or any one alone."""
        return self.kept(label) & (self.mask.sum(dim=1) == 1)

    def possible(self, label: str | int | None = None) -> Bool[Tensor, "n h w"]:
        """Where this label is kept, and others are too."""
        return self.kept(label) & (self.mask.sum(dim=1) > 1)

    def excluded(self, label: str | int | None = None) -> Bool[Tensor, "n h w"]:
        """Where this label, or any, is not kept."""
        return ~self.kept(label)

    def _plane(self, label: str | int) -> int:
        number = self.names.index(label) if isinstance(label, str) and label in self.names else label
        if number not in self.planes:
            raise InputError(f"expected one of the classes {[self.names[k] for k in self.planes]}, got {label!r}")
        return self.planes.index(int(number))

    def _true(self, truth: Any) -> tuple[Tensor, Tensor, Tensor]:
        """The plane of every pixel's true class, which pixels must not be missed, and which of those are held."""
        known = None if self.of else self.mask.shape[1]
        labels = check_map(truth, len(self), known, self.ignore).to(self.mask.device)
        if labels.shape[1:] != self.mask.shape[2:]:
            raise InputError(f"expected truth of {list(self.mask.shape[2:])} pixels, got {list(labels.shape[1:])}")
        wanted = wanted_pixels(labels, self.of, self.ignore)
        plane = labels.where(wanted, 0)
        if self.of:
            place = torch.zeros(max(self.of) + 1, dtype=torch.int64, device=plane.device)
            place[list(self.of)] = torch.arange(len(self.of), device=plane.device)
            plane = place[plane.where(wanted, self.of[0])]
        return plane, wanted, self.mask.gather(1, plane[:, None])[:, 0] & wanted

    def covers(self, truth: Any) -> Tensor:
        """The share of every image's pixels, of the chosen classes where some are, whose true label is kept; 1 where there are none."""
        _, wanted, held = self._true(truth)
        count = wanted.flatten(1).sum(dim=1)
        return (held.flatten(1).sum(dim=1).double() / count.clamp_min(1)).where(count > 0, 1.0)

    def measure(self, truth: Any) -> RiskEvaluation:
        """The share of pixels missed per image, and the size of masks."""
        plane, wanted, held = self._true(truth)
        seen, kept = (plane[which].bincount(minlength=len(self.planes)) for which in (wanted, held))
        by_class = {k: float(kept[at] / seen[at]) for at, k in enumerate(self.planes) if seen[at]}
        return RiskEvaluation.of(self.covers(truth), self.size, ~wanted.flatten(1).any(dim=1), by_class)

    def rows(self) -> list[dict[str, Any]]:
        """One dictionary per image: shares of its pixels that are certain, possible and excluded, and the share of every class's
        mask.
        """
        shares = {name: getattr(self, name)().flatten(1).double().mean(dim=1).tolist() for name in STATES}
        areas = self.own.flatten(2).double().mean(dim=2).tolist()
        masks = [{self.names[k]: area for k, area in zip(self.planes, row, strict=True) if area} for row in areas]
        return by_row(**shares, masks=masks, size=self.size.tolist(), trivial=self.trivial.tolist())

    def answers(self) -> list[dict[str, Any]]:
        """Shares of pixels, and the masks as runs of pixels."""
        height, width = self.mask.shape[2:]
        made = []
        for row, own in zip(self.rows(), self.own.cpu(), strict=True):
            planes = [(k, mask) for k, mask in zip(self.planes, own, strict=True) if mask.any()]
            masks = [{"label": str(self.names[k]), "index": k, "runs": runs(mask)} for k, mask in planes]
            made.append({**row, "height": height, "width": width, "masks": masks})
        return made

    def arrays(self) -> dict[str, Tensor]:
        return {"mask": self.mask, "classes": torch.tensor(self.planes)}

    def __repr__(self) -> str:
        n, (height, width) = len(self), self.mask.shape[2:]
        mean = float(self.size.mean()) if n else 0.0
        kept = f"at most {100 * self.guarantee.alpha:g} % of them missed on average, {self.held}"
        head = f"labels of {height} x {width} pixels in {n} images, {mean:.3g} per pixel; {kept}"
        return self.listed(head, (", ".join(f"{row[name]:.1%} {name}" for name in STATES) for row in self[:8].rows()))


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
        of = (self.of,) if isinstance(self.of, str | int) else tuple(self.of)
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
