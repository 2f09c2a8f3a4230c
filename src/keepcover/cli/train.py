"""Training: base models under noise, and conformal training of their last layer or of all of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from keepcover.cli import console as ui
from keepcover.cli import options as opt
from keepcover.data import Labelled
from keepcover.engine.smoother import checked_device
from keepcover.errors import InputError
from keepcover.models import find_weights, is_named, load_weights
from keepcover.models.denoiser import load_denoiser
from keepcover.specs import has_labels, load_model, load_parts, parts_by
from keepcover.training.base import train_base
from keepcover.training.denoiser import DenoiserRecipe, read_images, train_denoiser
from keepcover.training.heads import PRESETS, ConformalRequest, train_conformal
from keepcover.training.recipe import Recipe, recommended

train = typer.Typer(help="Train base models under noise, or last layers for small sets.", no_args_is_help=True)
ui.app.add_typer(train, name="train")

Sigma = Annotated[float, "Standard deviation of the Gaussian noise, in the units of the inputs."]
Out = Annotated[Path, "--out", "Where weights go (.safetensors); a card is written beside them."]


@dataclass(frozen=True)
class Machine:
    """Where training runs.

    Args:
        resume: Go on from the checkpoint of a run that was stopped.
        device: cpu or cuda.
    """

    resume: Annotated[bool, "--resume/--restart"] = True
    device: Annotated[str, checked_device] = "cpu"
    seed: opt.Seed = 0

    @property
    def where(self) -> dict[str, Any]:
        """What every training takes."""
        return {"device": self.device, "resume": self.resume, "say": ui.err.print}


@dataclass(frozen=True)
class Run(Machine, opt.Data):
    """What every kind of training needs: a network, data, where the weights go.

    Args:
        data: As for `keepcover calibrate`, or A+B for both as one; official training data where there are such.
        part: k/m: train on the k-th of m random disjoint parts, where there is no official training part; 1/2 by
            default, which leaves 3/4 and 4/4 for calibration and for judging.
        model: `small-cnn`, `cifar-resnet20/56/110`, `wrn-D-W`, `resnet50`, or `package.module:function`.
        weights: Weights to start from, or below a new head: a file, or the name of committed ones. Where the number of
            classes is another one, `base` starts the last layer afresh.
        pad: Pixels of random shift; an eighth of the image by default.
        flip: Mirror images at random; by default for photographs only.
    """

    data: str = "digits"
    part: str | None = None
    model: str = "small-cnn"
    weights: str | None = None
    pad: int | None = None
    flip: bool | None = None

    def parts(self) -> tuple[Labelled, Labelled]:
        """Training and test data."""
        return load_parts(self.data, self.data_dir, self.part, self.seed)

    def augmentation(self, data: Labelled) -> dict[str, Any]:
        """Shifts of an eighth; mirrors for photographs, not for digits."""
        usual = {"pad": data.images.shape[2] // 8, "flip": data.images.shape[1] == 3}
        return usual | opt.given({"pad": self.pad, "flip": self.flip})

    def network(self, classes: int, new_head: bool = False) -> torch.nn.Module:
        """The module to train, with its weights."""
        if new_head and self.weights and is_named(self.model):
            return load_weights(_module(self.model, None, classes), self.weights, new_head=True)
        return _module(self.model, self.weights, classes)


def _module(model: str, weights: str | None, classes: int, fresh: bool = True) -> torch.nn.Module:
    """A network to train or to imitate; a plain function has nothing to change."""
    network = load_model(model, weights, classes, fresh=fresh)
    if not isinstance(network, torch.nn.Module):
        raise InputError(f"training needs a torch module; {model} gave {type(network).__name__}")
    return network


@dataclass(frozen=True)
class Schedule:
    """What a recipe may say otherwise; by the model where it is not said.

    Args:
        epochs: Passes over the data; 80 by default.
        minutes: Time for the whole run, in place of epochs: their number is measured and recorded.
        batch_size: Images per step; by the model by default.
        optimiser: `sgd`, `adamw` or `muon`, each with a rate of its own; by the model by default.
        lr: Highest learning rate: linear warm-up, then cosine.
        weight_decay: By the model by default.
        copies: Noises per image in a step.
        cutout: Side of the grey square in every image, in pixels.
        cutmix: Share of images with a rectangle from another image.
        average: Share of the run over which weights are averaged; 0 keeps the last ones.
    """

    epochs: int | None = None
    minutes: float | None = None
    batch_size: int | None = None
    optimiser: str | None = None
    lr: float | None = None
    weight_decay: float | None = None
    copies: int | None = None
    cutout: int | None = None
    cutmix: float | None = None
    average: float | None = None


@partial(opt.command, to=train)
def base(
    out_path: Out,
    noise: opt.Added,
    run: Run,
    schedule: Schedule,
    *,
    teacher: list[str] | None = None,
    labels: bool = True,
    classes: int | None = None,
    compile: bool | None = None,
    bits: int = 16,
    checkpoint_seconds: float = 30.0,
) -> ui.Answer:
    """Train a classifier under noise, or fine-tune one from its own weights.

    An ordinary classifier collapses under noise, and its certified sets with it. Stop it at any moment: the same command
    goes on where it was.

    Args:
        teacher: MODEL=WEIGHTS of a network to imitate under noise; several are averaged.
        labels: Without: a trained network learns to say under noise what it says of the same images now. Data need no
            labels: a folder of images, or a file of `images` alone.
        classes: Of a built-in network, where data have no labels.
        compile: Compile the network; by default for wide networks on a GPU.
        bits: Of a stored weight: 16, or 8 for half the size.
        checkpoint_seconds: Renew the checkpoint at the end of an epoch that finds it this old.
    """
    law, known = noise.required(), has_labels(run.data)
    if not labels and is_named(run.model) and not (run.weights and (known or classes)):
        raise InputError(f"without labels a trained network is needed: give --weights and --classes of {run.model}")
    if labels or known:
        training, test = run.parts()
        torch.manual_seed(run.seed)
        network = run.network(len(training.class_names), new_head=labels)
    else:
        network = run.network(classes or 0).to(run.device)
        training, test = parts_by(network, run.data, run.part, run.seed)
    teachers = {}
    for text in teacher or []:
        model, _, weights = text.partition("=")
        name = f"{model}={find_weights(weights).stem}" if weights else model
        teachers[name] = _module(model, weights or None, len(training.class_names), fresh=False)
    how = {**recommended(run.model, schedule.optimiser), **run.augmentation(training), **opt.given(vars(schedule))}
    card = train_base(
        network,
        training,
        test,
        Recipe(noise.sigma or 0.0, noise=noise.noise, seed=run.seed, **how),
        out_path,
        architecture=run.model,
        start=find_weights(run.weights).stem if run.weights else None,
        teachers=teachers,
        labels=labels,
        compile=compile,
        bits=bits,
        checkpoint_seconds=checkpoint_seconds,
        **run.where,
    )
    accuracy = f"noisy accuracy {card['top1_accuracy_one_noisy_draw_test']:.4f}"
    return _trained(card, f"{accuracy} under {law} on {len(test)} images of {test.name},", "weights", out_path)


def _trained(card: dict[str, Any], said: str, what: str, path: Path) -> ui.Answer:
    """What a training run says at its end."""
    spent = f"{said} {card['seconds']:.0f} s on {card['hardware']}"
    return ui.Answer(card, [spent, f"{what:<9} {path}", f"card      {path.with_suffix('.json')}"])


@partial(opt.command, to=train)
def denoiser(
    data: list[str],
    out_path: Out,
    *,
    minutes: float | None = None,
    steps: int | None = None,
    smallest: float = 0.05,
    largest: float = 1.0,
    size: int = 160,
    channels: int | None = None,
    crop: int = 128,
    pixels: int = 2**20,
    lr: float = 5e-4,
    start: str | None = None,
    towards: str | None = None,
    weights: str | None = None,
    classes: int = 1000,
    stability: float = 0.1,
    machine: Machine,
) -> ui.Answer:
    """Train a denoiser on unlabelled images, for `--model denoised@FILE:MODEL`.

    The one in the package is for photographs; images of another kind (medical, satellite, digits) want their own. With
    `--towards` it learns besides to leave what one classifier says about clean images as it is.

    Args:
        data: Images of your kind, without labels: a folder with files at any depth, or a pattern such as
            `photos/*.webp`; several may be given. `FOLDER@64` cuts every file into tiles of 64 x 64.
        minutes: Time for the run; 10 by default.
        steps: Steps in place of minutes: a run that can be repeated.
        smallest: Smallest sigma it learns.
        largest: Largest sigma it learns.
        size: Larger images are scaled to this, and cropped to a square.
        channels: Of the classifier's inputs, 1 or 3; by default 1 where every image is grey, and else 3.
        crop: Side of the largest crops in a step.
        pixels: Pixels in a step.
        lr: Highest learning rate: linear warm-up, then cosine.
        start: Go on from a denoiser: a file, or `bundled` for the one of the package.
        towards: A classifier, as for `--model`, whose clean outputs it learns to keep: no labels are needed.
        weights: Weights of that classifier.
        classes: Number of its classes.
        stability: Weight of its outputs beside the squared error.
    """
    minutes = 10.0 if minutes is None and steps is None else minutes
    recipe = DenoiserRecipe(
        (smallest, largest), minutes, steps, crop, pixels, lr, stability=stability, seed=machine.seed
    )
    card = train_denoiser(
        read_images(data, size, channels),
        recipe,
        out_path,
        name=", ".join(Path(spec).name for spec in data),
        start=load_denoiser() if start == "bundled" else start,
        classifier=None if towards is None else _module(towards, weights, classes, fresh=False),
        towards=towards or "",
        **machine.where,
    )
    held = ", ".join(f"{db} dB at sigma {sigma}" for sigma, db in card["psnr_held_out"].items())
    return _trained(card, f"held-out images {held}; {card['steps']} steps,", "denoiser", out_path)


@dataclass(frozen=True)
class Head:
    """How a network is trained for small sets.

    Args:
        preset: `cifar10` or `cifar100`: whose hyper-parameters; by the data by default.
        epochs: Passes over the data; the preset's by default.
        batch_size: Images per step; the preset's by default.
        lr: First learning rate; the preset's by default.
        keep_head: Go on from the last layer there is instead of a fresh one.
        views: Random crops and flips of every image in the feature bank.
        validation: Training images set aside to log set sizes on.
        whole: Train the whole network under fresh noise.
        fresh: Train the last layer without a bank: much slower.
    """

    alpha: opt.Alpha = 0.1
    preset: str | None = None
    epochs: int | None = None
    batch_size: int | None = None
    lr: float | None = None
    keep_head: bool = False
    views: int = 4
    validation: int = 1000
    whole: bool = False
    fresh: Annotated[bool, "--fresh-noise"] = False


@partial(opt.command, to=train)
def rct(sigma: Sigma, epsilon: opt.Epsilon, out_path: Out, run: Run, head: Head) -> ui.Answer:
    """Robust conformal training: a last layer trained for small sets of RSCP under attack (the paper, Section 4.2).

    The backbone is frozen, its features of noisy images are computed once, and every epoch is served from that bank.
    """
    return _conformal("rct", sigma, epsilon, out_path, run, head)


@partial(opt.command, to=train)
def conftr(sigma: Sigma, epsilon: opt.Epsilon, out_path: Out, run: Run, head: Head) -> ui.Answer:
    """Conformal training (Stutz et al. 2022): a last layer for small sets of vanilla conformal prediction.

    No noise and no attack: the paper's comparison, and the reason for RCT.
    """
    return _conformal("conftr", sigma, epsilon, out_path, run, head)


@partial(opt.command, to=train)
def exact(sigma: Sigma, epsilon: opt.Epsilon, out_path: Out, run: Run, head: Head) -> ui.Answer:
    """Conformal training matched to the exact certificate: its order statistic and its level in place of RSCP's.

    Beyond the paper. The rule is the one that the base model's own scores call for.
    """
    return _conformal("exact", sigma, epsilon, out_path, run, head)


def _conformal(kind: str, sigma: float, epsilon: float, out_path: Path, run: Run, head: Head) -> ui.Answer:
    if is_named(run.model):
        if run.weights is None:
            raise InputError(f"a last layer is trained over a trained {run.model}: give its --weights")
        if find_weights(run.weights).resolve() == out_path.resolve():
            raise InputError(f"--out would replace the base weights {run.weights}; give another name")
    training, _ = run.parts()
    preset = head.preset or (training.name if training.name in PRESETS else "cifar10")
    how: dict[str, Any] = {"views": head.views, "validation": min(head.validation, len(training) // 10)}
    how |= {"whole": head.whole, "fresh": head.fresh, **run.augmentation(training)}
    request = ConformalRequest(kind, sigma, epsilon, head.alpha, preset, **how)
    said = {"epochs": head.epochs, "batch_size": head.batch_size, "lr": head.lr}
    recipe = replace(request.settings, seed=run.seed, reset=not head.keep_head, **opt.given(said))
    card = train_conformal(
        run.network(len(training.class_names)),
        training,
        replace(request, recipe=recipe),
        out_path,
        base=find_weights(run.weights).stem if run.weights else run.model,
        **run.where,
    )
    last = card["history"][-1]
    sized = f"set size {last['hard_size']:.3f} (soft {last['soft_size']:.3f}) on validation images,"
    return _trained(card, sized, card["trains"], out_path)
