"""The cluster engine beside the local one: the same store filled in this process, by one worker and by two.

Every process computes with one CPU thread, the local baseline too, so that a ratio says what another worker adds. Ray is
started once, before the clock; starting workers and loading the model is on the clock. A ratio "once started" leaves out the
time until the first chunk was stored: the start of workers and the first chunk itself.
"""

from __future__ import annotations

import os
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import Options, Row, SkippedError, beside
from keepcover.engine.smoother import Smoother
from keepcover.models import CifarResNet
from keepcover.store import LogitStore, StoreKey
from keepcover.store.cluster import Cluster
from keepcover.store.cluster.ray import connected, fill

SIDES = {"local": 0, "1 worker": 1, "2 workers": 2}


def measure(options: Options) -> dict[str, Any]:
    if find_spec("ray") is None:
        raise SkippedError("needs Ray: pip install '.[ray]'")
    depth, images, draws = options.pick((8, 4, 4), (20, 64, 64))
    threads, total = torch.get_num_threads(), images * draws
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = (torch.rand(images, 3, 32, 32), torch.arange(images) % 10)
    smoother = Smoother(CifarResNet(depth).eval().to(options.device), 0.25, progress=False)
    key, files, took, rate = StoreKey.of(smoother, data, seed=0), {}, {}, {}
    try:
        with tempfile.TemporaryDirectory() as root, connected(Cluster(workers=2)):
            for name, count in SIDES.items():
                store = LogitStore.open(Path(root) / name, key, chunk_images=2, chunk_draws=draws, progress=False)
                stored: list[float] = []
                smoother.progress = lambda *_, times=stored: times.append(time.perf_counter())
                start = time.perf_counter()
                if count:
                    fill(store, smoother, data, draws, Cluster(workers=count))
                else:
                    store.fill(smoother, data, draws)
                end = time.perf_counter()
                took[name], rate[name] = end - start, (total - 2 * draws) / (end - stored[0])
                files[name] = {path.name: path.read_bytes() for path in store.folder.iterdir()}
    finally:
        torch.set_num_threads(threads)
    sizes = {"images": images, "draws": draws, "depth": depth, "cores": os.cpu_count()}

    def row(name: str, other: str) -> Row:
        more = {"noisy_images_per_second": total / took[name], "steady_ratio": rate[name] / rate[other]}
        more["stores_equal"] = files[name] == files["local"]
        pair = (f"store filled by {name}", [took[name]], f"by {other}", [took[other]])
        return beside(*pair, sizes, inverse=True, **more)

    return {"rows": [row("2 workers", "1 worker"), row("1 worker", "local")]}
