"""Random views of images under noise, made on the device where the images lie."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from keepcover.data import Labelled
from keepcover.engine.inputs import extremes
from keepcover.errors import InputError
from keepcover.noise import Noise
from keepcover.training.recipe import Device, Recipe


def half(device: torch.device) -> torch.autocast:
    """bfloat16 on a GPU. Without the cache of weights: a recorded step must cast them anew."""
    return torch.autocast("cuda", torch.bfloat16, device.type == "cuda", cache_enabled=False)


def padded_bytes(images: Tensor, pad: int) -> Tensor:
    """Images in [0, 1] as uint8 pixels with a black border, for :func:`augment`. Beyond [0, 1] bytes would wrap around.

    Example:
        >>> padded_bytes(torch.ones(1, 1, 1, 1), 1)[0, 0].tolist()
        [[0, 0, 0], [0, 255, 0], [0, 0, 0]]
    """
    low, high = extremes(images) if images.is_floating_point() else (math.nan, math.nan)
    if not (low > -0.5 / 255 and high < 255.5 / 255):
        found = f"values in [{low:.3g}, {high:.3g}]" if images.is_floating_point() else str(images.dtype)
        advice = "divide 8-bit pixels by 255, and put any other normalisation inside the model"
        raise InputError(f"expected float images in [0, 1], the units of sigma, got {found}; {advice}")
    return nn.functional.pad((images * 255).round().to(torch.uint8), [pad] * 4)


def places(count: int, size: Sequence[int], room: Sequence[int], flip: bool, device: Device) -> tuple[Tensor, Tensor]:
    """Rows [count, h, 1] and columns [count, 1, w] of random crops of ``size``, mirrored at random; ``room`` is how far they move."""
    height, width = size
    corner = [torch.randint(0, most + 1, (count, 1), device=device) for most in room]
    rows = corner[0] + torch.arange(height, device=device)
    columns = torch.arange(width, device=device).expand(count, width)
    if flip:
        mirrored = torch.rand(count, 1, device=device) < 0.5
        columns = torch.where(mirrored, width - 1 - columns, columns)
    return rows[:, :, None], (corner[1] + columns)[:, None, :]


def augment(padded: Tensor, index: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """What lies at these places of ``padded`` [n, c, h + 2 pad, w + 2 pad], uint8, as float images in channels-last memory."""
    picked = padded[index[:, None, None], :, rows, columns]  # [b, h, w, c]
    return picked.permute(0, 3, 1, 2).float() / 255


def boxes(share: Tensor, height: int, width: int) -> Tensor:
    """Masks [n, 1, height, width], true inside a rectangle with a random middle and ``share`` [n] of each side's length."""
    middle = torch.rand(2, len(share), 1, device=share.device)
    sides = []
    for length, at in zip((height, width), middle, strict=True):
        place = (torch.arange(length, device=share.device) + 0.5) / length
        sides.append((place - at).abs() < share[:, None] / 2)
    return (sides[0][:, :, None] & sides[1][:, None, :])[:, None]


class Views:
    """Images and labels on a device, and what a recipe does to them.

    Args:
        images: bytes with a border (:func:`padded_bytes`), of which crops and mirrors are taken; or floats or tokens, taken as they are.
        labels: where there are any. Labels of pixels [n, h, w] have the border of the images, and are cropped and mirrored with them.
        recipe: of the training.
        device: where everything happens.
        noise: in place of the recipe's.
    """

    def __init__(
        self, images: Tensor, labels: Tensor | None, recipe: Recipe, device: Device, noise: Noise | None = None
    ) -> None:
        self.recipe, self.device, self.noise = recipe, torch.device(device), noise or recipe.law
        if labels is not None and labels.ndim == 3 and recipe.cutmix:
            raise InputError("cutmix mixes labels of whole images; set it to 0 for labels of pixels")
        self.images, self.labels = images.to(self.device), None if labels is None else labels.to(self.device)

    @classmethod
    def of(cls, data: Labelled, recipe: Recipe, device: Device, border: int = 0) -> Views:
        """``border`` is the label of the black border, for labels of pixels: the one that training ignores."""
        labels = data.labels
        if labels.ndim == 3:
            labels = nn.functional.pad(labels, [recipe.pad] * 4, value=border)
        return cls(padded_bytes(data.images, recipe.pad), labels, recipe, device)

    def __len__(self) -> int:
        return len(self.images)

    def clean(self, index: Tensor) -> Tensor:
        return self.pick(index)[0]

    def pick(self, index: Tensor) -> tuple[Tensor, Tensor | None]:
        """New views without noise, and their labels."""
        labels = None if self.labels is None else self.labels[index]
        if self.images.dtype != torch.uint8:
            return self.images[index], labels
        pad, here = self.recipe.pad, torch.arange(len(index), device=self.device)[:, None, None]
        size = self.images.shape[2] - 2 * pad, self.images.shape[3] - 2 * pad
        rows, columns = places(len(index), size, (2 * pad, 2 * pad), self.recipe.flip, self.device)
        if labels is not None and labels.ndim == 3:
            labels = labels[here, rows, columns]
        return augment(self.images, index, rows, columns), labels

    def cut(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Images with rectangles of their neighbours and grey squares; the share that is their own, where there are neighbours."""
        recipe, (count, _, *size), own = self.recipe, images.shape, None
        if recipe.cutmix:
            chosen = torch.rand(count, device=self.device) < recipe.cutmix
            mask = boxes(chosen * torch.rand(count, device=self.device).sqrt(), *size)
            images = torch.where(mask, images.roll(1, 0), images)
            own = 1 - mask.float().mean(dim=(1, 2, 3)).repeat_interleave(recipe.copies)
        if recipe.cutout:
            share = torch.full((count,), recipe.cutout / min(size), device=self.device)
            images = images.masked_fill(boxes(share, *size), 0.5)
        return images, own

    def noisy(self, images: Tensor, copies: int) -> Tensor:
        """Every image under so many noises, side by side."""
        if copies > 1:
            images = images.repeat_interleave(copies, dim=0)
            if images.ndim == 4:
                images = images.contiguous(memory_format=torch.channels_last)
        noisy = self.noise.fresh(images)
        return noisy.float() if noisy.is_floating_point() else noisy

    def logits(self, model: nn.Module, index: Tensor, copies: int) -> Tensor:
        """What the model says of new noisy views: [b, copies, classes]."""
        with half(self.device):
            out = model(self.noisy(self.clean(index), copies))
        return out.float().reshape(len(index), copies, -1)
