"""``keepcover audit``: methods side by side, saved predictors, bad requests."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from keepcover.prediction.calibration import calibrate
from tests.cli.runner import as_json, refused, run
from tests.pages.reader import offline
from tests.toys import nearest, toy


def make_nearest() -> nn.Module:
    return nearest()


@pytest.fixture
def toy_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Data in a file, and a module of one's own that makes the model."""
    images, labels = toy(400, seed=1)
    save_file({"images": images, "labels": labels}, tmp_path / "toy.safetensors")
    monkeypatch.setitem(sys.modules, "own_models", sys.modules[__name__])
    return tmp_path / "toy.safetensors"


TINY = [
    "--model",
    "own_models:make_nearest",
    "--sigma",
    "0.15",
    "--epsilon",
    "0.15",
    "--images",
    "40",
    "--steps",
    "4",
    "--attack-draws",
    "4",
    "--draws",
    "4",
]


def test_audit_attacks_side_by_side(toy_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report"
    arguments = ["audit", "--data", toy_file, *TINY, "--method", "cp", "rcp1", "exact", "--out", out]
    found = as_json(capsys, *arguments)
    assert set(found) == {"rows", "images", "violated", "predictors", "report"}
    assert (found["images"], found["violated"], found["report"]) == (40, 0, str(out / "audit.html"))
    names = {"cp (1)": False, "rcp1 (1)": True, "exact (4)": True}
    assert [(row["name"], row["attack"]) for row in found["rows"]] == [
        (name, attack) for name in names for attack in ("none", "softmax", "margin")
    ]
    assert all(row["certified"] == names[row["name"]] for row in found["rows"])
    assert sorted(path.name for path in out.iterdir()) == ["audit.html", "audit.json"]
    offline((out / "audit.html").read_text())
    written = json.loads((out / "audit.json").read_text())
    assert written["rows"] == found["rows"]
    assert written["manifest"]["config"]["sigma"] == 0.15
    code, text, _ = run(capsys, *arguments)
    assert code == 0
    for row in found["rows"]:
        interval = f"{row['coverage']['mean']:.3f} [{row['coverage']['low']:.3f}, {row['coverage']['high']:.3f}]"
        assert any(row["name"] in line and row["attack"] in line and interval in line for line in text.splitlines())


def test_audit_of_a_saved_predictor(toy_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "mine.safetensors"
    calibrate(nearest(), toy(200, seed=7), method="rcp1", epsilon=0.15, sigma=0.15, seed=1).save(saved)
    mine = [*TINY[:2], *TINY[4:], "--predictor", saved]  # its noise is its own
    found = as_json(capsys, "audit", "--data", toy_file, *mine, "--radius", "0.05", "--radius", "0.15")
    assert [(row["name"], row["radius"]) for row in found["rows"]] == [("mine", r) for r in (0, 0.05, 0.05, 0.15, 0.15)]
    assert found["report"] is None


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (["--model", "magic"], "a model among small-cnn"),
        (["--model", "own_models:nothing"], "cannot find 'own_models:nothing'"),
        (["--data", "svhn"], "digits, cifar10, cifar100, mnist, fashion-mnist, a folder"),
        (["--data", "cifar10"], "--data-dir DIR"),
        (["--method", "magic"], "method among auto, cp"),
        (["--method", "exact", "--sigma", "0"], "there is none; give sigma > 0"),
        (["--method", "exact", "--draws", "0"], "at least 1 draw"),
        (["--method", "rcp1", "--steps", "0"], "steps >= 1"),
        (["--method", "rcp1", "--radius", "-1"], "epsilon >= 0"),
        (["--method", "rcp1", "--images", "0"], "at least one image"),
        (["--method", "rcp1", "--attack-draws", "0"], "draw"),
        (["--method", "rcp1", "--attack", "magic"], "attacks among softmax, margin, random"),
        (["--method", "rcp1", "--surrogate", "magic"], "an .onnx or .pt2 file"),
        (["--part", "9"], "a part k/m"),
    ],
)
def test_bad_audits_are_refused(
    changes: list[str], match: str, toy_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert match in refused(capsys, "audit", "--data", toy_file, *TINY, *changes)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ([], "no predictor at"),
        (
            ["--sigma", "0.5", "--delta", "0.1"],
            "has its own noise, method and promise; leave out --sigma 0.5 --delta 0.1",
        ),
        (["--method", "exact"], "leave out --method"),
    ],
)
def test_what_a_saved_predictor_brings_is_not_asked_again(
    changes: list[str], match: str, toy_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = ["--model", "own_models:make_nearest", "--predictor", "nothing.safetensors"]
    assert match in refused(capsys, "audit", "--data", toy_file, *mine, *changes)


def test_small_cnn_is_trained_on_one_channel_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"images": torch.rand(40, 3, 8, 8), "labels": torch.arange(40) % 2}, tmp_path / "rgb.safetensors")
    assert "give a model" in refused(capsys, "audit", "--data", tmp_path / "rgb.safetensors")


def test_a_place_that_cannot_be_written_is_one_line(
    toy_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not a traceback after minutes of work."""
    (tmp_path / "taken").write_text("a file, not a folder")
    line = refused(capsys, "audit", "--data", toy_file, *TINY, "--method", "rcp1", "--out", tmp_path / "taken")
    assert "taken" in line
