"""Fine-tune your own classifier under noise: before and after, in accuracy under noise and in certified set size."""

import copy

import torch
from torch import nn

import keepcover
from keepcover.data import digits
from keepcover.training import fit_under_noise

SIGMA, EPSILON = 0.5, 0.25
torch.manual_seed(0)
train, calibration, test = digits().split(800, 500, -1)

# An ordinary network, trained the ordinary way: without noise. Yours may come from a file.
ordinary = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.Conv2d(16, 32, 3, padding=1),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(512, 10),
)
fit_under_noise(ordinary, *train.pair, sigma=0.0, epochs=15)

# Fine-tuning starts from the weights that are there and changes them in place: keep a copy of the old ones. Without labels the
# network learns to say under noise what it said without.
tuned = fit_under_noise(copy.deepcopy(ordinary), *train.pair, sigma=SIGMA)
label_free = fit_under_noise(copy.deepcopy(ordinary), train.images, sigma=SIGMA)


def accuracy(model: nn.Module, sigma: float) -> float:
    noise = torch.randn(test.images.shape, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        return (model(test.images + sigma * noise).argmax(dim=1) == test.labels).double().mean().item()


print(f"{'network':<12}{'accuracy':>10}{'under noise':>13}{'certified size':>16}{'coverage':>10}")
for name, model in {"ordinary": ordinary, "label-free": label_free, "fine-tuned": tuned}.items():
    # This warns about the ordinary network, rightly; predictor.warning is the same sentence.
    predictor = keepcover.calibrate(model, calibration.pair, epsilon=EPSILON, sigma=SIGMA, draws=8, seed=0)
    found = predictor.predict(test.images).measure(test.labels)
    print(
        f"{name:<12}{accuracy(model, 0.0):>10.3f}{accuracy(model, SIGMA):>13.3f}{found.size:>16.2f}{found.coverage.mean:>10.3f}"
    )
print(predictor.guarantee)
