"""The paper's figures: small rows first, drawings of those rows second."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keepcover.bounds import conformal_quantile
from keepcover.evaluation.random_splits import random_splits
from keepcover.noise import Gaussian, Threat
from keepcover.pages.plots import CERTIFIED, COLORS, MARKERS, SOFT, VANILLA, subplots
from keepcover.paper import closed_figures, closed_form
from keepcover.paper.reproduce.cells import Origin
from keepcover.paper.reproduce.material import Material
from keepcover.scores import PTT, get_score

Rows = list[dict[str, Any]]
ORIGIN, EPSILON, ALPHA, DRAWS = Origin("cifar10", 0.25), 0.125, 0.1, 256
LABELS = {"none": "plain score", "ptt": "after PTT"}


@dataclass(frozen=True)
class Figure:
    """A figure that is computed from noisy outputs and not from a table; ``compute`` is told how many draws it may use."""

    name: str
    title: str
    where: str
    compute: Callable[[Material, int], Rows]
    draw: Callable[[Sequence[dict[str, Any]]], Any]
    datasets: frozenset[str] = frozenset({"cifar10"})
    note: str = ""


def smoothed(material: Material, draws: int, score: str, transform: str) -> Tensor:
    """Smoothed scores [n, K] of the rest without the holdout, on the scale on which an attack moves them."""
    logits, labels = material.logits(ORIGIN, draws), material.dataset(ORIGIN.dataset).labels
    u = torch.rand(len(logits), 1, generator=torch.Generator().manual_seed(material.seed)).to(logits.device)
    values = get_score(score).order(logits, u) if transform == "ptt" else get_score(score)(logits, u)
    if transform == "ptt":
        held = next(random_splits(len(logits), 1, material.holdout, material.seed)).holdout
        ptt = PTT().fit(values[held, 0, labels[held]], ALPHA)
        values = ptt(values)
    return values.mean(dim=1, dtype=torch.float64).cpu()


def inverse_cdf(material: Material, draws: int) -> Rows:
    """Quantiles of the smoothed score of the true label: the steeper at 1 - alpha, the less an attack costs."""
    labels = material.dataset(ORIGIN.dataset).labels
    levels = torch.linspace(0.005, 0.995, 199, dtype=torch.float64)
    rows: Rows = []
    for score in ("aps", "hps"):
        for transform in LABELS:
            own = smoothed(material, draws, score, transform).gather(1, labels[:, None])[:, 0]
            values = torch.special.ndtri(own.clamp(1e-9, 1 - 1e-9)).quantile(levels)
            slope = float((values[181] - values[177]) / (levels[181] - levels[177]))  # around 0.9
            rows.append(
                {
                    "score": score,
                    "transform": transform,
                    "slope_at_0.9": round(slope, 3),
                    "points": [[round(float(x), 4), round(float(y), 4)] for x, y in zip(levels, values, strict=True)],
                }
            )
    return rows


def densities(material: Material, draws: int) -> Rows:
    """Histograms of the smoothed scores of all labels with the threshold before and after its inflation, RSCP with HPS."""
    labels, rows = material.dataset(ORIGIN.dataset).labels, []
    split = next(random_splits(len(labels), 1, material.holdout, material.seed))
    for transform in LABELS:
        values = smoothed(material, draws, "hps", transform)
        own = values.gather(1, labels[:, None])[:, 0]
        points = split.calibration if transform == "ptt" else split.calibration_with_holdout
        tau = min(conformal_quantile(own[points], ALPHA), 1.0)
        inflated = float(Threat(Gaussian(ORIGIN.sigma), EPSILON).up(tau))
        test = values[split.test]
        shown = torch.special.ndtri(test.clamp(1e-9, 1 - 1e-9)).flatten().clamp(-4, 4)
        counts = torch.histc(shown, bins=80, min=-4, max=4) / len(test)
        rows.append(
            {
                "transform": transform,
                "bins": [-4.0, 4.0, 80],
                "labels_per_image": [round(float(c), 5) for c in counts],
                "tau": _normal(tau),
                "inflated": _normal(inflated),
                "size_before": float((test <= tau).sum() / len(test)),
                "size_after": float((test <= inflated).sum() / len(test)),
            }
        )
    return rows


def _normal(score: float) -> float:
    """A smoothed score on the scale of the figure."""
    return float(torch.special.ndtri(torch.tensor(score, dtype=torch.float64)).clamp(-4, 4))


def overhead(material: Material, draws: int) -> Rows:
    """Seconds per image for scores with and without PTT, by size of the holdout, and for the network itself."""
    count, device = (500 if material.device != "cpu" else 40), torch.device(material.device)
    logits = material.logits(ORIGIN, draws)[:count]
    u = torch.rand(len(logits), 1, generator=torch.Generator().manual_seed(0)).to(device)
    score = get_score("hps")

    def seconds(work: Callable[[], object]) -> float:
        best = float("inf")
        for _ in range(5):
            if device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - start)
        return best / count

    rows: Rows = [{"what": "scores", "holdout": 0, "seconds_per_image": seconds(lambda: score(logits, u).mean(dim=1))}]
    for holdout in (125, 250, 500, 1000, 2000, 4000, 8000):
        ptt = PTT().fit(torch.randn(holdout, generator=torch.Generator().manual_seed(1)).to(device))
        rows.append(
            {
                "what": "scores with PTT",
                "holdout": holdout,
                "seconds_per_image": seconds(lambda ptt=ptt: ptt(score.order(logits, u)).mean(dim=1)),
            }
        )
    smoother = material.smoother(material.model(ORIGIN), ORIGIN.sigma, compile=False)
    few = material.dataset(ORIGIN.dataset).images[: 8 if device.type == "cpu" else count].to(device)
    noisy = few.repeat_interleave(draws if device.type == "cuda" else 8, dim=0)
    with torch.inference_mode():
        took = seconds(lambda: [smoother._run(part) for part in noisy.split(16000)]) * count
    rows.append({"what": "network alone", "holdout": 0, "seconds_per_image": took * draws / len(noisy)})
    return [{**row, "draws": draws} for row in rows]


# -- drawings ----------------------------------------------------------------------------------------------------------


def draw_inverse_cdf(rows: Sequence[dict[str, Any]]) -> Any:
    figure, axes = subplots(1, 2, figsize=(8.4, 3.4), sharey=True)
    for axis, score in zip(axes, ("aps", "hps"), strict=True):
        for row, color in zip([row for row in rows if row["score"] == score], (VANILLA, CERTIFIED), strict=True):
            axis.plot(*zip(*row["points"], strict=True), color=color, label=LABELS[row["transform"]])
        axis.axvline(1 - ALPHA, color=SOFT, lw=1, ls=":")
        axis.set(title=score.upper(), xlabel="coverage level")
    axes[0].set_ylabel(r"quantile of $\Phi^{-1}$(smoothed score)")
    axes[0].legend()
    return figure


def draw_densities(rows: Sequence[dict[str, Any]]) -> Any:
    figure, axes = subplots(1, 2, figsize=(8.4, 3.2), sharey=True)
    for axis, row in zip(axes, rows, strict=True):
        low, high, bins = row["bins"]
        width = (high - low) / bins
        centres = [low + (i + 0.5) * width for i in range(bins)]
        axis.bar(centres, row["labels_per_image"], width=width, color=SOFT, alpha=0.4)
        axis.axvspan(row["tau"], row["inflated"], color=VANILLA, alpha=0.25, label="added by inflation")
        axis.axvline(row["tau"], color=CERTIFIED, label="threshold")
        axis.axvline(row["inflated"], color=VANILLA, ls="--", label="inflated threshold")
        added = row["size_after"] - row["size_before"]
        axis.set(
            title=f"{LABELS[row['transform']]}: {row['size_before']:.2f} + {added:.2f} labels",
            xlabel=r"$\Phi^{-1}$(smoothed score), clipped to ±4",
            yscale="log",
        )
    axes[0].set_ylabel("labels per image and bin")
    axes[0].legend(fontsize=8, loc="upper left")
    return figure


def draw_overhead(rows: Sequence[dict[str, Any]]) -> Any:
    figure, axis = subplots(figsize=(6, 3.4))
    with_ptt = [row for row in rows if row["what"] == "scores with PTT"]
    axis.plot(
        [row["holdout"] for row in with_ptt],
        [1e6 * row["seconds_per_image"] for row in with_ptt],
        "o-",
        color=CERTIFIED,
        label="scores with PTT",
    )
    for row, color, style in zip(
        [row for row in rows if row["holdout"] == 0], (VANILLA, SOFT), ("--", ":"), strict=True
    ):
        axis.axhline(1e6 * row["seconds_per_image"], color=color, ls=style, label=row["what"])
    axis.set(
        xscale="log",
        yscale="log",
        xlabel="holdout points",
        ylabel=f"microseconds per image ({rows[0].get('draws', DRAWS)} draws)",
    )
    held = [row["holdout"] for row in with_ptt]
    axis.set_xticks(held, [str(count) for count in held])
    axis.minorticks_off()
    axis.legend()
    return figure


def draw_motivation(rows: Sequence[dict[str, Any]]) -> Any:
    """Coverage and size, clean and attacked, as bars."""
    shown = ("Vanilla CP", "RSCP", "RSCP, PTT + RCT", "exact, 1 draw", "exact, 16 draws")
    # With fewer draws than the paper's a row says how many it had.
    names = [name for name in dict.fromkeys(row["row"] for row in rows) if name in shown or name.startswith("RSCP")]
    figure, axes = subplots(1, 2, figsize=(10, 3.6))
    for axis, what, label in zip(axes, ("coverage", "size"), ("coverage", "labels per set"), strict=True):
        for index, column in enumerate(("clean", "attacked")):
            mine = [next(row for row in rows if (row["row"], row["column"]) == (name, column)) for name in names]
            axis.bar(
                [i + (index - 0.5) * 0.38 for i in range(len(names))],
                [row[what]["mean"] for row in mine],
                0.38,
                yerr=[row[what]["std"] for row in mine],
                color=(CERTIFIED, VANILLA)[index],
                label=column,
                capsize=2,
            )
        axis.set_xticks(range(len(names)), [name.replace(", ", "\n") for name in names], fontsize=8)
        axis.set_ylabel(label)
        axis.grid(axis="x", visible=False)
    axes[0].axhline(1 - ALPHA, color=SOFT, lw=1, ls=":")
    axes[0].set_ylim(0.7, 1)
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="upper center", ncols=2, fontsize=9, bbox_to_anchor=(0.5, 1.02)
    )
    return figure


def _value(column: str) -> float:
    """The number at the end of a column's name; fractions are read as such."""
    top, _, bottom = column.split()[-1].partition("/")
    return float(top) / float(bottom or 1)


def _lines(rows: Sequence[dict[str, Any]], xlabel: str, only: Callable[[dict[str, Any]], str | None]) -> Any:
    figure, axis = subplots(figsize=(6.4, 3.6))
    lines: dict[str, list[tuple[float, dict[str, Any]]]] = {}
    for row in rows:
        name = only(row)
        if name is not None:
            lines.setdefault(name, []).append((_value(row["column"]), row))
    for index, (name, points) in enumerate(lines.items()):
        points.sort(key=lambda point: point[0])
        color = COLORS[index % len(COLORS)]
        axis.errorbar(
            [x for x, _ in points],
            [row["size"]["mean"] for _, row in points],
            yerr=[row["size"]["std"] for _, row in points],
            fmt=f"{MARKERS[index % len(MARKERS)]}-",
            ms=4,
            capsize=2,
            color=color,
            label=name,
        )
        paper = [(x, row["paper"]["size"]) for x, row in points if row["paper"]["size"] is not None]
        if paper:
            axis.plot(*zip(*paper, strict=True), "x:", color=color, alpha=0.6, label=f"{name}, paper")
    axis.set(xscale="log", xlabel=xlabel, ylabel="labels per set")
    at = sorted({x for points in lines.values() for x, _ in points})
    if all(x == round(x) for x in at):  # counts are read off, not powers of ten
        axis.set_xticks(at, [f"{x:g}" for x in at])
        axis.minorticks_off()
    axis.legend(fontsize=8)
    return figure


def draw_draws(rows: Sequence[dict[str, Any]]) -> Any:
    return _lines(rows, "draws per query", lambda row: row["row"])


def draw_temperature(rows: Sequence[dict[str, Any]]) -> Any:
    return _lines(rows, "T", lambda row: row["row"] if row["column"].startswith("T") else None)


def _closed(function: Callable[[], Any]) -> Callable[[Sequence[dict[str, Any]]], Any]:
    """A drawing that computes its own curves in closed form."""
    return lambda _rows: function()


FROM_TABLES: dict[str, Callable[[Sequence[dict[str, Any]]], Any]] = {
    "table3": draw_draws,
    "draws-cifar100": draw_draws,
    "draws-imagenet": draw_draws,
    "temperature": draw_temperature,
    "motivation": draw_motivation,
}


def figures() -> dict[str, Figure]:
    """Every figure that needs its own computation, by name."""
    none: frozenset[str] = frozenset()
    every = [
        Figure(
            "inverse-cdf",
            "Inverse cdf of smoothed scores before and after PTT, CIFAR-10",
            "Figure in B.6",
            inverse_cdf,
            draw_inverse_cdf,
        ),
        Figure(
            "densities",
            "Densities of smoothed scores and the inflated threshold, CIFAR-10, HPS",
            "Figure in A.4",
            densities,
            draw_densities,
        ),
        Figure(
            "overhead", "What PTT costs, and how that grows with the holdout", "Figure in D.9", overhead, draw_overhead
        ),
        Figure(
            "one-dimensional",
            "The 1-D example in closed form: epsilon 0.01, alpha 0.1",
            "Table in B.7",
            lambda *_: closed_form.one_dimensional(),
            _closed(closed_figures.one_dimensional_figure),
            none,
        ),
        Figure(
            "failure-case",
            "Where PTT fails, in closed form: epsilon / sigma 0.01, alpha 0.5",
            "Table and figure in B.8",
            lambda *_: closed_form.failure_case(),
            _closed(closed_figures.failure_case_figure),
            none,
        ),
        Figure(
            "sigmoid-cdf",
            "Score cdf before and after the sigmoid",
            "Figure in B.4",
            lambda *_: [
                {"T": T, "t": t, "cdf": float(closed_form.sigmoid_cdf(t, 1 - ALPHA, T))}
                for T in (1 / 400, 1 / 20)
                for t in (0.01, 0.1, 0.5, 0.9, 0.99)
            ],
            _closed(closed_figures.sigmoid_cdf_figure),
            none,
        ),
    ]
    return {figure.name: figure for figure in every}
