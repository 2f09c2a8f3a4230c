"""Beside the published pipeline: our own rendering of what it does, written by us, not its code.

For every image the generator is seeded with the image's index and N noise vectors are drawn; the network runs in float32
without compilation, on 1024 noisy images at a time; logits go to the host, softmax and scores are numpy: APS by sorting
every row, ordinal ranks row by row (as scipy's ``rankdata`` took them before 1.13) and a dense diagonal matrix of the
randomisation, PTT's ranks by one bisection per element in Python; mean and Bernstein bound in float64; and after every
batch Python's garbage collector runs twice.

The lean variant is kinder than what was published: the batch that suits it best, ranks of all rows at once, no collector.
Both run in a process of their own, so that the collector goes through their objects and not through a compiler's.
"""

from __future__ import annotations

import bisect
import copy
import gc
import math
import multiprocessing
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy import ndarray
from scipy.special import expit, softmax
from torch import Tensor, nn

from benchmarks.material import (
    ALPHA,
    EPSILON,
    HOLDOUT,
    SIGMA,
    FourScores,
    cifar10,
    logits_like_a_network,
    network,
    smoother,
)
from benchmarks.timing import Options, Work, beside, goal, in_turn
from keepcover import Predictor, Smoother, calibrate
from keepcover.errors import KeepcoverWarning
from keepcover.noise import Stream

BETA = 0.001
BATCH = 1024  # noisy images
SCORES = ("APS", "HPS", "PTT-APS", "PTT-HPS")


def _ordinal(row: ndarray) -> ndarray:
    """Ranks from 0, ties by position."""
    ranks = np.empty(len(row), dtype=np.intp)
    ranks[np.argsort(row, kind="stable")] = np.arange(len(row))
    return ranks


@dataclass(frozen=True)
class Published:
    """The pipeline: a network, its noise, and the sorted holdout scores that PTT ranks by."""

    model: nn.Module
    holdout: Mapping[str, list[float]]  # of "APS" and "HPS"
    device: str = "cpu"
    lean: bool = False

    def logits(self, images: Tensor, ids: Sequence[int], draws: int) -> ndarray:
        """[images * draws, classes] on the host."""
        noisy = torch.empty(len(images), draws, *images.shape[1:], device=self.device)
        for position, index in enumerate(ids):
            torch.manual_seed(index)
            noise = torch.randn(draws, *images.shape[1:], device=self.device) * SIGMA
            noisy[position] = images[position].to(self.device) + noise
        with torch.no_grad():
            return self.model(noisy.flatten(0, 1)).float().cpu().numpy()

    def aps(self, probabilities: ndarray, u: ndarray) -> ndarray:
        """Mass down to and with every label, less u times its own."""
        descending = -np.sort(-probabilities, axis=1)
        if self.lean:
            ranks = np.argsort(np.argsort(-probabilities, axis=1, kind="stable"), axis=1)
        else:
            ranks = np.apply_along_axis(_ordinal, 1, -probabilities)
        rows = np.arange(len(probabilities))[:, None]
        down_to, last = descending.cumsum(axis=1)[rows, ranks], descending[rows, ranks]
        return down_to - np.diag(u) @ last

    def ptt(self, scores: ndarray, name: str) -> ndarray:
        """Rank among the holdout's scores, element by element, then the sigmoid."""
        known = self.holdout[name]
        rank = np.frompyfunc(lambda score: bisect.bisect_right(known, score) / len(known), 1, 1)
        return expit((np.asarray(rank(scores), dtype=float) - (1 - ALPHA)) * 400)

    def scores(self, logits: ndarray, u: ndarray, name: str) -> ndarray:
        """One score of every label for every noisy image; computed from scratch for each of the four."""
        probabilities = softmax(logits, axis=1)
        plain = name.removeprefix("PTT-")
        found = self.aps(probabilities, u) if plain == "APS" else 1 - probabilities
        return self.ptt(found, plain) if name.startswith("PTT") else found

    def statistics(self, logits: ndarray, u: ndarray, draws: int) -> dict[str, tuple[ndarray, ndarray, ndarray]]:
        """Mean, unbiased variance and Bernstein bound over draws, [images, classes] each; u is one number per image."""
        found, log = {}, math.log(2 / BETA)
        for name in SCORES:
            scores = self.scores(logits, np.repeat(u, draws), name).astype(np.float64)
            scores = scores.reshape(-1, draws, logits.shape[1])
            mean, variance = scores.mean(axis=1), scores.var(axis=1, ddof=1)
            found[name] = mean, variance, np.sqrt(2 * variance * log / draws) + 7 * log / (3 * (draws - 1))
        return found

    def run(self, images: Tensor, u: ndarray, draws: int, batch: int) -> None:
        """Every image, ``batch`` of them at a time."""
        for at in range(0, len(images), batch):
            part = images[at : at + batch]
            self.statistics(self.logits(part, range(at, at + len(part)), draws), u[at : at + batch], draws)
            self.tidy()

    def tidy(self) -> None:
        if not self.lean:
            gc.collect()
            gc.collect()


def rendered(model: nn.Module, holdout: Mapping[str, list[float]], device: str = "cpu") -> Published:
    """The pipeline around a copy of the network in torch's usual memory format."""
    return Published(copy.deepcopy(model).to(memory_format=torch.contiguous_format), holdout, device)  # type: ignore[call-overload]


def holdout_scores(ours: FourScores) -> dict[str, list[float]]:
    return {"HPS": ours.hps.reference.tolist(), "APS": ours.aps.reference.tolist()}


def largest_difference(images: int = 16, draws: int = 32, classes: int = 10) -> float:
    """Between means and variances of both, on the same logits in float64: it is the same mathematics."""
    stream, ids = Stream(0, "test"), torch.arange(images)
    holdout, labels = logits_like_a_network(HOLDOUT, 1, classes)
    ours = FourScores.fitted(holdout.double(), labels, stream)
    # Other images than the holdout: a score that ties with itself falls to one side or the other by its last bit.
    some, u = logits_like_a_network(images, draws, classes, seed=1)[0].double(), stream.uniform(ids, "aps").double()
    mine, worst = ours.of(some, u).numpy(), 0.0
    pipeline = rendered(nn.Identity(), holdout_scores(ours))
    for kind in (pipeline, replace(pipeline, lean=True)):
        # Ours adds u of a label's own mass to what lies above it, theirs takes 1 - u of it away again.
        theirs = kind.statistics(some.flatten(0, 1).numpy(), 1 - u.numpy(), draws)
        for at, name in enumerate(("HPS", "PTT-HPS", "APS", "PTT-APS")):
            worst = max(worst, *(float(np.abs(mine[:, 2 * at + part] - theirs[name][part]).max()) for part in (0, 1)))
    return worst


@dataclass(frozen=True)
class _Task:
    """What the other process works on."""

    pipeline: Published
    images: Tensor
    u: ndarray
    logits: ndarray
    draws: int

    def run(self, lean: bool, batch: int) -> None:
        replace(self.pipeline, lean=lean).run(self.images, self.u, self.draws, batch)

    def host(self, batch: int) -> None:
        """All but noise and network."""
        for at in range(0, len(self.images), batch):
            some = self.logits[at * self.draws : (at + batch) * self.draws]
            self.pipeline.statistics(some, self.u[at : at + batch], self.draws)
            self.pipeline.tidy()


_task: _Task | None = None  # of the other process


def _prepare(options: Options, holdout: Mapping[str, list[float]], draws: int, images: int) -> None:
    global _task
    pipeline, data = rendered(network(options), holdout, options.device), cifar10(options, images)[0]
    logits = pipeline.logits(data, range(images), draws)
    _task = _Task(pipeline, data, np.random.default_rng(0).random(images), logits, draws)


def _do(what: str, *arguments: Any) -> None:
    getattr(_task, what)(*arguments)


def _predictor(options: Options, engine: Smoother, draws: int, **more: Any) -> tuple[Predictor, Tensor, Tensor, str]:
    """A calibrated predictor, test images, their labels and what the images are.

    Counts are multiples of a batch: a compiled network sees one shape.
    """
    held, points, many = options.pick((16, 32, 8), (64, 128, 64), (512, 4096, 4096))
    images, labels, source = cifar10(options, held + points + many)
    if options.data is None:  # the network's own opinion: a predictor needs labels that it can predict
        with torch.inference_mode():
            said = [engine.model(part.to(options.device)).argmax(dim=1) for part in images.split(256)]
            labels = torch.cat(said).cpu()
    holdout, calibration, test = zip(*(part.split([held, points, many]) for part in (images, labels)), strict=True)
    asked: dict[str, Any] = {"epsilon": EPSILON, "alpha": ALPHA, "draws": draws, "seed": 0, **more}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KeepcoverWarning)  # untrained networks have large sets
        predictor = calibrate(engine, calibration, holdout=holdout, **asked)
    return predictor, *test, source


def _mean_sets(options: Options, engine: Smoother, predictor: Predictor, test: Tensor, truth: Tensor) -> dict[str, Any]:
    """Mean sizes of certified sets: ours, and RSCP+ with PTT on as many draws as the published pipeline uses.

    The latter from our engine, which computes the same statistics (``largest_difference``); the better of two scores.
    """
    found = predictor.predict(test, seed=1).measure(truth)
    sizes = {}
    for score in ("hps", "aps"):
        other, *_ = _predictor(options, engine, 256, method="rscp_plus_bernstein", score=score)
        sizes[score] = float(other.predict(test, seed=1).size.double().mean())
    return {"mean_set": found.size, "coverage": found.coverage.mean, "published_mean_set": min(sizes.values())}


def measure(options: Options) -> dict[str, Any]:
    draws, few, many = options.pick((16, 2, 4), (256, 4, 8), (256, 64, 1024))
    batch, depth, real = options.pick(32, 256, 16384), options.pick(8, 20, 110), options.gpu and not options.quick
    model, stream = network(options), Stream(0, "test")
    engine, data = smoother(model, options, batch), cifar10(options, many)[0]
    holdout, labels = logits_like_a_network(HOLDOUT, 1, 10)
    ours = FourScores.fitted(holdout.to(options.device), labels, stream)
    predictor, test, truth, source = _predictor(options, engine, 16, calibration_draws=options.pick(16, 16, 64))
    at_once = BATCH // draws
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, _prepare, (options, holdout_scores(ours), draws, few)) as apart:

        def theirs(what: str, *arguments: Any) -> Work:
            return lambda: apart.submit(_do, what, *arguments).result()

        tried = {size: theirs("run", True, size) for size in (1, 4, 16) if size <= few}
        quick = in_turn({str(size): work for size, work in tried.items()}, 1, options.device)
        best = min(tried, key=lambda size: quick[str(size)][0])
        sides: dict[str, Work] = {
            "ours": lambda: engine.reduce(data, draws, stream, ours),
            "set": lambda: predictor.predict(test, seed=1),
            "published": theirs("run", False, at_once),
            "lean": tried[best],
            "host": theirs("host", at_once),
        }
        times = in_turn(sides, options.pick(1, 3, 5), options.device)
    sizes = {"draws": draws, "classes": 10, "images": many, "published_images": few}
    sizes |= {"published_batch": BATCH, "batch": batch, "depth": depth}
    name, what, per = f"published pipeline, {draws} draws", f"engine, four scores, {draws} draws", {"unit": "image"}
    lean = f"published pipeline made lean, {draws} draws", times["lean"], {**sizes, "published_batch": best * draws}
    faster = {**per, "inverse": True}
    agree = {"largest_difference": largest_difference()}
    equal = beside(what, times["ours"], name, times["published"], sizes, many, few, **faster, **agree)
    kinder = beside(what, times["ours"], *lean, many, few, **faster)
    for row in (equal, kinder):
        row["noisy_images_per_second"] = draws / row["seconds"]
        row["published_noisy_images_per_second"] = draws / row["baseline_seconds"]
    rest = "published pipeline, all but noise and network"
    host = beside(rest, times["host"], name, times["published"], sizes, few, few, **per)
    sizes = {**sizes, "draws": 16, "images": len(test), "data": source}
    one = ("certified set, 16 draws", times["set"], name, times["published"], sizes)
    certified = beside(*one, len(test), few, **faster)
    if real:
        equal, certified = goal(equal, at_least=15), goal(certified, at_least=200)
        if options.data is not None:
            certified |= _mean_sets(options, engine, predictor, test, truth)
    return {"rows": [equal, kinder, host, certified]}
