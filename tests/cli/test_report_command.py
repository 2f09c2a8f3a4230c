"""`keepcover report` for tasks other than classification: intervals and scenes, from files to a page."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.cli.runner import as_json

MODEL = """
import torch

class Sum(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.scale * x.sum(dim=1, keepdim=True)

class Pixels(Sum):
    def forward(self, x):
        bright = 12 * self.scale * (x[:, 0] - 0.5)
        return torch.stack([-bright / 2, bright / 2], dim=1)
"""
ASK = [
    "--epsilon",
    "0.05",
    "--epsilon",
    "0.1",
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


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_nets.py").write_text(MODEL)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 3, generator=generator)
    y = x.sum(dim=1) + 0.3 * torch.randn(400, generator=generator)
    np.savez(tmp_path / "table.npz", inputs=x.numpy(), targets=y.numpy())
    images = (torch.rand(400, 1, 6, 8, generator=generator) > 0.6).float() * 0.6 + 0.2
    np.savez(tmp_path / "pixels.npz", images=images.numpy(), labels=(images[:, 0] > 0.5).long().numpy())
    return tmp_path


@pytest.mark.parametrize(
    ("task", "data", "model", "title", "said"),
    [
        (
            "regression --score residual",
            "table",
            "Sum",
            "Intervals, sorted by length",
            "of the unions hold the true value",
        ),
        (
            "segmentation --of bright --class-names dark,bright",
            "pixels",
            "Pixels",
            "Red: certain, one label alone is kept",
            "pixels of bright that the mask of their class misses is",
        ),
    ],
)
def test_a_page_for_every_task(
    files: Path, capsys: pytest.CaptureFixture[str], task: str, data: str, model: str, title: str, said: str
) -> None:
    given = ["--model", f"own_nets:{model}", "--data", f"{data}.npz"]
    as_json(capsys, "calibrate", *given, "--part", "1/2", *ASK, "--task", *task.split())
    found = as_json(capsys, "report", "p.safetensors", *given, "--part", "2/2", "--seed", "2", "--out", "page.html")
    page = (files / "page.html").read_text()
    assert title in page
    assert said in page
    assert "What a larger radius costs" in page
    assert found["evaluation"]["coverage"]["mean"] > 0.85
