"""A store filled by one worker and by two, from :mod:`benchmarks.ray_workers`."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch

from benchmarks.timing import Options, Row, SkippedError, beside


def measure(options: Options) -> dict[str, Any]:
    needs = {"ray": "Ray: pip install '.[ray]'", "keepcover.store.cluster": "keepcover with its cluster engine"}
    for module, what in needs.items():
        if importlib.util.find_spec(module) is None:
            raise SkippedError(f"needs {what}")
    ray_workers = importlib.import_module("benchmarks.ray_workers")
    threads, quick = torch.get_num_threads(), {"depth": 8, "images": 4, "draws": 4}
    try:  # it computes with one thread per process
        found = ray_workers.measure(device=options.kind, **(quick if options.quick else {}))
    finally:
        torch.set_num_threads(threads)
    runs, sizes = found["runs"], {name: found[name] for name in ("images", "draws", "depth", "cores")}

    def row(name: str, other: str) -> Row:
        steady = "steady_noisy_images_per_second"
        return beside(
            f"store filled by {name}",
            [runs[name]["seconds"]],
            f"by {other}",
            [runs[other]["seconds"]],
            sizes,
            inverse=True,
            noisy_images_per_second=runs[name]["noisy_images_per_second"],
            steady_ratio=runs[name][steady] / runs[other][steady],
            stores_equal=found["stores_equal"],
        )

    return {"rows": [row("2 workers", "1 worker"), row("1 worker", "local")]}
