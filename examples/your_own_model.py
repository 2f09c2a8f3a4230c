"""Your own PyTorch classifier in thirty lines: calibrate, predict, save, load, audit."""

import tempfile
from pathlib import Path

import torch
from torch import nn

import keepcover
from keepcover.data import digits
from keepcover.training import fit_under_noise

torch.manual_seed(0)
train, calibration, test = digits().split(800, 500, -1)

# Any module that maps images in [0, 1] to logits; normalisation is part of it, so epsilon is in pixel units.
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
fit_under_noise(model, *train.pair, sigma=0.25)

predictor = keepcover.calibrate(
    model, calibration.pair, alpha=0.1, epsilon=[0.125, 0.25], sigma=0.25, draws=8, class_names=train.class_names
)
print(predictor)

sets = predictor.predict(test.images, epsilon=0.25)
print(sets)
print(sets.measure(test.labels))

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "predictor.safetensors"
    predictor.save(path)
    again = keepcover.load(path, model)
    print(f"loaded, {path.stat().st_size / 1024:.0f} KiB:", again.guarantee)

print(keepcover.audit(predictor, test[:60].pair, steps=10, draws=8))
