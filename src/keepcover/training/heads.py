"""Conformal training over a frozen backbone from a bank of features, or of whole networks under fresh noise.

Batch norm stays in eval mode. With a frozen backbone the last linear layer starts afresh and only it is trained, as in the
paper; every epoch then costs a matrix product.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from keepcover.data import Labelled
from keepcover.engine.progress import Bar, Report
from keepcover.errors import InputError
from keepcover.models.heads import last_linear
from keepcover.training.bank import FeatureBank
from keepcover.training.base import augment, padded_bytes
from keepcover.training.conformal import RCT, ConformalLoss, ConfTr, SoftSets
from keepcover.training.optimise import Replayed, Sgd, copy_into, epoch_key
from keepcover.training.resume import Checkpoint

Log = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class HeadRecipe:
    """The paper's optimiser: SGD with Nesterov momentum, the rate divided by ten at 40, 60 and 80 % of the epochs.

    Attributes:
        copies: noisy copies of an image that a batch averages over.
        reset: start the last layer afresh, as the paper does; otherwise go on from the weights it has. The loss has a
            plateau where every set is full: on small data a fresh start can end there, the old weights rarely do.
    """

    epochs: int = 150
    batch_size: int = 500
    lr: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 5e-4
    copies: int = 8
    reset: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch_size < 2 or self.copies < 1 or not 0 < self.lr < math.inf:
            raise InputError(f"expected epochs >= 1, batch_size >= 2, copies >= 1 and a finite lr > 0, got {self}")

    @property
    def milestones(self) -> list[int]:
        return [self.epochs * share // 150 for share in (60, 90, 120)]

    def learning_rate(self, epoch: int) -> float:
        """Of an epoch, counted from 0.

        Example:
            >>> [round(HeadRecipe().learning_rate(epoch), 6) for epoch in (0, 59, 60, 90, 120, 149)]
            [0.05, 0.05, 0.005, 0.0005, 5e-05, 5e-05]
        """
        return self.lr * 0.1 ** sum(epoch >= milestone for milestone in self.milestones)


@dataclass(frozen=True)
class Preset:
    """The paper's hyper-parameters for one dataset."""

    recipe: HeadRecipe
    temperature: float
    size_weight: float
    kappa: float = 1.0

    def loss(self, kind: str, r: float, alpha: float = 0.1) -> ConfTr | RCT:
        shared: dict[str, Any] = {
            "alpha": alpha,
            "temperature": self.temperature,
            "size_weight": self.size_weight,
            "kappa": self.kappa,
        }
        if kind == "conftr":
            return ConfTr(**shared)
        if kind == "rct":
            return RCT(**shared, r=r)
        raise InputError(f"expected a loss among conftr and rct, got {kind!r}")


PRESETS = {
    "cifar10": Preset(HeadRecipe(batch_size=500, lr=0.05), temperature=0.1, size_weight=1.0),
    "cifar100": Preset(HeadRecipe(batch_size=100, lr=0.005), temperature=1.0, size_weight=0.01),
}


class _Banked:
    """Logits of the last layer on banked features."""

    def __init__(self, model: nn.Module, bank: FeatureBank) -> None:
        _, self.head = last_linear(model)
        self.bank, self.labels = bank, bank.labels

    def logits(self, index: Tensor, copies: int) -> Tensor:
        return self.head(self.bank.pick(index, copies))


class _Fresh:
    """Logits of the network on new crops, flips and noise in every batch; the backbone frozen or not."""

    def __init__(self, model: nn.Module, data: Labelled, sigma: float, pad: int, flip: bool) -> None:
        device = next(model.parameters()).device
        self.model, self.sigma, self.pad, self.flip = model, sigma, pad, flip
        self.padded = padded_bytes(data.images, pad).to(device)
        self.labels = data.labels.to(device)

    def logits(self, index: Tensor, copies: int) -> Tensor:
        images = augment(self.padded, index, self.pad, self.flip).repeat_interleave(copies, dim=0)
        images = (images + self.sigma * torch.randn_like(images)).contiguous(memory_format=torch.channels_last)
        device = images.device.type
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda", cache_enabled=False):
            out = self.model(images)
        return out.float().view(len(index), copies, -1)


class _ConformalTrainer:
    """Steps of SGD on a conformal loss; its randomness depends on (seed, epoch) alone."""

    def __init__(
        self, parameters: list[nn.Parameter], source: _Banked | _Fresh, loss: ConformalLoss, recipe: HeadRecipe
    ) -> None:
        if len(source.labels) < recipe.batch_size:
            raise InputError(f"expected at least one batch of {recipe.batch_size} images, got {len(source.labels)}")
        self.source, self.loss, self.recipe, self.parameters = source, loss, recipe, parameters
        self.device = source.labels.device
        self.sgd = Sgd(parameters, recipe.momentum, recipe.weight_decay, nesterov=True)
        self.index = torch.zeros(recipe.batch_size, dtype=torch.int64, device=self.device)
        self.step = Replayed(self._step, self.state, self.device)
        self.epoch = 0

    def _step(self) -> None:
        result = apply_loss(self.loss, self.source, self.index, self.recipe.copies)
        self.sgd.step(torch.autograd.grad(result.loss, self.parameters))

    def run_epoch(self) -> None:
        torch.manual_seed(epoch_key(self.recipe.seed, self.epoch))
        self.sgd.lr.fill_(self.recipe.learning_rate(self.epoch))
        order = torch.randperm(len(self.source.labels), device=self.device)
        # A short last batch would be split into halves of another size: it is left for another epoch.
        for at in range(0, len(order) - self.recipe.batch_size + 1, self.recipe.batch_size):
            self.index.copy_(order[at : at + self.recipe.batch_size])
            self.step()
        self.epoch += 1

    def state(self) -> dict[str, Tensor]:
        return {**{f"parameter.{i}": value for i, value in enumerate(self.parameters)}, **self.sgd.state()}


def apply_loss(loss: ConformalLoss, source: _Banked | _Fresh, index: Tensor, copies: int) -> SoftSets:
    """The loss of one batch; ConfTr knows nothing of noisy copies and gets one."""
    if isinstance(loss, ConfTr):
        return loss(source.logits(index, 1)[:, 0], source.labels[index])
    return loss(source.logits(index, copies), source.labels[index])  # type: ignore[operator]


def train_head(
    model: nn.Module,
    bank: FeatureBank,
    loss: ConformalLoss,
    recipe: HeadRecipe,
    *,
    validation: FeatureBank | None = None,
    log: Log | None = None,
    checkpoint: Path | None = None,
    belongs: Mapping[str, Any] | None = None,
    progress: bool | Report = True,
) -> nn.Module:
    """A copy of ``model`` whose last layer was trained with ``loss`` on banked features; the rest is untouched.

    A batch uses ``recipe.copies`` noisy copies of one view of every image, drawn afresh for every batch (one copy for
    :class:`ConfTr`). ``log`` receives loss, soft and hard set size and coverage per epoch, on ``validation`` where given.
    With ``checkpoint`` a killed run goes on where it was, if ``belongs`` (what else it depends on: data, base weights) is
    what it was.
    """
    model = copy.deepcopy(model).to(bank.device).eval()
    _, head = last_linear(model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    if recipe.reset:
        _reset(head, recipe.seed)
    for parameter in head.parameters():
        parameter.requires_grad_(True)
    trainer = _ConformalTrainer(list(head.parameters()), _Banked(model, bank), loss, recipe)
    judge = None if validation is None else _Banked(model, validation)
    _run(trainer, judge, log, checkpoint, belongs, progress)
    return model


def train_network(
    model: nn.Module,
    data: Labelled,
    sigma: float,
    loss: ConformalLoss,
    recipe: HeadRecipe,
    *,
    whole: bool = True,
    pad: int = 4,
    flip: bool = True,
    device: torch.device | str = "cpu",
    validation: Labelled | None = None,
    log: Log | None = None,
    checkpoint: Path | None = None,
    belongs: Mapping[str, Any] | None = None,
    progress: bool | Report = True,
) -> nn.Module:
    """A copy of ``model`` trained with ``loss`` under fresh noise in every batch: all of it, or (not ``whole``) its last layer.

    The whole network starts from the weights it has; a last layer trained alone starts afresh, as in :func:`train_head`.
    """
    model = copy.deepcopy(model).to(device).to(memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
    _, head = last_linear(model)
    for parameter in model.parameters():
        parameter.requires_grad_(whole)
    if not whole:
        if recipe.reset:
            _reset(head, recipe.seed)
        for parameter in head.parameters():
            parameter.requires_grad_(True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    source = _Fresh(model, data, sigma, pad, flip)
    judge = None if validation is None else _Fresh(model, validation, sigma, 0, False)
    _run(_ConformalTrainer(trained, source, loss, recipe), judge, log, checkpoint, belongs, progress)
    return model


def _reset(head: nn.Linear, seed: int) -> None:
    """Fresh weights that depend on the seed alone, on any device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fresh = nn.Linear(head.in_features, head.out_features, bias=head.bias is not None)
    head.load_state_dict(fresh.state_dict())


def _run(
    trainer: _ConformalTrainer,
    judge: _Banked | _Fresh | None,
    log: Log | None,
    checkpoint: Path | None,
    belongs: Mapping[str, Any] | None,
    progress: bool | Report,
) -> None:
    recipe = {**asdict(trainer.recipe), "loss": type(trainer.loss).__name__, **asdict(trainer.loss), **(belongs or {})}
    before = Checkpoint.load(checkpoint, recipe, trainer.state()) if checkpoint else None
    if before:
        copy_into(trainer.state(), before.state)
        trainer.epoch = before.epoch
    spent = before.seconds if before else 0.0
    start = saved = time.monotonic()
    with (
        torch.random.fork_rng([trainer.device] if trainer.device.type == "cuda" else []),
        Bar("conformal training", trainer.recipe.epochs, progress) as bar,
    ):
        bar.done = trainer.epoch
        while trainer.epoch < trainer.recipe.epochs:
            trainer.run_epoch()
            if log:
                log({"epoch": trainer.epoch, **_measure(trainer, judge or trainer.source)})
            now = time.monotonic()
            if checkpoint and now - saved >= 10 and trainer.epoch < trainer.recipe.epochs:
                Checkpoint(trainer.state(), trainer.epoch, spent + now - start).save(checkpoint, recipe)
                saved = now
            bar.advance()
    if not all(bool(parameter.isfinite().all()) for parameter in trainer.parameters):
        raise InputError("training diverged: parameters are no longer finite; lower lr")
    if checkpoint:
        checkpoint.unlink(missing_ok=True)


@torch.no_grad()
def _measure(trainer: _ConformalTrainer, source: _Banked | _Fresh) -> dict[str, float]:
    """Sizes and coverage over a few batches of other examples, in the same order at every epoch."""
    with torch.random.fork_rng([trainer.device] if trainer.device.type == "cuda" else []):
        torch.manual_seed(trainer.recipe.seed)
        order = torch.randperm(len(source.labels), device=trainer.device)
        size = min(trainer.recipe.batch_size, len(order))
        seen = [
            apply_loss(trainer.loss, source, index, trainer.recipe.copies)
            for index in order[: 5 * size].split(size)
            if len(index) == size
        ]

    def mean(name: str) -> float:
        return math.fsum(float(getattr(one, name)) for one in seen) / len(seen)

    return {name: mean(name) for name in ("loss", "soft_size", "hard_size", "coverage")}
