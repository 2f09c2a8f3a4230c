"""Certified intervals on California housing: length and attacked coverage, beside one draw and plain split conformal.

python benchmarks/housing.py --data housing.csv [--out results/regression-housing.json]

The table has 20,640 rows (Pace and Barry 1997, with missing bedrooms and the distance to the ocean in words, as in Geron's
book). Features are standardised on the training rows, so noise and epsilon are in standard deviations, one L2 length over the
eight features; lengths are in dollars. A network of two hidden layers is trained under the noise that it is certified with, and
one without noise for plain split conformal prediction. The attack climbs the mean score of the truth over 32 draws.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from keepcover import KeepcoverWarning, Regression, Smoother, Stream
from keepcover.attacks.pgd import NoisyModel, pgd
from keepcover.data.table import read_csv
from keepcover.evaluation import Attacked, Entry, evaluate_entries
from keepcover.evaluation.manifest import manifest, write_results
from keepcover.methods import get_method
from keepcover.prediction.source import InMemory, Network
from keepcover.scores import Reading

UNIT = 100_000.0  # dollars that the networks count in
LEVELS = (0.05, 0.95)


def network(outputs: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, outputs))


def loss_of(score: str, outputs: Tensor, y: Tensor) -> Tensor:
    """Absolute error, or the pinball loss of a lower and an upper quantile."""
    short = y[:, None] - outputs
    levels = torch.tensor([0.5] if score == "residual" else LEVELS)
    return torch.maximum(levels * short, (levels - 1) * short).mean()


def train(score: str, x: Tensor, y: Tensor, sigma: float, seed: int, epochs: int) -> nn.Module:
    """Adam with a falling rate, fresh noise in every step."""
    model, size = network(1 if score == "residual" else 2, seed), 256
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-4)
    plan = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, epochs * (len(x) // size))
    for _ in range(epochs):
        for rows in torch.randperm(len(x))[: len(x) // size * size].split(size):
            optimiser.zero_grad()
            loss_of(score, model(x[rows] + sigma * torch.randn(size, 8)), y[rows]).backward()
            optimiser.step()
            plan.step()
    return model.eval()


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", default="results/regression-housing.json")
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--attacked", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options, start = parser.parse_args(given), time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KeepcoverWarning)  # of the column in words and the rows that lack a value
        features, prices, names = read_csv(options.data, "median_house_value")
    order = torch.randperm(len(prices), generator=torch.Generator().manual_seed(options.seed))
    features, prices = features[order], prices[order] / UNIT
    half = len(order) // 2
    mean, std = features[:half].mean(dim=0), features[:half].std(dim=0)
    x, y = ((features - mean) / std).float(), prices.float()
    rows: list[dict[str, Any]] = []
    # As much noise as attack: more would blur what longitude and latitude say.
    for score in ("residual", "quantiles"):
        task = Regression(score)
        for epsilon in (0.1, 0.25):
            for sigma in (0.0, epsilon):
                model = train(score, x[:half], y[:half], sigma, options.seed, options.epochs)
                test, truth = x[half:], y[half:]
                smoother, draws = Smoother(model, sigma, progress=False), 64 if sigma else 1

                def climb(outputs: Tensor, truth: Tensor, ids: Tensor, task: Regression = task) -> Tensor:
                    seen = task.seen(outputs)
                    return seen.items(outputs, truth, Reading(True), torch.zeros(len(ids))).draws.values.mean(dim=1)

                attacker = NoisyModel(model, sigma, 32, Stream(options.seed, "attack"))
                hit = torch.arange(min(options.attacked, len(test)))
                moved = pgd(attacker, test[hit], truth[hit, None], epsilon, loss=climb, progress=False)
                clean = InMemory(smoother.logits(test, draws, Stream(options.seed, "test")), truth, smoother.noise)
                again = Network(smoother, moved, draws, Stream(options.seed + 1, "test"), labelled=False)
                asked = [("exact_asymmetric", 1), ("exact_asymmetric", 4), ("exact_asymmetric", 16), ("rcp1", 1)]
                entries = [
                    Entry(get_method(method), epsilon, per_query, alpha=0.1, task=task)
                    for method, per_query in (asked if sigma else [("cp", 1)])
                ]
                attacked = Attacked("residual", hit, again)
                found = evaluate_entries(clean, entries, splits=options.splits, seed=options.seed, attacked=attacked)
                for plain, hurt in found:
                    row = plain.to_dict()
                    row["size"] = {name: value * UNIT for name, value in row["size"].items()}
                    row |= {"attacked_coverage": hurt.to_dict()["coverage"], "attacked_points": len(hit)}
                    rows.append(row)
                    size, coverage = row["size"]["mean"], (plain.coverage, hurt.coverage)
                    print(f"{score} {epsilon} {row['method']} {row['draws']}: {size:.0f}", *coverage, flush=True)
    config = {
        **vars(options),
        "data": Path(options.data).name,
        "features": names,
        "training_rows": half,
        "holdout": 500,
    }
    command = f"python benchmarks/housing.py --data {Path(options.data).name} --seed {options.seed}"
    write_results(Path(options.out), rows, manifest(command, config, time.monotonic() - start))


if __name__ == "__main__":
    main(sys.argv[1:])
