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

from keepcover.bounds import bernstein, clopper_pearson, conformal_quantile, hoeffding, hull_level, is_majorant
from keepcover.errors import InputError
from keepcover.evaluation.random_splits import random_splits
from keepcover.methods import (
    CAS,
    RCP1,
    RSCP,
    Asked,
    BinCP,
    BinCPSharp,
    BinCPThreshold,
    CASTestTime,
    Exact,
    ExactAsymmetric,
    Holdout,
    Method,
    RSCPPlus,
    Rule,
    SmoothedCP,
    get_method,
    saved_method,
)
from keepcover.methods.choosing import candidates
from keepcover.noise import Gaussian, Threat
from keepcover.promises import Promise, Sample
from keepcover.scores import PTT, CustomScore, Draws, Items, Reading, hps
from keepcover.store.logits_file import read_arrays
from keepcover.tasks import Classification
from tests.methods.golden import golden_draws
from tests.methods.worst import OWN, attacked_by, calibrated, holdout_of, kept, plainly, read

patient = settings(deadline=None, derandomize=True)
BASE = Asked(alpha=0.1, threat=Threat(Gaussian(0.25), 0.125), draws=8, n=60, candidates=3)


def noisy_scores(points: int, classes: int = 3, draws: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Scores in [0, 1] of a fair classifier: the true label's are small."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (points,), generator=generator)
    centre = torch.randn(points, classes, 1, generator=generator, dtype=torch.float64)
    centre[torch.arange(points), labels] -= 2
    return (centre + torch.randn(points, classes, draws, generator=generator, dtype=torch.float64)).sigmoid(), labels


def held(seed: int = 0, points: int = 80, draws: int = 8) -> Holdout:
    return holdout_of(*noisy_scores(points, draws=draws, seed=seed))


def fitted(method: str | Method, asked: Asked = BASE) -> Rule:
    """Fitted without PTT: these scores are in [0, 1]."""
    return plainly(method).fit(asked, held(9, draws=max(asked.draws, asked.per_point)))


# -- golden values -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def golden(golden_folder: Path) -> dict[str, Any]:
    return json.loads((golden_folder / "core.json").read_text())


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
    labels, threat = torch.tensor(golden["labels"]), Threat(Gaussian(1.0), golden["r"])
    asked = Asked(golden["alpha"], threat, draws.count, 40, draws.values.shape[1])
    true, test = draws[:40].of_label(labels[:40]), draws[40:]
    for key, method in {
        "cp": SmoothedCP(None),
        "rscp": RSCP(None),
        "rscp_plus_hoeffding": RSCPPlus("hoeffding", golden["beta"], None),
        "rscp_plus_bernstein": RSCPPlus("bernstein", golden["beta"], None),
    }.items():
        rule = method.fit(asked)
        threshold = calibrated(rule, true)
        tau = expected["tau_plus"] + golden["hoeffding"] if method.spent else expected["tau"]
        inflated = tau if key == "cp" else float(threat.up(min(tau, 1.0)))
        assert threshold == pytest.approx(inflated, rel=1e-11)
        assert kept(rule, test, threshold).tolist() == expected[key], key


def test_golden_sets_through_the_transform_of_the_method(golden: dict[str, Any]) -> None:
    """PTT as an option of the method, fitted on a holdout, against the same expected sets."""
    threat = Threat(Gaussian(1.0), golden["r"])
    draws, expected, labels = golden_draws(golden, "hps"), golden["expected"]["ptt_hps"], torch.tensor(golden["labels"])
    outputs = torch.tensor(golden["holdout"], dtype=torch.float64)[:, None, None].expand(-1, 1, 2)
    task = Classification(CustomScore(lambda scores: scores)).seen(outputs)
    holdout = Holdout(task, outputs, torch.zeros(len(outputs), dtype=torch.int64))
    ptt = PTT(golden["ptt"]["T"])
    assert golden["ptt"]["b"] == 0.9
    steps = holdout.steps(ptt, 0.1)
    for key, method in {
        "cp": SmoothedCP(ptt),
        "rscp": RSCP(ptt),
        "rscp_plus_bernstein": RSCPPlus("bernstein", golden["beta"], ptt),
    }.items():
        rule = method.rule(Asked(golden["alpha"], threat, draws.count, 40, 5), steps)
        true = read(rule, draws[:40].of_label(labels[:40]).values)
        assert kept(rule, read(rule, draws[40:].values), calibrated(rule, true)).tolist() == expected[key], key


# -- definitions -------------------------------------------------------------------------------------------------------


def test_the_registry_knows_every_method_by_its_name() -> None:
    assert {name: get_method(name).name for name in OWN} == {name: name for name in OWN}
    assert {name for name, method in OWN.items() if method.certified} == {
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
    with pytest.raises(InputError, match=r"among auto, cp, cp_smoothed, .*, got 'magic'"):
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
            expected = own.mean() - bernstein(own.var(), 8, 0.001)
            assert float(together[i, k]) == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("gamma", [0.0, 0.5])
@pytest.mark.parametrize(("c", "kappa"), [(0, 0), (1, 3), (5, 7)])
def test_the_count_rule_counts(c: int, kappa: int, gamma: float) -> None:
    """Z is the (c+1)-th largest, t its quantile at alpha', and k is in iff at most kappa (+1) draws exceed t."""
    (cal, labels), (test, _) = noisy_scores(60, seed=1), noisy_scores(40, seed=2)
    rule, v = Exact().rule(BASE, kappa=kappa, gamma=gamma, c=c), torch.rand(40)
    true = Draws(cal).of_label(labels)
    z = true.values.sort(dim=-1, descending=True).values[:, c]
    assert torch.equal(rule.statistic(true), z)
    level = hull_level(BASE.counts, c, kappa, 0.1, gamma)
    t = rule.threshold_of(Sample(z))
    allowed = math.floor(61 * Fraction(level))
    assert t == (math.inf if allowed < 1 else float(z.sort(descending=True).values[allowed - 1]))
    for t in (0.3, 0.6, math.inf):
        counts = (test > t).sum(dim=-1)
        forgiven = kappa + (v < gamma).long()
        assert torch.equal(kept(rule, Draws(test), t, v), counts <= forgiven[:, None])


def test_a_randomised_boundary_needs_its_uniform_number() -> None:
    with pytest.raises(InputError, match="one uniform number per query"):
        Exact().rule(BASE, kappa=1, gamma=0.5, c=1).test_statistic(Draws(noisy_scores(4)[0]))


def test_rcp1_is_the_count_rule_with_one_draw() -> None:
    (cal, labels), (test, _) = noisy_scores(200, seed=1), noisy_scores(40, seed=2)
    one = replace(BASE, draws=1, n=200)
    rcp1, exact = RCP1().fit(replace(BASE, n=200)), Exact().rule(one, kappa=0, c=0)
    assert (rcp1.test_draws, rcp1.calibration_draws) == (1, 1)
    assert rcp1.level == pytest.approx(exact.level, rel=1e-3)
    assert rcp1.level >= exact.level  # its closed form needs no grid
    true = Draws(cal).of_label(labels).first(1)
    assert torch.equal(rcp1.statistic(true), exact.statistic(true))
    assert torch.equal(rcp1.test_statistic(Draws(test).first(1)), exact.test_statistic(Draws(test).first(1)))
    statistic = rcp1.statistic(true)
    assert rcp1.threshold_of(Sample(statistic)) == conformal_quantile(statistic, Fraction(one.threat.most(0.1)))


counts_g = st.lists(st.floats(0, 0.4), min_size=5, max_size=5).map(lambda rises: tuple(np.cumsum(rises).tolist()))
columns = st.lists(st.lists(st.integers(0, 6), min_size=4, max_size=4), min_size=1, max_size=30)


@patient
@given(counts_g, columns, st.sampled_from([0.1, 0.3, 0.7]))
def test_risk_control_takes_the_smallest_threshold_that_fits(
    g: tuple[float, ...], rows: list[list[int]], alpha: float
) -> None:
    """Against trying every threshold: (sum_i g(count_i(t)) + g(N)) / (n + 1) <= alpha."""
    draws = torch.tensor(rows, dtype=torch.float64)
    rule = ExactAsymmetric().rule(replace(BASE, alpha=alpha, draws=2, calibration_draws=4), kappa=0, g=g)
    actual = calibrated(rule, Draws(draws))

    def risk(t: float) -> float:
        return (sum(g[int(count)] for count in (draws > t).sum(dim=1)) + g[-1]) / (len(rows) + 1)

    if actual < math.inf:
        assert risk(actual) <= alpha + 1e-12
    smaller = [t for t in (-math.inf, *range(7)) if t < actual]
    assert all(risk(t) > alpha - 1e-12 for t in smaller)


@pytest.mark.parametrize("name", [name for name, method in OWN.items() if method.things == "one"])
def test_methods_that_rank_points_refuse_weighted_items(name: str) -> None:
    rule = fitted(name)
    items = Items(Draws(noisy_scores(60)[0][:, 0]), 60, torch.ones(60), torch.arange(60))
    with pytest.raises(InputError, match=r"one thing to cover per point; use exact_asymmetric"):
        rule.threshold(items)


def test_a_step_majorant_is_a_conformal_quantile() -> None:
    """g = 1{count > c} certifies nothing under attack, but its threshold is the plain quantile of Z."""
    scores, labels = noisy_scores(60)
    true = Draws(scores).of_label(labels)
    for c in (0, 3, 7):
        rule = ExactAsymmetric().rule(BASE, kappa=0, g=[float(j > c) for j in range(9)])
        assert calibrated(rule, true) == conformal_quantile(true.largest(c + 1), 0.1)


@pytest.mark.parametrize("randomize", [False, True])
@pytest.mark.parametrize("draws", [1, 2, 8])
def test_the_fitted_majorant_is_valid(draws: int, randomize: bool) -> None:
    asked = replace(BASE, draws=draws, calibration_draws=16, n=500)
    rule = fitted(ExactAsymmetric(randomize), asked)
    assert len(rule.g) == 17
    assert is_majorant(rule.g, asked.counts, rule.kappa, rule.gamma)
    assert rule.majorises
    rule.verify(Classification().seen(torch.zeros(1, 1, 3)))
    assert (rule.gamma == 0) or randomize


@pytest.mark.parametrize("change", ["scaled", "epsilon", "kappa"])
def test_a_stored_g_that_certifies_nothing_is_refused(change: str) -> None:
    rule = fitted("exact_asymmetric", replace(BASE, draws=4, calibration_draws=16, n=500))
    task = Classification().seen(torch.zeros(1, 1, 3))
    rule.verify(task)
    stored = {
        "scaled": lambda: replace(rule, g=tuple(0.9 * value for value in rule.g)),
        "epsilon": lambda: attacked_by(rule, 0.2),
        "kappa": lambda: replace(rule, kappa=0, gamma=0.0),
    }[change]()
    assert rule.kappa > 0
    with pytest.raises(InputError, match="g is no majorant"):
        stored.verify(task)


def test_a_falling_or_misfit_g_is_refused() -> None:
    for g in ((0.0, 1.0), (0.0, 0.2, 0.1, *([1.0] * 6))):
        with pytest.raises(InputError, match=r"nondecreasing g on 0..8 calibration draws"):
            ExactAsymmetric().rule(BASE, kappa=0, g=g)


@pytest.mark.parametrize(
    "parameters", [{"kappa": 8}, {"kappa": -1}, {"gamma": 1.0}, {"gamma": -0.1}, {"c": 8}, {"c": -1}]
)
def test_rules_that_count_past_their_draws_are_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="expected 0 <= "):
        Exact().rule(BASE, **parameters)
    if "gamma" in parameters:
        with pytest.raises(InputError, match=r"expected 0 <= |forgives nothing"):
            RCP1().rule(BASE, **parameters)


def test_small_budgets_try_every_rule() -> None:
    c, kappa = candidates(replace(BASE, draws=5, calibration_draws=3))
    assert set(zip(c.tolist(), kappa.tolist())) == {(a, b) for a in range(3) for b in range(5)}


def test_exact_chooses_the_smallest_estimated_set() -> None:
    """Against estimating every rule with its certified level."""
    asked, holdout = replace(BASE, n=500), held(4, points=200)
    rule, law = Exact().fit(asked, holdout), holdout.count_law(8)
    sizes = {}
    for c in range(8):
        for kappa in range(8):
            level = hull_level(asked.counts, c, kappa, 0.1)
            if 501 * level >= 1:
                fits = law[:, c + 1 :].sum(axis=1) <= level
                sizes[c, kappa] = holdout.size(8, kappa)[fits.argmax()]
    assert sizes[rule.c, rule.kappa] == pytest.approx(min(sizes.values()), rel=0.01)


@pytest.mark.parametrize("draws", [2, 8])
def test_auto_takes_the_certificate_with_the_smaller_sets(draws: int) -> None:
    asked, holdout = replace(BASE, draws=draws, calibration_draws=16, n=500), held(4, points=200, draws=16)
    rule = get_method("auto").fit(asked, holdout)
    sizes = [
        one.estimated_size(holdout)
        for one in (
            Exact().fit(asked, holdout),
            Exact().fit(replace(asked, calibration_draws=draws), holdout),
            ExactAsymmetric().fit(asked, holdout),
        )
    ]
    assert rule.estimated_size(holdout) == min(sizes)
    assert rule.name in ("exact", "exact_asymmetric")
    with pytest.raises(InputError, match="auto chooses among"):
        get_method("auto").rule(asked)


@pytest.mark.parametrize("name", list(OWN))
def test_the_estimated_size_is_that_of_sets_on_the_holdout(name: str) -> None:
    """Within a tenth, for count rules the average over subsets of draws, for others the sets themselves."""
    asked = replace(BASE, n=300)
    scores, labels = noisy_scores(300, draws=8, seed=3)
    rule, holdout = plainly(name).fit(asked, holdout_of(scores, labels)), holdout_of(scores, labels)
    threshold = calibrated(rule, Draws(scores).of_label(labels).first(rule.calibration_draws))
    sets = kept(rule, Draws(scores).first(rule.test_draws), threshold, torch.linspace(0, 1, 300))
    assert rule.estimated_size(holdout) == pytest.approx(float(sets.sum(dim=1).double().mean()), rel=0.1, abs=0.05)


@pytest.mark.parametrize("p", [0.5, 0.8])
@pytest.mark.parametrize("method", [BinCP, BinCPSharp])
def test_bincp_by_its_definition(method: type[BinCP], p: float) -> None:
    (cal, labels), (test, _) = noisy_scores(400, draws=256, seed=1), noisy_scores(50, draws=128, seed=2)
    rule = method(p=p).fit(replace(BASE, draws=128, calibration_draws=256, n=400))
    sharp = method is BinCPSharp
    level, miscoverage = (0.01, (0.1 - 0.005) * (1 - 0.005)) if sharp else (0.001 / 403, 0.1 - 0.001)
    successes = math.ceil(p * 256)
    t_i = sorted(sorted(row.tolist())[successes - 1] for row in Draws(cal).of_label(labels).values)
    t = t_i[400 - math.floor(miscoverage * 401)]
    low = clopper_pearson(successes, 256, level)[0]
    high = clopper_pearson((test <= t).sum(dim=-1).numpy(), 128, level)[1]
    expected = high >= BASE.threat.down(low)
    threshold = calibrated(rule, Draws(cal).of_label(labels))
    assert threshold == t
    assert np.array_equal(kept(rule, Draws(test), threshold).numpy(), expected)
    assert 0.2 < expected.mean() < 0.95  # neither trivial


def test_bincp_with_a_fixed_threshold_by_its_definition() -> None:
    (cal, labels), (test, _) = noisy_scores(400, draws=256, seed=1), noisy_scores(50, draws=256, seed=2)
    holdout = held(3, draws=256)
    rule = BinCPThreshold().fit(replace(BASE, draws=256, n=400), holdout)
    pooled = sorted(holdout.items().draws.values.flatten().tolist())
    assert rule.t == pooled[math.ceil(0.9 * len(pooled)) - 1]
    eta = 0.001 / 403
    true = Draws(cal).of_label(labels)
    low = sorted(float(clopper_pearson(int((row <= rule.t).sum()), 256, eta)[0]) for row in true.values)
    p_star = low[math.floor((0.1 - 0.001) * 401) - 1]
    high = clopper_pearson((test <= rule.t).sum(dim=-1).numpy(), 256, eta)[1]
    expected = high >= BASE.threat.down(p_star)
    actual = kept(rule, Draws(test), calibrated(rule, true))
    assert np.array_equal(actual.numpy(), expected)
    assert 0.2 < expected.mean() < 0.95  # neither trivial


def test_bincp_on_cifar_is_what_its_authors_formulas_give(assets: Path) -> None:
    """About 3.41 labels on average, as reported for their code, where the fixed-threshold form keeps all ten.

    They interpolate the quantile of every point and bound 0.8 x 64 = 51.2 successes; we take 52 of 64.
    """
    name = "cifar10-resnet110-sigma0.25.test-logits-64.safetensors"
    logits, labels = read_arrays(assets / "models" / name, "logits", "labels")
    scores, labels = hps(logits.float()).transpose(1, 2).contiguous(), labels.long()
    asked = replace(BASE, draws=64, n=4750, candidates=10)
    low, _ = clopper_pearson(0.8 * 64, 64, 0.001 / 4760)
    high = clopper_pearson(np.arange(65), 64, 0.001 / 4760)[1]
    least = int((high >= asked.threat.down(low)).argmax())
    interpolated = Draws(scores).of_label(labels).values.quantile(0.8, dim=-1)
    sizes: dict[str, list[float]] = {"theirs": [], "bincp": [], "bincp_sharp": [], "bincp_threshold": []}
    for split in random_splits(10_000, 4, 500, seed=0):
        test, true = Draws(scores[split.test]), Draws(scores[split.calibration]).of_label(labels[split.calibration])
        t = conformal_quantile(interpolated[split.calibration], Fraction(99, 1000))
        sizes["theirs"].append(float(((test.values <= t).sum(dim=-1) >= least).sum() / len(test)))
        for name in list(sizes)[1:]:
            rule = get_method(name).fit(asked, holdout_of(scores[split.holdout], labels[split.holdout]))
            sizes[name].append(float(kept(rule, test, calibrated(rule, true)).sum() / len(test)))
    mean = {name: float(np.mean(some)) for name, some in sizes.items()}
    assert mean["theirs"] == pytest.approx(3.41, abs=0.1)  # one split has a standard deviation of 0.04
    assert 3.0 < mean["bincp"] < mean["theirs"]
    assert mean["bincp_sharp"] < 2.4
    assert mean["bincp_threshold"] == 10


@pytest.mark.parametrize("options", [{"p": 0.0}, {"p": 1.1}, {"eta": 0.0}, {"eta": 1.0}, {"p": math.nan}])
def test_impossible_shares_and_budgets_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(InputError, match=r"expected the (share p|Monte Carlo budget eta) in \(0, 1"):
        BinCP(**options)


@pytest.mark.parametrize("method", [CAS, CASTestTime])
def test_cas_by_its_definition(method: type[CAS]) -> None:
    """With s = 1 - S: the integral of the shifted cdf bound, interval by interval, against a mean and its bound."""
    (cal, labels), (test, _) = noisy_scores(400, draws=512, seed=1), noisy_scores(20, draws=512, seed=2)
    rule, at_test = method(transform=None).fit(replace(BASE, draws=512, n=400, alpha=0.3)), method is CASTestTime
    eta = 0.001 / 403
    radius = math.sqrt(math.log(1 / eta) / 1024)

    def through_cdf(s: np.ndarray, side: int) -> float:
        grid = np.array([0.0, *np.sort(s), 1.0])
        cdf = np.searchsorted(np.sort(s), grid[:-1], side="right") / len(s)
        attacked = BASE.threat.up if side > 0 else BASE.threat.down
        return float(np.diff(grid) @ attacked(1 - np.clip(cdf - side * radius, 0.0, 1.0)))

    def upper(s: np.ndarray) -> float:
        return min(1.0, s.mean() + min(radius, float(bernstein(s.var(ddof=1), 512, eta))))

    true = Draws(cal).of_label(labels)
    clean = 1 - true.values.numpy()
    lower = sorted(row.mean() - radius if at_test else through_cdf(row, -1) for row in clean)
    query = np.array([[through_cdf(s, 1) if at_test else upper(s) for s in image] for image in 1 - test.numpy()])
    expected = query >= lower[math.floor((0.3 - 0.001) * 401) - 1]
    np.testing.assert_allclose(-rule.test_statistic(Draws(test)).numpy(), query, rtol=1e-10)
    np.testing.assert_allclose(np.sort(-rule.statistic(true).numpy()), lower, rtol=1e-10, atol=1e-12)
    actual = kept(rule, Draws(test), calibrated(rule, true))
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
    threshold = calibrated(rule, Draws(cal).of_label(labels))
    assert threshold == math.inf
    assert rule.always_full(float(threshold))
    assert kept(rule, Draws(test), threshold).all()


# -- laws --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in OWN if name != "exact_asymmetric"])
def test_sets_grow_with_epsilon_and_confidence(name: str) -> None:
    """For a fixed rule and the same noise; for risk control g is what depends on both, so it is left out."""
    (cal, labels), (test, _) = noisy_scores(300, draws=256, seed=1), noisy_scores(100, draws=256, seed=2)
    method = get_method(name, beta=0.01) if name.startswith("rscp_plus") else get_method(name)
    rule = fitted(method, replace(BASE, draws=256, n=300))
    true = Draws(cal).of_label(labels).first(rule.calibration_draws)

    def sets(epsilon: float, alpha: float) -> Tensor:
        other = attacked_by(replace(rule, asked=replace(rule.asked, alpha=alpha)), epsilon)
        return kept(other, Draws(test).first(rule.test_draws), calibrated(other, true))

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
            rule.statistic(Draws(values[:, 1]))


@pytest.mark.parametrize("name", [name for name, method in OWN.items() if method.compares_only])
def test_methods_that_compare_only_are_invariant(name: str) -> None:
    """An increasing map of the scores, on the holdout too, leaves every set as it is."""
    (cal, labels), (test, _) = noisy_scores(60, seed=1), noisy_scores(40, seed=2)
    sets = []
    for increasing in (lambda s: s, torch.logit):
        scores, known = noisy_scores(80, seed=9)
        rule = get_method(name).fit(BASE, holdout_of(increasing(scores), known))
        true = Draws(increasing(cal)).of_label(labels).first(rule.calibration_draws)
        sets.append(kept(rule, Draws(increasing(test)).first(rule.test_draws), calibrated(rule, true)))
    assert torch.equal(*sets)


@pytest.mark.parametrize("name", ["auto", "exact", "exact_asymmetric", "bincp_threshold", "rscp", "cas"])
def test_methods_that_choose_need_a_holdout(name: str) -> None:
    with pytest.raises(InputError, match="holdout; give one"):
        get_method(name).fit(BASE)


@pytest.mark.parametrize("name", list(OWN))
def test_the_guarantee_says_what_the_rule_uses(name: str) -> None:
    method, single = get_method(name), name in ("cp", "rcp1")
    task = Classification("aps").seen(torch.zeros(1, 1, 3))
    guarantee = method.fit(BASE, held(9)).guarantee(task)
    assert (guarantee.draws, guarantee.calibration_draws) == ((1, 1) if single else (8, 8))
    spent = {"rscp_plus_hoeffding": 0.002, "rscp_plus_bernstein": 0.002, "bincp_sharp": 0.01}
    eta = 0.001 if name.startswith(("bincp", "cas")) else 0.0
    assert guarantee.spent == spent.get(name, eta)
    assert guarantee.transform == ("none" if method.transform is None else "ptt")
    assert (guarantee.certified, guarantee.score, guarantee.task) == (method.certified, "aps", task.words)


@pytest.mark.parametrize("name", list(OWN))
def test_a_rule_is_rebuilt_from_its_parameters(name: str) -> None:
    rule = get_method(name).fit(BASE, held(9))
    options, asked, parameters = json.loads(json.dumps([rule.method.options(), rule.asked.config(), rule.parameters()]))
    again = saved_method(name, options).rule(Asked.from_config(asked), rule.transform, **parameters)
    assert again == rule
    scores, labels = noisy_scores(60, seed=1)
    true = read(rule, Draws(scores).of_label(labels).first(rule.calibration_draws).values)
    assert calibrated(again, true) == calibrated(rule, true)


# -- questions, options and what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(OWN))
def test_rules_read_what_their_method_says(name: str) -> None:
    method = get_method(name)
    rule = method.fit(BASE, held(9))
    assert rule.reading == Reading(method.compares_only or method.transform is not None, rule.transform)
    assert (rule.transform is None) == (method.transform is None)


@pytest.mark.parametrize("name", list(OWN))
def test_explanations_agree_with_sets(name: str) -> None:
    """support >= needed iff the label is in the set, but for the rounding of means."""
    (cal, labels), (test, _) = noisy_scores(300, draws=64, seed=1), noisy_scores(40, draws=64, seed=2)
    rule = fitted(name, replace(BASE, draws=64, n=300, alpha=0.3))
    threshold = calibrated(rule, Draws(cal).of_label(labels).first(rule.calibration_draws))
    draws = Draws(test).first(rule.test_draws)
    for i in range(40):
        shown = rule.explain(draws[i : i + 1], torch.tensor(threshold, dtype=torch.float64), lambda s: 1 - s)
        inside = kept(rule, draws[i : i + 1], threshold)
        clear = (shown.support - shown.needed).abs() > 1e-9
        assert torch.equal((shown.support >= shown.needed - 1e-12)[clear], inside[clear])
        assert shown.words


def test_options_belong_to_methods() -> None:
    assert get_method("rscp_plus_bernstein", beta=0.01).spent == 0.02
    assert get_method("exact", randomize=True) == Exact(True)
    assert get_method("rscp", transform=None).transform is None
    with pytest.raises(InputError, match="exact has no option 'beta'; it has randomize"):
        get_method("exact", beta=0.01)
    with pytest.raises(InputError, match="rcp1 has no option 'p'; it has none"):
        get_method("rcp1", p=0.1)
    with pytest.raises(InputError, match="bound hoeffding or bernstein"):
        RSCPPlus("chebyshev")
    for beta in (0.0, 1.0, math.nan):
        with pytest.raises(InputError, match=r"budget beta in \(0, 1\)"):
            RSCPPlus(beta=beta)


@pytest.mark.parametrize(
    ("method", "asked", "message"),
    [
        (RSCP(None), BASE, r"rscp without PTT assumes scores in \[0, 1\], and 'raw'"),
        (RSCPPlus("bernstein"), replace(BASE, draws=1), "needs at least 2 draws per query, got 1"),
        (Exact(), replace(BASE, n=8), "at least 9 are needed"),
        (RSCPPlus(beta=0.05), BASE, "spend all of alpha"),
        (Exact(), replace(BASE, threat=Threat(Gaussian(0.0), 0.1)), "give sigma > 0"),
    ],
)
def test_what_the_theorem_does_not_cover_is_refused_before_the_network_runs(
    method: Method, asked: Asked, message: str
) -> None:
    task = Classification(CustomScore(lambda x: x, "raw")).seen(torch.zeros(1, 1, 3))
    with pytest.raises(InputError, match=message):
        method.check(asked, task)


def test_bincp_needs_a_finite_number_of_labels() -> None:
    with pytest.raises(InputError, match="bounds every label at once and needs a finite number"):
        BinCP().fit(replace(BASE, candidates=None)).lower(0)
    assert BinCPSharp().fit(replace(BASE, candidates=None)).kappa >= 0


def test_questions_survive_json() -> None:
    asked = replace(BASE, calibration_draws=16)
    assert Asked.from_config(json.loads(json.dumps(asked.config()))) == asked
    assert (asked.per_point, BASE.per_point) == (16, 8)
    assert (asked.counts.calibration_draws, asked.counts.draws, asked.counts.threat) == (16, 8, BASE.threat)


def test_the_rule_is_chosen_for_the_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    """30 points are few for confidence 95 %: only rules with a high enough level have a finite threshold, and one is taken."""
    marginal = Asked(0.15, Threat(Gaussian(1.0), 0.2), draws=8, n=30, candidates=3)
    asked = replace(marginal, promise=Promise(delta=0.05))
    for seed in range(4):
        rule = Exact().fit(asked, held(seed))
        assert asked.promise.rank(30, Fraction(rule.level)) <= 30
        assert rule.estimated_size(held(seed)) < 3
        taken = Exact().fit(marginal, held(seed))
        assert marginal.promise.rank(30, Fraction(taken.level)) <= 30
