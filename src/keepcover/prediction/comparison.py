"""Two versions of a predictor side by side."""

from __future__ import annotations

from typing import Any

from keepcover.prediction.predictor import Predictor


def compare(one: Predictor, two: Predictor) -> dict[str, Any]:
    """What differs between two predictors, as pairs, and what is the same, by name; plain values for JSON.

    The expected size of each is that on the data it was calibrated on: the holdout at first, new points after a renewal.

    Example:
        >>> import torch, keepcover
        >>> logits, truth = torch.randn(400, 4, 3), torch.arange(400) % 3
        >>> a = keepcover.calibrate_outputs(logits[:200], truth[:200], epsilon=0.1, sigma=0.2)
        >>> found = compare(a, a.recalibrate_outputs(logits[200:], truth[200:], how="add"))
        >>> found["differences"]["calibration points"], "noise" in found["same"]
        ([180, 380], True)
    """
    known = [_facts(one), _facts(two)]
    names = dict.fromkeys([*known[0], *known[1]])
    pairs = {name: [facts.get(name) for facts in known] for name in names}
    differences = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    return {"differences": differences, "same": [name for name in names if name not in differences]}


def _facts(predictor: Predictor) -> dict[str, Any]:
    identity = predictor.identity
    facts: dict[str, Any] = {
        "task": predictor.task.config(),
        "noise": str(predictor.noise),
        "model fingerprint": None if identity is None else identity.fingerprint,
        "numerics": predictor.numerics,
        "holdout": predictor.holdout_size,
        "calibration points": predictor.items.points,
        "history": [f"{entry['how']} {entry['points']} ({entry['scores'][:12]})" for entry in predictor.history],
    }
    for (alpha, epsilon), one in predictor.levels.items():
        at = f"alpha {alpha:g}, epsilon {epsilon:g}: "
        facts[at + "promise"] = str(predictor.promised(one))
        facts[at + "rule"] = f"{one.rule.name}: {one.rule.words}"
        facts[at + "threshold"] = [float(value) for value in one.threshold.flatten()]
        facts[at + "expected size"] = one.size
    return facts
