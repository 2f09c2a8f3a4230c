"""Conformal training over a frozen backbone from a bank of features, or of whole networks under fresh noise.

Batch norm stays in eval mode. With a frozen backbone the last linear layer starts afresh and only it is trained, as in the
paper; every epoch then costs a matrix product.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from keepcover.engine.progress import Progress
from keepcover.models.heads import last_linear
from keepcover.training.bank import FeatureBank
from keepcover.training.conformal import ConformalLoss, SoftSets
from keepcover.training.loop import Loop, Objective
from keepcover.training.recipe import Recipe
from keepcover.training.views import Views

Log = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class HeadRecipe(Recipe):
    """The paper's optimiser: SGD with Nesterov momentum, the rate divided by ten at 40, 60 and 80 % of the epochs.

    Attributes:
        copies: noisy copies of an image that a batch averages over.
        reset: start the last layer afresh, as the paper does; otherwise go on from the weights it has. The loss has a
            plateau where every set is full: on small data a fresh start can end there, the old weights rarely do.
    """

    sigma: float = 0.0
    epochs: int = 150
    batch_size: int = 500
    lr: float = 0.05
    weight_decay: float = 5e-4
    nesterov: bool = True
    copies: int = 8
    reset: bool = True

    def learning_rate(self, step: int, steps_per_epoch: int) -> float:
        """Of a step, by its epoch.

        Example:
            >>> [round(HeadRecipe().learning_rate(epoch, 1), 6) for epoch in (0, 59, 60, 90, 120, 149)]
            [0.05, 0.05, 0.005, 0.0005, 5e-05, 5e-05]
        """
        milestones = [self.epochs * share // 150 for share in (60, 90, 120)]
        return self.lr * 0.1 ** sum(step // steps_per_epoch >= milestone for milestone in milestones)


class SetLoss(Objective):
    """A conformal loss of a model's trainable parameters, on a bank of features or on fresh views."""

    def __init__(self, model: nn.Module, source: FeatureBank | Views, loss: ConformalLoss, recipe: HeadRecipe) -> None:
        self.model, self.source, self.loss, self.recipe = model, source, loss, recipe
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def state(self) -> dict[str, Tensor]:
        return {f"parameter.{i}": value for i, value in enumerate(self.parameters)}

    def sets(self, index: Tensor) -> SoftSets:
        assert self.source.labels is not None
        return self.loss(self.source.logits(self.model, index, self.recipe.copies), self.source.labels[index])

    def __call__(self, index: Tensor) -> Tensor:
        return self.sets(index).loss

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """Sizes and coverage over a few batches, the same at every epoch."""
        device, size = self.source.device, min(self.recipe.batch_size, len(self.source))
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(self.recipe.seed)
            order = torch.randperm(len(self.source), device=device)[: 5 * size]
            seen = [self.sets(index) for index in order.split(size) if len(index) == size]
        names = ("loss", "soft_size", "hard_size", "coverage")
        return {name: math.fsum(float(getattr(one, name)) for one in seen) / len(seen) for name in names}


def train_for_sets(
    model: nn.Module,
    source: FeatureBank | Views,
    loss: ConformalLoss,
    recipe: HeadRecipe,
    *,
    whole: bool = False,
    validation: FeatureBank | Views | None = None,
    log: Log | None = None,
    checkpoint: Path | None = None,
    belongs: Mapping[str, Any] | None = None,
    checkpoint_seconds: float = 10.0,
    progress: Progress = True,
) -> nn.Module:
    """A copy of ``model`` trained for small sets: its last layer, the rest untouched, or (``whole``, on views) all of it.

    A batch uses ``recipe.copies`` noisy copies of one view of every image, drawn afresh for every batch. ``log`` receives
    loss, soft and hard set size and coverage per epoch, on ``validation`` where given. With ``checkpoint`` a killed run goes
    on where it was, if ``belongs`` (what else it depends on: data, base weights) is what it was. The whole network starts
    from the weights it has, a last layer as the recipe says.
    """
    model = copy.deepcopy(model).to(source.device).to(memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
    model.requires_grad_(whole)
    _, head = last_linear(model)
    head.requires_grad_(True)
    if recipe.reset and not whole:
        _reset(head, recipe.seed)
    objective = SetLoss(model, source, loss, recipe)
    judge = objective if validation is None else SetLoss(model, validation, loss, recipe)
    loop = Loop(objective, recipe, len(source), source.device, say=lambda _: None)
    loop.run(
        checkpoint,
        {**asdict(recipe), "loss": type(loss).__name__, **asdict(loss), **(belongs or {})},
        checkpoint_seconds=checkpoint_seconds,
        label="conformal training",
        each=lambda _: log({"epoch": loop.epoch, **judge.measure()}) if log else None,
        progress=progress,
    )
    if checkpoint:
        checkpoint.unlink(missing_ok=True)
    return model


def _reset(head: nn.Linear, seed: int) -> None:
    """Fresh weights that depend on the seed alone, on any device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fresh = nn.Linear(head.in_features, head.out_features, bias=head.bias is not None)
    head.load_state_dict(fresh.state_dict())
