"""Networks. Normalisation is inside every model, so that epsilon and sigma are in pixel units."""

from keepcover.models.checkpoints import backbone, find_weights, last_linear, load_head, load_weights
from keepcover.models.denoiser import Denoised, Denoiser, denoised, load_denoiser
from keepcover.models.inputs import Filled, Normalize, Shown, Strip, masked
from keepcover.models.names import NAMES, is_named, network
from keepcover.models.networks import CifarResNet, EfficientNetLite0, Mirrored, ResNet50, SmallCNN, WideResNet
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
