"""Noisy logits from any framework: calibrate, predict and compare methods without running a network."""

import torch

import keepcover
from keepcover import Smoother, Stream
from keepcover.data import digits
from keepcover.models import SmallCNN
from keepcover.noise import fresh_seed
from keepcover.training import fit_under_noise

SIGMA, EPSILON = 0.25, 0.125

torch.manual_seed(0)
train, calibration, test = digits().split(800, 500, -1)
model = fit_under_noise(SmallCNN(), *train.pair, sigma=SIGMA)

# Here keepcover draws the noise; any code will do that adds independent N(0, sigma^2) noise per image and draw.
smoother = Smoother(model, SIGMA)
outputs = smoother.logits(calibration.images, draws=64, stream=Stream(fresh_seed(), "calibration"))
queries = smoother.logits(test.images, draws=16, stream=Stream(fresh_seed(), "test"))

predictor = keepcover.calibrate_outputs(outputs, calibration.labels, epsilon=EPSILON, sigma=SIGMA, draws=16)
sets = predictor.predict_outputs(queries)
print(sets.guarantee)
print(sets.measure(test.labels))

# Every method on the same random splits of the same outputs.
rows = keepcover.evaluate(
    outputs, calibration.labels, epsilon=EPSILON, sigma=SIGMA, transforms=["ptt"], draws=16, holdout=100, splits=10
)
for row in rows:
    print(f"{row.method:<22} size {row.size.mean:5.2f}  coverage {row.coverage.mean:.3f}")
