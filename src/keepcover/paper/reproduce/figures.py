"""The paper's figures: small rows first, drawings of those rows second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from keepcover.bounds import conformal_quantile
from keepcover.errors import InputError
from keepcover.evaluation.random_splits import random_splits
from keepcover.noise import Gaussian, Threat
from keepcover.pages.plots import CERTIFIED, COLORS, MARKERS, SOFT, VANILLA, styled, subplots
from keepcover.paper import closed_form
from keepcover.paper.reproduce.material import Material
from keepcover.paper.reproduce.tables import DENOISED, OFF_THE_SHELF, TOWARDS, Origin
from keepcover.scores import PTT, get_score

Rows = list[dict[str, Any]]
ORIGIN, EPSILON, ALPHA, DRAWS = Origin("cifar10", 0.25), 0.125, 0.1, 256
LABELS = {"none": "plain score", "ptt": "after PTT"}


def smoothed(material: Material, draws: int, name: str, transform: str) -> tuple[Tensor, Tensor]:
    """Smoothed scores of all labels [n, K] and of the true ones [n]; PTT is fitted on the holdout."""
    logits, labels = material.logits(ORIGIN, draws), material.dataset(ORIGIN.dataset).labels
    u = torch.rand(len(logits), 1, generator=torch.Generator().manual_seed(material.seed)).to(logits.device)
    score = get_score(name)
    values = score.order(logits, u) if transform == "ptt" else score(logits, u)
    if transform == "ptt":
        held = next(random_splits(len(logits), 1, material.holdout, material.seed)).holdout
        values = PTT().fit(values[held, 0, labels[held]], ALPHA)(values)
    mean = values.mean(dim=1, dtype=torch.float64).cpu()
    return mean, mean.gather(1, labels[:, None])[:, 0]


def _normal(scores: Tensor | float) -> Tensor:
    """Smoothed scores on the scale of the figures."""
    return torch.special.ndtri(torch.as_tensor(scores, dtype=torch.float64).clamp(1e-9, 1 - 1e-9))


def inverse_cdf(material: Material, draws: int) -> Rows:
    """Quantiles of the smoothed score of the true label: the steeper at 1 - alpha, the less an attack costs."""
    levels = torch.linspace(0.005, 0.995, 199, dtype=torch.float64)
    rows: Rows = []
    for score in ("aps", "hps"):
        for transform in LABELS:
            values = _normal(smoothed(material, draws, score, transform)[1]).quantile(levels)
            slope = float((values[181] - values[177]) / (levels[181] - levels[177]))  # around 0.9
            points = [[round(x, 4), round(y, 4)] for x, y in zip(levels.tolist(), values.tolist(), strict=True)]
            named = {"score": score, "transform": transform}
            rows.append({**named, "slope_at_0.9": round(slope, 3), "points": points})
    return rows


def densities(material: Material, draws: int) -> Rows:
    """Histograms of the smoothed scores of all labels with the threshold before and after its inflation, RSCP with HPS."""
    rows: Rows = []
    for transform in LABELS:
        values, own = smoothed(material, draws, "hps", transform)
        split = next(random_splits(len(own), 1, material.holdout, material.seed))
        points = split.calibration if transform == "ptt" else split.calibration_with_holdout
        tau = min(conformal_quantile(own[points], ALPHA), 1.0)
        inflated = float(Threat(Gaussian(ORIGIN.sigma), EPSILON).up(tau))
        test = values[split.test]
        counts = torch.histc(_normal(test).flatten().clamp(-4, 4), bins=80, min=-4, max=4) / len(test)
        levels = {"tau": tau, "inflated": inflated}
        shown = {name: float(_normal(level).clamp(-4, 4)) for name, level in levels.items()}
        before, after = (float((test <= level).sum() / len(test)) for level in levels.values())
        histogram = {"bins": [-4.0, 4.0, 80], "labels_per_image": [round(count, 5) for count in counts.tolist()]}
        rows.append({"transform": transform, **histogram, **shown, "size_before": before, "size_after": after})
    return rows


def overhead(material: Material, draws: int) -> Rows:
    """Seconds per image for scores with and without PTT, by size of the holdout, and for the network itself."""
    count, device = (500 if material.device != "cpu" else 40), torch.device(material.device)
    logits = material.logits(ORIGIN, draws)[:count]
    u = torch.rand(len(logits), 1, generator=torch.Generator().manual_seed(0)).to(device)
    score = get_score("hps")

    def row(what: str, holdout: int, images: int | float, work: Callable[[], object]) -> dict[str, Any]:
        timer = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())  # waits for a GPU
        return {"what": what, "holdout": holdout, "seconds_per_image": timer.timeit(3).mean / images, "draws": draws}

    rows = [row("scores", 0, count, lambda: score(logits, u).mean(dim=1))]
    for holdout in (125, 250, 500, 1000, 2000, 4000, 8000):
        ptt = PTT().fit(torch.randn(holdout, generator=torch.Generator().manual_seed(1)).to(device))
        rows.append(row("scores with PTT", holdout, count, lambda ptt=ptt: ptt(score.order(logits, u)).mean(dim=1)))
    smoother = material.smoother(material.model(ORIGIN), ORIGIN.sigma, compile=False)
    few = material.dataset(ORIGIN.dataset).images[: 8 if device.type == "cpu" else count].to(device)
    noisy = few.repeat_interleave(draws if device.type == "cuda" else 8, dim=0)
    with torch.inference_mode():
        parts = noisy.split(16000)
        rows.append(row("network alone", 0, len(noisy) / draws, lambda: [smoother._run(part) for part in parts]))
    return rows


def accuracy(material: Material, _draws: int) -> Rows:
    """Accuracy of one noisy draw of a network off the shelf, alone and behind denoisers, with its 95 % interval."""
    rows: Rows = []
    networks = {"alone": OFF_THE_SHELF, "denoised": DENOISED}
    with suppress(InputError):  # where it is missing, which is no part of the package, its row is left out
        material.find(TOWARDS.partition("@")[2].partition(" ")[0])
        networks["denoised, trained towards the network"] = TOWARDS
    for name, network in networks.items():
        for sigma in (0.0, 0.125, 0.25, 0.5, 1.0) if name == "alone" else (0.125, 0.25, 0.5, 1.0):
            source = material.noisy(Origin("imagenet", sigma, network=network), 1)
            seen = source.read(torch.arange(source.points))
            right = sum(int((piece.outputs[:, 0].argmax(dim=1).cpu() == piece.truth).sum()) for piece in seen)
            share = right / source.points
            half = 1.96 * (share * (1 - share) / source.points) ** 0.5
            measured = {"accuracy": share, "half_width": half, "images": source.points}
            rows.append({"network": name, "sigma": sigma, **measured})
    return rows


# -- drawings ----------------------------------------------------------------------------------------------------------


@styled
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


@styled
def draw_densities(rows: Sequence[dict[str, Any]]) -> Any:
    figure, axes = subplots(1, 2, figsize=(8.4, 3.2), sharey=True)
    for axis, row in zip(axes, rows, strict=True):
        edges, width = np.linspace(*row["bins"], endpoint=False, retstep=True)
        axis.bar(edges, row["labels_per_image"], width, align="edge", color=SOFT, alpha=0.4)
        axis.axvspan(row["tau"], row["inflated"], color=VANILLA, alpha=0.25, label="added by inflation")
        axis.axvline(row["tau"], color=CERTIFIED, label="threshold")
        axis.axvline(row["inflated"], color=VANILLA, ls="--", label="inflated threshold")
        added = row["size_after"] - row["size_before"]
        axis.set(title=f"{LABELS[row['transform']]}: {row['size_before']:.2f} + {added:.2f} labels", yscale="log")
        axis.set_xlabel(r"$\Phi^{-1}$(smoothed score), clipped to ±4")
    axes[0].set_ylabel("labels per image and bin")
    axes[0].legend(fontsize=8, loc="upper left")
    return figure


@styled
def draw_overhead(rows: Sequence[dict[str, Any]]) -> Any:
    figure, axis = subplots(figsize=(6, 3.4))
    held, times = zip(
        *((row["holdout"], 1e6 * row["seconds_per_image"]) for row in rows if row["holdout"]), strict=True
    )
    axis.plot(held, times, "o-", color=CERTIFIED, label="scores with PTT")
    without = [row for row in rows if row["holdout"] == 0]
    for row, color, style in zip(without, (VANILLA, SOFT), ("--", ":"), strict=True):
        axis.axhline(1e6 * row["seconds_per_image"], color=color, ls=style, label=row["what"])
    words = f"microseconds per image ({rows[0].get('draws', DRAWS)} draws)"
    axis.set(xscale="log", yscale="log", xlabel="holdout points", ylabel=words)
    _read_off(axis, held)
    return figure


@styled
def draw_motivation(rows: Sequence[dict[str, Any]]) -> Any:
    """Coverage and size, clean and attacked, as bars."""
    shown = ("Vanilla CP", "RSCP", "RSCP, PTT + RCT", "exact, 1 draw", "exact, 16 draws")
    # With fewer draws than the paper's a row says how many it had.
    names = [name for name in dict.fromkeys(row["row"] for row in rows) if name in shown or name.startswith("RSCP")]
    figure, axes = subplots(1, 2, figsize=(10, 3.6))
    for axis, what, label in zip(axes, ("coverage", "size"), ("coverage", "labels per set"), strict=True):
        for column, color, side in (("clean", CERTIFIED, -0.5), ("attacked", VANILLA, 0.5)):
            mine = [next(row[what] for row in rows if (row["row"], row["column"]) == (name, column)) for name in names]
            means, halves = ([one[key] for one in mine] for key in ("mean", "std"))
            places = [i + side * 0.38 for i in range(len(names))]
            axis.bar(places, means, 0.38, yerr=halves, color=color, label=column, capsize=2)
        axis.set_xticks(range(len(names)), [name.replace(", ", "\n") for name in names], fontsize=8)
        axis.set_ylabel(label)
        axis.grid(axis="x", visible=False)
    axes[0].axhline(1 - ALPHA, color=SOFT, lw=1, ls=":")
    axes[0].set_ylim(0.7, 1)
    listed = axes[0].get_legend_handles_labels()
    figure.legend(*listed, loc="upper center", ncols=2, fontsize=9, bbox_to_anchor=(0.5, 1.02))
    return figure


def _read_off(axis: Any, places: Sequence[float]) -> None:
    """Ticks at counts, which are read off, instead of powers of ten."""
    axis.set_xticks(places, [f"{x:g}" for x in places])
    axis.minorticks_off()
    axis.legend()


def _line(axis: Any, index: int, name: str, points: Sequence[tuple[float, float, float]]) -> None:
    """One line through points (x, mean, half width of its bar)."""
    style = {"fmt": f"{MARKERS[index % len(MARKERS)]}-", "color": COLORS[index % len(COLORS)]}
    axis.errorbar(*zip(*points, strict=True), ms=4, capsize=2, label=name, **style)


@styled
def _lines(rows: Sequence[dict[str, Any]], xlabel: str) -> Any:
    """Size against the number in a column's name, a line per row of the table, with what the paper prints."""
    figure, axis = subplots(figsize=(6.4, 3.6))
    numbered = sorted(((float(Fraction(row["column"].split()[-1])), row) for row in rows), key=lambda one: one[0])
    for index, name in enumerate(dict.fromkeys(row["row"] for row in rows)):
        mine = [(x, row) for x, row in numbered if row["row"] == name]
        _line(axis, index, name, [(x, row["size"]["mean"], row["size"]["std"]) for x, row in mine])
        paper = [(x, row["paper"]["size"]) for x, row in mine if row["paper"]["size"] is not None]
        if paper:
            color = COLORS[index % len(COLORS)]
            axis.plot(*zip(*paper, strict=True), "x:", label=f"{name}, paper", color=color, alpha=0.6)
    axis.set(xscale="log", xlabel=xlabel, ylabel="labels per set")
    at = sorted({x for x, _ in numbered})
    if all(x == round(x) for x in at):
        _read_off(axis, at)
    axis.legend(fontsize=8)
    return figure


def sigmoid_cdf(*_: Any) -> Rows:
    places = product((1 / 400, 1 / 20), (0.01, 0.1, 0.5, 0.9, 0.99))
    return [{"T": T, "t": t, "cdf": float(closed_form.sigmoid_cdf(t, 1 - ALPHA, T))} for T, t in places]


@styled
def draw_accuracy(rows: Sequence[dict[str, Any]]) -> Any:
    figure, axis = subplots(figsize=(6, 3.4))
    for index, name in enumerate(dict.fromkeys(row["network"] for row in rows)):
        mine = [(row["sigma"], row["accuracy"], row["half_width"]) for row in rows if row["network"] == name]
        _line(axis, index, name, mine)
    axis.set(xlabel="sigma", ylabel="accuracy of one noisy draw", ylim=(0, 1))
    axis.legend()
    return figure


FIGURES: dict[str, Callable[[Material, int], Rows]] = {
    "inverse-cdf": inverse_cdf,
    "densities": densities,
    "overhead": overhead,
    "accuracy-imagenet-5k": accuracy,
    "one-dimensional": lambda *_: closed_form.one_dimensional(),
    "failure-case": lambda *_: closed_form.failure_case(),
    "sigmoid-cdf": sigmoid_cdf,
}
"""What is computed from noisy outputs or in closed form and not from a table, told how many draws it may use."""

DRAWINGS: dict[str, Callable[[Sequence[dict[str, Any]]], Any]] = {
    **dict.fromkeys(("table3", "draws-cifar100", "draws-imagenet"), lambda rows: _lines(rows, "draws per query")),
    "temperature": lambda rows: _lines([row for row in rows if row["column"].startswith("T")], "T"),
    "motivation": draw_motivation,
    "inverse-cdf": draw_inverse_cdf,
    "densities": draw_densities,
    "overhead": draw_overhead,
    "accuracy-imagenet-5k": draw_accuracy,
    "one-dimensional": lambda _: closed_form.one_dimensional_figure(),
    "failure-case": lambda _: closed_form.failure_case_figure(),
    "sigmoid-cdf": lambda _: closed_form.sigmoid_cdf_figure(),
}
