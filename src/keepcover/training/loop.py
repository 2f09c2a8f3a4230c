"""The loop of every training under noise: order, steps, averaged weights, checkpoints, progress, divergence.

What is minimised plugs in as an :class:`Objective`. On CUDA a whole step is one graph: a ResNet-110 has hundreds of small
kernels per step, and launching them costs more than running them.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from keepcover.engine.progress import Bar, Progress
from keepcover.errors import InputError, reason, refusing
from keepcover.files import check_folder, write_file
from keepcover.sealing import UNREADABLE, pack, unpack
from keepcover.training.optimise import AdamW, Average, Muon, Replayed, Sgd, clipped, copy_into, epoch_key
from keepcover.training.recipe import Device, Recipe

Say = Callable[[str], None]


@dataclass(frozen=True)
class Checkpoint:
    """Where a run stands: its tensors, the epochs done and to do in all, and the seconds spent."""

    state: Mapping[str, Tensor]
    epoch: int
    epochs: int
    seconds: float

    def save(self, path: Path, recipe: Mapping[str, Any]) -> None:
        """Replace ``path`` in one step: a kill leaves the old checkpoint or the new one."""
        facts = {name: value for name, value in vars(self).items() if name != "state"}
        write_file(path, pack(self.state, {**facts, "recipe": recipe}))

    @classmethod
    def load(cls, path: Path, recipe: Mapping[str, Any], expected: Mapping[str, Tensor]) -> Checkpoint | None:
        """The checkpoint at ``path``; None where there is none, an error where it belongs to another run."""
        if not path.is_file():
            return None
        with refusing(f"{path} is not a readable checkpoint", *UNREADABLE, advice="delete it to start over"):
            state, facts = unpack(path)
        if facts.get("recipe") != json.loads(json.dumps(recipe)):
            other = "another recipe, other data or other base weights"
            raise InputError(f"{path} belongs to {other}; delete it to start over, or train into another file")
        if {name: state[name].shape for name in state} != {name: expected[name].shape for name in expected}:
            raise InputError(f"{path} belongs to another architecture; delete it or train into another file")
        return cls(state, int(facts["epoch"]), int(facts["epochs"]), float(facts["seconds"]))


class Objective(ABC):
    """What a loop minimises over those parameters of a model that are not frozen."""

    def __init__(self, model: nn.Module, networks: Sequence[nn.Module] = (), compile: bool = False, **how: Any) -> None:
        """``networks`` are those that a step runs, as ``run``: through the compiler (``how``) where asked."""
        self.model, self.parameters = model, [one for one in model.parameters() if one.requires_grad]
        if not self.parameters:
            frozen = "they are all frozen, or there are none; model.requires_grad_(True) lets them learn"
            raise InputError(f"expected parameters to train, got none from {type(model).__name__}: {frozen}")
        self.plain = list(networks)
        self.run: list[Any] = [torch.compile(one, **how) for one in networks] if compile else self.plain

    @abstractmethod
    def __call__(self, index: Tensor) -> Tensor:
        """The loss of the examples at ``index``."""

    def state(self) -> dict[str, Tensor]:
        """Every tensor that a step changes: parameters, and running statistics where there are such."""
        return {f"model.{name}": value for name, value in self.model.state_dict().items()}

    def simplify(self) -> bool:
        """Compute the same without a compiler from now on; False where there was none."""
        compiled, self.run = self.run is not self.plain, self.plain
        return compiled


def optimiser_of(recipe: Recipe, parameters: Sequence[Tensor]) -> Sgd | AdamW | Muon:
    """What takes the steps."""
    if recipe.optimiser == "adamw":
        return AdamW(parameters, recipe.weight_decay)
    if recipe.optimiser == "muon":
        return Muon(parameters, recipe.momentum, recipe.weight_decay)
    return Sgd(parameters, recipe.momentum, recipe.weight_decay, recipe.nesterov)


class Loop:
    """Steps over random batches; its randomness depends on (seed, epoch) alone, so a resumed run takes the same steps.

    Attributes:
        fixed: the recipe with its number of epochs, once that is known.
        epoch: how many are done.
    """

    def __init__(self, objective: Objective, recipe: Recipe, count: int, device: Device, say: Say = print) -> None:
        if count < recipe.batch_size:
            found = f"expected at least one batch of {recipe.batch_size} images, got {count}"
            raise InputError(f"{found}; make batches smaller (--batch-size) or give more images")
        self.objective, self.recipe, self.fixed = objective, recipe, recipe
        self.count, self.device, self.say = count, torch.device(device), say
        self.steps_per_epoch = count // recipe.batch_size
        self.optimiser = optimiser_of(recipe, objective.parameters)
        self.average = Average(objective.state()) if recipe.average else None
        self.index = torch.arange(recipe.batch_size, device=self.device)
        self.loss = torch.zeros((), device=self.device)
        self.step = Replayed(self._step, self.state, self.device, self._simplify)
        self.epoch, self.start = 0, time.monotonic()

    def _step(self) -> None:
        loss = self.objective(self.index)
        # A part that no output depends on, such as a second head, is left alone but for its decay.
        gradients = torch.autograd.grad(loss, self.optimiser.parameters, materialize_grads=True)
        self.optimiser.step(clipped(gradients, self.recipe.clip) if self.recipe.clip else gradients)
        if self.average:
            self.average.step(self.objective.state())
        self.loss.copy_(loss.detach())

    def _simplify(self, error: Exception) -> bool:
        if done := self.objective.simplify():
            why = f"{type(error).__name__}: {reason(error)}"
            self.say(f"the compiled step failed ({why}); going on without the compiler")
        return done

    def state(self) -> dict[str, Tensor]:
        """Everything a step changes."""
        averages = self.average.state() if self.average else {}
        return {**self.objective.state(), **self.optimiser.state(), **averages}

    def _run_epoch(self, bar: Bar) -> float:
        """One pass over the data, and its mean loss. A short last batch is left for another epoch: every step has one shape."""
        recipe = self.fixed
        torch.manual_seed(epoch_key(recipe.seed, self.epoch))
        order = torch.randperm(self.count, device=self.device)
        total = torch.zeros((), device=self.device)
        for step in range(self.steps_per_epoch):
            self.index.copy_(order[step * recipe.batch_size : (step + 1) * recipe.batch_size])
            done = self.epoch * self.steps_per_epoch + step
            self.optimiser.lr.fill_(recipe.learning_rate(done, self.steps_per_epoch))
            if self.average:
                self.average.set(done, recipe.average * recipe.epochs * self.steps_per_epoch)
            self.step()
            total += self.loss
            bar.advance()
        self.epoch += 1
        return float(total) / self.steps_per_epoch

    def _measure(self, minutes: float) -> None:
        """Fix as many epochs as the minutes that are left allow, at the speed of a few steps that leave no trace."""
        kept = {name: value.detach().clone() for name, value in self.state().items()}
        self.step()
        float(self.loss)  # a GPU has finished when its result is here
        start, steps = time.monotonic(), 0
        while steps < 3 or time.monotonic() - start < 1.0:
            self.step()
            float(self.loss)
            steps += 1
        now = time.monotonic()
        each, left = (now - start) / steps, 60 * minutes - (now - self.start)
        copy_into(self.state(), kept)
        epochs = max(1, int(0.97 * left / (each * self.steps_per_epoch)))  # a little is for judging and writing
        self.fixed = replace(self.recipe, epochs=epochs)
        speed = f"{self.recipe.batch_size / each:,.0f} images/s after {now - self.start:.0f} s"
        self.say(f"{speed}; {epochs} epochs fit into the {max(0.0, left):.0f} s that are left")

    def run(
        self,
        checkpoint: Path | None = None,
        belongs: Mapping[str, Any] | None = None,
        *,
        checkpoint_seconds: float = 30.0,
        label: str = "training",
        each: Callable[[float], None] = lambda _: None,
        progress: Progress = True,
    ) -> float:
        """Train to the end, from ``checkpoint`` where there is one that belongs here, and return the seconds spent in all.

        The checkpoint is renewed at the end of every epoch that finds it older than ``checkpoint_seconds``. ``each`` is
        called with the loss of every epoch. The last weights are the averaged ones.
        """
        belongs, spent = belongs or {}, 0.0
        before = Checkpoint.load(checkpoint, belongs, self.state()) if checkpoint else None
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            if before:
                copy_into(self.state(), before.state)
                self.epoch, spent, self.fixed = before.epoch, before.seconds, replace(self.recipe, epochs=before.epochs)
                self.say(f"going on after epoch {before.epoch} of {before.epochs}")
            elif self.recipe.minutes:
                self._measure(self.recipe.minutes)
            epochs, saved = self.fixed.epochs, time.monotonic()
            with Bar(label, epochs * self.steps_per_epoch, progress) as bar:
                bar.done = self.epoch * self.steps_per_epoch
                while self.epoch < epochs:
                    loss = self._run_epoch(bar)
                    if not math.isfinite(loss):
                        raise InputError(f"training diverged: the loss became {loss} in epoch {self.epoch}; lower lr")
                    each(loss)
                    now = time.monotonic()
                    if checkpoint and now - saved >= checkpoint_seconds and self.epoch < epochs:
                        Checkpoint(self.state(), self.epoch, epochs, spent + now - self.start).save(checkpoint, belongs)
                        saved = now
        if self.average:
            copy_into(self.objective.state(), self.average.values)
        if not all(bool(parameter.isfinite().all()) for parameter in self.objective.parameters):
            raise InputError("training diverged: parameters are no longer finite; lower lr")
        return spent + time.monotonic() - self.start


def checkpoint_for(out: Path, resume: bool) -> Path:
    """Where the checkpoint of a run that writes ``out`` lies; that both can be written is checked before any work is done.

    An earlier checkpoint is deleted unless the run is to go on from it.
    """
    if out.suffix != ".safetensors":
        raise InputError(f"expected an output file that ends in .safetensors, got {out.name}")
    checkpoint = out.with_suffix(".checkpoint.safetensors")
    check_folder(out.parent, out.name, out.with_suffix(".json").name, checkpoint.name)
    if not resume:
        checkpoint.unlink(missing_ok=True)
    return checkpoint


def write_results(
    out: Path, content: bytes, card: dict[str, Any], seconds: float, device: torch.device
) -> dict[str, Any]:
    """Write trained weights and, beside them, their card with cost and checksum; the checkpoint has done its service."""
    cuda = device.type == "cuda"
    whole = {
        **card,
        "seconds": round(seconds, 1),
        "hardware": torch.cuda.get_device_name(device) if cuda else f"{torch.get_num_threads()} CPU threads",
        "torch": torch.__version__,
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    write_file(out, content)
    write_file(out.with_suffix(".json"), (json.dumps(whole, indent=1) + "\n").encode())
    out.with_suffix(".checkpoint.safetensors").unlink(missing_ok=True)
    return whole
