"""Plain split conformal prediction from numbers that are already there: no network runs and no noise is drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from keepcover.engine.inputs import check_probabilities, check_table
from keepcover.errors import InputError
from keepcover.methods import SplitCP
from keepcover.noise import Gaussian, Stream, fresh_seed
from keepcover.prediction.collecting import Collected
from keepcover.prediction.concluding import conclude
from keepcover.prediction.question import Question, levels_of
from keepcover.scores import HPS, CustomScore, Score, as_logits, get_score
from keepcover.tasks import Classification, PredictionSets


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
        With probability at least 90 %, the set contains the true label of a query that is not attacked (method cp, 19 calibration points); under attack cp promises nothing.

        Logits enter as probabilities, or as scores that do not saturate:

        >>> from keepcover.scores import log_odds
        >>> logits, more = torch.randn(99, 10), torch.randn(5, 10)
        >>> known = logits.argmax(dim=1)
        >>> len(keepcover.split_conformal((log_odds(logits), known), log_odds(more), score=None))
        5
    """
    if not (isinstance(calibration, tuple | list) and len(calibration) == 2):
        raise InputError("expected calibration points as (probabilities, labels), or (scores, labels) with score=None")
    asked = None if score is None else get_score(score)
    known, values = (_checked(part, what, asked) for part, what in ((calibration[0], "calibration"), (test, "test")))
    if values.shape[1] != known.shape[1] or values.dtype != known.dtype:
        what = "expected calibration and test points with the same classes in the same precision"
        found = f"{known.shape[1]} of {known.dtype} and {values.shape[1]} of {values.dtype}"
        raise InputError(f"{what}, got {found}; rounding one of them would move its ties")
    given: Score
    if asked is None:
        given = CustomScore(lambda scores: scores, "given")
    elif type(asked) is HPS:
        given = CustomScore(torch.neg, "hps")  # the order of 1 - p, and nothing is rounded
    else:
        known, values, given = as_logits(known), as_logits(values), asked
    levels = levels_of(alpha, 0.0)
    if len(levels) != 1:
        raise InputError(f"expected one number for alpha, got {alpha!r}")
    seed = fresh_seed() if seed is None else seed
    task = Classification(given, None if class_names is None else tuple(class_names)).seen(known[:, None])
    question = Question(task, SplitCP(), levels)
    question.check(Gaussian(0.0), len(known), None)
    stream, truth = Stream(seed, "calibration"), task.check_truth(calibration[1], len(known)).to(known.device)
    items = task.items(known[:, None], truth, question.reading, task.uniform(stream, _positions(known)))
    made = conclude(question, Collected(None, items, task), Gaussian(0.0), None)
    (inside,) = made.decide(values[:, None], _positions(values), Stream(seed, "test")).values()
    return task.sets(inside, made.guarantee)


def _positions(values: Tensor) -> Tensor:
    return torch.arange(len(values), device=values.device)


def _checked(values: Any, what: str, score: Score | None) -> Tensor:
    """Stored numbers as a tensor [n, K], or an error that says what is wrong with them."""
    if score is not None:
        return check_probabilities(values, f"{what} probabilities")
    scores = check_table(values, f"{what} scores")
    if scores.isnan().any():
        raise InputError(f"{what} scores contain NaN; a NaN has no rank, so no guarantee can be given")
    return scores
