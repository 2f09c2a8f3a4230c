"""What stopping early saves: an image is drawn only until every label is decided, and the sets stay the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.material import ALPHA, EPSILON, SIGMA, cifar10, network, smoother
from benchmarks.timing import Options, Row, SkippedError, beside, in_turn
from keepcover import Predictor, Smoother, calibrate
from keepcover.errors import InputError
from keepcover.models import SmallCNN
from keepcover.training.base import fit_under_noise

Parts = tuple[tuple[Tensor, Tensor], Tensor]


def _digits(options: Options) -> tuple[nn.Module, Parts, str]:
    """A small network trained under noise, for machines without CIFAR-10 or a GPU."""
    from keepcover.data import digits

    try:
        data = digits()
    except InputError as reason:
        raise SkippedError(f"needs labelled images that a network can classify: --data, or {reason}") from None
    train, known, test = data.split(900, 600, -1)
    torch.manual_seed(0)
    model = fit_under_noise(
        SmallCNN(width=options.pick(16, 64)), *train.pair, sigma=SIGMA, epochs=options.pick(8, 30), progress=False
    )
    return model.to(options.device), (known.pair, test.images), "digits"


def _cifar(options: Options) -> tuple[nn.Module, Parts, str]:
    images, labels, source = cifar10(options, 8192)
    return network(options), ((images[:4096], labels[:4096]), images[4096:]), source


def _rows(predictor: Predictor, test: Tensor, draws: int, options: Options, source: str) -> list[Row]:
    full, early = (predictor.predict(test, seed=1, early_exit=early) for early in (False, True))
    used = early.draws_used
    assert used is not None
    times = in_turn(
        {
            "early": lambda: predictor.predict(test, seed=1, early_exit=True),
            "full": lambda: predictor.predict(test, seed=1),
        },
        options.repeats,
        options.device,
    )
    sizes = {"images": len(test), "draws": draws, "data": source, "rule": predictor.rule.name}
    more = {
        "mean_draws": float(used.double().mean()),
        "share_of_draws": float(used.double().mean()) / draws,
        "labels_decided_otherwise": int((full.mask != early.mask).sum()),
    }
    return [beside(f"early exit, {draws} draws", times["early"], "all draws", times["full"], sizes, **more)]


def measure(options: Options) -> dict[str, Any]:
    model, (known, test), source = (_cifar if options.gpu and options.data is not None else _digits)(options)
    rows: list[Row] = []
    for draws in options.pick((8,), (16, 64)):
        engine = Smoother(model, SIGMA, progress=False) if source == "digits" else smoother(model, options, 16384)
        predictor = calibrate(engine, known, epsilon=EPSILON, alpha=ALPHA, method="exact", draws=draws, seed=0)
        rows += _rows(predictor, test, draws, options, source)
    return {"rows": rows}
