"""The cluster engine beside the local one: the same store filled in this process, by one worker and by two.

python benchmarks/ray_workers.py [--depth 20] [--images 64] [--draws 64] [--workers 1 2] [--device cpu] [--out FILE]

Every process computes with one CPU thread, the local baseline too, so that a ratio says what another worker adds. Ray is
started once, before the clock; starting workers and loading the model is on the clock, and also reported by itself: the
time until the first chunk is stored.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from keepcover.engine.smoother import Smoother
from keepcover.evaluation.manifest import manifest, write_results
from keepcover.models import CifarResNet
from keepcover.store import LogitStore, StoreKey
from keepcover.store.cluster import Cluster
from keepcover.store.cluster.ray import connected, fill


def measure(
    *, depth: int = 20, images: int = 64, draws: int = 64, workers: Sequence[int] = (1, 2), device: str = "cpu"
) -> dict[str, Any]:
    """Noisy images per second of the local engine and of so many workers, with ratios and whether the files are equal.

    A ratio "steady" leaves out the time until the first chunk was stored: the start of workers and the first chunk itself.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = (torch.rand(images, 3, 32, 32), torch.arange(images) % 10)
    smoother = Smoother(CifarResNet(depth).eval().to(device), 0.25, progress=False)
    key = replace(StoreKey.of(smoother, data, seed=0), device=device)
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as root, connected(Cluster(workers=max(workers))):
        files = {}
        for name, count in (("local", 0), *((f"{n} worker{'s' * (n > 1)}", n) for n in workers)):
            store = LogitStore.open(Path(root) / name, key, chunk_images=2, chunk_draws=draws, progress=False)
            first: list[float] = []
            start = time.perf_counter()

            def stored(*_: int, since: float = start, times: list[float] = first) -> None:
                times.append(time.perf_counter() - since)

            smoother.progress = stored
            done: Any = (
                fill(store, smoother, data, draws, Cluster(workers=count))
                if count
                else store.fill(smoother, data, draws)
            )
            seconds = time.perf_counter() - start
            total = images * draws
            left = (total - 2 * draws) / (seconds - first[0])
            found[name] = {
                "seconds": seconds,
                "first_chunk_seconds": first[0],
                "noisy_images_per_second": total / seconds,
                "steady_noisy_images_per_second": left,
                "workers": getattr(done, "workers", 0),
            }
            files[name] = {path.name: path.read_bytes() for path in store.folder.iterdir()}
    ratios = {
        f"{name} / local{kind}": row[field] / found["local"][field]
        for name, row in found.items()
        if name != "local"
        for kind, field in (("", "noisy_images_per_second"), (", steady", "steady_noisy_images_per_second"))
    }
    return {
        "depth": depth,
        "images": images,
        "draws": draws,
        "device": device,
        "cores": os.cpu_count(),
        "runs": found,
        "ratios": ratios,
        "stores_equal": all(content == files["local"] for content in files.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=20)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--draws", type=int, default=64)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    asked = {name: value for name, value in vars(options).items() if name != "out"}
    start = time.monotonic()
    row = measure(**asked)
    print(json.dumps(row, indent=1))
    for name, ratio in row["ratios"].items():
        print(f"{name}: {ratio:.2f}")
    if options.out is not None:
        about = manifest("python benchmarks/ray_workers.py", asked, time.monotonic() - start)
        write_results(options.out, [row], about)


if __name__ == "__main__":
    main()
