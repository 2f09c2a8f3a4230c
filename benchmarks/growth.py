"""How time grows with images, draws and classes, and memory with images.

python -m benchmarks.growth IMAGES DRAWS CLASSES HOLDOUT    the peak memory of one streaming evaluation, in bytes
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.material import EPSILON, HOLDOUT, SIGMA, FourScores, logits_like_a_network
from benchmarks.score_statistics import reduced
from benchmarks.timing import Options, Row, goal, grown, seconds
from holdfast.experiments.streaming import Question, evaluate_streaming
from holdfast.noise import Stream
from holdfast.smoothing import Smoother

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
    middle = options.pick({"n": 64, "N": 16, "K": 16}, {"n": 1024, "N": 64, "K": 64})
    ranges: dict[str, Iterable[int]] = {
        "n": options.pick((32, 64, 128), (512, 1024, 2048, 4096, 8192)),
        "N": options.pick((8, 16, 32), (32, 64, 128, 256, 512)),
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
            row = grown(
                f"{what}, growth with {variable}", variable, points, {k: v for k, v in middle.items() if k != variable}
            )
            rows.append(row if options.quick else goal(row, at_most=most[variable], of="exponent"))
    return rows


def peak_bytes(n: int, draws: int, classes: int, holdout: int) -> int:
    """Peak resident memory of a fresh process that does one streaming evaluation."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.growth", *map(str, (n, draws, classes, holdout))],
        capture_output=True, text=True, check=True, env=environment,
    )  # fmt: skip
    return int(done.stdout)


def evaluate_once(n: int, draws: int, classes: int, holdout: int) -> int:
    """What the fresh process does."""
    generator = torch.Generator().manual_seed(0)
    data = torch.rand(n, 3, 2, 2, generator=generator), torch.randint(classes, (n,), generator=generator)
    questions = Question(epsilon=EPSILON, methods=METHODS, transforms=("none",))
    evaluate_streaming(cheap(classes), data, questions, draws=draws, splits=2, holdout=holdout)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _memory_row(name: str, sizes: dict[str, Any], peaks: dict[int, int], seconds_each: dict[int, float]) -> Row:
    """Peaks against images, with and without the statistics that are kept by design."""
    first, last = min(peaks), max(peaks)
    per_image = (peaks[last] - peaks[first]) / (last - first)
    return {
        "name": name, "seconds": seconds_each[last], "baseline": None, "baseline_seconds": None, "ratio": None, "spread": None,
        "sizes": {**sizes, "images": list(peaks)}, "peaks": [[n, peak] for n, peak in peaks.items()],
        "bytes_per_image": per_image, "kept_per_image": KEPT * sizes["classes"],
        "logits_per_image": 4 * sizes["draws"] * sizes["classes"],
    }  # fmt: skip


def _peaks(name: str, many: Iterable[int], draws: int, classes: int, holdout: int) -> Row:
    peaks: dict[int, int] = {}
    took: dict[int, float] = {}
    for n in many:

        def work(n: int = n) -> None:
            peaks[n] = peak_bytes(n, draws, classes, holdout)

        took[n] = seconds(work)
    return _memory_row(name, {"draws": draws, "classes": classes, "holdout": holdout}, peaks, took)


def _memory(options: Options) -> list[Row]:
    flat = _peaks(
        "streaming evaluation, peak memory", options.pick((256, 512), (2000, 4000, 8000, 16000)), *options.pick((8, 10, 64), (64, 100, 500))
    )  # fmt: skip
    if options.quick:
        return [flat]
    slice_ = _peaks("ImageNet-shaped slice, peak memory", (768, 1280), IMAGENET["draws"], IMAGENET["classes"], HOLDOUT)
    last, peak = slice_["peaks"][-1]
    # Whatever is larger: the growth that was measured, or the one that is documented.
    more = max(slice_["bytes_per_image"], slice_["kept_per_image"]) * (IMAGENET["images"] - last)
    slice_ |= {"predicted_GB": (peak + more) / 1e9, "predicted_images": IMAGENET["images"]}
    return [flat, goal(slice_, at_most=4, of="predicted_GB")]


def measure(options: Options) -> dict[str, Any]:
    return {"rows": [*_time(options), *_memory(options)]}


if __name__ == "__main__":
    print(evaluate_once(*map(int, sys.argv[1:5])))
