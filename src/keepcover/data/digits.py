"""scikit-learn's handwritten digits: 1797 images of 8 x 8 pixels, shipped with that package."""

from __future__ import annotations

from typing import Any

import torch

from keepcover.data.base import Labelled
from keepcover.data.known import DIGIT_CLASSES
from keepcover.errors import InputError, install


def digits() -> Labelled:
    """The embedded dataset of the demo: no download.

    Example:
        >>> data = digits()
        >>> tuple(data.images.shape), float(data.images.max()), data.class_names[3]
        ((1797, 1, 8, 8), 1.0, 'three')
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise InputError(f"the digits come with scikit-learn: {install('demo')}") from None
    raw: Any = load_digits()
    images = torch.tensor(raw.images, dtype=torch.float32)[:, None] / 16
    return Labelled("digits", images, torch.tensor(raw.target).long(), DIGIT_CLASSES)
