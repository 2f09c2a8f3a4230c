"""Reproduce tables and figures without the command line's extras.

python -m keepcover.paper.reproduce NAME ... --data DIR --models DIR --out results/reproduce
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from keepcover.paper.reproduce.material import Material
from keepcover.paper.reproduce.run import Run, catalogue


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--models", type=Path)
    parser.add_argument("--store", type=Path, default=Path("out/store"))
    parser.add_argument("--out", type=Path, default=Path("results/reproduce"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--images", type=int)
    parser.add_argument("--draws", type=int, help="at most so many draws, for a quick look")
    parser.add_argument("--holdout", type=int, default=500)
    parser.add_argument("--attack-images", type=int, default=2000)
    parser.add_argument("--attack-draws", type=int, default=32)
    parser.add_argument("--splits", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args(arguments)
    if options.list:
        for name, item in catalogue().items():
            print(f"{name:20} {item.title}")
        return
    material = Material(
        options.data,
        options.models,
        options.store,
        options.device,
        options.images,
        options.compile,
        options.seed,
        options.holdout,
        attack_images=options.attack_images,
        attack_draws=options.attack_draws,
    )
    run = Run(
        material, options.out, options.splits, options.draws, options.resume, lambda text: print(text, flush=True)
    )
    kept = {
        key: value
        for key, value in vars(options).items()
        if key not in ("names", "list", "data", "models", "store", "out")
    }
    words = [
        f"--{key.replace('_', '-')}" + ("" if value is True else f" {value}") for key, value in kept.items() if value
    ]
    command = f"keepcover reproduce {' '.join([*options.names, *words])}"
    run.reproduce(options.names, command)


if __name__ == "__main__":
    main()
