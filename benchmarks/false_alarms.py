"""How often monitors raise a false alarm: simulated streams of promises that are kept, counted against the exact binomial law.

Each stream has a calibration of its own, so the luck of calibration is in the rate. :func:`rows` are part of
results/monitor.json; the tests run the same functions, and show that what breaks a monitor is found by them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy import ndarray
from scipy import stats

import keepcover
from keepcover import Monitor, Promise
from keepcover.monitoring.outcomes import growth, log_evidence
from keepcover.monitoring.queries import BETS, advance, reserve

STREAMS, RATE, ALPHA, N, R = 100_000, 0.01, 0.1, 400, 0.5  # R: epsilon in standard deviations of the noise
LOOKS, STEP, QUERIES = 24, 20, 120  # looks at outcomes, outcomes between two; queries, each looked at


def predictor_of(outputs: Any, method: str = "rcp1", r: float = R, **more: Any) -> keepcover.Predictor:
    """A predictor on N points whose attack is r standard deviations long."""
    sigma = 0.0 if method == "cp" else 0.25
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # random outputs have large sets
        return keepcover.calibrate_outputs(
            *outputs, method=method, alpha=ALPHA, epsilon=r * sigma, sigma=sigma, draws=1, **more
        )


def random_outputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(N, 1, 4, generator=torch.Generator().manual_seed(0)), torch.arange(N) % 4


def worst_misses(predictor: keepcover.Predictor, r: float) -> ndarray:
    """The probability of a miss in many calibrations where the attack, r sigma long, is the worst that any classifier has."""
    rule: Any = predictor.rule
    rank = rule.sure_rank(N) if r else round((1 - ALPHA) * (N + 1))
    clean = np.random.default_rng(0).beta(N + 1 - rank, rank, STREAMS)
    return stats.norm.cdf(stats.norm.ppf(clean) + r)


def alarms(miss: ndarray, watch: Monitor) -> int:
    """How many streams ever alarm, each with its own probability of a miss, over two days."""
    rng, (hit, miss_) = np.random.default_rng(1), growth([False, True], watch.levels[0])
    grown, fired = np.zeros((len(miss), 1, len(hit))), np.zeros(len(miss), dtype=bool)
    for look in range(LOOKS):
        if look == 3 * LOOKS // 4:
            grown = np.concatenate([grown, np.zeros_like(grown)], axis=1)
        misses = rng.binomial(STEP, miss)[:, None]
        grown[:, -1] += misses * miss_ + (STEP - misses) * hit
        fired |= log_evidence(np.arange(grown.shape[1]), grown) >= np.log(watch.limits["promise"])
    return int(fired.sum())


def query_values(rng: np.random.Generator) -> ndarray:
    """Exchangeable queries with many ties, ``[queries, streams]``."""
    return np.minimum(rng.geometric(0.7, (QUERIES, STREAMS)) - 1, 3)


def martingales(values: ndarray, ties: ndarray) -> ndarray:
    """Whether each of ``[streams]`` ever reaches 1 / RATE over ``[queries, streams]`` values."""
    seen, capital = np.zeros((values.shape[1], 4), np.int64), np.zeros((values.shape[1], len(BETS)))
    fired = np.zeros(values.shape[1], dtype=bool)
    for t in range(len(values)):
        advance(seen, capital, t, values[t : t + 1], ties[t : t + 1])
        fired |= capital.sum(-1) + reserve(t + 1) >= 1 / RATE
    return fired


def rows() -> Iterator[dict[str, Any]]:
    """One row per kind of stream: how many alarms, and the exact p-value of that many if the rate were the stated one."""

    def row(stream: str, kind: str, looks: int, count: int) -> dict[str, Any]:
        low, high = stats.binomtest(count, STREAMS).proportion_ci(method="exact")
        found = {"table": "false alarms", "stream": stream, "kind": kind, "streams": STREAMS, "looks": looks}
        found |= {"alarms": count, "rate": count / STREAMS, "low": float(low), "high": float(high), "stated": RATE}
        found["p_value"] = float(stats.binom.sf(count - 1, STREAMS, RATE))
        print(found, flush=True)
        return found

    outputs = random_outputs()
    certified, clean = predictor_of(outputs), predictor_of(outputs, "cp", r=0.0)
    sure = predictor_of(outputs, "cp", r=0.0, promise=Promise(delta=0.05))
    watch = keepcover.monitor(certified, false_alarm=RATE)
    yield row(
        "the worst attack within ε, marginal promise", "promise", LOOKS, alarms(worst_misses(certified, R), watch)
    )
    watch = keepcover.monitor(clean, false_alarm=RATE)
    yield row("clean, marginal promise", "promise", LOOKS, alarms(worst_misses(clean, 0.0), watch))
    watch = keepcover.monitor(sure, false_alarm=RATE)
    yield row("misses at exactly α, promise with δ", "promise", LOOKS, alarms(np.full(STREAMS, ALPHA), watch))
    rng = np.random.default_rng(0)
    values = query_values(rng)
    count = int(martingales(values, rng.random(values.shape)).sum())
    yield row("exchangeable, mostly ties", "queries", QUERIES, count)
