"""Figures of the paper's Appendix B, drawn from closed forms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from keepcover.pages.plots import COLORS, GUIDE, INK, subplots
from keepcover.paper import closed_form as closed
from keepcover.paper.closed_form import HIGH, HPS, LOW, MIDDLE, Smoothed, threshold

# Before and after PTT: a warm dashed and a cool solid line, told apart without colour as well.
BEFORE = {"color": COLORS[1], "ls": "--"}
AFTER = {"color": COLORS[0], "ls": "-"}


def failure_case_figure() -> Any:
    """Smoothed scores of the failure case, and their cdfs with the threshold where they meet 1 - alpha."""
    figure, (scores, cdfs) = _panels(2)
    sigma, alpha = 0.3, 0.5
    x, drawn = np.linspace(LOW, HIGH, 101), []
    for label, score, style in (("original score", closed.S_B, BEFORE), ("after PTT", closed.S_B_PTT, AFTER)):
        h = Smoothed(score, sigma)
        tau, ends = threshold(h, alpha), [float(h(end)) for branch in h.branches(LOW, MIDDLE) for end in branch]
        # The cdf leaves 0 like a square root where h turns: points as squares keep it smooth.
        t = min(ends) + (max(ends) - min(ends)) * np.linspace(0, 1, len(x)) ** 2
        scores.plot(x, h(x), label=label, **style)
        drawn.append((h, t, tau, style))
    lowest, highest = (bound(bound(h(x)) for h, *_ in drawn) for bound in (min, max))
    for h, t, tau, style in drawn:
        words = f"τ = {tau:.3f}, slope {closed.density(h, tau):.2f}".replace("-", "−")
        cdfs.plot([lowest, *t, highest], [0, *(closed.cdf(h, each) for each in t), 1], label=words, **style)
        cdfs.plot([tau], [1 - alpha], "o", ms=5, color=style["color"])
    _coverage(cdfs, alpha)
    scores.set(xlabel="input x", xlim=(LOW, HIGH), title=f"smoothed score, σ = {sigma:g}")
    scores.set_ylabel("h(x) (standard normal units)")
    cdfs.set(xlabel="t (standard normal units)", ylabel="P(h(x) ≤ t), true label", title="its cdf")
    scores.legend(fontsize=8)
    cdfs.legend(fontsize=8, loc="lower right")
    return figure


def sigmoid_cdf_figure() -> Any:
    """The cdf of a uniform score before and after the sigmoid: flat where it meets 1 - alpha."""
    figure, (before, after) = _panels(2, sharey=True)
    alpha, t = 0.1, np.linspace(0, 1, 2001)
    before.plot(t, t, label="slope 1 at τ", **BEFORE)
    before.plot([1 - alpha], [1 - alpha], "o", ms=5, color=BEFORE["color"])
    for inverse, style in ((400, "-"), (20, "-.")):
        label = f"T = 1/{inverse}: slope {4 / inverse:g} at τ"
        after.plot(t, closed.sigmoid_cdf(t, 1 - alpha, 1 / inverse), style, color=AFTER["color"], label=label)
    after.plot([0.5], [1 - alpha], "o", ms=5, color=AFTER["color"])
    for axis in (before, after):
        _coverage(axis, alpha)
        axis.set(xlabel="t (score, no unit)", xlim=(-0.02, 1.02), ylim=(0, 1.03))
        axis.legend(fontsize=8, loc="lower right")
    before.set(ylabel="P(score ≤ t), true label", title="ranks: uniform")
    after.set(title="after the sigmoid")
    return figure


def one_dimensional_figure() -> Any:
    """The 1-D example: smoothed scores, how far the set's edge moves when tau is inflated, and sizes over sigma."""
    epsilon, alpha, sigma = 0.01, 0.1, 0.1
    figure, (scores, edges, sizes) = _panels(3)
    r, edge, x = epsilon / sigma, -alpha / 2, np.linspace(LOW, HIGH, 401)
    window = np.linspace(max(LOW, edge - 3 * epsilon), min(HIGH, edge + 7 * epsilon), 101)
    scores.axvspan(window[0], window[-1], color=INK, alpha=0.08, lw=0)
    for row, (name, score, style) in enumerate((("HPS", HPS, BEFORE), ("PTT", closed.hps_after_ptt(alpha), AFTER))):
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
    rows = closed.one_dimensional(epsilon, alpha, [float(sigma) ** 2 for sigma in sigmas])
    for name, style in (("HPS", BEFORE), ("PTT", AFTER)):
        axis.plot(sigmas, [row["size"] for row in rows if row["score"] == name], label=name, **style)
    points = [
        (math.sqrt(row["variance"]), float(row["paper"]["size"])) for row in closed.one_dimensional(epsilon, alpha)
    ]
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
