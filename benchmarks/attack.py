"""Attack throughput beside the bare forward + backward pass, in one run.

python benchmarks/attack.py [--device cuda] [--depth 110] [--images 256] [--draws 32] [--steps 10]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from holdfast.attacks import NoisyModel, pgd
from holdfast.experiments.manifest import manifest, write_results
from holdfast.models import CifarResNet
from holdfast.noise import Stream


def seconds(work, device: str, repeats: int = 3) -> float:
    """Median wall-clock of a few repeats after one warm-up."""
    times = []
    for repeat in range(repeats + 1):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        if repeat:
            times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--depth", type=int, default=110)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--draws", type=int, default=32)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", default="results/benchmarks/attack.json")
    options = parser.parse_args()
    device, rows = options.device, (2**24 if options.device == "cuda" else 2**20) // 3072
    autocast = torch.float16 if device == "cuda" else None
    model = CifarResNet(options.depth).eval().to(device).to(memory_format=torch.channels_last)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    images, labels = torch.rand(options.images, 3, 32, 32), torch.randint(10, (options.images,))
    total = options.images * options.draws

    def bare() -> None:
        """The same number of network evaluations with gradients at the input, in batches of the same size."""
        per = rows // options.draws * options.draws
        for _ in range(options.steps):
            for at in range(0, total, per):
                x = torch.rand(min(per, total - at), 3, 32, 32, device=device, requires_grad=True)
                with torch.autocast(device, autocast, enabled=autocast is not None):
                    out = model(x)
                torch.autograd.grad(out.float().sum(), x)

    def attack() -> None:
        noisy = NoisyModel(model, 0.25, options.draws, Stream(0, "attack"), autocast)
        pgd(noisy, images, labels, 0.125, steps=options.steps, rows=rows, progress=False)

    start = time.monotonic()
    plain, full = seconds(bare, device), seconds(attack, device)
    # The attack also evaluates its last iterate: one more forward pass, a third of a step.
    row = {
        "bare_forward_backward_seconds": plain, "attack_seconds": full, "throughput_ratio": plain / full,
        "noisy_images_per_second": total * options.steps / full, "steps": options.steps, "depth": options.depth,
    }  # fmt: skip
    print(json.dumps(row, indent=1))
    write_results(
        Path(options.out),
        [row],
        manifest(
            "python benchmarks/attack.py",
            {key: value for key, value in vars(options).items() if key != "out"},
            time.monotonic() - start,
        ),
    )


if __name__ == "__main__":
    main()
