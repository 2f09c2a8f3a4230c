"""CIFAR ResNets (He et al. 2016) with the parameter names of the public Gaussian-smoothing checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from keepcover.errors import InputError
from keepcover.models.small_cnn import Normalize

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)


def downsample(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    """The shortcut of a block: a 1x1 convolution where the shape changes."""
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs))


def stage(block: type[nn.Module], inputs: int, width: int, blocks: int, stride: int, grows: int = 1) -> nn.Sequential:
    """Blocks of one width, the first of which has the stride; each puts out ``grows`` times its width."""
    rest = (block(grows * width, width, 1) for _ in range(blocks - 1))
    return nn.Sequential(block(inputs, width, stride), *rest)


def initialise(model: nn.Module) -> None:
    """Fresh weights for every convolution, as He et al. draw them."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = downsample(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(x)) + shortcut)


class CifarResNet(nn.Module):
    """ResNet of depth 6 k + 2 for 32 x 32 images in [0, 1]; normalisation is inside.

    Example:
        >>> sum(p.numel() for p in CifarResNet(20).parameters())
        272474
    """

    def __init__(self, depth: int = 110, classes: int = 10) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise InputError(f"expected a depth of 6 k + 2 (20, 56, 110), got {depth}")
        blocks = (depth - 2) // 6
        self.normalize = Normalize(MEAN, STD)
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = stage(BasicBlock, 16, 16, blocks, 1)
        self.layer2 = stage(BasicBlock, 16, 32, blocks, 2)
        self.layer3 = stage(BasicBlock, 32, 64, blocks, 2)
        self.fc = nn.Linear(64, classes)
        initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1(self.normalize(images))))
        return self.fc(self.layer3(self.layer2(self.layer1(x))).mean(dim=(2, 3)))
