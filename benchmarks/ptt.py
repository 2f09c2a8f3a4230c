"""What the post-training transformation adds to smoothing. The paper says about ten per cent."""

from __future__ import annotations

from typing import Any

from benchmarks.material import HOLDOUT, FourScores, cifar10, logits_like_a_network, network, smoother
from benchmarks.timing import Options, beside, in_turn
from holdfast.noise import Stream


def measure(options: Options) -> dict[str, Any]:
    images, draws, batch = options.pick((8, 8, 32), (64, 16, 256), (2048, 64, 16384))
    model, stream = network(options), Stream(0, "test")
    engine = smoother(model, options, batch)
    data, _, _ = cifar10(options, images)
    holdout, labels = (part.to(options.device) for part in logits_like_a_network(HOLDOUT, 1, 10))
    plain, with_ptt = (FourScores.fitted(holdout, labels, stream, ptt) for ptt in (False, True))
    times = in_turn(
        {
            "plain": lambda: engine.reduce(data, draws, stream, plain),
            "ptt": lambda: engine.reduce(data, draws, stream, with_ptt),
        },
        options.repeats,
        options.device,
    )
    sizes = {"images": images, "draws": draws, "classes": 10, "holdout": HOLDOUT, "depth": options.pick(8, 20, 110)}
    name, other = "HPS and APS, plain and after PTT", "HPS and APS, plain"
    return {"rows": [beside(name, times["ptt"], other, times["plain"], sizes, paper="about 1.1")]}
