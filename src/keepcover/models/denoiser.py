"""A denoiser for images under Gaussian noise of known sigma, and a classifier behind one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from keepcover.engine.smoother import Classifier
from keepcover.errors import InputError, refusing, warn
from keepcover.models.checkpoints import find_weights
from keepcover.models.unet import Sizes, Trunk
from keepcover.noise import Gaussian, Noise
from keepcover.sealing import unpack

BUNDLED = Path(__file__).with_name("denoiser.safetensors")
SPREAD = 0.27  # standard deviation of photographs around 0.5
SIGMAS, WIDTHS, BLOCKS = (0.05, 1.0), (48, 96, 192, 256), (1, 3, 3, 2)
SIZES = ("sigmas", "widths", "blocks")


class Denoiser(Trunk):
    r"""The mean of the clean image given a noisy one: a UNet that is told sigma, for images [n, c, h, w] of any size.

    .. math:: D(x, \sigma) = \frac{s^2}{\sigma^2 + s^2} x + \frac{\sigma s}{\sqrt{\sigma^2 + s^2}} F\bigl(x / \sqrt{\sigma^2 + s^2}, \log\sigma\bigr)

    for x around 0 with standard deviation s (Karras et al., 2022): at every sigma the network F sees and learns unit scale.
    All work is at half the resolution and below. Sides are filled up to a multiple of 16 by repeating the last pixel. A network
    for colour takes grey images too: three equal channels in, their mean out; training shows it such images.

    Args:
        channels: of the images.
        sigmas: the smallest and the largest sigma it has been trained at.
        widths, blocks: channels, and blocks in all, at 1/2, 1/4, 1/8 and 1/16 of the resolution.

    Example:
        >>> denoiser = Denoiser(widths=(8, 8, 8, 8), blocks=(1, 1, 1, 1))
        >>> denoiser(torch.rand(2, 3, 20, 30), 0.25).shape, denoiser(torch.rand(2, 1, 8, 8), 0.25).shape
        (torch.Size([2, 3, 20, 30]), torch.Size([2, 1, 8, 8]))
    """

    def __init__(
        self, channels: int = 3, sigmas: tuple[float, float] = SIGMAS, widths: Sizes = WIDTHS, blocks: Sizes = BLOCKS
    ) -> None:
        super().__init__(channels, channels, widths, blocks, hints=64)
        self.channels, self.sigmas, self.widths, self.blocks = channels, tuple(sigmas), tuple(widths), tuple(blocks)

    @property
    def about(self) -> dict[str, Any]:
        """What a file must say besides the weights."""
        return {"architecture": "denoiser", "channels": self.channels, **{name: getattr(self, name) for name in SIZES}}

    def forward(self, images: Tensor, sigma: Tensor | float) -> Tensor:
        """``sigma`` is one number, or one per image [n]."""
        if images.ndim != 4 or images.shape[1] not in ((1, 3) if self.channels == 3 else (self.channels,)):
            takes = "3 channels, or 1 for grey" if self.channels == 3 else f"{self.channels} channels"
            misfit = f"this denoiser takes images [n, c, h, w] of {takes}, got {list(images.shape)}"
            raise InputError(f"{misfit}; train one on images of that kind: keepcover train denoiser")
        grey = images.shape[1] < self.channels
        sigma = torch.as_tensor(sigma, dtype=images.dtype, device=images.device).reshape(-1, 1)
        spread = (sigma**2 + SPREAD**2).sqrt()[..., None, None]
        centred = (images.expand(-1, self.channels, -1, -1) if grey else images) - 0.5
        residual = self.through(centred / spread, sigma.log())
        found = centred * (SPREAD / spread) ** 2 + residual * (sigma[..., None, None] * SPREAD / spread) + 0.5
        return found.mean(dim=1, keepdim=True) if grey else found


def load_denoiser(path: str | Path | None = None) -> Denoiser:
    """The denoiser in a file that ``keepcover train denoiser`` wrote; the bundled one, for photographs, by default."""
    if path is None and not BUNDLED.is_file():
        raise InputError("this build carries no denoiser; train one with keepcover train denoiser and give its file")
    try:
        file = BUNDLED if path is None else find_weights(path)
    except InputError:
        raise InputError(f"no denoiser at {path}; give a file that keepcover train denoiser wrote") from None
    with refusing(f"{file} is not a readable denoiser"):
        state, about = unpack(file, sealed=False)
        if about.get("architecture") != "denoiser":
            raise InputError(f"{file} holds no denoiser; expected a file that keepcover train denoiser wrote")
        denoiser = Denoiser(int(about["channels"]), **{name: tuple(about[name]) for name in SIZES})
        denoiser.load_state_dict({name: value.float() for name, value in state.items()})
    return denoiser.eval()


class Denoised(nn.Module):
    """A classifier behind a denoiser: noisy images in, outputs for what the denoiser makes of them. See :func:`denoised`.

    Attributes:
        sigma: of the noise it takes away, a buffer: it is saved, hashed and exported with the weights. NaN until it is bound.
    """

    sigma: Tensor

    def __init__(self, denoiser: Denoiser, classifier: nn.Module, sigma: float = math.nan) -> None:
        super().__init__()
        self.denoiser, self.classifier = denoiser, classifier
        self.bound, self.denoises = not math.isnan(sigma), sigma != 0  # flags, so that compiled code serves every sigma
        where = next(classifier.parameters(), next(denoiser.parameters())).device
        self.register_buffer("sigma", torch.tensor(sigma, dtype=torch.float64, device=where))
        self.train(classifier.training)

    def under_noise(self, noise: Noise) -> Denoised:
        """The same weights, bound to this noise: what every smoother runs. ``Gaussian(0)`` passes images on as they are."""
        if not isinstance(noise, Gaussian):
            raise InputError(f"the denoiser takes Gaussian noise away, got {noise}; use the classifier without it")
        # Weights that are loaded bring a sigma of their own, which the flags do not know of.
        if self.sigma == noise.sigma and self.bound and self.denoises == (noise.sigma != 0):
            return self
        low, high = self.denoiser.sigmas
        if noise.sigma and not low <= noise.sigma <= high:
            unseen = f"the denoiser was trained at sigma {low:g} to {high:g} and has never seen sigma {noise.sigma:g}"
            advice = "Choose sigma in that range, or train a denoiser for it (keepcover train denoiser)"
            warn(f"{unseen}; expect large sets. {advice}")
        return Denoised(self.denoiser, self.classifier, noise.sigma)

    def forward(self, images: Tensor) -> Tensor:
        if not self.bound:
            advice = "give it to calibrate, evaluate or Smoother as it is, not inside another module, and they bind it"
            raise InputError(
                f"a denoised model must know the noise: {advice}; or run model.under_noise(Gaussian(sigma))"
            )
        return self.classifier(self.denoiser(images, self.sigma) if self.denoises else images)


def denoised(model: Classifier, denoiser: Denoiser | str | Path | None = None) -> Denoised:
    """Put a denoiser in front of a classifier: one module, so every certificate holds for it as it is.

    Wherever it meets a noise (:func:`keepcover.calibrate`, :func:`keepcover.evaluate`, a :class:`keepcover.Smoother`) it is
    bound to that noise's sigma, which is saved with it. An attack goes through both networks.

    Args:
        model: images in [0, 1], grey or colour, to outputs.
        denoiser: the bundled one for photographs by default; a file of ``keepcover train denoiser``, or the module itself.

    Example:
        >>> from keepcover import Gaussian
        >>> small = Denoiser(widths=(8, 8, 8, 8), blocks=(1, 1, 1, 1))
        >>> model = denoised(nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), small)
        >>> model.under_noise(Gaussian(0.25))(torch.rand(5, 3, 2, 2)).shape
        torch.Size([5, 3])
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"expected a torch module to denoise for, got {type(model).__name__}; wrap a function in one")
    if any(isinstance(part, Denoised | Denoiser) for part in model.modules()):
        raise InputError("this model denoises already; use it as it is")
    if not isinstance(denoiser, Denoiser | str | Path | None):
        advice = "a network of your own goes into one module with the classifier"
        raise InputError(f"expected a denoiser or its file, got {type(denoiser).__name__}; {advice}")
    network = denoiser if isinstance(denoiser, Denoiser) else load_denoiser(denoiser)
    parameter = next(model.parameters(), None)
    return Denoised(network if parameter is None else network.to(parameter.device), model)
