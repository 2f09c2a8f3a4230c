"""Image classifiers of Hugging Face transformers, from a local folder, as the images -> logits that keepcover runs."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from keepcover.errors import InputError, optional, refusing
from keepcover.models.inputs import Normalize

Channels = Sequence[float] | None

MOST_JSON = 1 << 22  # bytes of a settings file; 22 000 classes take 1 MB
MOST_LABELS = 100_000
MOST_LAYERS = 1000
MOST = 1_000_000  # any other number: sizes, heads, patches
_LABELS = ("num_labels", "num_classes")
_LAYERS = re.compile(r".*(layers|depth|stages|blocks).*")
# Settings that make transformers read weights from elsewhere, in another form, or fetch code to run them.
_ELSEWHERE = ("transformers_weights", "quantization_config", "use_pretrained_backbone")
_ATTENTION = (None, "eager", "sdpa")


class HuggingFaceClassifier(nn.Module):
    """A transformers image classifier with its normalisation in front: images in [0, 1] -> logits [n, K], with gradients.

    Made by :func:`from_hugging_face`.

    Attributes:
        model: the transformers model.
        class_names: names of the labels, in the order of the logits.
        image_size: height and width that the model or its preprocessor names, where one does.
    """

    def __init__(self, model: nn.Module, normalize: Normalize, image_size: tuple[int, int] | None) -> None:
        super().__init__()
        self.normalize, self.model, self.image_size = normalize, model, image_size
        config: Any = model.config
        self.class_names = tuple(str(config.id2label[k]) for k in range(len(config.id2label)))

    def forward(self, images: Tensor) -> Tensor:
        channels = len(self.normalize.mean)
        if images.ndim != 4 or images.shape[1] != channels:
            raise InputError(f"this model takes images [n, {channels}, height, width], got shape {tuple(images.shape)}")
        return self.model(pixel_values=self.normalize(images)).logits


def from_hugging_face(
    folder: str | Path, *, mean: Channels = None, std: Channels = None, device: torch.device | str | None = None
) -> HuggingFaceClassifier:
    """An image classifier saved by ``save_pretrained``, in eval mode, with its normalisation inside.

    Nothing is downloaded, unpickled or run from the folder: the weights must be safetensors and the architecture one that
    transformers knows. Resizing is yours: hand over images of the size that the model expects, in [0, 1].

    Args:
        folder: holds ``config.json``, ``model.safetensors`` and, unless mean and std are given, ``preprocessor_config.json``.
        mean: per channel, subtracted from images in [0, 1]; by default what the preprocessor says.
        std: per channel, divides after that.
        device: where the model goes; the CPU by default.

    Example:
        >>> from_hugging_face("no-such-folder")
        Traceback (most recent call last):
        keepcover.errors.InputError: no Hugging Face model at no-such-folder: expected a folder with config.json
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise InputError(f"no Hugging Face model at {folder}: expected a folder with config.json")
    _check_weights(folder)
    _check_settings(_read_json(folder / "config.json"), folder / "config.json")
    transformers = optional("transformers", "Hugging Face models need transformers", "hugging-face")
    if (mean is None) != (std is None):
        raise InputError("expected mean and std together, or neither")
    path = folder / "preprocessor_config.json"
    preprocessor = _read_json(path) if path.is_file() else {}
    normalize = _stated_normalize(preprocessor, folder) if mean is None else _normalize(mean, std)
    # Settings of a wrong kind fail anywhere in transformers, with exceptions of every kind.
    with refusing(f"{folder} is not an image classifier that transformers can load"):
        safe = {"local_files_only": True, "use_safetensors": True, "trust_remote_code": False}
        how = {**safe, "dtype": torch.float32, "output_loading_info": True}
        model, report = transformers.AutoModelForImageClassification.from_pretrained(folder, **how)
        if report["missing_keys"]:
            missing = f"{folder} lacks weights of the classifier ({', '.join(sorted(report['missing_keys'])[:3])} ...)"
            raise InputError(f"{missing}: transformers would fill them at random; fine-tune it first")
        classifier = HuggingFaceClassifier(model, normalize, _image_size(model.config, preprocessor)).eval()
    return classifier.to(device) if device else classifier


def _check_weights(folder: Path) -> None:
    """Refuse weights that are not safetensors files of the folder: an index may name a pickle, or a file anywhere."""
    if not list(folder.glob("*.safetensors")):
        pickles = "other weights are pickles, which run code when they are opened: load those that you trust"
        raise InputError(f"{folder} has no .safetensors file; {pickles}, save_pretrained again")
    if (folder / "adapter_config.json").exists():
        raise InputError(f"{folder} is an adapter of another model; merge them and save_pretrained the result")
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file() or not index.is_file():
        return
    shards = _read_json(index).get("weight_map")
    for shard in shards.values() if isinstance(shards, dict) else [None]:
        if not (isinstance(shard, str) and re.fullmatch(r"[\w-][\w.-]*\.safetensors", shard)):
            raise InputError(f"{index} names {shard!r} as weights; expected .safetensors files beside it")
        if not (folder / shard).is_file():
            raise InputError(f"{index} names {shard!r}, which is not there; copy that file too")


def _check_settings(value: Any, path: Path, key: str = "") -> None:
    """Refuse settings that lead elsewhere, and numbers of which transformers would build without end."""
    if isinstance(value, dict):
        labels = value.get("id2label")
        if labels is not None and (not isinstance(labels, dict) or set(labels) != {str(k) for k in range(len(labels))}):
            raise InputError(f"{path}: expected id2label to name the classes 0, 1, 2, ... in an object")
        for inner, item in value.items():
            if inner in _ELSEWHERE and item:
                raise InputError(f"{path} sets {inner}: its weights are elsewhere or in another form; save plain ones")
            if inner.endswith("attn_implementation") and item not in _ATTENTION:
                raise InputError(f"{path}: expected {inner} to be eager or sdpa, got {item!r}")
            _check_settings(item, path, inner)
    elif isinstance(value, list):
        for item in value:
            _check_settings(item, path, key)
    most = MOST_LABELS if key in _LABELS else MOST_LAYERS if _LAYERS.fullmatch(key) else MOST
    if isinstance(value, int) and not -MOST <= value <= most:
        raise InputError(f"{path}: {key} is {value}, expected at most {most}")
    if key == "id2label" and isinstance(value, dict) and len(value) > MOST_LABELS:
        raise InputError(f"{path}: id2label has {len(value)} entries, expected at most {MOST_LABELS}")


def _read_json(path: Path) -> dict[str, Any]:
    with refusing(f"{path} is not JSON", OSError, ValueError, RecursionError):
        if (size := path.stat().st_size) > MOST_JSON:
            raise InputError(f"{path} has {size} bytes, expected at most {MOST_JSON}")
        content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise InputError(f"expected an object in {path}, got {type(content).__name__}")
    return content


def _numbers(values: Any) -> list[float]:
    """The numbers of a list that holds finite numbers alone; none otherwise."""
    listed: list[Any] = list(values) if isinstance(values, Sequence) and not isinstance(values, str) else [None]
    fine = all(isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) for v in listed)
    return list(map(float, listed)) if fine else []


def _normalize(mean: Any, std: Any, scale: float = 1.0) -> Normalize:
    """The layer, or an error where a value is no number, the lengths differ or a deviation is not positive."""
    means, stds = _numbers(mean), _numbers(std)
    if not 0 < len(means) == len(stds) or min(stds) <= 0:
        raise InputError(f"expected one mean and one positive std per channel, numbers, got mean {mean} and std {std}")
    return Normalize(tuple(value / scale for value in means), tuple(value / scale for value in stds))


def _stated_normalize(preprocessor: dict[str, Any], folder: Path) -> Normalize:
    """For pixels in [0, 1], what the preprocessor states for 8-bit ones that it rescales first."""
    if preprocessor.get("rescale_offset"):
        shifts = f"the preprocessor in {folder} shifts pixels (rescale_offset)"
        raise InputError(f"{shifts}; give mean= and std= for images in [0, 1]")
    plain = preprocessor and not preprocessor.get("do_normalize", True)
    mean, std = ([0.0] * 3, [1.0] * 3) if plain else map(preprocessor.get, ("image_mean", "image_std"))
    if mean is None or std is None:
        lacks = "image_mean and image_std in preprocessor_config.json"
        raise InputError(f"{folder} does not say how to normalise images ({lacks}); give mean= and std=")
    factor = preprocessor.get("rescale_factor", 1 / 255) if preprocessor.get("do_rescale", True) else 1.0
    if not _numbers([factor]) or factor <= 0:
        raise InputError(f"expected rescale_factor in {folder} to be a positive number, got {factor!r}")
    return _normalize(mean, std, 255 * factor)


def _image_size(config: Any, preprocessor: dict[str, Any]) -> tuple[int, int] | None:
    for size in (getattr(config, "image_size", None), preprocessor.get("crop_size"), preprocessor.get("size")):
        sides: Any = (size.get("height"), size.get("width")) if isinstance(size, dict) else size
        match (sides, sides) if isinstance(sides, int) else sides:
            case [int(height), int(width)] if min(height, width) > 0:
                return height, width
    return None
