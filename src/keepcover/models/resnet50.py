"""ResNet-50 for ImageNet with torchvision's parameter names, so that its checkpoints and the public smoothing ones load."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from keepcover.models.cifar_resnet import downsample, initialise, stage
from keepcover.models.small_cnn import Normalize

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions and a shortcut; the stride is on the 3x3 (the "v1.5" that torchvision has)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = downsample(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(self.bn2(self.conv2(x)))
        return torch.relu(self.bn3(self.conv3(x)) + shortcut)


class ResNet50(nn.Module):
    """ResNet-50 for images in [0, 1], 224 x 224 in the paper, any size in principle; normalisation is inside.

    Example:
        >>> with torch.device("meta"):
        ...     sum(p.numel() for p in ResNet50().parameters())
        25557032
    """

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.normalize = Normalize(MEAN, STD)
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = stage(Bottleneck, 64, 64, 3, 1, grows=4)
        self.layer2 = stage(Bottleneck, 256, 128, 4, 2, grows=4)
        self.layer3 = stage(Bottleneck, 512, 256, 6, 2, grows=4)
        self.layer4 = stage(Bottleneck, 1024, 512, 3, 2, grows=4)
        self.fc = nn.Linear(2048, classes)
        initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        x = self.maxpool(torch.relu(self.bn1(self.conv1(self.normalize(images)))))
        return self.fc(self.layer4(self.layer3(self.layer2(self.layer1(x)))).mean(dim=(2, 3)))
