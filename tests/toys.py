"""Data and models that are small enough to be understood, shared by the tests."""

from __future__ import annotations

import torch
from torch import Tensor, nn

SHAPE = (1, 4, 4)


def toy(n: int, classes: int = 4, seed: int = 0, spread: float = 0.12) -> tuple[Tensor, Tensor]:
    """Labelled images in [0, 1]: one prototype per class, and Gaussian spread around it."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (n,), generator=generator)
    images = prototypes(classes)[labels] + spread * torch.randn(n, *SHAPE, generator=generator)
    return images.clamp(0, 1), labels


def prototypes(classes: int) -> Tensor:
    return 0.5 + 0.1 * torch.randn(classes, *SHAPE, generator=torch.Generator().manual_seed(99))


def nearest(classes: int = 4, sharpness: float = 12.0) -> nn.Module:
    """The linear classifier of the nearest prototype: logits -sharpness |x - prototype|^2, but for what all share."""
    centres = prototypes(classes).flatten(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(centres.shape[1], classes))
    with torch.no_grad():
        model[1].weight.copy_(2 * sharpness * centres)
        model[1].bias.copy_(-sharpness * centres.square().sum(dim=1))
    return model.eval()


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(12, 5)
    ).eval()


class Recorder:
    """A classifier that keeps what it was given."""

    def __init__(self, classes: int = 3) -> None:
        self.classes = classes
        self.seen: list[Tensor] = []

    def __call__(self, inputs: Tensor) -> Tensor:
        self.seen.append(inputs.clone())
        return inputs.flatten(1)[:, : self.classes].contiguous()

    @property
    def inputs(self) -> Tensor:
        return torch.cat(self.seen)


def half_trained() -> nn.Sequential:
    """Some parts in train mode, some not, in no particular order."""
    model = network()
    model.train()
    model[1].eval()
    model[4].eval()
    return model


def flags(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]
