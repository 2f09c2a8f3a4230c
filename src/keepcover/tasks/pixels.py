"""Labels of pixels as people read them, as tables hold them and as they are measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from keepcover.errors import InputError
from keepcover.guarantee import Guarantee
from keepcover.tasks.metrics import RiskEvaluation, as_labels
from keepcover.tasks.shown import Shown, by_row

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
