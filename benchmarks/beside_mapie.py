"""Plain split conformal prediction from stored probabilities, beside MAPIE.

Timed on both sides: from probabilities of calibration and test points in memory to the boolean sets of the test points.
MAPIE is given a stand-in classifier that hands out the stored probabilities, so no model runs there; it also validates its
inputs and returns point predictions. Two ways of keepcover, which validate theirs as well: ``split_conformal``, made for
stored probabilities, and the whole way through ``calibrate`` and ``predict``, which is made for networks under noise and
checks images, range and logits on the way.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.material import ALPHA
from benchmarks.timing import Options, SkippedError, beside, goal, in_turn
from keepcover import Smoother, calibrate, conformal_quantile, split_conformal


def split_sets(calibration: Tensor, labels: Tensor, test: Tensor) -> Tensor:
    """From probabilities to sets, as they are."""
    return split_conformal((calibration, labels), test, alpha=ALPHA).mask


def predictor_sets(calibration: Tensor, labels: Tensor, test: Tensor) -> Tensor:
    """The same through the interface for networks; the "network" is the logarithm."""
    engine = Smoother(torch.log, 0.0, progress=False)
    predictor = calibrate(engine, (calibration, labels), epsilon=0.0, alpha=ALPHA, method="cp", draws=1)
    return predictor.predict(test).mask


def mapie_sets(calibration: np.ndarray, labels: np.ndarray, test: np.ndarray) -> np.ndarray:
    """MAPIE's least ambiguous classifier, which has the same score."""
    try:
        from mapie.classification import SplitConformalClassifier
        from sklearn.base import BaseEstimator, ClassifierMixin
    except ImportError:
        raise SkippedError("needs MAPIE: pip install '.[bench]'") from None

    class StandIn(ClassifierMixin, BaseEstimator):
        """Its input already holds the probabilities."""

        def __init__(self) -> None:
            self.classes_ = np.arange(test.shape[1])

        def fit(self, *_: Any) -> StandIn:
            return self

        def predict_proba(self, probabilities: np.ndarray) -> np.ndarray:
            return probabilities

        def predict(self, probabilities: np.ndarray) -> np.ndarray:
            return probabilities.argmax(axis=1)

    classifier = SplitConformalClassifier(StandIn(), confidence_level=1 - ALPHA, conformity_score="lac", prefit=True)
    return classifier.conformalize(calibration, labels).predict_set(test)[1][:, :, 0]


def probabilities_like_a_network(n: int, classes: int) -> tuple[Tensor, Tensor]:
    """Softmax outputs [n, classes] and labels."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(classes, (n,), generator=generator)
    labels[:classes] = torch.arange(min(n, classes))  # every class is there: MAPIE warns otherwise
    logits = torch.randn(n, classes, generator=generator)
    logits[torch.arange(n), labels] += 4 + 2 * torch.randn(n, generator=generator)
    return logits.softmax(dim=1), labels


def measure(options: Options) -> dict[str, Any]:
    n, classes = options.pick((400, 20), (20_000, 1000))
    probabilities, labels = probabilities_like_a_network(n, classes)
    (calibration, test), known = probabilities.split(n // 2), labels[: n // 2]
    arrays = calibration.numpy(), known.numpy(), test.numpy()
    theirs = torch.from_numpy(mapie_sets(*arrays))
    # MAPIE rounds 1 - p to float32 and allows 1e-8: labels that close to the threshold may fall on either side.
    threshold = -conformal_quantile(-calibration[torch.arange(len(known)), known], ALPHA)
    clear = (test - threshold).abs() > 1e-7
    different = {
        name: int(((sets(calibration, known, test) != theirs) & clear).sum())
        for name, sets in (("split", split_sets), ("predictor", predictor_sets))
    }
    times = in_turn(
        {
            "split": lambda: split_sets(calibration, known, test),
            "predictor": lambda: predictor_sets(calibration, known, test),
            "mapie": lambda: mapie_sets(*arrays),
        },
        options.repeats,
        warm_up=2,
    )
    from mapie import __version__

    name, sizes = f"MAPIE {__version__}", {"calibration": n // 2, "test": n - n // 2, "classes": classes}
    rows = [
        beside(f"split CP, {what}", times[key], name, times["mapie"], sizes, labels_decided_otherwise=different[key])
        for key, what in (("split", "split_conformal"), ("predictor", "calibrate and predict"))
    ]
    return {"rows": rows if options.quick else [goal(row, at_most=1) for row in rows]}
