"""Scenes as a driver would read them, certain, possible and excluded; and intervals, sorted by length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from keepcover.pages.plots import CERTIFIED, VANILLA, WIDTH, subplots

# On a dim grey scene, and far apart in brightness, so that any eye tells them apart.
CERTAIN, POSSIBLE, EXCLUDED, TRUTH = "#e02d1f", "#ffd43b", "#707070", "#00c8ff"


def shaded(
    image: Float[Tensor, "c h w"], certain: Bool[Tensor, "h w"], possible: Bool[Tensor, "h w"]
) -> Float[Tensor, "3 h w"]:
    """A scene whose excluded pixels are grey and dim, whose possible ones are yellow and whose certain ones are red.

    Example:
        >>> sure, maybe = torch.tensor([[True, False, False]]), torch.tensor([[True, True, False]])
        >>> (10 * shaded(torch.ones(3, 1, 3), sure, maybe)[:, 0].T).round().int().tolist()
        [[9, 2, 1], [10, 8, 2], [5, 5, 5]]
    """
    grey = image.detach().float().clamp(0, 1).mean(dim=0)
    found = 0.5 * grey.expand(3, -1, -1)
    for mask, color in ((possible, POSSIBLE), (certain, CERTAIN)):
        paint = found.new_tensor([int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)])[:, None, None]
        found = torch.where(mask.to(found.device), paint * (0.45 + 0.55 * grey), found)
    return found


def scenes_figure(
    rows: Sequence[Sequence[tuple[Tensor, Tensor | None]]], names: Sequence[str], said: Sequence[str] = ()
) -> Any:
    """Scenes and what is known of them, a row each.

    Args:
        rows: (image [1 or 3, height, width], where the truth is, or None for no outline) of every panel.
        names: of the columns.
        said: of every row.
    """
    from matplotlib.patches import Patch

    height, width = rows[0][0][0].shape[1:]
    shape = (2.7 * len(names), 2.7 * height / width * len(rows) + 0.6)
    figure, axes = subplots(len(rows), len(names), figsize=shape, squeeze=False, layout="constrained")
    for line, row in zip(axes, rows, strict=True):
        for axis, (image, truth) in zip(line, row, strict=True):
            axis.imshow(image.detach().cpu().float().clamp(0, 1).expand(3, -1, -1).permute(1, 2, 0).numpy())
            if truth is not None and bool(truth.any()):
                axis.contour(truth.cpu().numpy(), levels=[0.5], colors=[TRUTH], linewidths=1)
            axis.set_axis_off()
    for axis, name in zip(axes[0], names, strict=True):
        axis.set_title(name, fontsize=10)
    for line, words in zip(axes, said, strict=False):
        line[0].text(-0.03, 0.5, words, rotation=90, ha="right", va="center", transform=line[0].transAxes)
    handles = [Patch(color=CERTAIN, label="certain"), Patch(color=POSSIBLE, label="possible")]
    handles += [Patch(color=EXCLUDED, label="excluded"), Patch(facecolor="none", edgecolor=TRUTH, label="truth")]
    figure.legend(handles=handles, ncols=4, loc="outside lower center", fontsize=9)
    return figure


def sorted_intervals(ends: Tensor, truth: Tensor) -> Any:
    """Intervals [n, 2] side by side in their order, with the truth as a dot, red where it is missed; infinite ends reach the frame."""
    figure, axis = subplots(figsize=(2 * WIDTH, 3.0), layout="constrained")
    finite = torch.cat([ends[ends.isfinite()], truth])
    low, high = float(finite.min()), float(finite.max())
    room = 0.05 * (high - low or 1.0)
    at = range(len(ends))
    shown = ends.nan_to_num(nan=torch.nan, neginf=low - 2 * room, posinf=high + 2 * room)
    axis.vlines(at, shown[:, 0], shown[:, 1], color=CERTIFIED, lw=max(0.8, min(4.0, 240 / len(ends))), alpha=0.45)
    held = (ends[:, 0] <= truth) & (truth <= ends[:, 1])
    for which, color, marker in ((held, CERTIFIED, "."), (~held, VANILLA, "x")):
        axis.plot(which.nonzero()[:, 0], truth[which], marker, color=color, ms=5)
    axis.set(xlabel="points, by length", ylabel="value", xticks=[], ylim=(low - room, high + room))
    return figure
