"""Datasets as tensors: images in [0, 1], integer labels, class names."""

from holdfast.datasets.base import Labelled
from holdfast.datasets.cifar import cifar
from holdfast.datasets.digits import digits
from holdfast.datasets.download import download
from holdfast.datasets.idx import idx
from holdfast.datasets.image_folder import ImageFolder, image_folder
from holdfast.datasets.splits import paper_splits, random_splits

__all__ = [
    "ImageFolder",
    "Labelled",
    "cifar",
    "digits",
    "download",
    "idx",
    "image_folder",
    "paper_splits",
    "random_splits",
]
