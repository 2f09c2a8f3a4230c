"""Train a CIFAR ResNet under noise from the official binary files.

python -m keepcover.paper.train_cifar --dataset cifar10 --data DIR --sigma 0.25 --out weights/NAME.safetensors
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

import torch

from keepcover.data import cifar
from keepcover.models import CifarResNet
from keepcover.training.base import Recipe, train_base


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", choices=["cifar10", "cifar100"], default="cifar10")
    parser.add_argument("--data", required=True, help="folder of the official binary files")
    parser.add_argument("--sigma", type=float, required=True)
    parser.add_argument("--depth", type=int, default=110)
    parser.add_argument("--epochs", type=int, default=None, help="80 for CIFAR-10, 90 for CIFAR-100")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", required=True)
    options = parser.parse_args(arguments)
    train, test = (cifar(options.dataset, options.data, part) for part in ("train", "test"))
    torch.manual_seed(options.seed)
    model = CifarResNet(options.depth, len(train.class_names))
    recipe = Recipe(
        options.sigma, epochs=options.epochs or (80 if options.dataset == "cifar10" else 90), seed=options.seed
    )
    architecture = f"cifar-resnet{options.depth}"
    card = train_base(model, train, test, recipe, options.out, architecture=architecture, device=options.device)
    print(json.dumps(card, indent=1))


if __name__ == "__main__":
    main()
