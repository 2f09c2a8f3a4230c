"""Scores, PTT, mean and variance of stored logits on a CPU, and the splits that follow."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.material import EPSILON, HOLDOUT, SIGMA, FourScores, logits_like_a_network
from benchmarks.timing import Options, alone, beside, goal, in_turn
from keepcover.evaluation import evaluate
from keepcover.noise import Stream

CHUNK = 2**18  # logits at a time: a few of these fit into a core's cache


def reduced(logits: Tensor, scores: FourScores, u: Tensor) -> Tensor:
    """The statistics of all images, a chunk at a time."""
    step = max(1, CHUNK // (logits.shape[1] * logits.shape[2]))
    pieces = range(0, len(logits), step)
    return torch.cat([scores.of(logits[at : at + step].float(), u[at : at + step]) for at in pieces])


def measure(options: Options) -> dict[str, Any]:
    n, draws, classes, splits = options.pick((400, 16, 10, 3), (10_000, 256, 10, 50))
    logits, labels = logits_like_a_network(n, draws, classes)
    stream = Stream(0, "test")
    u = stream.uniform(torch.arange(n), "aps")
    holdout = min(HOLDOUT, n // 4)
    scores = FourScores.fitted(logits[:holdout, :1], labels[:holdout], stream)
    half, copy = logits.half(), torch.empty_like(logits)
    times = in_turn(
        {
            "copy": lambda: copy.copy_(logits),
            "float32": lambda: reduced(logits, scores, u),
            "float16": lambda: reduced(half, scores, u),
        },
        options.pick(1, 3),
    )
    sizes = {"images": n, "draws": draws, "classes": classes, "holdout": holdout}
    name = "HPS, APS, PTT of both, means and variances"
    rows = [
        beside(f"{name}, {kind} logits", times[kind], "copying the float32 logits", times["copy"], sizes)
        for kind in ("float32", "float16")
    ]

    def all_methods(score: str) -> None:
        evaluate(half, labels, sigma=SIGMA, epsilon=EPSILON, score=score, splits=splits, holdout=holdout)

    both = in_turn(
        {"hps": lambda: all_methods("hps"), "aps": lambda: all_methods("aps")}, options.pick(1, 2), warm_up=0
    )
    rows += [
        alone(f"every method, {splits} splits, {score.upper()}", times, {**sizes, "splits": splits})
        for score, times in both.items()
    ]
    if not options.quick:
        rows[0], rows[1] = (goal(row, at_most=6, of="seconds") for row in rows[:2])
        rows[2], rows[3] = (goal(row, at_most=15, of="seconds") for row in rows[2:])
    return {"rows": rows}
