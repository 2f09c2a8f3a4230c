"""Figures of the paper's Appendix B, drawn from closed forms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from keepcover.errors import InputError
from keepcover.pages.plots import COLORS, GUIDE, INK, subplots
from keepcover.paper.closed_form import (
    HIGH,
    HPS,
    LOW,
    failure_curves,
    hps_after_ptt,
    one_dimensional,
    sigmoid_cdf,
    threshold,
)
from keepcover.paper.piecewise import Smoothed

# Before and after PTT: a warm dashed and a cool solid line, told apart without colour as well.
BEFORE = {"color": COLORS[1], "ls": "--"}
AFTER = {"color": COLORS[0], "ls": "-"}


def failure_case_figure(sigma: float = 0.3, alpha: float = 0.5) -> Any:
    """Smoothed scores of the failure case, and their cdfs with the threshold where they meet 1 - alpha."""
    figure, (scores, cdfs) = _panels(2)
    curves = failure_curves(sigma, alpha)
    lowest, highest = min(c.h.min() for c in curves.values()), max(c.h.max() for c in curves.values())
    for name, label, style in (("S_b", "original score", BEFORE), ("PTT", "after PTT", AFTER)):
        c = curves[name]
        scores.plot(c.x, c.h, label=label, **style)
        words = f"τ = {c.tau:.3f}, slope {c.slope:.2f}".replace("-", "−")
        cdfs.plot([lowest, *c.t, highest], [0, *c.cdf, 1], label=words, **style)
        cdfs.plot([c.tau], [1 - alpha], "o", ms=5, color=style["color"])
    _coverage(cdfs, alpha)
    scores.set(
        xlabel="input x",
        ylabel="h(x) (standard normal units)",
        xlim=(LOW, HIGH),
        title=f"smoothed score, σ = {sigma:g}",
    )
    cdfs.set(xlabel="t (standard normal units)", ylabel="P(h(x) ≤ t), true label", title="its cdf")
    scores.legend(fontsize=8)
    cdfs.legend(fontsize=8, loc="lower right")
    return figure


def sigmoid_cdf_figure(alpha: float = 0.1, temperatures: tuple[float, float] = (1 / 400, 1 / 20)) -> Any:
    """The cdf of a uniform score before and after the sigmoid: flat where it meets 1 - alpha."""
    figure, (before, after) = _panels(2, sharey=True)
    t = np.linspace(0, 1, 2001)
    before.plot(t, t, label="slope 1 at τ", **BEFORE)
    before.plot([1 - alpha], [1 - alpha], "o", ms=5, color=BEFORE["color"])
    for T, style in zip(temperatures, ("-", "-."), strict=True):
        label = f"T = {_ratio(T)}: slope {4 * T:g} at τ"
        after.plot(t, sigmoid_cdf(t, 1 - alpha, T), style, color=AFTER["color"], label=label)
    after.plot([0.5], [1 - alpha], "o", ms=5, color=AFTER["color"])
    for axis in (before, after):
        _coverage(axis, alpha)
        axis.set(xlabel="t (score, no unit)", xlim=(-0.02, 1.02), ylim=(0, 1.03))
        axis.legend(fontsize=8, loc="lower right")
    before.set(ylabel="P(score ≤ t), true label", title="ranks: uniform")
    after.set(title="after the sigmoid")
    return figure


def one_dimensional_figure(epsilon: float = 0.01, alpha: float = 0.1, sigma: float = 0.1) -> Any:
    """The 1-D example: smoothed scores, how far the set's edge moves when tau is inflated, and sizes over sigma."""
    if not epsilon > 0:
        raise InputError(f"expected epsilon > 0, got {epsilon}; without an attack no edge moves")
    figure, (scores, edges, sizes) = _panels(3)
    r, edge, x = epsilon / sigma, -alpha / 2, np.linspace(LOW, HIGH, 401)
    window = np.linspace(max(LOW, edge - 3 * epsilon), min(HIGH, edge + 7 * epsilon), 101)
    scores.axvspan(window[0], window[-1], color=INK, alpha=0.08, lw=0)
    for row, (name, score, style) in enumerate((("HPS", HPS, BEFORE), ("PTT", hps_after_ptt(alpha), AFTER))):
        h, color = Smoothed(score, sigma), style["color"]
        tau = threshold(h, alpha)
        moved = (*h.crossings(tau + r, LOW, HIGH), HIGH)[0]
        scores.plot(x, h(x) - tau, label=name, **style)
        edges.plot(window, h(window) - tau, label=f"{name}: edge moves {moved - edge:.3f}", **style)
        height = -(row + 1) * r / 2
        edges.plot([moved, moved], [r, height], color=color, lw=1, ls=":")
        edges.annotate("", (moved, height), (edge, height), arrowprops={"arrowstyle": "->", "color": color, "lw": 1.5})
        edges.plot([moved], [r], "o", ms=5, color=color)
    edges.plot([edge, edge], [0, -r], color=INK, lw=1, ls=":")
    edges.plot([edge], [0], "o", ms=5, color=INK)
    for level, words in ((0, "τ"), (r, "τ + ε/σ")):
        edges.axhline(level, **GUIDE)
        edges.text(window[-1], level + 0.05 * r, words, va="bottom", ha="right", fontsize=8)
    units = "(standard normal units)"
    scores.set(xlabel="input x", ylabel=f"h(x) − τ {units}", xlim=(LOW, HIGH), title=f"smoothed score, σ = {sigma:g}")
    edges.set(xlabel="input x (shaded range)", ylabel=f"h(x) − τ {units}", title=f"edge of the set, ε = {epsilon:g}")
    edges.set(xlim=(window[0], window[-1]), ylim=(-2.2 * r, 3.3 * r))
    _sizes(sizes, epsilon, alpha)
    for axis, place in ((scores, "upper left"), (edges, "lower right"), (sizes, "upper right")):
        axis.legend(fontsize=8, loc=place)
    return figure


def _sizes(axis: Any, epsilon: float, alpha: float) -> None:
    """Average size over sigma, with what the paper prints on top of it."""
    sigmas = np.geomspace(0.005, 1, 31)
    rows = one_dimensional(epsilon, alpha, [float(sigma) ** 2 for sigma in sigmas])
    for name, style in (("HPS", BEFORE), ("PTT", AFTER)):
        axis.plot(sigmas, [row["size"] for row in rows if row["score"] == name], label=name, **style)
    printed = [row for row in one_dimensional(epsilon, alpha) if row["paper"]]
    points = [(math.sqrt(row["variance"]), float(row["paper"]["size"])) for row in printed]
    if points:
        axis.plot(*zip(*points, strict=True), "s", ms=6, mfc="none", color=INK, label="as printed")
    axis.axhline(1 - alpha, **GUIDE)
    axis.text(sigmas[0], 0.99 * (1 - alpha), "before inflation", va="top", fontsize=8)
    axis.set(xlabel="σ (units of x)", ylabel="average size (labels)", title="size of the robust set", xscale="log")
    axis.set(ylim=(0.9 * (1 - alpha), 2.05), xticks=[0.01, 0.1, 1], xticklabels=["0.01", "0.1", "1"])


def _panels(count: int, **options: Any) -> tuple[Any, Any]:
    figure, axes = subplots(1, count, figsize=(1.2 + 3 * count, 3.1), layout="constrained", **options)
    figure.get_layout_engine().set(w_pad=0.08)
    return figure, axes


def _coverage(axis: Any, alpha: float) -> None:
    axis.axhline(1 - alpha, label=f"1 − α = {1 - alpha:g}", **GUIDE)


def _ratio(value: float) -> str:
    """1/400 rather than 0.0025, where that is what it is."""
    return f"1/{round(1 / value)}" if math.isclose(1 / value, round(1 / value)) else f"{value:g}"
