"""The example that the demo and the explorer start from: digits in four parts, and a small CNN trained on the first."""

from __future__ import annotations

import torch
from torch import nn

from keepcover.data import Labelled, digits
from keepcover.models import SmallCNN
from keepcover.training.base import fit_under_noise

SIGMA, EPOCHS = 0.5, 60


def example_split(seed: int = 0) -> tuple[Labelled, Labelled, Labelled, Labelled]:
    """The digits as training, holdout, calibration and test points."""
    train, holdout, calibration, test = digits().split(697, 100, 500, 500, seed=seed)
    return train, holdout, calibration, test


def example_model(
    train: Labelled, seed: int = 0, *, sigma: float = SIGMA, progress: bool = False, epochs: int = EPOCHS
) -> nn.Module:
    """A small CNN trained under noise on images of one channel: seconds on one core."""
    torch.manual_seed(seed)
    model = SmallCNN(classes=len(train.class_names))
    return fit_under_noise(model, *train.pair, sigma, epochs=epochs, seed=seed, progress=progress)
