"""Features of augmented noisy copies, computed once: a frozen backbone need not run again every epoch."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from keepcover.data import Labelled
from keepcover.engine.progress import Bar, Progress
from keepcover.errors import InputError
from keepcover.models.checkpoints import backbone, check_head_is_last, last_linear
from keepcover.training.recipe import Device, Recipe
from keepcover.training.views import Views

BATCH = 4096  # images that the backbone sees at a time


@dataclass(frozen=True)
class FeatureBank:
    """``features`` [n, views, copies, d], float16: random crops and flips of every image, each under several noises.

    A batch picks one view of every image and as many of its noisy copies as the loss averages over, so that the copies
    differ in noise alone, as they would without a bank.
    """

    features: Float[Tensor, "n views copies d"]
    labels: Int[Tensor, " n"]
    seconds: float

    @classmethod
    @torch.inference_mode()
    def build(
        cls,
        model: nn.Module,
        data: Labelled,
        recipe: Recipe,
        *,
        views: int = 4,
        device: Device = "cpu",
        progress: Progress = True,
    ) -> FeatureBank:
        """Run the frozen backbone once over ``views`` crops and flips of every image under the recipe's copies of noise."""
        if views < 1 or len(data) == 0:
            raise InputError(f"expected at least 1 view of at least 1 image, got {views} of {len(data)}")
        start, device = time.monotonic(), torch.device(device)
        body = backbone(model).to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        check_head_is_last(model.to(device).eval(), data.images[:2].to(device))
        source, size = Views.of(data, recipe, device), (views, recipe.copies, last_linear(model)[1].in_features)
        bank = torch.empty(len(data), *size, dtype=torch.float16, device=device)
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            torch.autocast("cuda", torch.float16, enabled=device.type == "cuda"),
            Bar("feature bank", views * len(data), progress) as bar,
        ):
            torch.manual_seed(recipe.seed)
            for view in range(views):
                for index in torch.arange(len(data), device=device).split(max(1, BATCH // recipe.copies)):
                    features = body(source.noisy(source.clean(index), recipe.copies))
                    bank[index, view] = features.half().view(len(index), *size[1:])
                    bar.advance(len(index))
        if not bank.isfinite().all():
            raise InputError("the backbone returned features beyond float16 under noise; check the weights")
        return cls(bank, data.labels.to(device), time.monotonic() - start)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def device(self) -> torch.device:
        return self.features.device

    def pick(self, index: Tensor, copies: int) -> Float[Tensor, "b copies d"]:
        """One random view of every image of the batch and ``copies`` of its noisy copies."""
        _, views, held, _ = self.features.shape
        if copies > held:
            raise InputError(f"the bank holds {held} noisy copies of each view, {copies} were asked for")
        view = torch.randint(views, (len(index), 1), device=self.device)
        every = torch.arange(held, device=self.device).expand(len(index), held)
        which = every if copies == held else torch.rand(every.shape, device=self.device).argsort(dim=1)[:, :copies]
        return self.features[index[:, None], view, which].float()

    def logits(self, model: nn.Module, index: Tensor, copies: int) -> Float[Tensor, "b copies k"]:
        """What the model's last layer makes of a pick."""
        return last_linear(model)[1](self.pick(index, copies))
