"""Datasets as tensors: images in [0, 1], integer labels, class names."""

from holdfast.datasets.base import Labelled
from holdfast.datasets.cifar import cifar
from holdfast.datasets.digits import digits

__all__ = ["Labelled", "cifar", "digits"]
