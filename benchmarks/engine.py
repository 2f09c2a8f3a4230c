"""What smoothing, four scores and their statistics cost on top of the bare network."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from benchmarks.material import HOLDOUT, FourScores, cifar10, logits_like_a_network, network, numerics, smoother
from benchmarks.timing import Options, Row, Work, beside, goal, in_turn
from holdfast.noise import Stream
from holdfast.smoothing import timed_algorithms


def bare_forward(model: nn.Module, options: Options, rows: int, total: int) -> Work:
    """The network alone on a ready batch, as often as it takes to see ``total`` inputs; same numerics as the engine."""
    how = numerics(options)
    forward = torch.compile(model) if options.compile else model
    ready = torch.rand(rows, 3, 32, 32, device=options.device)
    if options.gpu:
        ready = ready.contiguous(memory_format=torch.channels_last)

    def work() -> None:
        cast = torch.autocast(options.kind, how["autocast"]) if how["autocast"] else contextlib.nullcontext()  # type: ignore[arg-type]
        with torch.inference_mode(), cast, timed_algorithms(options.compile):
            for _ in range(total // rows):
                forward(ready)

    return work


def _rows(options: Options, classes: int, images: int, draws: int, batch: int) -> list[Row]:
    model, stream = network(options, classes), Stream(0, "test")
    engine = smoother(model, options, batch)
    data, _, _ = cifar10(options, images)
    holdout, labels = logits_like_a_network(HOLDOUT, 1, classes)
    scores = FourScores.fitted(holdout.to(options.device), labels, stream)
    ids, per = torch.arange(images, device=options.device), batch // draws
    logits = logits_like_a_network(per, draws, classes)[0].to(options.device)
    u = stream.uniform(ids[:per], "aps")

    def noise() -> None:
        for at in range(0, images, per):
            stream.gaussian(ids[at : at + per], range(draws), (3, 32, 32))

    def statistics() -> None:
        for _ in range(0, images, per):
            scores.of(logits, u).cpu()

    sides: dict[str, Work] = {
        "bare": bare_forward(model, options, batch, images * draws),
        "engine": lambda: engine.reduce(data, draws, stream, scores),
        "noise": noise,
        "statistics": statistics,
    }
    times = in_turn(sides, options.repeats, options.device)
    sizes = {"images": images, "draws": draws, "classes": classes, "batch": batch, "depth": options.pick(8, 20, 110)}
    per_second = images * draws / (sum(times["engine"]) / len(times["engine"]))
    whole = beside(
        f"engine, four scores, {classes} classes", times["engine"], "bare forward", times["bare"], sizes,
        noisy_images_per_second=per_second,
    )  # fmt: skip
    if options.gpu and not options.quick:
        whole = goal(whole, at_most=1.05 if classes == 10 else 1.08)
    return [
        whole,
        beside(f"noise alone, {classes} classes", times["noise"], "bare forward", times["bare"], sizes),
        beside(f"scores and statistics alone, {classes} classes", times["statistics"], "bare forward", times["bare"], sizes),
    ]  # fmt: skip


def measure(options: Options) -> dict[str, Any]:
    draws, batch = options.pick(8, 16, 64), options.pick(32, 256, 16384)
    images = options.pick(8, 64, 2048)
    few = options.pick(8, 32, 2048)
    return {"rows": _rows(options, 10, images, draws, batch) + _rows(options, 1000, few, draws, batch)}
