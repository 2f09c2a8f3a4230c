"""What an attack costs on top of the bare forward and backward passes that it needs."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from benchmarks.material import EPSILON, SIGMA, cifar10, network
from benchmarks.timing import Options, beside, in_turn
from keepcover.attacks import NoisyModel, pgd
from keepcover.noise import Stream


def measure(options: Options) -> dict[str, Any]:
    count, draws, steps = options.pick((4, 4, 2), (8, 8, 10), (256, 32, 20))
    device, rows = options.device, (2**24 if options.gpu else 2**20) // 3072
    autocast = torch.float16 if options.gpu else None
    model = network(options)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    images, labels, _ = cifar10(options, count)
    total = count * draws

    def bare() -> None:
        """The same number of network evaluations with gradients at the input, in batches of the same size."""
        per = rows // draws * draws
        for _ in range(steps):
            for at in range(0, total, per):
                x = torch.rand(min(per, total - at), 3, 32, 32, device=device, requires_grad=True)
                with torch.autocast(options.kind, autocast, enabled=autocast is not None):
                    out = model(x)
                torch.autograd.grad(out.float().sum(), x)

    def attack() -> None:
        noisy = NoisyModel(model, SIGMA, draws, Stream(0, "attack"), autocast)
        pgd(noisy, images, labels, EPSILON, steps=steps, rows=rows, progress=False)

    times = in_turn({"attack": attack, "bare": bare}, options.repeats, device)
    sizes = {"images": count, "draws": draws, "steps": steps, "depth": options.pick(8, 20, 110)}
    # The attack also evaluates its last iterate: one more forward pass, a third of a step.
    per_second = total * steps / statistics.median(times["attack"])
    row = beside(
        "attack", times["attack"], "bare forward and backward", times["bare"], sizes, noisy_images_per_second=per_second
    )
    return {"rows": [row]}
