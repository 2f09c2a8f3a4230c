"""Noise training of base models: the recipe behind every CIFAR result here, with the data resident on the device.

SGD with momentum, linear warm-up then cosine, crops and flips and Gaussian noise made on the device, bfloat16. On CUDA the
whole step is one graph: a ResNet-110 has hundreds of small kernels per step, and launching them costs more than running them.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as deserialize
from torch import Tensor, nn

from keepcover.data import Labelled
from keepcover.engine.inputs import extremes
from keepcover.engine.progress import Bar, Report
from keepcover.errors import InputError
from keepcover.files import check_folder, write_file
from keepcover.models.checkpoints import weights_bytes
from keepcover.training.optimise import Replayed, Sgd, copy_into, epoch_key
from keepcover.training.resume import Checkpoint, checkpoint_path


@dataclass(frozen=True)
class Recipe:
    """How a base model is trained; the defaults are those of the CIFAR models."""

    sigma: float
    epochs: int = 80
    batch_size: int = 256
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 1e-4
    warmup_epochs: int = 2
    pad: int = 4
    flip: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.sigma < math.inf and 0 < self.lr < math.inf) or min(self.epochs, self.batch_size) < 1:
            raise InputError(f"expected sigma >= 0, epochs >= 1, batch_size >= 1 and lr > 0, all finite, got {self}")
        if self.pad < 0:
            raise InputError(f"expected a shift of 0 pixels or more, got pad {self.pad}")

    def learning_rate(self, step: int, steps_per_epoch: int) -> float:
        """Linear warm-up, then cosine to zero.

        Example:
            >>> recipe = Recipe(0.25, epochs=10, warmup_epochs=2)
            >>> [round(recipe.learning_rate(step, 1), 4) for step in (0, 1, 2, 6, 10)]
            [0.05, 0.1, 0.1, 0.05, 0.0]
        """
        warm, total = self.warmup_epochs * steps_per_epoch, self.epochs * steps_per_epoch
        if step < warm:
            return self.lr * (step + 1) / warm
        return self.lr * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, total - warm)))


def padded_bytes(images: Tensor, pad: int) -> Tensor:
    """Images in [0, 1] as uint8 pixels with a black border, for :func:`augment`. Beyond [0, 1] bytes would wrap around.

    Example:
        >>> padded_bytes(torch.ones(1, 1, 1, 1), 1)[0, 0].tolist()
        [[0, 0, 0], [0, 255, 0], [0, 0, 0]]
    """
    low, high = extremes(images) if images.is_floating_point() else (math.nan, math.nan)
    if not (low > -0.5 / 255 and high < 255.5 / 255):
        found = f"values in [{low:.3g}, {high:.3g}]" if images.is_floating_point() else str(images.dtype)
        raise InputError(
            f"expected float images in [0, 1], the units of sigma, got {found}; divide 8-bit pixels by 255, and put any other "
            "normalisation inside the model"
        )
    return nn.functional.pad((images * 255).round().to(torch.uint8), [pad] * 4)


def augment(padded: Tensor, index: Tensor, pad: int, flip: bool, generator: torch.Generator | None = None) -> Tensor:
    """Random crops and flips of ``padded`` [n, c, h + 2 pad, w + 2 pad], uint8, as float images in channels-last memory."""
    height, width = padded.shape[2] - 2 * pad, padded.shape[3] - 2 * pad
    device, count = padded.device, len(index)
    corner = torch.randint(0, 2 * pad + 1, (2, count, 1), device=device, generator=generator)
    rows = corner[0] + torch.arange(height, device=device)
    columns = torch.arange(width, device=device).expand(count, width)
    if flip:
        mirrored = torch.rand(count, 1, device=device, generator=generator) < 0.5
        columns = torch.where(mirrored, width - 1 - columns, columns)
    columns = corner[1] + columns
    picked = padded[index[:, None, None], :, rows[:, :, None], columns[:, None, :]]  # [b, h, w, c]
    return picked.permute(0, 3, 1, 2).float() / 255


class Trainer:
    """A model, its momentum and its data on one device; knows how to take a step and how to stop and go on."""

    def __init__(self, model: nn.Module, data: Labelled, recipe: Recipe, device: torch.device | str) -> None:
        if len(data) < recipe.batch_size:
            raise InputError(f"expected at least one batch of {recipe.batch_size} images, got {len(data)}")
        self.device, self.recipe = torch.device(device), recipe
        self.model = model.to(self.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.padded = padded_bytes(data.images, recipe.pad).to(self.device)
        self.labels = data.labels.to(self.device)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.sgd = Sgd(trained, recipe.momentum, recipe.weight_decay)
        self.index = torch.zeros(recipe.batch_size, dtype=torch.int64, device=self.device)
        self.loss = torch.zeros((), device=self.device)
        self.epoch = 0
        self.step = Replayed(self._step, self.state, self.device)
        torch.backends.cudnn.benchmark = self.device.type == "cuda"

    @property
    def steps_per_epoch(self) -> int:
        return len(self.labels) // self.recipe.batch_size

    def _step(self) -> None:
        images = augment(self.padded, self.index, self.recipe.pad, self.recipe.flip)
        images = images + self.recipe.sigma * torch.randn_like(images)
        half = torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)
        with half if self.device.type == "cuda" else nullcontext():
            loss = nn.functional.cross_entropy(self.model(images), self.labels[self.index])
        self.sgd.step(torch.autograd.grad(loss, self.sgd.parameters))
        self.loss.copy_(loss.detach())

    def run_epoch(self, bar: Bar | None = None) -> float:
        """One pass over the data, in an order and under noise that depend on (seed, epoch) alone."""
        torch.manual_seed(epoch_key(self.recipe.seed, self.epoch))
        self.model.train()
        order = torch.randperm(len(self.labels), device=self.device)
        total = torch.zeros((), device=self.device)
        for step in range(self.steps_per_epoch):
            self.index.copy_(order[step * self.recipe.batch_size : (step + 1) * self.recipe.batch_size])
            done = self.epoch * self.steps_per_epoch + step
            self.sgd.lr.fill_(self.recipe.learning_rate(done, self.steps_per_epoch))
            self.step()
            total += self.loss
            if bar:
                bar.advance()
        self.epoch += 1
        return float(total) / self.steps_per_epoch

    def state(self) -> dict[str, Tensor]:
        """Everything a step changes."""
        return {**{f"model.{name}": value for name, value in self.model.state_dict().items()}, **self.sgd.state()}


@torch.no_grad()
def check_logits(model: nn.Module, data: Labelled, device: torch.device | str) -> None:
    """Refuse a model that does not give one logit per class, before anything is trained."""
    images, classes = data.images[:2].to(device), len(data.class_names)
    try:
        logits = model.to(device).eval()(images)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"{type(model).__name__} cannot take images of shape {tuple(images.shape[1:])} ({reason}); "
            "it must map [n, c, h, w] in [0, 1] to logits [n, classes]"
        ) from None
    found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if found != (len(images), classes):
        raise InputError(
            f"expected logits of shape {(len(images), classes)} for {len(images)} images of {data.name} with {classes} "
            f"classes, got {found} from {type(model).__name__}"
        )


@torch.inference_mode()
def noisy_accuracy(model: nn.Module, data: Labelled, sigma: float, device: torch.device | str, seed: int = 0) -> float:
    """Share of images classified rightly under one noisy draw each."""
    generator = torch.Generator(device=device).manual_seed(seed)
    model.eval()
    right = 0
    for images, labels in zip(data.images.split(1000), data.labels.split(1000), strict=True):
        noisy = images.to(device)
        noisy = noisy + sigma * torch.randn(noisy.shape, device=device, generator=generator)
        right += int((model(noisy).argmax(dim=1) == labels.to(device)).sum())
    return right / len(data)


def train_base(
    model: nn.Module,
    train: Labelled,
    test: Labelled,
    recipe: Recipe,
    out: str | Path,
    *,
    architecture: str,
    device: torch.device | str = "cpu",
    resume: bool = True,
    checkpoint_seconds: float = 30.0,
    progress: bool | Report = True,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Train under noise and write ``out`` (float16 safetensors) and its card (JSON, the same name); returns the card.

    A checkpoint beside ``out`` is renewed at the end of every epoch that finds it older than ``checkpoint_seconds``, always
    under a temporary name first. A run that was killed goes on from it and takes the steps it would have taken. The model
    starts from the weights it has: a trained classifier is fine-tuned, a fresh one trained.
    """
    out, checkpoint = Path(out), checkpoint_path(out)
    check_folder(out.parent, out.name, out.with_suffix(".json").name, checkpoint.name)
    check_logits(model, train, device)
    trainer = Trainer(model, train, recipe, device)
    belongs = {**asdict(recipe), "data": train.fingerprint}
    before = Checkpoint.load(checkpoint, belongs, trainer.state()) if resume else None
    if before:
        copy_into(trainer.state(), before.state)
        trainer.epoch = before.epoch
        say(f"going on after epoch {before.epoch} of {recipe.epochs}")
    spent, first = (before.seconds, before.epoch) if before else (0.0, 0)
    start = saved = time.monotonic()
    with (
        torch.random.fork_rng([trainer.device] if trainer.device.type == "cuda" else []),
        Bar("training", recipe.epochs * trainer.steps_per_epoch, progress) as bar,
    ):
        bar.done = trainer.epoch * trainer.steps_per_epoch
        while trainer.epoch < recipe.epochs:
            loss = trainer.run_epoch(bar)
            if not math.isfinite(loss):
                raise InputError(f"the loss became {loss} in epoch {trainer.epoch}; lower lr or check the data")
            now = time.monotonic()
            if trainer.epoch % 5 == 0 or trainer.epoch == recipe.epochs:
                accuracy = noisy_accuracy(trainer.model, test, recipe.sigma, trainer.device)
                left = (now - start) / (trainer.epoch - first) * (recipe.epochs - trainer.epoch)
                say(
                    f"epoch {trainer.epoch}/{recipe.epochs}  loss {loss:.3f}  noisy accuracy {accuracy:.3f}  {left:.0f} s left"
                )
            if now - saved >= checkpoint_seconds and trainer.epoch < recipe.epochs:
                Checkpoint(trainer.state(), trainer.epoch, spent + now - start).save(checkpoint, belongs)
                saved = now
    seconds = spent + time.monotonic() - start
    content = weights_bytes(trainer.model, {"architecture": architecture, "sigma": recipe.sigma})
    # What is measured is what is stored: the float16 weights.
    trainer.model.load_state_dict(deserialize(content), strict=False)
    card = {
        "architecture": architecture,
        "dataset": train.name,
        "sigma": recipe.sigma,
        "num_classes": len(train.class_names),
        "recipe": asdict(recipe),
        "dtype": "float16",
        "top1_accuracy_one_noisy_draw_test": noisy_accuracy(trainer.model, test, recipe.sigma, trainer.device),
        "sha256": hashlib.sha256(content).hexdigest(),
        "seconds": round(seconds, 1),
        "hardware": hardware(trainer.device),
        "torch": torch.__version__,
    }
    write_file(out, content)
    write_file(out.with_suffix(".json"), (json.dumps(card, indent=1) + "\n").encode())
    checkpoint.unlink(missing_ok=True)
    return card


def hardware(device: torch.device) -> str:
    """What a run was timed on."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
