"""How often monitors raise false alarms, and how soon they find drifts and attacks, on digits and on CIFAR-10:
results/monitor.json.

PYTHONPATH=src python -m benchmarks.monitor [--cifar IMAGES.npz --logits LOGITS.safetensors --weights WEIGHTS.safetensors]

CIFAR-10 takes the test images and labels, noisy logits of the first of them that are calibrated on, and the network that made
them. Streams are drawn with replacement from held-out images: quiet days, then the drift for good; every label arrives.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy import ndarray
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import avg_pool2d

import keepcover
from benchmarks import false_alarms
from keepcover.evaluation.manifest import command_of, manifest, write_results
from keepcover.monitoring.outcomes import growth, log_evidence
from keepcover.monitoring.queries import BETS, BINS, advance, reserve
from keepcover.specs import load_data, load_model
from keepcover.training.example import SIGMA, example_model, example_split

ALPHA, QUIET, DAYS, PER_DAY, STREAMS, SEED = 0.1, 20, 20, 50, 100, 0
DRIFTS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "noise 0.1": lambda x: (x + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))).clamp(0, 1),
    "noise 0.2": lambda x: (x + 0.2 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))).clamp(0, 1),
    "contrast x 0.5": lambda x: 0.5 + 0.5 * (x - 0.5),
    "brightness + 0.2": lambda x: (x + 0.2).clamp(0, 1),
    "blur 3 x 3": lambda x: avg_pool2d(x, 3, 1, 1, count_include_pad=False),
}
Seen = tuple[ndarray, ndarray]  # whether each held-out set missed, and the statistics of the queries


def days_to_alarm(watch: keepcover.Monitor, quiet: Seen, drifted: Seen) -> dict[str, ndarray]:
    """The day of the alarm after the drift begins, from 1, in every stream; 0 for one before it, inf for none."""
    rng = np.random.default_rng(SEED)
    found = {name: np.full(STREAMS, np.inf) for name in watch.limits}
    hit, miss = growth([False, True], watch.levels[0])
    grown = np.zeros((STREAMS, 0, len(hit)))
    seen = np.zeros((STREAMS, drifted[1].shape[1], BINS), np.int64)
    capital = np.zeros((*seen.shape[:2], len(BETS)))
    for day in range(-QUIET, DAYS):
        missed, statistics = quiet if day < 0 else drifted
        pick = rng.integers(len(missed), size=(PER_DAY, STREAMS))
        count = missed[pick].sum(axis=0)[:, None]
        grown = np.concatenate([grown, (count * miss + (PER_DAY - count) * hit)[:, None]], axis=1)
        promise = log_evidence(np.arange(grown.shape[1]), grown) >= np.log(watch.limits["promise"])
        queries = np.zeros(STREAMS, dtype=bool)
        for at, rows in enumerate(pick, (day + QUIET) * PER_DAY):
            advance(seen, capital, at, statistics[rows][None], rng.random((1, *seen.shape[:2])))
            most = (capital.sum(-1) + reserve(at + 1)).max(-1) / seen.shape[1]
            queries |= most >= watch.limits["queries"]
        for name, fired in (("promise", promise), ("queries", queries)):
            found[name] = np.where(fired & np.isinf(found[name]), max(day + 1, 0), found[name])
    return found


def rows(data: str, watch: keepcover.Monitor, sets: dict[str, Any], labels: Tensor) -> Iterator[dict[str, Any]]:
    """One row per drift: coverage and size there, and when alarms came."""
    seen = {name: ((~one.covers(labels)).numpy(), watch.statistics(one)) for name, one in sets.items()}
    for name, one in sets.items():
        row: dict[str, Any] = {"table": "days", "data": data, "drift": name}
        row |= {"coverage": float(one.covers(labels).double().mean())}
        row |= {"size": float(one.size.double().mean()), "images": len(labels), "level": watch.levels[0]}
        for kind, days in days_to_alarm(watch, seen["none"], seen[name]).items():
            after = days[days > 0]
            row[kind] = {
                "false_before_drift": int((days == 0).sum()),
                "found": int(np.isfinite(after).sum()),
                "days_50": _day(after, 0.5),
                "days_90": _day(after, 0.9),
            }
        print(row, flush=True)
        yield row


def _day(days: ndarray, share: float) -> float | None:
    day = np.quantile(days, share, method="higher") if len(days) else np.inf
    return float(day) if np.isfinite(day) else None


def attacked(predictor: keepcover.Predictor, pair: Any, times: tuple[int, ...], **options: Any) -> dict[str, Any]:
    """Sets of inputs that an attack on the predictor's own rule has moved by multiples of epsilon."""
    epsilon = predictor.guarantee.epsilon
    asked: dict[str, Any] = {"attacks": ("margin",), "seed": SEED, "progress": False, **options}
    report = keepcover.audit(predictor, pair, radii=[one * epsilon for one in times], **asked)
    found = {radius: sets for (_, attack, radius), sets in report.sets.items() if attack == "margin"}
    return {f"attack, {one:g} epsilon": found[one * epsilon] for one in times}


def on_digits() -> Iterator[dict[str, Any]]:
    train, _, calibration, test = example_split(SEED)
    smoother = keepcover.Smoother(example_model(train, SEED), SIGMA, progress=False)
    predictor = keepcover.calibrate(smoother, calibration.pair, alpha=ALPHA, epsilon=0.25, draws=16, seed=SEED)
    sets = {name: predictor.predict(drift(test.images), seed=SEED) for name, drift in DRIFTS.items()}
    sets |= attacked(predictor, test.pair, (1, 2, 4))
    yield from rows("digits", keepcover.monitor(predictor), sets, test.labels)


def on_cifar(images: str, logits: str, weights: str, tested: int = 150, draws: int = 4) -> Iterator[dict[str, Any]]:
    data, outputs = load_data(images), load_file(logits)["logits"][:, :draws].float()
    order = torch.randperm(len(outputs), generator=torch.Generator().manual_seed(SEED))
    test, calibration = order[:tested], order[tested:]
    made = keepcover.calibrate_outputs(
        outputs[calibration], data.labels[calibration], alpha=ALPHA, epsilon=0.125, sigma=0.25, draws=draws, seed=SEED
    )
    predictor = made.with_model(load_model("cifar-resnet110", weights))
    predictor.running.progress = False
    wanted = ("none", "noise 0.1", "noise 0.2", "contrast x 0.5", "brightness + 0.2", "blur 3 x 3")
    sets = {name: predictor.predict(DRIFTS[name](data.images[test]), seed=SEED) for name in wanted}
    sets |= attacked(predictor, (data.images[test], data.labels[test]), (1, 4), steps=6, draws=2)
    yield from rows("CIFAR-10", keepcover.monitor(predictor), sets, data.labels[test])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cifar")
    parser.add_argument("--logits")
    parser.add_argument("--weights")
    parser.add_argument("--out", type=Path, default=Path("results/monitor.json"))
    given, begin = parser.parse_args(), time.perf_counter()
    found = [*false_alarms.rows(), *on_digits()]
    if given.cifar:
        found += on_cifar(given.cifar, given.logits, given.weights)
    named = {name: Path(value).name for name in ("cifar", "logits", "weights") if (value := getattr(given, name))}
    config = {"alpha": ALPHA, "quiet days": QUIET, "days": DAYS, "per day": PER_DAY, "streams": STREAMS, "seed": SEED}
    about = manifest(command_of("python -m benchmarks.monitor", named), config, time.perf_counter() - begin)
    write_results(given.out, found, about)


if __name__ == "__main__":
    main()
