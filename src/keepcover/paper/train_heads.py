"""Train ConfTr, RCT and exact-matched heads over CIFAR ResNets: one bank per noise level serves every head of it.

python -m keepcover.paper.train_heads --dataset cifar10 --data DIR --weights FILE --sigma 0.25 --epsilon 0.125 --out weights
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from keepcover.data import cifar
from keepcover.models import CifarResNet, find_weights, load_weights
from keepcover.training.bank import FeatureBank
from keepcover.training.run import ConformalRequest, train_conformal

KINDS = ("conftr", "rct", "exact")


def head_name(base: str, kind: str, epsilon: float) -> str:
    """The file name of a head without its suffix; ConfTr knows no epsilon.

    Example:
        >>> head_name("cifar10-resnet110-sigma0.25", "rct", 0.125)
        'cifar10-resnet110-sigma0.25-rct-epsilon0.125'
    """
    return f"{base}-conftr" if kind == "conftr" else f"{base}-{kind}-epsilon{epsilon:g}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", choices=["cifar10", "cifar100"], default="cifar10")
    parser.add_argument("--data", required=True, help="folder of the official files")
    parser.add_argument("--weights", required=True, help="base weights, by path or name")
    parser.add_argument("--sigma", type=float, required=True)
    parser.add_argument("--epsilon", type=float, nargs="+", required=True)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--depth", type=int, default=110)
    parser.add_argument("--views", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=None, help="150 as in the paper")
    parser.add_argument("--fresh", action="store_true", help="no bank: fresh noise in every batch, for comparison")
    parser.add_argument("--suffix", default="", help="appended to the names of the files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", default="weights")
    options = parser.parse_args(arguments)
    data = cifar(options.dataset, options.data, "train")
    base = find_weights(options.weights)
    model = load_weights(CifarResNet(options.depth, len(data.class_names)), base).to(options.device)
    banks: dict[tuple[float, int], FeatureBank] = {}
    for kind in options.kinds:
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
                print(f"bank: {tuple(banks[key].features.shape)} in {banks[key].seconds:.1f} s", flush=True)
            name = head_name(base.stem, kind, epsilon) + options.suffix
            start = time.monotonic()
            card = train_conformal(
                model,
                data,
                request,
                Path(options.out) / f"{name}.safetensors",
                base=base.stem,
                bank=banks.get(key),
                device=options.device,
                say=lambda text: print(text, flush=True),
                progress=False,
            )
            print(
                json.dumps({"head": name, "seconds": card["seconds"], "own": round(time.monotonic() - start, 1)}),
                flush=True,
            )


if __name__ == "__main__":
    main()
