"""Training a denoiser on unlabelled images, and further towards the clean outputs of one classifier."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from safetensors.torch import load as deserialize
from torch import Tensor, nn
from torch.nn import functional as F

from keepcover.data.decode import decode, images_among
from keepcover.engine.fingerprint import fingerprint
from keepcover.engine.progress import Progress
from keepcover.errors import InputError
from keepcover.models.checkpoints import weights_bytes
from keepcover.models.denoiser import SIGMAS, SPREAD, Denoiser, load_denoiser
from keepcover.training.base import outputs_of
from keepcover.training.loop import Loop, Objective, Say, checkpoint_for, write_results
from keepcover.training.recipe import Device, Recipe
from keepcover.training.views import augment, half, padded_bytes, places

HELD = 256  # images set aside, at most a tenth
EPOCH = 100  # steps
JUDGED = (0.1, 0.25, 0.5, 1.0)  # sigmas of the card


@dataclass(frozen=True)
class DenoiserRecipe:
    """How a denoiser is trained.

    Attributes:
        sigmas: sigma is log-uniform between them.
        minutes: how long; or ``steps``, which make a run that can be repeated exactly.
        crop: side of the largest crops.
        pixels: in a step.
        lr: highest rate of AdamW: linear warm-up, then cosine to zero.
        average: share of the run over which weights are averaged.
        clip: longest gradient.
        grey: share of images shown without colour, under one noise for all channels.
        stability: weight of the classifier's divergence, where one is given, beside the squared error.
    """

    sigmas: tuple[float, float] = SIGMAS
    minutes: float | None = None
    steps: int | None = None
    crop: int = 128
    pixels: int = 2**20
    lr: float = 5e-4
    weight_decay: float = 1e-4
    average: float = 0.05
    clip: float = 1.0
    grey: float = 0.1
    stability: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        low, high = self.sigmas
        if not 0 < low <= high < math.inf:
            raise InputError(f"expected sigmas with 0 < smallest <= largest, got {low:g} and {high:g}")
        if (self.minutes is None) == (self.steps is None) or not (self.minutes or self.steps or 0) > 0:
            raise InputError(f"expected minutes or steps, one of them, above 0; got {self.minutes} and {self.steps}")
        if self.crop < 1 or self.pixels < 1:
            raise InputError(f"expected crop >= 1 and pixels >= 1, got {self.crop} and {self.pixels}")
        if not 0 <= self.stability < math.inf:  # below 0 it would learn to change what the classifier says
            raise InputError(f"expected a finite stability >= 0, got {self.stability}")

    @property
    def steps_per_epoch(self) -> int:
        """Images are drawn at random, so an epoch is a number of steps: the loop looks up after each. Epochs are equal, so a
        run may have a few steps less than asked for, fewer than it has epochs.
        """
        return (self.steps or EPOCH) // self._epochs

    @property
    def _epochs(self) -> int:
        return -(-(self.steps or EPOCH) // EPOCH)

    @property
    def loop(self) -> Recipe:
        """What the loop of every training needs to know of it."""
        shared = {name: getattr(self, name) for name in ("lr", "weight_decay", "average", "clip", "seed", "minutes")}
        return Recipe(self.sigmas[1], epochs=self._epochs, batch_size=1, optimiser="adamw", **shared)


# -- images ------------------------------------------------------------------------------------------------------------


def read_images(
    specs: str | Path | Sequence[str | Path], size: int = 160, channels: int | None = None
) -> list[UInt8[Tensor, "n c s s"]]:
    """Every image below folders, or of patterns such as ``photos/*.webp``, as squares; one tensor per size.

    Images larger than ``size`` are scaled to it, smaller ones are cropped to their centre. ``FOLDER@64`` cuts each file into
    tiles of 64 x 64 instead: mosaics keep many small images in few files. ``channels`` is 1, for classifiers of grey images,
    or 3; by default 1 where every image is grey, because noise then is one number per pixel, not three.
    """
    if size < 1:
        raise InputError(f"expected a size of at least 1 pixel, got {size}")
    found: dict[int, list[np.ndarray]] = {}
    for spec in [specs] if isinstance(specs, str | Path) else specs:
        for square in _squares(spec, size):
            found.setdefault(square.shape[-1], []).append(square)
    groups = [torch.from_numpy(np.stack(squares)) for _, squares in sorted(found.items())]
    if channels not in (None, 1, 3):
        raise InputError(f"expected 1 channel for grey images or 3 for colour, got {channels}")
    if channels is None:
        channels = 1 if all(bool((group == group[:, :1]).all()) for group in groups) else 3
    return [group.float().mean(dim=1, keepdim=True).round().byte() if channels == 1 else group for group in groups]


def _squares(spec: str | Path, size: int) -> Iterator[np.ndarray]:
    path, _, tile = str(spec).partition("@")
    if tile and not (tile.isdigit() and int(tile) > 0):
        raise InputError(f"expected FOLDER@SIDE with the side of a tile in pixels, got {spec}")
    where = Path(path)
    listed = where.parent.glob(where.name) if "*" in where.name else where.rglob("*")
    for file in images_among(listed, path):
        pixels = decode(file, None, None)
        _, height, width = pixels.shape
        short = min(height, width)
        if tile:
            side = int(tile)
            if short < side:
                raise InputError(f"{file} has {width} x {height} pixels, too few for tiles of {side} x {side}")
            whole = pixels[:, : height // side * side, : width // side * side]
            tiles = whole.reshape(3, height // side, side, width // side, side).transpose(1, 3, 0, 2, 4)
            yield from tiles.reshape(-1, 3, side, side)
        elif short > size:
            yield decode(file, size, size)
        else:
            side = short if short < 64 else short // 16 * 16  # few sizes: each is a batch of its own
            top, left = (height - side) // 2, (width - side) // 2
            yield pixels[:, top : top + side, left : left + side]


def _parts(images: Tensor | Sequence[Tensor], seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Images as bytes, one tensor [n, c, h, w] per size: those to train on, and those set aside, at most a tenth of each size."""
    groups = [images] if isinstance(images, Tensor) else list(images)
    if not groups or any(group.ndim != 4 or not len(group) for group in groups):
        raise InputError("expected images [n, c, h, w], or a list of such tensors, none of them empty")
    if len(channels := sorted({group.shape[1] for group in groups})) > 1:
        raise InputError(f"expected one number of channels, got {channels}")
    total, kept, held = sum(map(len, groups)), [], []
    for group in groups:
        pixels = group if group.dtype == torch.uint8 else padded_bytes(group, 0)
        order = torch.randperm(len(group), generator=torch.Generator().manual_seed(seed))
        aside = min(len(group) // 10, max(1, HELD * len(group) // total))
        held.append(pixels[order[:aside]])
        kept.append(pixels[order[aside:]])
    if not sum(map(len, held)):
        raise InputError(f"expected at least 10 images of one size, got {total}")
    return kept, [group for group in held if len(group)]


# -- steps -------------------------------------------------------------------------------------------------------------


class _Loss(nn.Module):
    """What a step minimises: squared error in units of what is possible at each sigma, and the classifier's divergence."""

    def __init__(self, denoiser: Denoiser, classifier: nn.Module | None, weight: float) -> None:
        super().__init__()
        self.denoiser, self.classifier, self.weight = denoiser, classifier, weight

    def forward(self, noisy: Tensor, clean: Tensor, sigma: Tensor) -> Tensor:
        found = self.denoiser(noisy, sigma)
        scale = 1 / sigma**2 + 1 / SPREAD**2
        loss = (scale[:, None, None, None] * (found - clean) ** 2).mean()
        if self.classifier is not None:
            with torch.no_grad():
                wanted = self.classifier(clean).float().log_softmax(dim=1)
            said = self.classifier(found).float().log_softmax(dim=1)
            loss = loss + self.weight * F.kl_div(said, wanted, reduction="batchmean", log_target=True)
        return loss


class Denoising(Objective):
    """The loss of one step: crops of every size, each in proportion to the pixels that there are of it."""

    def __init__(
        self, model: Denoiser, classifier: nn.Module | None, groups: list[Tensor], recipe: DenoiserRecipe, compile: bool
    ) -> None:
        self.groups, self.recipe, self.device = groups, recipe, groups[0].device
        compiles = compile and self.device.type == "cuda" and len(groups) <= 4  # each size is compiled by itself
        super().__init__(model, [_Loss(model, classifier, recipe.stability)], compiles, dynamic=False)
        areas = [min(recipe.crop, group.shape[2]) * min(recipe.crop, group.shape[3]) for group in groups]
        total = sum(len(group) * area for group, area in zip(groups, areas, strict=True))
        self.shares = [len(group) * area / total for group, area in zip(groups, areas, strict=True)]
        self.counts = [max(1, round(recipe.pixels * w / area)) for w, area in zip(self.shares, areas, strict=True)]

    def batch(self, group: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Noisy images, their clean ones and their sigmas: crops, mirrored at random, some of them grey, with one noise for all
        channels, and sometimes an edge that is repeated, as images of other sizes are filled up.
        """
        recipe, (low, high) = self.recipe, map(math.log, self.recipe.sigmas)
        size = [min(recipe.crop, side) for side in group.shape[2:]]
        room = [whole - side for whole, side in zip(group.shape[2:], size, strict=True)]
        index = torch.randint(len(group), (count,), device=self.device)
        clean = augment(group, index, *places(count, size, room, True, self.device))
        grey = round(recipe.grey * count) if group.shape[1] == 3 else 0
        clean[:grey] = clean[:grey].mean(dim=1, keepdim=True)
        sigma = (low + (high - low) * torch.rand(count, device=self.device)).exp()
        noise = torch.randn(clean.shape, device=self.device)
        noise[:grey] = noise[:grey, :1]
        noisy = clean + sigma[:, None, None, None] * noise
        cut = torch.randint(0, 16, (2,), device=self.device)
        cut = cut * (torch.rand(2, device=self.device) < 0.1)
        for axis, side, less in zip((2, 3), size, cut, strict=True):
            kept = torch.minimum(torch.arange(side, device=self.device), (side - 1 - less).clamp(min=0))
            noisy, clean = noisy.index_select(axis, kept), clean.index_select(axis, kept)
        return noisy, clean, sigma

    def __call__(self, index: Tensor) -> Tensor:
        del index  # an epoch is a number of steps: images are drawn with replacement
        losses = []
        for group, share, count in zip(self.groups, self.shares, self.counts, strict=True):
            batch = self.batch(group, count)
            with half(self.device):
                losses.append(share * self.run[0](*batch))
        return torch.stack(losses).sum()


@torch.inference_mode()
def psnr(denoiser: Denoiser, groups: Sequence[Tensor], sigma: float, seed: int = 0) -> float:
    """Decibels of the denoised images of all groups."""
    total, generator = 0.0, torch.Generator().manual_seed(seed)
    for part in (part for group in groups for part in group.split(32)):
        clean = part.float() / 255
        noise = torch.randn(clean.shape, generator=generator).to(clean.device)
        total += float(((denoiser(clean + sigma * noise, sigma) - clean) ** 2).sum())
    return -10 * math.log10(total / sum(group.numel() for group in groups))


def train_denoiser(
    images: Tensor | Sequence[Tensor],
    recipe: DenoiserRecipe,
    out: str | Path,
    *,
    name: str = "images",
    start: str | Path | Denoiser | None = None,
    classifier: nn.Module | None = None,
    towards: str = "",
    device: Device = "cpu",
    compile: bool = True,
    resume: bool = True,
    progress: Progress = True,
    say: Say = print,
) -> dict[str, Any]:
    """Train a denoiser and write ``out`` (float16 safetensors) and its card (JSON, the same name); returns the card.

    With a ``classifier`` (named ``towards`` on the card) it also learns to leave that classifier's clean outputs as they
    were: no labels are needed, and the classifier stays as it is. ``start`` goes on from a denoiser that is trained already.
    A run that was killed goes on from the checkpoint beside ``out``.
    """
    out, device = Path(out), torch.device(device)
    checkpoint = checkpoint_for(out, resume)
    groups, held = ([group.to(device) for group in some] for some in _parts(images, recipe.seed))
    with torch.random.fork_rng([]):
        torch.manual_seed(recipe.seed)
        network = _start(start, groups[0].shape[1], recipe)
    network = network.to(device).to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    if classifier is not None:
        for group in groups:
            outputs_of(classifier.to(device), group[:2].float() / 255)
        classifier = classifier.to(device).to(memory_format=torch.channels_last).eval().requires_grad_(False)  # type: ignore[call-overload]
    history: list[list[float]] = []
    objective, per = Denoising(network, classifier, groups, recipe, compile), recipe.steps_per_epoch
    loop = Loop(objective, recipe.loop, per, device, say)

    def log(loss: float) -> None:
        epochs = loop.fixed.epochs
        if loop.epoch % max(1, epochs // 20) == 0 or loop.epoch == epochs:
            history.append([loop.epoch * per, round(loss, 5)])
            say(f"step {loop.epoch * per}/{epochs * per}  loss {loss:.4f}")

    digest = hashlib.sha256()
    for group in groups:
        digest.update(group.cpu().numpy())  # type: ignore[arg-type]
    belongs = {**asdict(recipe), "start": fingerprint(network), "towards": towards, "data": digest.hexdigest()}
    seconds = loop.run(checkpoint, belongs, each=log, progress=progress)
    content = weights_bytes(network, network.about)
    network.load_state_dict({name: value.float() for name, value in deserialize(content).items()})
    network.eval()  # what is measured is what is stored: the float16 weights
    card = {
        "architecture": "denoiser",
        "data": name,
        "images": {f"{group.shape[3]} x {group.shape[2]}": len(group) for group in groups},
        "held_out": sum(len(group) for group in held),
        "towards": towards or None,
        "start": str(start) if isinstance(start, str | Path) else None,
        "recipe": asdict(recipe),
        "steps": loop.epoch * per,
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "dtype": "float16",
        "loss": history,
        "psnr_held_out": {f"{sigma:g}": round(psnr(network, held, sigma), 2) for sigma in JUDGED},
    }
    return write_results(out, content, card, seconds, device)


def _start(start: str | Path | Denoiser | None, channels: int, recipe: DenoiserRecipe) -> Denoiser:
    if start is None:
        return Denoiser(channels, recipe.sigmas)
    network = start if isinstance(start, Denoiser) else load_denoiser(start)
    if network.channels != channels:
        found = f"the denoiser to start from is for {network.channels} channels, the images have {channels}"
        raise InputError(f"{found}; read them with as many (--channels {network.channels}), or start afresh")
    low, high = zip(network.sigmas, recipe.sigmas, strict=True)
    network.sigmas = (min(low), max(high))
    return network
