"""Certified masks on CamVid: pedestrians, cyclists and cars that stay in their masks under attack.

python benchmarks/camvid.py --data camvid-240x180.tar --classes classes.txt [--out results/segmentation-camvid.json]

The archive has 701 frames of four drives (Brostow, Fauqueur, Cipolla 2009) with 11 classes and the index 11 for pixels without a
label. Frames are shrunk to 120 x 90 pixels, for a CPU, and dealt out at random: 301 train a network for every sigma, the others
choose, calibrate and test. With next to no noise the network is an ordinary one, and promises for clean scenes alone. Frames of one
drive resemble each other, so the promise is for frames of such drives. A promise on a class is made for scenes that have it: those
without any would count as perfect. The attack climbs what the predictor's own rule compares. A killed run goes on where it was:
training from its checkpoint, and parts that are written are not computed again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from keepcover import KeepcoverWarning, Noise, Predictor, Segmentation, Smoother, Stream, audit, calibrate_outputs
from keepcover.attacks.pgd import Margin, NoisyModel, pgd
from keepcover.data import Labelled, scenes
from keepcover.evaluation import Attacked, Entry, Row, evaluate_entries
from keepcover.evaluation.manifest import command_of, manifest, write_results
from keepcover.evaluation.random_splits import random_splits
from keepcover.files import write_file
from keepcover.methods import get_method
from keepcover.models import UNet, load_weights
from keepcover.pages.plots import png, scenes_figure, shaded
from keepcover.prediction.source import Piece, Source
from keepcover.training.base import train_base
from keepcover.training.losses import CrossEntropy, rarity
from keepcover.training.recipe import Recipe

IGNORE = 11  # CamVid's index of pixels without a label
CHOSEN = ("pedestrian", "bicyclist", "car")
TWO = Segmentation(of=("it",), ignore=IGNORE, class_names=("it", "any other"))
EPSILONS, DRAWS, ALPHA = (0.125, 0.25), (1, 4, 16), 0.1


def trained(sigma: float, train: Labelled, rest: Labelled, options: argparse.Namespace) -> tuple[nn.Module, Any]:
    """A UNet under noise, from its file where there is one, and its card."""
    out = Path(options.weights) / f"camvid-unet-{options.width}-sigma{sigma:g}.safetensors"
    torch.manual_seed(options.seed)
    model = UNet(len(train.class_names), options.width)
    if not out.is_file():
        loss = CrossEntropy(IGNORE, rarity(train.labels, len(train.class_names)))
        recipe = Recipe(
            sigma,
            epochs=options.epochs,
            batch_size=14,
            lr=3e-3,
            weight_decay=1e-2,
            pad=8,
            average=0.05,
            optimiser="adamw",
            clip=1.0,
            seed=options.seed,
        )
        train_base(model, train, rest[:64], recipe, out, architecture=f"unet-{options.width}", loss=loss)
    return load_weights(model, out).eval(), json.loads(out.with_suffix(".json").read_text())


class Kept(Source):
    """Noisy outputs of scenes, or of some of them, as half-precision numbers in a file: the network runs once for all questions.

    With a label the classes are two: this one, with its log-odds as they were, and any other. Masks of it are the same, in a fifth of
    the time.
    """

    def __init__(
        self, outputs: np.ndarray, truth: Tensor, noise: Noise, index: Tensor | None = None, label: int | None = None
    ) -> None:
        self.outputs, self.truth, self.noise, self.label = outputs, truth, noise, label
        self.index = torch.arange(len(truth)) if index is None else index
        self.points, self.draws = len(self.index), outputs.shape[1]

    def read(self, rows: Tensor) -> Iterator[Piece]:
        for some in rows.split(4):
            own = self.index[some]
            logits, truth = torch.from_numpy(self.outputs[own.numpy()]).float(), self.truth[own]
            if self.label is not None:
                others = torch.arange(logits.shape[2]) != self.label
                logits = torch.stack([logits[:, :, self.label], logits[:, :, others].logsumexp(dim=2)], dim=2)
                truth = torch.where(truth == IGNORE, IGNORE, (truth != self.label).long())
            yield Piece(some, logits, truth)

    def having(self, label: int | None) -> Kept:
        """The scenes in which a class is seen; all of them for None."""
        if label is None:
            return self
        seen = (self.truth == label).flatten(1).any(dim=1).nonzero()[:, 0]
        return Kept(self.outputs, self.truth, self.noise, seen)

    def against_others(self, label: int) -> Kept:
        return Kept(self.outputs, self.truth, self.noise, self.index, label)


def noisy_outputs(
    path: Path, smoother: Smoother, images: Tensor, draws: int, stream: Stream
) -> tuple[np.memmap[Any, Any], float]:
    """[n, draws, classes, height, width] in a file, which a killed run fills further, and the seconds that it took."""
    progress = path.with_suffix(".json")
    shape = (len(images), draws, smoother.logits(images[:1], 1, stream).shape[2], *images.shape[2:])
    done, seconds = json.loads(progress.read_text()) if progress.is_file() else (0, 0.0)
    found = np.lib.format.open_memmap(path, "r+" if done else "w+", np.float16, shape)
    for at in range(done, len(images), 10):
        start, part = time.monotonic(), images[at : at + 10]
        ids = torch.arange(at, at + len(part))
        found[at : at + 10] = smoother.logits(part, draws, stream, ids=ids).half().numpy()
        found.flush()
        seconds += time.monotonic() - start
        write_file(progress, json.dumps([at + len(part), seconds]).encode())
        print(f"{path.name}: {at + len(part)} of {len(images)}", flush=True)
    return found, seconds


def task_of(name: str | None, data: Labelled) -> Segmentation:
    return Segmentation(of=() if name is None else (name,), ignore=IGNORE, class_names=data.class_names)


def certifiable(noise: Noise) -> list[float]:
    """The radii that a network under this noise is asked for: up to its sigma."""
    return [epsilon for epsilon in EPSILONS if epsilon <= noise.sigma]  # type: ignore[attr-defined]


def entries(task: Segmentation, epsilons: Sequence[float]) -> list[Entry]:
    """Certified masks, beside one-draw control and beside what promises for clean scenes alone."""
    asked = [("one_draw", 1), *(("exact_asymmetric", draws) for draws in DRAWS)]
    listed = [Entry(get_method(name), e, draws, alpha=ALPHA, task=task) for e in epsilons for name, draws in asked]
    return [*listed, Entry(get_method("one_draw"), 0.0, 1, alpha=ALPHA, task=task)]


def attack(
    smoother: Smoother, predictor: Predictor, data: Labelled, path: Path, epsilon: float, options: argparse.Namespace
) -> Tensor:
    """Scenes moved by up to epsilon so that the predictor's own rule misses more; from their file where there is one."""
    if not path.is_file():
        stream = Stream(options.seed + 1, "attack")
        noisy = NoisyModel(smoother.model, smoother.noise, options.attack_draws, stream)
        how: dict[str, Any] = {"loss": Margin(predictor, stream), "steps": options.steps, "clip": (0.0, 1.0)}
        np.save(path, pgd(noisy, *data.pair, epsilon, **how).numpy())
    return torch.from_numpy(np.load(path))


def judged(
    smoother: Smoother, rest: Labelled, outputs: np.ndarray, name: str | None, where: Path, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Mean size of masks, and recall of clean and of attacked scenes, over random splits."""
    label = None if name is None else rest.class_names.index(name)
    source, task = Kept(outputs, rest.labels, smoother.noise).having(label), task_of(name, rest)
    shared: dict[str, Any] = {"splits": options.splits, "holdout": options.holdout, "seed": options.seed}
    true = 1.0 if label is None else float((rest.labels[source.index] == label).double().mean())
    about = {"of": name or "every label", "scenes": source.points, "true": true}
    certified = certifiable(smoother.noise)
    if name is None or label is None:
        return [{**about, **rows[0].to_dict()} for rows in evaluate_entries(source, entries(task, certified), **shared)]
    # Attacked are some of those that no split holds out, by an attacker who knows a predictor that was calibrated on the others.
    order = next(random_splits(source.points, 1, options.holdout, options.seed))
    hit = torch.cat([order.calibration, order.test]).sort().values[-options.images :]
    others = torch.ones(source.points, dtype=torch.bool)
    others[hit] = False
    known = Kept(outputs, rest.labels, smoother.noise, source.index[others])
    asked = {"task": task, "alpha": ALPHA, "holdout": options.holdout, "seed": options.seed}
    method = {"method": "exact_asymmetric", "draws": 4} if certified else {"method": "one_draw", "draws": 1}
    predictor = calibrate_outputs(known, epsilon=certified or 0.0, **method, **asked).with_model(smoother)
    found, test = [], rest[source.index[hit]]
    for epsilon in certified or EPSILONS:
        own = predictor.at(ALPHA, epsilon) if certified else predictor
        moved = attack(smoother, own, test, Path(f"{where}-{name}-epsilon{epsilon:g}.npy"), epsilon, options)
        how: dict[str, Any] = {"attacks": {"margin": lambda *_, moved=moved: moved}, "radii": [epsilon]}
        report = audit({"": own}, test.pair, seed=options.seed + 2, **how)
        print(name, report, sep="\n", flush=True)
        verdict = report.rows[1]
        listed = entries(TWO, [epsilon] if certified else [])

        def seen(images: Tensor, kind: str, listed: list[Entry] = listed) -> list[list[Row]]:
            """Clean rows, and those of these scenes alone under fresh noise, attacked or not."""
            again = smoother.logits(images, source.draws, Stream(options.seed + 3, "test")).half().numpy()
            some = Attacked(kind, hit, Kept(again, test.labels, smoother.noise).against_others(label))
            return evaluate_entries(source.against_others(label), listed, attacked=some, **shared)

        for (clean, before), (_, after) in zip(seen(test.images, "unmoved"), seen(moved, "margin"), strict=True):
            row = {**about, "at": epsilon, **clean.to_dict(), "attacked_scenes": len(hit)}
            row |= {"coverage_before": vars(before.coverage), "attacked_coverage": vars(after.coverage)}
            row |= {"attacked_size": vars(after.size)}
            if all(
                getattr(clean.guarantee, key) == getattr(own.guarantee, key) for key in ("method", "draws", "epsilon")
            ):
                row["audit"] = {"coverage": verdict.coverage, "p_value": verdict.p_value, "verdict": verdict.verdict}
            found.append(row)
    return found


def telling(rest: Labelled, count: int = 3) -> Tensor:
    """Scenes with something of every chosen class, no two of them alike."""
    shares = [(rest.labels == rest.class_names.index(name)).flatten(1).double().mean(dim=1) for name in CHOSEN]
    chosen: list[int] = []
    for i in torch.stack(shares).log().sum(dim=0).argsort(descending=True).tolist():
        if all(float((rest.images[i] - rest.images[j]).abs().mean()) > 0.12 for j in chosen):
            chosen.append(i)
        if len(chosen) == count:
            break
    return torch.tensor(chosen)


def picture(
    smoother: Smoother, rest: Labelled, outputs: np.ndarray, options: argparse.Namespace, epsilon: float = 0.25
) -> bytes:
    """Masks of a few scenes that had no part in their calibration."""
    shown = telling(rest)
    names = ["scene", *(f"{name}, ε = {epsilon:g}" for name in CHOSEN)]
    rows: list[list[tuple[Tensor, Tensor | None]]] = [[(rest.images[i], None)] for i in shown.tolist()]
    for name in CHOSEN:
        label = rest.class_names.index(name)
        known = Kept(outputs, rest.labels, smoother.noise).having(label)
        others = Kept(outputs, rest.labels, smoother.noise, known.index[~torch.isin(known.index, shown)])
        asked: dict[str, Any] = {"task": task_of(name, rest), "alpha": ALPHA, "holdout": options.holdout}
        asked |= {"method": "exact_asymmetric", "draws": max(DRAWS), "seed": options.seed}
        predictor = calibrate_outputs(others, epsilon=epsilon, **asked)
        sets = predictor.predict_outputs(torch.from_numpy(outputs[shown.numpy()]).float(), seed=options.seed)
        for at, row in enumerate(rows):
            painted = shaded(rest.images[shown[at]], sets.certain(name)[at], sets.kept(name)[at])
            row.append((painted, rest.labels[shown[at]] == label))
    return png(scenes_figure(rows, names), dpi=90)


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--classes", required=True, help="file of the names of classes")
    parser.add_argument("--weights", default="out/camvid", help="folder of weights, noisy outputs and finished parts")
    parser.add_argument("--out", default="results/segmentation-camvid.json")
    parser.add_argument("--figure", help="a PNG of some scenes with their masks")
    parser.add_argument("--size", type=int, nargs=2, default=[120, 90], help="width and height of scenes")
    parser.add_argument("--width", type=int, default=16, help="of the UNet")
    parser.add_argument("--epochs", type=int, default=70)
    parser.add_argument("--sigma", type=float, nargs="+", default=[0.25, 0.125, 0.001])
    parser.add_argument("--training", type=int, default=301, help="scenes")
    parser.add_argument("--holdout", type=int, default=50, help="scenes")
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--calibration-draws", type=int, default=32)
    parser.add_argument("--images", type=int, default=24, help="scenes to attack")
    parser.add_argument("--steps", type=int, default=10, help="of the attack")
    parser.add_argument("--attack-draws", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options, start = parser.parse_args(given), time.monotonic()
    warnings.simplefilter("ignore", KeepcoverWarning)  # of large sets: they are rows
    data = scenes(options.data, classes=options.classes, ignore=IGNORE, size=tuple(options.size), progress=False)
    train, rest = data.split(options.training, -1, seed=options.seed)
    asked = {
        name: value
        for name, value in vars(options).items()
        if name not in ("data", "classes", "weights", "out", "figure")
    }
    rows, cards, seconds, parameters = [], [], time.monotonic() - start, 0
    for sigma in options.sigma:
        model, card = trained(sigma, train, rest, options)
        smoother = Smoother(model, sigma, channels_last=True, progress=False)
        where, stream = Path(options.weights) / f"camvid-sigma{sigma:g}", Stream(options.seed, "test")
        draws = options.calibration_draws if certifiable(smoother.noise) else 1
        outputs, took = noisy_outputs(Path(f"{where}.npy"), smoother, rest.images, draws, stream)
        seconds, own = seconds + took, {**asked, "sigma": sigma}
        cards, parameters = [*cards, card], sum(parameter.numel() for parameter in model.parameters())
        for name in (*CHOSEN, None):
            path, start = Path(f"{where}-{name or 'every'}.json"), time.monotonic()
            if not path.is_file():
                found = judged(smoother, rest, outputs, name, where, options)
                write_results(path, found, {"config": own, "seconds": time.monotonic() - start})
            part = json.loads(path.read_text())
            if part["manifest"]["config"] != own:
                raise SystemExit(f"{path} was computed with other options; remove it")
            rows, seconds = [*rows, *part["rows"]], seconds + part["manifest"]["seconds"]
        if options.figure and sigma == max(options.sigma):
            write_file(Path(options.figure), picture(smoother, rest, outputs, options))
    files = {"data": Path(options.data).name, "classes": Path(options.classes).name}
    config = {**asked, "scenes": len(data), "class_names": data.class_names, "parameters": parameters, "cards": cards}
    command = command_of("python benchmarks/camvid.py", {**files, **asked})
    write_results(Path(options.out), rows, manifest(command, config, seconds))


if __name__ == "__main__":
    main(sys.argv[1:])
