"""Train the paper's CIFAR networks under noise, and ConfTr, RCT and exact-matched heads over them.

python -m keepcover.paper.train base --data DIR --sigma 0.25 --out weights
python -m keepcover.paper.train conftr rct exact --data DIR --sigma 0.25 --epsilon 0.125 --out weights

It runs where the command line's extras are not installed. One bank of features serves every head of a noise level.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from keepcover.data import cifar
from keepcover.models import CifarResNet, find_weights, load_weights
from keepcover.paper.reproduce.cells import Origin, head_name
from keepcover.training.bank import FeatureBank
from keepcover.training.base import Recipe, train_base
from keepcover.training.run import ConformalRequest, train_conformal

EPOCHS = {"cifar10": 80, "cifar100": 90}  # of base models


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="+", choices=["base", "conftr", "rct", "exact"])
    parser.add_argument("--dataset", choices=list(EPOCHS), default="cifar10")
    parser.add_argument("--data", required=True, help="folder of the official binary files")
    parser.add_argument("--sigma", type=float, required=True)
    parser.add_argument("--epsilon", type=float, nargs="+", default=[0.125], help="of heads")
    parser.add_argument("--depth", type=int, default=110)
    parser.add_argument("--views", type=int, default=4, help="of heads: crops and flips per image in the bank")
    parser.add_argument("--epochs", type=int, help="as in the paper by default")
    parser.add_argument("--fresh", action="store_true", help="heads without a bank: fresh noise in every batch")
    parser.add_argument("--suffix", default="", help="appended to the names of heads")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("weights"))
    options = parser.parse_args(arguments)
    name = Origin(options.dataset, options.sigma).weights.replace("110", str(options.depth))
    if "base" in options.kinds:
        base(options, name)
    kinds = [kind for kind in options.kinds if kind != "base"]
    if kinds:
        heads(options, kinds, name)


def base(options: Any, name: str) -> None:
    """Train a network under noise."""
    training, test = (cifar(options.dataset, options.data, part) for part in ("train", "test"))
    torch.manual_seed(options.seed)
    model = CifarResNet(options.depth, len(training.class_names))
    recipe = Recipe(options.sigma, epochs=options.epochs or EPOCHS[options.dataset], seed=options.seed)
    architecture, out = f"cifar-resnet{options.depth}", options.out / f"{name}.safetensors"
    card = train_base(model, training, test, recipe, out, architecture=architecture, device=options.device)
    print(json.dumps(card, indent=1))


def heads(options: Any, kinds: Sequence[str], name: str) -> None:
    """Train last layers over a network that is among the weights, or beside the heads to come."""
    data = cifar(options.dataset, options.data, "train")
    mine = options.out / f"{name}.safetensors"
    weights = mine if mine.is_file() else find_weights(name)
    model = load_weights(CifarResNet(options.depth, len(data.class_names)), weights).to(options.device)
    banks: dict[tuple[float, int], FeatureBank] = {}
    for kind in kinds:
        for epsilon in options.epsilon[:1] if kind == "conftr" else options.epsilon:
            request = ConformalRequest(
                kind, options.sigma, epsilon, preset=options.dataset, views=options.views, fresh=options.fresh
            )
            recipe = replace(request.settings, seed=options.seed, epochs=options.epochs or request.settings.epochs)
            request = replace(request, recipe=recipe)
            key = (request.noise, request.copies)
            if key not in banks and not options.fresh:
                kept, _ = request.parts(data)
                banks[key] = request.bank(
                    model, kept, device=options.device, compile=options.compile, seed=options.seed
                )
            card = train_conformal(
                model,
                data,
                request,
                options.out / f"{head_name(name, kind, epsilon)}{options.suffix}.safetensors",
                base=name,
                bank=banks.get(key),
                device=options.device,
                say=lambda text: print(text, flush=True),
                progress=False,
            )
            print(f"{kind} epsilon {epsilon:g}: {card['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
