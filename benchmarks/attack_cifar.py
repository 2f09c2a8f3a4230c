"""Attack every method on CIFAR-10 with SmoothAdv and with attacks on the methods' own rules; rows into a results file.

python benchmarks/attack_cifar.py --data DIR --weights FILE --out results/attack-cifar10.json
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from keepcover.attacks import audit
from keepcover.data import cifar
from keepcover.engine.memory import RememberingSmoother
from keepcover.errors import KeepcoverWarning
from keepcover.evaluation.manifest import command_of, manifest, write_results
from keepcover.methods import RSCP, Auto, Exact, Method, RSCPPlus, SplitCP
from keepcover.models import CifarResNet, load_weights
from keepcover.prediction.calibration import calibrate
from keepcover.prediction.predictor import Predictor

# name, method, score, draws, calibration draws; most draws first, so that the others reuse them. Vanilla CP has no noise.
ENTRIES: tuple[tuple[str, Method, str, int, int | None], ...] = (
    ("vanilla CP HPS", SplitCP(), "hps", 1, None),
    ("vanilla CP APS", SplitCP(), "aps", 1, None),
    ("RSCP HPS", RSCP(transform=None), "hps", 256, None),
    ("RSCP HPS + PTT", RSCP(), "hps", 256, None),
    ("RSCP APS", RSCP(transform=None), "aps", 256, None),
    ("RSCP APS + PTT", RSCP(), "aps", 256, None),
    ("RSCP+ Hoeffding HPS + PTT", RSCPPlus("hoeffding"), "hps", 256, None),
    ("RSCP+ Bernstein HPS + PTT", RSCPPlus("bernstein"), "hps", 256, None),
    ("exact HPS, 256 draws", Exact(), "hps", 256, None),
    ("exact HPS, 16 draws", Auto(), "hps", 16, 64),
    ("exact HPS, 4 draws", Auto(), "hps", 4, 64),
    ("exact HPS, 1 draw", Auto(), "hps", 1, 64),
    ("exact APS, 16 draws", Auto(), "aps", 16, 64),
)
# What the paper prints for attacked coverage and size of RSCP (its own weights, Appendix D.2).
PAPER = {"RSCP HPS": 0.935, "RSCP HPS + PTT": 0.909, "RSCP APS": 0.957, "RSCP APS + PTT": 0.921}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder with cifar-10-batches-bin")
    parser.add_argument("--weights", required=True, help="CIFAR-10 ResNet-110 trained at --sigma")
    parser.add_argument("--sigma", type=float, default=0.25)
    parser.add_argument("--epsilon", type=float, default=0.125)
    parser.add_argument("--images", type=int, default=2000, help="test images to attack")
    parser.add_argument("--attack-draws", type=int, default=32)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--attacks", nargs="+", default=["softmax", "margin"])
    parser.add_argument("--only", nargs="+", default=[""], help="methods whose name begins with one of these")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", default="results/attack-cifar10.json")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore", KeepcoverWarning)  # trivial sets are counted in the rows
    start = time.monotonic()
    rows = run(options)
    asked = {key: value for key, value in vars(options).items() if key not in ("data", "weights", "out")}
    command = command_of("python benchmarks/attack_cifar.py", asked)
    data = {"data": "cifar10", "weights": Path(options.weights).name, "splits": 1, "holdout": 500, "calibration": 4750}
    write_results(Path(options.out), rows, manifest(command, asked | data, time.monotonic() - start))


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    data = cifar("cifar10", options.data, "test")
    holdout, calibration, test = data.split(500, 4750, -1, seed=options.seed)
    test = test[: options.images]
    model = load_weights(CifarResNet(110, 10), options.weights).to(options.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    numerics: dict[str, Any] = {"channels_last": True, "autocast": torch.float16 if options.device == "cuda" else None}
    noisy = RememberingSmoother(model, options.sigma, **numerics)
    clean = RememberingSmoother(model, 0.0, **numerics)
    shared: dict[str, Any] = {"epsilon": options.epsilon, "seed": options.seed + 1, "class_names": data.class_names}
    predictors: dict[str, Predictor] = {}
    for name, method, score, draws, cal_draws in ENTRIES:
        if not name.startswith(tuple(options.only)):
            continue
        predictors[name] = calibrate(
            clean if name.startswith("vanilla") else noisy,
            calibration.pair,
            method=method,
            score=score,
            draws=draws,
            calibration_draws=cal_draws,
            holdout=holdout.pair,
            **shared,
        )
        print(f"calibrated {name}", flush=True)
    report = audit(
        predictors,
        test.pair,
        attacks=options.attacks,
        steps=options.steps,
        draws=options.attack_draws,
        seed=options.seed + 2,
    )
    print(report)
    return [{**row.__dict__, "paper_attacked_coverage": PAPER.get(row.name)} for row in report.rows]


if __name__ == "__main__":
    main()
