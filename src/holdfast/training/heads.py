"""Conformal training of the last layer over a frozen backbone, served from a bank of precomputed features.

The backbone does not change, so its features of augmented noisy copies are computed once; every epoch then costs a matrix
product. Batch norm stays in eval mode, the last linear layer starts afresh, and only it is trained.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from holdfast.datasets import Labelled
from holdfast.errors import InputError
from holdfast.progress import Bar, Report
from holdfast.training.base import augment
from holdfast.training.conformal import RCT, ConformalLoss, ConfTr, SoftSets


@dataclass(frozen=True)
class HeadRecipe:
    """The paper's optimiser: SGD with Nesterov momentum, the rate divided by ten at 40, 60 and 80 % of the epochs."""

    epochs: int = 150
    batch_size: int = 500
    lr: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 5e-4
    copies: int = 8
    seed: int = 0

    @property
    def milestones(self) -> list[int]:
        return [self.epochs * share // 150 for share in (60, 90, 120)]


@dataclass(frozen=True)
class Preset:
    """The paper's hyper-parameters for one dataset."""

    recipe: HeadRecipe
    temperature: float
    size_weight: float
    kappa: float = 1.0

    def loss(self, kind: str, r: float) -> ConfTr | RCT:
        if kind == "conftr":
            return ConfTr(temperature=self.temperature, size_weight=self.size_weight, kappa=self.kappa)
        if kind == "rct":
            return RCT(temperature=self.temperature, size_weight=self.size_weight, kappa=self.kappa, r=r)
        raise InputError(f"expected a loss among conftr and rct, got {kind!r}")


PRESETS = {
    "cifar10": Preset(HeadRecipe(batch_size=500, lr=0.05), temperature=0.1, size_weight=1.0),
    "cifar100": Preset(HeadRecipe(batch_size=100, lr=0.005), temperature=1.0, size_weight=0.01),
}


def last_linear(model: nn.Module) -> tuple[str, nn.Linear]:
    """The classifier's final layer: the last linear layer that the module registers.

    Example:
        >>> last_linear(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))[0]
        '2'
    """
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not found:
        raise InputError(f"{type(model).__name__} has no linear layer to train")
    return found[-1]


@dataclass(frozen=True)
class FeatureBank:
    """Features of several augmented noisy copies of every training image: ``features`` [n, copies, d], float16."""

    features: Float[Tensor, "n copies d"]
    labels: Int[Tensor, " n"]
    seconds: float

    @classmethod
    @torch.inference_mode()
    def build(
        cls, model: nn.Module, data: Labelled, sigma: float, copies: int, *, pad: int = 4, flip: bool = True,
        device: torch.device | str = "cpu", batch_size: int = 2000, seed: int = 0, progress: bool | Report = True,
    ) -> FeatureBank:  # fmt: skip
        """Run the frozen backbone once over ``copies`` noisy crops and flips of every image."""
        start = time.monotonic()
        model = model.to(device).eval()
        _, head = last_linear(model)
        generator = torch.Generator(device=device).manual_seed(seed)
        padded = nn.functional.pad((data.images * 255).round().to(torch.uint8), [pad] * 4).to(device)
        bank = torch.empty(len(data), copies, head.in_features, dtype=torch.float16, device=device)
        caught: list[Tensor] = []
        hook = head.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
        half = torch.autocast("cuda", torch.float16, enabled=torch.device(device).type == "cuda")
        try:
            with Bar("feature bank", copies * len(data), progress) as bar, half:
                for copy_ in range(copies):
                    for index in torch.arange(len(data), device=device).split(batch_size):
                        images = augment(padded, index, pad, flip, generator)
                        model(images + sigma * torch.randn(images.shape, device=device, generator=generator))
                        bank[index, copy_] = caught.pop().half()
                        bar.advance(len(index))
        finally:
            hook.remove()
        return cls(bank, data.labels.to(device), time.monotonic() - start)

    def __len__(self) -> int:
        return len(self.labels)


def train_head(
    model: nn.Module,
    bank: FeatureBank,
    loss: ConformalLoss,
    recipe: HeadRecipe,
    *,
    validation: FeatureBank | None = None,
    log: Callable[[dict[str, float]], None] | None = None,
    progress: bool | Report = True,
) -> nn.Module:
    """A copy of ``model`` whose last layer was trained with ``loss`` on banked features; the rest is untouched.

    A batch uses ``recipe.copies`` of the bank's copies, drawn afresh for every batch (one copy for :class:`ConfTr`).
    ``log`` receives soft and hard set size and coverage per epoch, on ``validation`` where given.
    """
    if bank.features.shape[1] < recipe.copies:
        raise InputError(
            f"the bank holds {bank.features.shape[1]} copies of each image, the recipe asks for {recipe.copies}"
        )
    device = bank.features.device
    model = copy.deepcopy(model).to(device).eval()
    _, head = last_linear(model)
    torch.manual_seed(recipe.seed)
    head.reset_parameters()
    generator = torch.Generator(device=device).manual_seed(recipe.seed)
    optimizer = torch.optim.SGD(
        head.parameters(), recipe.lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay, nesterov=True
    )
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, recipe.milestones, gamma=0.1)
    for parameter in head.parameters():
        parameter.requires_grad_(True)
    with Bar("training head", recipe.epochs, progress) as bar:
        for epoch in range(recipe.epochs):
            for index in torch.randperm(len(bank), device=device, generator=generator).split(recipe.batch_size):
                if len(index) < recipe.batch_size and len(bank) >= recipe.batch_size:
                    continue  # a short batch would be split into halves of another size
                result = _apply(head, bank, loss, recipe.copies, index, generator)
                optimizer.zero_grad(set_to_none=True)
                result.loss.backward()
                optimizer.step()
            schedule.step()
            if log:
                log({"epoch": epoch + 1, **_measure(head, validation or bank, loss, recipe)})
            bar.advance()
    return model


def _apply(
    head: nn.Linear, bank: FeatureBank, loss: ConformalLoss, copies: int, index: Tensor, generator: torch.Generator
) -> SoftSets:
    total = bank.features.shape[1]
    if isinstance(loss, ConfTr):
        one = torch.randint(total, (len(index),), device=index.device, generator=generator)
        return loss(head(bank.features[index, one].float()), bank.labels[index])
    chosen = torch.randperm(total, device=index.device, generator=generator)[:copies]
    features = bank.features[index[:, None], chosen[None, :]].float()
    return loss(head(features), bank.labels[index])  # type: ignore[operator]


@torch.no_grad()
def _measure(head: nn.Linear, bank: FeatureBank, loss: ConformalLoss, recipe: HeadRecipe) -> dict[str, float]:
    index = torch.arange(min(len(bank), 5000), device=bank.labels.device)
    generator = torch.Generator(device=bank.labels.device).manual_seed(0)
    index = index[torch.randperm(len(index), device=index.device, generator=generator)]
    seen = _apply(head, bank, loss, min(recipe.copies, bank.features.shape[1]), index, generator)
    return {
        "loss": float(seen.loss), "soft_size": float(seen.soft_size), "hard_size": float(seen.hard_size),
        "coverage": float(seen.coverage),
    }  # fmt: skip
