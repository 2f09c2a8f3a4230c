"""Conformal training over a frozen backbone from a bank of features, or of whole networks under fresh noise.

Batch norm stays in eval mode. With a frozen backbone the last linear layer starts afresh and only it is trained, as in the
paper; every epoch then costs a matrix product.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from keepcover.data import Labelled
from keepcover.engine.fingerprint import fingerprint
from keepcover.engine.progress import Progress
from keepcover.errors import InputError
from keepcover.guarantee import warn_of_coverage
from keepcover.methods import Asked, Exact, Holdout
from keepcover.methods.exact import HullRule
from keepcover.models.checkpoints import head_bytes, last_linear, weights_bytes
from keepcover.noise import Gaussian, Threat
from keepcover.tasks import Classification
from keepcover.training.bank import FeatureBank
from keepcover.training.base import check_logits
from keepcover.training.conformal import RCT, ConformalLoss, ConfTr, ExactRCT, SoftSets
from keepcover.training.loop import Loop, Objective, Say, checkpoint_for, write_results
from keepcover.training.recipe import Device, Recipe
from keepcover.training.views import Views


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
        super().__init__(model)
        self.source, self.loss, self.recipe = source, loss, recipe

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
            seen = [vars(self.sets(index)) for index in order.split(size) if len(index) == size]
        return {one.name: math.fsum(float(sets[one.name]) for sets in seen) / len(seen) for one in fields(SoftSets)}


def train_for_sets(
    model: nn.Module,
    source: FeatureBank | Views,
    loss: ConformalLoss,
    recipe: HeadRecipe,
    *,
    whole: bool = False,
    validation: FeatureBank | Views | None = None,
    log: Callable[[dict[str, Any]], None] | None = None,
    checkpoint: Path | None = None,
    belongs: Mapping[str, Any] | None = None,
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
    head = last_linear(model)[1].requires_grad_(True)
    if recipe.reset and not whole:
        with torch.random.fork_rng(devices=[]):  # fresh weights that depend on the seed alone, on any device
            torch.manual_seed(recipe.seed)
            fresh = nn.Linear(head.in_features, head.out_features, bias=head.bias is not None)
        head.load_state_dict(fresh.state_dict())
    judge = SetLoss(model, source if validation is None else validation, loss, recipe)
    loop = Loop(SetLoss(model, source, loss, recipe), recipe, len(source), source.device, say=lambda _: None)
    loop.run(
        checkpoint,
        {**asdict(recipe), "loss": type(loss).__name__, **asdict(loss), **(belongs or {})},
        checkpoint_seconds=10.0,
        label="conformal training",
        each=lambda _: log({"epoch": loop.epoch, **judge.measure()}) if log else None,
        progress=progress,
    )
    if checkpoint:
        checkpoint.unlink(missing_ok=True)
    return model


# -- whole runs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Preset:
    """The paper's hyper-parameters for one dataset."""

    recipe: HeadRecipe
    temperature: float
    size_weight: float
    free_size: float = 1.0


PRESETS = {
    "cifar10": Preset(HeadRecipe(batch_size=500, lr=0.05), temperature=0.1, size_weight=1.0),
    "cifar100": Preset(HeadRecipe(batch_size=100, lr=0.005), temperature=1.0, size_weight=0.01),
}
KINDS = ("rct", "conftr", "exact")


@dataclass(frozen=True)
class ConformalRequest:
    """What to train.

    Attributes:
        kind: ``rct`` (the paper), ``conftr`` (no noise, no attack) or ``exact`` (matched to the exact certificate).
        sigma, epsilon, alpha: the noise, the attack and the miscoverage that training simulates.
        preset: whose hyper-parameters to use, ``cifar10`` or ``cifar100``.
        recipe: other optimiser settings than the preset's.
        views: random crops and flips per image in the bank.
        validation: training images set aside to log set sizes on.
        whole: train the whole network under fresh noise instead of the last layer from a bank.
        fresh: train the last layer under fresh noise, without a bank (slow: for comparison).
        pad, flip: the augmentation.
    """

    kind: str
    sigma: float
    epsilon: float
    alpha: float = 0.1
    preset: str = "cifar10"
    recipe: HeadRecipe | None = None
    views: int = 4
    validation: int = 1000
    whole: bool = False
    fresh: bool = False
    pad: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"expected {', '.join(KINDS)}, got {self.kind!r}")
        if self.preset not in PRESETS:
            raise InputError(f"expected a preset among {', '.join(PRESETS)}, got {self.preset!r}")
        if not (0 < self.sigma < math.inf and 0 <= self.epsilon < math.inf and 0 < self.alpha < 1):
            found = f"{self.sigma}, {self.epsilon} and {self.alpha}"
            raise InputError(f"expected a finite sigma > 0, a finite epsilon >= 0 and alpha in (0, 1), got {found}")
        warn_of_coverage(self.alpha)
        if self.validation < 0:
            raise InputError(f"expected a number of validation images, got {self.validation}")

    @property
    def settings(self) -> HeadRecipe:
        """The recipe with the augmentation and the noise; ConfTr trains on clean images, one copy each."""
        plain = {"sigma": 0.0, "copies": 1} if self.kind == "conftr" else {"sigma": self.sigma}
        return replace(self.recipe or PRESETS[self.preset].recipe, pad=self.pad, flip=self.flip, **plain)

    def loss(self, model: nn.Module, bank: FeatureBank) -> ConformalLoss:
        """The loss; the exact one takes the rule that the model's scores before training call for."""
        preset = PRESETS[self.preset]
        shared: dict[str, Any] = {"size_weight": preset.size_weight, "free_size": preset.free_size, "alpha": self.alpha}
        if self.kind == "exact":
            rule = matched_rule(model, bank, self)
            return ExactRCT(**shared, c=rule.c, kappa=rule.kappa, level=rule.level)
        if self.kind == "rct":
            return RCT(**shared, temperature=preset.temperature, r=self.epsilon / self.sigma)
        return ConfTr(**shared, temperature=preset.temperature)


@torch.no_grad()
def matched_rule(model: nn.Module, bank: FeatureBank, request: ConformalRequest) -> HullRule:
    """The exact rule with the smallest sets for as many draws as training averages over, chosen on training images."""
    logits = last_linear(model)[1].to(bank.device)(bank.features[:2000, 0].float())
    task = Classification().seen(logits)
    holdout = Holdout(task, logits.cpu(), bank.labels[:2000].cpu())
    threat = Threat(Gaussian(request.sigma), request.epsilon)
    return Exact().fit(Asked(request.alpha, threat, request.settings.copies, len(bank), task.classes), holdout)


def train_conformal(
    model: nn.Module,
    data: Labelled,
    request: ConformalRequest,
    out: str | Path,
    *,
    base: str,
    device: Device = "cpu",
    resume: bool = True,
    say: Say = print,
    progress: Progress = True,
) -> dict[str, Any]:
    """Train and write ``out`` (a head of a few KB, or all weights) and its card (JSON, the same name); returns the card.

    ``base`` names the weights that ``model`` carries.
    """
    out, device, start = Path(out), torch.device(device), time.monotonic()
    checkpoint = checkpoint_for(out, resume)
    check_logits(model, data, device)
    if request.validation >= len(data):
        raise InputError(f"{request.validation} validation images leave none of {len(data)} to train on")
    recipe = request.settings
    kept, held = data.split(len(data) - request.validation, -1, seed=recipe.seed)
    bank = partial(FeatureBank.build, model, device=device, progress=progress)
    banked = not (request.whole or request.fresh)
    # The loss looks at a few features at most: where training needs no bank a small one will do.
    few = bank(kept, recipe, views=request.views) if banked else bank(kept[:2000], recipe, views=1)
    source, judge = few if banked else Views.of(kept, recipe, device), None
    if request.validation:
        plain = replace(recipe, pad=0, flip=False)  # what sets are measured on is not augmented
        judge = bank(held, plain, views=1) if banked else Views.of(held, plain, device)
    loss = request.loss(model, few)
    history: list[dict[str, Any]] = []

    def log(entry: dict[str, Any]) -> None:
        if entry["epoch"] % 10 == 0 or entry["epoch"] in (1, recipe.epochs):
            history.append({name: round(value, 4) for name, value in entry.items()})
            numbers = [f"{name.replace('_', ' ')} {value:.3f}" for name, value in entry.items() if name != "epoch"]
            say("  ".join([f"epoch {entry['epoch']}/{recipe.epochs}", *numbers]))

    belongs = {"data": data.fingerprint, "base": fingerprint(model), "validation": request.validation}
    options: dict[str, Any] = {"checkpoint": checkpoint, "belongs": belongs, "progress": progress}
    trained = train_for_sets(model, source, loss, recipe, whole=request.whole, validation=judge, log=log, **options)
    if history and history[-1]["hard_size"] >= len(data.class_names) - 1e-6:
        stuck = "every set still holds every label; training is stuck on a plateau"
        say(f"warning: {stuck}. Keep the old last layer as a start, or lower the learning rate")
    content = weights_bytes(trained, {"base": base}) if request.whole else head_bytes(trained)
    card = {
        "base": base,
        "base_fingerprint": belongs["base"],
        "trains": "whole network" if request.whole else "last layer",
        "dataset": data.name,
        "num_classes": len(data.class_names),
        "request": asdict(replace(request, recipe=recipe)),
        "loss": {"name": type(loss).__name__, **asdict(loss)},
        "noise": "bank" if banked else "fresh",
        "bank_seconds": round(few.seconds, 1) if banked else 0.0,
        "history": history,
    }
    return write_results(out, content, card, time.monotonic() - start, device)
