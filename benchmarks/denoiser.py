"""What a denoiser costs before a classifier, beside a ResNet-50 on the same images."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.engine import bare_forward
from benchmarks.timing import Options, beside, goal, in_turn
from keepcover.models import Denoiser, ResNet50


class _At(nn.Module):
    """A denoiser at one sigma, as it runs behind ``keepcover.denoised``."""

    def __init__(self) -> None:
        super().__init__()
        self.denoiser, self.sigma = Denoiser(), nn.Buffer(torch.tensor(0.25))

    def forward(self, images: Tensor) -> Tensor:
        return self.denoiser(images, self.sigma)


def measure(options: Options) -> dict[str, Any]:
    torch.manual_seed(0)
    batch, side = options.pick(1, 8, 1024), options.pick(32, 224, 224)
    total = batch * options.pick(1, 1, 8)
    sides = {}
    for name, model in (("denoiser", _At()), ("ResNet-50", ResNet50())):
        model = model.eval().to(options.device)
        model = model.to(memory_format=torch.channels_last) if options.gpu else model  # type: ignore[call-overload]
        sides[name] = bare_forward(model, options, batch, total, (3, side, side))
    times = in_turn(sides, options.repeats, options.device)
    sizes = {"images": total, "shape": [3, side, side], "batch": batch}
    row = beside(f"denoiser, {side} x {side}", times["denoiser"], "ResNet-50", times["ResNet-50"], sizes)
    return {"rows": [row if options.quick else goal(row, at_most=1.0)]}
