"""What smoothing, four scores and their statistics cost on top of the bare network."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.material import HOLDOUT, FourScores, cifar10, logits_like_a_network, network, numerics, smoother
from benchmarks.timing import Options, Row, Work, beside, goal, in_turn
from keepcover.engine.smoother import timed_algorithms
from keepcover.noise import Stream


def bare_forward(
    model: nn.Module, options: Options, rows: int, total: int, shape: tuple[int, ...] = (3, 32, 32)
) -> Work:
    """The network alone on a ready batch, as often as it takes to see ``total`` inputs; same numerics as the engine."""
    how = numerics(options)
    forward = torch.compile(model) if options.compile else model
    ready = torch.rand(rows, *shape, device=options.device)
    if options.gpu:
        ready = ready.contiguous(memory_format=torch.channels_last)

    def work() -> None:
        cast = torch.autocast(options.kind, how["autocast"]) if how["autocast"] else contextlib.nullcontext()  # type: ignore[arg-type]
        with torch.inference_mode(), cast, timed_algorithms(options.compile):
            for _ in range(total // rows):
                forward(ready)

    return work


def beside_bare(
    model: nn.Module, name: str, data: Tensor, classes: int, draws: int, batch: int, options: Options
) -> list[Row]:
    """What the engine, its noise and its statistics take beside the bare network."""
    stream, images, shape = Stream(0, "test"), len(data), tuple(data.shape[1:])
    engine = smoother(model, options, batch)
    holdout, labels = logits_like_a_network(HOLDOUT, 1, classes)
    scores = FourScores.fitted(holdout.to(options.device), labels, stream)
    ids, per = torch.arange(images, device=options.device), batch // draws
    logits = logits_like_a_network(per, draws, classes)[0].to(options.device)
    u = stream.uniform(ids[:per], "aps")

    def noise() -> None:
        for at in range(0, images, per):
            stream.gaussian(ids[at : at + per], range(draws), shape)

    def statistics() -> None:
        for _ in range(0, images, per):
            scores.of(logits, u).cpu()

    sides: dict[str, Work] = {
        "bare": bare_forward(model, options, batch, images * draws, shape),
        "engine": lambda: engine.reduce(data, draws, stream, scores),
        "noise": noise,
        "statistics": statistics,
    }
    times = in_turn(sides, options.repeats, options.device)
    sizes = {"images": images, "shape": list(shape), "draws": draws, "classes": classes, "batch": batch}
    per_second = images * draws / (sum(times["engine"]) / len(times["engine"]))

    def row(what: str, side: str, **more: Any) -> Row:
        named = (f"{what}, {name}, {classes} classes", times[side], "bare forward", times["bare"])
        return beside(*named, {**sizes, "network": name}, **more)

    whole = row("engine, four scores", "engine", noisy_images_per_second=per_second)
    alone = row("noise alone", "noise")
    if not options.quick:
        alone = goal(alone, at_most=0.01 if options.gpu else 0.05)
        # A small network with a thousand classes has more to score than to compute.
        whole = goal(whole, at_most=1.08 if shape[1] < 224 and classes > 10 else 1.05) if options.gpu else whole
    return [whole, alone, row("scores and statistics alone", "statistics")]


def measure(options: Options) -> dict[str, Any]:
    draws, batch = options.pick(8, 16, 64), options.pick(32, 256, 16384)
    depth, rows = options.pick(8, 20, 110), []
    for classes, images in ((10, options.pick(8, 64, 2048)), (1000, options.pick(8, 32, 2048))):
        data = cifar10(options, images)[0]
        rows += beside_bare(network(options, classes), f"ResNet-{depth}", data, classes, draws, batch, options)
    return {"rows": rows}
