"""Figures from rows and tensors. Nothing here computes a guarantee."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from holdfast.errors import InputError

COLORS = ("#0b5d8a", "#c8553d", "#3f7d4e", "#8a5fa8", "#b8860b", "#4b5563", "#d1708f", "#2aa198", "#7c6f57", "#a03060")
VANILLA, CERTIFIED = "#c8553d", "#0b5d8a"


def _pyplot() -> Any:
    try:
        import matplotlib as mpl
    except ImportError:
        raise InputError("figures need matplotlib: pip install 'holdfast[report]'") from None
    mpl.use("Agg", force=False)
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
            "axes.axisbelow": True, "legend.frameon": False, "svg.fonttype": "path", "svg.hashsalt": "holdfast",
        }
    )  # fmt: skip
    return plt


def svg(figure: Any) -> str:
    """A figure as inline SVG, reproducible byte for byte."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    _pyplot().close(figure)
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _lines(
    curves: Mapping[str, Sequence[tuple[float, float]]], certified: Mapping[str, bool], x: str, y: str
) -> tuple[Any, Any]:
    """One line per method, dashed where nothing is certified, named at the right."""
    figure, axis = _pyplot().subplots(figsize=(7.2, 3.8))
    for index, (name, points) in enumerate(curves.items()):
        style = "-" if certified[name] else "--"
        axis.plot(
            *zip(*points, strict=True),
            style,
            marker="os^D"[index // len(COLORS) % 4],
            ms=4,
            color=COLORS[index % len(COLORS)],
            label=name,
        )
    axis.set(xlabel=x, ylabel=y)
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5), title="solid: certified", title_fontsize=8)
    return figure, axis


def size_curves(
    curves: Mapping[str, Sequence[tuple[float, float]]], classes: int, certified: Mapping[str, bool]
) -> Any:
    """Mean set size against epsilon, one line per method."""
    figure, axis = _lines(curves, certified, "epsilon (L2, pixel units)", "mean set size")
    axis.set_ylim(0, None)
    if max(size for points in curves.values() for _, size in points) > 0.6 * classes:
        axis.axhline(classes, color="#888", lw=0.8, ls=":")
    return figure


def coverage_curves(
    curves: Mapping[str, Sequence[tuple[float, float]]], alpha: float, certified: Mapping[str, bool]
) -> Any:
    """Attacked coverage against the attack radius, one line per method."""
    figure, axis = _lines(curves, certified, "attack radius (L2)", "coverage")
    axis.axhline(1 - alpha, color="#222", lw=1, ls=":")
    axis.set_ylim(None, 1.01)
    return figure


def score_densities(before: Tensor, after: Tensor, alpha: float) -> Any:
    """True-label scores under noise, before and after PTT, with the quantile that the threshold comes from."""
    plt = _pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(7.2, 2.8))
    for axis, scores, title in ((axes[0], before, "score"), (axes[1], after, "score after PTT")):
        axis.hist(scores.numpy(), bins=40, range=(0, 1), density=True, color=CERTIFIED, alpha=0.8)
        axis.axvline(
            float(scores.double().quantile(1 - alpha)), color=VANILLA, lw=1.5, label=f"{1 - alpha:.0%} quantile"
        )
        axis.set(xlabel=title, yticks=[], yscale="log")
    axes[0].set_ylabel("density (log)")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    return figure


def clean_and_attacked(rows: Sequence[Mapping[str, Any]], alpha: float) -> Any:
    """The motivating figure: coverage and size of every method, clean and under attack."""
    plt = _pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(9.2, 0.42 * len(rows) + 1.3), sharey=True)
    positions = list(range(len(rows)))[::-1]
    pairs = (("coverage", "attacked_coverage"), ("size", "attacked_size"))
    for axis, (clean, attacked) in zip(axes, pairs, strict=True):
        for offset, key, alpha_, label in ((0.2, clean, 0.45, "clean"), (-0.2, attacked, 1.0, "attacked")):
            values = [row[key]["mean"] if isinstance(row[key], Mapping) else row[key] for row in rows]
            colors = [CERTIFIED if row["certified"] else VANILLA for row in rows]
            bars = axis.barh(
                [p + offset for p in positions], values, height=0.36, color=colors, alpha=alpha_, label=label
            )
            axis.bar_label(bars, fmt="%.3f" if key.endswith("coverage") else "%.2f", fontsize=7, padding=2)
    axes[0].axvline(1 - alpha, color="#222", lw=1, ls="--")
    axes[0].text(
        1 - alpha, len(rows) - 0.35, f"{1 - alpha:.0%} promised", fontsize=8, ha="center",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
    )  # fmt: skip
    # Where every method stays high the differences are what matters, and the axis says where it begins.
    lowest = min(row[key]["mean"] for row in rows for key in ("coverage", "attacked_coverage"))
    start = 0.75 if lowest > 0.8 else 0.0
    axes[0].set(
        xlabel=f"coverage (axis from {start:g})" if start else "coverage", xlim=(start, start + 1.12 * (1 - start)),
        yticks=positions, yticklabels=[row["name"] for row in rows],
    )  # fmt: skip
    axes[1].set(xlabel="mean set size", xlim=(0, 1.12 * max(row["attacked_size"] for row in rows)))
    handles = [
        plt.Rectangle((0, 0), 1, 1, color=c, alpha=a)
        for c, a in ((CERTIFIED, 1), (VANILLA, 1), ("#666", 0.45), ("#666", 1))
    ]
    figure.legend(handles, ["certified", "not certified", "clean", "attacked"], ncol=4, loc="upper center", fontsize=8,
                  bbox_to_anchor=(0.55, 1.06))  # fmt: skip
    figure.tight_layout()
    return figure


def examples(clean: Tensor, attacked: Tensor, captions: Sequence[tuple[str, str]], titles: Sequence[str]) -> Any:
    """Images before and after the attack, with their sets written below."""
    plt = _pyplot()
    count = len(clean)
    figure, axes = plt.subplots(2, count, figsize=(2.0 * count, 5.4), squeeze=False)
    for column in range(count):
        for row, (image, caption) in enumerate(zip((clean[column], attacked[column]), captions[column], strict=True)):
            axis = axes[row][column]
            _show(axis, image)
            axis.set_xlabel(caption, fontsize=8)
        axes[0][column].set_title(titles[column], fontsize=9)
    axes[0][0].set_ylabel("clean")
    axes[1][0].set_ylabel("attacked")
    figure.tight_layout()
    return figure


def size_histogram(counts: Sequence[int]) -> Any:
    """How many sets have each size, from 0 labels to all."""
    figure, axis = _pyplot().subplots(figsize=(7.2, 2.6))
    bars = axis.bar(range(len(counts)), counts, color=CERTIFIED, alpha=0.85)
    if len(counts) <= 21:
        axis.bar_label(bars, labels=[str(count) if count else "" for count in counts], fontsize=8, padding=2)
        axis.set_xticks(range(len(counts)))
    axis.set(xlabel="labels in the set", ylabel="sets")
    figure.tight_layout()
    return figure


def coverage_by_class(names: Sequence[str], shares: Sequence[tuple[float, float, float]], alpha: float) -> Any:
    """Coverage of each true class as (mean, low, high), with the promised average."""
    figure, axis = _pyplot().subplots(figsize=(7.2, 0.28 * len(names) + 1.0))
    for position, (mean, low, high) in enumerate(reversed(shares)):
        axis.plot([low, high], [position, position], color=CERTIFIED, lw=2, alpha=0.5)
        axis.plot([mean], [position], "o", color=CERTIFIED, ms=5)
    axis.axvline(1 - alpha, color="#222", lw=1, ls=":")
    axis.set(xlabel="coverage", xlim=(min(low for _, low, _ in shares) - 0.02, 1.01), yticks=range(len(names)),
             yticklabels=list(reversed(names)))  # fmt: skip
    figure.tight_layout()
    return figure


def gallery(images: Tensor, captions: Sequence[str], titles: Sequence[str], columns: int = 6) -> Any:
    """Images [n, 1 or 3, height, width] in rows, each with a title and its set below."""
    rows = -(-len(images) // columns)
    figure, axes = _pyplot().subplots(rows, columns, figsize=(1.5 * columns, 2.2 * rows), squeeze=False)
    for axis in axes.flat:
        axis.axis("off")
    for axis, image, caption, title in zip(axes.flat, images, captions, titles, strict=False):
        _show(axis, image)
        axis.axis("on")
        axis.set_xlabel(caption, fontsize=7)
        axis.set_title(title, fontsize=8)
    figure.tight_layout()
    return figure


def _show(axis: Any, image: Tensor) -> None:
    pixels = image.clamp(0, 1).permute(1, 2, 0).numpy()
    axis.imshow(pixels[..., 0] if pixels.shape[2] == 1 else pixels, cmap="gray_r", vmin=0, vmax=1)
    axis.set(xticks=[], yticks=[])
    axis.grid(False)
