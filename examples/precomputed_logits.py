"""Noisy logits from any framework: compare methods on them and calibrate a predictor, without running a network again."""

import torch

import keepcover
from keepcover.data import digits
from keepcover.models import SmallCNN
from keepcover.noise import Stream, fresh_seed
from keepcover.training import fit_under_noise

torch.manual_seed(0)
train, rest = digits().split(800, -1)
model = fit_under_noise(SmallCNN(), *train.pair, sigma=0.25)

# Here keepcover draws the noise; any code will do that adds independent N(0, sigma^2) noise per image and draw.
smoother = keepcover.Smoother(model, 0.25)
logits = smoother.logits(rest.images, draws=16, stream=Stream(fresh_seed(), "test"))
known, new = slice(0, 900), slice(900, None)

rows = keepcover.evaluate(
    logits[known], rest.labels[known], epsilon=0.125, sigma=0.25, methods=["cp", "rcp1", "exact"], splits=10, holdout=100
)
for row in rows:
    print(f"{row.method:<8} size {row.size}   coverage {row.coverage}   {row.guarantee.draws} draws")

predictor = keepcover.calibrate_outputs(logits[known], rest.labels[known], epsilon=0.125, sigma=0.25)
sets = predictor.predict_outputs(logits[new])
print(sets.guarantee)
print(sets.measure(rest.labels[new]))
