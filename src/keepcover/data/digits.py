"""scikit-learn's handwritten digits: 1797 images of 8 x 8 pixels, shipped with that package."""

from __future__ import annotations

import torch

from keepcover.data.base import Labelled
from keepcover.data.known import CLASSES
from keepcover.errors import optional


def digits() -> Labelled:
    """The embedded dataset of the demo: no download.

    Example:
        >>> data = digits()
        >>> tuple(data.images.shape), float(data.images.max()), data.class_names[3]
        ((1797, 1, 8, 8), 1.0, 'three')
    """
    raw = optional("sklearn.datasets", "the digits come with scikit-learn", "demo").load_digits()
    images = torch.tensor(raw.images, dtype=torch.float32)[:, None] / 16
    return Labelled("digits", images, torch.tensor(raw.target).long(), CLASSES["mnist"])
