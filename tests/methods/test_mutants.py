"""Rules broken on purpose. The checks that the real rules pass must catch every one of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy import ndarray
from scipy import stats
from torch import Tensor

from keepcover.bounds import bernstein, clopper_pearson, hoeffding
from keepcover.methods import (
    CAS,
    METHODS,
    BinCP,
    BinCPSharp,
    Exact,
    ExactAsymmetric,
    OneDrawControl,
    RSCPPlus,
    Rule,
    SplitCP,
    get_method,
)
from keepcover.methods.bincp import FixedShare, SharpShare
from keepcover.methods.cas import CalibrationTime
from keepcover.methods.exact import HullRule, MajorantRule
from keepcover.methods.one_draw import OneDrawRisk
from keepcover.methods.rscp import InflatedRule
from keepcover.noise import Gaussian, Threat
from keepcover.promises import Promise, Sample
from keepcover.scores import Draws, Items, Reading, Tally
from keepcover.tasks import Multilabel
from keepcover.testing import check_method, check_task
from tests.bounds.brute import crossing, curve
from tests.methods.golden import golden_draws
from tests.methods.premises import (
    clean_exceedances,
    overestimated_attacks,
    overestimated_shares,
    overestimates,
    underestimated_means,
    with_level,
)
from tests.methods.worst import (
    BOUNDED,
    LAWS,
    OWN,
    SIGMA,
    asked_for,
    attacked_misses,
    calibrated,
    fit,
    plainly,
    thresholds,
    two_points,
    violated,
)
from tests.tasks import several

# -- RSCP+ -------------------------------------------------------------------------------------------------------------


class ForgetsTwoBeta(InflatedRule):
    def threshold_of(self, sample: Sample) -> float:
        tau = self.asked.promise.quantile(sample, self.asked.promise.level(self.asked.alpha))
        return float(self.asked.threat.up(min(tau + hoeffding(self.calibration_draws, self.method.beta), 1.0)))


class MisalignsBernstein(InflatedRule):
    def test_statistic(self, draws: Draws, v: Tensor | None = None) -> Tensor:
        return draws.mean - bernstein(draws.variance.roll(1, dims=0), draws.count, self.method.beta)


def test_forgetting_two_beta_is_caught() -> None:
    rule = ForgetsTwoBeta(RSCPPlus("hoeffding", 0.04, None), asked_for(99, 4, r=0.0))
    assert violated(clean_exceedances(rule, 1500), 1500, 0.1 - 2 * 0.04)


def test_misaligned_bernstein_bounds_are_caught() -> None:
    rule = MisalignsBernstein(RSCPPlus("bernstein", 0.04, None), asked_for(99, 1024))
    assert violated(overestimates(rule, 2000), 2000, 0.04)


@pytest.mark.parametrize(
    ("kind", "bound", "caught"),
    [
        (InflatedRule, "hoeffding", False),
        (ForgetsTwoBeta, "hoeffding", True),
        (InflatedRule, "bernstein", False),
        (MisalignsBernstein, "bernstein", True),
    ],
)
@pytest.mark.parametrize("score", ["hps", "aps", "raps", "ptt_hps"])
def test_golden_values_catch_both(
    kind: type[InflatedRule], bound: str, caught: bool, score: str, golden_folder: Path
) -> None:
    """The threshold (at r = 0 it is tau_plus + b_H) and the statistics of the golden example, real rule and mutant."""
    golden = json.loads((golden_folder / "core.json").read_text())
    expected, draws, labels = golden["expected"][score], golden_draws(golden, score), torch.tensor(golden["labels"])
    asked = replace(asked_for(40, 64, r=0.0, alpha=golden["alpha"]), candidates=5)
    rule = kind(RSCPPlus(bound, golden["beta"], None), asked)
    tau = calibrated(rule, draws[torch.arange(40)].of_label(labels[:40])) - golden["hoeffding"]
    radius = torch.tensor(expected["mean"], dtype=torch.float64) - rule.test_statistic(draws)
    radii = expected["bernstein"] if bound == "bernstein" else np.full((60, 5), golden["hoeffding"])
    same = abs(tau - expected["tau_plus"]) < 1e-9 and np.allclose(radius.numpy(), radii, rtol=1e-9)
    assert same != caught


# -- BinCP and CAS -----------------------------------------------------------------------------------------------------


class ForgetsTheUpperBound(FixedShare):
    """Compares the share of test draws itself with the attacked lower bound."""

    def allowed(self, above: int) -> int:
        count = np.arange(self.test_draws + 1)
        kept = 1 - count / self.test_draws >= self.asked.threat.down(self.lower(above))
        return int(count[kept].max())


class ForgetsTheUpperBoundSharply(SharpShare):
    allowed = ForgetsTheUpperBound.allowed


class ForgetsTheLowerBound(FixedShare):
    def lower(self, above: int) -> float:
        return 1 - above / self.calibration_draws


class TakesTheDrawBelow(FixedShare):
    """Bounds m successes and takes the (m-1)-th smallest draw."""

    def statistic(self, true: Draws) -> Tensor:
        return true.largest(self.c + 2)


class Interpolates(FixedShare):
    """Takes an interpolated quantile and bounds p N successes, whole or not, as the authors' code does."""

    def lower(self, above: int) -> float:
        successes, level = self.method.p * self.calibration_draws, self.method.level(self.asked)
        return float(clopper_pearson(successes, self.calibration_draws, level)[0])

    def statistic(self, true: Draws) -> Tensor:
        return true.values.quantile(self.method.p, dim=-1)


class ForgetsTheCdfBound(CalibrationTime):
    """Shifts the empirical cdf as if it were the cdf."""

    def statistic(self, true: Draws) -> Tensor:
        cdf = np.arange(true.count + 1) / true.count
        weight = torch.as_tensor(self.asked.threat.down(1 - cdf))
        return true.ascending @ (weight[:-1] - weight[1:]).flip(0) - 1


class ForgetsTheMonteCarloError(CalibrationTime):
    def test_statistic(self, draws: Draws, v: Tensor | None = None) -> Tensor:
        return draws.mean - 1


@pytest.mark.parametrize(
    ("kind", "method", "caught"),
    [
        (FixedShare, BinCP(p=0.2), False),
        (SharpShare, BinCPSharp(p=0.2), False),
        (ForgetsTheUpperBound, BinCP(p=0.2), True),
        (ForgetsTheUpperBoundSharply, BinCPSharp(p=0.2), True),
    ],
)
def test_trusting_the_share_of_test_draws_is_caught(kind: type[FixedShare], method: BinCP, caught: bool) -> None:
    rule = kind(method, asked_for(120, 64, r=2.0))
    misses = attacked_misses(rule, LAWS["point"], lambda s: s, rule.asked.threat.epsilon, 300)
    assert violated(misses, 300, 0.1) == caught


@pytest.mark.parametrize(
    ("kind", "caught"), [(FixedShare, False), (ForgetsTheLowerBound, True), (TakesTheDrawBelow, True)]
)
def test_a_wrong_bound_of_the_share_is_caught(kind: type[FixedShare], caught: bool) -> None:
    rule = with_level(kind, BinCP(), 0.1)
    assert violated(overestimated_shares(rule, 20_000), 20_000, 0.05) == caught


@pytest.mark.parametrize(("kind", "caught"), [(FixedShare, False), (Interpolates, True)])
def test_interpolating_a_points_quantile_is_caught(kind: type[FixedShare], caught: bool) -> None:
    """Scores whose gaps shrink upwards make interpolation worst: it lies hardly above the 25th of 32 draws."""
    rule = with_level(kind, BinCP(), 0.002, 32)
    misses = overestimated_shares(rule, 200_000, lambda u: -torch.exp(-700 * u))
    assert violated(misses, 200_000, 0.001) == caught


@pytest.mark.parametrize(("draws", "times"), [(64, 1.34), (32, 3.28)])
def test_what_interpolating_costs_at_the_published_level(draws: int, times: float) -> None:
    """The order statistic below it has this many times level / 2 to fall short of the bound of p N successes."""
    asked = replace(asked_for(4750, draws), candidates=10)
    rule, ours, level = Interpolates(BinCP(), asked), BinCP().rule(asked), BinCP().level(asked)
    below = math.floor(1 + BinCP().p * (draws - 1))
    short = stats.beta.cdf(rule.lower(rule.c), below, draws + 1 - below)
    assert short / (level / 2) == pytest.approx(times, rel=0.01)
    m = draws - ours.c
    assert stats.beta.cdf(ours.lower(ours.c), m, draws + 1 - m) <= level / 2 * (1 + 1e-9)


@pytest.mark.parametrize("shape", ["smooth", "step"])
def test_a_cdf_without_its_bound_is_caught(shape: str) -> None:
    rule = with_level(ForgetsTheCdfBound, CAS(), 0.05)
    assert violated(overestimated_attacks(rule, shape, 5000), 5000, 0.05)


def test_a_mean_without_its_bound_is_caught() -> None:
    rule = with_level(ForgetsTheMonteCarloError, CAS(), 0.05)
    assert violated(underestimated_means(rule, 5000), 5000, 0.1)


# -- the conformal quantile --------------------------------------------------------------------------------------------


def interpolated(scores: ndarray, alpha: float) -> ndarray:
    return np.quantile(scores, min((1 - alpha) * (1 + 1 / scores.shape[1]), 1.0), axis=1)


def interpolated_plainly(scores: ndarray, alpha: float) -> ndarray:
    return np.quantile(scores, 1 - alpha, axis=1)


def floored(scores: ndarray, alpha: float) -> ndarray:
    return np.sort(scores, axis=1)[:, math.floor((scores.shape[1] + 1) * (1 - Fraction(str(alpha)))) - 1]


def exact(scores: ndarray, alpha: float) -> ndarray:
    return thresholds(SplitCP().rule(asked_for(scores.shape[1], 1, alpha=alpha)), torch.from_numpy(scores)).numpy()


@pytest.mark.parametrize(
    ("quantile", "caught"), [(exact, False), (interpolated, True), (interpolated_plainly, True), (floored, True)]
)
def test_wrong_quantiles_under_cover(quantile: Callable[[ndarray, float], ndarray], caught: bool) -> None:
    """At n = 20, alpha = 0.1 the right rank is 19; scores whose gaps shrink upwards make interpolation worst."""
    scores = -np.exp(-700 * np.random.default_rng(0).random((4000, 21)))
    misses = int((scores[:, 20] > quantile(scores[:, :20], 0.1)).sum())
    assert violated(misses, 4000, 0.1) == caught


# -- the exact certificates --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["exact", "rcp1"])
def test_shared_noise_is_caught(name: str) -> None:
    """One noise bank for all images: calibration and test move together, and the attack alone decides."""
    asked = asked_for(120, 8)
    rule = fit(name, asked, LAWS["point"], lambda s: s)
    honest = attacked_misses(rule, LAWS["point"], lambda s: s, asked.threat.epsilon, 800)
    shared = attacked_misses(rule, LAWS["point"], lambda s: s, asked.threat.epsilon, 800, shared_noise=True)
    assert not violated(honest, 800, asked.alpha)
    assert violated(shared, 800, asked.alpha)


@cache
def hull_from(smallest: float, counts: tuple[int, int, int, int], r: float, alpha: float) -> float:
    """alpha' from a grid of q that starts at ``smallest``."""
    q, f, h = curve(*counts, r)
    return crossing(f[q >= smallest], h[q >= smallest], alpha)[0]


class GridAboveZero(HullRule):
    @property
    def level(self) -> float:
        counts = (self.calibration_draws, self.c, self.test_draws, self.kappa)
        return hull_from(0.02, counts, self.asked.threat.epsilon / SIGMA, self.asked.alpha)


@pytest.mark.parametrize(("smallest", "caught"), [(0.0, False), (0.005, True)])
def test_a_grid_that_starts_above_zero_exceeds_the_golden_levels(
    smallest: float, caught: bool, golden_folder: Path
) -> None:
    rows = json.loads((golden_folder / "exact.json").read_text())["rows"]
    above = [
        row["alpha_prime"] + 1e-6
        < hull_from(smallest, (row["n_cal"], row["c"], row["n_test"], row["kappa"]), row["r"], row["alpha"])
        for row in rows
        if row["n_cal"] <= 16 and row["alpha_prime"] > 1e-2
    ]
    assert any(above) == caught


@pytest.mark.parametrize(("kind", "caught"), [(HullRule, False), (GridAboveZero, True)])
def test_a_grid_that_starts_above_zero_breaks_the_promise(kind: type[HullRule], caught: bool) -> None:
    """The hull of this rule is the diagonal, from q = 0 to q = 1: a fifth of hopeless points is a fifth of misses."""
    rule = kind(Exact(), asked_for(200, 8), kappa=2, c=0)
    misses = attacked_misses(rule, two_points(-5.0, 5.0, 0.18), lambda s: s, rule.asked.threat.epsilon, 1000)
    assert violated(misses, 1000, 0.1) == caught


class IgnoresTheHull(HullRule):
    """Uses alpha itself, as if the clean count rule were all there is."""

    @property
    def level(self) -> float:
        return self.asked.alpha


@pytest.mark.parametrize("r", [0.5, 1.0])
def test_calibrating_at_alpha_is_caught(r: float) -> None:
    rule = IgnoresTheHull(Exact(), asked_for(120, 8, r), kappa=2, c=2)
    assert violated(attacked_misses(rule, LAWS["point"], lambda s: s, rule.asked.threat.epsilon, 1000), 1000, 0.1)


class ForgetsTheNextPoint(Promise):
    """Lets the calibration losses spend all of alpha n, as if the query had none."""

    def budget(self, n: int | float, level: Fraction, top: float, own: float = 1.0) -> float:
        return float(level) * n


class CountsDrawsAtTheThreshold(MajorantRule):
    """Takes the threshold that breaks the budget: one score too low."""

    def threshold_of(self, sample: Sample) -> float:
        own, statistic = super().threshold_of(sample), sample.statistic
        below = statistic[statistic < own]
        return float(below.max()) if len(below) else own


@pytest.mark.parametrize("mutant", [None, "budget", "threshold"])
def test_risk_control_that_spends_too_much_is_caught(mutant: str | None) -> None:
    """One draw each and no attack: g is the miss indicator, and the miss rate is floor(alpha (n + 1)) / (n + 1) exactly."""
    asked = asked_for(20, 1, r=0.0, calibration_draws=1)
    if mutant == "budget":
        asked = replace(asked, promise=ForgetsTheNextPoint())
    kind = CountsDrawsAtTheThreshold if mutant == "threshold" else MajorantRule
    rule = kind(OWN["exact_asymmetric"], asked, kappa=0, g=(0.0, 1.0))
    misses = attacked_misses(rule, LAWS["wide"], lambda s: s, 0.0, 4000)
    assert violated(misses, 4000, 0.1) == (mutant is not None)


class Timid(Gaussian):
    """An ``up`` that forgets half of the attack: every certificate rests on it."""

    def up(self, q: Any, epsilon: float, norm: str | None = None, shape: Any = None) -> Any:
        return super().up(q, epsilon / 2, norm, shape)


@pytest.mark.parametrize("name", ["exact", "exact_asymmetric", "rcp1"])
def test_a_noise_that_understates_the_attack_is_caught(name: str) -> None:
    asked = asked_for(120, 8, r=2.0, calibration_draws=8)
    timid = replace(asked, threat=Threat(Timid(SIGMA), asked.threat.epsilon))
    for one, caught in ((asked, False), (timid, True)):
        rule = fit(name, one, LAWS["point"], lambda s: s)
        misses = attacked_misses(rule, LAWS["point"], lambda s: s, asked.threat.epsilon, 500)
        assert violated(misses, 500, 0.1) == caught


class Generous(Exact):
    """A method whose rules calibrate at alpha: the public suite must refuse it too."""

    def fit(self, asked: Any, holdout: Any = None) -> Rule:
        return IgnoresTheHull(self, asked, kappa=2, c=2)

    def rule(self, asked: Any, transform: Any = None, **parameters: Any) -> Rule:
        return IgnoresTheHull(self, asked, **parameters)


def test_the_public_suite_catches_a_method_that_ignores_the_hull(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "exact", Generous())
    with pytest.raises(AssertionError, match=r"does not support its own threshold|covers"):
        check_method(Generous(), trials=200)


@pytest.mark.parametrize("name", [name for name, method in OWN.items() if method.certified])
def test_forgetting_the_attack_is_caught(name: str) -> None:
    """Every certified method, told that epsilon is 0 and then attacked by three standard deviations."""
    draws = {"exact": 8, "exact_asymmetric": 8, "cas": 512, "cas_test_time": 512}.get(name, 64)
    increasing = (lambda s: s) if OWN[name].compares_only else BOUNDED["smooth"]
    method = get_method(plainly(name), beta=0.02) if name.startswith("rscp_plus") else plainly(name)
    rule = fit(method, asked_for(60, draws, r=0.0), LAWS["narrow"], increasing)
    assert not violated(attacked_misses(rule, LAWS["narrow"], increasing, 0.0, 300), 300, 0.1)
    assert violated(attacked_misses(rule, LAWS["narrow"], increasing, 3 * SIGMA, 300), 300, 0.1)


# -- several things per point ------------------------------------------------------------------------------------------
#
# Few points and items that are missed all at once: what a rule forgets of the budget is then a large part of it.


class OneForTheNextPoint(MajorantRule):
    def _budget(self, points: int | float, own: float = 1.0) -> float:
        return self.asked.promise.budget(points, self.spends, 1.0, own)


class ForgetsTheQuery(OneDrawRisk):
    def _budget(self, points: int | float, own: float = 1.0) -> float:
        return float(self.spends) * points


class CountsItemsAsPoints(OneDrawRisk):
    def sample(self, items: Tally) -> Sample:
        sample = super().sample(items)
        return replace(sample, count=sample.count * several.ITEMS)


class CleanLevel(OneDrawRisk):
    @property
    def spends(self) -> Fraction:
        return self.asked.promise.level(self.asked.alpha)


def several_rule(kind: type[Any], n: int, r: float) -> Rule:
    asked = several.asked_for(n, 1, 1, r=r)
    if issubclass(kind, MajorantRule):
        up, slope = 0.2, 1e-6
        level = asked.threat.most(up)
        rise = float(asked.threat.up(level + slope) - asked.threat.up(level - slope)) / (2 * slope)
        g = (up - rise * level + 1e-6, up - rise * level + rise + 1e-6)  # the tangent at alpha', which up stays below
        return kind(ExactAsymmetric(), asked, kappa=0, g=g)
    return kind(OneDrawControl(), asked)


def several_risk(rule: Rule) -> Tensor:
    law, move = LAWS["point"], float(rule.asked.threat.epsilon)
    at_once = several.Form(Multilabel(), lambda scores: -scores[..., :1].expand_as(scores), torch.ones_like)
    return several.attacked_losses(at_once, rule, law, 1500, move)


@pytest.mark.parametrize(
    ("mutant", "real", "n", "r"),
    [
        (OneForTheNextPoint, MajorantRule, 12, 2.0),
        (ForgetsTheQuery, OneDrawRisk, 6, 0.0),
        (CountsItemsAsPoints, OneDrawRisk, 20, 0.0),
        (CleanLevel, OneDrawRisk, 60, 1.0),
    ],
)
def test_a_wrong_budget_for_several_things_is_caught(mutant: type[Any], real: type[Any], n: int, r: float) -> None:
    assert several.exceeds(several_risk(several_rule(mutant, n, r)), 0.2)
    assert not several.exceeds(several_risk(several_rule(real, n, r)), 0.2)


class Heavy(Multilabel):
    """True labels that weigh 1 each: a point may lose more than 1."""

    def items(self, outputs: Tensor, truth: Tensor, reading: Reading, u: Tensor) -> Items:
        made = super().items(outputs, truth, reading, u)
        return replace(made, weight=torch.ones_like(made.weights[0]))


def test_weights_that_sum_to_more_than_one_are_caught() -> None:
    """The mean number of labels missed, which such weights say is controlled: of four, and a fifth of that is too many."""
    form = several.Form(Heavy(), torch.neg, torch.ones_like)
    rule, law = several_rule(OneDrawRisk, 4, 0.0), LAWS["point"]
    assert several.exceeds(several.attacked_losses(form, rule, law, 1000, 0.0), 0.2 / several.ITEMS)
    with pytest.raises(AssertionError, match="weigh more than 1"):
        check_task(Heavy(), *several.points(form, LAWS["wide"], 30, 4, torch.Generator().manual_seed(0)))
