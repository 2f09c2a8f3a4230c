"""Noisy logits from any framework, evaluated without a network: the file format is two arrays."""

import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from keepcover.cli import main
from keepcover.data import digits
from keepcover.engine.smoother import Smoother
from keepcover.models import SmallCNN
from keepcover.noise import Stream, fresh_seed
from keepcover.training import fit_under_noise

torch.manual_seed(0)
train, rest = digits().split(800, -1)
model = fit_under_noise(SmallCNN(), *train.pair, sigma=0.25)

# Here keepcover draws the noise; any code will do that adds independent N(0, sigma^2) noise per image and draw.
logits = Smoother(model, 0.25).logits(rest.images, draws=16, stream=Stream(fresh_seed(), "test"))

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "logits.safetensors"
    save_file({"logits": logits.half(), "labels": rest.labels}, path)
    raise SystemExit(
        main(["evaluate", str(path), "--sigma", "0.25", "--epsilon", "0.125", "--holdout", "100", "--splits", "10"])
    )
