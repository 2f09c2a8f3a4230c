"""Networks. Normalisation is inside every model, so that epsilon and sigma are in pixel units."""

from holdfast.models.small_cnn import Normalize, SmallCNN

__all__ = ["Normalize", "SmallCNN"]
