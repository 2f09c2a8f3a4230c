"""Scenes: every image with its own mask, from folders and archives; pairs that are none are refused by name."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from keepcover.data import Labelled, scenes
from keepcover.errors import InputError

NAMES = ("road", "car", "sky", "void")
CAMVID = Path(os.environ.get("KEEPCOVER_CAMVID", "camvid"))


def scene(seed: int, size: tuple[int, int] = (6, 4)) -> tuple[Image.Image, Image.Image]:
    rng, (width, height) = np.random.default_rng(seed), size
    mask = rng.integers(0, 4, (height, width), dtype=np.uint8)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)), Image.fromarray(mask)


def folders(root: Path, count: int = 3) -> tuple[Path, Path]:
    for folder in ("seen/b", "true/b"):
        (root / folder).mkdir(parents=True)
    for i in range(count):
        image, mask = scene(i)
        image.save(root / f"seen/b/{i}.bmp")
        mask.save(root / f"true/b/{i}.png")
    return root / "seen", root / "true"


def archive(path: Path, mode: str = "w", count: int = 3, leave_out: str = "") -> Path:
    """CamVid's layout; the masks come first, so that pairs are found by name and not by order."""
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for k, folder in ((1, "trainannot"), (0, "train")):
            for i in range(count):
                name, content = f"{folder}/{i}.png", io.BytesIO()
                scene(i)[k].save(content, "png")
                info = tarfile.TarInfo(name)
                info.size = content.tell()
                content.seek(0)
                if name != leave_out:
                    tar.addfile(info, content)
    return path


def expected(count: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    parts = [[torch.from_numpy(np.asarray(part).copy()) for part in scene(i)] for i in range(count)]
    images = torch.stack([image for image, _ in parts]).permute(0, 3, 1, 2).float() / 255
    return images, torch.stack([mask for _, mask in parts]).long()


@pytest.mark.parametrize("kind", ["folders", "tar", "tar.gz"])
def test_every_image_with_its_own_mask(tmp_path: Path, kind: str) -> None:
    if kind == "folders":
        data = scenes(*folders(tmp_path), classes=NAMES, ignore=3, progress=False)
    else:
        path = archive(tmp_path / "some.tar", "w" if kind == "tar" else "w:gz")
        data = scenes(path, classes=NAMES, ignore=3, progress=False)
    images, masks = expected()
    assert torch.equal(data.images, images)
    assert torch.equal(data.labels, masks)
    assert data.class_names == NAMES[:3]  # the name of what is ignored is no class
    assert isinstance(data, Labelled)


def test_smaller_scenes_are_averages_and_nearest_labels(tmp_path: Path) -> None:
    data = scenes(*folders(tmp_path), classes=NAMES, size=(3, 2), progress=False)
    images, masks = expected()
    assert (data.images - torch.nn.functional.avg_pool2d(images, 2)).abs().max() < 1.01 / 255
    corners = torch.stack([masks[:, i::2, j::2] for i in range(2) for j in range(2)])
    assert (data.labels == corners).any(dim=0).all()
    assert len(data.class_names) == 4


def test_names_from_a_file_and_palettes(tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("\n".join(NAMES) + "\n\n")
    seen, true = folders(tmp_path)
    mask = Image.open(true / "b/0.png").convert("P")
    mask.putdata(list(range(4)) * 6)  # indices; the palette's colours mean nothing
    mask.save(true / "b/0.png")
    data = scenes(seen, true, classes=tmp_path / "names.txt", progress=False)
    assert data.labels[0].flatten().tolist() == list(range(4)) * 6


def refused(match: str, *where: Path, **options: object) -> None:
    with pytest.raises(InputError, match=match):
        scenes(*where, **{"classes": NAMES, "progress": False, **options})  # type: ignore[arg-type]


def test_what_is_no_pair_is_named(tmp_path: Path) -> None:
    refused(r"train/1.png has no mask of its name", archive(tmp_path / "a.tar", leave_out="trainannot/1.png"))
    refused(r"trainannot/2.png has no image of its name", archive(tmp_path / "b.tar", leave_out="train/2.png"))
    seen, true = folders(tmp_path)
    refused(r"index 3, expected 0 to 2; name all classes", seen, true, classes=NAMES[:3])
    refused(r"index 3, expected 0 to 1, or 2 for pixels without a label", seen, true, classes=NAMES[:3], ignore=2)
    scene(0)[0].save(true / "b/1.png")
    refused(r"1.png has colours \(mode RGB\)", seen, true)
    scene(0, (3, 2))[1].save(true / "b/1.png")
    refused(r"1.bmp has 6 x 4 pixels, its mask 3 x 2", seen, true)
    scene(0, (3, 2))[0].save(seen / "b/1.bmp")
    refused(r"1.bmp has 3 x 2 pixels, .*0.bmp has 6 x 4; make all of one size", seen, true)
    (true / "b/1.png").write_bytes(b"no image")
    refused(r"1.png cannot be decoded", seen, true)
    scene(0)[0].save(seen / "b/2.png")
    refused(r"2\.\w+ and 2\.\w+; expected one image of that name", seen, true)


def test_other_refusals(tmp_path: Path) -> None:
    refused("no folder or archive", tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    refused("holds no images", tmp_path / "empty")
    refused("holds no images", archive(tmp_path / "empty.tar", count=0))
    (tmp_path / "text.tar").write_text("no archive")
    refused("not a complete tar archive", tmp_path / "text.tar")
    content = archive(tmp_path / "whole.tar").read_bytes()
    (tmp_path / "half.tar").write_bytes(content[: len(content) // 3])
    refused("not a complete tar archive|has no", tmp_path / "half.tar")
    refused("2 classes or more", tmp_path / "whole.tar", classes=["one"])
    refused("none of them twice", tmp_path / "whole.tar", classes=["one", "one"])
    refused("at least 1 x 1", tmp_path / "whole.tar", size=(0, 4))
    refused("cannot read the names", tmp_path / "whole.tar", classes=tmp_path / "none.txt")


@pytest.mark.skipif(not CAMVID.is_dir(), reason="set KEEPCOVER_CAMVID to the folder of CamVid's archive")
def test_camvid() -> None:
    data = scenes(
        CAMVID / "camvid-240x180.tar", classes=CAMVID / "classes.txt", ignore=11, size=(60, 45), progress=False
    )
    assert data.images.shape == (701, 3, 45, 60)
    assert data.class_names[-1] == "bicyclist"
    assert int(data.labels.max()) == 11
