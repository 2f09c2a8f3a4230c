"""EfficientNet-lite0 for ImageNet with the parameter names of the PyPI package ``efficientnet_lite_pytorch``: its weights load."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from keepcover.models.small_cnn import Normalize

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
    """EfficientNet-lite0 for images in [0, 1], 224 x 224 as published; its input (x - 0.498) / 0.502 is made inside.

    Example:
        >>> import torch
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
