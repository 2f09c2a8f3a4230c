"""Wide ResNets for small images (Zagoruyko and Komodakis 2016): normalisation, ReLU, convolution, in that order."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from keepcover.errors import InputError
from keepcover.models.cifar_resnet import MEAN, STD, initialise, stage
from keepcover.models.small_cnn import Normalize


class WideBlock(nn.Module):
    """Two 3x3 convolutions, each after batch norm and ReLU; the shortcut is a 1x1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.shortcut = None
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        active = torch.relu(self.bn1(x))
        shortcut = x if self.shortcut is None else self.shortcut(active)
        return self.conv2(torch.relu(self.bn2(self.conv1(active)))) + shortcut


class WideResNet(nn.Module):
    """``wrn-D-W``: depth 6 k + 4, width factor W, for 32 x 32 images in [0, 1]; normalisation is inside.

    Example:
        >>> sum(p.numel() for p in WideResNet(28, 4).parameters())
        5849050
    """

    def __init__(self, depth: int = 28, width: int = 8, classes: int = 10) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6 or width < 1:
            raise InputError(
                f"expected wrn-D-W with a depth D of 6 k + 4 (16, 28, 40) and W >= 1, got wrn-{depth}-{width}"
            )
        self.normalize = Normalize(MEAN, STD)
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        blocks = (depth - 4) // 6
        self.layer1 = stage(WideBlock, 16, 16 * width, blocks, 1)
        self.layer2 = stage(WideBlock, 16 * width, 32 * width, blocks, 2)
        self.layer3 = stage(WideBlock, 32 * width, 64 * width, blocks, 2)
        self.bn1 = nn.BatchNorm2d(64 * width)
        self.fc = nn.Linear(64 * width, classes)
        initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(self.conv1(self.normalize(images)))))
        return self.fc(torch.relu(self.bn1(x)).mean(dim=(2, 3)))


class Mirrored(nn.Module):
    """The mean of what a classifier says of a (noisy) image and of its mirror image: log-probabilities, twice the work.

    Example:
        >>> model = Mirrored(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)))
        >>> image = torch.rand(1, 1, 2, 2)
        >>> torch.allclose(model(image), model(image.flip(-1)), atol=1e-6)
        True
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        one, other = (self.model(view).log_softmax(dim=-1) for view in (images, images.flip(-1)))
        return torch.logaddexp(one, other) - math.log(2)
