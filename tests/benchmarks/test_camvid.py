"""The CamVid benchmark on tiny scenes: it trains, evaluates, attacks, draws, and goes on where it was."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks import camvid
from docs.tools import camvid as page

NAMES = ("sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist")


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 scenes of 16 x 12 pixels in CamVid's layout: boxes of cars, pedestrians and cyclists, in colours of their own."""
    folder, rng = tmp_path_factory.mktemp("camvid"), np.random.default_rng(0)
    (folder / "classes.txt").write_text("\n".join([*NAMES, "unlabelled"]))
    with tarfile.open(folder / "camvid.tar", "w") as tar:
        for i in range(60):
            mask = np.full((12, 16), 3, np.uint8)
            mask[0] = camvid.IGNORE
            for label in (8, 9, 10):
                top, left = rng.integers(1, 8), rng.integers(0, 12)
                mask[top : top + 4, left : left + 4] = label
            for name, pixels in ((f"train/{i}", mask[..., None] * np.array([23, 5, 17])), (f"trainannot/{i}", mask)):
                content = io.BytesIO()
                Image.fromarray(pixels.astype(np.uint8)).save(content, "png")
                info = tarfile.TarInfo(f"{name}.png")
                info.size = content.tell()
                content.seek(0)
                tar.addfile(info, content)
    return folder / "camvid.tar"


@pytest.mark.bench
def test_a_small_run(archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = "--size 16 12 --sigma 0.25 --width 2 --epochs 2 --training 16 --holdout 12 --splits 2 --calibration-draws 8 --images 8 --steps 1"
    monkeypatch.setattr(camvid, "DRAWS", (1, 4))
    given = ["--data", str(archive), "--classes", str(archive.with_name("classes.txt")), *small.split()]
    given += ["--attack-draws", "2", "--weights", str(tmp_path), "--figure", str(tmp_path / "some.png")]
    given += ["--out", str(tmp_path / "segmentation-camvid.json")]
    camvid.main(given)
    found = json.loads((tmp_path / "segmentation-camvid.json").read_text())
    masks = [row for row in found["rows"] if row["of"] != "every label"]
    assert {row["of"] for row in masks} == set(camvid.CHOSEN)
    assert {(row["at"], row["epsilon"]) for row in masks} == {(0.125, 0.125), (0.25, 0.25), (0.125, 0.0), (0.25, 0.0)}
    for row in masks:
        assert 0 <= row["attacked_coverage"]["mean"] <= 1
        assert 0 < row["true"] < row["size"]["mean"] + 1e-9 or row["coverage"]["mean"] < 1
        assert ("audit" in row) == ((row["method"], row["draws"]) == ("exact_asymmetric", 4))
    assert (tmp_path / "some.png").read_bytes()[:4] == b"\x89PNG"
    text = page.section(tmp_path)
    assert text.count("| pedestrian | σ = 0.25 | 0.125 |") == 2
    assert "60 frames" in text
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("camvid*.safetensors")}
    (tmp_path / "camvid-sigma0.25-car.json").unlink()
    before = found["rows"]
    camvid.main(given)  # trains nothing, and computes the missing part alone
    assert written == {path: path.stat().st_mtime_ns for path in tmp_path.glob("camvid*.safetensors")}
    assert json.loads((tmp_path / "segmentation-camvid.json").read_text())["rows"] == before
    with pytest.raises(SystemExit, match="other options"):
        camvid.main([*given, "--splits", "3"])


def test_outputs_are_filled_further(tmp_path: Path) -> None:
    """A file that was left half full ends as one that was filled at once."""
    torch.manual_seed(0)
    model, images = camvid.UNet(3, 2).eval(), torch.rand(23, 3, 12, 16)
    smoother, stream = camvid.Smoother(model, 0.1, progress=False), camvid.Stream(0, "test")
    whole, _ = camvid.noisy_outputs(tmp_path / "whole.npy", smoother, images, 2, stream)
    part, _ = camvid.noisy_outputs(tmp_path / "part.npy", smoother, images, 2, stream)
    part[10:] = 0
    part.flush()
    (tmp_path / "part.json").write_text("[10, 1.0]")
    again, seconds = camvid.noisy_outputs(tmp_path / "part.npy", smoother, images, 2, stream)
    assert np.array_equal(again, whole)
    assert seconds > 1
    kept = camvid.Kept(whole, torch.arange(23)[:, None, None].expand(23, 12, 16) % 4, smoother.noise).having(3)
    assert kept.index.tolist() == [3, 7, 11, 15, 19]
    read = list(kept.read(torch.tensor([4, 0])))
    assert torch.equal(torch.cat([piece.truth for piece in read])[:, 0, 0], torch.tensor([3, 3]))
    assert torch.equal(torch.cat([piece.outputs for piece in read]), torch.from_numpy(whole[[19, 3]]).float())


def test_one_class_against_all_others_has_the_same_masks() -> None:
    torch.manual_seed(0)
    truth = torch.randint(0, 4, (80, 6, 8))
    truth[:, 0] = camvid.IGNORE
    outputs = 2 * torch.nn.functional.one_hot(truth.clamp(max=3), 4).permute(0, 3, 1, 2)[:, None] + torch.randn(
        80, 8, 4, 6, 8
    )
    kept, names = (
        camvid.Kept(outputs.half().numpy(), truth, camvid.Smoother(torch.nn.Identity(), 0.25).noise),
        tuple("abcd"),
    )
    data = camvid.Labelled("toy", torch.zeros(80, 3, 6, 8), truth, names)
    shared: dict[str, Any] = {"splits": 3, "holdout": 20, "seed": 0}
    found = [
        [(row.size, row.coverage) for rows in camvid.evaluate_entries(source, listed, **shared) for row in rows]
        for source, listed in (
            (kept.having(2), camvid.entries(camvid.task_of("c", data), [0.25])[:2]),
            (kept.having(2).against_others(2), camvid.entries(camvid.TWO, [0.25])[:2]),
        )
    ]
    for (size, coverage), (other_size, other_coverage) in zip(*found, strict=True):
        assert size.mean == pytest.approx(other_size.mean, abs=2e-3)  # scores that rounding moves across a threshold
        assert coverage.mean == pytest.approx(other_coverage.mean, abs=2e-3)
