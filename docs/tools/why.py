"""The figure of the first page: an attack shifts scores past the threshold, and a threshold set for that holds."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.stats import norm

from keepcover.pages import plots

ALPHA, R = 0.1, 0.5  # r = epsilon / sigma, as everywhere in these pages
CLEAN, ATTACKED, LINE = plots.CERTIFIED, plots.VANILLA, plots.INK


@plots.styled
def draw() -> Any:
    """Two panels with the same two densities: what lies left of the line is covered."""
    x = np.linspace(-3.2, 4.2, 400)
    ordinary = norm.ppf(1 - ALPHA)
    figure, axes = plots.subplots(1, 2, figsize=(8.4, 2.9), sharey=True)
    for axis, line, title in zip(
        axes, (ordinary, ordinary + R), ("ordinary threshold", "robust threshold"), strict=True
    ):
        for shift, colour, name in ((0.0, CLEAN, "clean"), (R, ATTACKED, "attacked")):
            density = norm.pdf(x - shift)
            axis.plot(x, density, color=colour, label=f"{name}: {norm.cdf(line - shift):.1%} covered")
            axis.fill_between(x, density, where=x > line, color=colour, alpha=0.3, lw=0)
        axis.axvline(line, color=LINE, lw=1.2)
        axis.annotate("threshold", (line, 0.43), xytext=(4, 0), textcoords="offset points", fontsize=9, color=LINE)
        axis.set(title=title, xlabel="score of the true label under noise", yticks=[], ylim=(0, 0.62))
        axis.legend(fontsize=9, loc="upper left", frameon=False)
        axis.grid(visible=False)
        axis.spines[["left", "top", "right"]].set_visible(False)
    figure.tight_layout()
    return figure
