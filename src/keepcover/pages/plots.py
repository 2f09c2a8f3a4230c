"""Figures from rows and tensors. Nothing here computes a guarantee.

A figure leaves in four forms: :func:`svg` and :func:`png` on white, for files; :func:`page_svg` for a page, whose
colours it takes, so that it can be read in light and dark; :func:`adaptive_svg` for a file that brings both.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from keepcover.errors import optional
from keepcover.files import make_folder, write_file

# Six colours that readers with any of the three colour blindnesses tell apart, on white and on the dark page.
COLORS = ("#0b5d8a", "#a3300a", "#05a387", "#4a0a2a", "#ad8e00", "#7420dc")
DARK = ("#6cb8ea", "#e8793c", "#5ff5e0", "#ee2b8a", "#ece3b4", "#b060ff")
CERTIFIED, VANILLA = COLORS[:2]
INK, SOFT, PAPER = "#1c2430", "#566070", "#ffffff"
MARKERS = "osD^vPX"  # one more than colours, so that both repeat together only after 42 lines
GUIDE = {"color": INK, "lw": 1, "ls": ":"}
_VARIABLES = {"#000000": "currentColor", INK: "currentColor", SOFT: "var(--soft)", PAPER: "var(--card)"}
_VARIABLES |= {color: f"var(--c{i})" for i, color in enumerate(COLORS)}
STYLE: dict[Any, Any] = {"font.size": 10, "grid.alpha": 0.2, "svg.fonttype": "path", "svg.hashsalt": "keepcover"}
STYLE |= {"axes.grid": True, "axes.axisbelow": True}
STYLE |= dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False)
STYLE |= {f"{part}color": INK for part in ("grid.", "text.", "axes.label", "axes.edge", "xtick.", "ytick.")}


P = ParamSpec("P")
T = TypeVar("T")


def styled(draw: Callable[P, T]) -> Callable[P, T]:
    """A function that draws or saves, in the house's style; a notebook's own figures keep theirs."""

    @wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> T:
        with optional("matplotlib", "figures need matplotlib", "report").rc_context(STYLE):
            return draw(*args, **kwargs)

    return drawn


def subplots(rows: int = 1, columns: int = 1, figsize: Any = None, layout: Any = None, **how: Any) -> tuple[Any, Any]:
    """A figure and its axes, for what is :func:`styled`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize, layout=layout)
    return figure, figure.subplots(rows, columns, **how)


# -- the forms of a figure ---------------------------------------------------------------------------------------------


@styled
def _saved(figure: Any, form: str, unsaid: Sequence[str], **options: Any) -> bytes:
    """A file of the figure, reproducible byte for byte. The layout is computed once: every form then looks the same."""
    if figure.get_constrained_layout():
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
    buffer = io.BytesIO()
    figure.savefig(buffer, format=form, bbox_inches="tight", metadata=dict.fromkeys(unsaid), **options)
    return buffer.getvalue()


def svg(figure: Any, **options: Any) -> str:
    """A figure on white as SVG."""
    text = _saved(figure, "svg", ("Date", "Creator"), **options).decode()
    return text[text.index("<svg") :]


def png(figure: Any, dpi: int = 200) -> bytes:
    """A figure on white as PNG."""
    return _saved(figure, "png", ("Software",), dpi=dpi)


def page_svg(figure: Any, name: str) -> str:
    """Inline SVG whose ink and colours are the page's (``currentColor`` and CSS variables), on no background.

    Its identifiers begin with ``name``, so that several may stand on one page.
    """
    text = re.sub(r'<g id="[^"]*"', "<g", svg(figure, transparent=True))
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    # Black is what SVG fills with where nothing is said: glyphs then take the page's ink from the root.
    for color, variable in _VARIABLES.items():
        text = re.sub(rf"((?:fill|stroke): ?){color}\b", rf"\g<1>{variable}", text)
    return text


def adaptive_svg(figure: Any, name: str) -> str:
    """SVG for a file that pages show as an image: on white in a light scheme, on dark in a dark one."""

    def scheme(ink: str, soft: str, paper: str, colors: Sequence[str]) -> str:
        own = "".join(f"--c{i}:{color};" for i, color in enumerate(colors))
        return f"svg{{color:{ink};fill:currentColor;background:{paper};--soft:{soft};--card:{paper};{own}}}"

    light = scheme(INK, SOFT, PAPER, COLORS)
    dark = scheme("#e6e9ee", "#a5afbd", "#1c222b", DARK)
    head, rest = page_svg(figure, name).split(">", 1)
    return f"{head}><style>{light}@media (prefers-color-scheme: dark){{{dark}}}</style>{rest}"


def write_files(figure: Any, folder: Path, name: str) -> list[Path]:
    """``name.svg`` and ``name.png`` in a folder, each written whole or not at all."""
    made = {make_folder(folder) / f"{name}.svg": svg(figure).encode(), folder / f"{name}.png": png(figure)}
    for path, content in made.items():
        write_file(path, content)
    return [*made]


def pixels(image: Tensor) -> bytes:
    """An image [1, 3 or 4, height, width] in [0, 1] as PNG, one pixel each, as it is: 0 is black."""
    pil, buffer = optional("PIL.Image", "pictures need Pillow", "report"), io.BytesIO()
    values = (image.detach().cpu().clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    pil.fromarray(values[..., 0] if values.shape[2] == 1 else values).save(buffer, "PNG")
    return buffer.getvalue()


def data_uri(image: Tensor) -> str:
    """The same as an address that holds all of it."""
    return f"data:image/png;base64,{base64.b64encode(pixels(image)).decode()}"


# -- drawings ----------------------------------------------------------------------------------------------------------

WIDTH = 4.6  # inches: two beside each other on a desktop page, one on a phone, with letters that can be read on both
Curve = Sequence[tuple[float, ...]]  # (x, y) or (x, y, low, high)


def _named_lines(names: Sequence[str]) -> tuple[Any, Any, list[tuple[str, str, str]]]:
    """A figure with room for names below it, its axis, and (name, colour, marker) of every line."""
    figure, axis = subplots(figsize=(WIDTH, 3.0 + 0.2 * -(-len(names) // 2)), layout="constrained")
    styles = [(name, COLORS[i % len(COLORS)], MARKERS[i % len(MARKERS)]) for i, name in enumerate(names)]
    return figure, axis, styles


def _legend(figure: Any, certified: Mapping[str, bool], words: str) -> None:
    """The names below; the words say how certified lines are drawn, where there are others."""
    title = words if len(set(certified.values())) > 1 else None
    figure.legend(fontsize=8, loc="outside lower center", ncols=2, title=title, title_fontsize=8)


def _patches(figure: Any, looks: Mapping[str, Mapping[str, Any]], **options: Any) -> None:
    """What colours mean, in a line outside the axes."""
    from matplotlib.patches import Patch

    figure.legend(handles=[Patch(label=name, **look) for name, look in looks.items()], ncols=4, **options)


def in_groups(curves: Mapping[str, Curve]) -> list[dict[str, Curve]]:
    """Curves for several figures, so few for each that no two lines in it share a colour.

    Example:
        >>> [list(group) for group in in_groups(dict.fromkeys("abcdefgh", ()))]
        [['a', 'b', 'c', 'd'], ['e', 'f', 'g', 'h']]
    """
    names = list(curves)
    size = -(-len(names) // -(-len(names) // len(COLORS)))
    return [{name: curves[name] for name in names[at : at + size]} for at in range(0, len(names), size)]


@styled
def radius_curves(
    curves: Mapping[str, Curve],
    certified: Mapping[str, bool],
    x: str,
    y: str = "mean set size",
    guides: Sequence[float] = (),
    limits: tuple[float | None, float | None] = (0.0, None),
) -> Any:
    """Sizes or coverages against a radius, one line per name, dashed where nothing is certified, with intervals where
    points have them. A guide far above every line is left out; ``limits`` of the y axis make figures comparable.
    """
    figure, axis, styles = _named_lines([*curves])
    for name, color, marker in styles:
        at, values, *ends = zip(*curves[name], strict=True)
        axis.plot(at, values, "-" if certified[name] else "--", marker=marker, ms=4.5, lw=1.4, color=color, label=name)
        if ends:
            axis.vlines(at, *ends, color=color, lw=4, alpha=0.3)
    highest = max(point[1] for points in curves.values() for point in points)
    for guide in guides:
        if highest > 0.6 * guide:
            axis.axhline(guide, **GUIDE)
    axis.set(xlabel=x, ylabel=y, ylim=limits)
    if len(curves) > 1:
        _legend(figure, certified, "solid: certified; dashed: not")
    return figure


@styled
def size_against_coverage(points: Mapping[str, Curve], alpha: float, certified: Mapping[str, bool]) -> Any:
    """Methods by their coverage and mean size: (coverage, size, deviations of both over splits); hollow: not certified."""
    figure, axis, styles = _named_lines([*points])
    for name, color, marker in styles:
        ((coverage, size, *deviations),) = points[name]
        fill = color if certified[name] else "none"
        axis.errorbar(coverage, size, *deviations[::-1], fmt=marker, ms=6, lw=1, color=color, mfc=fill, label=name)
    axis.axvline(1 - alpha, **GUIDE)
    sizes = [size for ((_, size, *_),) in points.values()]
    axis.set(xlabel=f"coverage, clean (dotted: {1 - alpha:g})", ylabel="mean set size")
    if max(sizes) > 8 * max(min(sizes), 1e-9):  # a logarithmic axis that says 1, 2, 5, 10 and not powers of ten
        axis.set_yscale("log")
        axis.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("")
    else:
        axis.set_ylim(0, None)
    _legend(figure, certified, "filled: certified; hollow: not")
    return figure


@styled
def score_densities(before: Tensor, after: Tensor, alpha: float) -> Any:
    """True-label scores under noise, before and after PTT, with the quantile that the threshold comes from."""
    figure, axes = subplots(2, 1, figsize=(WIDTH, 3.6), sharex=True, layout="constrained")
    for axis, scores, title in ((axes[0], before, "score"), (axes[1], after, "score after PTT")):
        axis.hist(scores.numpy(), bins=40, range=(0, 1), density=True, color=CERTIFIED, alpha=0.8)
        quantile = float(scores.double().quantile(1 - alpha))
        axis.axvline(quantile, color=VANILLA, lw=1.5, label=f"{1 - alpha:.0%} quantile")
        axis.set(yticks=[], yscale="log", ylabel="density (log)")
        axis.set_title(title, fontsize=10)
        axis.minorticks_off()
    axes[0].legend(fontsize=8)
    return figure


@styled
def clean_and_attacked(
    rows: Sequence[Mapping[str, Any]], alpha: float, panels: Sequence[str] = ("coverage", "size")
) -> Any:
    """The motivating figure: coverage and size of every method, clean and under attack; or one of the two."""
    shape = (9.2 if len(panels) > 1 else WIDTH, 0.42 * len(rows) + 1.4)
    figure, axes = subplots(1, len(panels), figsize=shape, sharey=True, squeeze=False, layout="constrained")
    positions = range(len(rows))[::-1]
    colors = [CERTIFIED if row["certified"] else VANILLA for row in rows]
    for axis, what in zip(axes[0], panels, strict=True):
        drawn: list[float] = []
        for offset, key, opacity in ((0.2, what, 0.45), (-0.2, f"attacked_{what}", 1.0)):
            values = [row[key]["mean"] if what == "coverage" else row[key] for row in rows]
            bars = axis.barh([p + offset for p in positions], values, height=0.36, color=colors, alpha=opacity)
            axis.bar_label(bars, fmt="%.3f" if what == "coverage" else "%.2f", fontsize=7, padding=2)
            drawn += values
        axis.set(yticks=positions, yticklabels=[row["name"] for row in rows], ylim=(-0.6, len(rows) - 0.1))
        axis.grid(axis="y", visible=False)
        if what == "size":
            axis.set(xlabel="mean set size", xlim=(0, 1.16 * (max(drawn) or 1)))
            continue
        axis.axvline(1 - alpha, color=INK, lw=1, ls="--")
        words: dict[str, Any] = {"s": f"{1 - alpha:.0%} promised", "fontsize": 8, "ha": "center", "va": "bottom"}
        axis.text(1 - alpha, len(rows) - 0.45, bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1}, **words)
        # Where every method stays high the differences are what matters, and the axis says where it begins.
        start = 0.75 if min(drawn) > 0.8 else 0.0
        axis.set(xlabel="coverage" + f" (axis from {start:g})" * (start > 0), xlim=(start, 1.14 - 0.14 * start))
    looks = {"certified": {"color": CERTIFIED}, "not certified": {"color": VANILLA}}
    looks |= {"pale: clean": {"color": SOFT, "alpha": 0.45}, "full: attacked": {"color": SOFT}}
    _patches(figure, looks, loc="outside upper center", fontsize=8, columnspacing=0.9, handlelength=1)
    return figure


@styled
def size_shares(shares: Mapping[str, Sequence[float]]) -> Any:
    """Share of sets with 0, 1, 2, ... labels, a panel per method."""
    last = max(size for counts in shares.values() for size, share in enumerate(counts) if share)
    shape, shared = (WIDTH, max(2.4, 0.75 * len(shares) + 0.7)), {"sharex": True, "sharey": True}
    figure, axes = subplots(len(shares), 1, figsize=shape, squeeze=False, layout="constrained", **shared)
    ticks = [0, 0.5, 1] if max(map(max, shares.values())) > 0.6 else [0, 0.25, 0.5]
    for axis, (name, counts) in zip(axes[:, 0], shares.items(), strict=True):
        axis.bar(range(last + 1), counts[: last + 1], color=CERTIFIED, alpha=0.85)
        axis.set_title(name, fontsize=8, loc="left", pad=3)
        axis.set(ylim=(0, None), yticks=ticks)
        axis.tick_params(labelsize=8)
        axis.grid(axis="x", visible=False)
    if last <= 20:
        axes[-1, 0].set_xticks(range(last + 1))
    axes[-1, 0].set_xlabel("labels in the set")
    figure.supylabel("share of sets", fontsize=10)
    return figure


@styled
def coverage_by_class(names: Sequence[str], shares: Sequence[tuple[float, float, float]], alpha: float) -> Any:
    """Coverage of each true class as (mean, low, high), the first on top, with the promised average."""
    figure, axis = subplots(figsize=(WIDTH, 0.24 * len(names) + 1.0), layout="constrained")
    means, low, high = zip(*shares, strict=True)
    positions = range(len(names))[::-1]
    axis.hlines(positions, low, high, color=CERTIFIED, lw=2.5, alpha=0.5)
    axis.plot(means, positions, "o", color=CERTIFIED, ms=5)
    axis.axvline(1 - alpha, **GUIDE)
    short = [name if len(name) <= 24 else name[:23] + "…" for name in names]
    axis.set(xlabel="coverage", xlim=(min(low) - 0.02, 1.01), ylim=(-0.7, len(names) - 0.3))
    axis.set_yticks(positions, short, fontsize=8)
    return figure


# -- scenes and intervals ----------------------------------------------------------------------------------------------

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


@styled
def scenes_figure(
    rows: Sequence[Sequence[tuple[Tensor, Tensor | None]]], names: Sequence[str], said: Sequence[str] = ()
) -> Any:
    """Scenes and what is known of them, a row each.

    Args:
        rows: (image [1 or 3, height, width], where the truth is, or None for no outline) of every panel.
        names: of the columns.
        said: of every row.
    """
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
    looks = {"certain": {"color": CERTAIN}, "possible": {"color": POSSIBLE}, "excluded": {"color": EXCLUDED}}
    looks |= {"truth": {"facecolor": "none", "edgecolor": TRUTH}}
    _patches(figure, looks, loc="outside lower center", fontsize=9)
    return figure


@styled
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
