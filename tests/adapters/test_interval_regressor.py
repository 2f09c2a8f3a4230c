"""Intervals as a scikit-learn estimator, against the best attack that there is on a linear model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from sklearn.base import clone
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LinearRegression
from sklearn.utils.estimator_checks import estimator_checks_generator

import keepcover
from keepcover.adapters.sklearn import RobustIntervalRegressor

UNITS = np.array([1000.0, 1.0, 0.001])


def data(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(n, 3))
    return z * UNITS, z @ [1.0, 2.0, -1.0] + 0.2 * rng.normal(size=n)


def attacked(made: RobustIntervalRegressor, X: np.ndarray, y: np.ndarray, epsilon: float) -> np.ndarray:
    """Moved by epsilon standard deviations to where the line is furthest from the truth."""
    scale = np.array(made.predictor_.numerics["input_scale"])
    slope = made.estimator_.coef_ * scale
    away = np.sign(made.predict(X) - y)[:, None] * slope / np.linalg.norm(slope)
    return X + epsilon * scale * away


@pytest.mark.parametrize(("method", "holds"), [("auto", True), ("cp", False)])
def test_coverage_under_the_best_attack_on_a_line(method: str, holds: bool) -> None:
    """3,000 queries of one calibration on 1,000 rows. Its luck stays within four standard deviations, 0.04; beyond that, the
    binomial law at 0.86 has probability below 1e-6.
    """
    made = RobustIntervalRegressor(
        LinearRegression(), epsilon=0.2, sigma=0.2, draws=8, method=method, copies=2, random_state=0
    ).fit(*data(2000, 0))
    X, y = data(3000, 1)
    found = made.predict_interval(attacked(made, X, y, 0.2), seed=3)
    covered = int(((found[:, 0] <= y) & (y <= found[:, 1])).sum())
    assert bool(stats.binom.cdf(covered, 3000, 0.86) > 1e-6) is holds
    assert np.allclose(made.predictor_.numerics["input_scale"], UNITS, rtol=0.1)


def test_several_targets_and_frozen_estimators(tmp_path: Path) -> None:
    X, y = data(900, 2)
    both = np.stack([y, -y], axis=1)
    fitted = LinearRegression().fit(X[:300], both[:300])
    asked: Any = RobustIntervalRegressor(FrozenEstimator(fitted), epsilon=0.05, sigma=0.1, draws=4, random_state=0)
    made = clone(asked).fit(X[300:700], both[300:700])
    found = made.predict_interval(X[700:])
    assert found.shape == (200, 2, 2)
    assert ((found[..., 0] <= both[700:]) & (both[700:] <= found[..., 1])).all(axis=1).mean() > 0.85
    made.predictor_.save(f"{tmp_path}/p.safetensors")
    loaded = keepcover.load(f"{tmp_path}/p.safetensors", made.predictor_.running.model)
    assert str(loaded.guarantee) == str(made.guarantee_)


CHECKS = {
    "check_estimators_unfitted",
    "check_n_features_in",
    "check_fit2d_predict1d",
    "check_regressors_no_decision_function",
}
CHECKS |= {"check_parameters_default_constructible", "check_get_params_invariance", "check_estimators_dtypes"}


def test_it_is_an_estimator() -> None:
    """Those of scikit-learn's checks that bring enough rows for a promise, on a small budget."""
    made = RobustIntervalRegressor(alpha=0.5, draws=1, method="rcp1", copies=1, epsilon=0.01, sigma=0.1)
    done = set()
    checks: Any = estimator_checks_generator(made)
    for estimator, check in checks:
        name = check.func.__name__
        if name in CHECKS:
            check(estimator)
            done.add(name)
    assert len(done) >= 5
