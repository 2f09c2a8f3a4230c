"""The first layer of a network: its normalisation, and what is absent.

Absent is NaN in images, -1 among tokens, as :class:`keepcover.noise.Ablation` leaves it. An ordinary network would give NaN,
which is refused, and would not know zero from black. :func:`masked` gives a network with its normalisation inside one more
input channel; :class:`Filled` serves any other.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from keepcover.errors import InputError
from keepcover.noise.ablation import ABSENT

PerChannel = tuple[float, ...]


class Normalize(nn.Module):
    """(x - mean) / std per channel, as the model's first layer: epsilon and sigma stay in pixel units outside."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: PerChannel, std: PerChannel) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        return (images - self.mean) / self.std


class Shown(Normalize):
    """:class:`Normalize` for images with absent pixels: zeros there, and a last channel that is 1 where a pixel is present.

    Example:
        >>> Shown((0.5,), (0.25,))(torch.tensor([[[[1.0, torch.nan]]]]))[0].tolist()
        [[[2.0, 0.0]], [[1.0, 0.0]]]
    """

    def forward(self, images: Tensor) -> Tensor:
        present = ~images.isnan()
        shown = super().forward(torch.where(present, images, self.mean.to(images.dtype)))
        return torch.cat([shown, present[..., :1, :, :].to(shown.dtype)], dim=-3)


class Strip(Normalize):
    """:class:`Normalize` for images of which one cyclic band of ``width`` columns is present: the band alone.

    A last channel says where its columns come from, from -1 to 1. What is absent costs nothing: all 32 bands of 4 columns of an
    image are computed in the time of four images. Of complete images it reads the first band.

    Example:
        >>> image = torch.tensor([[[[1.0, torch.nan, torch.nan, torch.nan, 0.5]]]])
        >>> Strip(2, (0.5,), (0.25,))(image)[0].tolist()
        [[[0.0, 2.0]], [[1.0, -1.0]]]
    """

    def __init__(self, width: int, mean: PerChannel, std: PerChannel) -> None:
        super().__init__(mean, std)
        self.width = width

    def forward(self, images: Tensor) -> Tensor:
        total = images.shape[-1]
        if total < self.width:
            raise InputError(f"expected images of at least {self.width} columns, got shape {tuple(images.shape)}")
        present = ~images[:, 0, 0].isnan()
        first = (present & ~present.roll(1, dims=-1)).to(torch.uint8).argmax(dim=-1, keepdim=True)
        columns = (first + torch.arange(self.width, device=images.device)) % total
        at = columns[:, None, None].expand(-1, 1, images.shape[2], -1)
        band = super().forward(images.gather(-1, at.expand(-1, images.shape[1], -1, -1)))
        return torch.cat([band, 2 * at.to(band.dtype) / max(1, total - 1) - 1], dim=1)


class Filled(nn.Module):
    """Any model behind a value for what is absent: one outside of the range of pixels, or the id of a mask token.

    Example:
        >>> Filled(nn.Identity(), -1.0)(torch.tensor([0.5, torch.nan])).tolist()
        [0.5, -1.0]
        >>> Filled(nn.Identity(), 103)(torch.tensor([7, -1])).tolist()
        [7, 103]
    """

    def __init__(self, model: nn.Module, value: float) -> None:
        super().__init__()
        self.model, self.value = model, value

    def forward(self, inputs: Tensor) -> Tensor:
        absent = inputs.isnan() if inputs.is_floating_point() else inputs == ABSENT
        return self.model(torch.where(absent, self.value, inputs))


def masked(model: nn.Module, band: int | None = None) -> nn.Module:
    """The network with one more input channel for what is present, in place; weights of that channel are 0 at first.

    On complete images it computes what it did. With ``band`` it reads that many columns alone (:class:`Strip`), for
    :class:`keepcover.Bands` and :class:`keepcover.RandomBands` of that width. It must be trained under the noise that hides pixels.

    Example:
        >>> from keepcover.models import SmallCNN
        >>> network, image = SmallCNN(), torch.rand(1, 1, 8, 8)
        >>> before = network(image)
        >>> torch.allclose(masked(network)(image), before, atol=1e-6)
        True
    """
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    normal = getattr(model, "normalize", None)
    if type(normal) is not Normalize or first is None:
        wanted = "a network with its Normalize as model.normalize and convolutions"
        advice = "put keepcover.models.Filled before it, or train one that reads NaN as absent"
        raise InputError(f"expected {wanted}, got {type(model).__name__}; {advice}")
    numbers = tuple(normal.mean.flatten().tolist()), tuple(normal.std.flatten().tolist())
    shown = Shown(*numbers) if band is None else Strip(band, *numbers)
    model.normalize = shown.to(normal.mean.device)
    first.weight = nn.Parameter(torch.cat([first.weight.detach(), torch.zeros_like(first.weight[:, :1])], dim=1))
    first.in_channels += 1
    return model
