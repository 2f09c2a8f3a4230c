"""Running commands in this process, and a folder in which ``keepcover smooth`` finds a model and data."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from keepcover import cli
from tests.toys import toy

IMAGES, DRAWS, CLASSES = 60, 12, 4


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    code = cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> Any:
    code, out, _ = run(capsys, *arguments, "--json")
    assert code == 0
    return json.loads(out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """Exit code 2, one line on stderr, nothing on stdout, no traceback; returns the line."""
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert len(errors[0]) > len("error: ")
    assert "Traceback" not in err
    return errors[0]


def noisy_logits(n: int = 200, draws: int = 8, classes: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(classes, (n,), generator=generator)
    logits = 2 * torch.randn(n, 1, classes, generator=generator) + torch.randn(n, draws, classes, generator=generator)
    logits[torch.arange(n), :, labels] += 4
    return logits, labels


# -- keepcover smooth ---------------------------------------------------------------------------------------------------

# A model of one's own; KEEPCOVER_TEST_* make it slow, or take the disk away after some passes.
MODULE = """
import os, resource, time
import torch

class Linear(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.layer = torch.nn.Linear(16, 4)
        self.passes = 0

    def forward(self, images):
        self.passes += 1
        time.sleep(float(os.environ.get("KEEPCOVER_TEST_SLEEP", "0")))
        if self.passes == int(os.environ.get("KEEPCOVER_TEST_FULL_AT", "0")):
            resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))
        return self.layer(images.flatten(1))

def make():
    return Linear()

def huge():
    model = Linear()
    with torch.no_grad():
        model.layer.weight.mul_(1e7)
    return model
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with data in a file and a module that makes the model, found by this process and its children."""
    images, labels = toy(IMAGES)
    save_file({"images": images, "labels": labels}, tmp_path / "toy.safetensors")
    (tmp_path / "slow_models.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "slow_models", raising=False)
    return tmp_path


def arguments(place: Path, out: str = "store", **options: Any) -> list[str]:
    """The command; keyword arguments replace options, True is a flag, None leaves one out."""
    chosen: dict[str, Any] = {
        "model": "slow_models:make",
        "data": place / "toy.safetensors",
        "sigma": 0.25,
        "draws": DRAWS,
        "out": place / out,
        "chunk_images": 10,
        "chunk_draws": 4,
        "batch_size": 16,
        **options,
    }
    words = ["smooth"]
    for name, value in chosen.items():
        if value is not None:
            words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return words


def chunks(root: Path) -> list[Path]:
    return sorted(root.glob("*/images-*.safetensors"))
