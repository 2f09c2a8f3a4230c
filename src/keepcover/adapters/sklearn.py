"""Robust prediction sets as a scikit-learn estimator."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from keepcover.adapters.proba import ProbabilityClassifier
from keepcover.adapters.state import state_digest
from keepcover.engine.smoother import Smoother
from keepcover.errors import InputError, install
from keepcover.methods import Method
from keepcover.prediction import calibrate
from keepcover.tasks import Classification

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, MetaEstimatorMixin, clone
    from sklearn.frozen import FrozenEstimator
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import Pipeline
    from sklearn.utils import check_random_state, get_tags
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError:
    raise InputError(f"this adapter needs scikit-learn 1.6 or newer: {install('sklearn')}") from None


# float64 stays as it is: noise must be added before anything is rounded, or an attack can hide in the rounding.
_FLOATS = [np.float64, np.float32]


class RobustSetClassifier(ClassifierMixin, MetaEstimatorMixin, BaseEstimator):
    """Any classifier with ``predict_proba``, and sets that keep their coverage when the features are attacked.

    ``fit`` splits the data at random: one part trains the estimator on noisy copies, the other calibrates. ``predict`` and
    ``predict_proba`` are the estimator's own, and promise nothing; ``predict_set`` returns the certified sets.

    **Labels** are those of the training part. A calibration row of another label counts as missed by every set, so the
    promise includes queries of labels that the estimator never met; where these are too many for it, ``fit`` refuses.

    **Pipelines.** Put steps that learn from rows inside: ``RobustSetClassifier(make_pipeline(SelectKBest(), ...))``. A step
    before this estimator in a pipeline is fitted on the calibration rows too, and the promise does not hold for what it
    learnt from them; see :func:`predict_set`.

    **Units.** ``epsilon`` and ``sigma`` are in the units of the features, as one L2 length over all of them. Bring features
    to one scale before they come here: a scaler inside ``estimator`` comes after the attack, and changes no unit.

    Args:
        estimator: a classifier with ``predict_proba``; logistic regression by default. A fitted one is kept as it is when
            wrapped in ``sklearn.frozen.FrozenEstimator``: then all data given to ``fit`` calibrate, and it must not have
            been trained on them.
        alpha, epsilon, sigma, draws, calibration_draws, method: see :func:`keepcover.calibrate`; one level each.
        nonconformity: the score (``score`` is a method of every classifier here): ``hps``, ``aps``, ``raps`` or your own.
        calibration_size: share of the rows that calibrate.
        holdout: rows among them set aside for tuning; by default a tenth, at most 500.
        copies: noisy copies of every training row; 0 trains on the rows as they are, and then noise usually ruins the
            estimator.
        random_state: makes ``fit`` reproducible. Sets are always drawn with fresh noise, whatever this is.

    Attributes:
        classes_: the labels the estimator was trained on, in the order of the columns of every output.
        estimator_: the fitted classifier.
        classifier_: it as images -> logits, for :func:`keepcover.load`.
        predictor_: the calibrated :class:`keepcover.Predictor`, with ``save``.
        guarantee_: its promise.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> X, y = load_iris(return_X_y=True)
        >>> sets = RobustSetClassifier(alpha=0.2, epsilon=0.1, sigma=0.2, random_state=0).fit(X, y)
        >>> sets.predict_set(X[:2]).shape
        (2, 3)
        >>> print(sets.guarantee_)
        With probability at least 80 %, the set contains the true label of a query even if ...
    """

    def __init__(
        self,
        estimator: Any = None,
        *,
        alpha: float = 0.1,
        epsilon: float = 0.125,
        sigma: float = 0.25,
        draws: int = 16,
        calibration_draws: int | None = None,
        method: str | Method = "auto",
        nonconformity: Any = "hps",
        calibration_size: float = 0.5,
        holdout: int | None = None,
        copies: int = 8,
        random_state: Any = None,
    ) -> None:
        self.estimator = estimator
        self.alpha = alpha
        self.epsilon = epsilon
        self.sigma = sigma
        self.draws = draws
        self.calibration_draws = calibration_draws
        self.method = method
        self.nonconformity = nonconformity
        self.calibration_size = calibration_size
        self.holdout = holdout
        self.copies = copies
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> RobustSetClassifier:
        """Train on one random part of the rows under noise, calibrate on the other."""
        X, y = validate_data(self, X, y, dtype=_FLOATS, ensure_min_samples=2)
        check_classification_targets(y)
        random = check_random_state(self.random_state)
        estimator = LogisticRegression(max_iter=1000) if self.estimator is None else self.estimator
        if not hasattr(estimator, "predict_proba"):
            raise InputError(
                f"expected an estimator with predict_proba, got {type(estimator).__name__}; wrap it in CalibratedClassifierCV"
            )
        order = random.permutation(len(X))  # at random, not stratified: calibration points must be like any other
        if isinstance(estimator, FrozenEstimator):
            self.estimator_, train = estimator, 0
        else:
            train = self._train_size(len(X))
            rows = order[:train]
            if len(np.unique(y[rows])) < 2:
                raise InputError(f"expected at least 2 classes in the training part, it has 1 class: {y[rows][0]!r}")
            self.estimator_ = self._seeded(clone(estimator), random).fit(*self._noisy(X[rows], y[rows], random))
        self.classes_ = np.asarray(self.estimator_.classes_)
        points = order[train:]
        self.classifier_ = ProbabilityClassifier(self.estimator_.predict_proba, state_digest(self.estimator_))
        known = {label: column for column, label in enumerate(self.classes_.tolist())}
        labels = torch.tensor([known.get(label, -1) for label in y[points].tolist()])
        holdout = max(1, min(500, len(points) // 10)) if self.holdout is None else self.holdout
        names = tuple(str(label) for label in self.classes_)
        self.predictor_ = calibrate(
            Smoother(self.classifier_, self.sigma, progress=False),
            (torch.from_numpy(X[points]), labels),
            alpha=self.alpha,
            epsilon=self.epsilon,
            draws=self.draws,
            calibration_draws=self.calibration_draws,
            method=self.method,
            task=Classification(self.nonconformity, names, open_labels=True),
            holdout=holdout,
            seed=None if self.random_state is None else int(random.randint(2**31)),
        )
        self.guarantee_ = self.predictor_.guarantee
        return self

    def _train_size(self, n: int) -> int:
        if not 0 < self.calibration_size < 1:
            raise InputError(f"expected calibration_size between 0 and 1, got {self.calibration_size}")
        return min(max(1, n - round(n * self.calibration_size)), n - 1)

    def _seeded(self, estimator: Any, random: np.random.RandomState) -> Any:
        """One random_state decides everything: the estimator's own too, where it was left open."""
        if self.random_state is not None:
            names = [k for k in sorted(estimator.get_params()) if k == "random_state" or k.endswith("__random_state")]
            open_ = [name for name in names if estimator.get_params()[name] is None]
            estimator.set_params(**{name: int(random.randint(2**31 - 1)) for name in open_})
        return estimator

    def _noisy(self, X: np.ndarray, y: np.ndarray, random: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
        if self.copies < 0:
            raise InputError(f"expected copies >= 0, got {self.copies}")
        if self.copies == 0 or self.sigma == 0:
            return X, y
        repeated = np.repeat(X, self.copies, axis=0)
        noise = self.sigma * random.standard_normal(repeated.shape)
        return (repeated + noise).astype(X.dtype), np.repeat(y, self.copies)

    def _inputs(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        inputs: Any = validate_data(self, X, dtype=_FLOATS, reset=False)
        return inputs

    def predict(self, X: Any) -> np.ndarray:
        """The estimator's label, without noise and without a promise."""
        inputs = self._inputs(X)
        return self.estimator_.predict(inputs)

    def predict_proba(self, X: Any) -> np.ndarray:
        """The estimator's probabilities, one column per class."""
        inputs = self._inputs(X)
        return self.estimator_.predict_proba(inputs)

    def predict_set(self, X: Any, *, seed: int | None = None) -> np.ndarray:
        """The certified sets as booleans [n, classes]; ``seed`` is for experiments, it makes the noise guessable."""
        inputs = self._inputs(X)
        return self.predictor_.predict(torch.from_numpy(inputs), seed=seed).mask.numpy()

    def predict_set_labels(self, X: Any, *, seed: int | None = None) -> list[np.ndarray]:
        """The certified sets as arrays of labels."""
        return [self.classes_[row] for row in self.predict_set(X, seed=seed)]


def predict_set(pipeline: Any, X: Any, *, seed: int | None = None) -> np.ndarray:
    """The certified sets of a pipeline that ends in a :class:`RobustSetClassifier`, as booleans [n, classes].

    Refuses a pipeline whose earlier steps learnt from the rows that calibrated: selecting features on them can lower a
    promised 0.9 to 0.8. Steps may learn nothing (``FunctionTransformer``, ``Normalizer``), or come fitted on other
    data, wrapped in ``sklearn.frozen.FrozenEstimator``. epsilon and sigma are in the units of what the last step gets, so a
    step that stretches distances stretches the attack with them.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> from sklearn.pipeline import make_pipeline
        >>> from sklearn.preprocessing import FunctionTransformer, StandardScaler
        >>> X, y = load_iris(return_X_y=True)
        >>> sets = RobustSetClassifier(alpha=0.2, epsilon=0.1, sigma=0.2, random_state=0)
        >>> predict_set(make_pipeline(FunctionTransformer(), sets).fit(X, y), X[:2]).shape
        (2, 3)
        >>> predict_set(make_pipeline(StandardScaler(), sets).fit(X, y), X[:2])
        Traceback (most recent call last):
        ...
        keepcover.errors.InputError: the step 'standardscaler' was fitted on the rows that calibrate, ...
    """
    last: Any = pipeline[-1] if isinstance(pipeline, Pipeline) else None
    if not isinstance(last, RobustSetClassifier):
        raise InputError("expected a scikit-learn Pipeline whose last step is a RobustSetClassifier")
    for name, step in pipeline.steps[:-1]:
        learns = step not in (None, "passthrough") and not isinstance(step, FrozenEstimator)
        if learns and get_tags(step).requires_fit:
            raise InputError(
                f"the step {name!r} was fitted on the rows that calibrate, so the promise does not hold behind it. Put it "
                "inside, RobustSetClassifier(make_pipeline(step, classifier)), or fit it on other rows and wrap it in "
                "FrozenEstimator"
            )
    return last.predict_set(pipeline[:-1].transform(X) if len(pipeline) > 1 else X, seed=seed)
