"""One run of conformal training from base weights to a file and its card."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from keepcover.data import Labelled
from keepcover.engine.fingerprint import fingerprint
from keepcover.engine.progress import Report
from keepcover.errors import InputError
from keepcover.files import check_folder, write_file
from keepcover.guarantee import warn_of_coverage
from keepcover.methods import Asked, Exact, Holdout
from keepcover.methods.exact import HullRule
from keepcover.models.checkpoints import weights_bytes
from keepcover.models.heads import head_bytes, last_linear
from keepcover.noise import Gaussian, Threat
from keepcover.tasks import Classification
from keepcover.training.bank import FeatureBank
from keepcover.training.base import check_logits, hardware
from keepcover.training.conformal import ConformalLoss, ExactRCT
from keepcover.training.heads import PRESETS, HeadRecipe, train_head, train_network
from keepcover.training.resume import checkpoint_path


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
        if self.kind not in ("rct", "conftr", "exact"):
            raise InputError(f"expected rct, conftr or exact, got {self.kind!r}")
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
        if self.pad < 0:
            raise InputError(f"expected a shift of 0 pixels or more, got pad {self.pad}")

    @property
    def settings(self) -> HeadRecipe:
        return self.recipe or PRESETS[self.preset].recipe

    @property
    def noise(self) -> float:
        """ConfTr trains on clean images."""
        return 0.0 if self.kind == "conftr" else self.sigma

    @property
    def copies(self) -> int:
        return 1 if self.kind == "conftr" else self.settings.copies

    def bank(self, model: nn.Module, data: Labelled, **options: Any) -> FeatureBank:
        """The bank this training draws from; equal (noise, copies, views) may share one."""
        return FeatureBank.build(
            model, data, self.noise, views=self.views, copies=self.copies, pad=self.pad, flip=self.flip, **options
        )

    def parts(self, data: Labelled) -> tuple[Labelled, Labelled]:
        """Images to train on, and those set aside."""
        if self.validation >= len(data):
            raise InputError(f"{self.validation} validation images leave none of {len(data)} to train on")
        kept, held = data.split(len(data) - self.validation, -1, seed=self.settings.seed)
        return kept, held

    def loss(self, model: nn.Module, bank: FeatureBank) -> ConformalLoss:
        """The loss; the exact one takes the rule that the model's scores before training call for."""
        preset = PRESETS[self.preset]
        if self.kind != "exact":
            return preset.loss(self.kind, self.epsilon / self.sigma, self.alpha)
        rule = matched_rule(model, bank, self)
        return ExactRCT(
            alpha=self.alpha,
            size_weight=preset.size_weight,
            kappa=preset.kappa,
            c=rule.c,
            kappa_count=rule.kappa,
            level=rule.level,
        )


@torch.no_grad()
def matched_rule(model: nn.Module, bank: FeatureBank, request: ConformalRequest) -> HullRule:
    """The exact rule with the smallest sets for as many draws as training averages over, chosen on training images."""
    _, head = last_linear(model)
    some = slice(0, min(len(bank), 2000))
    logits = head.to(bank.device)(bank.features[some, 0].float())
    task = Classification().seen(logits)
    holdout = Holdout(task, logits.cpu(), bank.labels[some].cpu())
    threat = Threat(Gaussian(request.sigma), request.epsilon)
    return Exact().fit(Asked(request.alpha, threat, request.copies, len(bank), task.classes), holdout)


def train_conformal(
    model: nn.Module,
    data: Labelled,
    request: ConformalRequest,
    out: str | Path,
    *,
    base: str,
    bank: FeatureBank | None = None,
    device: torch.device | str = "cpu",
    compile: bool = False,
    resume: bool = True,
    say: Callable[[str], None] = print,
    progress: bool | Report = True,
) -> dict[str, Any]:
    """Train and write ``out`` (a head of a few KB, or all weights) and its card (JSON, the same name); returns the card.

    ``base`` names the weights that ``model`` carries. A ``bank`` built elsewhere over the same data is used as it is.
    """
    out, checkpoint = Path(out), checkpoint_path(out)
    check_folder(out.parent, out.name, out.with_suffix(".json").name, checkpoint.name)
    if not resume:
        checkpoint.unlink(missing_ok=True)
    check_logits(model, data, device)
    start = time.monotonic()
    kept, held = request.parts(data)
    recipe = replace(request.settings, copies=request.copies)
    history: list[dict[str, Any]] = []

    def log(entry: dict[str, Any]) -> None:
        epoch = entry["epoch"]
        if epoch % 10 == 0 or epoch in (1, recipe.epochs):
            history.append({"epoch": epoch, **{name: round(entry[name], 4) for name in entry if name != "epoch"}})
            say(
                f"epoch {epoch}/{recipe.epochs}  loss {entry['loss']:.3f}  soft size {entry['soft_size']:.3f}  "
                f"hard size {entry['hard_size']:.3f}  coverage {entry['coverage']:.3f}"
            )

    belongs = {
        "data": data.fingerprint,
        "base": fingerprint(model),
        "sigma": request.noise,
        "validation": request.validation,
    }
    shared: dict[str, Any] = {"log": log, "checkpoint": checkpoint, "belongs": belongs, "progress": progress}
    options: dict[str, Any] = {"device": device, "compile": compile, "seed": recipe.seed, "progress": progress}
    given = 0.0 if bank is None else bank.seconds
    if request.whole or request.fresh:
        # The loss looks at a few features at most: a small bank will do.
        loss = request.loss(model, replace(request, views=1).bank(model, kept[:2000], **options))
        trained = train_network(
            model,
            kept,
            request.noise,
            loss,
            recipe,
            whole=request.whole,
            pad=request.pad,
            flip=request.flip,
            device=device,
            validation=held if request.validation else None,
            **shared,
        )
    else:
        bank = bank or request.bank(model, kept, **options)
        loss = request.loss(model, bank)
        judge = (
            replace(request, views=1, pad=0, flip=False).bank(model, held, **options) if request.validation else None
        )
        trained = train_head(model, bank, loss, recipe, validation=judge, **shared)
    if history and history[-1]["hard_size"] >= len(data.class_names) - 1e-6:
        say(
            "warning: every set still holds every label; training is stuck on a plateau. Keep the old last layer as a start, or "
            "lower the learning rate"
        )
    content = weights_bytes(trained, {"base": base}) if request.whole else head_bytes(trained)
    card = {
        "base": base,
        "base_fingerprint": fingerprint(model),
        "trains": "whole network" if request.whole else "last layer",
        "dataset": data.name,
        "num_classes": len(data.class_names),
        "request": asdict(replace(request, recipe=recipe)),
        "loss": {"name": type(loss).__name__, **asdict(loss)},
        "noise": "bank" if bank else "fresh",
        "bank_seconds": round(bank.seconds, 1) if bank else 0.0,
        "seconds": round(given + time.monotonic() - start, 1),
        "hardware": hardware(torch.device(device)),
        "torch": torch.__version__,
        "history": history,
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    write_file(out, content)
    write_file(out.with_suffix(".json"), (json.dumps(card, indent=1) + "\n").encode())
    return card
