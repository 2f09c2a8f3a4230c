"""Hugging Face image classifiers from a local folder: same logits, pixel units, nothing downloaded, unpickled or invented."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import keepcover
from keepcover.adapters import HuggingFaceClassifier, from_hugging_face
from keepcover.errors import InputError
from keepcover.specs import load_model

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
PREPROCESSOR = {
    "image_mean": MEAN,
    "image_std": STD,
    "do_normalize": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
}


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers", reason="needs transformers (160 MB): make hugging-face-test installs it")


@pytest.fixture(scope="module")
def original(transformers: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        image_size=8,
        patch_size=4,
        num_channels=3,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        id2label={0: "cat", 1: "dog", 2: "eel"},
        label2id={"cat": 0, "dog": 1, "eel": 2},
    )
    return transformers.ViTForImageClassification(config).eval()


@pytest.fixture(scope="module")
def saved(original: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vit")
    original.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def preprocess(folder: Path, **changes: Any) -> None:
    (folder / "preprocessor_config.json").write_text(json.dumps({**PREPROCESSOR, **changes}))


@pytest.mark.parametrize(
    ("changes", "scale", "mean", "std"),
    [
        ({}, 1.0, MEAN, STD),
        ({"rescale_factor": 1 / 127.5}, 2.0, MEAN, STD),
        ({"do_rescale": False}, 255.0, MEAN, STD),
        ({"do_normalize": False, "image_mean": None, "image_std": None}, 1.0, (0.0,) * 3, (1.0,) * 3),
    ],
)
def test_the_logits_are_those_of_the_preprocessed_image(
    folder: Path, original: Any, changes: dict[str, Any], scale: float, mean: tuple[float, ...], std: tuple[float, ...]
) -> None:
    preprocess(folder, **changes)
    images = torch.rand(4, 3, 8, 8)
    by_hand = (scale * images - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    with torch.inference_mode():
        expected = original(pixel_values=by_hand).logits
        found = from_hugging_face(folder)(images)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_what_the_folder_says_is_known(saved: Path) -> None:
    model = from_hugging_face(saved)
    assert isinstance(model, HuggingFaceClassifier)
    assert model.class_names == ("cat", "dog", "eel")
    assert model.image_size == (8, 8)
    assert not any(module.training for module in model.modules())
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_half_precision_weights_run_in_float32(folder: Path, original: Any, transformers: Any) -> None:
    """transformers would keep the file's dtype, and the certified function must not depend on that."""
    transformers.ViTForImageClassification.from_pretrained(folder, dtype=torch.float16).save_pretrained(folder)
    assert {p.dtype for p in from_hugging_face(folder).parameters()} == {torch.float32}


def test_calibrate_save_and_load(saved: Path, tmp_path: Path) -> None:
    """Weights and normalisation are the identity of a saved predictor."""
    model = from_hugging_face(saved)
    images = torch.rand(200, 3, 8, 8)
    labels = model(images).argmax(dim=1)
    predictor = keepcover.calibrate(
        model, (images, labels), epsilon=0.01, sigma=0.02, draws=2, class_names=model.class_names
    )
    predictor.save(tmp_path / "p.safetensors")
    again = keepcover.load(tmp_path / "p.safetensors", from_hugging_face(saved))
    assert {name for names in again.predict(images[:20]) for name in names} <= {"cat", "dog", "eel"}
    with pytest.raises(InputError, match="the model differs from the one calibrated"):
        keepcover.load(tmp_path / "p.safetensors", from_hugging_face(saved, mean=(0.1,) * 3, std=(0.2,) * 3))


def test_the_command_line_takes_the_folder(saved: Path) -> None:
    model = load_model(str(saved))
    assert isinstance(model, HuggingFaceClassifier)
    assert model.normalize.mean.flatten().tolist() == pytest.approx(MEAN)


def test_given_normalisation_wins(folder: Path) -> None:
    (folder / "preprocessor_config.json").unlink()
    model = from_hugging_face(folder, mean=(0.5,) * 3, std=(0.1,) * 3)
    assert model.normalize.std.flatten().tolist() == pytest.approx([0.1] * 3)


def damage(name: str, folder: Path) -> dict[str, Any]:
    """Break the folder in one way; the options to load it with."""
    config = json.loads((folder / "config.json").read_text())
    if name == "no config":
        (folder / "config.json").unlink()
    elif name == "a pickle":
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    elif name == "no preprocessor":
        (folder / "preprocessor_config.json").unlink()
    elif name == "not JSON":
        (folder / "preprocessor_config.json").write_text("{")
    elif name == "a list":
        (folder / "preprocessor_config.json").write_text("[]")
    elif name == "an offset":
        preprocess(folder, rescale_offset=True)
    elif name == "mean alone":
        return {"mean": MEAN}
    elif name == "unknown architecture":
        (folder / "config.json").write_text(json.dumps({**config, "model_type": "no-such-model"}))
    elif name == "own code":
        (folder / "config.json").write_text(
            json.dumps(
                {
                    **config,
                    "model_type": "mine",
                    "auto_map": {"AutoModelForImageClassification": "mine.Mine", "AutoConfig": "mine.C"},
                }
            )
        )
        (folder / "mine.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    elif name == "another size":
        (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 32}))
    elif name == "cut off":
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
    return {}


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("no config", "expected a folder with config.json"),
        ("a pickle", r"no \.safetensors file; other weights are pickles"),
        ("no preprocessor", "does not say how to normalise"),
        ("not JSON", "is not JSON"),
        ("a list", "expected an object"),
        ("an offset", "rescale_offset"),
        ("mean alone", "mean and std together"),
        ("unknown architecture", "not an image classifier that transformers can load"),
        ("own code", "not an image classifier that transformers can load"),
        ("another size", "not an image classifier that transformers can load"),
        ("cut off", "not an image classifier that transformers can load"),
    ],
)
def test_folders_that_will_not_do(folder: Path, name: str, match: str) -> None:
    options = damage(name, folder)
    with pytest.raises(InputError, match=match):
        from_hugging_face(folder, **options)
    assert not (folder / "ran").exists()


def test_a_backbone_without_a_head_is_refused(folder: Path, original: Any) -> None:
    """transformers warns and fills the head at random; sets from that would be valid and meaningless."""
    original.vit.save_pretrained(folder)
    with pytest.raises(InputError, match="lacks weights of the classifier"):
        from_hugging_face(folder)


@pytest.mark.parametrize("shape", [(2, 1, 8, 8), (2, 3, 8), (2, 3)])
def test_images_of_another_shape_are_refused(saved: Path, shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"takes images \[n, 3, height, width\]"):
        from_hugging_face(saved)(torch.zeros(shape))


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r"pip install '.\[hugging-face\]'"):
        from_hugging_face(tmp_path)


def test_gradients_reach_the_image(saved: Path) -> None:
    """So that audits attack it like any module."""
    images = torch.rand(2, 3, 8, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(from_hugging_face(saved)(images).sum(), images)
    assert gradient.abs().max() > 0
