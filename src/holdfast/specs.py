"""Models and data named on a command line."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from holdfast.datasets import Labelled, cifar, digits, idx, image_folder
from holdfast.errors import InputError
from holdfast.logits_file import read_arrays
from holdfast.metrics import check_labels
from holdfast.models import CifarResNet, ResNet50, SmallCNN, find_weights, load_head, load_weights
from holdfast.smoothing import Classifier

MODELS: dict[str, Callable[[int], nn.Module]] = {
    "small-cnn": lambda classes: SmallCNN(classes=classes),
    "cifar-resnet20": lambda classes: CifarResNet(20, classes),
    "cifar-resnet56": lambda classes: CifarResNet(56, classes),
    "cifar-resnet110": lambda classes: CifarResNet(110, classes),
    "resnet50": lambda classes: ResNet50(classes),
}

OFFICIAL: dict[str, Callable[..., Labelled]] = {"cifar10": cifar, "cifar100": cifar, "mnist": idx, "fashion-mnist": idx}


def load_model(
    spec: str,
    weights: str | Path | None = None,
    classes: int = 10,
    device: str | None = None,
    head: str | Path | None = None,
) -> Classifier:
    """A model by name, with weights and a conformally trained head over them, or ``package.module:function``: a function
    without arguments that returns one.

    Example:
        >>> type(load_model("torch.nn:Identity")).__name__
        'Identity'
    """
    if spec in MODELS:
        model = MODELS[spec](classes)
        model = load_weights(model, weights) if weights is not None else model
        model = load_head(model, find_weights(head)) if head is not None else model
        return model.to(device) if device else model
    match = re.fullmatch(r"([\w.]+):(\w+)", spec)
    if not match:
        raise InputError(f"expected a model among {', '.join(MODELS)} or package.module:function, got {spec!r}")
    if weights is not None or head is not None:
        raise InputError("weights are for built-in models; let your function load its own")
    try:
        factory = getattr(importlib.import_module(match[1]), match[2])
    except (ImportError, AttributeError) as error:
        raise InputError(f"cannot find {spec!r}: {error}; is it on PYTHONPATH?") from None
    made: Any = factory()
    if not callable(made):
        raise InputError(f"{spec} must return a model, a callable images -> logits; it returned {type(made).__name__}")
    return cast(Classifier, made.to(device) if device and isinstance(made, nn.Module) else made)


def load_parts(spec: str, folder: str | Path | None = None, seed: int = 0) -> tuple[Labelled, Labelled]:
    """Training and test data: the official parts where there are such, a random four fifths and the rest elsewhere."""
    if spec in OFFICIAL:
        return load_data(spec, folder, "train"), load_data(spec, folder)
    data = load_data(spec, folder)
    if len(data) < 2:
        raise InputError(f"expected at least 2 examples in {spec}, got {len(data)}")
    train, test = data.split(max(1, 4 * len(data) // 5), -1, seed=seed)
    return train, test


def load_data(spec: str, folder: str | Path | None = None, part: str = "test") -> Labelled:
    """Data by name (the test part unless asked otherwise), a folder of class folders, or a safetensors or npz file of ``images`` [n, c, h, w] and ``labels`` [n].

    Image files smaller than 224 pixels are taken as they are, and must then have one size; larger ones as ImageNet's.
    """
    if spec == "digits":
        return digits()
    if spec in OFFICIAL:
        if folder is None:
            raise InputError(f"{spec} needs the folder of its official files: --data-dir DIR")
        return OFFICIAL[spec](spec, folder, part)
    if Path(spec).is_dir():
        images = image_folder(spec, resize=None, crop=None)
        return (images if min(images.shape[1:]) < 224 else image_folder(spec)).load()
    if Path(spec).suffix not in (".npz", ".safetensors"):
        raise InputError(
            f"expected digits, {', '.join(OFFICIAL)}, a folder of class folders, or a .npz or .safetensors file, got {spec!r}"
        )
    images, labels = read_arrays(spec, "images", "labels")
    if images.ndim != 4:
        raise InputError(f"expected images [n, channels, height, width], got shape {tuple(images.shape)}")
    if not images.is_floating_point():
        raise InputError(f"expected float images in [0, 1], got {images.dtype}; divide by 255 and save again")
    classes = int(torch.as_tensor(labels).max()) + 1 if len(labels) else 0
    labels = check_labels(labels, len(images), max(classes, 1))
    return Labelled(Path(spec).stem, images.float(), labels, tuple(f"class {k}" for k in range(classes)))
