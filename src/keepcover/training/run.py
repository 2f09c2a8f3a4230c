"""One run of conformal training from base weights to a file and its card."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from keepcover.data import Labelled
from keepcover.engine.fingerprint import fingerprint
from keepcover.engine.progress import Progress
from keepcover.errors import InputError
from keepcover.guarantee import warn_of_coverage
from keepcover.methods import Asked, Exact, Holdout
from keepcover.methods.exact import HullRule
from keepcover.models.checkpoints import weights_bytes
from keepcover.models.heads import head_bytes, last_linear
from keepcover.noise import Gaussian, Threat
from keepcover.tasks import Classification
from keepcover.training.bank import FeatureBank
from keepcover.training.base import check_logits
from keepcover.training.conformal import RCT, ConformalLoss, ConfTr, ExactRCT
from keepcover.training.heads import HeadRecipe, train_for_sets
from keepcover.training.loop import Say
from keepcover.training.resume import checkpoint_for, write_results
from keepcover.training.views import Views


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
LOSSES: dict[str, type[ConformalLoss]] = {"rct": RCT, "conftr": ConfTr, "exact": ExactRCT}


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
        if self.kind not in LOSSES:
            raise InputError(f"expected {', '.join(LOSSES)}, got {self.kind!r}")
        if self.preset not in PRESETS:
            raise InputError(f"expected a preset among {', '.join(PRESETS)}, got {self.preset!r}")
        if not (0 < self.sigma < math.inf and 0 <= self.epsilon < math.inf and 0 < self.alpha < 1):
            raise InputError(
                "expected a finite sigma > 0, a finite epsilon >= 0 and alpha in (0, 1), "
                f"got {self.sigma}, {self.epsilon} and {self.alpha}"
            )
        warn_of_coverage(self.alpha)
        if self.validation < 0:
            raise InputError(f"expected a number of validation images, got {self.validation}")

    @property
    def settings(self) -> HeadRecipe:
        """The recipe with the augmentation and the noise; ConfTr trains on clean images, one copy each."""
        plain = {"sigma": 0.0, "copies": 1} if self.kind == "conftr" else {"sigma": self.sigma}
        return replace(self.recipe or PRESETS[self.preset].recipe, pad=self.pad, flip=self.flip, **plain)

    def bank(self, model: nn.Module, data: Labelled, **options: Any) -> FeatureBank:
        """The bank this training draws from; equal (noise, copies, views) may share one."""
        return FeatureBank.build(model, data, self.settings, views=self.views, **options)

    def parts(self, data: Labelled) -> tuple[Labelled, Labelled]:
        """Images to train on, and those set aside."""
        if self.validation >= len(data):
            raise InputError(f"{self.validation} validation images leave none of {len(data)} to train on")
        kept, held = data.split(len(data) - self.validation, -1, seed=self.settings.seed)
        return kept, held

    def loss(self, model: nn.Module, bank: FeatureBank) -> ConformalLoss:
        """The loss; the exact one takes the rule that the model's scores before training call for."""
        preset = PRESETS[self.preset]
        shared: dict[str, Any] = {"size_weight": preset.size_weight, "free_size": preset.free_size, "alpha": self.alpha}
        if self.kind == "exact":
            rule = matched_rule(model, bank, self)
            return ExactRCT(**shared, c=rule.c, kappa=rule.kappa, level=rule.level)
        if self.kind == "rct":
            shared["r"] = self.epsilon / self.sigma
        return LOSSES[self.kind](**shared, temperature=preset.temperature)


@torch.no_grad()
def matched_rule(model: nn.Module, bank: FeatureBank, request: ConformalRequest) -> HullRule:
    """The exact rule with the smallest sets for as many draws as training averages over, chosen on training images."""
    _, head = last_linear(model)
    some = slice(0, min(len(bank), 2000))
    logits = head.to(bank.device)(bank.features[some, 0].float())
    task = Classification().seen(logits)
    holdout = Holdout(task, logits.cpu(), bank.labels[some].cpu())
    threat = Threat(Gaussian(request.sigma), request.epsilon)
    return Exact().fit(Asked(request.alpha, threat, request.settings.copies, len(bank), task.classes), holdout)


def train_conformal(
    model: nn.Module,
    data: Labelled,
    request: ConformalRequest,
    out: str | Path,
    *,
    base: str,
    device: torch.device | str = "cpu",
    compile: bool = False,
    resume: bool = True,
    say: Say = print,
    progress: Progress = True,
) -> dict[str, Any]:
    """Train and write ``out`` (a head of a few KB, or all weights) and its card (JSON, the same name); returns the card.

    ``base`` names the weights that ``model`` carries.
    """
    out, device = Path(out), torch.device(device)
    checkpoint = checkpoint_for(out, resume)
    check_logits(model, data, device)
    start, bank = time.monotonic(), None
    kept, held = request.parts(data)
    recipe = request.settings
    plain = replace(request, pad=0, flip=False, views=1)  # what sets are measured on is not augmented
    options: dict[str, Any] = {"device": device, "compile": compile, "progress": progress}
    judge: FeatureBank | Views | None = None
    if request.whole or request.fresh:
        # The loss looks at a few features at most: a small bank will do.
        loss = request.loss(model, replace(request, views=1).bank(model, kept[:2000], **options))
        source: FeatureBank | Views = Views.of(kept, recipe, device)
        judge = Views.of(held, plain.settings, device) if request.validation else None
    else:
        source = bank = request.bank(model, kept, **options)
        loss = request.loss(model, bank)
        judge = plain.bank(model, held, **options) if request.validation else None
    history: list[dict[str, Any]] = []

    def log(entry: dict[str, Any]) -> None:
        epoch = entry["epoch"]
        if epoch % 10 == 0 or epoch in (1, recipe.epochs):
            history.append({name: round(value, 4) for name, value in entry.items()})
            say(
                f"epoch {epoch}/{recipe.epochs}  loss {entry['loss']:.3f}  soft size {entry['soft_size']:.3f}  "
                f"hard size {entry['hard_size']:.3f}  coverage {entry['coverage']:.3f}"
            )

    belongs = {"data": data.fingerprint, "base": fingerprint(model), "validation": request.validation}
    trained = train_for_sets(
        model,
        source,
        loss,
        recipe,
        whole=request.whole,
        validation=judge,
        log=log,
        checkpoint=checkpoint,
        belongs=belongs,
        progress=progress,
    )
    if history and history[-1]["hard_size"] >= len(data.class_names) - 1e-6:
        say(
            "warning: every set still holds every label; training is stuck on a plateau. Keep the old last layer as a start, or "
            "lower the learning rate"
        )
    content = weights_bytes(trained, {"base": base}) if request.whole else head_bytes(trained)
    card = {
        "base": base,
        "base_fingerprint": belongs["base"],
        "trains": "whole network" if request.whole else "last layer",
        "dataset": data.name,
        "num_classes": len(data.class_names),
        "request": asdict(replace(request, recipe=recipe)),
        "loss": {"name": type(loss).__name__, **asdict(loss)},
        "noise": "bank" if bank else "fresh",
        "bank_seconds": round(bank.seconds, 1) if bank else 0.0,
        "history": history,
    }
    return write_results(out, content, card, time.monotonic() - start, device)
