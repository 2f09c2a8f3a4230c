"""UNets: from images to something of every pixel. One trunk serves segmentation and the denoiser."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from keepcover.models.inputs import Normalize

Sizes = tuple[int, ...]


class Block(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut. Between them a hint scales and shifts every channel, and nothing depends on the
    batch; without hints batch norm does.
    """

    def __init__(self, width: int, hints: int = 0) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        nn.init.zeros_(self.second.weight)
        self.hint = nn.Linear(hints, 2 * width) if hints else None
        self.norm = None if hints else nn.BatchNorm2d(width)
        for parameter in self.hint.parameters() if self.hint else ():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor, hint: Tensor | None) -> Tensor:
        inner = self.first(x)
        if self.norm is not None:
            inner = self.norm(inner)
        if self.hint is not None:
            scale, shift = self.hint(hint)[..., None, None].chunk(2, dim=1)
            inner = inner * (1 + scale) + shift
        return x + self.second(F.silu(inner))


class Trunk(nn.Module):
    """Images [n, inputs, h, w] of any size to [n, outputs, h, w], told one number per image where there are ``hints``.

    All work is at half the resolution and below. Sides are filled up to a multiple of 2 per level by repeating the last pixel.

    Args:
        inputs, outputs: channels.
        widths, blocks: channels, and blocks in all, at 1/2, 1/4, ... of the resolution.
        hints: features of the number; 0 where none is told.
    """

    def __init__(self, inputs: int, outputs: int, widths: Sizes, blocks: Sizes, hints: int = 0) -> None:
        super().__init__()
        if hints:
            self.hints = nn.Sequential(nn.Linear(1, hints), nn.SiLU(), nn.Linear(hints, hints), nn.SiLU())
        self.stem = nn.Conv2d(4 * inputs, widths[0], 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(fine, coarse, 2, stride=2) for fine, coarse in pairwise(widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(coarse, fine, 2, stride=2) for fine, coarse in pairwise(widths))
        # Of a level's blocks the smaller half is on the way down, the rest on the way up; the coarsest has one way.
        self.before = nn.ModuleList(_level(w, hints, n // 2) for w, n in zip(widths[:-1], blocks, strict=False))
        self.coarsest = _level(widths[-1], hints, blocks[-1])
        self.after = nn.ModuleList(_level(w, hints, n - n // 2) for w, n in zip(widths[:-1], blocks, strict=False))
        self.last = nn.Conv2d(widths[0], 4 * outputs, 3, padding=1)
        nn.init.zeros_(self.last.weight)

    def through(self, x: Tensor, told: Tensor | None = None) -> Tensor:
        """The whole way down and up; ``told`` is [n, 1] or [1, 1]."""
        height, width = x.shape[2:]
        side = 2 ** (len(self.down) + 1)
        x = F.pad(x, (0, -width % side, 0, -height % side), mode="replicate")
        hint = None if told is None else self.hints(told)
        x, skipped = self.stem(F.pixel_unshuffle(x, 2)), []
        for level, down in zip(self.before, self.down, strict=True):
            x = _through(level, x, hint)
            skipped.append(x)
            x = down(x)
        x = _through(self.coarsest, x, hint)
        for level, up in zip(reversed(self.after), reversed(self.up), strict=True):
            x = _through(level, up(x) + skipped.pop(), hint)
        return F.pixel_shuffle(self.last(x), 2)[..., :height, :width]


def _level(width: int, hints: int, count: int) -> nn.ModuleList:
    return nn.ModuleList(Block(width, hints) for _ in range(count))


def _through(level: Any, x: Tensor, hint: Tensor | None) -> Tensor:
    for block in level:
        x = block(x, hint)
    return x


class UNet(Trunk):
    """A small network for segmentation: images [n, c, h, w] of any size in [0, 1] to logits [n, classes, h, w].

    Args:
        classes: logits per pixel.
        width: a measure of its size: 16 gives 1 M parameters.
        channels: of the images.

    Example:
        >>> import torch
        >>> UNet(classes=5, width=4)(torch.rand(2, 3, 45, 60)).shape
        torch.Size([2, 5, 45, 60])
    """

    def __init__(self, classes: int, width: int = 16, channels: int = 3) -> None:
        super().__init__(channels, classes, (2 * width, 4 * width, 6 * width, 8 * width), (2, 2, 2, 1))
        self.normalize = Normalize((0.45,) * channels, (0.27,) * channels)

    def forward(self, images: Tensor) -> Tensor:
        return self.through(self.normalize(images))
