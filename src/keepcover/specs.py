"""Models and data named on a command line."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from keepcover.adapters import ExportedClassifier, OnnxClassifier, from_hugging_face, from_predict_proba
from keepcover.data import Labelled, cifar, digits, idx, joined
from keepcover.data.image_folder import usual_folder
from keepcover.data.table import read_csv
from keepcover.engine.inputs import check_images
from keepcover.engine.smoother import Classifier, checked_device
from keepcover.errors import InputError
from keepcover.models import NAMES, denoised, find_weights, is_named, load_head, load_weights, network
from keepcover.prediction import Predictor
from keepcover.prediction.artifact import load, read
from keepcover.store.logits_file import names_in, read_arrays
from keepcover.tasks.metrics import check_labels
from keepcover.training.base import outputs_of

OFFICIAL: dict[str, Callable[..., Labelled]] = {"cifar10": cifar, "cifar100": cifar, "mnist": idx, "fashion-mnist": idx}
ARRAYS = (".npz", ".safetensors")


def load_model(
    spec: str,
    weights: str | Path | None = None,
    classes: int = 10,
    device: str | None = None,
    output: str = "logits",
    fresh: bool = False,
) -> Classifier:
    """A model by name, an ``.onnx`` or ``.pt2`` file, a Hugging Face folder, or ``package.module:function``.

    A model by name takes weights, a file or a name, unless a ``fresh`` one is asked for; ``BASE+HEAD`` puts a conformally
    trained head on them. The function takes no arguments and returns images -> logits, or an object with ``predict_proba``;
    its module may lie in the current folder. ``output`` says what an ONNX file returns, logits or probabilities.
    ``denoised:SPEC`` puts the bundled denoiser before any of them that is a torch module, ``denoised@FILE:SPEC`` another.

    Example:
        >>> type(load_model("torch.nn:Identity")).__name__
        'Identity'
    """
    if behind := re.fullmatch(r"denoised(?:@([^:]*))?:(.*)", spec, re.DOTALL):
        return denoised(load_model(behind[2], weights, classes, device, output, fresh), behind[1] or None)
    suffix = Path(spec).suffix.lower()
    if output != "logits" and suffix != ".onnx":
        raise InputError(f"{output} are for ONNX files; let your function return the logarithm of its probabilities")
    if device is not None:
        checked_device(device)
    if is_named(spec):
        if weights is None and not fresh:
            raise InputError(f"{spec} needs trained weights: --weights FILE")
        model = network(spec, classes, lambda model: _with_weights(model, weights))
        return model.to(device) if device else model
    if weights is not None:
        raise InputError("weights are for built-in models; a file holds its own, and a function loads its own")
    if suffix == ".onnx":
        return OnnxClassifier(spec, output=output, device=device)
    if suffix == ".pt2":
        return ExportedClassifier(spec, device=device)
    if Path(spec).is_dir():
        return from_hugging_face(spec, device=device)
    if suffix in (".safetensors", ".pt", ".pth", ".ckpt", ".bin"):
        build = "give --model NAME --weights FILE, or a function that builds and loads it"
        raise InputError(f"{spec}: weights alone are no model: {build}")
    if suffix in (".pkl", ".pickle", ".joblib"):
        build = "give package.module:function, which opens its own"
        raise InputError(f"{spec}: pickles run code when they are opened, so they are not: {build}")
    return _from_function(spec, device)


def with_files(spec: str, change: Callable[[str], str]) -> str:
    """A model's specification with every file in it changed.

    Example:
        >>> with_files("denoised@den.safetensors:net.onnx", str.upper), with_files("denoised:net.pt2", str.upper)
        ('denoised@DEN.SAFETENSORS:NET.ONNX', 'denoised:NET.PT2')
    """
    front, colon, behind = spec.partition(":")
    if colon and front.split("@")[0] == "denoised":
        name, at, file = front.partition("@")
        return f"{name}{at}{file and change(file)}:{with_files(behind, change)}"
    return change(spec)


def with_weights_files(spec: str, change: Callable[[str], str]) -> str:
    """The same for weights, ``BASE+HEAD``; a file that is there is one, whatever characters its name has."""
    whole = change(spec)
    return whole if whole != spec or Path(spec).is_file() else "+".join(map(change, spec.split("+")))


def full_path(name: str) -> str:
    """A file or folder that is there by its full path; other names as they are."""
    return str(Path(name).resolve()) if os.path.exists(name) else name  # noqa: PTH110


def _with_weights(model: nn.Module, weights: str | Path | None) -> nn.Module:
    if weights is None:
        return model
    base, _, head = str(weights).partition("+")
    if head and not Path(weights).is_file():
        return load_head(load_weights(model, base), find_weights(head))
    return load_weights(model, weights)


def _from_function(spec: str, device: str | None) -> Classifier:
    match = re.fullmatch(r"([\w.]+):(\w+)", spec)
    if not match:
        raise InputError(
            f"expected a model among {NAMES}, an .onnx or .pt2 file, a Hugging Face folder or package.module:function, got {spec!r}"
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
        found = type(made).__name__
        raise InputError(f"{spec} must return a model, images -> logits or with predict_proba, not {found}")
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
    network = load_model(model, weights, classes, device, output)
    if isinstance(network, nn.Module):
        network.eval()
    return load(path, network, fingerprint=fingerprint, batch_size=batch_size, device=device)


def load_parts(
    spec: str, folder: str | Path | None = None, part: str | None = None, seed: int = 0
) -> tuple[Labelled, Labelled]:
    """Training and test data: the official parts where there are such, four fifths and one fifth of ``part`` elsewhere.

    ``part`` is the first half by default, so that ``3/4`` and ``4/4`` remain for calibration and for judging: a point that
    was trained on must not calibrate. ``A+B`` joins data of one shape, with the classes of A before those of B: a start for
    networks of either.

    Example:
        >>> trained = set(part_rows(1797, "1/2").tolist())
        >>> trained.isdisjoint(part_rows(1797, "3/4").tolist() + part_rows(1797, "4/4").tolist())
        True
    """
    if len(names := _listed(spec)) > 1:
        several = [load_parts(one, folder, part, seed) for one in names]
        train, test = (joined(each) for each in zip(*several, strict=True))
        return train, test
    if spec in OFFICIAL:
        if part is not None:
            raise InputError(f"{spec} has an official training part; leave --part out")
        return load_data(spec, folder, "train"), load_data(spec, folder)
    data = load_data(spec, folder)
    data = data[part_rows(len(data), part or "1/2")]
    if data.images.is_floating_point():  # training promises nothing: the network's own precision will do
        data = replace(data, images=data.images.float())
    return _four_to_one(data, seed)


def _listed(spec: str) -> list[str]:
    """The names in ``A+B``; a file or folder that is there is one name, whatever characters it has."""
    names = spec.split("+")
    # Not Path.exists, which raises where a name is too long for a file.
    if len(names) < 2 or os.path.exists(spec):  # noqa: PTH110
        return [spec]
    if "" in names:
        advice = "a path that has a + in it is taken alone, and there is none of this name"
        raise InputError(f"expected names of data joined by +, for instance cifar10+cifar100, got {spec!r}; {advice}")
    return names


def _four_to_one(data: Labelled, seed: int) -> tuple[Labelled, Labelled]:
    if len(data) < 2:
        raise InputError(f"expected at least 2 examples in that part of {data.name}, got {len(data)}")
    train, test = data.split(max(1, 4 * len(data) // 5), -1, seed=seed)
    return train, test


def has_labels(spec: str) -> bool:
    """Whether data of that name come with labels: a folder that holds images and no folders has none, nor a file without.

    Example:
        >>> has_labels("digits")
        True
    """
    if len(names := _listed(spec)) > 1:
        return all(map(has_labels, names))
    path = Path(spec)
    if path.is_dir():
        return any(entry.is_dir() and not entry.name.startswith(".") for entry in path.iterdir())
    return path.suffix not in ARRAYS or "labels" in names_in(spec)


@torch.no_grad()
def parts_by(model: nn.Module, spec: str, part: str | None = None, seed: int = 0) -> tuple[Labelled, Labelled]:
    """As :func:`load_parts`, of data without labels: in their place stands what the model says of the images as they are."""
    if len(_listed(spec)) > 1:
        raise InputError(f"data without labels have no classes to join, got {spec!r}; put all images into one folder")
    images = load_inputs(spec, part=part or "1/2").images.float()
    device = next(model.parameters(), images).device
    logits = torch.cat([outputs_of(model, some.to(device)).cpu() for some in images.split(256)])
    names = tuple(f"class {k}" for k in range(logits.shape[1]))
    data = Labelled(f"{Path(spec).stem}, by the network's own word", images, logits.argmax(dim=1), names)
    return _four_to_one(data, seed)


def load_data(spec: str, folder: str | Path | None = None, part: str = "test", target: str | None = None) -> Labelled:
    """Data by name (the test part unless asked otherwise), a folder of class folders, or a safetensors or npz file of
    ``images`` [n, c, h, w], or tokens [n, length], and ``labels`` [n], [n, K] or [n, h, w]. Numbers to predict come from ``inputs`` and ``targets`` of such a
    file, or from a CSV file, whose last column is the ``target`` unless named.

    Image files of at most 224 pixels are taken as they are, and must then have one size; larger ones as ImageNet's.
    """
    if spec == "digits":
        return digits()
    if spec in OFFICIAL:
        if folder is None:
            raise InputError(f"{spec} needs the folder of its official files: --data-dir DIR")
        return OFFICIAL[spec](spec, folder, part)
    if Path(spec).is_dir():
        return usual_folder(spec).load()
    if Path(spec).suffix == ".csv":
        return Labelled(Path(spec).stem, *read_csv(spec, target)[:2], ())
    if Path(spec).suffix not in ARRAYS:
        raise InputError(
            f"expected digits, {', '.join(OFFICIAL)}, a folder of class folders, or a .npz, .safetensors or .csv file, got {spec!r}"
        )
    images, truth = _arrays(spec, True)
    if truth.is_floating_point() or truth.ndim > 1:  # numbers, several labels, labels of pixels: the task looks at them
        return Labelled(Path(spec).stem, images, truth, ())
    if images.ndim != 4 and images.is_floating_point():
        raise InputError(
            f"expected images [n, channels, height, width] or tokens [n, length], got {images.dtype} {tuple(images.shape)}"
        )
    classes = int(truth.max()) + 1 if len(truth) else 0
    return Labelled(Path(spec).stem, images, truth, tuple(f"class {k}" for k in range(classes)))


@dataclass(frozen=True)
class Inputs(Labelled):
    """Data whose labels, and the names of whose classes, may be missing, with the numbers of their rows in the whole."""

    labels: Any
    rows: Tensor


def load_inputs(
    spec: str, folder: Path | None = None, part: str | None = None, labelled: bool = False, target: str | None = None
) -> Inputs:
    """Data as :func:`load_data` reads them; files may lack ``labels``, and hold vectors [n, features] instead of images. Where no
    labels are needed, a folder of images without class folders will do.

    ``part`` is ``k/m``: the k-th of m random disjoint parts, the same on every run.
    """
    path = Path(spec)
    if path.suffix in ARRAYS:
        name, (images, labels), names = path.stem, _arrays(spec, labelled), ()
    elif labelled or has_labels(spec):
        data = load_data(spec, folder, target=target)
        name, (images, labels), names = data.name, data.pair, data.class_names
    else:
        name, images, labels, names = path.name, usual_folder(spec, flat=True).load().images, None, ()
    rows = part_rows(len(images), part)
    return Inputs(name, images[rows], None if labels is None else labels[rows], names, rows)


def _arrays(path: str, labelled: bool) -> tuple[Tensor, Any]:
    """Inputs, and labels or targets, by either name."""
    there = names_in(path)
    inputs, truth = ("inputs" if "inputs" in there else "images"), ("targets" if "targets" in there else "labels")
    if not labelled and truth not in there:
        return check_images(read_arrays(path, inputs)[0], first=False), None
    images, known = read_arrays(path, inputs, truth)
    if truth == "targets" or known.ndim < 2:  # tables of several labels and maps of pixels are for the task to look at
        known = known.double() if truth == "targets" else check_labels(known, len(images), None)
    return check_images(images, first=False), known


def part_rows(n: int, part: str | None) -> Tensor:
    """Row numbers of part ``k/m`` of n rows, in ascending order.

    Example:
        >>> sorted(part_rows(5, "1/2").tolist() + part_rows(5, "2/2").tolist())
        [0, 1, 2, 3, 4]
    """
    if part is None:
        return torch.arange(n)
    k, m = _part(part)
    if m > n:
        raise InputError(f"cannot make {m} parts of {n} rows")
    # Files are often sorted by class: parts are drawn at random, the same on every run.
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    return order.tensor_split(m)[k - 1].sort().values


def _part(given: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", given)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise InputError(f"expected a part k/m with 1 <= k <= m, for instance 1/2 for the first half, got {given!r}")
    return int(match[1]), int(match[2])


def next_part(part: str) -> str:
    """The part after ``k/m``, and the first after the last.

    Example:
        >>> next_part("3/4"), next_part("4/4")
        ('4/4', '1/4')
    """
    k, m = _part(part)
    return f"{k % m + 1}/{m}"


def read_shape(given: str | Sequence[int] | None) -> tuple[int, ...] | None:
    """The shape of an input as a command line or a service's settings give it.

    Example:
        >>> read_shape("3x32x32")
        (3, 32, 32)
    """
    if given is None:
        return None
    text = given if isinstance(given, str) else "x".join(map(str, given))
    if not re.fullmatch(r"[1-9]\d{0,8}(x[1-9]\d{0,8})*", text):
        raise InputError(f"expected a shape as positive numbers joined by x, for instance 3x32x32, got {given!r}")
    return tuple(int(part) for part in text.split("x"))
