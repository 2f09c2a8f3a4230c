"""How time grows with images, draws and classes, and memory with images.

python -m benchmarks.growth IMAGES DRAWS CLASSES HOLDOUT    the peak memory of one streaming evaluation, in bytes
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.material import EPSILON, HOLDOUT, SIGMA, FourScores, logits_like_a_network
from benchmarks.score_statistics import reduced
from benchmarks.timing import Options, Row, alone, goal, grown, seconds
from keepcover.engine.smoother import Smoother
from keepcover.evaluation import Network, evaluate
from keepcover.noise import Stream

ROOT = Path(__file__).resolve().parents[1]
IMAGENET = {"images": 50_000, "draws": 256, "classes": 1000}
# One method that keeps a mean of every label (8 bytes) and one that keeps an order statistic (4 bytes).
METHODS = ("rscp_plus_bernstein", "exact")
KEPT = 8 + 4
# K log K between 64 and 1024 classes rises like this power of K.
K_LOG_K = 1.19


def _statistics(n: int, draws: int, classes: int) -> Callable[[], object]:
    stream = Stream(0, "test")
    logits, labels = logits_like_a_network(n, draws, classes)
    scores, u = FourScores.fitted(logits[:, :1], labels, stream), stream.uniform(torch.arange(n), "aps")
    return lambda: reduced(logits, scores, u)


def cheap(classes: int) -> Smoother:
    """An engine around next to no network: what is left is its own work."""
    torch.manual_seed(0)
    return Smoother(nn.Sequential(nn.Flatten(), nn.Linear(12, classes)), SIGMA, progress=False)


def _engine(n: int, draws: int, classes: int) -> Callable[[], object]:
    stream, images = Stream(0, "test"), torch.rand(n, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    logits, labels = logits_like_a_network(HOLDOUT, 1, classes)
    engine, scores = cheap(classes), FourScores.fitted(logits, labels, stream)
    return lambda: engine.reduce(images, draws, stream, scores)


def _time(options: Options) -> list[Row]:
    middle = options.pick({"n": 64, "N": 16, "K": 16}, {"n": 512, "N": 32, "K": 64})
    ranges: dict[str, Iterable[int]] = {
        "n": options.pick((32, 64, 128), (256, 512, 1024, 2048, 4096)),
        "N": options.pick((8, 16, 32), (16, 32, 64, 128, 256)),
        "K": options.pick((16, 32, 64), (64, 128, 256, 512, 1024)),
    }
    most = {"n": 1.1, "N": 1.1, "K": K_LOG_K + 0.06}
    rows = []
    for what, build in (("scores and statistics", _statistics), ("engine around a tiny network", _engine)):
        for variable, values in ranges.items():
            points = {}
            for value in values:
                size = {**middle, variable: value}
                work = build(size["n"], size["N"], size["K"])
                work()
                points[value] = [seconds(work) for _ in range(options.pick(1, 3))]
            others = {k: v for k, v in middle.items() if k != variable}
            row = grown(f"{what}, growth with {variable}", variable, points, others)
            rows.append(row if options.quick else goal(row, at_most=most[variable], of="exponent"))
    return rows


def peak_bytes(n: int, draws: int, classes: int, holdout: int) -> int:
    """Peak resident memory of a fresh process that does one streaming evaluation."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [sys.executable, "-m", "benchmarks.growth", *map(str, (n, draws, classes, holdout))]
    return int(subprocess.check_output(command, text=True, env=environment))


def evaluate_once(n: int, draws: int, classes: int, holdout: int) -> int:
    """What the fresh process does."""
    generator = torch.Generator().manual_seed(0)
    data = torch.rand(n, 3, 2, 2, generator=generator), torch.randint(classes, (n,), generator=generator)
    source = Network(cheap(classes), data, draws, Stream(0, "test"))
    evaluate(source, epsilon=EPSILON, methods=METHODS, transforms=("none",), splits=2, holdout=holdout)
    return peak_memory()


def peak_memory() -> int:
    """Bytes of this process at most. Linux begins ``ru_maxrss`` with what the parent had, so there its own record is read."""
    status = Path("/proc/self/status")
    if status.exists():
        return 1024 * int(status.read_text().partition("VmHWM:")[2].split()[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _timed_peak(n: int, draws: int, classes: int, holdout: int) -> tuple[int, float]:
    start = time.perf_counter()
    return peak_bytes(n, draws, classes, holdout), time.perf_counter() - start


def _flat(options: Options) -> Row:
    """Peaks against images: they may rise by what is kept of every image, not by its logits."""
    many = options.pick((128, 256), (2000, 4000, 8000, 16_000))
    draws, classes, holdout = options.pick((8, 10, 64), (64, 100, 500))
    found = {n: _timed_peak(n, draws, classes, holdout) for n in many}
    slope = np.polyfit(list(found), [peak for peak, _ in found.values()], 1)[0]
    sizes = {"draws": draws, "classes": classes, "holdout": holdout, "images": list(found)}
    each = {"bytes_per_image": float(slope), "kept_per_image": KEPT * classes, "logits_per_image": 4 * draws * classes}
    peaks = [[f"{n} images", peak] for n, (peak, _) in found.items()]
    return alone("streaming evaluation, peak memory", [found[max(found)][1]], sizes, peaks=peaks, **each)


def _imagenet() -> Row:
    """What 50 000 images with 256 draws of 1000 classes need, from three smaller runs.

    One with all the draws and few images has the holdout's logits and the largest pieces; two with few draws, one of them
    with all the images, say what those images add.
    """
    images, draws, classes = IMAGENET["images"], IMAGENET["draws"], IMAGENET["classes"]
    slice_, took = _timed_peak(1280, draws, classes, HOLDOUT)
    few, many = (peak_bytes(n, 4, classes, HOLDOUT) for n in (1280, images))
    peaks = [[f"1280 images, {draws} draws", slice_], ["1280, 4", few], [f"{images}, 4", many]]
    found = {"peaks": peaks, "predicted_GB": (slice_ + many - few) / 1e9}
    row = alone("streaming ImageNet, peak memory", [took], {**IMAGENET, "holdout": HOLDOUT}, **found)
    return goal(row, at_most=4, of="predicted_GB")


def measure(options: Options) -> dict[str, Any]:
    return {"rows": [*_time(options), _flat(options), *([] if options.quick else [_imagenet()])]}


if __name__ == "__main__":
    print(evaluate_once(*map(int, sys.argv[1:5])))
