"""Hugging Face image classifiers from a local folder: same logits, pixel units, nothing downloaded, unpickled or invented."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

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
    known, found = (one.predict(images[:20], seed=1) for one in (predictor, again))
    assert torch.equal(found.mask, known.mask)
    assert {name for names in found for name in names} <= {"cat", "dog", "eel"}
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


# -- folders of unknown origin, with a stand-in for transformers --------------------------------------------------------


class Stub(nn.Module):
    """What from_pretrained returns, as far as keepcover looks at it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.config = SimpleNamespace(
            **{"id2label": {0: "cat", 1: "dog"}, "num_labels": 2, "image_size": 8, **settings}
        )


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that transformers was asked to open."""
    folders: list[Path] = []

    def from_pretrained(folder: Path, **_: Any) -> tuple[nn.Module, dict[str, Any]]:
        folders.append(folder)
        settings = json.loads((folder / "config.json").read_text())
        if "fail" in settings:
            raise {"TypeError": TypeError, "AttributeError": AttributeError, "MemoryError": MemoryError}[
                settings["fail"]
            ]("odd\nsettings")
        return Stub(**json.loads(settings.get("given", "{}"))), {"missing_keys": []}

    model = SimpleNamespace(from_pretrained=from_pretrained)
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoModelForImageClassification=model))
    return folders


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A folder whose weights come in two files and an index."""
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        save_file({"layer.weight": torch.zeros(1, 1)}, tmp_path / name)
    sharded(tmp_path, {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"})
    (tmp_path / "config.json").write_text(json.dumps({"id2label": {"0": "cat", "1": "dog"}, "hidden_size": 16}))
    preprocess(tmp_path)
    return tmp_path


def sharded(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_a_usual_folder_is_opened(plain: Path, opened: list[Path]) -> None:
    assert from_hugging_face(plain).class_names == ("cat", "dog")
    (plain / "model.safetensors.index.json").unlink()
    (plain / "model-00001-of-00002.safetensors").rename(plain / "model.safetensors")
    assert from_hugging_face(plain).image_size == (8, 8)
    assert opened == [plain, plain]


@pytest.mark.parametrize(
    "weight_map",
    [
        {"a": "model-00001-of-00002.safetensors", "b": "pytorch_model.bin"},
        {"a": "../elsewhere.safetensors"},
        {"a": "/etc/elsewhere.safetensors"},
        {"a": "sub/model.safetensors"},
        {"a": "model-00003-of-00002.safetensors"},
        {"a": "model.safetensors\0"},
        {"a": 3},
        {"a": None},
        ["model-00001-of-00002.safetensors"],
        "model-00001-of-00002.safetensors",
        None,
    ],
)
def test_an_index_names_safetensors_of_its_own_folder(weight_map: Any, plain: Path, opened: list[Path]) -> None:
    """transformers would open a .bin, a pickle, wherever the index says."""
    (plain / "pytorch_model.bin").write_bytes(b"")
    sharded(plain, weight_map)
    with pytest.raises(InputError, match=r"expected \.safetensors files beside it|which is not there") as caught:
        from_hugging_face(plain)
    assert "\n" not in str(caught.value)
    assert opened == []


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"num_labels": 10**9}, "num_labels is 1000000000, expected at most 100000"),
        ({"vision_config": {"num_labels": 10**9}}, "num_labels is 1000000000"),
        ({"label_config": [{"num_classes": 10**6}]}, "num_classes is 1000000"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000, expected at most 1000"),
        ({"depths": [2, 2, 10**5, 2]}, "depths is 100000"),
        ({"hidden_size": 10**12}, "hidden_size is 1000000000000"),
        ({"id2label": {str(k): "x" for k in range(100_001)}}, "id2label has 100001 entries"),
        ({"id2label": ["cat", "dog"]}, "expected id2label to name the classes 0, 1, 2"),
        ({"id2label": {"0": "cat", "2": "dog"}}, "expected id2label to name the classes 0, 1, 2"),
        ({"id2label": {"a": "cat"}}, "expected id2label to name the classes 0, 1, 2"),
        ({"transformers_weights": "adapter_model.bin"}, "sets transformers_weights"),
        ({"quantization_config": {"quant_method": "x"}}, "sets quantization_config"),
        ({"backbone_config": {"use_pretrained_backbone": True}}, "sets use_pretrained_backbone"),
        ({"_attn_implementation": "somebody/kernels"}, "to be eager or sdpa"),
        ({"name": "x" * (1 << 22)}, "bytes, expected at most"),
    ],
)
def test_settings_without_measure_are_refused(
    settings: dict[str, Any], match: str, plain: Path, opened: list[Path]
) -> None:
    (plain / "config.json").write_text(json.dumps(settings))
    with pytest.raises(InputError, match=match):
        from_hugging_face(plain)
    assert opened == []


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "{", "[]", "3", "null", '{"a": ' * 5000, '{"num_labels": 1' + "0" * 5000 + "}"]
)
@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json", "model.safetensors.index.json"])
def test_files_that_are_no_settings_are_refused(text: str, name: str, plain: Path, opened: list[Path]) -> None:
    (plain / name).write_text(text)
    with pytest.raises(InputError, match=f"{name}.* is not JSON|expected an object in .*{name}") as caught:
        from_hugging_face(plain)
    assert "\n" not in str(caught.value)
    assert opened == []


@pytest.mark.parametrize(
    "settings",
    [
        {"fail": "TypeError"},
        {"fail": "AttributeError"},
        {"fail": "MemoryError"},
        {"given": '{"id2label": 3}'},
        {"given": '{"id2label": {"1": "a"}}'},
    ],
)
def test_odd_settings_fail_in_one_line(settings: dict[str, Any], plain: Path, opened: list[Path]) -> None:
    (plain / "config.json").write_text(json.dumps(settings))
    with pytest.raises(InputError, match=r"is not an image classifier that transformers can load \(") as caught:
        from_hugging_face(plain)
    assert "\n" not in str(caught.value)
    assert opened == [plain]


@pytest.mark.parametrize(
    "changes",
    [
        {"image_mean": "0.5"},
        {"image_mean": 0.5},
        {"image_mean": ["a", "b", "c"]},
        {"image_std": [0.1, 0.1]},
        {"image_std": [0, 1, 1]},
        {"image_std": [-1, 1, 1]},
        {"image_mean": [None] * 3},
        {"image_mean": [], "image_std": []},
        {"image_mean": {"r": 1}},
        {"rescale_factor": "x"},
        {"rescale_factor": 0},
        {"rescale_factor": [1]},
        {"rescale_factor": None},
        {"image_std": [float("nan")] * 3},
    ],
)
def test_normalisations_that_are_none_are_refused(changes: dict[str, Any], plain: Path, opened: list[Path]) -> None:
    preprocess(plain, **changes)
    with pytest.raises(
        InputError, match=r"one mean and one positive std per channel|to be a positive number"
    ) as caught:
        from_hugging_face(plain)
    assert "\n" not in str(caught.value)
    assert opened == []


@pytest.mark.parametrize(
    "size", ["8", {"height": "x", "width": 2}, {"shortest_edge": 8}, [8], [8, None], -3, {"height": None}]
)
def test_sizes_that_are_none_are_passed_over(size: Any, plain: Path, opened: list[Path]) -> None:
    preprocess(plain, size=size)
    (plain / "config.json").write_text(json.dumps({"given": json.dumps({"image_size": size})}))
    assert from_hugging_face(plain).image_size is None


def test_an_adapter_is_refused(plain: Path, opened: list[Path]) -> None:
    """It names the folder or the address of another model, which transformers would open."""
    (plain / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "elsewhere"}))
    with pytest.raises(InputError, match="is an adapter of another model"):
        from_hugging_face(plain)
    assert opened == []
