"""Certified lists of labels on images that show several things: size and attacked risk, beside one-draw control.

python benchmarks/several_labels.py [--out results/multilabel-digits.json]
python benchmarks/several_labels.py --mosaics IMAGES.npz --logits LOGITS.safetensors --weights WEIGHTS.safetensors --out OUT.json

Two-digit images of 8 x 16 pixels hold up to two of scikit-learn's digits, each place empty with probability 0.15; the labels are
the digits that are there. Digits of the training images and of all others are disjoint; images are independent draws from their
pool. A small network is trained under the noise that it is certified with.

Mosaics of 64 x 64 pixels hold four of CIFAR-10's test images, every image in one mosaic at most. Nothing is trained: a network
for single images reads every quarter, and the logit of a label is its largest log-odds in any quarter. Noise is independent over
pixels, so the noisy outputs of a mosaic are those of its four images: LOGITS [images, 64, classes] holds those of the network
in WEIGHTS, under sigma 0.25.

An audit attacks every predictor's own margin on some images, or with --once that of the first predictor at each radius, and the
attacked versions are then judged in every split.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from keepcover import Multilabel, Predictor, Smoother, Stream, audit, calibrate, calibrate_outputs
from keepcover.data import digits
from keepcover.evaluation import Attacked, Entry, InMemory, evaluate_entries
from keepcover.evaluation.manifest import command_of, manifest, write_results
from keepcover.methods import get_method
from keepcover.specs import load_data, load_model

EMPTY = 0.15
ASKED = (("exact_asymmetric", 1), ("exact_asymmetric", 4), ("exact_asymmetric", 16), ("one_draw", 1))


class Subject(NamedTuple):
    """What is asked at one radius: a network under noise, its noisy outputs of all images, and a predictor of the first half of
    them; ``images`` are the last ones, which are attacked.
    """

    epsilon: float
    smoother: Smoother
    clean: InMemory
    images: Tensor
    predictor: Callable[..., Predictor]


def pairs(images: Tensor, labels: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Two random digits side by side, or fewer, and which digits they are."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(len(images), (count, 2), generator=generator)
    there = torch.rand(count, 2, generator=generator) >= EMPTY
    sides = images[rows] * there[:, :, None, None, None]
    truth = (nn.functional.one_hot(labels[rows], 10).bool() & there[..., None]).any(dim=1)
    return torch.cat([sides[:, 0], sides[:, 1]], dim=3), truth


def train(x: Tensor, truth: Tensor, sigma: float, epochs: int, seed: int) -> nn.Module:
    """Adam with a falling rate, fresh noise in every step."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 4 * 8, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip
    optimiser, size = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-3), 128
    plan = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, epochs * (len(x) // size))
    for _ in range(epochs):
        for rows in torch.randperm(len(x))[: len(x) // size * size].split(size):
            logits = model(x[rows] + sigma * torch.randn(size, 1, 8, 16))
            optimiser.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(logits, truth[rows].float()).backward()
            optimiser.step()
            plan.step()
    return model.eval()


def two_digits(options: argparse.Namespace) -> Iterator[Subject]:
    seed, half = options.seed, options.images // 2
    train_on, rest = digits().split(900, -1, seed=seed)
    seen = pairs(*train_on.pair, options.training, seed + 1)
    x, truth = pairs(*rest.pair, options.images, seed + 2)
    for epsilon in (0.25, 0.5):
        smoother = Smoother(train(*seen, epsilon, options.epochs, seed), epsilon, progress=False)

        def predictor(smoother: Smoother = smoother, **asked: Any) -> Predictor:
            return calibrate(smoother, (x[:half], truth[:half]), **asked)

        clean = InMemory(smoother.logits(x, 64, Stream(seed, "test")), truth, smoother.noise)
        yield Subject(epsilon, smoother, clean, x[-options.attacked :], predictor)


class Quarters(nn.Module):
    """A network for single images, on mosaics of 2 x 2 of them: the largest log-odds of every class in any quarter."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, mosaics: Tensor) -> Tensor:
        return somewhere(self.network(quarters(mosaics).flatten(0, 1)).unflatten(0, (len(mosaics), 4)))


def quarters(mosaics: Tensor) -> Tensor:
    """``[n, c, 2 h, 2 w]`` -> ``[n, 4, c, h, w]``, row by row; :func:`mosaic` puts them together again."""
    return torch.stack([part for row in mosaics.chunk(2, dim=2) for part in row.chunk(2, dim=3)], dim=1)


def mosaic(images: Tensor) -> Tensor:
    """``[n, 4, c, h, w]`` -> ``[n, c, 2 h, 2 w]``."""
    return torch.cat([torch.cat([images[:, i], images[:, i + 1]], dim=3) for i in (0, 2)], dim=2)


def somewhere(logits: Tensor) -> Tensor:
    """Logits of the quarters ``[n, 4, ..., K]`` -> those of labels ``[n, ..., K]``: the logarithm of p / (1 - p), where p, the
    probability of a class in a quarter, is largest.
    """
    others = logits[..., None, :].masked_fill(torch.eye(logits.shape[-1], dtype=torch.bool), -torch.inf)
    return (logits - others.logsumexp(dim=-1)).amax(dim=1)


def mosaics(options: argparse.Namespace) -> Iterator[Subject]:
    data, stored = load_data(options.mosaics), load_file(options.logits)["logits"]
    order = torch.randperm(len(stored), generator=torch.Generator().manual_seed(options.seed))
    rows = order[: 4 * options.images].view(options.images, 4)
    truth = nn.functional.one_hot(data.labels[rows], stored.shape[2]).amax(dim=1).bool()
    outputs = torch.cat([somewhere(stored[some].float()) for some in rows.split(100)])
    network = load_model("cifar-resnet110", options.weights).eval()
    smoother = Smoother(Quarters(network), 0.25, progress=False)
    # Files of one name hold different networks: a mean over 16 draws must be that of the 64, as far as chance allows.
    some, known = (
        Smoother(network, 0.25, progress=False).logits(data.images[:16], 16, Stream(0, "test")),
        stored[:16].float(),
    )
    if ((some.mean(dim=1) - known.mean(dim=1)).square() / (known.var(dim=1) * (1 / 16 + 1 / 64))).mean() > 4:
        raise SystemExit(f"{options.logits} does not hold noisy logits of {options.weights} under sigma 0.25")
    clean, half = InMemory(outputs, truth, smoother.noise), options.images // 2

    def predictor(**asked: Any) -> Predictor:
        return calibrate_outputs(outputs[:half], truth[:half], noise=smoother.noise, **asked).with_model(smoother)

    for epsilon in (0.125, 0.25):
        yield Subject(epsilon, smoother, clean, mosaic(data.images[rows[-options.attacked :]]), predictor)


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mosaics")
    parser.add_argument("--logits")
    parser.add_argument("--weights")
    parser.add_argument("--out", default="results/multilabel-digits.json")
    parser.add_argument("--images", type=int, default=2400)
    parser.add_argument("--attacked", type=int, default=300)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--draws", type=int, default=32)
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--holdout", type=int, default=300)
    parser.add_argument("--training", type=int, default=8000)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options, start = parser.parse_args(given), time.monotonic()
    seed, task, rows = options.seed, Multilabel(), []
    hit, truth = torch.arange(options.images)[-options.attacked :], torch.zeros(0)
    for epsilon, smoother, clean, images, predictor in (mosaics if options.mosaics else two_digits)(options):
        truth, crafted, attacks = clean.truth, None, ("margin",)
        for name, draws in ASKED:
            made = predictor(
                task=task, method=name, epsilon=epsilon, draws=draws, seed=seed, holdout=options.holdout // 2
            )
            found = audit(
                made, (images, truth[hit]), attacks=attacks, steps=options.steps, draws=options.draws, seed=seed, progress=False
            )  # fmt: skip
            if crafted is None or not options.once:
                moved = found.attacked[name, "margin", epsilon]
                crafted = InMemory(smoother.logits(moved, 64, Stream(seed + 1, "test")), truth[hit], smoother.noise)
                attacks = {"margin": lambda *_, moved=moved: moved} if options.once else attacks
            ((plain, hurt),) = evaluate_entries(
                clean, [Entry(get_method(name), epsilon, draws, alpha=0.1, task=task)], splits=options.splits, seed=seed,
                holdout=options.holdout, attacked=Attacked("margin", hit, crafted),
            )  # fmt: skip
            row: dict[str, Any] = plain.to_dict()
            row |= {"attacked_risk": hurt.to_dict()["risk"], "attacked_points": len(hit)}
            row |= {
                "audit": [
                    {key: getattr(one, key) for key in ("attack", "coverage", "p_value", "verdict")}
                    for one in found.rows
                ]
            }
            rows.append(row)
            risk = (
                f"risk {row['risk']['mean']:.3f}, attacked {row['attacked_risk']['mean']:.3f}, {found.rows[1].verdict}"
            )
            print(f"{epsilon:g} {name} {row['draws']}: size {plain.size} {risk}", flush=True)
    labels = truth.sum(dim=1).double()
    about = {"labels_per_image": float(labels.mean()), "images_without_labels": int((labels == 0).sum())}
    files = {name: Path(vars(options)[name] or "").name for name in ("mosaics", "logits", "weights")}
    config = {**vars(options), **{name: value for name, value in files.items() if value}}
    chosen = {name: value for name, value in config.items() if value != parser.get_default(name) or name == "seed"}
    command = command_of("python benchmarks/several_labels.py", chosen)
    write_results(Path(options.out), rows, manifest(command, {**config, **about}, time.monotonic() - start))


if __name__ == "__main__":
    main(sys.argv[1:])
