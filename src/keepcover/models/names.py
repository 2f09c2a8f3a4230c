"""Networks by name."""

from __future__ import annotations

import re
from collections.abc import Callable

from torch import nn

from keepcover.models.inputs import masked
from keepcover.models.networks import CifarResNet, EfficientNetLite0, Mirrored, ResNet50, SmallCNN, WideResNet
from keepcover.models.unet import UNet

NAMES = "small-cnn, cifar-resnet20/56/110, wrn-D-W (wrn-28-8), resnet50, efficientnet-lite0, unet-W (unet-16), masked:NAME, band4:NAME, mirrored:NAME"
_PATTERNS: dict[str, Callable[..., nn.Module]] = {
    r"small-cnn": lambda classes: SmallCNN(classes=classes),
    r"cifar-resnet(\d+)": lambda classes, depth: CifarResNet(depth, classes),
    r"wrn-(\d+)-(\d+)": lambda classes, depth, width: WideResNet(depth, width, classes),
    r"resnet50": lambda classes: ResNet50(classes),
    r"efficientnet-lite0": lambda classes: EfficientNetLite0(classes),
    r"unet-(\d+)": lambda classes, width: UNet(classes, width),
}
_NAME = re.compile(r"(mirrored:)?(?:(masked|band([1-9]\d*)):)?(.*)", re.DOTALL)


def is_named(name: str) -> bool:
    """Whether :func:`network` knows the name.

    Example:
        >>> is_named("wrn-28-8"), is_named("mirrored:wrn-28-8"), is_named("package.module:function")
        (True, True, False)
    """
    kind = _NAME.fullmatch(name)[4]  # type: ignore[index]
    return any(re.fullmatch(pattern, kind) for pattern in _PATTERNS)


def network(name: str, classes: int = 10, load: Callable[[nn.Module], nn.Module] = lambda model: model) -> nn.Module:
    """A fresh network by its name, one for which :func:`is_named` holds; ``load`` puts weights into it.

    ``masked:NAME`` has one more input channel, for what is present (:func:`masked`), and ``band4:NAME`` reads the four columns
    alone that are. ``mirrored:NAME`` has the weights of NAME and looks at every image twice (:class:`Mirrored`).
    """
    mirrored, hidden, band, kind = _NAME.fullmatch(name).groups()  # type: ignore[union-attr]
    found, build = next(
        (match, build) for pattern, build in _PATTERNS.items() if (match := re.fullmatch(pattern, kind))
    )
    fresh = build(classes, *map(int, found.groups()))
    model = load(masked(fresh, int(band) if band else None) if hidden else fresh)
    return Mirrored(model).train(model.training) if mirrored else model
