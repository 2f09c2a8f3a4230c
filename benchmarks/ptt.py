"""What the post-training transformation adds to smoothing. The paper says about ten per cent."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.material import HOLDOUT, FourScores, cifar10, logits_like_a_network, network, smoother
from benchmarks.timing import Options, Work, beside, in_turn
from keepcover.noise import Stream


def measure(options: Options) -> dict[str, Any]:
    images, draws, batch = options.pick((8, 8, 32), (64, 16, 256), (2048, 64, 16384))
    model, stream = network(options), Stream(0, "test")
    engine = smoother(model, options, batch)
    data, _, _ = cifar10(options, images)
    holdout, labels = (part.to(options.device) for part in logits_like_a_network(HOLDOUT, 1, 10))
    plain, with_ptt = (FourScores.fitted(holdout, labels, stream, ptt) for ptt in (False, True))
    logits = logits_like_a_network(batch // draws, draws, 10)[0].to(options.device)
    u = stream.uniform(torch.arange(len(logits), device=options.device), "aps")
    sides: dict[str, Work] = {}
    for name, scores in (("plain", plain), ("ptt", with_ptt)):
        sides[name] = lambda scores=scores: engine.reduce(data, draws, stream, scores)
        sides[f"{name}, alone"] = lambda scores=scores: scores.of(logits, u)
    times = in_turn(sides, options.repeats, options.device)
    sizes = {"images": images, "draws": draws, "classes": 10, "holdout": HOLDOUT, "depth": options.pick(8, 20, 110)}
    name, other = "HPS and APS, plain and after PTT", "HPS and APS, plain"
    whole = beside(f"smoothing, {name}", times["ptt"], other, times["plain"], sizes, paper="about 1.1")
    sizes = {**sizes, "images": len(logits)}
    alone = beside(f"without the network, {name}", times["ptt, alone"], other, times["plain, alone"], sizes)
    return {"rows": [whole, alone]}
