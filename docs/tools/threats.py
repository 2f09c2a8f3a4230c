"""Tables of docs/threats.md, from results/threats/: what every threat costs on CIFAR-10, and other certified families."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from keepcover.noise import NOISES, get_noise, get_norm

RESULTS = Path(__file__).resolve().parents[2] / "results" / "threats"
DRAWS = (1, 4, 16, 64)
CASES = ("uniform_narrow", "uniform", "laplace", "gaussian", "ablation", "bands", "random_bands")
PRINTED = {  # by Massena et al. (ICML 2025) and Jeary et al. (NeurIPS 2024), each with networks of its own
    "l2-0.03": ("L2 0.03", "1.72", "4.45"),
    "linf-1-1000": ("Linf 1/1000", "", "2.26"),
}

Rows = list[dict[str, Any]]


def read(name: str) -> tuple[Rows, dict[str, Any]]:
    found = json.loads((RESULTS / f"{name}.json").read_text())
    return found["rows"], found["manifest"]


def stored(case: str, network: str = "stored", draws: tuple[int, ...] = DRAWS) -> Rows:
    """Rows of a case on stored logits, of every number of draws."""
    return [row for count in draws for row in read(f"{network}-{case}-{count}-draws")[0]]


def size(rows: Rows, method: str, draws: int) -> str:
    row = next((row for row in rows if (row["method"], row["draws"]) == (method, draws)), None)
    if row is None:
        return ""
    if row["trivial_splits"] == row["splits"]:
        return "all"
    return f"{row['size']['mean']:.2f} ± {row['size']['std']:.2f}"


def unharmed(rows: Rows) -> str:
    """The size where nothing is paid for an attack: what the network itself is worth."""
    return f"{next(row for row in rows if row['epsilon'] == 0)['size']['mean']:.2f}"


def attacked(case: str, epsilon: float) -> list[str]:
    """Clean and attacked coverage of what ``auto`` gives, and the verdict; nothing where no attack was run."""
    if not (RESULTS / f"{case}-attacked.json").is_file():
        return ["", "", ""]
    rows = [row for row in read(f"{case}-attacked")[0] if row["epsilon"] == epsilon]
    clean = next(row for row in rows if row["attack"] == "none")["coverage"]
    worst = min((row for row in rows if row["attack"] != "none"), key=lambda row: row["coverage"]["mean"])
    hit = worst["coverage"]
    shown = f"{hit['mean']:.3f} [{hit['low']:.3f}, {hit['high']:.3f}] of {hit['count']}"
    return [f"{clean['mean']:.3f}", shown, worst["verdict"]]


def spec(row: dict[str, Any]) -> str:
    """The noise of a row, as the command line takes it."""
    name = row["noise"]
    return get_noise({"name": name, **{f.name: row[f.name] for f in fields(NOISES[name])}}).spec  # type: ignore[arg-type]


def said(case: str, own: dict[str, Any], net: dict[str, Any]) -> tuple[str, str]:
    """A case's network in its row, and what is to be said of it below the table."""
    if "trained_under" in net:
        told = f"ResNet-110 trained under {net['trained_under']}, {own['points']:,} images"
        return told, ""
    return net[
        "architecture"
    ], f"{case}: {net['epochs']} epochs in {net['seconds'] / 60:.0f} minutes on {net['hardware']}"


def costs() -> str:
    """Certified sizes at every threat, beside RCP1 and BinCP on the same outputs, and coverage under attack."""
    head = [
        "threat",
        "noise",
        "network",
        "right",
        "no attack",
        *(f"{n} draw{'s' * (n > 1)}" for n in DRAWS),
        "RCP1",
        "BinCP, 64",
    ]
    lines = []
    for case, reach, attack in (("linf-1-255", "Linf 1/255", "linf"), ("l1-0.5", "L1 0.5", ""), ("l1-1", "L1 1", "")):
        rows = stored(case)
        sizes = [size(rows, "exact_asymmetric", n) for n in DRAWS]
        sizes += [size(rows, "rcp1", 1), size(rows, "bincp", 64)]
        hit = attacked(attack, 1 / 255)
        lines.append([reach, "gaussian:0.25", "ResNet-110", "78%", unharmed(stored("l2-0", draws=(64,))), *sizes, *hit])
    notes = []
    for case in (case for case in CASES if (RESULTS / f"{case}-evaluated.json").is_file()):
        rows, about = read(f"{case}-evaluated")
        own, net = about["config"], about["config"]["network"]
        network, note = said(case, own, net)
        notes += [note] if note else []
        for epsilon in dict.fromkeys(row["epsilon"] for row in rows if row["epsilon"]):
            mine = [row for row in rows if row["epsilon"] == epsilon]
            reach = get_norm(mine[0]["norm"]).reach(epsilon)
            sizes = [size(mine, "exact_asymmetric", n) for n in DRAWS]
            if mine[0]["method"] == "bands":
                sizes = ["", "", "", f"{size(mine, 'bands', mine[0]['draws'])} ({mine[0]['draws']} bands)"]
            right = f"{net['top1_accuracy_one_noisy_draw_test']:.1%}"
            beside = [size(mine, "rcp1", 1), size(mine, "bincp", 64)]
            hit = attacked(case, epsilon)
            lines.append([reach, spec(mine[0]), network, right, unharmed(rows), *sizes, *beside, *hit])
    head, light = [*head, "coverage", "attacked", "verdict"], read("linf-attacked")[1]["config"]
    table = "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *lines])
    about = (
        f"α = 0.1, HPS, `exact_asymmetric` with 64 calibration draws, mean ± standard deviation over random splits; *right*: accuracy of one draw; *no attack*: "
        f"the same rule at ε = 0; *all*: every label. *attacked*: coverage of as many images under the worse of "
        f"two attacks, with 95 % Clopper-Pearson. Rows of a *ResNet-110*: all 10,000 test images, 50 splits. The others: {own['points']:,} test images unless they say how "
        f"many, {own['splits']} splits, a holdout of {own['holdout']}. Attacks have {own['steps']} steps; on a ResNet-110 "
        f"{light['steps']} steps and {light['draws']} draws, against a predictor with {light['calibration_draws']} calibration draws. Training, under the shared load of two cores: "
        f"{'; '.join(notes)}. Commands are in `results/threats/*.json`."
    )
    return f"{table}\n\n{about}"


NETWORKS = {
    "stored": "ResNet-110, σ = 0.25",
    "small": "ResNet-110, σ = 0.125, 3,334 images",
    "wide": "WRN-28-6, σ = 0.125",
}


def families() -> str:
    """Small radii, at which networks with a Lipschitz bound and verified networks print sizes."""
    lines = []
    for case, (reach, lipschitz, verified) in PRINTED.items():
        for network, name in NETWORKS.items():
            present = tuple(n for n in DRAWS if (RESULTS / f"{network}-{case}-{n}-draws.json").is_file())
            if present:
                rows = stored(case, network, present)
                sizes = [size(rows, "exact_asymmetric", n) for n in (1, 4, 16)]
                lines.append([reach, name, *sizes, lipschitz or "–", verified])
    head = ["threat", "network", "1 draw", "4 draws", "16 draws", "Lipschitz networks", "verification"]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *lines])
