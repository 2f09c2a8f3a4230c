"""The benchmark of several labels runs, and writes rows with their manifest; its mosaics are what it says they are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from benchmarks import several_labels

pytestmark = pytest.mark.filterwarnings("ignore::keepcover.errors.KeepcoverWarning")


@pytest.mark.bench
def test_the_benchmark_of_several_labels_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(several_labels, "ASKED", (("exact_asymmetric", 1), ("one_draw", 1)))
    sizes = [
        "--images",
        "240",
        "--attacked",
        "20",
        "--splits",
        "2",
        "--training",
        "256",
        "--epochs",
        "1",
        "--holdout",
        "60",
    ]
    several_labels.main(["--out", str(tmp_path / "rows.json"), *sizes])
    found = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["epsilon"], row["method"]) for row in found["rows"]] == [
        (epsilon, method) for epsilon in (0.25, 0.5) for method in ("exact_asymmetric", "one_draw")
    ]
    for row in found["rows"]:
        assert 0 <= row["risk"]["mean"] <= 0.25
        assert [one["attack"] for one in row["audit"]] == ["none", "margin"]
        assert row["audit"][1]["verdict"] == "consistent"
    assert found["manifest"]["config"]["images_without_labels"] > 0


def test_a_mosaic_is_read_as_its_four_images_are() -> None:
    """So noisy outputs of single images are those of mosaics; labels get the log-odds of the quarter that shows them best."""
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 5))
    images = torch.rand(7, 4, 3, 2, 2)
    assert torch.equal(several_labels.quarters(several_labels.mosaic(images)), images)
    assert torch.equal(several_labels.mosaic(images)[:, :, :2, 2:], images[:, 1])
    alone = torch.stack([network(images[:, i]) for i in range(4)], dim=1)
    found = several_labels.Quarters(network)(several_labels.mosaic(images))
    torch.testing.assert_close(found, several_labels.somewhere(alone))
    torch.testing.assert_close(found, alone.softmax(dim=2).logit().amax(dim=1))


def test_the_benchmark_of_mosaics_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 10))
    images, labels = torch.rand(480, 3, 2, 2), torch.arange(480) % 10
    np.savez(tmp_path / "images.npz", images=images.numpy(), labels=labels.numpy())
    noisy = images[:, None] + 0.25 * torch.randn(480, 64, 3, 2, 2)
    logits = network(noisy.flatten(0, 1)).view(480, 64, 10).detach()
    save_file({"logits": logits}, tmp_path / "logits.safetensors")
    monkeypatch.setattr(several_labels, "ASKED", (("exact_asymmetric", 4), ("one_draw", 1)))
    monkeypatch.setattr(several_labels, "load_model", lambda *_: network)
    files = ["--mosaics", str(tmp_path / "images.npz"), "--logits", str(tmp_path / "logits.safetensors")]
    sizes = ["--images", "120", "--attacked", "30", "--splits", "2", "--holdout", "20", "--steps", "2", "--draws", "2"]
    asked = ["--out", str(tmp_path / "rows.json"), *files, "--weights", "network", "--once", *sizes]
    several_labels.main(asked)
    found = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["epsilon"], row["method"]) for row in found["rows"]] == [
        (epsilon, method) for epsilon in (0.125, 0.25) for method in ("exact_asymmetric", "one_draw")
    ]
    assert all(one["verdict"] == "consistent" for row in found["rows"] for one in row["audit"])
    assert found["manifest"]["config"]["images_without_labels"] == 0
    assert "--mosaics images.npz --logits logits.safetensors" in found["manifest"]["command"]
    other = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 10))
    monkeypatch.setattr(several_labels, "load_model", lambda *_: other)
    with pytest.raises(SystemExit, match="does not hold noisy logits of network"):
        several_labels.main(asked)
