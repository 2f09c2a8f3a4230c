"""Networks. Normalisation is inside every model, so that epsilon and sigma are in pixel units."""

from keepcover.models.checkpoints import find_weights, load_weights
from keepcover.models.cifar_resnet import CifarResNet
from keepcover.models.heads import backbone, last_linear, load_head
from keepcover.models.resnet50 import ResNet50
from keepcover.models.small_cnn import Normalize, SmallCNN

__all__ = [
    "CifarResNet",
    "Normalize",
    "ResNet50",
    "SmallCNN",
    "backbone",
    "find_weights",
    "last_linear",
    "load_head",
    "load_weights",
]
