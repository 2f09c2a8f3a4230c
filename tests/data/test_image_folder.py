"""Image folders: pixels as the definition says, in order, lazily; whatever is not an image is named."""

from __future__ import annotations

import io
import os
import random
import struct
import subprocess
import sys
import time
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from keepcover.data import Labelled, image_folder
from keepcover.data.decode import decode
from keepcover.engine.inputs import batches, length
from keepcover.errors import InputError
from keepcover.prediction.calibration import calibrate
from keepcover.specs import load_data, load_inputs, parts_by


def noise(width: int, height: int, seed: int = 0) -> np.ndarray:
    """Rows of RGB pixels."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def save(path: Path, pixels: np.ndarray, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **options)
    return path


def make(root: Path, counts: dict[str, int], side: int = 12) -> dict[str, np.ndarray]:
    """Lossless images ``root/class/00.png`` and their pixels."""
    made = {}
    for seed, (folder, count) in enumerate(counts.items()):
        for i in range(count):
            made[f"{folder}/{i:02d}.png"] = noise(side, side, 100 * seed + i)
            save(root / folder / f"{i:02d}.png", made[f"{folder}/{i:02d}.png"])
    return made


def read(root: Path, **options: Any) -> list[tuple[Tensor, int]]:
    data = image_folder(root, **options)
    return [data[i] for i in range(len(data))]


def refused(match: str, root: Path, **options: Any) -> None:
    with pytest.raises(InputError, match=match) as caught:
        read(root, **options)
    assert "\n" not in str(caught.value)


# -- pixels ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "left", "top"), [((256, 256), 16, 16), ((300, 256), 38, 16), ((256, 301), 16, 38), ((257, 256), 16, 16)]
)
def test_the_centre_is_cut_out(size: tuple[int, int], left: int, top: int, tmp_path: Path) -> None:
    """Where the shorter side is right already, pixels are exactly those of the file; halves round to even."""
    pixels = noise(*size)
    found = decode(save(tmp_path / "a.png", pixels), 256, 224)
    assert np.array_equal(found, pixels[top : top + 224, left : left + 224].transpose(2, 0, 1))


@pytest.mark.parametrize(
    ("size", "resized"), [((64, 48), (42, 32)), ((48, 65), (32, 43)), ((20, 30), (32, 48)), ((31, 31), (32, 32))]
)
def test_the_shorter_side_is_resized(size: tuple[int, int], resized: tuple[int, int], tmp_path: Path) -> None:
    """The longer side is floor(32 longer / shorter), as in the usual evaluation of ImageNet models."""
    pixels = noise(*size)
    found = decode(save(tmp_path / "a.png", pixels), 32, None)
    expected = np.asarray(Image.fromarray(pixels).resize(resized, Image.Resampling.BILINEAR))
    assert np.array_equal(found, expected.transpose(2, 0, 1))
    centre = decode(tmp_path / "a.png", 32, 32)
    left, top = round((resized[0] - 32) / 2), round((resized[1] - 32) / 2)
    assert np.array_equal(centre, found[:, top : top + 32, left : left + 32])


def test_shrinking_averages(tmp_path: Path) -> None:
    """Bilinear with the support that shrinking needs: no pixel is skipped."""
    board = (np.indices((64, 64)).sum(axis=0) % 2 * 255).astype(np.uint8)
    found = decode(save(tmp_path / "a.png", board), 8, None)
    assert np.abs(found.astype(float) - 127.5).max() <= 2


def test_every_mode_becomes_rgb(tmp_path: Path) -> None:
    """Grey in three channels; alpha dropped, not mixed in; palettes looked up; CMYK converted."""
    grey = np.arange(64, dtype=np.uint8).reshape(8, 8)
    assert np.array_equal(decode(save(tmp_path / "grey.png", grey), None, None), np.stack([grey] * 3))
    rgba = np.concatenate([noise(8, 8), np.zeros((8, 8, 1), np.uint8)], axis=2)
    assert np.array_equal(decode(save(tmp_path / "rgba.png", rgba), None, None), rgba[..., :3].transpose(2, 0, 1))
    black = save(tmp_path / "bits.png", grey % 2 == 1)
    assert np.array_equal(decode(black, None, None)[0], grey % 2 * 255)
    palette = Image.fromarray(grey % 4).convert("P")
    palette.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120])
    palette.putdata((grey % 4).flatten().tolist())
    palette.save(tmp_path / "palette.png", transparency=bytes([0, 128, 255, 255]))
    assert decode(tmp_path / "palette.png", None, None)[:, 0, :4].T.tolist() == [
        [10, 20, 30],
        [40, 50, 60],
        [70, 80, 90],
        [100, 110, 120],
    ]
    Image.new("CMYK", (8, 8), (255, 0, 0, 0)).save(tmp_path / "cmyk.jpg")
    assert decode(tmp_path / "cmyk.jpg", None, None).shape == (3, 8, 8)


@pytest.mark.parametrize("suffix", [".jpg", ".JPEG", ".png", ".webp", ".bmp", ".gif", ".tif", ".ppm"])
def test_formats(suffix: str, tmp_path: Path) -> None:
    path = save(tmp_path / f"a{suffix}", np.full((9, 9, 3), 200, np.uint8))
    assert np.abs(decode(path, None, None).astype(int) - 200).max() <= 3


# -- the dataset -------------------------------------------------------------------------------------------------------


def test_order_labels_and_values(tmp_path: Path) -> None:
    """Folders by name, files by name within; whatever the order in which they were made."""
    made = make(tmp_path, {"zebra": 3, "ant": 2, "B": 2})
    (tmp_path / "ant" / "deep").mkdir()
    save(tmp_path / "ant" / "deep" / "x.png", noise(12, 12, 7))
    made["ant/deep/x.png"] = noise(12, 12, 7)
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "readme.txt").write_text("files beside the classes are none of ours")
    (tmp_path / "ant" / ".DS_Store").write_bytes(b"")
    data = image_folder(tmp_path, resize=None, crop=None)
    assert data.class_names == ("B", "ant", "zebra")
    assert data.labels.tolist() == [0, 0, 1, 1, 1, 2, 2, 2]
    names = [data.path(i).relative_to(tmp_path).as_posix() for i in range(len(data))]
    assert names == sorted(made)
    for i, name in enumerate(names):
        image, label = data[i]
        assert label == int(data.labels[i])
        assert torch.equal(image, torch.from_numpy(made[name].transpose(2, 0, 1)).float() / 255)
    with pytest.raises(IndexError):
        data[len(data)]


@pytest.mark.parametrize("workers", [0, 2])
def test_it_is_data_for_keepcover(workers: int, tmp_path: Path) -> None:
    """As a dataset, through its loader with and without processes, and in memory: the same images and labels."""
    make(tmp_path, {"a": 5, "b": 4})
    data = image_folder(tmp_path, resize=10, crop=8)
    whole = data.load(workers=workers, progress=False)
    assert isinstance(whole, Labelled)
    assert (whole.name, whole.class_names, tuple(whole.images.shape)) == (tmp_path.name, ("a", "b"), (9, 3, 8, 8))
    assert all(torch.equal(whole.images[i], data[i][0]) for i in range(9))
    loader = data.loader(batch_size=4, workers=workers)
    assert length(loader) == length(data) == 9
    for kind in (data, loader):
        read = list(batches(kind, labelled=True, size=4))
        assert [len(one) for one in read] == [4, 4, 1]
        assert torch.equal(torch.cat([one.images for one in read]), whole.images)
        assert torch.cat([one.labels for one in read if one.labels is not None]).tolist() == data.labels.tolist()
    assert len(list(loader)) == len(list(loader))  # again and again


def test_it_calibrates(tmp_path: Path) -> None:
    made = make(tmp_path, {"a": 40, "b": 40}, side=4)
    assert len(made) == 80
    data = image_folder(tmp_path, resize=None, crop=None)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 2))
    options = {"epsilon": 0.05, "sigma": 0.25, "draws": 2, "method": "rcp1", "seed": 0, "alpha": 0.2}
    lazy = calibrate(model, data.loader(batch_size=16, workers=0), **options)
    whole = calibrate(model, data.load(workers=0, progress=False).pair, **options)
    assert torch.equal(lazy.items.draws.values, whole.items.draws.values)


def test_memory_does_not_grow_with_the_number_of_images(tmp_path: Path) -> None:
    """240 images of 224 x 224 take 144 MB as floats; reading them all takes no more than reading the first 64."""
    first = save(tmp_path / "a" / "000.png", noise(60, 60))
    (tmp_path / "b").mkdir()
    for i in range(1, 240):
        os.link(first, tmp_path / ("a" if i < 120 else "b") / f"{i:03d}.png")
    code = (
        "import resource, sys, torch; torch.set_num_threads(1)\n"
        "from keepcover.data import image_folder; from keepcover.engine.inputs import batches\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "marks = [(peak(), len(one))[0] for one in batches(image_folder(sys.argv[1]).loader(batch_size=16, workers=0))]\n"
        "print(len(marks), marks[3], marks[-1])"
    )
    found = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    count, early, late = map(int, found.stdout.split())
    assert count == 15
    assert late - early < 40_000  # kilobytes


def test_a_folder_too_large_for_memory_is_refused(tmp_path: Path) -> None:
    make(tmp_path, {"a": 2, "b": 2})
    data = image_folder(tmp_path, resize=None, crop=None)
    assert len(data.load(most_bytes=4 * 432 * 4, workers=0, progress=False)) == 4
    with pytest.raises(InputError, match=r"4 images of 12 x 12 pixels take 0.0 GiB, more than 0.0; .* loader\(\)"):
        data.load(most_bytes=4 * 432 * 4 - 1)


def test_fingerprints(tmp_path: Path) -> None:
    """Of relative paths, sizes and preprocessing: the place is none of it, every change of those is."""
    for root in ("one", "two"):
        make(tmp_path / root, {"a": 2, "b": 2})
    one = image_folder(tmp_path / "one", resize=10, crop=8).fingerprint
    assert image_folder(tmp_path / "two", resize=10, crop=8).fingerprint == one
    found = {
        one,
        image_folder(tmp_path / "one", resize=11, crop=8).fingerprint,
        image_folder(tmp_path / "one", resize=10, crop=9).fingerprint,
    }
    assert len(found) == 3
    (tmp_path / "two" / "a" / "01.png").rename(tmp_path / "two" / "a" / "02.png")
    found.add(image_folder(tmp_path / "two", resize=10, crop=8).fingerprint)
    with (tmp_path / "one" / "b" / "00.png").open("ab") as file:
        file.write(b"x")
    found.add(image_folder(tmp_path / "one", resize=10, crop=8).fingerprint)
    (tmp_path / "one" / "b").rename(tmp_path / "one" / "c")
    found.add(image_folder(tmp_path / "one", resize=10, crop=8).fingerprint)
    assert len(found) == 6


def test_names_of_classes(tmp_path: Path) -> None:
    root = tmp_path / "val"
    make(root, {"n01440764": 1, "n01443537": 1})
    lines = tmp_path / "names.txt"
    lines.write_text("n01443537 goldfish, Carassius auratus\n\nn01440764\ttench, Tinca tinca\nn09999999 another\n")
    assert image_folder(root, names=lines).class_names == ("tench, Tinca tinca", "goldfish, Carassius auratus")
    table = tmp_path / "names.json"
    table.write_text('{"n01440764": "tench", "n01443537": "Goldfisch ü"}', encoding="utf-8")
    assert image_folder(root, names=table).class_names == ("tench", "Goldfisch ü")
    for path, text, match in (
        (lines, "n01440764 tench", "has no name for the folder 'n01443537'"),
        (lines, "n01440764", "expected lines of a folder and its name, got 'n01440764' alone"),
        (table, "[1, 2]", "expected a JSON object"),
        (table, '{"n01440764": 1, "n01443537": 2}', "expected a JSON object"),
        (table, "{", "cannot read the names of classes"),
    ):
        path.write_text(text)
        refused(match, root, names=path)
    lines.write_bytes(b"\xff\xfe")
    refused("cannot read the names", root, names=lines)
    refused("cannot read the names", root, names=tmp_path / "none.txt")


def test_by_path_on_a_command_line(tmp_path: Path) -> None:
    """Small images as they are, large ones as ImageNet's."""
    made = make(tmp_path / "small", {"a": 1, "b": 2})
    small = load_data(str(tmp_path / "small"))
    assert small.labels.tolist() == [0, 1, 1]
    assert np.array_equal((small.images[2] * 255).round().numpy().astype(np.uint8), made["b/01.png"].transpose(2, 0, 1))
    make(tmp_path / "large", {"a": 1, "b": 1}, side=230)
    assert load_data(str(tmp_path / "large")).images.shape == (2, 3, 224, 224)


# -- what is refused ---------------------------------------------------------------------------------------------------


def png(width: int, height: int, data: bytes = b"") -> bytes:
    """A PNG whose header may say anything."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", data), (b"IEND", b"")]
    packed = [
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


def encoded(kind: str) -> bytes:
    out = io.BytesIO()
    Image.fromarray(noise(64, 64)).save(out, kind)
    return out.getvalue()


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "cannot be decoded"),
        (b"this is text", "cannot be decoded"),
        (encoded("JPEG")[:800], "cannot be decoded .*truncated"),
        (encoded("JPEG")[:20], "cannot be decoded"),
        (png(8, 8, b"garbage"), "cannot be decoded"),
        (png(9_000, 9_000), "would have 9000 x 9000 pixels, more than 64 million"),
        (png(12_000, 12_000), "would have 12000 x 12000 pixels"),
        (png(40_000, 40_000), "cannot be decoded .*decompression bomb"),
        (encoded("TGA"), "cannot be decoded"),  # a format that Pillow knows and that is not among ours
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n", "cannot be decoded"),
    ],
    ids=["empty", "text", "truncated", "head", "garbage", "large", "bomb-warned", "bomb", "format", "postscript"],
)
def test_files_that_are_no_images_are_named(content: bytes, match: str, tmp_path: Path) -> None:
    make(tmp_path, {"a": 1, "b": 1}, side=40)
    (tmp_path / "b" / "bad.png").write_bytes(content)
    refused(r"b/bad\.png " + match, tmp_path, resize=32, crop=32)


def test_the_limit_is_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other code in the process may have lifted Pillow's."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    (tmp_path / "a.png").write_bytes(png(40_000, 40_000))
    with pytest.raises(InputError, match="would have 40000 x 40000 pixels"):
        decode(tmp_path / "a.png", 256, 224)


def test_odd_metadata_are_no_reason_to_refuse_pixels(tmp_path: Path) -> None:
    """Some photographs of ImageNet have broken EXIF, of which Pillow warns; warnings are errors here."""
    exif = Image.Exif()
    exif[0x011A] = 72.0
    path = save(tmp_path / "a.jpg", np.full((9, 9, 3), 200, np.uint8), exif=exif.tobytes()[:-9])
    with pytest.warns(UserWarning, match=r"Corrupt EXIF|Truncated"), Image.open(path) as image:
        image.getexif().tobytes()
    assert decode(path, None, None).shape == (3, 9, 9)


def test_a_line_is_not_blown_up(tmp_path: Path) -> None:
    make(tmp_path, {"a": 1, "b": 1})
    save(tmp_path / "b" / "bad.png", np.zeros((1, 5000, 3), np.uint8))
    refused(r"b/bad\.png would have 1280000 x 256 pixels", tmp_path)


def test_sixteen_bits_are_refused_rather_than_clipped(tmp_path: Path) -> None:
    make(tmp_path, {"a": 1, "b": 1})
    save(tmp_path / "b" / "bad.png", np.full((12, 12), 40_000, np.uint16))
    refused(r"b/bad\.png has more than 8 bits per channel", tmp_path)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_in_a_worker_is_one_line(workers: int, tmp_path: Path) -> None:
    make(tmp_path, {"a": 3, "b": 3})
    (tmp_path / "b" / "01.png").write_bytes(b"text")
    data = image_folder(tmp_path, resize=10, crop=8)
    with pytest.raises(InputError, match=r"^[^\n]*b/01\.png cannot be decoded [^\n]*; repair or remove it$"):
        list(batches(data.loader(batch_size=2, workers=workers)))


def test_images_of_several_sizes_need_a_crop(tmp_path: Path) -> None:
    make(tmp_path, {"a": 1, "b": 1})
    save(tmp_path / "b" / "wide.png", noise(14, 12))
    refused(
        r"b/wide\.png has 14 x 12 pixels, .*a/00\.png has 12 x 12; give resize and crop",
        tmp_path,
        resize=None,
        crop=None,
    )
    refused(r"has 12 x 12 pixels, too few for a centre of 13 x 13", tmp_path, resize=None, crop=13)
    assert len(image_folder(tmp_path, resize=None, crop=12)) == 3


def test_options_that_make_no_sense(tmp_path: Path) -> None:
    make(tmp_path, {"a": 1, "b": 1})
    refused("a centre of 225 pixels does not fit in images whose shorter side is 224", tmp_path, resize=224, crop=225)
    refused("expected crop to be at least 1 pixel", tmp_path, crop=0)
    refused("expected resize to be at least 1 pixel", tmp_path, resize=-1)


def test_layouts_that_are_none(tmp_path: Path) -> None:
    refused("cannot list .*none .*; expected a folder of class folders", tmp_path / "none")
    save(tmp_path / "file.png", noise(8, 8))
    refused("cannot list .*file.png", tmp_path / "file.png")
    refused("holds 0 folders, expected at least 2 classes", tmp_path)
    make(tmp_path, {"a": 1})
    refused("holds 1 folder, expected at least 2 classes", tmp_path)
    (tmp_path / "b").mkdir()
    refused(r"/b holds no images; remove it", tmp_path)
    (tmp_path / "b" / "notes.txt").write_text("notes")
    refused(r"b/notes\.txt is no image: expected files that end in \.jpg", tmp_path)
    (tmp_path / "b" / "notes.txt").unlink()
    os.mkfifo(tmp_path / "b" / "pipe.png")
    refused(r"b/pipe\.png is no image", tmp_path)  # reading it would never end


@pytest.mark.parametrize("target", ["..", "../..", ".", "loop"])
def test_links_that_go_round_in_circles(target: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    make(root, {"a": 1, "b": 1})
    (root / "b" / "loop").symlink_to(target)
    if target == "../..":
        (tmp_path / "root").rename(tmp_path / "inner")  # the folder above the root comes back to it
        root = tmp_path / "inner"
    refused(r"b/loop.* is a link to .*, so its images would come twice or never end|b/loop cannot be read", root)


@pytest.mark.parametrize("depth", [22, 35])
def test_links_cost_no_more_than_the_folders_there_are(depth: int, tmp_path: Path) -> None:
    """Each of a chain of folders holds two links to the next: one image, 2^depth paths to it."""
    root = tmp_path / "root"
    make(root, {"a": 1, "b": 1})
    chain = [tmp_path / "chain" / str(k) for k in range(depth)]
    for here, below in pairwise(chain):
        here.mkdir(parents=True)
        for name in ("left", "right"):
            (here / name).symlink_to(below)
    chain[-1].mkdir()
    save(chain[-1] / "one.png", noise(12, 12))
    (root / "c").symlink_to(chain[0])
    start = time.monotonic()
    refused("is a link to .*, so its images would come twice", root)
    assert time.monotonic() - start < 5


def test_folders_may_be_deep_and_one_folder_is_one_class(tmp_path: Path) -> None:
    make(tmp_path, {"a": 1, "b": 1})
    chain = [tmp_path / "a"]
    for _ in range(1500):
        chain.append(chain[-1] / "d")
        chain[-1].mkdir()
    image = save(chain[-1] / "one.png", noise(12, 12))
    assert image_folder(tmp_path, resize=None, crop=8).labels.tolist() == [0, 0, 1]
    image.unlink()
    for folder in reversed(chain[1:]):  # too deep for those who clean up after tests
        folder.rmdir()
    (tmp_path / "c").symlink_to(tmp_path / "b")
    refused(r"/c is a link to .*/b, so its images would come twice", tmp_path)


def test_links_that_lead_nowhere_and_links_that_help(tmp_path: Path) -> None:
    make(tmp_path / "root", {"a": 1, "b": 1})
    make(tmp_path / "elsewhere", {"c": 2})
    (tmp_path / "root" / "c").symlink_to(tmp_path / "elsewhere" / "c")
    (tmp_path / "root" / "b" / "linked.png").symlink_to(tmp_path / "elsewhere" / "c" / "00.png")
    assert image_folder(tmp_path / "root").labels.tolist() == [0, 1, 1, 2, 2]
    (tmp_path / "root" / "b" / "gone.png").symlink_to(tmp_path / "gone")
    refused(r"b/gone\.png cannot be read .*broken link", tmp_path / "root")
    (tmp_path / "root" / "b" / "gone.png").unlink()
    (tmp_path / "root" / "d").symlink_to(tmp_path / "gone")
    refused(r"/d cannot be read .*broken link", tmp_path / "root")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM"])
def test_no_pixel_is_lost_in_silence(kind: str, tmp_path: Path) -> None:
    """A file cut anywhere is refused, unless only marks of the end are missing and every pixel is there."""
    out = io.BytesIO()
    Image.fromarray(noise(40, 40)).save(out, kind)
    content, path = out.getvalue(), tmp_path / "a.png"
    path.write_bytes(content)
    whole, messages = decode(path, None, None), []
    ends = [*range(0, len(content), 37), *range(len(content) - 40, len(content))]
    for end in ends:
        path.write_bytes(content[:end])
        try:
            assert np.array_equal(decode(path, None, None), whole)
        except InputError as error:
            messages.append(str(error))
    assert all(message.startswith(f"{path} cannot be decoded") for message in messages)
    assert len(messages) >= len(ends) - 22


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM"]), st.integers(0, 2**32))
def test_damaged_files_give_an_image_or_an_error_that_names_them(tmp_path: Path, kind: str, seed: int) -> None:
    out, chance = io.BytesIO(), random.Random(seed)
    Image.fromarray(noise(20, 16)).save(out, kind)
    content = bytearray(out.getvalue())
    for _ in range(chance.randint(1, 6)):
        at = chance.randrange(len(content))
        if chance.random() < 0.2:
            del content[at : at + chance.randint(1, 40)]
        else:
            content[at] = chance.randrange(256)
    (tmp_path / "a.png").write_bytes(content)
    message = ""
    try:
        assert decode(tmp_path / "a.png", 16, 8).shape == (3, 8, 8)
    except InputError as error:
        message = str(error)
    assert message == "" or message.startswith(str(tmp_path / "a.png"))


def test_new_images_need_no_class_folders(tmp_path: Path) -> None:
    """To predict, a folder of images will do; where labels are needed it is refused, and so is one without images."""
    for name, value in (("b", 40), ("a", 200)):
        Image.new("RGB", (6, 4), (value, value, value)).save(tmp_path / f"{name}.png")
    found = load_inputs(str(tmp_path))
    assert (found.labels, found.class_names, found.name) == (None, (), tmp_path.name)
    assert (found.images[:, 0, 0, 0] * 255).round().tolist() == [200, 40]
    with pytest.raises(InputError, match="expected at least 2 classes"):
        load_inputs(str(tmp_path), labelled=True)
    (tmp_path / "new").mkdir()
    with pytest.raises(InputError, match="holds no images"):
        load_inputs(str(tmp_path / "new"))


def test_training_without_labels_sees_images_as_calibration_will(tmp_path: Path) -> None:
    """In their own shape, named by the model; too few to split, or of several sizes, are refused."""
    for i in range(5):
        save(tmp_path / f"{i}.png", noise(6, 4, i))
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(72, 3))
    training, test = parts_by(model, str(tmp_path), "1/1")
    assert (len(training), len(test), len(training.class_names)) == (4, 1, 3)
    seen = torch.cat([training.images, test.images])
    whole = load_inputs(str(tmp_path)).images
    assert all((one == whole).flatten(1).all(dim=1).sum() == 1 for one in seen)
    assert torch.equal(training.labels, model(training.images).argmax(dim=1))
    with pytest.raises(InputError, match="expected at least 2 examples"):
        parts_by(model, str(tmp_path), "1/5")
    save(tmp_path / "5.png", noise(8, 4))
    with pytest.raises(InputError, match="make all images of one size"):
        parts_by(model, str(tmp_path), "1/1")
