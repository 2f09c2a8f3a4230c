"""The engine beside the bare network on images of ImageNet's size."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.engine import beside_bare
from benchmarks.timing import Options
from keepcover.models import ResNet50


def measure(options: Options) -> dict[str, Any]:
    torch.manual_seed(0)
    model = ResNet50().eval().to(options.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    # 16 batches on a GPU: what the first of them waits for hardly counts.
    images, draws, batch = options.pick((1, 2, 2), (2, 4, 4), (1024, 32, 2048))
    side = options.pick(64, 224)
    data = torch.rand(images, 3, side, side)
    return {"rows": beside_bare(model, f"ResNet-50, {side} x {side}", data, 1000, draws, batch, options)}
