"""Figures from rows and tensors. Nothing here computes a guarantee.

A figure leaves in four forms: :func:`svg` and :func:`png` on white, for files; :func:`page_svg` for a page, whose
colours it takes, so that it can be read in light and dark; :func:`adaptive_svg` for a file that brings both.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from keepcover.errors import InputError, install
from keepcover.files import make_folder, write_file

# Six colours that readers with any of the three colour blindnesses tell apart, on white and on the dark page.
COLORS = ("#0b5d8a", "#a3300a", "#05a387", "#4a0a2a", "#ad8e00", "#7420dc")
DARK = ("#6cb8ea", "#e8793c", "#5ff5e0", "#ee2b8a", "#ece3b4", "#b060ff")
CERTIFIED, VANILLA = COLORS[:2]
INK, SOFT, PAPER = "#1c2430", "#566070", "#ffffff"
MARKERS = "osD^vPX"  # one more than colours, so that both repeat together only after 42 lines
GUIDE = {"color": INK, "lw": 1, "ls": ":"}
_VARIABLES = {
    "#000000": "currentColor",
    INK: "currentColor",
    SOFT: "var(--soft)",
    PAPER: "var(--card)",
    **{c: f"var(--c{i})" for i, c in enumerate(COLORS)},
}


def _pyplot() -> Any:
    try:
        import matplotlib as mpl
    except ImportError:
        raise InputError(f"figures need matplotlib: {install('report')}") from None
    mpl.use("Agg", force=False)
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            "font.size": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.alpha": 0.2,
            "axes.axisbelow": True,
            "legend.frameon": False,
            "svg.fonttype": "path",
            "svg.hashsalt": "keepcover",
            "grid.color": INK,
            **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), INK),
            "xtick.color": INK,
            "ytick.color": INK,
        }
    )
    return plt


def subplots(rows: int = 1, columns: int = 1, **options: Any) -> tuple[Any, Any]:
    """A figure in the house's style and its axes; nothing keeps it open."""
    plt = _pyplot()
    figure, axes = plt.subplots(rows, columns, **options)
    plt.close(figure)
    return figure, axes


# -- the forms of a figure ---------------------------------------------------------------------------------------------


def _settled(figure: Any) -> Any:
    """A figure whose layout is computed once: every form of it then looks the same."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    return figure


def svg(figure: Any, **options: Any) -> str:
    """A figure on white as SVG, reproducible byte for byte."""
    buffer = io.StringIO()
    _settled(figure).savefig(
        buffer, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None}, **options
    )
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def png(figure: Any, dpi: int = 200) -> bytes:
    """A figure on white as PNG."""
    buffer = io.BytesIO()
    _settled(figure).savefig(buffer, format="png", bbox_inches="tight", dpi=dpi, metadata={"Software": None})
    return buffer.getvalue()


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
    make_folder(folder)
    paths = [folder / f"{name}.svg", folder / f"{name}.png"]
    for path, content in zip(paths, (svg(figure).encode(), png(figure)), strict=True):
        write_file(path, content)
    return paths


def pixels(image: Tensor) -> bytes:
    """An image [1 or 3, height, width] as PNG, one pixel each, as it is: 0 is black."""
    _pyplot()
    from matplotlib.image import imsave

    values, buffer = image.detach().cpu().float().clamp(0, 1).permute(1, 2, 0).numpy(), io.BytesIO()
    shown = values[..., 0] if values.shape[2] == 1 else values
    imsave(buffer, shown, format="png", cmap="gray", vmin=0, vmax=1)
    return buffer.getvalue()


# -- drawings ----------------------------------------------------------------------------------------------------------

WIDTH = 4.6  # inches: two beside each other on a desktop page, one on a phone, with letters that can be read on both
Curve = Sequence[tuple[float, ...]]  # (x, y) or (x, y, low, high)


def _lines(curves: Mapping[str, Curve], certified: Mapping[str, bool], x: str, y: str) -> tuple[Any, Any]:
    """One line per name, dashed where nothing is certified, with intervals where points have them; names below."""
    figure, axis = subplots(figsize=(WIDTH, 3.0 + 0.2 * -(-len(curves) // 2)), layout="constrained")
    for index, (name, points) in enumerate(curves.items()):
        color = COLORS[index % len(COLORS)]
        axis.plot(
            [point[0] for point in points],
            [point[1] for point in points],
            "-" if certified[name] else "--",
            marker=MARKERS[index % len(MARKERS)],
            ms=4.5,
            lw=1.4,
            color=color,
            label=name,
        )
        for at, _, low, high in (point for point in points if len(point) == 4):
            axis.plot([at, at], [low, high], color=color, lw=4, alpha=0.3, solid_capstyle="butt")
    axis.set(xlabel=x, ylabel=y)
    if len(curves) > 1:
        title = "solid: certified; dashed: not" if len(set(certified.values())) > 1 else None
        figure.legend(fontsize=8, loc="outside lower center", ncols=2, title=title, title_fontsize=8)
    return figure, axis


def in_groups(curves: Mapping[str, Curve]) -> list[dict[str, Curve]]:
    """Curves for several figures, so few for each that no two lines in it share a colour.

    Example:
        >>> [list(group) for group in in_groups(dict.fromkeys("abcdefgh", ()))]
        [['a', 'b', 'c', 'd'], ['e', 'f', 'g', 'h']]
    """
    names = list(curves)
    size = -(-len(names) // -(-len(names) // len(COLORS)))
    return [{name: curves[name] for name in names[at : at + size]} for at in range(0, len(names), size)]


def size_curves(
    curves: Mapping[str, Curve],
    classes: int,
    certified: Mapping[str, bool],
    x: str = "epsilon",
    top: float | None = None,
) -> Any:
    """Mean set size against epsilon, one line per method; ``top`` ends the axis, so that figures can be compared."""
    figure, axis = _lines(curves, certified, x, "mean set size")
    axis.set_ylim(0, top)
    if max(point[1] for points in curves.values() for point in points) > 0.6 * classes:
        axis.axhline(classes, **GUIDE)
    return figure


def coverage_curves(
    curves: Mapping[str, Curve], alphas: Sequence[float], certified: Mapping[str, bool], x: str = "attack radius"
) -> Any:
    """Coverage against the attack's radius or the promised one, one line per method, with what is promised."""
    figure, axis = _lines(curves, certified, x, "coverage")
    for alpha in alphas:
        axis.axhline(1 - alpha, **GUIDE)
    axis.set_ylim(None, 1.01)
    return figure


def score_densities(before: Tensor, after: Tensor, alpha: float) -> Any:
    """True-label scores under noise, before and after PTT, with the quantile that the threshold comes from."""
    figure, axes = subplots(2, 1, figsize=(WIDTH, 3.6), sharex=True, layout="constrained")
    for axis, scores, title in ((axes[0], before, "score"), (axes[1], after, "score after PTT")):
        axis.hist(scores.numpy(), bins=40, range=(0, 1), density=True, color=CERTIFIED, alpha=0.8)
        axis.axvline(
            float(scores.double().quantile(1 - alpha)), color=VANILLA, lw=1.5, label=f"{1 - alpha:.0%} quantile"
        )
        axis.set(yticks=[], yscale="log", ylabel="density (log)")
        axis.set_title(title, fontsize=10)
        axis.minorticks_off()
    axes[0].legend(fontsize=8)
    return figure


PANELS = {"coverage": "attacked_coverage", "size": "attacked_size"}


def clean_and_attacked(rows: Sequence[Mapping[str, Any]], alpha: float, panels: Sequence[str] = tuple(PANELS)) -> Any:
    """The motivating figure: coverage and size of every method, clean and under attack; or one of the two."""
    width = 9.2 if len(panels) > 1 else WIDTH
    figure, axes = subplots(
        1, len(panels), figsize=(width, 0.42 * len(rows) + 1.4), sharey=True, squeeze=False, layout="constrained"
    )
    positions = list(range(len(rows)))[::-1]
    for axis, clean in zip(axes[0], panels, strict=True):
        for offset, key, opacity in ((0.2, clean, 0.45), (-0.2, PANELS[clean], 1.0)):
            values = [row[key]["mean"] if isinstance(row[key], Mapping) else row[key] for row in rows]
            colors = [CERTIFIED if row["certified"] else VANILLA for row in rows]
            bars = axis.barh([p + offset for p in positions], values, height=0.36, color=colors, alpha=opacity)
            axis.bar_label(bars, fmt="%.3f" if clean == "coverage" else "%.2f", fontsize=7, padding=2)
        axis.set(yticks=positions, yticklabels=[row["name"] for row in rows], ylim=(-0.6, len(rows) - 0.1))
        axis.grid(axis="y", visible=False)
        (_coverage_panel if clean == "coverage" else _size_panel)(axis, rows, alpha)
    from matplotlib.patches import Rectangle

    handles = [
        Rectangle((0, 0), 1, 1, color=c, alpha=a) for c, a in ((CERTIFIED, 1), (VANILLA, 1), (SOFT, 0.45), (SOFT, 1))
    ]
    names = ["certified", "not certified", "pale: clean", "full: attacked"]
    figure.legend(handles, names, ncols=4, loc="outside upper center", fontsize=8, columnspacing=0.9, handlelength=1)
    return figure


def _coverage_panel(axis: Any, rows: Sequence[Mapping[str, Any]], alpha: float) -> None:
    axis.axvline(1 - alpha, color=INK, lw=1, ls="--")
    axis.text(
        1 - alpha,
        len(rows) - 0.45,
        f"{1 - alpha:.0%} promised",
        fontsize=8,
        ha="center",
        va="bottom",
        bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1},
    )
    # Where every method stays high the differences are what matters, and the axis says where it begins.
    lowest = min(row[key]["mean"] for row in rows for key in ("coverage", "attacked_coverage"))
    start = 0.75 if lowest > 0.8 else 0.0
    axis.set(
        xlabel=f"coverage (axis from {start:g})" if start else "coverage", xlim=(start, start + 1.14 * (1 - start))
    )


def _size_panel(axis: Any, rows: Sequence[Mapping[str, Any]], _alpha: float) -> None:
    largest = max(max(row["size"], row["attacked_size"]) for row in rows)
    axis.set(xlabel="mean set size", xlim=(0, 1.16 * (largest or 1)))


def size_shares(shares: Mapping[str, Sequence[float]]) -> Any:
    """Share of sets with 0, 1, 2, ... labels, a panel per method."""
    last = max(size for counts in shares.values() for size, share in enumerate(counts) if share)
    figure, axes = subplots(
        len(shares),
        1,
        figsize=(WIDTH, max(2.4, 0.75 * len(shares) + 0.7)),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, (name, counts) in zip(axes[:, 0], shares.items(), strict=True):
        axis.bar(range(last + 1), counts[: last + 1], color=CERTIFIED, alpha=0.85)
        axis.set_title(name, fontsize=8, loc="left", pad=3)
        axis.set(ylim=(0, None), yticks=[0, 0.5, 1] if max(map(max, shares.values())) > 0.6 else [0, 0.25, 0.5])
        axis.tick_params(labelsize=8)
        axis.grid(axis="x", visible=False)
    if last <= 20:
        axes[-1, 0].set_xticks(range(last + 1))
    axes[-1, 0].set_xlabel("labels in the set")
    figure.supylabel("share of sets", fontsize=10)
    return figure


def size_against_coverage(points: Mapping[str, Curve], alpha: float, certified: Mapping[str, bool]) -> Any:
    """Methods by their coverage and mean size: (coverage, size, deviations of both over splits); hollow: not certified."""
    figure, axis = subplots(figsize=(WIDTH, 3.0 + 0.2 * -(-len(points) // 2)), layout="constrained")
    for index, (name, ((coverage, size, coverage_std, size_std),)) in enumerate(points.items()):
        color = COLORS[index % len(COLORS)]
        axis.errorbar(
            [coverage],
            [size],
            xerr=[coverage_std],
            yerr=[size_std],
            fmt=MARKERS[index % len(MARKERS)],
            ms=6,
            lw=1,
            color=color,
            mfc=color if certified[name] else "none",
            label=name,
            ls="none",
        )
    axis.axvline(1 - alpha, **GUIDE)
    sizes = [size for ((_, size, *_),) in points.values()]
    if max(sizes) > 8 * max(min(sizes), 1e-9):
        _log_scale(axis)
    else:
        axis.set_ylim(0, None)
    axis.set(xlabel=f"coverage, clean (dotted: {1 - alpha:g})", ylabel="mean set size")
    title = "filled: certified; hollow: not" if len(set(certified.values())) > 1 else None
    figure.legend(fontsize=8, loc="outside lower center", ncols=2, title=title, title_fontsize=8)
    return figure


def _log_scale(axis: Any) -> None:
    """A logarithmic y axis that says 1, 2, 5, 10 and not powers of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())


def coverage_by_class(names: Sequence[str], shares: Sequence[tuple[float, float, float]], alpha: float) -> Any:
    """Coverage of each true class as (mean, low, high), with the promised average."""
    figure, axis = subplots(figsize=(WIDTH, 0.24 * len(names) + 1.0), layout="constrained")
    for position, (mean, low, high) in enumerate(reversed(shares)):
        axis.plot([low, high], [position, position], color=CERTIFIED, lw=2.5, alpha=0.5)
        axis.plot([mean], [position], "o", color=CERTIFIED, ms=5)
    axis.axvline(1 - alpha, **GUIDE)
    short = [name if len(name) <= 24 else name[:23] + "…" for name in reversed(names)]
    axis.set(
        xlabel="coverage",
        xlim=(min(low for _, low, _ in shares) - 0.02, 1.01),
        yticks=range(len(names)),
        yticklabels=short,
        ylim=(-0.7, len(names) - 0.3),
    )
    axis.tick_params(axis="y", labelsize=8)
    return figure
