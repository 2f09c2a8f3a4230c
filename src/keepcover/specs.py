"""Models and data named on a command line."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from keepcover.adapters import ExportedClassifier, OnnxClassifier, from_hugging_face, from_predict_proba
from keepcover.data import Labelled, cifar, digits, idx, image_folder
from keepcover.engine.devices import checked_device
from keepcover.engine.inputs import check_images
from keepcover.engine.smoother import Classifier
from keepcover.errors import InputError
from keepcover.models import CifarResNet, ResNet50, SmallCNN, find_weights, load_head, load_weights
from keepcover.noise.stream import widened
from keepcover.prediction import Predictor
from keepcover.prediction.artifact import load, read
from keepcover.store.logits_file import names_in, read_arrays
from keepcover.tasks.metrics import check_labels

MODELS: dict[str, Callable[[int], nn.Module]] = {
    "small-cnn": lambda classes: SmallCNN(classes=classes),
    "cifar-resnet20": lambda classes: CifarResNet(20, classes),
    "cifar-resnet56": lambda classes: CifarResNet(56, classes),
    "cifar-resnet110": lambda classes: CifarResNet(110, classes),
    "resnet50": lambda classes: ResNet50(classes),
}

OFFICIAL: dict[str, Callable[..., Labelled]] = {"cifar10": cifar, "cifar100": cifar, "mnist": idx, "fashion-mnist": idx}


def load_model(
    spec: str, weights: str | Path | None = None, classes: int = 10, device: str | None = None, output: str = "logits"
) -> Classifier:
    """A model by name, an ``.onnx`` or ``.pt2`` file, a Hugging Face folder, or ``package.module:function``.

    A model by name takes weights, a file or a name; ``BASE+HEAD`` puts a conformally trained head on them. The function
    takes no arguments and returns images -> logits, or an object with ``predict_proba``; its module may lie in the current
    folder. ``output`` says what an ONNX file
    returns, logits or probabilities.

    Example:
        >>> type(load_model("torch.nn:Identity")).__name__
        'Identity'
    """
    suffix = Path(spec).suffix.lower()
    if output != "logits" and suffix != ".onnx":
        raise InputError(f"{output} are for ONNX files; let your function return the logarithm of its probabilities")
    if device is not None:
        checked_device(device)
    if spec in MODELS:
        model = MODELS[spec](classes)
        if weights is not None:
            base, _, head = str(weights).partition("+")
            if head and not Path(weights).is_file():
                model = load_head(load_weights(model, base), find_weights(head))
            else:
                model = load_weights(model, weights)
        return model.to(device) if device else model
    if weights is not None:
        raise InputError("weights are for built-in models; a file holds its own, and a function loads its own")
    if suffix == ".onnx":
        return OnnxClassifier(spec, output=output, device=device)
    if suffix == ".pt2":
        return ExportedClassifier(spec, device=device)
    if Path(spec).is_dir():
        return from_hugging_face(spec, device=device)
    if suffix in _OTHER_FILES:
        raise InputError(f"{spec}: {_OTHER_FILES[suffix]}")
    return _from_function(spec, device)


_ARCHITECTURE = "weights alone are no model: give --model NAME --weights FILE, or a function that builds and loads it"
_PICKLE = "pickles run code when they are opened, so they are not: give package.module:function, which opens its own"
_OTHER_FILES = {
    ".safetensors": _ARCHITECTURE,
    ".pt": _ARCHITECTURE,
    ".pth": _ARCHITECTURE,
    ".ckpt": _ARCHITECTURE,
    ".bin": _ARCHITECTURE,
    ".pkl": _PICKLE,
    ".pickle": _PICKLE,
    ".joblib": _PICKLE,
}


def _from_function(spec: str, device: str | None) -> Classifier:
    match = re.fullmatch(r"([\w.]+):(\w+)", spec)
    if not match:
        raise InputError(
            f"expected a model among {', '.join(MODELS)}, an .onnx or .pt2 file, a Hugging Face folder or package.module:function, got {spec!r}"
        )
    here = str(Path.cwd())
    if here not in sys.path:  # as for `python -m`: an installed command alone does not look into the folder it runs in
        sys.path.insert(0, here)
    try:
        factory = getattr(importlib.import_module(match[1]), match[2])
    except (ImportError, AttributeError) as error:
        raise InputError(f"cannot find {spec!r}: {error}; is it in this folder or on PYTHONPATH?") from None
    made: Any = factory()
    if isinstance(made, nn.Module):
        return made.to(device) if device else made
    if hasattr(made, "predict_proba"):
        return from_predict_proba(made)
    if not callable(made):
        raise InputError(
            f"{spec} must return a model, a callable images -> logits; it returned {type(made).__name__}, which has no "
            "predict_proba either"
        )
    return cast(Classifier, made)


def load_predictor(
    path: str | Path,
    model: str,
    weights: str | Path | None = None,
    device: str | None = None,
    output: str = "logits",
    batch_size: int | None = None,
    fingerprint: str | None = None,
) -> Predictor:
    """A saved predictor with its model, which is named as for :func:`load_model`."""
    classes = read(path)[0]["task"].get("classes") or 0
    if model in MODELS and weights is None:
        raise InputError(f"{model} needs --weights FILE: those that the predictor was calibrated with")
    network = load_model(model, weights, classes, device, output)
    if isinstance(network, nn.Module):
        network.eval()
    return load(path, network, fingerprint=fingerprint, batch_size=batch_size, device=device)


def load_parts(
    spec: str, folder: str | Path | None = None, part: str | None = None, seed: int = 0
) -> tuple[Labelled, Labelled]:
    """Training and test data: the official parts where there are such, four fifths and one fifth of ``part`` elsewhere.

    ``part`` is the first half by default, so that ``3/4`` and ``4/4`` remain for calibration and for judging: a point that
    was trained on must not calibrate.

    Example:
        >>> trained = set(part_rows(1797, "1/2").tolist())
        >>> trained.isdisjoint(part_rows(1797, "3/4").tolist() + part_rows(1797, "4/4").tolist())
        True
    """
    if spec in OFFICIAL:
        if part is not None:
            raise InputError(f"{spec} has an official training part; leave --part out")
        return load_data(spec, folder, "train"), load_data(spec, folder)
    data = take_part(load_data(spec, folder), part or "1/2")
    data = replace(data, images=data.images.float())  # training promises nothing: the network's own precision will do
    if len(data) < 2:
        raise InputError(f"expected at least 2 examples in that part of {spec}, got {len(data)}")
    train, test = data.split(max(1, 4 * len(data) // 5), -1, seed=seed)
    return train, test


def load_data(spec: str, folder: str | Path | None = None, part: str = "test") -> Labelled:
    """Data by name (the test part unless asked otherwise), a folder of class folders, or a safetensors or npz file of
    ``images`` [n, c, h, w] and ``labels`` [n].

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
    return Labelled(Path(spec).stem, widened(images), labels, tuple(f"class {k}" for k in range(classes)))


@dataclass(frozen=True)
class Inputs:
    """What a prediction needs of data: inputs, their row numbers in the data, and labels and names where there are any."""

    name: str
    images: Tensor
    rows: Tensor
    labels: Tensor | None = None
    class_names: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.images)


def load_inputs(spec: str, folder: str | Path | None = None, part: str | None = None, labelled: bool = False) -> Inputs:
    """Data as :func:`load_data` reads them; files may lack ``labels``, and hold vectors [n, features] instead of images.

    ``part`` is ``k/m``: the k-th of m random disjoint parts, the same on every run.
    """
    if Path(spec).suffix in (".npz", ".safetensors"):
        images, labels, class_names, name = *_arrays(spec, labelled), None, Path(spec).stem
    else:
        data = load_data(spec, folder)
        images, labels, class_names, name = data.images, data.labels, data.class_names, data.name
    rows = part_rows(len(images), part)
    return Inputs(name, images[rows], rows, None if labels is None else labels[rows], class_names)


def _arrays(path: str, labelled: bool) -> tuple[Tensor, Tensor | None]:
    if not labelled and "labels" not in names_in(path):
        return check_images(read_arrays(path, "images")[0], first=False), None
    images, labels = read_arrays(path, "images", "labels")
    return check_images(images, first=False), check_labels(labels, len(images), 2**31)


def take_part(data: Labelled, part: str | None) -> Labelled:
    """``k/m``: the k-th of m random disjoint parts of a dataset; everything where no part is named."""
    return data[part_rows(len(data), part)]


def part_rows(n: int, part: str | None) -> Tensor:
    """Row numbers of part ``k/m`` of n rows, in ascending order.

    Example:
        >>> sorted(part_rows(5, "1/2").tolist() + part_rows(5, "2/2").tolist())
        [0, 1, 2, 3, 4]
    """
    if part is None:
        return torch.arange(n)
    match = re.fullmatch(r"(\d+)/(\d+)", part)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise InputError(f"expected a part k/m with 1 <= k <= m, for instance 1/2 for the first half, got {part!r}")
    if int(match[2]) > n:
        raise InputError(f"cannot make {match[2]} parts of {n} rows")
    # Files are often sorted by class: parts are drawn at random, the same on every run.
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    return order.tensor_split(int(match[2]))[int(match[1]) - 1].sort().values
