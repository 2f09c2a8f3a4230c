"""Networks. Normalisation is inside every model, so that epsilon and sigma are in pixel units."""

from keepcover.models.absent import Filled, Shown, Strip, masked
from keepcover.models.checkpoints import backbone, find_weights, last_linear, load_head, load_weights
from keepcover.models.denoiser import Denoised, Denoiser, denoised, load_denoiser
from keepcover.models.efficientnet_lite import EfficientNetLite0
from keepcover.models.names import NAMES, is_named, network
from keepcover.models.resnets import CifarResNet, Mirrored, ResNet50, WideResNet
from keepcover.models.small_cnn import Normalize, SmallCNN
from keepcover.models.unet import UNet

__all__ = [
    "NAMES",
    "CifarResNet",
    "Denoised",
    "Denoiser",
    "EfficientNetLite0",
    "Filled",
    "Mirrored",
    "Normalize",
    "ResNet50",
    "Shown",
    "SmallCNN",
    "Strip",
    "UNet",
    "WideResNet",
    "backbone",
    "denoised",
    "find_weights",
    "is_named",
    "last_linear",
    "load_denoiser",
    "load_head",
    "load_weights",
    "masked",
    "network",
]
