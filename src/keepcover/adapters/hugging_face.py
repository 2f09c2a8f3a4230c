"""Image classifiers of Hugging Face transformers, from a local folder, as the images -> logits that keepcover runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from keepcover.errors import InputError
from keepcover.models.small_cnn import Normalize


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
        self.class_names = tuple(str(config.id2label[k]) for k in range(config.num_labels))

    def forward(self, images: Tensor) -> Tensor:
        channels = len(self.normalize.mean)
        if images.ndim != 4 or images.shape[1] != channels:
            raise InputError(f"this model takes images [n, {channels}, height, width], got shape {tuple(images.shape)}")
        return self.model(pixel_values=self.normalize(images)).logits


def from_hugging_face(
    folder: str | Path,
    *,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    device: torch.device | str | None = None,
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
    if not list(folder.glob("*.safetensors")):
        raise InputError(
            f"{folder} has no .safetensors file; other weights are pickles, which run code when they are opened: load them "
            "where you trust them and save_pretrained again"
        )
    try:
        from transformers import AutoModelForImageClassification  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise InputError("Hugging Face models need transformers: pip install '.[hugging-face]' in a checkout") from None
    if (mean is None) != (std is None):
        raise InputError("expected mean and std together, or neither")
    preprocessor = _preprocessor(folder)
    if mean is None or std is None:
        mean, std = _normalisation(preprocessor, folder)
    try:
        model, report = AutoModelForImageClassification.from_pretrained(
            folder,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            dtype=torch.float32,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(f"{folder} is not an image classifier that transformers can load: {reason}") from None
    if report["missing_keys"]:
        missing = ", ".join(sorted(report["missing_keys"])[:3])
        raise InputError(
            f"{folder} lacks weights of the classifier ({missing} ...): transformers would fill them at random; fine-tune it first"
        )
    classifier = HuggingFaceClassifier(
        model, Normalize(tuple(mean), tuple(std)), _image_size(model.config, preprocessor)
    ).eval()
    return classifier.to(device) if device else classifier


def _preprocessor(folder: Path) -> dict[str, Any]:
    path = folder / "preprocessor_config.json"
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"expected an object in {path}, got {type(content).__name__}")
    return content


def _normalisation(preprocessor: dict[str, Any], folder: Path) -> tuple[list[float], list[float]]:
    """Mean and deviation for pixels in [0, 1], where the preprocessor means 8-bit ones that it rescales first."""
    if preprocessor.get("rescale_offset"):
        raise InputError(
            f"the preprocessor in {folder} shifts pixels (rescale_offset); give mean= and std= for images in [0, 1]"
        )
    mean, std = preprocessor.get("image_mean"), preprocessor.get("image_std")
    if preprocessor and not preprocessor.get("do_normalize", True):
        mean, std = [0.0] * 3, [1.0] * 3
    if mean is None or std is None:
        raise InputError(
            f"{folder} does not say how to normalise images (image_mean and image_std in preprocessor_config.json); give "
            "mean= and std="
        )
    scale = 255 * float(preprocessor.get("rescale_factor", 1 / 255)) if preprocessor.get("do_rescale", True) else 255.0
    return [m / scale for m in mean], [s / scale for s in std]


def _image_size(config: Any, preprocessor: dict[str, Any]) -> tuple[int, int] | None:
    for size in (getattr(config, "image_size", None), preprocessor.get("crop_size"), preprocessor.get("size")):
        if isinstance(size, int):
            return size, size
        if isinstance(size, dict) and {"height", "width"} <= size.keys():
            return int(size["height"]), int(size["width"])
        if isinstance(size, list | tuple) and len(size) == 2:
            return int(size[0]), int(size[1])
    return None
