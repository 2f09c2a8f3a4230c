"""The golden example, evaluated independently in float64: noisy scores of 60 images as rules read them."""

from __future__ import annotations

from typing import Any

import torch

from keepcover.scores import PTT, Draws, aps, hps, raps


def golden_draws(golden: dict[str, Any], score: str) -> Draws:
    logits = torch.tensor(golden["logits"], dtype=torch.float64)
    u = torch.tensor(golden["u"], dtype=torch.float64)[:, None]
    holdout = torch.tensor(golden["holdout"], dtype=torch.float64)
    steps = PTT(golden["ptt"]["T"]).fit(holdout, 1 - golden["ptt"]["b"])
    scores = {
        "hps": lambda: hps(logits),
        "aps": lambda: aps(logits, u),
        "raps": lambda: raps(logits, u, penalty=0.2, k_reg=1),
        "ptt_hps": lambda: steps(hps(logits)),
    }[score]()
    return Draws(scores.transpose(1, 2).contiguous())
