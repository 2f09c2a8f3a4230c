"""Methods against golden values and against their definitions, label by label."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from keepcover.bounds.bounds import bernstein, clopper_pearson, gaussian_shift, hoeffding, hull_level, majorant_gap
from keepcover.data.splits import random_splits
from keepcover.errors import InputError
from keepcover.guarantee import conformal_quantile
from keepcover.methods import (
    CAS,
    METHODS,
    RCP1,
    RSCP,
    BinCP,
    BinCPSharp,
    BinCPThreshold,
    CASTestTime,
    Exact,
    ExactAsymmetric,
    Method,
    RSCPPlusBernstein,
    RSCPPlusHoeffding,
    Setting,
    SmoothedCP,
    get_method,
)
from keepcover.methods.exact import candidates
from keepcover.methods.holdout import Holdout
from keepcover.scores.draws import Draws
from keepcover.scores.scores import aps, hps, raps
from keepcover.scores.transforms import PTT
from keepcover.store.logits_file import read_arrays

patient = settings(deadline=None, derandomize=True)
BASE = Setting(alpha=0.1, epsilon=0.125, sigma=0.25, draws=8, n=60, classes=3)


def noisy_scores(points: int, classes: int = 3, draws: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Scores in [0, 1] of a fair classifier: the true label's are small."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (points,), generator=generator)
    centre = torch.randn(points, classes, 1, generator=generator, dtype=torch.float64)
    centre[torch.arange(points), labels] -= 2
    return (centre + torch.randn(points, classes, draws, generator=generator, dtype=torch.float64)).sigmoid(), labels


def holdout_of(seed: int = 0, points: int = 80, draws: int = 8) -> Holdout:
    scores, labels = noisy_scores(points, draws=draws, seed=seed)
    return Holdout(Draws(scores), labels)


def fitted(name: str, setting: Setting = BASE, **options: Any) -> Method:
    return get_method(name).fit(setting, holdout_of(9, draws=max(setting.draws, setting.cal_draws)), **options)


# -- golden values -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def golden(golden_folder: Path) -> dict[str, Any]:
    return json.loads((golden_folder / "core.json").read_text())


def golden_draws(golden: dict[str, Any], score: str) -> Draws:
    logits = torch.tensor(golden["logits"], dtype=torch.float64)
    u = torch.tensor(golden["u"], dtype=torch.float64)[:, None]
    ptt = PTT(torch.tensor(golden["holdout"], dtype=torch.float64).sort().values, **golden["ptt"])
    scores = {
        "hps": lambda: hps(logits),
        "aps": lambda: aps(logits, u),
        "raps": lambda: raps(logits, u, penalty=0.2, k_reg=1),
        "ptt_hps": lambda: ptt(hps(logits)),
    }[score]()
    return Draws(scores.transpose(1, 2).contiguous())


@pytest.mark.parametrize("score", ["hps", "aps", "raps", "ptt_hps"])
def test_golden_statistics(score: str, golden: dict[str, Any]) -> None:
    draws, expected = golden_draws(golden, score), golden["expected"][score]
    close = {"rtol": 1e-11, "atol": 1e-14}
    torch.testing.assert_close(draws.mean, torch.tensor(expected["mean"], dtype=torch.float64), **close)
    torch.testing.assert_close(draws.variance, torch.tensor(expected["variance"], dtype=torch.float64), **close)
    radius = bernstein(draws.variance, draws.count, golden["beta"])
    torch.testing.assert_close(radius, torch.tensor(expected["bernstein"], dtype=torch.float64), **close)
    assert hoeffding(draws.count, golden["beta"]) == pytest.approx(golden["hoeffding"], rel=1e-14)


@pytest.mark.parametrize("score", ["hps", "aps", "raps", "ptt_hps"])
def test_golden_thresholds_and_sets(score: str, golden: dict[str, Any]) -> None:
    draws, expected = golden_draws(golden, score), golden["expected"][score]
    labels = torch.tensor(golden["labels"])
    setting = Setting(golden["alpha"], golden["r"], 1.0, draws.count, 40, draws.values.shape[1], beta=golden["beta"])
    true, test = draws[:40].of_label(labels[:40]), draws[40:]
    for key, method in {
        "cp": SmoothedCP,
        "rscp": RSCP,
        "rscp_plus_hoeffding": RSCPPlusHoeffding,
        "rscp_plus_bernstein": RSCPPlusBernstein,
    }.items():
        rule = method.fit(setting)
        threshold = rule.threshold(rule.calibration_statistic(true))
        tau = expected["tau_plus"] + golden["hoeffding"] if rule.pays_beta else expected["tau"]
        inflated = tau if key == "cp" else float(gaussian_shift(min(tau, 1.0), golden["r"]))
        assert threshold == pytest.approx(inflated, rel=1e-11)
        assert rule.decide(test, threshold).tolist() == expected[key], key


# -- definitions -------------------------------------------------------------------------------------------------------


def test_the_registry_knows_every_method_by_its_name() -> None:
    assert {name: get_method(name).name for name in METHODS} == {name: name for name in METHODS}
    assert {name for name, method in METHODS.items() if method.certified} == {
        "rscp_plus_hoeffding",
        "rscp_plus_bernstein",
        "exact",
        "exact_asymmetric",
        "rcp1",
        "bincp",
        "bincp_sharp",
        "bincp_threshold",
        "cas",
        "cas_test_time",
    }
    with pytest.raises(InputError, match=r"among cp, cp_smoothed, .*, got 'magic'"):
        get_method("magic")


def test_bernstein_uses_the_variance_of_that_very_image_and_label() -> None:
    """A set does not change when the other images of the batch do."""
    scores, _ = noisy_scores(20)
    scores[1:5] = 0.5  # no variance at all
    rule = fitted("rscp_plus_bernstein")
    together = rule.test_statistic(Draws(scores))
    for i in range(20):
        for k in range(3):
            own = scores[i, k]
            expected = own.mean() - bernstein(own.var(), 8, BASE.beta)
            assert float(together[i, k]) == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("gamma", [0.0, 0.5])
@pytest.mark.parametrize(("c", "kappa"), [(0, 0), (1, 3), (5, 7)])
def test_the_count_rule_counts(c: int, kappa: int, gamma: float) -> None:
    """Z is the (c+1)-th largest, t its quantile at alpha', and k is in iff at most kappa (+1) draws exceed t."""
    (cal, labels), (test, _) = noisy_scores(60, seed=1), noisy_scores(40, seed=2)
    rule, v = Exact(BASE, kappa=kappa, gamma=gamma, c=c), torch.rand(40)
    true = Draws(cal).of_label(labels)
    z = true.values.sort(dim=-1, descending=True).values[:, c]
    assert torch.equal(rule.calibration_statistic(true), z)
    level = hull_level(8, c, 8, kappa, 0.5, 0.1, gamma)
    t = rule.threshold(z)
    allowed = math.floor(61 * Fraction(level))
    assert t == (math.inf if allowed < 1 else float(z.sort(descending=True).values[allowed - 1]))
    for t in (0.3, 0.6, math.inf):
        counts = (test > t).sum(dim=-1)
        forgiven = kappa + (v < gamma).long()
        assert torch.equal(rule.decide(Draws(test), t, v), counts <= forgiven[:, None])


def test_a_randomised_boundary_needs_its_uniform_number() -> None:
    with pytest.raises(InputError, match="one uniform number per image"):
        Exact(BASE, kappa=1, gamma=0.5, c=1).test_statistic(Draws(noisy_scores(4)[0]))


def test_rcp1_is_the_count_rule_with_one_draw() -> None:
    (cal, labels), (test, _) = noisy_scores(200, seed=1), noisy_scores(40, seed=2)
    one = replace(BASE, draws=1, n=200)
    rcp1, exact = RCP1.fit(replace(BASE, n=200)), Exact(one, kappa=0, c=0)
    assert (rcp1.test_draws, rcp1.calibration_draws) == (1, 1)
    assert rcp1.level == pytest.approx(exact.level, rel=1e-3)
    true = Draws(cal).of_label(labels)
    assert torch.equal(rcp1.calibration_statistic(true), exact.calibration_statistic(true.first(1)))
    assert torch.equal(rcp1.test_statistic(Draws(test)), exact.test_statistic(Draws(test).first(1)))
    statistic = rcp1.calibration_statistic(true)
    assert rcp1.threshold(statistic) == conformal_quantile(statistic, Fraction(float(gaussian_shift(0.1, -0.5))))


counts_g = st.lists(st.floats(0, 0.4), min_size=5, max_size=5).map(lambda rises: tuple(np.cumsum(rises).tolist()))
columns = st.lists(st.lists(st.integers(0, 6), min_size=4, max_size=4), min_size=1, max_size=30)


@patient
@given(counts_g, columns, st.sampled_from([0.1, 0.3, 0.7]))
def test_risk_control_takes_the_smallest_threshold_that_fits(
    g: tuple[float, ...], rows: list[list[int]], alpha: float
) -> None:
    """Against trying every threshold: (sum_i g(count_i(t)) + g(N)) / (n + 1) <= alpha."""
    draws = torch.tensor(rows, dtype=torch.float64)
    rule = ExactAsymmetric(replace(BASE, alpha=alpha, draws=2, calibration_draws=4), kappa=0, g=g)
    actual = rule.threshold(rule.calibration_statistic(Draws(draws)))

    def risk(t: float) -> float:
        return (sum(g[int(count)] for count in (draws > t).sum(dim=1)) + g[-1]) / (len(rows) + 1)

    if actual < math.inf:
        assert risk(actual) <= alpha + 1e-12
    smaller = [t for t in (-math.inf, *range(7)) if t < actual]
    assert all(risk(t) > alpha - 1e-12 for t in smaller)


def test_a_step_majorant_is_a_conformal_quantile() -> None:
    """g = 1{count > c} certifies nothing under attack, but its threshold is the plain quantile of Z."""
    scores, labels = noisy_scores(60)
    true = Draws(scores).of_label(labels)
    for c in (0, 3, 7):
        rule = ExactAsymmetric(BASE, kappa=0, g=tuple(float(j > c) for j in range(9)))
        assert rule.threshold(rule.calibration_statistic(true)) == conformal_quantile(true.largest(c + 1), 0.1)


@pytest.mark.parametrize("options", [{}, {"randomize": True}])
@pytest.mark.parametrize("draws", [1, 2, 8])
def test_the_fitted_majorant_is_valid(draws: int, options: dict) -> None:
    setting = replace(BASE, draws=draws, calibration_draws=16, n=500)
    rule = fitted("exact_asymmetric", setting, **options)
    assert isinstance(rule, ExactAsymmetric)
    assert len(rule.g) == 17
    assert majorant_gap(rule.g, draws, rule.kappa, setting.r, rule.gamma) <= 0


def test_a_falling_or_misfit_g_is_refused() -> None:
    for g in ((0.0, 1.0), (0.0, 0.2, 0.1, *([1.0] * 6))):
        with pytest.raises(InputError, match=r"nondecreasing g on 0..8 calibration draws"):
            ExactAsymmetric(BASE, kappa=0, g=g)


def test_small_budgets_try_every_rule() -> None:
    c, kappa = candidates(replace(BASE, draws=5, calibration_draws=3))
    assert set(zip(c.tolist(), kappa.tolist())) == {(a, b) for a in range(3) for b in range(5)}


def test_exact_chooses_the_smallest_estimated_set() -> None:
    """Against estimating every rule with its certified level."""
    setting, holdout = replace(BASE, n=500), holdout_of(4, points=200)
    rule, law = Exact.fit(setting, holdout), holdout.count_law(8)
    sizes = {}
    for c in range(8):
        for kappa in range(8):
            level = hull_level(8, c, 8, kappa, 0.5, 0.1)
            if 501 * level >= 1:
                fits = law[:, c + 1 :].sum(axis=1) <= level
                sizes[c, kappa] = holdout.size(8, kappa)[fits.argmax()]
    assert sizes[rule.c, rule.kappa] == pytest.approx(min(sizes.values()), rel=0.01)


@pytest.mark.parametrize("p", [0.5, 0.8])
@pytest.mark.parametrize("method", [BinCP, BinCPSharp])
def test_bincp_by_its_definition(method: type[BinCP], p: float) -> None:
    (cal, labels), (test, _) = noisy_scores(400, draws=256, seed=1), noisy_scores(50, draws=128, seed=2)
    rule = replace(method.fit(replace(BASE, draws=128, calibration_draws=256, n=400)), p=p)
    sharp = method is BinCPSharp
    level, miscoverage = (0.01, (0.1 - 0.005) * (1 - 0.005)) if sharp else (0.001 / 403, 0.1 - 0.001)
    successes = math.ceil(p * 256)
    t_i = sorted(sorted(row.tolist())[successes - 1] for row in Draws(cal).of_label(labels).values)
    t = t_i[400 - math.floor(miscoverage * 401)]
    low = clopper_pearson(successes, 256, level)[0]
    high = clopper_pearson((test <= t).sum(dim=-1).numpy(), 128, level)[1]
    expected = high >= gaussian_shift(low, -0.5)
    threshold = rule.threshold(rule.calibration_statistic(Draws(cal).of_label(labels)))
    assert threshold == t
    assert np.array_equal(rule.decide(Draws(test), threshold).numpy(), expected)
    assert 0.2 < expected.mean() < 0.95  # neither trivial


def test_bincp_with_a_fixed_threshold_by_its_definition() -> None:
    (cal, labels), (test, _) = noisy_scores(400, draws=256, seed=1), noisy_scores(50, draws=256, seed=2)
    setting = replace(BASE, draws=256, n=400)
    holdout = holdout_of(3, draws=256)
    rule = BinCPThreshold.fit(setting, holdout)
    pooled = sorted(holdout.true.values.flatten().tolist())
    assert rule.t == pooled[math.ceil(0.9 * len(pooled)) - 1]
    eta = 0.001 / 403
    true = Draws(cal).of_label(labels)
    low = sorted(float(clopper_pearson(int((row <= rule.t).sum()), 256, eta)[0]) for row in true.values)
    p_star = low[math.floor((0.1 - 0.001) * 401) - 1]
    high = clopper_pearson((test <= rule.t).sum(dim=-1).numpy(), 256, eta)[1]
    expected = high >= gaussian_shift(p_star, -0.5)
    actual = rule.decide(Draws(test), rule.threshold(rule.calibration_statistic(true)))
    assert np.array_equal(actual.numpy(), expected)
    assert 0.2 < expected.mean() < 0.95  # neither trivial


def test_bincp_on_cifar_is_what_its_authors_formulas_give(assets: Path) -> None:
    """About 3.41 labels on average, as reported for their code, where the fixed-threshold form keeps all ten.

    They interpolate the quantile of every point and bound 0.8 x 64 = 51.2 successes; we take 52 of 64.
    """
    name = "cifar10-resnet110-sigma0.25.test-logits-64.safetensors"
    logits, labels = read_arrays(assets / "models" / name, "logits", "labels")
    scores, labels = hps(logits.float()).transpose(1, 2).contiguous(), labels.long()
    setting = Setting(alpha=0.1, epsilon=0.125, sigma=0.25, draws=64, n=4750, classes=10)
    low, _ = clopper_pearson(0.8 * 64, 64, 0.001 / 4760)
    high = clopper_pearson(np.arange(65), 64, 0.001 / 4760)[1]
    least = int((high >= gaussian_shift(low, -0.5)).argmax())
    interpolated = Draws(scores).of_label(labels).values.quantile(0.8, dim=-1)
    sizes: dict[str, list[float]] = {"theirs": [], "bincp": [], "bincp_sharp": [], "bincp_threshold": []}
    for split in random_splits(10_000, 4, 500, seed=0):
        test, true = Draws(scores[split.test]), Draws(scores[split.calibration]).of_label(labels[split.calibration])
        t = conformal_quantile(interpolated[split.calibration], Fraction(99, 1000))
        sizes["theirs"].append(float(((test.values <= t).sum(dim=-1) >= least).sum() / len(test)))
        for name in list(sizes)[1:]:
            rule = get_method(name).fit(setting, Holdout(Draws(scores[split.holdout]), labels[split.holdout]))
            threshold = rule.threshold(rule.calibration_statistic(true))
            sizes[name].append(float(rule.decide(test, threshold).sum() / len(test)))
    mean = {name: float(np.mean(some)) for name, some in sizes.items()}
    assert mean["theirs"] == pytest.approx(3.41, abs=0.1)  # one split has a standard deviation of 0.04
    assert 3.0 < mean["bincp"] < mean["theirs"]
    assert mean["bincp_sharp"] < 2.4
    assert mean["bincp_threshold"] == 10


@pytest.mark.parametrize("options", [{"p": 0.0}, {"p": 1.1}, {"eta": 0.0}, {"eta": 1.0}, {"p": math.nan}])
def test_impossible_shares_and_budgets_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(InputError, match=r"expected the (share p|Monte Carlo budget eta) in \(0, 1"):
        BinCP(BASE, **options)


@pytest.mark.parametrize("method", [CAS, CASTestTime])
def test_cas_by_its_definition(method: type[CAS]) -> None:
    """With s = 1 - S: the integral of the shifted cdf bound, interval by interval, against a mean and its bound."""
    (cal, labels), (test, _) = noisy_scores(400, draws=512, seed=1), noisy_scores(20, draws=512, seed=2)
    rule, at_test = method.fit(replace(BASE, draws=512, n=400, alpha=0.3)), method is CASTestTime
    eta = 0.001 / 403
    radius = math.sqrt(math.log(1 / eta) / 1024)

    def through_cdf(s: np.ndarray, side: int) -> float:
        grid = np.array([0.0, *np.sort(s), 1.0])
        cdf = np.array([(s <= b).mean() for b in grid[:-1]])
        return float(np.diff(grid) @ gaussian_shift(1 - np.clip(cdf - side * radius, 0.0, 1.0), 0.5 * side))

    def upper(s: np.ndarray) -> float:
        return min(1.0, s.mean() + min(radius, float(bernstein(s.var(ddof=1), 512, eta))))

    true = Draws(cal).of_label(labels)
    clean = 1 - true.values.numpy()
    lower = sorted(row.mean() - radius if at_test else through_cdf(row, -1) for row in clean)
    query = np.array([[through_cdf(s, 1) if at_test else upper(s) for s in image] for image in 1 - test.numpy()])
    expected = query >= lower[math.floor((0.3 - 0.001) * 401) - 1]
    np.testing.assert_allclose(-rule.test_statistic(Draws(test)).numpy(), query, rtol=1e-10)
    np.testing.assert_allclose(np.sort(-rule.calibration_statistic(true).numpy()), lower, rtol=1e-10, atol=1e-12)
    actual = rule.decide(Draws(test), rule.threshold(rule.calibration_statistic(true)))
    assert np.array_equal(actual.numpy(), expected)
    assert 0.2 < expected.mean() < 0.95


@pytest.mark.parametrize("name", ["cas", "cas_test_time"])
def test_cas_says_when_every_set_is_full(name: str) -> None:
    """The label that fits worst, every score 1, is kept iff the threshold is said to keep every label."""
    rule = fitted(name, replace(BASE, draws=64))
    worst = rule.test_statistic(Draws(torch.ones(1, 1, 64)))
    for threshold, full in ((float(worst) + 1e-9, True), (float(worst) - 1e-9, False)):
        assert rule.always_full(threshold) == full


@pytest.mark.parametrize("name", ["bincp", "bincp_sharp", "bincp_threshold", "cas", "cas_test_time"])
def test_too_few_points_for_eta_means_every_label(name: str) -> None:
    """floor((alpha - eta)(n + 1)) = 0 at n = 9: no finite threshold."""
    (cal, labels), (test, _) = noisy_scores(9, seed=1), noisy_scores(5, seed=2)
    rule = fitted(name, replace(BASE, n=9))
    threshold = rule.threshold(rule.calibration_statistic(Draws(cal).of_label(labels)))
    assert threshold == math.inf
    assert rule.decide(Draws(test), threshold).all()


# -- laws --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in METHODS if name != "exact_asymmetric"])
def test_sets_grow_with_epsilon_and_confidence(name: str) -> None:
    """For a fixed rule and the same noise; for risk control g is what depends on both, so it is left out."""
    (cal, labels), (test, _) = noisy_scores(300, draws=256, seed=1), noisy_scores(100, draws=256, seed=2)
    setting = replace(BASE, draws=256, n=300, beta=0.01)
    rule, true = fitted(name, setting), Draws(cal).of_label(labels)

    def sets(epsilon: float, alpha: float) -> Tensor:
        other = replace(rule, setting=replace(setting, epsilon=epsilon, alpha=alpha))
        return other.decide(Draws(test), other.threshold(other.calibration_statistic(true)))

    by_epsilon = [sets(epsilon, 0.1) for epsilon in (0.0, 0.05, 0.125, 0.25)]
    by_alpha = [sets(0.05, alpha) for alpha in (0.5, 0.3, 0.1, 0.05)]
    for family in (by_epsilon, by_alpha):
        for small, large in pairwise(family):
            assert (small <= large).all()
    assert by_alpha[0].sum() < by_alpha[-1].sum()
    if name not in ("cp", "cp_smoothed"):
        assert by_epsilon[0].sum() < by_epsilon[-1].sum()


@pytest.mark.parametrize("name", ["rscp", "rscp_plus_hoeffding", "rscp_plus_bernstein", "cas", "cas_test_time"])
def test_unbounded_scores_are_refused_where_boundedness_is_assumed(name: str) -> None:
    rule = fitted(name)
    for bad in (1.5, -0.1, math.nan):
        values = torch.rand(5, 3, 8)
        values[2, 1, 0] = bad
        with pytest.raises(InputError, match=rf"{name} expects scores in \[0, 1\].*use transform 'ptt'"):
            rule.test_statistic(Draws(values))
        with pytest.raises(InputError, match=r"expects scores in \[0, 1\]"):
            rule.calibration_statistic(Draws(values[:, 1]))


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.compares_only])
def test_methods_that_compare_only_are_invariant(name: str) -> None:
    """An increasing map of the scores, on the holdout too, leaves every set as it is."""
    (cal, labels), (test, _) = noisy_scores(60, seed=1), noisy_scores(40, seed=2)
    sets = []
    for increasing in (lambda s: s, torch.logit):
        held = holdout_of(9)
        rule = get_method(name).fit(BASE, Holdout(Draws(increasing(held.draws.values)), held.labels))
        true = Draws(increasing(cal)).of_label(labels)
        sets.append(rule.decide(Draws(increasing(test)), rule.threshold(rule.calibration_statistic(true))))
    assert torch.equal(*sets)


@pytest.mark.parametrize("name", ["exact", "exact_asymmetric", "bincp_threshold"])
def test_methods_that_choose_need_a_holdout(name: str) -> None:
    with pytest.raises(InputError, match="holdout; give one"):
        get_method(name).fit(BASE)


@pytest.mark.parametrize("name", list(METHODS))
def test_the_guarantee_says_what_the_rule_uses(name: str) -> None:
    guarantee = fitted(name).guarantee(score="aps", transform="ptt")
    single = name in ("cp", "rcp1")
    assert (guarantee.draws, guarantee.calibration_draws) == ((1, 1) if single else (8, 8))
    assert guarantee.beta == (0.001 if name.startswith("rscp_plus") else None)
    assert (guarantee.certified, guarantee.score, guarantee.transform) == (METHODS[name].certified, "aps", "ptt")


@pytest.mark.parametrize("name", list(METHODS))
def test_a_rule_is_rebuilt_from_its_parameters(name: str) -> None:
    rule = fitted(name)
    parameters = json.loads(json.dumps(rule.parameters()))
    if "g" in parameters:
        parameters["g"] = tuple(parameters["g"])
    assert type(rule)(rule.setting, **parameters) == rule
