"""Datasets: official binary files byte for byte, facts about digits, splits that partition, models and data by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from holdfast.datasets import Labelled, cifar, digits
from holdfast.errors import InputError
from holdfast.logits_file import read_arrays
from holdfast.models import CifarResNet, SmallCNN
from holdfast.specs import MODELS, load_data, load_model

FILES = {
    ("cifar10", "train"): ("cifar-10-batches-bin", [f"data_batch_{i}.bin" for i in range(1, 6)]),
    ("cifar10", "test"): ("cifar-10-batches-bin", ["test_batch.bin"]),
    ("cifar100", "train"): ("cifar-100-binary", ["train.bin"]),
    ("cifar100", "test"): ("cifar-100-binary", ["test.bin"]),
}


def records(name: str, count: int, seed: int) -> np.ndarray:
    """Rows of an official file: the label (for CIFAR-100 the coarse one, then the fine one), then 3072 pixels."""
    generator = np.random.default_rng(seed)
    pixels = generator.integers(0, 256, (count, 3072), dtype=np.uint8)
    classes = 10 if name == "cifar10" else 100
    labels = generator.integers(0, classes, (count, 1), dtype=np.uint8)
    head = [labels] if name == "cifar10" else [generator.integers(0, 20, (count, 1), dtype=np.uint8), labels]
    return np.concatenate([*head, pixels], axis=1)


def write(folder: Path, name: str, part: str, count: int = 3) -> np.ndarray:
    inner, files = FILES[name, part]
    (folder / inner).mkdir(exist_ok=True)
    rows = [records(name, count, seed) for seed in range(len(files))]
    for file, content in zip(files, rows):
        content.tofile(folder / inner / file)
    return np.concatenate(rows)


# -- CIFAR -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "part"), list(FILES))
def test_official_files_are_read_byte_for_byte(name: str, part: str, tmp_path: Path) -> None:
    rows = write(tmp_path, name, part)
    skip = 1 if name == "cifar10" else 2
    data = cifar(name, tmp_path, part)
    assert data.name == name
    assert data.labels.tolist() == rows[:, skip - 1].tolist()
    bytes_again = (data.images * 255).round().to(torch.uint8).numpy()
    assert np.array_equal(bytes_again.reshape(len(rows), -1), rows[:, skip:])
    assert float(data.images[1, 2, 3, 4]) == pytest.approx(
        rows[1, skip + 2 * 1024 + 3 * 32 + 4] / 255
    )  # channel, row, column
    inside = cifar(name, tmp_path / FILES[name, part][0], part)  # the folder itself will do
    assert torch.equal(inside.images, data.images)


def test_class_names(tmp_path: Path) -> None:
    write(tmp_path, "cifar10", "test")
    write(tmp_path, "cifar100", "test")
    assert cifar("cifar10", tmp_path).class_names[3] == "cat"
    assert cifar("cifar100", tmp_path).class_names[7] == "class 7"
    names = [f"thing_{k}" for k in range(100)]
    (tmp_path / "cifar-100-binary" / "fine_label_names.txt").write_text("\n".join(names) + "\n\n")
    assert list(cifar("cifar100", tmp_path).class_names) == names


def test_damaged_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"test_batch.bin is missing; extract the binary version of cifar10"):
        cifar("cifar10", tmp_path)
    write(tmp_path, "cifar10", "test")
    path = tmp_path / "cifar-10-batches-bin" / "test_batch.bin"
    content = path.read_bytes()
    for damaged in (content[:-1], content + b"\x00", content[:100], b""):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=rf"has {len(damaged)} bytes, not a multiple of 3073; it is damaged"):
            cifar("cifar10", tmp_path)
    path.write_bytes(bytes([10]) + content[1:])
    with pytest.raises(InputError, match="holds a label 10, cifar10 has 10 classes; is it the other CIFAR"):
        cifar("cifar10", tmp_path)
    write(tmp_path, "cifar100", "test")
    fine = tmp_path / "cifar-100-binary" / "test.bin"
    raw = bytearray(fine.read_bytes())
    raw[1] = 200
    fine.write_bytes(bytes(raw))
    with pytest.raises(InputError, match="holds a label 200, cifar100 has 100 classes"):
        cifar("cifar100", tmp_path)
    for name, part in (("cifar11", "test"), ("cifar10", "validation")):
        with pytest.raises(InputError, match="cifar10 or cifar100 and train or test"):
            cifar(name, tmp_path, part)


# -- digits ------------------------------------------------------------------------------------------------------------


def test_facts_about_digits() -> None:
    """1797 images of 8 x 8, ten classes of 174 to 183 images, sixteen grey levels above zero, the first one a zero."""
    data = digits()
    assert len(data) == 1797
    counts = torch.bincount(data.labels)
    assert (len(counts), int(counts.min()), int(counts.max())) == (10, 174, 183)
    levels = (16 * data.images).unique()
    assert levels.tolist() == list(range(17))
    assert (data.class_names[int(data.labels[0])], data.images.shape[1:]) == ("zero", (1, 8, 8))
    assert [data.class_names[k] for k in (0, 1, 9)] == ["zero", "one", "nine"]


# -- splits ------------------------------------------------------------------------------------------------------------


def numbered(n: int) -> Labelled:
    images = torch.arange(n, dtype=torch.float32).view(n, 1, 1, 1)
    return Labelled("numbers", images, torch.arange(n), tuple(map(str, range(n))))


@pytest.mark.parametrize(
    ("sizes", "lengths"), [((30, 20, -1), (30, 20, 50)), ((30, 20), (30, 20)), ((-1,), (100,)), ((100,), (100,))]
)
def test_splits_are_disjoint_and_keep_labels_with_images(sizes: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    data = numbered(100)
    parts = data.split(*sizes, seed=3)
    assert tuple(len(part) for part in parts) == lengths
    found = torch.cat([part.labels for part in parts])
    assert len(found.unique()) == len(found)
    if sum(lengths) == 100:
        assert found.sort().values.tolist() == list(range(100))
    for part in parts:
        assert torch.equal(part.images.flatten().long(), part.labels)
        assert (part.name, part.class_names) == (data.name, data.class_names)
    assert not torch.equal(found, found.sort().values)  # shuffled: equal with probability 1 / 50!


def test_splits_are_reproducible_and_seeds_differ() -> None:
    one, same, other = (numbered(100).split(50, -1, seed=seed)[0].labels for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert set(one.tolist()) != set(other.tolist())


@pytest.mark.parametrize("sizes", [(90, 20), (101,), (101, -1)])
def test_splits_larger_than_the_data_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="100"):
        numbered(100).split(*sizes)


def test_indexing_and_pairs() -> None:
    data = numbered(10)
    assert data[torch.tensor([7, 2])].labels.tolist() == [7, 2]
    assert data[3:5].labels.tolist() == [3, 4]
    assert data.pair[0] is data.images
    assert data.pair[1] is data.labels


# -- by name -----------------------------------------------------------------------------------------------------------


def write_arrays(path: Path, **arrays: Any) -> Path:
    if path.suffix == ".npz":
        np.savez(path, **{key: np.asarray(value) for key, value in arrays.items()})
    else:
        save_file({key: torch.as_tensor(value) for key, value in arrays.items()}, path)
    return path


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_data_from_a_file(suffix: str, tmp_path: Path) -> None:
    images, labels = torch.rand(6, 3, 4, 4), torch.tensor([0, 1, 2, 2, 1, 0])
    path = write_arrays(tmp_path / f"own{suffix}", images=images, labels=labels)
    data = load_data(str(path))
    assert torch.equal(data.images, images)
    assert torch.equal(data.labels, labels)
    assert (data.name, data.class_names) == ("own", ("class 0", "class 1", "class 2"))


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize(
    ("arrays", "match"),
    [
        ({"images": torch.rand(2, 3, 4, 4)}, "has no array 'labels'; it holds images"),
        ({"labels": torch.tensor([0, 1])}, "has no array 'images'; it holds labels"),
        ({"images": torch.rand(2, 4, 4), "labels": torch.tensor([0, 1])}, r"\[n, channels, height, width\], got shape \(2, 4, 4\)"),
        ({"images": torch.zeros(2, 1, 4, 4).byte(), "labels": torch.tensor([0, 1])}, "got torch.uint8; divide by 255 and save again"),
        ({"images": torch.rand(2, 1, 4, 4), "labels": torch.tensor([0, 1, 1])}, "expected 2 labels"),
        ({"images": torch.rand(2, 1, 4, 4), "labels": torch.tensor([0.0, 1.0])}, "integer class labels"),
        ({"images": torch.rand(2, 1, 4, 4), "labels": torch.tensor([0, -1])}, "labels between 0 and"),
    ],
)  # fmt: skip
def test_bad_data_files_are_refused(arrays: dict[str, Any], match: str, suffix: str, tmp_path: Path) -> None:
    path = write_arrays(tmp_path / f"own{suffix}", **arrays)
    with pytest.raises(InputError, match=match):
        load_data(str(path))


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("damage", ["missing", "empty", "garbage", "truncated", "zip-header", "flipped"])
def test_damaged_array_files_are_refused(damage: str, suffix: str, tmp_path: Path) -> None:
    path = write_arrays(tmp_path / f"own{suffix}", logits=torch.rand(50, 2, 3), labels=torch.zeros(50).long())
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "flipped" and suffix == ".npz":
        spot = content.index(b"logits.npy") + 200  # inside the stored numbers: the archive's own checksum notices
        path.write_bytes(content[:spot] + bytes([content[spot] ^ 255]) + content[spot + 1 :])
    else:
        short = content[: len(content) // 2]
        broken = {"empty": b"", "garbage": b"garbage" * 9, "truncated": short, "zip-header": b"PK\x03\x04rest"}
        path.write_bytes(broken.get(damage, short))
    with pytest.raises(InputError, match=r"no file at|not a readable safetensors or npz file") as caught:
        read_arrays(path, "logits", "labels")
    assert "\n" not in str(caught.value)


def test_pickled_arrays_are_never_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", logits=np.array([{"a": 1}], dtype=object), labels=np.zeros(1))
    with pytest.raises(InputError, match="not a readable safetensors or npz file"):
        read_arrays(tmp_path / "own.npz", "logits", "labels")
    np.savez(tmp_path / "text.npz", logits=np.array(["a", "b"]))
    with pytest.raises(InputError, match="not a readable"):
        read_arrays(tmp_path / "text.npz", "logits")


def test_data_by_name(tmp_path: Path) -> None:
    assert torch.equal(load_data("digits").images, digits().images)
    rows = write(tmp_path, "cifar10", "test")
    assert load_data("cifar10", tmp_path).labels.tolist() == rows[:, 0].tolist()
    with pytest.raises(InputError, match="cifar10 needs the folder of its official files: --data-dir DIR"):
        load_data("cifar10")
    with pytest.raises(InputError, match=r"digits, cifar10, cifar100 or a .npz or .safetensors file, got 'mnist'"):
        load_data("mnist")


def test_models_by_name(tmp_path: Path) -> None:
    assert isinstance(load_model("small-cnn", classes=3), SmallCNN)
    assert set(MODELS) == {"small-cnn", "cifar-resnet20", "cifar-resnet56", "cifar-resnet110"}
    source = SmallCNN(classes=3)
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    model = load_model("small-cnn", tmp_path / "w.safetensors", classes=3, device="cpu")
    images = torch.rand(2, 1, 8, 8)
    assert isinstance(model, nn.Module)
    assert torch.equal(model(images), source.eval()(images))
    resnet = load_model("cifar-resnet20", classes=7)
    assert isinstance(resnet, CifarResNet)
    assert resnet.fc.out_features == 7
    assert isinstance(load_model("torch.nn:Identity"), nn.Identity)


@pytest.mark.parametrize(
    ("spec", "weights", "match"),
    [
        ("resnet", None, r"a model among small-cnn, .* or package.module:function, got 'resnet'"),
        ("os.path", None, "package.module:function"),
        ("no.such.module:make", None, r"cannot find 'no.such.module:make'.*is it on PYTHONPATH\?"),
        ("torch.nn:NoSuchThing", None, "cannot find"),
        ("torch:get_num_threads", None, "must return a model, a callable images -> logits; it returned int"),
        ("torch.nn:Identity", "w.safetensors", "weights are for built-in models"),
        ("small-cnn", "nothing.safetensors", "no weights at"),
    ],
)  # fmt: skip
def test_bad_model_names_are_refused(spec: str, weights: str | None, match: str) -> None:
    with pytest.raises(InputError, match=match):
        load_model(spec, weights)
