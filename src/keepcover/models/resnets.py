"""ResNets with the parameter names of public checkpoints, for images in [0, 1]: normalisation is inside."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from keepcover.errors import InputError
from keepcover.models.small_cnn import Normalize

# Mean and standard deviation of every channel.
CIFAR = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def _conv(inputs: int, outputs: int, side: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, side, stride, padding=side // 2, bias=False)


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    """A 1x1 convolution where the shape changes; nothing elsewhere."""
    changes = stride != 1 or inputs != outputs
    return nn.Sequential(*([_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs)] if changes else []))


def _stage(block: type[nn.Module], inputs: int, width: int, blocks: int, stride: int, grows: int = 1) -> nn.Sequential:
    """Blocks of one width, the first of which has the stride; each puts out ``grows`` times its width."""
    rest = (block(grows * width, width, 1) for _ in range(blocks - 1))
    return nn.Sequential(block(inputs, width, stride), *rest)


def _initialise(model: nn.Module) -> None:
    """Fresh weights for every convolution, as He et al. draw them."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(inputs, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, 3), nn.BatchNorm2d(width)
        self.downsample = _shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(inner)) + self.downsample(x))


class CifarResNet(nn.Module):
    """ResNet of depth 6 k + 2 for 32 x 32 images (He et al. 2016), as in the public Gaussian-smoothing checkpoints.

    Example:
        >>> sum(p.numel() for p in CifarResNet(20).parameters())
        272474
    """

    def __init__(self, depth: int = 110, classes: int = 10) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise InputError(f"expected a depth of 6 k + 2 (20, 56, 110), got {depth}")
        blocks = (depth - 2) // 6
        self.normalize, self.conv1, self.bn1 = Normalize(*CIFAR), _conv(3, 16, 3), nn.BatchNorm2d(16)
        self.layer1 = _stage(BasicBlock, 16, 16, blocks, 1)
        self.layer2 = _stage(BasicBlock, 16, 32, blocks, 2)
        self.layer3 = _stage(BasicBlock, 32, 64, blocks, 2)
        self.fc = nn.Linear(64, classes)
        _initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1(self.normalize(images))))
        return self.fc(self.layer3(self.layer2(self.layer1(x))).mean(dim=(2, 3)))


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions and a shortcut; the stride is on the 3x3 (the "v1.5" that torchvision has)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(inputs, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = _conv(width, 4 * width, 1), nn.BatchNorm2d(4 * width)
        self.downsample = _shortcut(inputs, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(self.bn1(self.conv1(x)))
        inner = torch.relu(self.bn2(self.conv2(inner)))
        return torch.relu(self.bn3(self.conv3(inner)) + self.downsample(x))


class ResNet50(nn.Module):
    """ResNet-50 for ImageNet, 224 x 224 in the paper, any size in principle: torchvision's checkpoints and the public smoothing
    ones load.

    Example:
        >>> with torch.device("meta"):
        ...     sum(p.numel() for p in ResNet50().parameters())
        25557032
    """

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.normalize, self.conv1, self.bn1 = Normalize(*IMAGENET), _conv(3, 64, 7, 2), nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _stage(Bottleneck, 64, 64, 3, 1, grows=4)
        self.layer2 = _stage(Bottleneck, 256, 128, 4, 2, grows=4)
        self.layer3 = _stage(Bottleneck, 512, 256, 6, 2, grows=4)
        self.layer4 = _stage(Bottleneck, 1024, 512, 3, 2, grows=4)
        self.fc = nn.Linear(2048, classes)
        _initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        x = self.maxpool(torch.relu(self.bn1(self.conv1(self.normalize(images)))))
        return self.fc(self.layer4(self.layer3(self.layer2(self.layer1(x)))).mean(dim=(2, 3)))


class WideBlock(nn.Module):
    """Two 3x3 convolutions, each after batch norm and ReLU; the shortcut is a 1x1 convolution where the shape changes."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(inputs), _conv(inputs, width, 3, stride)
        self.bn2, self.conv2 = nn.BatchNorm2d(width), _conv(width, width, 3)
        self.shortcut = _conv(inputs, width, 1, stride) if stride != 1 or inputs != width else None

    def forward(self, x: Tensor) -> Tensor:
        active = torch.relu(self.bn1(x))
        shortcut = x if self.shortcut is None else self.shortcut(active)
        return self.conv2(torch.relu(self.bn2(self.conv1(active)))) + shortcut


class WideResNet(nn.Module):
    """``wrn-D-W``: depth 6 k + 4, width factor W, for 32 x 32 images (Zagoruyko and Komodakis 2016).

    Example:
        >>> sum(p.numel() for p in WideResNet(28, 4).parameters())
        5849050
    """

    def __init__(self, depth: int = 28, width: int = 8, classes: int = 10) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6 or width < 1:
            raise InputError(f"expected wrn-D-W, depth D of 6 k + 4 (16, 28, 40) and W >= 1, got wrn-{depth}-{width}")
        blocks = (depth - 4) // 6
        self.normalize, self.conv1 = Normalize(*CIFAR), _conv(3, 16, 3)
        self.layer1 = _stage(WideBlock, 16, 16 * width, blocks, 1)
        self.layer2 = _stage(WideBlock, 16 * width, 32 * width, blocks, 2)
        self.layer3 = _stage(WideBlock, 32 * width, 64 * width, blocks, 2)
        self.bn1, self.fc = nn.BatchNorm2d(64 * width), nn.Linear(64 * width, classes)
        _initialise(self)

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
