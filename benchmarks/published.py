"""Beside the published pipeline: our own rendering of it, written from a description of what it does, not its code.

For every image the generator is seeded with the image's index and N noise vectors are drawn; the network runs in float32
without compilation; logits go to the host, softmax and scores are numpy: APS by sorting every row, ordinal ranks and a
dense diagonal matrix of the randomisation, PTT's ranks by one bisection per element in Python; mean and Bernstein bound
in float64.
"""

from __future__ import annotations

import bisect
import copy
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy import ndarray
from scipy.special import expit, softmax
from scipy.stats import rankdata
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
from benchmarks.timing import Options, beside, goal, in_turn, seconds
from holdfast import Predictor, Smoother, calibrate
from holdfast.errors import HoldfastWarning
from holdfast.noise import Stream

BETA = 0.001
SCORES = ("APS", "HPS", "PTT-APS", "PTT-HPS")


@dataclass(frozen=True)
class Published:
    """The pipeline: a network, its noise, and the sorted holdout scores that PTT ranks by."""

    model: nn.Module
    holdout: dict[str, list[float]]  # of "APS" and "HPS"
    device: str = "cpu"

    def logits(self, images: Tensor, ids: Sequence[int], draws: int) -> ndarray:
        """[images * draws, classes] on the host."""
        noisy = torch.empty(len(images), draws, *images.shape[1:], device=self.device)
        for position, index in enumerate(ids):
            torch.manual_seed(index)
            noise = torch.randn(draws, *images.shape[1:], device=self.device) * SIGMA
            noisy[position] = images[position].to(self.device) + noise
        with torch.no_grad():
            return self.model(noisy.flatten(0, 1)).float().cpu().numpy()

    @staticmethod
    def aps(probabilities: ndarray, u: ndarray) -> ndarray:
        """Mass down to and with every label, less u times its own."""
        descending = -np.sort(-probabilities, axis=1)
        ranks = rankdata(-probabilities, method="ordinal", axis=1).astype(int) - 1
        rows = np.arange(len(probabilities))[:, None]
        down_to, last = descending.cumsum(axis=1)[rows, ranks], descending[rows, ranks]
        return down_to - np.diag(u) @ last

    def ptt(self, scores: ndarray, name: str) -> ndarray:
        """Rank among the holdout's scores, element by element, then the sigmoid."""
        known = self.holdout[name]
        ranks = [[bisect.bisect_right(known, one) / len(known) for one in row] for row in scores]
        return expit((np.array(ranks) - (1 - ALPHA)) * 400)

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


def rendered(model: nn.Module, ours: FourScores, device: str = "cpu") -> Published:
    """The pipeline with the holdout that our statistics were fitted on, and the network in torch's usual memory format."""
    model = copy.deepcopy(model).to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    return Published(model, {"HPS": ours.hps.holdout.tolist(), "APS": ours.aps.holdout.tolist()}, device)


def largest_difference(images: int = 16, draws: int = 32, classes: int = 10) -> float:
    """Between means and variances of both, on the same logits in float64: it is the same mathematics."""
    stream, ids = Stream(0, "test"), torch.arange(images)
    holdout, labels = logits_like_a_network(HOLDOUT, 1, classes)
    ours = FourScores.fitted(holdout.double(), labels, stream)
    # Other images than the holdout: a score that ties with itself falls to one side or the other by its last bit.
    some, u = logits_like_a_network(images, draws, classes, seed=1)[0].double(), stream.uniform(ids, "aps").double()
    mine = ours.of(some, u).numpy()
    # Ours adds u of a label's own mass to what lies above it, theirs takes 1 - u of it away again.
    theirs = rendered(nn.Identity(), ours).statistics(some.flatten(0, 1).numpy(), 1 - u.numpy(), draws)
    order = ("HPS", "PTT-HPS", "APS", "PTT-APS")
    return max(float(np.abs(mine[:, 2 * at + part] - theirs[name][part]).max()) for at, name in enumerate(order) for part in (0, 1))  # fmt: skip


def _predictor(options: Options, engine: Smoother, draws: int, **more: Any) -> tuple[Predictor, Tensor, Tensor, str]:
    """A calibrated predictor, test images, their labels and what the images are.

    Counts are multiples of a batch: a compiled network sees one shape.
    """
    held, points, many = options.pick((16, 32, 8), (64, 128, 64), (512, 4096, 4096))
    images, labels, source = cifar10(options, held + points + many)
    if options.data is None:  # the network's own opinion: a predictor needs labels that it can predict
        with torch.inference_mode():
            labels = torch.cat(
                [engine.model(part.to(options.device)).argmax(dim=1).cpu() for part in images.split(256)]
            )
    (holdout, calibration, test), (held_labels, known, truth) = (part.split([held, points, many]) for part in (images, labels))  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HoldfastWarning)  # untrained networks have large sets
        predictor = calibrate(
            engine, (calibration, known), holdout=(holdout, held_labels), epsilon=EPSILON, alpha=ALPHA, draws=draws, seed=0,
            **more,
        )  # fmt: skip
    return predictor, test, truth, source


def _mean_sets(options: Options, engine: Smoother, predictor: Predictor, test: Tensor, truth: Tensor) -> dict[str, Any]:
    """Mean sizes of certified sets: ours, and RSCP+ with PTT on as many draws as the published pipeline uses.

    The latter from our engine, which computes the same statistics (``largest_difference``); the better of two scores.
    """
    found = predictor.predict(test, seed=1).evaluate(truth)
    sizes = {}
    for score in ("hps", "aps"):
        other, *_ = _predictor(options, engine, 256, method="rscp_plus_bernstein", transform="ptt", score=score)
        sizes[score] = float(other.predict(test, seed=1).size.double().mean())
    return {"mean_set": found.size, "coverage": found.coverage.mean, "published_mean_set": min(sizes.values())}


def measure(options: Options) -> dict[str, Any]:
    draws, few, many = options.pick((16, 2, 4), (256, 4, 8), (256, 64, 1024))
    batch, depth, real = options.pick(32, 256, 16384), options.pick(8, 20, 110), options.gpu and not options.quick
    model, stream = network(options), Stream(0, "test")
    engine, data = smoother(model, options, batch), cifar10(options, many)[0]
    holdout, labels = logits_like_a_network(HOLDOUT, 1, 10)
    ours = FourScores.fitted(holdout.to(options.device), labels, stream)
    pipeline, u = rendered(model, ours, options.device), np.random.default_rng(0).random(many)
    # The pipeline gets the batch that suits it best.
    pipeline.run(data[:few], u, draws, 1)
    tried = {
        size: seconds(lambda size=size: pipeline.run(data[:few], u, draws, size), options.device)
        for size in (1, 4, 16) if size <= few
    }  # fmt: skip
    best = min(tried, key=lambda size: tried[size])
    logits = pipeline.logits(data[:few], range(few), draws).reshape(few, draws, -1)

    def host() -> None:
        for at in range(0, few, best):
            pipeline.statistics(logits[at : at + best].reshape(-1, logits.shape[2]), u[at : at + best], draws)

    predictor, test, truth, source = _predictor(options, engine, 16, calibration_draws=options.pick(16, 16, 64))
    times = in_turn(
        {
            "ours": lambda: engine.reduce(data, draws, stream, ours),
            "set": lambda: predictor.predict(test, seed=1),
            "published": lambda: pipeline.run(data[:few], u, draws, best),
            "host": host,
        },
        options.pick(1, 3, 5),
        options.device,
    )
    sizes = {
        "draws": draws, "classes": 10, "images": many, "published_images": few, "published_batch": best * draws,
        "batch": batch, "depth": depth,
    }  # fmt: skip
    published, name = times["published"], f"published pipeline, {draws} draws"
    equal = beside(
        f"engine, four scores, {draws} draws", times["ours"], name, published, sizes, many, few, inverse=True, unit="image",
        largest_difference=largest_difference(),
    )  # fmt: skip
    equal |= {
        "noisy_images_per_second": draws / equal["seconds"],
        "published_noisy_images_per_second": draws / equal["baseline_seconds"],
    }
    alone = beside(
        "published pipeline, scores and bounds on the host",
        times["host"],
        name,
        published,
        sizes,
        few,
        few,
        unit="image",
    )
    certified = beside(
        "certified set, 16 draws", times["set"], name, published, {**sizes, "draws": 16, "images": len(test), "data": source},
        len(test), few, inverse=True, unit="image",
    )  # fmt: skip
    if real:
        equal, certified = goal(equal, at_least=15), goal(certified, at_least=200)
        if options.data is not None:
            certified |= _mean_sets(options, engine, predictor, test, truth)
    return {"rows": [equal, alone, certified]}
