"""What each promise costs: sizes and the coverage of the worst class over random splits, beside the marginal promise.

PYTHONPATH=src python -m benchmarks.promises --logits FILE --out results/promises-cifar10.json
PYTHONPATH=src python -m benchmarks.promises --logits STORE --out results/promises-cifar100.json

Noisy logits come from a file, or from a store as ``keepcover smooth`` fills it with ``--chunk-draws`` as many as draws; of one
that is not full, the images that it has. Every split draws a holdout of its own, so that a cost does not hang on what one holdout
chose. A method that needs no holdout calibrates on it too.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from keepcover.evaluation import Entry, InMemory, Row, evaluate_entries
from keepcover.evaluation.manifest import command_of, manifest, write_results
from keepcover.methods import get_method
from keepcover.noise import Gaussian
from keepcover.promises import Promise
from keepcover.store import read_logits

ALPHA = 0.1
KINDS: dict[str, list[dict[str, Any]]] = {
    "for whom": [{"per": "class"}, {"per": "class", "clusters": "auto"}],
    "how surely": [{"delta": 0.05}, {"delta": 0.01}],
    "despite what": [
        {"poisoned": 10},
        {"poisoned": 50},
        {"poisoned": 200},
        {"calibration_epsilon": 0.0625},
        {"drift": 0.02},
    ],
    "pairs": [
        {"per": "class", "delta": 0.05},
        {"per": "class", "clusters": "auto", "delta": 0.05},
        {"per": "class", "poisoned": 10},
        {"per": "class", "drift": 0.02},
        {"delta": 0.05, "poisoned": 50},
        {"delta": 0.05, "drift": 0.02},
        {"poisoned": 50, "drift": 0.02},
    ],
}
PROMISES = [Promise(), *(Promise(**said) for some in KINDS.values() for said in some)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logits", required=True, help="file with logits [n, N, K] and labels, or a store")
    parser.add_argument("--sigma", type=float, default=0.25)
    parser.add_argument("--epsilon", type=float, default=0.125)
    parser.add_argument("--draws", type=int, default=16)
    parser.add_argument("--calibration", type=int, nargs="+", default=[4750, 500], help="calibration points")
    parser.add_argument("--methods", nargs="+", default=["auto", "cp"])
    parser.add_argument("--splits", type=int, default=50)
    parser.add_argument("--holdout", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", required=True)
    options = parser.parse_args(arguments)
    start = time.monotonic()
    logits, labels = noisy(Path(options.logits))
    source = InMemory(logits, labels, Gaussian(options.sigma))
    rows = [row for points in options.calibration for row in run(source, points, options)]
    asked = {**vars(options), "logits": Path(options.logits).name, "out": f"results/{Path(options.out).name}"}
    about = {"images": source.points, "draws of each": source.draws, "classes": logits.shape[2]}
    command = command_of("PYTHONPATH=src python -m benchmarks.promises", asked)
    write_results(Path(options.out), rows, manifest(command, {**asked, **about}, time.monotonic() - start))


def noisy(path: Path) -> tuple[Tensor, Tensor]:
    """Noisy logits [n, N, K] and labels [n] of a file, or of the images that a store has so far."""
    if not path.is_dir():
        return read_logits(path)
    parts = [load_file(chunk) for chunk in sorted(path.glob("images-*.safetensors"))]
    return torch.cat([part["logits"] for part in parts]), torch.cat([part["labels"] for part in parts])


def run(source: InMemory, points: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per method and promise; ``cost`` is the size beside the marginal one's. A promise that takes more points than there
    are has a row that says how many.
    """
    rows: list[dict[str, Any]] = []
    for method in map(get_method, options.methods):
        offered = [promise for promise in PROMISES if not method.refuses(promise)]
        entries = [Entry(method, options.epsilon, options.draws, alpha=ALPHA, promise=promise) for promise in offered]
        needed = [promise.points_needed(promise.level(ALPHA)) for promise in offered]
        found = iter(
            evaluate_entries(
                source,
                [entry for entry, least in zip(entries, needed, strict=True) if least <= points],
                splits=options.splits,
                holdout=options.holdout,
                redraw_holdout=True,
                calibration=points,
                seed=options.seed,
            )
        )
        marginal: list[Row] = []
        for entry, least in zip(entries, needed, strict=True):
            about = {"name": entry.promise.short, "asked": method.name, "calibration": points}
            if least > points:
                rows.append({**about, "needs": least})
                continue
            (row,) = next(found)
            marginal = marginal or [row]
            rows.append({**about, "cost": row.cost(marginal), **below(row), **row.to_dict()})
            print(method.name, points, about["name"], f"{row.size.mean:.3f}", rows[-1]["cost"], row.worst, flush=True)
    return rows


def below(row: Row) -> dict[str, Any]:
    """How many classes lie below 1 - alpha with all of an interval that is simultaneous over classes."""
    seen = row.observed.by_class
    return {"classes_below": sum(seen.proportion(k).high < 1 - ALPHA for k in seen.members)}


if __name__ == "__main__":
    main()
