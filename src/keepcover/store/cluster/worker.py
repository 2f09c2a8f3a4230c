"""What runs on a worker: build the smoother once, prove that it is the right one, then compute chunk after chunk."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from keepcover.engine.smoother import Classifier, Smoother
from keepcover.errors import InputError
from keepcover.store import Chunk, StoreKey
from keepcover.store.chunk import to_half
from keepcover.store.filling import compute_chunk


def versions() -> dict[str, str]:
    """What must be equal on all machines for their logits to be of one kind."""
    import keepcover

    return {"keepcover": keepcover.__version__, "torch": torch.__version__.split("+")[0]}


@dataclass(frozen=True)
class Recipe:
    """All that a worker needs besides the model. The key says everything that changes a logit; the rest is geometry."""

    key: StoreKey
    batch_size: int | None
    threads: int

    def smoother(self, model: Classifier) -> Smoother:
        """The model under the key's noise and numerics, on the key's kind of device."""
        key = self.key
        if key.device == "cuda" and not torch.cuda.is_available():
            raise InputError(f"the store is for cuda and a worker on {platform.node()} has no GPU that torch can use")
        if isinstance(model, nn.Module):
            model = model.to(key.device)
        return Smoother(
            model,
            key.added,
            batch_size=self.batch_size,
            device=key.device,
            channels_last=key.channels_last,
            autocast=None if key.autocast is None else getattr(torch, key.autocast),
            compile=key.compile,
            progress=False,
        )


class Worker:
    """One process of a cluster. It knows the noise and the model; images come to it, logits go back.

    Example:
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
        >>> data = (torch.rand(6, 1, 2, 2), torch.zeros(6).long())
        >>> key = StoreKey.of(Smoother(model, 0.5), data, seed=0)
        >>> worker = Worker(Recipe(key, batch_size=None, threads=torch.get_num_threads()))
        >>> facts = worker.prepare(model)
        >>> worker.compute(data[0][:2].numpy(), range(2), range(8)).shape
        (2, 8, 3)
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.smoother: Smoother | None = None

    def prepare(self, model: Any, build: bool = False) -> dict[str, Any]:
        """Take the model, or build it here by calling what was given; refuse it unless it is the store's.

        Nothing of this happens when the process starts, so that what goes wrong is an answer, not a death.
        """
        torch.set_num_threads(self.recipe.threads)
        built: Callable[..., Any] = model() if build else model
        smoother = self.recipe.smoother(built)
        try:
            self.recipe.key.refuse_smoother(smoother)
        except InputError as error:
            raise InputError(
                f"a worker on {platform.node()} has another model: {error}. Are its files the same there?"
            ) from None
        self.smoother = smoother
        return {"host": platform.node(), "pid": os.getpid(), "versions": versions()}

    def compute(self, images: np.ndarray, rows: range, draws: range) -> np.ndarray:
        """Logits [rows, draws, classes] in float16."""
        assert self.smoother is not None, "prepare() comes first"
        chunk = Chunk(rows, draws)
        own = torch.from_numpy(np.array(images))  # shared memory is read-only, and torch has no such tensors
        return to_half(compute_chunk(self.smoother, own, chunk, self.recipe.key.stream), chunk).numpy()
