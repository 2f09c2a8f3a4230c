"""Datasets: every official form byte for byte, facts about digits, splits that partition, models and data by name."""

from __future__ import annotations

import gzip
import hashlib
import io
import runpy
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from keepcover.data import Labelled, cifar, digits, idx, known
from keepcover.data.archive import read_members
from keepcover.data.download import complete_forms, inventory
from keepcover.errors import InputError
from keepcover.models import CifarResNet, SmallCNN
from keepcover.specs import load_data, load_model
from keepcover.store.logits_file import read_arrays
from tests.data.test_plain_pickle import python2

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


def test_class_names_are_always_there(tmp_path: Path) -> None:
    write(tmp_path, "cifar10", "test")
    write(tmp_path, "cifar100", "test")
    assert cifar("cifar10", tmp_path).class_names[3] == "cat"
    names = cifar("cifar100", tmp_path).class_names
    assert (len(names), len(set(names)), list(names) == sorted(names)) == (100, 100, True)
    assert (names[0], names[52], names[99]) == ("apple", "oak_tree", "worm")


def test_damaged_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"found no cifar10 at .* cifar-10-python.tar.gz; `keepcover data cifar10 --out DIR`"
    ):
        cifar("cifar10", tmp_path)
    (tmp_path / "cifar-10-batches-bin").mkdir()
    with pytest.raises(
        InputError, match=r"cifar-10-batches-bin/test_batch.bin is missing; extract the official archive"
    ):
        cifar("cifar10", tmp_path)
    write(tmp_path, "cifar10", "test")
    write(tmp_path, "cifar10", "train")
    (tmp_path / "cifar-10-batches-bin" / "data_batch_4.bin").unlink()
    with pytest.raises(InputError, match=r"data_batch_4.bin is missing"):
        cifar("cifar10", tmp_path, "train")
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


# -- every form of CIFAR -----------------------------------------------------------------------------------------------


def batches(name: str, part: str) -> dict[str, dict[str, Any]]:
    """The records of ``write`` as the python version has them, file by file."""
    skip = 1 if name == "cifar10" else 2
    found = {}
    for seed, file in enumerate(FILES[name, part][1]):
        rows = records(name, 3, seed)
        labels = {"labels": rows[:, 0].tolist()}
        if name == "cifar100":
            labels = {"coarse_labels": rows[:, 0].tolist(), "fine_labels": rows[:, 1].tolist()}
        pixels = rows[:, skip:]
        found[file.removesuffix(".bin")] = {
            "batch_label": "a batch",
            **labels,
            "data": pixels,
            "filenames": ["a", "b", "c"],
        }
    return found


def write_python(folder: Path, name: str, **changes: Any) -> None:
    inner = folder / known.SOURCES[name]["python"].folder
    inner.mkdir(parents=True, exist_ok=True)
    for part in ("train", "test"):
        for file, content in batches(name, part).items():
            (inner / file).write_bytes(python2({**content, **changes}))


def tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as packed:
        for name, content in members.items():
            about = tarfile.TarInfo(name)
            about.size = len(content)
            packed.addfile(about, io.BytesIO(content))
    return path


def pack(folder: Path, name: str, form: str, **options: Any) -> Path:
    """An archive with the official name and layout, of files written here."""
    source = known.SOURCES[name][form]
    inner = folder / "unpacked" / source.folder
    inner.mkdir(parents=True, exist_ok=True)
    if form == "python":
        write_python(folder / "unpacked", name)
    else:
        for part in ("train", "test"):
            write(folder / "unpacked", name, part)
    members = {f"{source.folder}/{file.name}": (inner / file.name).read_bytes() for file in source.inside}
    return tar(folder / source.files[0].name, {f"{source.folder}/readme.html": b"text", **members})


def make_official(monkeypatch: pytest.MonkeyPatch, path: Path, name: str, form: str) -> None:
    """Let a file written here count as the one its authors published."""
    source = known.SOURCES[name][form]
    md5 = hashlib.md5(path.read_bytes()).hexdigest()
    file = known.File(source.files[0].name, md5, path.stat().st_size)
    monkeypatch.setitem(known.SOURCES[name], form, replace(source, files=(file,)))


def same(a: Labelled, b: Labelled) -> bool:
    tensors = torch.equal(a.images, b.images) and torch.equal(a.labels, b.labels) and a.labels.dtype == b.labels.dtype
    return tensors and (a.name, a.class_names) == (b.name, b.class_names)


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
@pytest.mark.parametrize("part", ["train", "test"])
def test_every_form_gives_the_same_tensors(
    name: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / form for form in ("binary", "python", "binary-archive", "python-archive")]
    for folder in folders:
        folder.mkdir()
    write(folders[0], name, part)
    expected = cifar(name, folders[0], part)
    write_python(folders[1], name)
    assert same(cifar(name, folders[1], part), expected)
    assert same(cifar(name, folders[1] / known.SOURCES[name]["python"].folder, part), expected)
    for form, folder in (("binary", folders[2]), ("python", folders[3])):
        path = pack(folder, name, form)
        make_official(monkeypatch, path, name, form)
        before = sorted(folder.rglob("*"))
        assert same(cifar(name, folder, part), expected)
        assert same(cifar(name, path, part), expected)
        assert sorted(folder.rglob("*")) == before  # nothing extracted
        renamed = path.rename(folder / "renamed")
        assert same(cifar(name, renamed, part), expected)


def test_a_complete_form_is_preferred_to_an_unfinished_one(tmp_path: Path) -> None:
    write(tmp_path, "cifar10", "train")
    (tmp_path / "cifar-10-batches-bin" / "data_batch_1.bin").unlink()
    write_python(tmp_path, "cifar10")
    assert len(cifar("cifar10", tmp_path, "train")) == 15


def test_archives_are_verified(tmp_path: Path) -> None:
    path = pack(tmp_path, "cifar10", "binary")
    with pytest.raises(
        InputError, match=r"cifar-10-binary.tar.gz has the MD5 sum .*, the official file has c32a1d4.*verify=False"
    ):
        cifar("cifar10", tmp_path)
    with pytest.raises(InputError, match="the official file has c32a1d4"):
        cifar("cifar10", path)
    assert len(cifar("cifar10", tmp_path, verify=False)) == 3
    pack(tmp_path, "cifar10", "python").rename(path)
    assert len(cifar("cifar10", tmp_path, verify=False)) == 3  # whatever it is called


def test_another_official_archive_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = pack(tmp_path, "cifar100", "python")
    make_official(monkeypatch, path, "cifar100", "python")
    with pytest.raises(InputError, match=r"it is cifar-100-python\.tar\.gz of cifar100"):
        cifar("cifar10", path)
    with pytest.raises(
        InputError, match=r"does not hold cifar-10-batches-bin/test_batch.bin or .*is it the archive of cifar10"
    ):
        cifar("cifar10", path, verify=False)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"data": np.zeros((3, 3071), np.uint8)}, r"expected 'data' to be a uint8 array \[n, 3072\]"),
        ({"data": np.zeros(9216, np.uint8)}, "expected 'data'"),
        ({"data": np.zeros((0, 3072), np.uint8), "labels": []}, "expected 'data'"),
        ({"data": "pixels"}, "expected 'data'"),
        ({"labels": [1, 2]}, "expected 'labels' to be a list of 3 integers"),
        ({"labels": (1, 2, 3)}, "expected 'labels'"),
        ({"labels": [1, 2, 3.0]}, "expected 'labels'"),
        ({"labels": [1, 2, True]}, "expected 'labels'"),
        ({"labels": [1, 2, 10]}, "holds a label 10, cifar10 has 10 classes"),
        ({"labels": [1, 2, -1]}, "holds a label -1"),
    ],
)
def test_python_files_that_are_not_what_they_should_be(changes: dict[str, Any], match: str, tmp_path: Path) -> None:
    write_python(tmp_path, "cifar10", **changes)
    with pytest.raises(InputError, match=match) as caught:
        cifar("cifar10", tmp_path)
    assert "test_batch" in str(caught.value)


def test_python_files_of_the_other_kind(tmp_path: Path) -> None:
    inner = tmp_path / "cifar-10-batches-py"
    inner.mkdir()
    for content, match in (
        (python2([1, 2]), "holds a list, expected a dict"),
        (python2(batches("cifar100", "test")["test"]), "has no entry 'labels'; is it the other CIFAR"),
        (b"cos\nsystem\n(S'true'\ntR.", "test_batch: the global os.system at byte 0 is refused"),
    ):
        (inner / "test_batch").write_bytes(content)
        with pytest.raises(InputError, match=match):
            cifar("cifar10", tmp_path)


# -- archives ----------------------------------------------------------------------------------------------------------

MEMBER = "cifar-10-batches-bin/test_batch.bin"
MOST = 1 << 28


def test_members_are_compared_by_name_and_nothing_is_followed(tmp_path: Path) -> None:
    """Names that climb out of a folder, links to secrets and sparse files of any length come to nothing."""
    (tmp_path / "secret").write_bytes(b"secret")
    path = tmp_path / "a.tar.gz"
    with tarfile.open(path, "w:gz", format=tarfile.GNU_FORMAT) as packed:
        for name in (f"../{MEMBER}", f"/{MEMBER}", f"x/../{MEMBER}", "test_batch.bin"):
            about = tarfile.TarInfo(name)
            about.size = 4
            packed.addfile(about, io.BytesIO(b"evil"))
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE):
            about = tarfile.TarInfo(MEMBER)
            about.type, about.linkname = kind, str(tmp_path / "secret")
            packed.addfile(about)
    assert read_members(path, {MEMBER}.__contains__, MOST) == {}
    assert sorted(item.name for item in tmp_path.iterdir()) == ["a.tar.gz", "secret"]


def test_a_sparse_member_is_passed_over(tmp_path: Path) -> None:
    """512 bytes that claim to be eight gigabytes of zeros."""
    about = tarfile.TarInfo(MEMBER)
    about.type = tarfile.GNUTYPE_SPARSE
    header = bytearray(about.tobuf(tarfile.GNU_FORMAT))
    header[483:495] = b"77777777777\x00"
    header[148:156] = b"%06o\x00 " % (sum(header[:148]) + 8 * 32 + sum(header[156:512]))
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(bytes(header) + bytes(1024)))
    with tarfile.open(path) as packed:
        assert packed.next().size == 8**11 - 1
    assert read_members(path, {MEMBER}.__contains__, MOST) == {}


def test_archives_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    good = tar(tmp_path / "good", {MEMBER: bytes(range(256)) * 300}).read_bytes()
    assert read_members(tmp_path / "good", {MEMBER}.__contains__, MOST)[MEMBER] == bytes(range(256)) * 300
    assert read_members(tar(tmp_path / "dot", {f"./{MEMBER}": b"x"}), {MEMBER}.__contains__, MOST) == {MEMBER: b"x"}
    path = tmp_path / "a.tar.gz"
    for content in (
        b"",
        b"garbage",
        good[: len(good) // 2],
        gzip.compress(b"garbage" * 200),
        gzip.compress(gzip.decompress(good)[:9000]),
    ):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"a.tar.gz (is not a complete tar archive|ends within)") as caught:
            read_members(path, {MEMBER}.__contains__, MOST)
        assert "\n" not in str(caught.value)
    unpacked = gzip.decompress(good)
    twice = gzip.compress(unpacked[: 512 + 76800] + unpacked)
    path.write_bytes(twice)
    with pytest.raises(InputError, match="twice; it is not the official archive"):
        read_members(path, {MEMBER}.__contains__, MOST)
    tar(path, {"large": bytes(10 << 20)})
    with pytest.raises(InputError, match="holds more than 1 MB"):
        read_members(path, {MEMBER}.__contains__, 1 << 20)
    about = tarfile.TarInfo("extended header")
    about.type, about.size = tarfile.XHDTYPE, 8 << 30  # what it says is its length would be read at once
    path.write_bytes(gzip.compress(about.tobuf(tarfile.GNU_FORMAT) + bytes(10 << 20)))
    with pytest.raises(InputError, match="holds more than 1 MB"):
        read_members(path, {MEMBER}.__contains__, 1 << 20)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_mutated_archives_raise_input_errors_alone(tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(
        gzip.decompress(tar(tmp_path / "good", {"a": b"x" * 600, MEMBER: b"y" * 700}).read_bytes())[:4096]
    )
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, 2000))
        patch = data.draw(st.binary(min_size=1, max_size=8))
        content[at : at + len(patch)] = patch
    for start in (0, 512 + 1024):  # a damaged header says so by its sum: mend it, so that its content is looked at
        head = content[start : start + 512]
        content[start + 148 : start + 156] = b"%06o\x00 " % (sum(head[:148]) + 8 * 32 + sum(head[156:]))
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(bytes(content), 1))
    message = "a.tar.gz"
    try:
        read_members(tmp_path / "a.tar.gz", {MEMBER, "a"}.__contains__, MOST)
    except InputError as error:
        message = str(error)
    assert "a.tar.gz" in message


# -- the real data -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CIFAR-10's real test set in its official binary file."""
    from PIL import Image

    limit = Image.MAX_IMAGE_PIXELS  # the script lifts it for itself
    unpack = runpy.run_path(str(assets / "data" / "unpack.py"))
    folder = tmp_path_factory.mktemp("cifar") / "cifar-10-batches-bin"
    folder.mkdir()
    unpack["records"](assets / "data" / "cifar10", "test_batch").tofile(folder / "test_batch.bin")
    Image.MAX_IMAGE_PIXELS = limit
    return folder


def test_the_real_test_set(real: Path, tmp_path: Path) -> None:
    """The official bytes; as a python file and as archives they give the same tensors."""
    expected = known.SOURCES["cifar10"]["binary"]
    assert known.md5_of(real / "test_batch.bin") == expected.inside[-1].md5
    data = cifar("cifar10", real)
    assert torch.bincount(data.labels).tolist() == [1000] * 10
    assert [data.class_names[k] for k in data.labels[:4].tolist()] == ["cat", "ship", "ship", "airplane"]
    content = (real / "test_batch.bin").read_bytes()
    rows = np.frombuffer(content, np.uint8).reshape(-1, 3073)
    pickled = python2({"labels": rows[:, 0].tolist(), "data": np.asfortranarray(rows[:, 1:])})
    for member, raw in ((MEMBER, content), ("cifar-10-batches-py/test_batch", pickled)):
        with (
            gzip.open(tmp_path / "packed", "wb", compresslevel=1) as zipped,
            tarfile.open(fileobj=zipped, mode="w") as packed,
        ):
            about = tarfile.TarInfo(member)
            about.size = len(raw)
            packed.addfile(about, io.BytesIO(raw))
        again = cifar("cifar10", tmp_path / "packed", verify=False)
        assert same(again, data)
    assert again.fingerprint == data.fingerprint


# -- MNIST and Fashion-MNIST -------------------------------------------------------------------------------------------


def idx_file(values: np.ndarray) -> bytes:
    return bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">u4").tobytes() + values.tobytes()


def write_idx(folder: Path, name: str, zipped: bool = True, n: int = 5) -> dict[str, np.ndarray]:
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for seed, file in enumerate(known.SOURCES[name]["binary"].files):
        generator = np.random.default_rng(seed)
        shape = (n, 28, 28) if "images" in file.name else (n,)
        arrays[file.name] = generator.integers(0, 256 if "images" in file.name else 10, shape, dtype=np.uint8)
        content = idx_file(arrays[file.name])
        (folder / (file.name if zipped else file.name.removesuffix(".gz"))).write_bytes(
            gzip.compress(content, mtime=0) if zipped else content
        )
    return arrays


@pytest.mark.parametrize("where", ["", "fashion-mnist", "FashionMNIST/raw"])
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("part", ["train", "test"])
def test_idx_files_are_read_byte_for_byte(part: str, zipped: bool, where: str, tmp_path: Path) -> None:
    arrays = write_idx(tmp_path / where, "fashion-mnist", zipped)
    data = idx("fashion-mnist", tmp_path, part, verify=False)
    start = "train" if part == "train" else "t10k"
    images, labels = arrays[f"{start}-images-idx3-ubyte.gz"], arrays[f"{start}-labels-idx1-ubyte.gz"]
    assert data.images.shape == (5, 1, 28, 28)
    assert np.array_equal((data.images[:, 0] * 255).round().to(torch.uint8).numpy(), images)
    assert data.labels.tolist() == labels.tolist()
    assert (data.name, data.class_names[9], len(data.class_names)) == ("fashion-mnist", "Ankle boot", 10)


def test_idx_files_are_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two datasets name their files alike; their sums tell which one it is."""
    for zipped in (True, False):
        write_idx(tmp_path / str(zipped), "mnist", zipped)
        with pytest.raises(InputError, match="the official file has 2646ac647ad5339dbf082846283269ea: it is damaged"):
            idx("mnist", tmp_path / str(zipped))
        assert idx("mnist", tmp_path / str(zipped), verify=False).class_names[7] == "seven"
    adopt(monkeypatch, tmp_path / "False")
    for zipped in (True, False):
        assert len(idx("mnist", tmp_path / str(zipped))) == 5
        with pytest.raises(InputError, match=r"it is t10k-images-idx3-ubyte\.gz of mnist"):
            idx("fashion-mnist", tmp_path / str(zipped))


def adopt(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Make the unpacked files there the official ones."""
    source = known.SOURCES["mnist"]["binary"]
    ours = tuple(replace(file, content=known.md5_of(folder / file.names[1])) for file in source.files)
    monkeypatch.setitem(known.SOURCES["mnist"], "binary", replace(source, files=ours))


def test_how_a_file_is_compressed_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Debian's Fashion-MNIST: the same content under another header, and at another level."""
    write_idx(tmp_path / "plain", "mnist", zipped=False)
    adopt(monkeypatch, tmp_path / "plain")
    write_idx(tmp_path, "mnist")
    for level, path in enumerate(tmp_path.glob("*.gz")):
        path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()), level, mtime=1_591_347_949))
    assert len(idx("mnist", tmp_path)) == 5
    for folder in (tmp_path, tmp_path / "plain"):
        found = inventory("mnist", folder)
        assert [one.state for one in found] == ["verified"] * 4
        assert complete_forms("mnist", found) == ["binary"]
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(bytes(2**26 + 1)))
    (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(b"garbage")
    assert [one.state for one in inventory("mnist", tmp_path)] == ["verified", "verified", "damaged", "damaged"]


@pytest.mark.parametrize(
    ("file", "content", "match"),
    [
        ("images", b"", "is no IDX file of 3-dimensional bytes"),
        ("images", idx_file(np.zeros(5, np.uint8)), "its start is 00000801"),
        ("images", bytes([0, 0, 13, 3]) + bytes(12), "its start is 00000d03"),
        ("images", idx_file(np.zeros((5, 28, 29), np.uint8)), "says it holds 5 x 28 x 29 values, expected n x 28 x 28"),
        ("images", idx_file(np.zeros((0, 28, 28), np.uint8)), "0 x 28 x 28"),
        ("images", bytes([0, 0, 8, 3]) + b"\xff\xff\xff\xff" + bytes([0, 0, 0, 28]) * 2, "4294967295 x 28 x 28"),
        ("images", idx_file(np.zeros((5, 28, 28), np.uint8))[:-1], "says it holds 3920 values and has 3919"),
        ("images", idx_file(np.zeros((5, 28, 28), np.uint8)) + b"a", "says it holds 3920 values and has more"),
        ("images", idx_file(np.zeros((4, 28, 28), np.uint8)), "has 4 images, .* has 5 labels"),
        ("labels", idx_file(np.full(5, 10, np.uint8)), "holds a label 10, mnist has 10 classes"),
    ],
)
def test_bad_idx_files_are_refused(file: str, content: bytes, match: str, tmp_path: Path) -> None:
    write_idx(tmp_path, "mnist", zipped=False)
    (tmp_path / f"t10k-{file}-idx{3 if file == 'images' else 1}-ubyte").write_bytes(content)
    with pytest.raises(InputError, match=match):
        idx("mnist", tmp_path, verify=False)


def test_damaged_gzip_and_missing_idx_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"found no t10k-images-idx3-ubyte.gz of mnist at .*`keepcover data mnist --out"
    ):
        idx("mnist", tmp_path)
    write_idx(tmp_path, "mnist")
    path = tmp_path / "t10k-images-idx3-ubyte.gz"
    content = path.read_bytes()
    for damaged in (b"garbage", content[:-9], content[:100] + bytes(20) + content[120:]):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match="cannot be read"):
            idx("mnist", tmp_path, verify=False)
    for name, part in (("emnist", "test"), ("mnist", "validation")):
        with pytest.raises(InputError, match="mnist or fashion-mnist and train or test"):
            idx(name, tmp_path, part)


def test_a_gzip_bomb_is_read_as_far_as_it_should_go(tmp_path: Path) -> None:
    write_idx(tmp_path, "mnist")
    head = idx_file(np.zeros((5, 28, 28), np.uint8))
    (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(head + bytes(50 << 20)))
    with pytest.raises(InputError, match="3920 values and has more"):
        idx("mnist", tmp_path, verify=False)


# -- fingerprints ------------------------------------------------------------------------------------------------------


def test_a_fingerprint_is_of_the_content_alone() -> None:
    images, labels = torch.rand(4, 3, 5, 6), torch.tensor([0, 1, 1, 0])
    data = Labelled("a", images, labels, ("x", "y"))
    strided = images.permute(0, 3, 2, 1).contiguous().permute(0, 3, 2, 1)
    assert not strided.is_contiguous()
    for same_data in (
        Labelled("b", images.clone(), labels.clone(), ("p", "q")),
        Labelled("a", strided, labels.int(), ("x", "y")),
        data[:],
    ):
        assert same_data.fingerprint == data.fingerprint
    changed = images.clone()
    changed[3, 2, 4, 5] += 1e-6
    others = [
        Labelled("a", changed, labels, ("x", "y")),
        Labelled("a", images, labels.flip(0) ^ 1, ("x", "y")),
        Labelled("a", images.view(4, 3, 6, 5), labels, ("x", "y")),
        Labelled("a", images.double(), labels, ("x", "y")),
        data[torch.tensor([1, 0, 2, 3])],
        data[:3],
    ]
    found = {data.fingerprint, *(other.fingerprint for other in others)}
    assert len(found) == len(others) + 1
    assert all(len(text) == 64 for text in found)


def test_a_fingerprint_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    data = numbered(10)
    first = data.fingerprint
    monkeypatch.setattr(hashlib, "sha256", None)
    assert data.fingerprint == first


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
        (
            {"images": torch.rand(2, 4, 4), "labels": torch.tensor([0, 1])},
            r"\[n, channels, height, width\] or tokens \[n, length\], got torch.float32 \(2, 4, 4\)",
        ),
        (
            {"images": torch.zeros(2, 1, 4, 4).byte(), "labels": torch.tensor([0, 1])},
            r"got torch.uint8; convert with images.float\(\) / 255",
        ),
        ({"images": torch.rand(2, 1, 4, 4), "labels": torch.tensor([0, 1, 1])}, "expected 2 labels"),
        ({"images": torch.rand(2, 1, 4, 4), "labels": torch.tensor([0.0, 1.0])}, "integer class labels"),
        ({"images": torch.rand(2, 1, 4, 4), "labels": torch.tensor([0, -1])}, "labels between 0 and"),
    ],
)
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
    with pytest.raises(InputError, match="expected numbers in 'logits', got text"):
        read_arrays(tmp_path / "text.npz", "logits")


def test_data_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.equal(load_data("digits").images, digits().images)
    rows = write(tmp_path, "cifar10", "test")
    assert load_data("cifar10", tmp_path).labels.tolist() == rows[:, 0].tolist()
    with pytest.raises(InputError, match="cifar10 needs the folder of its official files: --data-dir DIR"):
        load_data("cifar10")
    write_idx(tmp_path, "mnist", zipped=False)
    adopt(monkeypatch, tmp_path)
    assert load_data("mnist", tmp_path).images.shape == (5, 1, 28, 28)
    with pytest.raises(InputError, match="fashion-mnist needs the folder of its official files"):
        load_data("fashion-mnist")
    with pytest.raises(
        InputError, match=r"digits, cifar10, .*, a folder of class folders, or a .npz, .* file, got 'svhn'"
    ):
        load_data("svhn")


def test_models_by_name(tmp_path: Path) -> None:
    fresh = load_model("small-cnn", classes=3, fresh=True)
    assert isinstance(fresh, SmallCNN)
    assert fresh(torch.rand(2, 1, 8, 8)).shape == (2, 3)
    source = SmallCNN(classes=3)
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    model = load_model("small-cnn", tmp_path / "w.safetensors", classes=3, device="cpu")
    images = torch.rand(2, 1, 8, 8)
    assert isinstance(model, nn.Module)
    assert torch.equal(model(images), source.eval()(images))
    resnet = load_model("cifar-resnet20", classes=7, fresh=True)
    assert isinstance(resnet, CifarResNet)
    assert resnet.fc.out_features == 7
    assert isinstance(load_model("torch.nn:Identity"), nn.Identity)


@pytest.mark.parametrize(
    ("spec", "weights", "match"),
    [
        ("resnet", None, r"a model among small-cnn, .* or package.module:function, got 'resnet'"),
        ("os.path", None, "package.module:function"),
        ("no.such.module:make", None, r"cannot find 'no.such.module:make'.*is it in this folder or on PYTHONPATH\?"),
        ("torch.nn:NoSuchThing", None, "cannot find"),
        ("torch:get_num_threads", None, "must return a model, images -> logits or with predict_proba, not int"),
        ("torch.nn:Identity", "w.safetensors", "weights are for built-in models"),
        ("small-cnn", "nothing.safetensors", "no weights at"),
    ],
)
def test_bad_model_names_are_refused(spec: str, weights: str | None, match: str) -> None:
    with pytest.raises(InputError, match=match):
        load_model(spec, weights)
