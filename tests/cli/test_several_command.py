"""Several labels and pixels on the command line: from a file to a predictor, sets, masks, a page and an audit."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.cli.runner import as_json, refused, run

MODEL = """
import torch

class Labels(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(12.0))

    def forward(self, x):
        return self.scale * (x.flatten(1)[:, :3] - 0.5)

class Pixels(Labels):
    def forward(self, x):
        bright = self.scale * (x[:, 0] - 0.5)
        return torch.stack([-bright / 2, bright / 2], dim=1)
"""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(MODEL)
    generator = torch.Generator().manual_seed(0)
    images = (torch.rand(400, 1, 2, 2, generator=generator) > 0.6).float() * 0.6 + 0.2
    images += 0.1 * torch.randn(400, 1, 2, 2, generator=generator)
    np.savez(tmp_path / "labels.npz", images=images.numpy(), labels=(images.flatten(1)[:, :3] > 0.5).numpy())
    truth = (images[:, 0] > 0.5).long()
    truth[:, 0, 0] = 9
    np.savez(tmp_path / "pixels.npz", images=images.numpy(), labels=truth.numpy())
    return tmp_path


OPTIONS = [
    "--epsilon",
    "0.05",
    "--sigma",
    "0.1",
    "--draws",
    "4",
    "--calibration-draws",
    "8",
    "--seed",
    "1",
    "--out",
    "p.safetensors",
]
AUDIT = ["--part", "2/2", "--images", "60", "--steps", "3", "--attack-draws", "4", "--out", "audit"]


def test_several_labels(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = ["--model", "nets:Labels", "--data", "labels.npz"]
    task = ["--task", "multilabel", "--class-names", "cat,dog,fox"]
    made = as_json(capsys, "calibrate", *data, "--part", "1/2", *OPTIONS, *task)
    assert made["classes"] == 3
    assert "of 3 labels" in run(capsys, "calibrate", *data, "--part", "1/2", *OPTIONS, *task)[1]
    new = ["p.safetensors", *data, "--part", "2/2", "--seed", "2"]
    found = as_json(capsys, "predict", *new)
    assert found["risk"]["low"] <= 0.1
    assert found["coverage"] is None
    assert set(found["rows"][0]["labels"]) <= {"cat", "dog", "fox"}
    assert "is at most 10 %" in run(capsys, "show", "p.safetensors")[1]
    rows = as_json(capsys, "audit", "--predictor", "p.safetensors", *data, *AUDIT)["rows"]
    assert [(row["attack"], row["verdict"]) for row in rows] == [("none", "consistent"), ("margin", "consistent")]
    side = as_json(capsys, "audit", *data, *task[:2], "--epsilon", "0.05", "--sigma", "0.1", "--draws", "2", *AUDIT)[
        "rows"
    ]
    assert {row["method"] for row in side} == {"one_draw", "exact_asymmetric"}


def test_masks(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = ["--model", "nets:Pixels", "--data", "pixels.npz"]
    task = ["--task", "segmentation", "--of", "bright", "--ignore", "9", "--class-names", "dark,bright"]
    assert "labels per pixel of those in masks" in run(capsys, "calibrate", *data, "--part", "1/2", *OPTIONS, *task)[1]
    new = ["p.safetensors", *data, "--part", "2/2", "--seed", "2"]
    found = as_json(capsys, "predict", *new)
    assert set(found["rows"][0]) == {"index", "certain", "possible", "excluded", "masks", "size", "trivial"}
    run(capsys, "predict", *new, "--out", "rows.csv")
    assert any("bright=" in row["masks"] for row in csv.DictReader(Path("rows.csv").read_text().splitlines()))
    run(capsys, "predict", *new, "--out", "masks.npz")
    saved = np.load("masks.npz")
    assert (saved["mask"].shape, saved["classes"].tolist()) == ((200, 2, 2, 2), [1])
    assert "pixels of bright" in str(saved["guarantee"])
    rows = as_json(capsys, "audit", "--predictor", "p.safetensors", *data, *AUDIT)["rows"]
    assert rows[1]["verdict"] == "consistent"
    assert "--out SETS.npz" in refused(capsys, "predict", *new, "--format", "npz")


def test_outputs_in_a_file_are_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generator = torch.Generator().manual_seed(0)
    truth = torch.rand(300, 4, generator=generator) < 0.3
    outputs = 4.0 * truth[:, None] - 2.0 + torch.randn(300, 8, 4, generator=generator)
    np.savez(tmp_path / "outputs.npz", logits=outputs.numpy(), labels=truth.numpy())
    asked = [
        "--task",
        "multilabel",
        "--epsilon",
        "0.05",
        "--sigma",
        "0.2",
        "--splits",
        "3",
        "--holdout",
        "60",
        "--draws",
        "2",
    ]
    rows = as_json(capsys, "evaluate", tmp_path / "outputs.npz", *asked)["rows"]
    assert [row["method"] for row in rows] == ["exact_asymmetric", "one_draw"]
    assert all(row["risk"]["mean"] <= 0.12 for row in rows)
