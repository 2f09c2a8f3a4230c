"""Features of augmented noisy copies, computed once: a frozen backbone need not run again every epoch."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from keepcover.data import Labelled
from keepcover.engine.progress import Bar, Report
from keepcover.errors import InputError
from keepcover.models.heads import backbone, check_head_is_last
from keepcover.training.base import augment, padded_bytes


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
        sigma: float,
        *,
        views: int = 4,
        copies: int = 8,
        pad: int = 4,
        flip: bool = True,
        device: torch.device | str = "cpu",
        batch_size: int = 4096,
        compile: bool = False,
        seed: int = 0,
        progress: bool | Report = True,
    ) -> FeatureBank:
        """Run the frozen backbone once over ``views * copies`` noisy versions of every image."""
        if views < 1 or copies < 1:
            raise InputError(f"expected at least 1 view and 1 noisy copy, got {views} and {copies}")
        if len(data) == 0:
            raise InputError("expected at least 1 image, got none")
        start, device = time.monotonic(), torch.device(device)
        body = backbone(model).to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        check_head_is_last(model.to(device).eval(), data.images[:2].to(device))
        run = torch.compile(body) if compile else body
        generator = torch.Generator(device=device).manual_seed(seed)
        padded = padded_bytes(data.images, pad).to(device)
        bank: Tensor | None = None
        half = torch.autocast("cuda", torch.float16, enabled=device.type == "cuda")
        per_step = min(len(data), max(1, batch_size // copies))
        with Bar("feature bank", views * len(data), progress) as bar, half:
            for view in range(views):
                for index in torch.arange(len(data), device=device).split(per_step):
                    images = augment(padded, index, pad, flip, generator).repeat_interleave(copies, dim=0)
                    noise = torch.randn(images.shape, device=device, generator=generator)
                    noisy = images.add_(noise, alpha=sigma).contiguous(memory_format=torch.channels_last)
                    features = run(noisy).half().view(len(index), copies, -1)
                    if bank is None:
                        bank = torch.empty(
                            len(data), views, copies, features.shape[-1], dtype=torch.float16, device=device
                        )
                    bank[index, view] = features
                    bar.advance(len(index))
        assert bank is not None
        if not bank.isfinite().all():
            raise InputError("the backbone returned features beyond float16 under noise; check the weights")
        if device.type == "cuda":
            torch.cuda.synchronize()
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
        if copies == held:
            which = torch.arange(held, device=self.device).expand(len(index), held)
        else:
            which = torch.rand(len(index), held, device=self.device).argsort(dim=1)[:, :copies]
        return self.features[index[:, None], view, which].float()
