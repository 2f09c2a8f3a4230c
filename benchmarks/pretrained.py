"""An ordinary network under noise: what each kind of help is worth, in certified set size.

python benchmarks/pretrained.py [--data digits] [--data-dir FOLDER] [--epsilon 0.25] [--out results/pretrained-digits.json]

The network is trained the ordinary way, on part of the data and without noise. Then: alone; behind the bundled denoiser; behind a
denoiser trained on the same images without labels; fine-tuned under noise without labels; and with them. Each at sigma = 2
epsilon, where the paper works, and at the sigma that the holdout chooses from the grid of ``sigma="auto"``; what is tuned is
tuned at 2 epsilon for the first and at epsilon for the second. Sizes are means over random splits of points that trained
nothing; the holdout is fixed.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
if not __package__:
    sys.path[0] = str(ROOT)

import keepcover  # noqa: E402
from keepcover import Smoother, Stream, denoised  # noqa: E402
from keepcover.data import Labelled  # noqa: E402
from keepcover.evaluation import evaluate  # noqa: E402
from keepcover.evaluation.manifest import command_of, manifest, write_results  # noqa: E402
from keepcover.evaluation.random_splits import random_splits  # noqa: E402
from keepcover.methods import Exact, Holdout  # noqa: E402
from keepcover.models.denoiser import Denoiser, load_denoiser  # noqa: E402
from keepcover.noise import Gaussian  # noqa: E402
from keepcover.prediction.choosing import expected_size, sigma_grid  # noqa: E402
from keepcover.prediction.question import Question  # noqa: E402
from keepcover.specs import load_data  # noqa: E402
from keepcover.tasks import Classification  # noqa: E402
from keepcover.training import fit_under_noise  # noqa: E402
from keepcover.training.denoiser import DenoiserRecipe, train_denoiser  # noqa: E402

ALPHA, DRAWS = 0.1, 16


def ordinary(channels: int, classes: int, width: int) -> nn.Module:
    """Three convolutions with batch normalisation: what a first course trains."""

    def block(before: int, after: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]

    features = [*block(channels, width), *block(width, 2 * width), nn.MaxPool2d(2), *block(2 * width, 2 * width)]
    return nn.Sequential(*features, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(8 * width, classes))


def own_denoiser(images: Tensor, steps: int) -> Denoiser:
    """A small one that has seen these images, without labels."""
    start = Denoiser(images.shape[1], widths=(16, 32, 48, 64), blocks=(1, 2, 2, 1))
    pixels = 64 * images[0, 0].numel()
    recipe = DenoiserRecipe(steps=steps, crop=images.shape[-1], pixels=pixels, grey=0.0)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "own.safetensors"
        train_denoiser(images, recipe, out, start=start, compile=False, progress=False, say=lambda _: None)
        return load_denoiser(out)


def helps(train: Labelled, epochs: int, steps: int, width: int) -> dict[str, Callable[[float], nn.Module]]:
    """Every kind of help, as a function of the sigma that it is for."""
    torch.manual_seed(0)
    base = ordinary(train.images.shape[1], len(train.class_names), width)
    base = fit_under_noise(base, *train.pair, sigma=0.0, epochs=epochs, progress=False)
    own = own_denoiser(train.images, steps)

    def tuned(labels: Tensor | None) -> Callable[[float], nn.Module]:
        return lambda sigma: fit_under_noise(
            copy.deepcopy(base), train.images, labels, sigma=sigma, epochs=epochs, progress=False
        )

    return {
        "alone": lambda _: base,
        "bundled denoiser": lambda _: denoised(base),
        "denoiser trained on these images": lambda _: denoised(base, own),
        "fine-tuned without labels": tuned(None),
        "fine-tuned with labels": tuned(train.labels),
    }


def rows_of(
    name: str, make: Callable[[float], nn.Module], rest: Labelled, epsilon: float, splits: int, holdout: int
) -> list[dict[str, Any]]:
    """Two rows: sigma = 2 epsilon, and the sigma that the holdout chooses."""
    split = next(random_splits(len(rest), 1, holdout, seed=0))
    held, n = split.holdout, len(split.calibration)

    def outputs(model: nn.Module, sigma: float) -> Tensor:
        return Smoother(model, sigma, progress=False).logits(rest.images, DRAWS, Stream(0, "calibration"))

    def size(logits: Tensor, sigma: float) -> float:
        task = Classification().seen(logits)
        question = Question(task, Exact(), ((ALPHA, epsilon),), draws=DRAWS)
        return expected_size(Holdout(task, logits[held], rest.labels[held]), question, Gaussian(sigma), n, None)

    found = []
    for way, tuned_at, grid in (("2 epsilon", 2 * epsilon, [2 * epsilon]), ("chosen", epsilon, sigma_grid([epsilon]))):
        model = make(tuned_at)
        computed = {sigma: outputs(model, sigma) for sigma in grid}
        sigma = min(grid, key=lambda one: size(computed[one], one))
        logits = computed[sigma]
        (row,) = evaluate(
            logits,
            rest.labels,
            epsilon=epsilon,
            sigma=sigma,
            alpha=ALPHA,
            methods=["exact"],
            splits=splits,
            holdout=holdout,
        )
        accuracy = float((logits.argmax(dim=-1) == rest.labels[:, None]).double().mean())
        found.append({"help": name, "way": way, "accuracy": accuracy, **row.to_dict()})
        print(
            f"{name:<34}{way:<11}sigma {sigma:<8g}accuracy {accuracy:.3f}  size {row.size}  coverage {row.coverage}",
            flush=True,
        )
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--data-dir")
    parser.add_argument("--epsilon", type=float, default=0.25)
    parser.add_argument("--train", type=int, default=800, help="images that train")
    parser.add_argument("--points", type=int, help="of the others, how many are used")
    parser.add_argument("--holdout", type=int, default=150)
    parser.add_argument("--splits", type=int, default=50)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--denoiser-steps", type=int, default=1500)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    start = time.monotonic()
    data = load_data(options.data, options.data_dir)
    train, rest = data.split(options.train, options.points or -1)
    kinds = helps(train, options.epochs, options.denoiser_steps, options.width)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", keepcover.KeepcoverWarning)  # of sigmas that a denoiser has not seen
        rows = [
            row
            for name, make in kinds.items()
            for row in rows_of(name, make, rest, options.epsilon, options.splits, options.holdout)
        ]
    given = {name: value for name, value in vars(options).items() if name not in ("data_dir", "out")}
    about = manifest(command_of("python benchmarks/pretrained.py", given), given, time.monotonic() - start)
    about["data"] = {"name": data.name, "fingerprint": data.fingerprint}
    with torch.inference_mode():
        clean = (kinds["alone"](0.0)(rest.images).argmax(dim=1) == rest.labels).double().mean()
    about["clean_accuracy"] = float(clean)
    if options.out is not None:
        write_results(options.out, rows, about)


if __name__ == "__main__":
    main()
