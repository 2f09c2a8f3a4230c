"""A small convolutional network for small images, with its normalisation inside."""

from __future__ import annotations

import torch
from torch import Tensor, nn

PerChannel = tuple[float, ...]


class Normalize(nn.Module):
    """(x - mean) / std per channel, as the model's first layer: epsilon and sigma stay in pixel units outside."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: PerChannel, std: PerChannel) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        return (images - self.mean) / self.std


class SmallCNN(nn.Module):
    """Two strided convolutions and two linear layers: seconds to train on a CPU.

    Example:
        >>> SmallCNN(channels=1, classes=10)(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self, channels: int = 1, classes: int = 10, width: int = 32, mean: PerChannel = (0.3,), std: PerChannel = (0.4,)
    ) -> None:
        super().__init__()
        self.normalize = Normalize(mean, std)
        self.features = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1, stride=2),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1, stride=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(8 * width, 4 * width),
            nn.ReLU(),
        )
        self.head = nn.Linear(4 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(self.normalize(images)))
