"""An ONNX file from calibration to audit: onnxruntime runs the model, keepcover brings the sets and the promise."""

import tempfile
from pathlib import Path

import torch

import keepcover
from keepcover.adapters import OnnxClassifier
from keepcover.attacks import transfer
from keepcover.data import digits
from keepcover.models import SmallCNN
from keepcover.training import fit_under_noise

SIGMA, EPSILON = 0.25, 0.125

torch.manual_seed(0)
train, calibration, test = digits().split(800, 500, -1)
network = fit_under_noise(SmallCNN(), *train.pair, sigma=SIGMA).eval()

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "digits.onnx"
    torch.onnx.export(
        network, (test.images[:2],), path, dynamic_shapes=({0: torch.export.Dim.DYNAMIC},), verbose=False
    )  # any other exporter will do
    model = OnnxClassifier(path)
    predictor = keepcover.calibrate(
        model, calibration.pair, alpha=0.1, epsilon=EPSILON, sigma=SIGMA, class_names=train.class_names
    )
    predictor.save(Path(folder) / "predictor.safetensors")

    # Elsewhere, later: the same file, or the predictor refuses it.
    again = keepcover.load(Path(folder) / "predictor.safetensors", OnnxClassifier(path))
    print(again.guarantee)
    sets = again.predict(test.images)
    print(sets)
    print(sets.measure(test.labels))

    # No gradients come out of onnxruntime: search by queries, and transfer from the network we happen to have.
    attacks = {"queries": "random", "transfer": transfer(network, SIGMA, draws=8)}
    print(keepcover.audit(again, test[:100].pair, attacks=attacks, steps=20, draws=8))
