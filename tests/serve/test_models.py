"""Models of other libraries, calibrated, saved and served end to end: ONNX, torch.export, scikit-learn, weights with a head."""

from __future__ import annotations

import asyncio
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from keepcover.cli import main
from keepcover.data import digits
from keepcover.models import SmallCNN, last_linear
from keepcover.models.checkpoints import head_bytes
from keepcover.serve import Deployment, Settings
from keepcover.training import fit_under_noise

TRAIN, CALIBRATION, TEST = digits().split(800, 300, 200, seed=0)


@pytest.fixture(scope="module")
def cnn() -> SmallCNN:
    torch.manual_seed(0)
    model = SmallCNN(width=16)
    fit_under_noise(model, *TRAIN.pair, sigma=0.25, epochs=60, lr=0.01, progress=False)
    return model


def onnx_file(model: SmallCNN, folder: Path) -> tuple[str, ...]:
    pytest.importorskip("onnxscript", reason="exporting to ONNX needs onnxscript: pip install '.[test]'")
    path = folder / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dynamic = {"images": {0: torch.export.Dim.DYNAMIC}}
        torch.onnx.export(model, (torch.rand(2, 1, 8, 8),), path, dynamic_shapes=dynamic, verbose=False)
    return "--model", str(path)


def exported_file(model: SmallCNN, folder: Path) -> tuple[str, ...]:
    path = folder / "model.pt2"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dynamic = ({0: torch.export.Dim("batch")},)
        torch.export.save(torch.export.export(model, (torch.rand(2, 1, 8, 8),), dynamic_shapes=dynamic), path)
    return "--model", str(path)


def scikit_learn(_: SmallCNN, folder: Path) -> tuple[str, ...]:
    """A linear model behind a function: images in, predict_proba out."""
    (folder / "linear_digits.py").write_text(
        "import numpy as np, torch\n"
        "from sklearn.linear_model import LogisticRegression\n"
        "from keepcover.data import digits\n"
        "class OnImages:\n"
        "    def __init__(self):\n"
        "        train = digits().split(800, 300, 200, seed=0)[0]\n"
        "        x, y = train.images.flatten(1).numpy(), train.labels.numpy()\n"
        "        noise = np.random.default_rng(0).normal(0, 0.25, (4, *x.shape))\n"
        "        self.model = LogisticRegression(max_iter=200).fit(np.concatenate(x + noise), np.tile(y, 4))\n"
        "        self.classes_ = self.model.classes_\n"
        "    def predict_proba(self, images):\n"
        "        return self.model.predict_proba(np.asarray(images).reshape(len(images), -1))\n"
        "def make():\n"
        "    return OnImages()\n"
    )
    return "--model", "linear_digits:make"


def weights_with_a_head(model: SmallCNN, folder: Path) -> tuple[str, ...]:
    """The file's own last layer is nonsense: only the head over it makes a classifier."""
    (folder / "head.safetensors").write_bytes(head_bytes(model))
    bare = SmallCNN(width=16)
    bare.load_state_dict(model.state_dict())
    torch.nn.init.zeros_(last_linear(bare)[1].weight)
    save_file(bare.state_dict(), folder / "base.safetensors")
    (folder / "narrow.py").write_text(
        "from keepcover.models import SmallCNN, load_head, load_weights\n"
        "from pathlib import Path\n"
        "def make():\n"
        "    here = Path(__file__).parent\n"
        "    return load_head(load_weights(SmallCNN(width=16), here / 'base.safetensors'), here / 'head.safetensors')\n"
    )
    return "--model", "narrow:make"


@pytest.mark.parametrize("make", [onnx_file, exported_file, scikit_learn, weights_with_a_head])
def test_calibrated_saved_and_served(
    make: Callable[[SmallCNN, Path], tuple[str, ...]],
    cnn: SmallCNN,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`keepcover calibrate`, `show`, then the service: sets hold most true labels and are far from trivial."""
    monkeypatch.syspath_prepend(tmp_path)
    model = make(cnn, tmp_path)
    np.savez(tmp_path / "calibration.npz", images=CALIBRATION.images.numpy(), labels=CALIBRATION.labels.numpy())
    saved = tmp_path / "predictor.safetensors"
    words = ["calibrate", *model, "--data", str(tmp_path / "calibration.npz"), "--sigma", "0.25", "--epsilon", "0.125"]
    # A seed, because few points and draws choose a poor rule now and then: one in thirty has sets of 4 labels, not of 1.2.
    words += ["--draws", "4", "--calibration-draws", "8", "--seed", "0", "--out", str(saved)]
    assert main(words) == 0, capsys.readouterr().err
    assert main(["show", str(saved)]) == 0
    assert "With probability at least 90 %" in capsys.readouterr().out.replace("\n", " ")
    response = asyncio.run(served(Deployment(saved, model[1], settings=Settings(max_images=64))))
    assert response.status_code == 200, response.text
    sets = response.json()["sets"]
    held = [int(TEST.labels[i]) in one["indices"] for i, one in enumerate(sets)]
    # 40 queries at 90 %: fewer than 24 covered has probability below 1e-6. Noise of queries is fresh and moves the mean size by 0.1.
    assert sum(held) >= 24
    assert sum(one["size"] for one in sets) / len(sets) < 4
    for name in [name for name in sys.modules if name in ("linear_digits", "narrow")]:
        monkeypatch.delitem(sys.modules, name)


async def served(deployment: Deployment) -> httpx.Response:
    transport = httpx.ASGITransport(deployment.build())
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
        return await client.post("/v1/predict", json={"images": TEST.images[:40].tolist()})
