r"""The paper's Appendix B in closed form: the 1-D example, the case where PTT fails, the cdf after the sigmoid;
tables and figures.

Inputs of label -1 are uniform on (-1/2, 0), those of label 1 on (0, 1/2), and the two labels mirror each other, so one
score, that of label -1, tells everything. With :math:`h = \Phi^{-1}(E[S(x + \sigma Z)])` and r = epsilon / sigma the
robust set keeps a label while h is at most tau + r, where tau is the 1 - alpha quantile of h on (-1/2, 0). Nothing here
is sampled: thresholds, gaps and sizes are roots of sums of normal cdfs.

Rows carry the digits that the paper prints beside the computed ones and name those that differ: a coverage gap (7.98 %),
a tau (-1.245), and the changes of size, which the paper took from sizes already rounded.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray
from scipy.optimize import brentq
from scipy.special import logit, ndtr, ndtri

from keepcover.pages.plots import COLORS, GUIDE, INK, styled, subplots

LOW, MIDDLE, HIGH = -0.5, 0.0, 0.5

# -- scores on the line ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Score:
    """A score of one label with values in [0, 1]: straight between its knots, with jumps at them, constant beyond them.

    Warning:
        It must be monotone, or turn twice and be odd about its centre (as the paper's failure case is): of such a score it
        is known how often its smoothed version turns, so that all roots can be found.

    Attributes:
        knots: where pieces meet, in increasing order.
        before: the value just left of every knot; the first one holds all the way down to minus infinity.
        after: the value just right of every knot; the last one holds up to infinity.

    Example:
        >>> step = Score(knots=(0.2,), before=(0.0,), after=(1.0,))
        >>> ramp = Score(knots=(0.0, 1.0), before=(0.0, 1.0), after=(0.0, 1.0))
    """

    knots: tuple[float, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]

    @cached_property
    def jumps(self) -> ndarray:
        """By how much the score jumps at every knot."""
        return np.subtract(self.after, self.before)

    @cached_property
    def slopes(self) -> ndarray:
        """Slope of every piece between two knots."""
        return np.subtract(self.before[1:], self.after[:-1]) / np.diff(self.knots)

    @cached_property
    def directions(self) -> tuple[int, ...]:
        """Where the score goes from left to right, up (1) or down (-1), jumps and slopes alike, repetitions left out."""
        changes = [self.jumps[0], *(change for pair in zip(self.slopes, self.jumps[1:]) for change in pair)]
        return tuple(sign for sign, _ in groupby(int(np.sign(change)) for change in changes if change))


@dataclass(frozen=True)
class Smoothed:
    r"""The smoothed score :math:`h(x) = \Phi^{-1}(E[S(x + \sigma Z)])` of such a score.

    Where the mean of S is within 1e-16 of 0 or 1, h has no digits; no threshold of the paper is there.

    Example: a step becomes a straight line, the steepest that h can be.
        >>> h = Smoothed(Score((0.2,), (0.0,), (1.0,)), sigma=0.1)
        >>> print(h(np.array([0.1, 0.2, 0.3])).round(9), h.derivative(np.array([0.1, 0.2, 0.3])).round(9))
        [-1.  0.  1.] [10. 10. 10.]
    """

    score: Score
    sigma: float

    def __call__(self, x: float | ndarray) -> Any:
        return ndtri(np.clip(self.mean(x), 0, 1))

    def _distances(self, x: float | ndarray) -> ndarray:
        """(x - knot) / sigma, knots along the last axis."""
        return np.subtract(np.asarray(x)[..., None], self.score.knots) / self.sigma

    def mean(self, x: float | ndarray) -> Any:
        """E S: a jump counts with the mass beyond its knot, a slope with E (x + sigma Z - a)+ - E (x + sigma Z - b)+."""
        z = self._distances(x)
        excess = self.sigma * (z * ndtr(z) + _phi(z))
        return self.score.before[0] + ndtr(z) @ self.score.jumps - np.diff(excess) @ self.score.slopes

    def rise(self, x: float | ndarray) -> Any:
        """d/dx E S: jumps count with the normal density, slopes with the mass of their piece."""
        z = self._distances(x)
        return _phi(z) @ self.score.jumps / self.sigma - np.diff(ndtr(z)) @ self.score.slopes

    def derivative(self, x: float | ndarray) -> Any:
        """h'(x) = (d/dx E S) / phi(h)."""
        return self.rise(x) / _phi(self(x))

    @cached_property
    def turns(self) -> tuple[float, ...]:
        """Where h turns, on the whole line.

        Gaussian smoothing diminishes variation (the kernel is totally positive): h' changes sign at most as often as S
        changes direction, and in the same order. A monotone score therefore never turns; an odd one that turns twice
        does so at two points mirrored about its centre, or not at all when the noise has washed the middle out.
        """
        knots, directions = self.score.knots, self.score.directions
        centre, far = (knots[0] + knots[-1]) / 2, (knots[-1] - knots[0]) / 4
        if len(directions) == 1 or directions[1] * self.rise(centre) <= 0:
            return ()
        while directions[1] * self.rise(centre + far) > 0:
            far *= 2
        distance = _root(lambda distance: self.rise(centre + distance), 0.0, far)
        return centre - distance, centre + distance

    def branches(self, low: float, high: float) -> list[tuple[float, float]]:
        """[low, high] cut where h turns: on each part h is monotone."""
        return list(pairwise([low, *(x for x in self.turns if low < x < high), high]))

    def crossings(self, t: float, low: float, high: float) -> tuple[float, ...]:
        """Every x in [low, high] where h crosses t: at most one on each branch."""
        level = ndtr(t)
        apart = ((a, b) for a, b in self.branches(low, high) if (self.mean(a) <= level) != (self.mean(b) <= level))
        return tuple(_root(lambda x: self.mean(x) - level, a, b) for a, b in apart)

    def below(self, t: float, low: float, high: float) -> float:
        """How much of [low, high] has h at most t."""
        parts = pairwise([low, *self.crossings(t, low, high), high])
        return math.fsum(b - a for a, b in parts if self.mean((a + b) / 2) <= ndtr(t))


def _phi(z: Any) -> Any:
    return np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)


def _root(function: Any, a: float, b: float) -> float:
    return float(brentq(function, a, b, xtol=1e-16))  # pyright: ignore[reportArgumentType]


HPS = Score(knots=(LOW, HIGH), before=(0.0, 1.0), after=(0.0, 1.0))
"""The linear model's score of label -1: x + 1/2, kept within [0, 1]."""

S_B = Score(knots=(LOW, HIGH), before=(0.5, 1.0), after=(0.0, 0.5))
"""The failure case: as HPS between the knots, undecided beyond them (and there barely in favour of the wrong label)."""

S_B_PTT = Score(knots=(LOW, MIDDLE, HIGH), before=(1.0, 0.0, 1.0), after=(0.0, 1.0, 0.0))
"""PTT of the failure case, T -> 0 and b = 1/2: what was barely wrong beyond the knots is now entirely wrong."""


def hps_after_ptt(alpha: float) -> Score:
    """PTT of HPS as T -> 0: a step at the quantile, x = -alpha / 2, that is b = (1 - alpha) / 2.

    Any other b moves the step and tau together and changes nothing else. The slope of the cdf of h at tau is then
    2 sigma, the least that any score with values in [0, 1] can have, since h is never steeper than 1 / sigma.
    """
    return Score(knots=(-alpha / 2,), before=(0.0,), after=(1.0,))


# -- the law of a smoothed score ---------------------------------------------------------------------------------------


def cdf(h: Smoothed, t: float) -> float:
    """P(h <= t) for the true label."""
    return h.below(t, LOW, MIDDLE) / (MIDDLE - LOW)


def density(h: Smoothed, t: float) -> float:
    """Slope of the cdf at t: the sum of 2 / |h'| over all inputs of the label where h = t."""
    return sum(1 / abs(float(h.derivative(x))) for x in h.crossings(t, LOW, MIDDLE)) / (MIDDLE - LOW)


def threshold(h: Smoothed, alpha: float) -> float:
    """tau, the 1 - alpha quantile of the true label's h: h at the quantile of x where h is monotone, else a root.

    Example:
        >>> threshold(Smoothed(hps_after_ptt(0.1), sigma=0.1), alpha=0.1)
        0.0
    """
    values = [float(h(x)) for branch in h.branches(LOW, MIDDLE) for x in branch]
    if len(values) == 2:
        return float(h(-alpha / 2 if values[0] < values[1] else (alpha - 1) / 2))
    return _root(lambda t: cdf(h, t) - (1 - alpha), min(values), max(values))


def mean_size(h: Smoothed, t: float) -> float:
    """Labels per input when a label is kept while h <= t; the other label contributes as much, mirrored."""
    return 2 * h.below(t, LOW, HIGH) / (HIGH - LOW)


# -- the tables --------------------------------------------------------------------------------------------------------


def one_dimensional(
    epsilon: float = 0.01, alpha: float = 0.1, variances: Sequence[float] = (0.01, 0.001, 0.0001)
) -> list[dict[str, Any]]:
    """The 1-D example: HPS and PTT for every sigma^2.

    Returns:
        Rows with ``variance``, ``score``, ``tau``, ``slope_times_r`` (slope of the cdf at tau times epsilon / sigma, the
        linear approximation of the gap), ``coverage_gap``, ``size``, ``conservativeness`` (size above that of the set
        before inflation), ``size_change`` (against HPS; PTT only), ``paper`` (the digits as printed, None for settings
        the paper does not print) and ``differs`` (where the printed digits are not those computed, or None).

    Example:
        >>> for row in one_dimensional(variances=[0.01]):
        ...     print(row["score"], f"{row['size']:.6f}", row["paper"]["size"], row["differs"])
        HPS 0.979528 0.98 coverage_gap: computed 7.95%, printed 7.98%
        PTT 0.920000 0.92 size_change: computed -6.08%, printed -6.12%
    """
    rows, printed = [], _printed("one-dimensional") if (epsilon, alpha) == (0.01, 0.1) else {}
    for variance in variances:
        sigma = math.sqrt(variance)
        hps, ptt = (_row(Smoothed(s, sigma), epsilon / sigma, alpha) for s in (HPS, hps_after_ptt(alpha)))
        ptt["size_change"] = ptt["size"] / hps["size"] - 1
        for name, row in (("HPS", hps), ("PTT", ptt)):
            rows.append({"variance": variance, "score": name, **row, **_beside(row, printed, variance, name)})
    return rows


def failure_case(
    r: float = 0.01, alpha: float = 0.5, sigmas: Sequence[float] = (0.1, 0.2, 0.3)
) -> list[dict[str, Any]]:
    """The case where PTT can enlarge sets: S_b and its PTT for every sigma, inflated by r = epsilon / sigma.

    Returns:
        Rows with ``sigma``, ``score``, ``tau``, ``slope_times_r``, ``coverage_gap``, ``size``, ``conservativeness``,
        ``paper`` and ``differs``, as :func:`one_dimensional` has them.

    Example:
        >>> for row in failure_case(sigmas=[0.3]):
        ...     print(row["score"], f"{row['tau']:.6f} {row['size']:.6f}", row["paper"]["size"])
        S_b -0.301676 0.525076 0.525
        PTT -0.168674 0.528850 0.529
    """
    rows, printed = [], _printed("failure-case") if (r, alpha) == (0.01, 0.5) else {}
    for sigma in sigmas:
        for name, score in (("S_b", S_B), ("PTT", S_B_PTT)):
            row = _row(Smoothed(score, sigma), r, alpha)
            rows.append({"sigma": sigma, "score": name, **row, **_beside(row, printed, sigma, name)})
    return rows


def _row(h: Smoothed, r: float, alpha: float) -> dict[str, float]:
    tau = threshold(h, alpha)
    size = mean_size(h, tau + r)
    return {
        "tau": tau,
        "slope_times_r": density(h, tau) * r,
        "coverage_gap": cdf(h, tau + r) - (1 - alpha),
        "size": size,
        "conservativeness": size - mean_size(h, tau),
    }


@cache
def _printed(name: str) -> dict[str, Any]:
    """Digits as the paper prints them, by setting and score."""
    return tomllib.loads((Path(__file__).parent / "reproduce" / "printed.toml").read_text())[name]["digits"]


def _beside(row: Mapping[str, float], printed: Mapping[str, Any], setting: float, score: str) -> dict[str, Any]:
    """What the paper prints, and where it differs."""
    paper = printed.get(str(setting), {}).get(score)
    if paper is None:
        return {"paper": None, "differs": None}
    shown = {column: as_printed(row[column], text) for column, text in paper.items()}
    notes = [f"{c}: computed {shown[c]}, printed {text}" for c, text in paper.items() if shown[c] != text]
    return {"paper": paper, "differs": "; ".join(notes) or None}


def as_printed(value: float, like: str) -> str:
    """A number with the digits and the unit of a printed one.

    Example:
        >>> as_printed(0.0795276, like="7.98%"), as_printed(0.97953, like="0.98")
        ('7.95%', '0.98')
    """
    digits, unit = (like[:-1], "%") if like.endswith("%") else (like, "")
    decimals = len(digits.partition(".")[2])
    return f"{100 * value if unit else value:.{decimals}f}{unit}"


def sigmoid_cdf(t: float | ndarray, b: float = 0.9, T: float = 1 / 400) -> Any:
    """The cdf of Q_sig(U), U uniform on [0, 1]: the sigmoid's inverse, b + T logit(t), kept within [0, 1].

    At the threshold t = 1/2 (for b = 1 - alpha) its slope is 4 T, against 1 before the sigmoid: small T flattens it.
    (The paper's Appendix B.4 prints the reciprocal.)

    Example:
        >>> print(sigmoid_cdf(np.array([0.0, 0.5, 1.0])))
        [0.  0.9 1. ]
    """
    return np.clip(b + T * logit(np.clip(t, 0, 1)), 0, 1)


# -- the figures -------------------------------------------------------------------------------------------------------

# Before and after PTT: a warm dashed and a cool solid line, told apart without colour as well.
BEFORE = {"color": COLORS[1], "ls": "--"}
AFTER = {"color": COLORS[0], "ls": "-"}


@styled
def failure_case_figure() -> Any:
    """Smoothed scores of the failure case, and their cdfs with the threshold where they meet 1 - alpha."""
    figure, (scores, cdfs) = _panels(2)
    sigma, alpha = 0.3, 0.5
    x, drawn = np.linspace(LOW, HIGH, 101), []
    for label, score, style in (("original score", S_B, BEFORE), ("after PTT", S_B_PTT, AFTER)):
        h = Smoothed(score, sigma)
        tau, ends = threshold(h, alpha), [float(h(end)) for branch in h.branches(LOW, MIDDLE) for end in branch]
        # The cdf leaves 0 like a square root where h turns: points as squares keep it smooth.
        t = min(ends) + (max(ends) - min(ends)) * np.linspace(0, 1, len(x)) ** 2
        scores.plot(x, h(x), label=label, **style)
        drawn.append((h, t, tau, style))
    lowest, highest = (bound(bound(h(x)) for h, *_ in drawn) for bound in (min, max))
    for h, t, tau, style in drawn:
        words = f"τ = {tau:.3f}, slope {density(h, tau):.2f}".replace("-", "−")
        cdfs.plot([lowest, *t, highest], [0, *(cdf(h, each) for each in t), 1], label=words, **style)
        cdfs.plot([tau], [1 - alpha], "o", ms=5, color=style["color"])
    _coverage(cdfs, alpha)
    scores.set(xlabel="input x", xlim=(LOW, HIGH), title=f"smoothed score, σ = {sigma:g}")
    scores.set_ylabel("h(x) (standard normal units)")
    cdfs.set(xlabel="t (standard normal units)", ylabel="P(h(x) ≤ t), true label", title="its cdf")
    scores.legend(fontsize=8)
    cdfs.legend(fontsize=8, loc="lower right")
    return figure


@styled
def sigmoid_cdf_figure() -> Any:
    """The cdf of a uniform score before and after the sigmoid: flat where it meets 1 - alpha."""
    figure, (before, after) = _panels(2, sharey=True)
    alpha, t = 0.1, np.linspace(0, 1, 2001)
    before.plot(t, t, label="slope 1 at τ", **BEFORE)
    before.plot([1 - alpha], [1 - alpha], "o", ms=5, color=BEFORE["color"])
    for inverse, style in ((400, "-"), (20, "-.")):
        label = f"T = 1/{inverse}: slope {4 / inverse:g} at τ"
        after.plot(t, sigmoid_cdf(t, 1 - alpha, 1 / inverse), style, color=AFTER["color"], label=label)
    after.plot([0.5], [1 - alpha], "o", ms=5, color=AFTER["color"])
    for axis in (before, after):
        _coverage(axis, alpha)
        axis.set(xlabel="t (score, no unit)", xlim=(-0.02, 1.02), ylim=(0, 1.03))
        axis.legend(fontsize=8, loc="lower right")
    before.set(ylabel="P(score ≤ t), true label", title="ranks: uniform")
    after.set(title="after the sigmoid")
    return figure


@styled
def one_dimensional_figure() -> Any:
    """The 1-D example: smoothed scores, how far the set's edge moves when tau is inflated, and sizes over sigma."""
    epsilon, alpha, sigma = 0.01, 0.1, 0.1
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
    points = [(math.sqrt(row["variance"]), float(row["paper"]["size"])) for row in one_dimensional(epsilon, alpha)]
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
