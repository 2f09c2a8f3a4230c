"""Estimators of other libraries: scikit-learn's own checks, the promise on vectors, and a fingerprint that tells them apart."""

from __future__ import annotations

import importlib
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import expit
from scipy.stats import binom
from sklearn.base import BaseEstimator, ClassifierMixin, clone
from sklearn.datasets import load_iris
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.feature_selection import SelectKBest
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from sklearn.svm import SVC
from sklearn.tree import DecisionTreeClassifier
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import Tensor

from keepcover import Classification, Predictor, calibrate, fingerprint, load
from keepcover.adapters import from_predict_proba
from keepcover.adapters.proba import log_probabilities, state_digest
from keepcover.adapters.sklearn import RobustSetClassifier, predict_set
from keepcover.attacks import audit
from keepcover.errors import InputError
from keepcover.methods import METHODS, Exact, get_method
from keepcover.specs import load_model
from tests.toys import nearest, toy

# -- scikit-learn's own checks -----------------------------------------------------------------------------------------

TOO_FEW = "hands over 10 to 20 rows; half of them calibrate, and 90 % coverage needs at least 9 calibration points"
EXPECTED = {
    "check_n_features_in_after_fitting": TOO_FEW,
    "check_estimators_nan_inf": TOO_FEW,
    "check_classifier_data_not_an_array": TOO_FEW,
    "check_fit2d_1feature": TOO_FEW,
}
INIT = "check_do_not_raise_errors_in_init_or_set_params"
TYPED = {
    INIT: "types are checked at run time in these tests, and only here; another process runs this check without them"
}
SMALL = {"alpha": 0.4, "draws": 4, "calibration_draws": 4, "calibration_size": 0.3}


def expected_failures(estimator: RobustSetClassifier) -> dict[str, str]:
    """With default parameters some checks bring too few rows for the promise; with alpha 0.4 none does."""
    return {**EXPECTED, **TYPED} if estimator.alpha == 0.1 else TYPED


@pytest.mark.filterwarnings("ignore")  # random labels cannot be learnt, and sets of a handful of points are full
@parametrize_with_checks(
    [
        RobustSetClassifier(LogisticRegression(), draws=4, calibration_draws=4),
        RobustSetClassifier(LogisticRegression(), **SMALL),
    ],
    expected_failed_checks=expected_failures,
)
def test_the_checks_of_scikit_learn(estimator: Any, check: Callable[[Any], None]) -> None:
    check(estimator)


def test_it_can_be_cloned_searched_and_cross_validated() -> None:
    X, y = load_iris(return_X_y=True)
    base = RobustSetClassifier(
        GaussianNB(), alpha=0.2, sigma=0.2, epsilon=0.1, draws=2, calibration_draws=4, random_state=0
    )
    search = GridSearchCV(base, {"sigma": [0.1, 0.2], "estimator__var_smoothing": [1e-9, 1e-2]}, cv=2).fit(X, y)
    assert search.best_score_ > 0.85
    assert cross_val_score(clone(base), X, y, cv=2).mean() > 0.85


# -- the promise on vectors --------------------------------------------------------------------------------------------


def clouds(n: int, seed: int, classes: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Gaussian clouds in five dimensions, in units far from pixels."""
    generator = np.random.default_rng(seed)
    y = generator.integers(classes, size=n)
    centres = 40 * np.random.default_rng(0).standard_normal((classes, 5))
    return centres[y] + 20 * generator.standard_normal((n, 5)), y


PARAMS: dict[str, Any] = {"alpha": 0.1, "epsilon": 5.0, "sigma": 10.0, "draws": 8, "random_state": 0}


@pytest.fixture(scope="module")
def fitted() -> RobustSetClassifier:
    X, y = clouds(1600, seed=1)
    return RobustSetClassifier(LogisticRegression(max_iter=1000), **PARAMS).fit(X, y)


def test_coverage_is_kept_against_the_best_attack_on_a_linear_model(fitted: RobustSetClassifier) -> None:
    """p-values by the law that includes calibration luck; false alarm 1e-5 for each of two rows."""
    X, y = clouds(1500, seed=2)
    inputs, weights = torch.from_numpy(X).float(), torch.from_numpy(fitted.estimator_.coef_).float()

    def worst(images: Tensor, labels: Tensor, epsilon: float) -> Tensor:
        """Towards the strongest other class, along the difference of their weights."""
        logits = images @ weights.T
        logits[torch.arange(len(labels)), labels] = -torch.inf
        step = weights[logits.argmax(dim=1)] - weights[labels]
        return images + 0.9999 * epsilon * step / step.norm(dim=1, keepdim=True)

    found = audit(
        fitted.predictor_,
        (inputs, torch.from_numpy(y)),
        attacks={"worst": worst, "random": "random"},
        draws=4,
        steps=10,
        seed=3,
    )
    clean, attacked, blind = found.rows
    assert min(clean.p_value, attacked.p_value) > 1e-5
    assert attacked.coverage["mean"] < blind.coverage["mean"] <= clean.coverage["mean"]  # the attack is one
    assert clean.size < 2.5
    with pytest.raises(InputError, match="no gradients"):
        audit(fitted.predictor_, (inputs, torch.from_numpy(y)), steps=1, draws=1)


def test_sets_are_certified_and_labels_are_the_estimators(fitted: RobustSetClassifier) -> None:
    X, y = clouds(400, seed=3)
    assert np.array_equal(fitted.predict(X), fitted.estimator_.predict(X))
    np.testing.assert_array_equal(fitted.predict_proba(X), fitted.estimator_.predict_proba(X))
    mask = fitted.predict_set(X, seed=1)
    assert (mask.shape, mask.dtype) == ((400, 3), np.dtype(bool))
    assert [set(row) for row in fitted.predict_set_labels(X, seed=1)] == [set(np.flatnonzero(row)) for row in mask]
    measured = fitted.predictor_.predict(torch.from_numpy(X), seed=1).measure(y)
    assert measured.coverage.mean == mask[np.arange(400), y].mean() > 0.9
    assert fitted.guarantee_ == fitted.predictor_.guarantee
    assert (fitted.guarantee_.epsilon, fitted.guarantee_.n) == (5.0, 720)


def test_noise_is_fresh_and_fit_is_reproducible() -> None:
    X, y = clouds(600, seed=1)
    forest = RandomForestClassifier(n_estimators=10, max_depth=5)
    forests = [RobustSetClassifier(forest, **{**PARAMS, "draws": 2}).fit(X, y) for _ in range(2)]
    assert np.array_equal(forests[0].predict_proba(X), forests[1].predict_proba(X))
    one, two = (found.predictor_ for found in forests)
    assert one.rule == two.rule
    assert torch.equal(one.threshold, two.threshold)
    assert torch.equal(one.items.draws.values, two.items.draws.values)
    assert fingerprint(forests[0].classifier_) == fingerprint(forests[1].classifier_)
    one, two = forests[0].predict_set(X), forests[0].predict_set(X)
    assert not np.array_equal(one, two)  # an attacker cannot guess it, whatever random_state is
    assert np.array_equal(forests[0].predict_set(X, seed=5), forests[1].predict_set(X, seed=5))


def test_labels_may_be_anything_sortable_and_are_those_the_estimator_was_trained_on() -> None:
    X, y = clouds(400, seed=4)
    names = np.array(["ant", "bee", "cow"])[y]
    names[7] = "bat"  # one row: it trains or calibrates, not both
    found = [RobustSetClassifier(GaussianNB(), **{**PARAMS, "random_state": seed}).fit(X, names) for seed in range(4)]
    assert {len(one.classes_) for one in found} == {3, 4}  # both cases were met
    for one in found:
        assert one.classes_.tolist() == one.estimator_.classes_.tolist() == list(one.predictor_.class_names)
        assert one.guarantee_.n == 180  # a calibration row that no set can cover stays a calibration row
        assert int(one.predictor_.items.draws.values.isinf().all(dim=1).sum()) <= 4 - len(one.classes_)
        np.testing.assert_array_equal(one.predict_proba(X), one.estimator_.predict_proba(X))
        assert set(np.concatenate(one.predict_set_labels(X))) <= set(one.classes_)


def zipf(n: int, seed: int, exponent: float) -> tuple[np.ndarray, np.ndarray]:
    """Labels without end, of which any sample shows the common ones."""
    generator = np.random.default_rng(seed)
    y = np.minimum(generator.zipf(exponent, n), 10**6)
    return 5 * np.stack([np.log(y), np.sqrt(y) % 3], axis=1) + generator.standard_normal((n, 2)), y


@pytest.mark.filterwarnings("ignore")  # so many labels look like a regression
@pytest.mark.parametrize(("rows", "exponent", "answered"), [(160, 1.3, 0), (1000, 2.0, 110)])
def test_labels_never_met_count_as_missed_or_are_refused(rows: int, exponent: float, answered: int) -> None:
    """P[answered and missed] <= alpha over 120 fits, one query each: false alarm 1e-5 by the binomial law.

    Where a third of all queries have a label that was never met, no set can keep 90 %, full or not: fit refuses.
    """
    missed, refusals = 0, []
    for seed in range(120):
        X, y = zipf(rows + 1, seed, exponent)
        sets = RobustSetClassifier(
            GaussianNB(var_smoothing=1e-3),
            alpha=0.1,
            epsilon=0.1,
            sigma=0.5,
            draws=2,
            calibration_draws=4,
            method="exact",
            random_state=seed,
        )
        try:
            sets.fit(X[:-1], y[:-1])
        except InputError as error:
            refusals.append(str(error))
        else:
            missed += y[-1] not in sets.predict_set_labels(X[-1:], seed=seed)[0]
    assert binom.sf(missed - 1, 120, 0.1) > 1e-5
    assert len(refusals) <= 120 - answered
    assert all("a label that the model does not know" in refusal for refusal in refusals)


@pytest.mark.parametrize(
    "method", ["cp", "cp_smoothed", "exact", "exact_asymmetric", "rscp", "rscp_plus_hoeffding", "rcp1"]
)
@pytest.mark.parametrize("transform", [None, "none"])
def test_every_method_counts_unknown_labels_as_missed(method: str, transform: str | None, tmp_path: Path) -> None:
    """With 5 % of them the sets grow, with 15 % a promise of 90 % is refused; saved and loaded they stay."""
    model = nearest()
    images, labels = toy(1000, seed=1)
    averages = METHODS[method].transform is not None
    if transform == "none" and not averages:
        pytest.skip("it has no transform to leave out")
    chosen = get_method(method, transform=None) if transform == "none" else get_method(method)
    options: dict[str, Any] = {"epsilon": 0.02, "sigma": 0.1, "draws": 256, "seed": 1, "method": chosen}

    def fitted(share: int) -> Any:
        some = labels.clone()
        some[: 10 * share] = -1
        return calibrate(model, (images, some), task=Classification(open_labels=True), **options)

    sizes = []
    for share in (0, 5):
        predictor = fitted(share)
        sizes.append(float(predictor.predict(images, seed=1).size.double().mean()))
        predictor.save(tmp_path / "p.safetensors")
        again = load(tmp_path / "p.safetensors", model)
        assert torch.equal(again.predict(images[:20], seed=1).mask, predictor.predict(images[:20], seed=1).mask)
    assert sizes[0] < sizes[1] < 4
    with pytest.raises(InputError, match="calibration points have a label that the model does not know"):
        fitted(15)
    with pytest.raises(InputError, match="labels between 0 and"):
        calibrate(model, (images, labels.clone().fill_(-1)), **options)


def test_float64_features_reach_the_noise_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times in seconds since 1970: in float32 one step is 128 s, far more than sigma."""
    X, y = clouds(300, seed=1)
    X = X + 1.7e9
    seen: list[torch.dtype] = []
    sets = RobustSetClassifier(GaussianNB(), **PARAMS).fit(X, y)
    original = Predictor.predict
    monkeypatch.setattr(
        Predictor, "predict", lambda self, inputs, **more: seen.append(inputs.dtype) or original(self, inputs, **more)
    )
    sets.predict_set(X, seed=1)
    sets.predict_set(X.astype(np.float32), seed=1)
    sets.predict_set(X.astype(int), seed=1)
    assert seen == [torch.float64, torch.float32, torch.float64]
    np.testing.assert_array_equal(sets.predict_proba(X), sets.estimator_.predict_proba(X))


def test_a_method_may_bring_its_own_options() -> None:
    X, y = clouds(600, seed=1)
    sets = RobustSetClassifier(GaussianNB(), method=Exact(randomize=True), **{**PARAMS, "draws": 2}).fit(X, y)
    assert sets.predictor_.rule.method == Exact(randomize=True)
    assert clone(sets).method == Exact(randomize=True)


# -- pipelines ---------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::keepcover.errors.KeepcoverWarning")
def test_steps_that_learn_from_calibration_rows_are_refused_and_others_work() -> None:
    X, y = clouds(600, seed=1)
    sets = RobustSetClassifier(GaussianNB(), **PARAMS)
    scaler = StandardScaler().fit(X[:100])
    for before in (FunctionTransformer(lambda x: x / 2), FrozenEstimator(scaler), "passthrough", None):
        pipeline = Pipeline([("before", before), ("sets", sets)]).fit(X[100:], y[100:])
        own = X if before in ("passthrough", None) else pipeline[:-1].transform(X)
        assert np.array_equal(predict_set(pipeline, X, seed=1), pipeline[-1].predict_set(own, seed=1))
    assert predict_set(make_pipeline(sets).fit(X, y), X, seed=1).shape == (600, 3)
    for learns in (StandardScaler(), SelectKBest(k=2)):
        with pytest.raises(InputError, match="was fitted on the rows that calibrate"):
            predict_set(make_pipeline(learns, sets).fit(X, y), X)
        inside = RobustSetClassifier(make_pipeline(learns, GaussianNB()), **PARAMS).fit(X, y)
        assert inside.predict_set(X).shape == (600, 3)
    with pytest.raises(InputError, match="last step is a RobustSetClassifier"):
        predict_set(make_pipeline(StandardScaler(), GaussianNB()).fit(X, y), X)


@pytest.mark.filterwarnings("ignore::keepcover.errors.KeepcoverWarning")
def test_features_selected_inside_keep_the_promise() -> None:
    """Labels at random and 500 features, the five best of which are selected inside, on training rows alone.

    One query for each of 100 fits; false alarm 1e-5 by the binomial law.
    """
    missed = 0
    for seed in range(100):
        generator = np.random.default_rng(seed)
        X, y = generator.standard_normal((101, 500)), generator.integers(2, size=101)
        inside = RobustSetClassifier(
            make_pipeline(SelectKBest(k=5), GaussianNB()),
            alpha=0.2,
            epsilon=0.01,
            sigma=0.05,
            draws=2,
            calibration_draws=2,
            method="exact",
            copies=1,
            random_state=seed,
        )
        inside.fit(X[:-1], y[:-1])
        missed += not inside.predict_set(X[-1:], seed=seed)[0, y[-1]]
    assert binom.sf(missed - 1, 100, 0.2) > 1e-5


def test_a_fitted_estimator_is_kept_and_all_rows_calibrate() -> None:
    X, y = clouds(500, seed=5)
    names = np.array(["c", "a", "b"])[y]
    base = GaussianNB().fit(X[:200], names[:200])
    before = pickle.dumps(base)
    found = RobustSetClassifier(FrozenEstimator(base), **PARAMS).fit(X[200:], names[200:])
    assert found.guarantee_.n == 270
    assert pickle.dumps(base) == before
    assert np.array_equal(found.predict(X), base.predict(X))
    few = names[200:] != "b"  # a class that no calibration point has is still a label
    assert RobustSetClassifier(FrozenEstimator(base), **PARAMS).fit(
        X[200:][few], names[200:][few]
    ).classes_.tolist() == list("abc")


def test_training_under_noise_is_what_makes_it_work() -> None:
    """A nearest neighbour that never saw noise is lost in it."""
    X, y = clouds(800, seed=6)
    params = {**PARAMS, "sigma": 25.0, "epsilon": 12.0}
    sizes = [
        RobustSetClassifier(DecisionTreeClassifier(min_samples_leaf=20), copies=copies, **params)
        .fit(X, y)
        .predict_set(X, seed=1)
        .sum(axis=1)
        .mean()
        for copies in (0, 10)
    ]
    assert sizes[1] < sizes[0] - 0.1


@pytest.mark.parametrize(
    ("estimator", "changes", "match"),
    [
        (
            RidgeClassifier(),
            {},
            "expected an estimator with predict_proba, got RidgeClassifier; wrap it in CalibratedClass",
        ),
        (None, {"calibration_size": 1.0}, "calibration_size between 0 and 1, got 1.0"),
        (None, {"copies": -1}, "copies >= 0, got -1"),
        (None, {"sigma": 0.0}, "there is none; give sigma > 0"),
        (None, {"alpha": 0.001}, "calibration points cannot certify"),
        (None, {"method": "magic"}, "method among auto, cp"),
        (None, {"nonconformity": "magic"}, "score among hps"),
        (None, {"holdout": 500}, "holdout of 1 to"),
    ],
)
def test_bad_parameters_are_refused(estimator: Any, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        RobustSetClassifier(estimator, **{**PARAMS, **changes}).fit(*clouds(200, seed=1))


# -- saving ------------------------------------------------------------------------------------------------------------


def test_saved_and_loaded_with_the_same_estimator_only(fitted: RobustSetClassifier, tmp_path: Path) -> None:
    X, _ = clouds(100, seed=7)
    fitted.predictor_.save(tmp_path / "p.safetensors")
    copy = pickle.loads(pickle.dumps(fitted))
    again = load(tmp_path / "p.safetensors", copy.classifier_)
    inputs = torch.from_numpy(X).float()
    assert torch.equal(again.predict(inputs, seed=1).mask, torch.from_numpy(fitted.predict_set(X, seed=1)))
    assert np.array_equal(copy.predict_set(X, seed=1), fitted.predict_set(X, seed=1))
    other = RobustSetClassifier(LogisticRegression(max_iter=1000), **{**PARAMS, "random_state": 1}).fit(
        *clouds(1600, 1)
    )
    with pytest.raises(InputError, match="the model differs from the one calibrated"):
        load(tmp_path / "p.safetensors", other.classifier_)
    with pytest.raises(InputError, match=r"calibrated on inputs \[n, 5\], got \[100, 4\]"):
        again.predict(inputs[:, :4])


class Opaque(ClassifierMixin, BaseEstimator):
    """An estimator whose state holds code."""

    def fit(self, X: Any, y: Any) -> Opaque:
        self.classes_, self.link_ = np.unique(y), lambda z: expit(z)
        return self

    def predict_proba(self, X: Any) -> Any:
        p = self.link_(X[:, :1])
        return np.concatenate([1 - p, p], axis=1)


FAMILY: dict[str, Callable[[], Any]] = {
    "logistic": lambda: LogisticRegression(max_iter=1000),
    "bayes": GaussianNB,
    "tree": lambda: DecisionTreeClassifier(random_state=0),
    "forest": lambda: RandomForestClassifier(n_estimators=4, random_state=0),
    "boosting": lambda: HistGradientBoostingClassifier(max_iter=4, random_state=0),
    "neighbours": lambda: KNeighborsClassifier(3, algorithm="kd_tree"),
    "pipeline": lambda: make_pipeline(StandardScaler(), LogisticRegression()),
    "network": lambda: MLPClassifier((4,), max_iter=400, random_state=0, tol=1e-2),
    "support": lambda: SVC(),
}


def digests() -> dict[str, str | None]:
    X, y = clouds(120, seed=8)
    return {name: state_digest(make().fit(X, y)) for name, make in FAMILY.items()}


def test_a_fingerprint_is_the_same_in_another_process() -> None:
    """Where run-time types are not checked, so that scikit-learn's check of constructors applies there."""
    script = (
        "import json; from tests.adapters import test_sklearn_adapter as t; from sklearn.utils import estimator_checks; "
        "getattr(estimator_checks, t.INIT)('RobustSetClassifier', t.RobustSetClassifier()); print(json.dumps(t.digests()))"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, cwd=root, timeout=120
    )
    assert done.returncode == 0, done.stderr
    own = digests()
    assert None not in own.values()
    assert len(set(own.values())) == len(own)
    # Boosting adds up in threads: what is fitted, not its fingerprint, may differ in the last bit between processes.
    assert {**json.loads(done.stdout), "boosting": ""} == {**own, "boosting": ""}


@pytest.mark.parametrize("name", list(FAMILY))
def test_a_fingerprint_changes_with_the_data_and_not_with_use(name: str) -> None:
    X, y = clouds(120, seed=8)
    model = FAMILY[name]().fit(X, y)
    before = state_digest(model)
    model.predict(X)
    assert state_digest(model) == before
    y[0] = (y[0] + 1) % 3
    assert state_digest(FAMILY[name]().fit(X, y)) != before


def test_what_runs_and_what_does_not_change_the_function() -> None:
    X, y = clouds(120, seed=8)
    one, two = (RandomForestClassifier(n_estimators=2, random_state=0, n_jobs=jobs).fit(X, y) for jobs in (1, 2))
    assert state_digest(one) == state_digest(two)
    values: list[Any] = [
        0,
        0.0,
        False,
        None,
        "0",
        b"0",
        [],
        (),
        {},
        [0],
        [[0]],
        {"a": 0},
        {"a": 0.0},
        {"b": 0},
        {0},
        {0, 1},
        np.zeros(2),
        np.zeros((2, 1)),
        np.zeros(2, dtype=np.float32),
        np.array([0, 0]),
        np.array(["a"], dtype=object),
        np.zeros(1, dtype=[("a", "<i4"), ("b", "<f8")]),
        np.zeros(1, dtype=[("a", "<i4"), ("c", "<f8")]),
        int,
        float,
        np.random.RandomState(0),
        np.random.default_rng(0),
    ]
    found = [state_digest(value) for value in values]
    assert None not in found
    assert len(set(found)) == len(found)


def test_padding_and_shared_parts_do_not_matter_and_cycles_end() -> None:
    kind = np.dtype([("a", "<i1"), ("b", "<f8")], align=True)
    raw = [np.frombuffer(bytes([7, *[fill] * 7]) + np.float64(1.5).tobytes(), dtype=kind) for fill in (0, 255)]
    assert raw[0].tobytes() != raw[1].tobytes()
    assert state_digest(raw[0]) == state_digest(raw[1])
    loop: list[Any] = [1]
    loop.append(loop)
    assert state_digest(loop) is not None
    assert state_digest(loop) != state_digest([1, [1]])


def test_code_has_no_fingerprint() -> None:
    X, y = clouds(60, seed=8, classes=2)
    assert state_digest(Opaque().fit(X, y)) is None
    assert state_digest(make_pipeline(FunctionTransformer(np.tanh), GaussianNB()).fit(X, y)) is None
    assert from_predict_proba(Opaque().fit(X, y)).fingerprint is None
    assert from_predict_proba(Opaque().fit(X, y), fingerprint="mine").fingerprint == "mine"


# -- probabilities as logits -------------------------------------------------------------------------------------------


def test_a_function_of_arrays_is_a_model() -> None:
    """The same classifier twice, as a module and as a NumPy function: nearly the same sets."""
    linear = nearest()
    weight, bias = (p.detach().double().numpy() for p in linear[1].parameters())

    def proba(inputs: np.ndarray) -> np.ndarray:
        assert inputs.shape[1:] == (16,)
        logits = inputs @ weight.T + bias
        exp = np.exp(logits - logits.max(axis=1, keepdims=True))
        return exp / exp.sum(axis=1, keepdims=True)

    model = from_predict_proba(proba, fingerprint="numpy-1")
    images, labels = toy(300, seed=1)
    torch.testing.assert_close(
        model(images).softmax(dim=1), linear(images).softmax(dim=1).detach(), rtol=1e-4, atol=1e-6
    )
    options: dict[str, Any] = {"epsilon": 0.1, "sigma": 0.1, "draws": 4, "seed": 1, "method": "exact"}
    masks = [calibrate(m, (images, labels), **options).predict(images, seed=2).mask for m in (model, linear)]
    assert float((masks[0] == masks[1]).double().mean()) > 0.995


def test_images_can_keep_their_shape() -> None:
    seen: list[tuple[int, ...]] = []

    def proba(inputs: np.ndarray) -> np.ndarray:
        seen.append(inputs.shape)
        return np.full((len(inputs), 2), 0.5)

    from_predict_proba(proba, flatten=False)(torch.rand(3, 1, 2, 2))
    from_predict_proba(proba)(torch.rand(3, 1, 2, 2))
    assert seen == [(3, 1, 2, 2), (3, 4)]


@pytest.mark.parametrize(
    ("probs", "match"),
    [
        (torch.tensor([[0.5, 0.6]]), r"rows that sum to 1, got values in \[0.5, 0.6\] with sums in \[1.1, 1.1\]"),
        (torch.tensor([[3.0, -2.0]]), "are they logits"),
        (torch.tensor([[torch.nan, 1.0]]), "rows that sum to 1"),
        (torch.tensor([[1.0]]), "at least 2 classes"),
        (torch.tensor([0.5, 0.5]), r"probabilities \[n, classes\]"),
        (torch.tensor([[1, 0]]), "of torch.int64"),
    ],
)
def test_what_is_no_probability_is_refused(probs: Tensor, match: str) -> None:
    with pytest.raises(InputError, match=match):
        log_probabilities(probs)


def test_bad_functions_are_refused() -> None:
    with pytest.raises(InputError, match="an object with predict_proba or a function array -> probabilities, got int"):
        from_predict_proba(3)
    for wrong in (lambda x: np.full((1, 2), 0.5), lambda x: 0.5):
        with pytest.raises(InputError, match="expected probabilities of 3 inputs, got shape"):
            from_predict_proba(wrong)(torch.rand(3, 2))


def test_zero_probabilities_are_finite_logits() -> None:
    logits = log_probabilities(torch.tensor([[1.0, 0.0, 0.0]]))
    assert logits.isfinite().all()
    assert logits.softmax(dim=1)[0, 0] == 1


# -- from the command line's point of view -----------------------------------------------------------------------------


def make_forest() -> RandomForestClassifier:
    images, labels = toy(300, seed=9)
    generator = torch.Generator().manual_seed(0)
    noisy = images.repeat(4, 1, 1, 1) + 0.1 * torch.randn(1200, *images.shape[1:], generator=generator)
    return RandomForestClassifier(n_estimators=10, max_depth=6, random_state=0).fit(noisy.flatten(1), labels.repeat(4))


def test_a_function_may_return_an_estimator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "own_models", sys.modules[__name__])
    model = load_model("own_models:make_forest")
    predictor = calibrate(model, toy(300, seed=1), epsilon=0.05, sigma=0.1, draws=4, seed=1)
    predictor.save(tmp_path / "p.safetensors")
    loaded = load(tmp_path / "p.safetensors", load_model("own_models:make_forest"))
    images, labels = toy(200, seed=2)
    sets = loaded.predict(images, seed=1)
    assert torch.equal(sets.mask, predictor.predict(images, seed=1).mask)
    assert sets.measure(labels).coverage.mean > 0.85


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "keepcover.adapters.sklearn")
    monkeypatch.setitem(sys.modules, "sklearn.frozen", None)  # as it is before scikit-learn 1.6
    with pytest.raises(InputError, match=r"pip install '.\[sklearn\]'"):
        importlib.import_module("keepcover.adapters.sklearn")


def test_all_but_the_estimator_go_by_name() -> None:
    with pytest.raises(TypeError, match="positional argument"):
        RobustSetClassifier(None, "aps")  # type: ignore[misc]
