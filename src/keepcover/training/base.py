"""Noise training of base models: the recipe behind every CIFAR result here, with the data resident on the device.

SGD with momentum, linear warm-up then cosine, crops, flips, squares and Gaussian noise made on the device, bfloat16.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as deserialize
from torch import nn

from keepcover.data import Labelled
from keepcover.engine.fingerprint import fingerprint
from keepcover.engine.progress import Progress
from keepcover.errors import InputError
from keepcover.models.checkpoints import weights_bytes
from keepcover.noise import Noise, get_noise
from keepcover.training.loop import Loop, Say, checkpoint_for, write_results
from keepcover.training.losses import CrossEntropy
from keepcover.training.noise import NoisyLoss, outputs_of
from keepcover.training.recipe import Recipe
from keepcover.training.views import Device, Views


def check_logits(model: nn.Module, data: Labelled, device: Device) -> None:
    """Refuse a model that does not give one logit per class, before anything is trained."""
    images, classes = data.images[:2].to(device), len(data.class_names)
    found = tuple(outputs_of(model.to(device), images).shape)
    wanted = (len(images), classes, *data.labels.shape[1:])
    if found != wanted:
        raise InputError(
            f"expected logits of shape {wanted} for {len(images)} images of {data.name} with {classes} "
            f"classes, got {found} from {type(model).__name__}"
        )


@torch.inference_mode()
def noisy_accuracy(
    model: nn.Module, data: Labelled, noise: Noise | float, device: Device, loss: CrossEntropy | None = None
) -> float:
    """Share of images, or of their pixels, classified rightly under one noisy draw each."""
    training, device, noise = model.training, torch.device(device), get_noise(noise)
    model.eval()
    right, total, size = 0, 0, 1000 if data.labels.ndim == 1 else 50
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        for images, labels in zip(data.images.split(size), data.labels.split(size), strict=True):
            found = (loss or CrossEntropy()).right(model(noise.fresh(images.to(device))), labels.to(device))
            right, total = right + int(found.sum()), total + len(found)
    model.train(training)
    return right / max(1, total)


def train_base(
    model: nn.Module,
    train: Labelled,
    test: Labelled,
    recipe: Recipe,
    out: str | Path,
    *,
    architecture: str,
    start: str | None = None,
    teachers: Mapping[str, nn.Module] | None = None,
    labels: bool = True,
    loss: CrossEntropy | None = None,
    compile: bool | None = None,
    device: torch.device | str = "cpu",
    resume: bool = True,
    checkpoint_seconds: float = 30.0,
    progress: Progress = True,
    say: Say = print,
) -> dict[str, Any]:
    """Train under noise and write ``out`` (float16 safetensors) and its card (JSON, the same name); returns the card.

    A run that was killed goes on from the checkpoint beside ``out`` and takes the steps it would have taken. The model
    starts from the weights it has, which the card names ``start``: a trained classifier is fine-tuned, a fresh one trained.
    Where there are ``teachers``, it learns what they say, on the mean, of the same noisy images. Without ``labels`` it learns
    to say under noise what it says at the start without. By default wide networks are compiled on a GPU: their arithmetic
    dominates, and a compiler joins what lies between convolutions. Labels of pixels [n, h, w] are cropped and mirrored with
    their images; ``loss`` says which pixels have none, and what rare classes weigh.
    """
    out, device, teachers = Path(out), torch.device(device), dict(teachers or {})
    checkpoint = checkpoint_for(out, resume)
    for network in (model, *teachers.values()):
        check_logits(network, train, device)
    if not labels and teachers:
        raise InputError("a network that imitates its own clean outputs takes no teachers; leave out one of the two")
    if not labels:
        teachers = {"itself, without noise": copy.deepcopy(model).requires_grad_(False)}
    for network in (model, *teachers.values()):
        network.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if compile is None:
        compile = device.type == "cuda" and "wrn-" in architecture
    loss = loss or CrossEntropy()
    views = Views.of(train, recipe, device, border=0 if loss.ignore is None else loss.ignore)
    origin = {"start": start, "teachers": {name: fingerprint(network) for name, network in teachers.items()}}
    if not labels:
        views.labels = None
    noisy = NoisyLoss(model, views, list(teachers.values()), of_clean=not labels, compile=compile, loss=loss)
    loop = Loop(noisy, recipe, len(train), device, say)

    def each(mean: float) -> None:
        done, epochs = loop.epoch, loop.fixed.epochs
        if done == 1 or (done % max(5, epochs // 5) == 0 and done < epochs):
            accuracy = noisy_accuracy(model, test, recipe.law, device, loss=loss)
            say(f"epoch {done}/{epochs}  loss {mean:.3f}  noisy accuracy {accuracy:.3f}")

    kind = {} if loss == CrossEntropy() else {"loss": asdict(loss)}
    belongs = {**asdict(recipe), "data": train.fingerprint, **origin, **kind}
    seconds = loop.run(checkpoint, belongs, checkpoint_seconds=checkpoint_seconds, each=each, progress=progress)
    if recipe.average:
        noisy.settle()
    content = weights_bytes(model, {"architecture": architecture, "sigma": recipe.sigma})
    # What is measured is what is stored: the float16 weights.
    model.load_state_dict(deserialize(content), strict=False)
    card = {
        "architecture": architecture,
        "dataset": train.name,
        "sigma": recipe.sigma,
        "num_classes": len(train.class_names),
        "recipe": asdict(loop.fixed),
        **kind,
        "start": start,
        "teachers": list(teachers),
        "dtype": "float16",
        "top1_accuracy_one_noisy_draw_test": noisy_accuracy(model.eval(), test, recipe.law, device, loss=loss),
    }
    return write_results(out, content, card, seconds, device)
