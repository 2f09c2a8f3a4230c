"""Robust prediction sets as a scikit-learn estimator."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keepcover.adapters.proba import ProbabilityClassifier, state_digest
from keepcover.engine.smoother import Smoother
from keepcover.errors import InputError, install
from keepcover.methods import Method
from keepcover.prediction import calibrate
from keepcover.tasks import Classification

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, MetaEstimatorMixin, RegressorMixin, clone
    from sklearn.frozen import FrozenEstimator
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.pipeline import Pipeline
    from sklearn.utils import check_random_state, get_tags
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError:
    raise InputError(f"this adapter needs scikit-learn 1.6 or newer: {install('sklearn')}") from None


# float64 stays as it is: noise must be added before anything is rounded, or an attack can hide in the rounding.
_FLOATS = [np.float64, np.float32]
Random = np.random.RandomState


@dataclass(eq=False, repr=False)
class _Robust(MetaEstimatorMixin, BaseEstimator):
    """What both estimators share: a random part of the rows trains on noisy copies, the rest calibrates."""

    estimator: Any = None
    _: KW_ONLY
    alpha: float = 0.1
    epsilon: float = 0.125
    sigma: float = 0.25
    draws: int = 16
    calibration_draws: int | None = None
    method: str | Method = "auto"
    calibration_size: float = 0.5
    holdout: int | None = None
    copies: int = 8
    random_state: Any = None

    def _split(self, X: np.ndarray, random: Random, estimator: Any) -> tuple[np.ndarray, np.ndarray]:
        """Rows to train on, none where the estimator is fitted already, and rows that calibrate."""
        order = random.permutation(len(X))  # at random, not stratified: calibration points must be like any other
        if isinstance(estimator, FrozenEstimator):
            return order[:0], order
        if not 0 < self.calibration_size < 1:
            raise InputError(f"expected calibration_size between 0 and 1, got {self.calibration_size}")
        train = min(max(1, len(X) - round(len(X) * self.calibration_size)), len(X) - 1)
        return order[:train], order[train:]

    def _train(self, X: np.ndarray, y: np.ndarray, estimator: Any, random: Random, scale: Any = 1.0) -> None:
        """Set ``estimator_``: fitted to noisy copies of the rows, or as it is where there are none."""
        self.estimator_: Any = estimator
        if not len(X):
            return
        if self.copies < 0:
            raise InputError(f"expected copies >= 0, got {self.copies}")
        self.estimator_ = estimator = clone(estimator)
        if self.random_state is not None:  # it decides everything: the estimator's own too, where that was left open
            own = [name for name, value in sorted(estimator.get_params().items()) if value is None]
            seeds = [name for name in own if name.split("__")[-1] == "random_state"]
            estimator.set_params(**{name: int(random.randint(2**31 - 1)) for name in seeds})
        if self.copies and self.sigma:
            repeated = np.repeat(X, self.copies, axis=0)
            noise = self.sigma * np.asarray(scale) * random.standard_normal(repeated.shape)
            X, y = (repeated + noise).astype(X.dtype), np.repeat(y, self.copies, axis=0)
        estimator.fit(X, y)

    def _calibrate(self, model: Any, X: np.ndarray, truth: Tensor, random: Random, **options: Any) -> None:
        """Set ``predictor_`` and ``guarantee_``."""
        asked = {name: getattr(self, name) for name in ("alpha", "epsilon", "draws", "calibration_draws", "method")}
        asked["holdout"] = max(1, min(500, len(X) // 10)) if self.holdout is None else self.holdout
        asked["seed"] = None if self.random_state is None else int(random.randint(2**31))
        smoother, data = Smoother(model, self.sigma, progress=False), (torch.from_numpy(X), truth)
        self.predictor_ = calibrate(smoother, data, **asked, **options)
        self.guarantee_ = self.predictor_.guarantee

    def _inputs(self, X: Any) -> Any:
        """Call it before using what ``fit`` made: it says where the estimator is not fitted."""
        check_is_fitted(self)
        return validate_data(self, X, dtype=_FLOATS, reset=False)

    def predict(self, X: Any) -> np.ndarray:
        """What the estimator itself predicts, without noise and without a promise."""
        inputs = self._inputs(X)
        return self.estimator_.predict(inputs)

    def _sets(self, X: Any, seed: int | None) -> Any:
        inputs = self._inputs(X)
        return self.predictor_.predict(torch.from_numpy(inputs), seed=seed)


@dataclass(eq=False, repr=False, kw_only=True)
class RobustSetClassifier(ClassifierMixin, _Robust):
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

    nonconformity: Any = "hps"

    def fit(self, X: Any, y: Any) -> RobustSetClassifier:
        """Train on one random part of the rows under noise, calibrate on the other."""
        X, y = validate_data(self, X, y, dtype=_FLOATS, ensure_min_samples=2)
        check_classification_targets(y)
        random = check_random_state(self.random_state)
        estimator = LogisticRegression(max_iter=1000) if self.estimator is None else self.estimator
        if not hasattr(estimator, "predict_proba"):
            found = f"{type(estimator).__name__}; wrap it in CalibratedClassifierCV"
            raise InputError(f"expected an estimator with predict_proba, got {found}")
        rows, points = self._split(X, random, estimator)
        if len(rows) and len(np.unique(y[rows])) < 2:
            raise InputError(f"expected at least 2 classes in the training part, it has 1 class: {y[rows][0]!r}")
        self._train(X[rows], y[rows], estimator, random)
        self.classes_ = np.asarray(self.estimator_.classes_)
        self.classifier_ = ProbabilityClassifier(self.estimator_.predict_proba, state_digest(self.estimator_))
        known = {label: column for column, label in enumerate(self.classes_.tolist())}
        labels = torch.tensor([known.get(label, -1) for label in y[points].tolist()])
        names = tuple(str(label) for label in self.classes_)
        task = Classification(self.nonconformity, names, open_labels=True)
        self._calibrate(self.classifier_, X[points], labels, random, task=task)
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """The estimator's probabilities, one column per class."""
        inputs = self._inputs(X)
        return self.estimator_.predict_proba(inputs)

    def predict_set(self, X: Any, *, seed: int | None = None) -> np.ndarray:
        """The certified sets as booleans [n, classes]; ``seed`` is for experiments, it makes the noise guessable."""
        return self._sets(X, seed).mask.numpy()

    def predict_set_labels(self, X: Any, *, seed: int | None = None) -> list[np.ndarray]:
        """The certified sets as arrays of labels."""
        return [self.classes_[row] for row in self.predict_set(X, seed=seed)]


class PointPredictor:
    """``predict`` of an estimator as the callable inputs -> numbers that keepcover runs; without gradients."""

    def __init__(self, estimator: Any) -> None:
        self.estimator, self.fingerprint = estimator, state_digest(estimator)

    def __call__(self, inputs: Tensor) -> Tensor:
        found = torch.from_numpy(np.asarray(self.estimator.predict(inputs.detach().cpu().numpy()), dtype=np.float64))
        return found.to(inputs.device)


@dataclass(eq=False, repr=False, kw_only=True)
class RobustIntervalRegressor(RegressorMixin, _Robust):
    """Any regressor, and intervals that keep their coverage when the features are attacked.

    ``fit`` splits the rows as :class:`RobustSetClassifier` does; ``predict`` is the estimator's own, and promises nothing;
    ``predict_interval`` returns the certified intervals, of the score ``residual``. Several targets are held together.

    Args:
        estimator: a regressor; ridge regression by default. A fitted one in ``sklearn.frozen.FrozenEstimator`` is kept.
        input_scale: ``"std"`` measures epsilon and sigma in standard deviations of the features, of the training rows (of the
            holdout where the estimator is frozen); or one unit per feature; None where features share their unit.
        alpha, epsilon, sigma, draws, calibration_draws, method, calibration_size, holdout, copies, random_state: as for
            :class:`RobustSetClassifier`.

    Example:
        >>> from sklearn.datasets import load_diabetes
        >>> X, y = load_diabetes(return_X_y=True)
        >>> made = RobustIntervalRegressor(alpha=0.2, epsilon=0.1, sigma=0.1, random_state=0).fit(X, y)
        >>> made.predict_interval(X[:2]).shape
        (2, 2)
    """

    input_scale: Any = "std"

    def fit(self, X: Any, y: Any) -> RobustIntervalRegressor:
        """Train on one random part of the rows under noise, calibrate on the other."""
        X, y = validate_data(self, X, y, dtype=_FLOATS, ensure_min_samples=2, y_numeric=True, multi_output=True)
        random = check_random_state(self.random_state)
        estimator = Ridge() if self.estimator is None else self.estimator
        rows, points = self._split(X, random, estimator)
        scale = self.input_scale
        if isinstance(scale, str) and scale == "std" and len(rows) > 1:
            spread = X[rows].std(axis=0, dtype=np.float64)
            scale = np.where(spread > 0, spread, 1.0)
        scale = scale if scale is None or isinstance(scale, str) else np.asarray(scale).tolist()
        self._train(X[rows], y[rows], estimator, random, scale if isinstance(scale, list) else 1.0)
        truth = torch.from_numpy(np.asarray(y[points], dtype=np.float64))
        options = {"task": "regression", "score": "residual", "input_scale": scale}
        self._calibrate(PointPredictor(self.estimator_), X[points], truth, random, **options)
        return self

    def predict_interval(self, X: Any, *, seed: int | None = None) -> np.ndarray:
        """The hull of every certified union, [n, 2], or [n, targets, 2]; NaN where it is empty. ``seed`` is for experiments."""
        return self._sets(X, seed).hull.numpy()


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
