"""Rules broken on purpose. The checks that the real rules pass must catch every one of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from fractions import Fraction
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy import ndarray
from scipy import stats
from torch import Tensor

from keepcover.bounds.bounds import bernstein, clopper_pearson, gaussian_shift, hoeffding, majorant, majorant_gap
from keepcover.guarantee import conformal_quantile
from keepcover.methods import (
    CAS,
    METHODS,
    BinCP,
    BinCPSharp,
    Exact,
    RSCPPlusBernstein,
    RSCPPlusHoeffding,
    Setting,
    SplitCP,
)
from keepcover.scores.draws import Draws

from .test_bounds import bimodal_weights, crossing, curve
from .test_guarantees import (
    BOUNDED,
    LAWS,
    SIGMA,
    attacked_misses,
    clean_exceedances,
    fit,
    overestimated_attacks,
    overestimated_shares,
    overestimates,
    setting_for,
    two_points,
    underestimated_means,
    violated,
    with_level,
)
from .test_methods import golden_draws

# -- RSCP+ -------------------------------------------------------------------------------------------------------------


class ForgetsTwoBeta(RSCPPlusHoeffding):
    def threshold(self, statistic: Tensor) -> float:
        tau = conformal_quantile(statistic, self.setting.alpha)
        return float(
            gaussian_shift(min(tau + hoeffding(self.calibration_draws, self.setting.beta), 1.0), self.setting.r)
        )


class MisalignsBernstein(RSCPPlusBernstein):
    def test_statistic(self, draws: Draws, v: Tensor | None = None) -> Tensor:
        return draws.mean - bernstein(draws.variance.roll(1, dims=0), draws.count, self.setting.beta)


def test_forgetting_two_beta_is_caught() -> None:
    rule = ForgetsTwoBeta(setting_for(99, 4, r=0.0, beta=0.04))
    assert violated(clean_exceedances(rule, 1500), 1500, 0.1 - 2 * 0.04)


def test_misaligned_bernstein_bounds_are_caught() -> None:
    rule = MisalignsBernstein(setting_for(99, 1024, beta=0.04))
    assert violated(overestimates(rule, 2000), 2000, 0.04)


@pytest.mark.parametrize(
    ("method", "caught"),
    [(RSCPPlusHoeffding, False), (ForgetsTwoBeta, True), (RSCPPlusBernstein, False), (MisalignsBernstein, True)],
)
@pytest.mark.parametrize("score", ["hps", "aps", "raps", "ptt_hps"])
def test_golden_values_catch_both(
    method: type[RSCPPlusHoeffding], caught: bool, score: str, golden_folder: Path
) -> None:
    """The threshold (at r = 0 it is tau_plus + b_H) and the statistics of the golden example, real rule and mutant."""
    golden = json.loads((golden_folder / "core.json").read_text())
    expected, draws, labels = golden["expected"][score], golden_draws(golden, score), torch.tensor(golden["labels"])
    rule = method(Setting(golden["alpha"], 0.0, 1.0, 64, 40, 5, beta=golden["beta"]))
    tau = rule.threshold(rule.calibration_statistic(draws[:40].of_label(labels[:40]))) - golden["hoeffding"]
    radius = torch.tensor(expected["mean"], dtype=torch.float64) - rule.test_statistic(draws)
    bound = expected["bernstein"] if isinstance(rule, RSCPPlusBernstein) else np.full((60, 5), golden["hoeffding"])
    same = abs(tau - expected["tau_plus"]) < 1e-9 and np.allclose(radius.numpy(), bound, rtol=1e-9)
    assert same != caught


# -- BinCP and CAS -----------------------------------------------------------------------------------------------------


class ForgetsTheUpperBound(BinCP):
    """Compares the share of test draws itself with the attacked lower bound."""

    def allowed(self, above: int) -> int:
        count = np.arange(self.test_draws + 1)
        kept = 1 - count / self.test_draws >= gaussian_shift(self.lower(above), -self.setting.r)
        return int(count[kept].max())


class ForgetsTheUpperBoundSharply(BinCPSharp):
    allowed = ForgetsTheUpperBound.allowed


class ForgetsTheLowerBound(BinCP):
    def lower(self, above: int) -> float:
        return 1 - above / self.calibration_draws


class TakesTheDrawBelow(BinCP):
    """Bounds m successes and takes the (m-1)-th smallest draw."""

    def calibration_statistic(self, true: Draws) -> Tensor:
        return true.largest(self.c + 2)


class Interpolates(BinCP):
    """Takes an interpolated quantile and bounds p N successes, whole or not, as the authors' code does."""

    def lower(self, above: int) -> float:
        return float(clopper_pearson(self.p * self.calibration_draws, self.calibration_draws, self.level)[0])

    def calibration_statistic(self, true: Draws) -> Tensor:
        return true.values.quantile(self.p, dim=-1)


class ForgetsTheCdfBound(CAS):
    """Shifts the empirical cdf as if it were the cdf."""

    def calibration_statistic(self, true: Draws) -> Tensor:
        cdf = np.arange(true.count + 1) / true.count
        weight = torch.as_tensor(gaussian_shift(1 - cdf, -self.setting.r))
        return true.ascending @ (weight[:-1] - weight[1:]).flip(0) - 1


class ForgetsTheMonteCarloError(CAS):
    def test_statistic(self, draws: Draws, v: Tensor | None = None) -> Tensor:
        return draws.mean - 1


@pytest.mark.parametrize(
    ("method", "caught"),
    [(BinCP, False), (BinCPSharp, False), (ForgetsTheUpperBound, True), (ForgetsTheUpperBoundSharply, True)],
)
def test_trusting_the_share_of_test_draws_is_caught(method: type[BinCP], caught: bool) -> None:
    rule = method(setting_for(120, 64, r=2.0), p=0.2)
    misses = attacked_misses(rule, LAWS["point"], lambda s: s, rule.setting.epsilon, 300)
    assert violated(misses, 300, 0.1) == caught


@pytest.mark.parametrize(
    ("method", "caught"), [(BinCP, False), (ForgetsTheLowerBound, True), (TakesTheDrawBelow, True)]
)
def test_a_wrong_bound_of_the_share_is_caught(method: type[BinCP], caught: bool) -> None:
    rule = with_level(method, 0.1)
    assert violated(overestimated_shares(rule, 20_000), 20_000, 0.05) == caught


@pytest.mark.parametrize(("method", "caught"), [(BinCP, False), (Interpolates, True)])
def test_interpolating_a_points_quantile_is_caught(method: type[BinCP], caught: bool) -> None:
    """Scores whose gaps shrink upwards make interpolation worst: it lies hardly above the 25th of 32 draws."""
    rule = with_level(method, 0.002, 32)
    misses = overestimated_shares(rule, 200_000, lambda u: -torch.exp(-700 * u))
    assert violated(misses, 200_000, 0.001) == caught


@pytest.mark.parametrize(("draws", "times"), [(64, 1.34), (32, 3.28)])
def test_what_interpolating_costs_at_the_published_level(draws: int, times: float) -> None:
    """The order statistic below it has this many times level / 2 to fall short of the bound of p N successes."""
    rule = Interpolates(Setting(0.1, 0.125, 0.25, draws, 4750, 10))
    below = math.floor(1 + rule.p * (draws - 1))
    short = stats.beta.cdf(rule.lower(rule.c), below, draws + 1 - below)
    assert short / (rule.level / 2) == pytest.approx(times, rel=0.01)
    ours = BinCP(rule.setting)
    m = draws - ours.c
    assert stats.beta.cdf(ours.lower(ours.c), m, draws + 1 - m) <= ours.level / 2 * (1 + 1e-9)


@pytest.mark.parametrize("shape", ["smooth", "step"])
def test_a_cdf_without_its_bound_is_caught(shape: str) -> None:
    rule = with_level(ForgetsTheCdfBound, 0.05)
    assert violated(overestimated_attacks(rule, shape, 5000), 5000, 0.05)


def test_a_mean_without_its_bound_is_caught() -> None:
    rule = with_level(ForgetsTheMonteCarloError, 0.05)
    assert violated(underestimated_means(rule, 5000), 5000, 0.1)


# -- the conformal quantile --------------------------------------------------------------------------------------------


def interpolated(scores: ndarray, alpha: float) -> float:
    return float(np.quantile(scores, min((1 - alpha) * (1 + 1 / len(scores)), 1.0)))


def interpolated_plainly(scores: ndarray, alpha: float) -> float:
    return float(np.quantile(scores, 1 - alpha))


def floored(scores: ndarray, alpha: float) -> float:
    return float(np.sort(scores)[math.floor((len(scores) + 1) * (1 - Fraction(str(alpha)))) - 1])


def exact(scores: ndarray, alpha: float) -> float:
    return SplitCP(Setting(alpha, 0.0, 0.0, 1, len(scores), 2)).threshold(torch.from_numpy(scores))


@pytest.mark.parametrize(
    ("quantile", "caught"), [(exact, False), (interpolated, True), (interpolated_plainly, True), (floored, True)]
)
def test_wrong_quantiles_under_cover(quantile: Callable[[ndarray, float], float], caught: bool) -> None:
    """At n = 20, alpha = 0.1 the right rank is 19; scores whose gaps shrink upwards make interpolation worst."""
    u = np.random.default_rng(0).random((4000, 21))
    scores = -np.exp(-700 * u)
    misses = sum(row[20] > quantile(row[:20], 0.1) for row in scores)
    assert violated(misses, 4000, 0.1) == caught


# -- the exact certificates --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["exact", "rcp1"])
def test_shared_noise_is_caught(name: str) -> None:
    """One noise bank for all images: calibration and test move together, and the attack alone decides."""
    setting = setting_for(120, 8)
    rule = fit(name, setting, LAWS["point"], lambda s: s)
    honest = attacked_misses(rule, LAWS["point"], lambda s: s, setting.epsilon, 800)
    shared = attacked_misses(rule, LAWS["point"], lambda s: s, setting.epsilon, 800, shared_noise=True)
    assert not violated(honest, 800, setting.alpha)
    assert violated(shared, 800, setting.alpha)


def hull_from(smallest: float, counts: tuple[int, int, int, int], r: float, alpha: float) -> float:
    """alpha' from a grid of q that starts at ``smallest``."""
    q, f, h = curve(*counts, r)
    return crossing(f[q >= smallest], h[q >= smallest], alpha)[0]


class GridAboveZero(Exact):
    @cached_property
    def level(self) -> float:
        s = self.setting
        return hull_from(0.02, (self.calibration_draws, self.c, self.test_draws, self.kappa), s.r, s.alpha)


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


@pytest.mark.parametrize(("method", "caught"), [(Exact, False), (GridAboveZero, True)])
def test_a_grid_that_starts_above_zero_breaks_the_promise(method: type[Exact], caught: bool) -> None:
    """The hull of this rule is the diagonal, from q = 0 to q = 1: a fifth of hopeless points is a fifth of misses."""
    rule = method(setting_for(200, 8), kappa=2, c=0)
    misses = attacked_misses(rule, two_points(-5.0, 5.0, 0.18), lambda s: s, rule.setting.epsilon, 1000)
    assert violated(misses, 1000, 0.1) == caught


class IgnoresTheHull(Exact):
    """Uses alpha itself, as if the clean count rule were all there is."""

    @property
    def level(self) -> float:
        return self.setting.alpha


@pytest.mark.parametrize("r", [0.5, 1.0])
def test_calibrating_at_alpha_is_caught(r: float) -> None:
    rule = IgnoresTheHull(setting_for(120, 8, r), kappa=2, c=2)
    assert violated(attacked_misses(rule, LAWS["point"], lambda s: s, rule.setting.epsilon, 1000), 1000, 0.1)


def test_a_majorant_that_is_too_small_is_caught() -> None:
    g, _ = majorant(bimodal_weights(16), 1, 0, 0.5)
    assert majorant_gap(g, 1, 0, 0.5) <= 0
    assert majorant_gap(g - 0.01, 1, 0, 0.5) > 0
    assert majorant_gap(np.append(g[1:], g[-1]) - g[1] + g[0], 1, 0, 0.5) > 0  # off by one count


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.certified])
def test_forgetting_the_attack_is_caught(name: str) -> None:
    """Every certified method, told that epsilon is 0 and then attacked by three standard deviations."""
    setting = setting_for(
        60, {"exact": 8, "exact_asymmetric": 8, "cas": 512, "cas_test_time": 512}.get(name, 64), r=0.0, beta=0.02
    )
    increasing = (lambda s: s) if METHODS[name].compares_only else BOUNDED["smooth"]
    rule = fit(name, setting, LAWS["narrow"], increasing)
    assert not violated(attacked_misses(rule, LAWS["narrow"], increasing, 0.0, 300), 300, 0.1)
    assert violated(attacked_misses(rule, LAWS["narrow"], increasing, 3 * SIGMA, 300), 300, 0.1)
