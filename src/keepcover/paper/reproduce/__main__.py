"""Reproduce tables and figures where the command line's extras are not installed: rows as JSON, no pages.

python -m keepcover.paper.reproduce NAME ... --data DIR --models DIR --out results/reproduce
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from keepcover.paper.reproduce.material import Material
from keepcover.paper.reproduce.run import Run

PATHS = {"data": None, "models": None, "store": Path("out/store"), "out": Path("results/reproduce")}
NUMBERS = {
    "images": None,
    "draws": None,
    "holdout": 500,
    "attack-images": 2000,
    "attack-draws": 32,
    "splits": 50,
    "seed": 0,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+")
    for kind, known in ((Path, PATHS), (int, NUMBERS)):
        for name, default in known.items():
            parser.add_argument(f"--{name}", type=kind, default=default)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for flag in ("compile", "resume"):
        parser.add_argument(f"--{flag}", action="store_true")
    asked = vars(parser.parse_args(arguments))
    words = [
        f"--{name.replace('_', '-')} {value}"
        for name, value in asked.items()
        if name.replace("_", "-") in NUMBERS and value
    ]
    words += [f"--device {asked['device']}", *(f"--{flag}" for flag in ("compile", "resume") if asked[flag])]
    names, out, splits, draws, resume = (asked.pop(key) for key in ("names", "out", "splits", "draws", "resume"))
    run = Run(Material(**asked), out, splits, draws, resume, lambda text: print(text, flush=True))
    run.reproduce(names, f"keepcover reproduce {' '.join([*names, *words])}")


if __name__ == "__main__":
    main()
