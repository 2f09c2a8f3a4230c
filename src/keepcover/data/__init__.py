"""Datasets as tensors: images in [0, 1], integer labels, class names."""

from keepcover.data.base import Labelled, joined
from keepcover.data.cifar import cifar
from keepcover.data.digits import digits
from keepcover.data.download import download
from keepcover.data.idx import idx
from keepcover.data.image_folder import ImageFolder, image_folder
from keepcover.data.scenes import scenes

__all__ = ["ImageFolder", "Labelled", "cifar", "digits", "download", "idx", "image_folder", "joined", "scenes"]
