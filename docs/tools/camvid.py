"""The CamVid section of the page about segmentation, from results/segmentation-camvid.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
ORDINARY = 0.01  # a network under less noise than this has seen none to speak of
COLUMNS = {
    "for clean scenes alone": (None, 1),
    "one-draw control": ("one_draw", 1),
    "certified, 1 draw": ("exact_asymmetric", 1),
    "4 draws": ("exact_asymmetric", 4),
    "16 draws": ("exact_asymmetric", 16),
}


def grid(rows: list[Row], cell: Callable[[Row], str]) -> str:
    """A line for every class, network and radius, a column for every kind of masks."""
    lines: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in rows:
        plain = row["epsilon"] == 0
        (column,) = [name for name, kind in COLUMNS.items() if kind == (None if plain else row["method"], row["draws"])]
        sigma = "ordinary" if row["sigma"] < ORDINARY else f"σ = {row['sigma']:g}"
        lines.setdefault((row["of"], sigma, f"{row['at']:g}"), {})[column] = cell(row)
    body = [[*key, *(found.get(column, "") for column in COLUMNS)] for key, found in lines.items()]
    head = ["masks of", "network", "ε", *COLUMNS]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *body])


def section(results: Path) -> str:
    """What was done, the sizes of masks, what an attack does to them, and sets of every label."""
    found = json.loads((results / "segmentation-camvid.json").read_text())
    about, rows = found["manifest"], found["rows"]
    own, first = about["config"], rows[0]
    masks, every = ([row for row in rows if (row["of"] == "every label") == wanted] for wanted in (False, True))
    for row in every:
        row["at"] = row["epsilon"]
    there = {row["of"]: f"{row['of']} {row['true']:.1%} ({row['scenes']} scenes)" for row in masks}
    audits = [row for row in masks if "audit" in row and row["sigma"] >= ORDINARY]
    verdicts = [row["audit"]["verdict"] for row in audits]
    worst = min(audits, key=lambda row: row["audit"]["coverage"]["mean"])
    lowest = worst["audit"]["coverage"]
    width, height = own["size"]
    trained = sum(card["seconds"] for card in own["cards"])
    parts = [
        f"{own['scenes']} frames of driving, shrunk to {width} x {height} pixels and dealt out at random: {own['training']} train UNets of "
        f"{own['parameters'] / 1e6:.1f} M parameters, each under its own noise; of the others, those with pixels of the class are held out ({own['holdout']}), "
        f"calibrate and test. α = {first['alpha']:g}, {own['calibration_draws']} draws per calibration scene, means over {first['splits']} splits. What is really "
        f"there, of the pixels of these scenes: {', '.join(there.values())}.",
        "**Mean share of a scene's pixels in the mask** (± standard deviation over splits):",
        grid(
            [row for row in masks if row["sigma"] >= ORDINARY or row["at"] == masks[0]["at"]],
            lambda row: f"{row['size']['mean']:.1%} ± {row['size']['std']:.1%}",
        ),
        f"**Recall of {own['images']} scenes before and after an attack within ε**, promised 0.9 except for the first column:",
        grid(
            masks,
            lambda row: (
                f"{row['coverage_before']['mean']:.3f} → {row['attacked_coverage']['mean']:.3f} ± {row['attacked_coverage']['std']:.3f}"
            ),
        ),
        f"The attack climbs what the certified rule with 4 draws compares (for the ordinary network, its one), in {own['steps']} L2 steps through "
        f"{own['attack_draws']} draws; the other masks meet the same attacked scenes, all under fresh noise. Audits of the certified rule with one "
        f"calibration: {', '.join(f'{verdicts.count(verdict)} {verdict}' for verdict in dict.fromkeys(verdicts))}; the lowest "
        f"recall is {lowest['mean']:.3f} [{lowest['low']:.3f}, {lowest['high']:.3f}], of {worst['of']}s at ε = {worst['at']:g}.",
        "**Sets of labels for every pixel**, labels per pixel, all scenes:",
        grid(every, lambda row: f"{row['size']['mean']:.2f} ± {row['size']['std']:.2f}"),
        f"`{about['command']}`, {about['hardware']['threads']} CPU thread, {about['seconds']:.0f} s after {trained:.0f} s of training, on a machine that other "
        "work shared (`results/segmentation-camvid.json`).",
    ]
    return "\n\n".join(parts)
