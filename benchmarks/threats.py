"""What certificates against other threats than L2 cost on CIFAR-10: train under each noise, evaluate, attack; rows into results/.

python -m benchmarks.threats --data DIR                      all cases
python -m benchmarks.threats --data DIR --case ablation      one of them
python -m benchmarks.threats --data DIR --case ablation bands random_bands uniform laplace --device cpu --bfloat16 \\
    --model wrn-10-2 --minutes 20 --batch-size 128 --points 3000 --images 100           small networks, without a GPU
python -m benchmarks.threats --data DIR --case uniform laplace --given cifar-resnet110=cifar10-resnet110-sigma0.5 --points 2000
                                                             a network trained under other noise: nothing is trained

A killed run goes on where it was: training from its checkpoint, and what is written is not computed again.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from keepcover.attacks import audit
from keepcover.data import Labelled, cifar
from keepcover.engine.smoother import Smoother
from keepcover.errors import KeepcoverWarning
from keepcover.evaluation import evaluate
from keepcover.evaluation.manifest import command_of, manifest, write_results
from keepcover.models import find_weights, load_weights, network
from keepcover.noise import Ablation, Bands, Gaussian, Laplace, Noise, RandomBands, Stream, Uniform
from keepcover.prediction.calibration import calibrate
from keepcover.training.base import train_base
from keepcover.training.recipe import Recipe, recommended

SHAPE, ALPHA, HOLDOUT, DRAWS = (3, 32, 32), 0.1, 500, (1, 4, 16, 64)


@dataclass(frozen=True)
class Case:
    """A noise, what it is asked to certify, how a network sees what is absent, and whose weights serve it: its own by default,
    another case's, or ``MODEL=WEIGHTS``.
    """

    noise: Noise
    norm: str
    epsilons: tuple[float, ...]
    seen: str = ""
    weights: str = ""


CASES = {
    "uniform": Case(Uniform(0.87), "l1", (0.5, 1.0)),
    "uniform_narrow": Case(Uniform(0.433), "l1", (0.5,)),
    "laplace": Case(Laplace(0.354), "l1", (0.5, 1.0)),
    "gaussian": Case(Gaussian(0.5), "l1", (0.5, 1.0)),
    "ablation": Case(Ablation(75), "l0", (1.0, 3.0, 5.0), "masked:"),
    "bands": Case(Bands(4), "patch", (2.0, 5.0), "band4:"),
    "random_bands": Case(RandomBands(4), "patch", (2.0, 5.0), weights="bands"),
    "linf": Case(Gaussian(0.25), "linf", (1 / 255,), weights="wrn-28-6=cifar10-wrn-28-6-sigma0.25"),
}


def weights_of(name: str, options: argparse.Namespace) -> tuple[str, Path]:
    """The network of a case and its weights: given, or trained here unless they are there."""
    case = CASES[name]
    model = case.seen + options.model
    if options.given or "=" in case.weights:
        given, _, weights = (options.given or case.weights).partition("=")
        return given, find_weights(weights)
    if case.weights:
        return weights_of(case.weights, options)
    path = Path(options.weights) / f"cifar10-{options.model}-{name}.safetensors"
    if not path.is_file():
        torch.manual_seed(options.seed)
        recipe = Recipe(
            0.0, noise=case.noise.spec, minutes=options.minutes, seed=options.seed, **recipe_for(case.noise, options)
        )
        train, test = (cifar("cifar10", options.data, part) for part in ("train", "test"))
        device: dict[str, Any] = {"device": options.device, "architecture": model}
        with bfloat16(options):
            train_base(network(model, 10), train, test, recipe, path, **device)
    return model, path


def bfloat16(options: argparse.Namespace) -> AbstractContextManager[Any]:
    """A CPU's bfloat16, twice as fast where it has such instructions; a GPU trains in it anyway."""
    asked = options.bfloat16 and options.device == "cpu"
    return torch.autocast("cpu", torch.bfloat16, enabled=asked, cache_enabled=False)


def recipe_for(noise: Noise, options: argparse.Namespace) -> dict[str, Any]:
    """As for its network; noise that hides most of an image needs no squares on top."""
    usual, size = {"batch_size": Recipe.batch_size, "lr": Recipe.lr, **recommended(options.model)}, options.batch_size
    asked = {"batch_size": size, "lr": usual["lr"] * size / usual["batch_size"]} if size else {}
    return {**usual, **asked, **({"cutout": 0} if noise.hides else {})}


def card_of(name: str, options: argparse.Namespace, smoother: Smoother, data: Labelled) -> dict[str, Any]:
    """What is to be said of a case's network: how good it is, and what it took to train, or the noise that it was trained under."""
    model, path = weights_of(name, options)
    card = json.loads(path.with_suffix(".json").read_text())
    if options.given or "=" in CASES[name].weights:
        guess = smoother.reduce(
            data.images, 1, Stream(options.seed, "holdout"), lambda _, logits: logits[:, 0].argmax(-1)
        )
        right = float((guess == data.labels).double().mean())
        told = {"architecture": model, "top1_accuracy_one_noisy_draw_test": round(right, 4)}
        return {
            "weights": path.name,
            "sha256": card["sha256"],
            "trained_under": card.get("recipe", {}).get("noise") or Gaussian(card["sigma"]).spec,
            **told,
        }
    keys = ("architecture", "top1_accuracy_one_noisy_draw_test", "seconds", "hardware")
    return {"weights": path.name, "epochs": card["recipe"]["epochs"], **{key: card[key] for key in keys}}


def smoother_of(name: str, options: argparse.Namespace) -> Smoother:
    model, weights = weights_of(name, options)
    cuda = options.device == "cuda"
    net = load_weights(network(model, 10), weights).eval().to(options.device)
    half = torch.bfloat16 if cuda or options.bfloat16 else None
    how: dict[str, Any] = {"autocast": half, "channels_last": cuda or options.bfloat16, "compile": cuda}
    return Smoother(net, CASES[name].noise, **how)


def evaluated(name: str, smoother: Smoother, data: Labelled, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Mean size and clean coverage of every method, over random splits of the same noisy outputs.

    Epsilon 0, where nothing is paid for an attack, tells what the network itself is worth.
    """
    case = CASES[name]
    count = case.noise.positions(SHAPE) if case.noise.deterministic else max(DRAWS)
    outputs = smoother.reduce(data.images, count, Stream(options.seed, "test"), lambda _, logits: logits)
    rows = []
    for epsilon in (0.0, *case.epsilons):
        shared: dict[str, Any] = {"noise": case.noise, "norm": case.norm, "epsilon": epsilon, "alpha": ALPHA}
        shared |= {"shape": SHAPE, "splits": options.splits, "holdout": options.holdout, "seed": options.seed}
        if case.noise.deterministic:
            rows += evaluate(outputs, data.labels, methods=["bands"], **shared)
            continue
        if not epsilon:
            rows += evaluate(outputs, data.labels, methods=["exact_asymmetric"], draws=max(DRAWS), **shared)
            continue
        rows += evaluate(outputs, data.labels, methods=["rcp1"], **shared)
        for draws in DRAWS:
            methods = ["exact", "exact_asymmetric", *(["bincp"] if draws > 4 else [])]
            rows += evaluate(outputs, data.labels, methods=methods, draws=draws, **shared)
    return [row.to_dict() for row in rows]


def attacked(name: str, smoother: Smoother, data: Labelled, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Clean and attacked coverage of the predictor that ``auto`` gives, with verdicts, at every epsilon."""
    case, found = CASES[name], []
    holdout, calibration, test = data.split(options.holdout, (len(data) - options.holdout) // 2, -1, seed=options.seed)
    test = test[: options.images]
    draws = {} if case.noise.deterministic else {"draws": 16, "calibration_draws": options.calibration_draws}
    for epsilon in case.epsilons:
        asked: dict[str, Any] = {
            "epsilon": epsilon,
            "norm": case.norm,
            "alpha": ALPHA,
            "seed": options.seed + 1,
            **draws,
        }
        predictor = calibrate(smoother, calibration.pair, holdout=holdout.pair, **asked)
        how: dict[str, Any] = {
            "steps": options.steps,
            "draws": options.draws,
            "clip": (0.0, 1.0),
            "seed": options.seed + 2,
        }
        report = audit({name: predictor}, test.pair, attacks=options.attacks, **how)
        print(report, flush=True)
        found += [row.__dict__ for row in report.rows]
    return found


KINDS = {"evaluated": evaluated, "attacked": attacked}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder with cifar-10-batches-bin")
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--kind", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--model", default="wrn-28-4")
    parser.add_argument("--given", help="MODEL=WEIGHTS for every case, trained under other noise: nothing is trained")
    parser.add_argument("--minutes", type=float, default=1.5, help="of training, per noise")
    parser.add_argument(
        "--batch-size", type=int, help="of training, with a rate in proportion; by the model by default"
    )
    parser.add_argument("--bfloat16", action="store_true", help="on a CPU too, to train and to run")
    parser.add_argument("--points", type=int, default=10_000, help="test images, to evaluate")
    parser.add_argument("--images", type=int, default=500, help="of them, to attack")
    parser.add_argument("--attacks", nargs="+", default=["softmax", "margin"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--draws", type=int, default=16, help="of the attacker")
    parser.add_argument("--calibration-draws", type=int, help="of what is attacked; 64 by default")
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--holdout", type=int, default=HOLDOUT)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--weights", default="out/threats", help="folder of what is trained")
    parser.add_argument("--out", default="results/threats")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore", KeepcoverWarning)  # of full sets: they are rows
    data = cifar("cifar10", options.data, "test")[: options.points]
    asked = {
        key: value
        for key, value in vars(options).items()
        if key not in ("data", "weights", "out", "case", "kind", "device")
    }
    for name in options.case:
        smoother = None
        for kind in options.kind:
            path = Path(options.out) / f"{name}-{kind}.json"
            if path.is_file():
                continue
            smoother = smoother or smoother_of(name, options)
            start = time.monotonic()
            rows = KINDS[kind](name, smoother, data, options)
            command = command_of("python -m benchmarks.threats", {**asked, "case": name, "kind": kind})
            config = {
                **asked,
                "case": name,
                "noise": str(CASES[name].noise),
                "network": card_of(name, options, smoother, data),
            }
            write_results(path, rows, manifest(command, config, time.monotonic() - start))
            print(f"{path}: {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
