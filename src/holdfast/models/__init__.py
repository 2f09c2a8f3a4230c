"""Networks. Normalisation is inside every model, so that epsilon and sigma are in pixel units."""

from holdfast.models.checkpoints import load_weights
from holdfast.models.cifar_resnet import CifarResNet
from holdfast.models.small_cnn import Normalize, SmallCNN

__all__ = ["CifarResNet", "Normalize", "SmallCNN", "load_weights"]
