"""Plain split conformal prediction from numbers that are already there: no network runs and no noise is drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from keepcover.engine.inputs import check_probabilities, check_table, extremes
from keepcover.errors import InputError
from keepcover.guarantee import warn_of_coverage
from keepcover.methods import Setting, SplitCP
from keepcover.noise.stream import Stream, fresh_seed
from keepcover.prediction.predictor import noisy_scores, score_uniform
from keepcover.scores.draws import Draws, joined, pieces
from keepcover.scores.scores import HPS, Score, as_logits, get_score
from keepcover.tasks.metrics import check_labels
from keepcover.tasks.sets import PredictionSets


def split_conformal(
    calibration: Any,
    test: Any,
    *,
    alpha: float = 0.1,
    score: str | Score | Callable[..., Tensor] | None = "hps",
    class_names: Sequence[str] | None = None,
    seed: int | None = None,
) -> PredictionSets:
    """Prediction sets from probabilities, or from scores of your own, that any model has given.

    The sets of :func:`keepcover.calibrate` and ``predict`` with ``method="cp"`` and no noise. They contain the true label of
    an exchangeable point with probability at least 1 - alpha; under attack they promise nothing.

    Args:
        calibration: ``(probabilities, labels)`` of points that the model has not been trained on: tensors or arrays [n, K],
            rows that sum to one, and [n].
        test: probabilities [m, K] of the points to predict, in the same precision.
        alpha: miscoverage.
        score: ``hps``, ``aps``, ``raps``, a :class:`Score` or a function of logits, which are the logarithms here; or
            ``None`` if both arrays hold scores already, small where a label fits.
        class_names: names for reading sets.
        seed: reproducible numbers for a randomised score, for experiments; fresh operating-system entropy by default.

    Example:
        >>> import keepcover
        >>> probabilities = torch.tensor([0.7, 0.2, 0.1]).repeat(19, 1)
        >>> labels = torch.tensor([0] * 15 + [1] * 4)
        >>> new = torch.tensor([[0.9, 0.05, 0.05], [0.5, 0.3, 0.2]])
        >>> sets = keepcover.split_conformal((probabilities, labels), new, class_names=["cat", "dog", "fox"])
        >>> list(sets)
        [['cat'], ['cat', 'dog', 'fox']]
        >>> print(sets.guarantee)
        With probability at least 90 %, the set contains the true label of a query that nobody has attacked (method cp, 19 calibration points); under attack cp promises nothing.

        Logits enter as probabilities, or as scores that do not saturate:

        >>> from keepcover.scores.scores import log_odds
        >>> logits, more = torch.randn(99, 10), torch.randn(5, 10)
        >>> known = logits.argmax(dim=1)
        >>> len(keepcover.split_conformal((log_odds(logits), known), log_odds(more), score=None))
        5
    """
    function = None if score is None else get_score(score)
    if not (isinstance(calibration, tuple | list) and len(calibration) == 2):
        raise InputError("expected calibration points as (probabilities, labels), or (scores, labels) with score=None")
    known = _checked(calibration[0], "calibration", function)
    n, classes = known.shape
    labels = _labels(calibration[1], n, classes).to(known.device)
    warn_of_coverage(_level(alpha))
    rule = SplitCP(Setting(_level(alpha), 0.0, 0.0, 1, n, classes))
    guarantee = rule.guarantee("given" if function is None else function.name)
    values = _checked(test, "test", function)
    if values.shape[1] != classes or values.dtype != known.dtype:
        raise InputError(
            f"expected calibration and test points with the same classes in the same precision, got {classes} of "
            f"{known.dtype} and {values.shape[1]} of {values.dtype}; rounding one of them would move its ties"
        )
    if class_names is not None and len(class_names) != classes:
        raise InputError(f"expected {classes} class names, one per column, got {len(class_names)}")
    seed = fresh_seed() if seed is None else seed

    u = _uniform(function, Stream(seed, "calibration"), known)
    own = [_draws(function, known[part], u[part]).of_label(labels[part]).values for part in pieces(known)]
    threshold = rule.threshold(rule.calibration_statistic(Draws(joined(own))))
    u = _uniform(function, Stream(seed, "test"), values)
    mask = torch.empty_like(values, dtype=torch.bool)
    for part in pieces(values):
        mask[part] = rule.decide(_draws(function, values[part], u[part]), threshold)
    return PredictionSets(mask, guarantee, None if class_names is None else tuple(class_names))


def _level(alpha: Any) -> float:
    try:
        return float(str(alpha))  # a float32 0.1 is meant as 1/10 by whoever typed it
    except ValueError:
        raise InputError(f"expected one number for alpha, 0.1 promises 90 % coverage, got {alpha!r}") from None


def _labels(values: Any, n: int, classes: int) -> Tensor:
    try:
        labels = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"expected labels as columns 0 to {classes - 1}, a tensor or array of integers") from None
    return check_labels(labels, n, classes)


def _checked(values: Any, what: str, score: Score | None) -> Tensor:
    """Stored numbers as a tensor [n, K], or an error that says what is wrong with them."""
    if score is not None:
        return check_probabilities(values, f"{what} probabilities")
    scores = check_table(values, f"{what} scores")
    if math.isnan(extremes(scores)[0]):
        raise InputError(f"{what} scores contain NaN; a NaN has no rank, so no guarantee can be given")
    return scores


def _uniform(score: Score | None, stream: Stream, values: Tensor) -> Tensor:
    ids = torch.arange(len(values), device=values.device)
    return torch.zeros_like(ids) if score is None else score_uniform(score, stream, ids)


def _draws(score: Score | None, values: Tensor, u: Tensor) -> Draws:
    """The scores of every label [n, K, 1], or what has their order."""
    if score is None:
        return Draws(values[..., None])
    if type(score) is HPS:
        return Draws(-values[..., None])  # the order of 1 - p, and nothing is rounded
    return noisy_scores(score, "order", as_logits(values)[:, None], u)
