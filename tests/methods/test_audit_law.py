"""The law behind an audit's verdict: honest rules are not accused, broken ones are, and no rule can move its own null.

The worst case of ``worst.py``: scores x + SIGMA * noise, attack x + epsilon. Given the threshold the attacked
miss rate is known exactly there, so an audit is a threshold and one binomial number. An honest rule may be accused in
``VIOLATION`` of all audits; a check of that by counting has a false-alarm rate of ``LEVEL``, all of them together less
than 1e-5. Seeds are fixed.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from numpy import ndarray
from scipy import stats
from scipy.special import ndtri

from keepcover.attacks.audit import VIOLATION
from keepcover.bounds import conformal_rank, exact_level, hull_curve, hull_level, majorant
from keepcover.methods import RCP1, Exact, ExactAsymmetric, RSCPPlus, Rule, get_method
from keepcover.methods.exact import HullRule, MajorantRule
from keepcover.methods.one_draw import OneDraw
from keepcover.promises import Sample
from keepcover.scores import Draws, Items
from tests.bounds.brute import crossing, curve
from tests.methods.worst import (
    BOUNDED,
    LAWS,
    OWN,
    SIGMA,
    asked_for,
    attacked_by,
    attacked_misses,
    calibrated,
    fit,
    plainly,
    thresholds,
    violated,
)

LEVEL = 1e-7
M = 1000

# -- audits of count rules -----------------------------------------------------------------------------------------------


def accused(rule: Rule, covered: ndarray, n: int) -> int:
    """How many of the audits that saw these counts call the promise violated."""
    p_values = {int(count): rule.p_value(int(count), M, n) for count in np.unique(covered)}
    assert all(0 <= p <= 1 for p in p_values.values())
    return sum(p_values[int(count)] < VIOLATION for count in covered)


def covered_counts(rule: HullRule | MajorantRule, t: ndarray, x: ndarray, weight: ndarray, seed: int = 1) -> ndarray:
    """Covered counts of M attacked queries at each threshold; a query is ``x[j]`` with probability ``weight[j]``."""
    missed = rule.counts.missed(rule.kappa, stats.norm.cdf((x[:, None] - t) / SIGMA), rule.gamma)
    return np.random.default_rng(seed).binomial(M, 1 - np.clip(weight @ missed, 0, 1))


def hull_thresholds(rule: HullRule, x: ndarray, weight: ndarray, audits: int, seed: int = 0) -> ndarray:
    """The rule's own threshold in many audits. A (c+1)-th largest of N uniform numbers is Beta(N - c, c + 1)."""
    rng, n = np.random.default_rng(seed), rule.asked.n
    noise = ndtri(rng.beta(rule.calibration_draws - rule.c, rule.c + 1, (audits, n)))
    z = rng.choice(x, (audits, n), p=weight) + SIGMA * noise
    rank = conformal_rank(n, Fraction(rule.level))
    t = np.partition(z, rank - 1, axis=1)[:, rank - 1]
    assert t[0] == rule.threshold_of(Sample(torch.from_numpy(z[0])))
    return t


def worst_mixture(rule: HullRule, level: float) -> tuple[ndarray, ndarray]:
    """The two x, and their weights, that attain H at this level."""
    q, f, h = curve(rule.calibration_draws, rule.c, rule.test_draws, rule.kappa, rule.asked.threat.epsilon / SIGMA)
    at, i, j = crossing(f, h, float(np.interp(level, *hull_curve(rule.counts, rule.c, rule.kappa))))
    share = (at - f[i]) / (f[j] - f[i])
    return np.clip(SIGMA * stats.norm.ppf(q[[i, j]]), -5, 5), np.array([1 - share, share])


class LevelIsAlpha(HullRule):
    @property
    def level(self) -> float:
        return self.asked.alpha


class LevelDoubled(HullRule):
    @property
    def level(self) -> float:
        return 2 * hull_level(self.counts, self.c, self.kappa, self.asked.alpha, self.gamma)


class OneDrawAtAlpha(OneDraw):
    @property
    def level(self) -> float:
        return self.asked.alpha


class OneDrawDoubled(OneDraw):
    @property
    def level(self) -> float:
        return 2 * super().level


HULLS = {"1": (1, 0, 1, 0), "4": (4, 1, 4, 1), "16": (16, 4, 16, 6), "16-2": (16, 3, 2, 1)}


@pytest.mark.parametrize("n", [100, 1000])
@pytest.mark.parametrize("counts", HULLS.values(), ids=HULLS)
def test_honest_hull_rules_are_not_accused(counts: tuple[int, int, int, int], n: int) -> None:
    """2000 audits at the mixture that is worst where the audit decides: three deviations of the calibration's luck."""
    n_cal, c, n_test, kappa = counts
    rule = Exact().rule(asked_for(n, n_test, calibration_draws=n_cal), kappa=kappa, c=c)
    x, weight = worst_mixture(rule, rule.level + 3 * math.sqrt(rule.level / n))
    t = hull_thresholds(rule, x, weight, 2000)
    assert not violated(accused(rule, covered_counts(rule, t, x, weight), n), 2000, VIOLATION, LEVEL)


@pytest.mark.parametrize(
    ("mutant", "counts"),
    [
        (OneDrawAtAlpha, "1"),
        (OneDrawDoubled, "1"),
        (LevelIsAlpha, "4"),
        (LevelDoubled, "4"),
        (LevelIsAlpha, "16"),
        (LevelDoubled, "16"),
        (LevelDoubled, "16-2"),
    ],
)
def test_a_wrong_level_is_seen(mutant: type[HullRule], counts: str) -> None:
    """With 3000 calibration points coverage alone shows it in three of four audits or more; the points always do."""
    n_cal, c, n_test, kappa = HULLS[counts]
    asked = asked_for(3000, n_test, calibration_draws=n_cal)
    method = RCP1() if issubclass(mutant, OneDraw) else Exact()
    rule, honest = mutant(method, asked, kappa=kappa, c=c), method.rule(asked, kappa=kappa, c=c)
    x, weight = worst_mixture(rule, rule.level)
    t = hull_thresholds(rule, x, weight, 200)
    assert accused(rule, covered_counts(rule, t, x, weight), 3000) >= 150
    assert all(rule.p_value(k, M, 3000) == honest.p_value(k, M, 3000) for k in (700, 850, 900))
    noise = torch.randn(3000, n_cal, generator=torch.Generator().manual_seed(0))
    true = Draws(torch.from_numpy(np.random.default_rng(2).choice(x, (3000, 1), p=weight)) + SIGMA * noise)
    for one, supported in ((honest, True), (rule, False)):
        threshold, points = calibrated(one, true), Items.single(true)
        assert rule.supports(points, threshold) == honest.supports(points, threshold) == supported
    assert rule.supports(points, math.inf)


def test_kappa_or_c_changed_after_calibration_is_seen() -> None:
    """kappa decides queries, so that coverage shows it; c decides calibration, and the calibration points show it."""
    rule = Exact().rule(asked_for(1000, 16, r=0.5), kappa=6, c=4)
    x, weight = worst_mixture(rule, rule.level)
    t = hull_thresholds(rule, x, weight, 200)
    stored = replace(rule, kappa=4)
    assert accused(stored, covered_counts(stored, t, x, weight), 1000) >= 198
    noise = torch.randn(1000, 16, generator=torch.Generator().manual_seed(0))
    true = Draws(torch.from_numpy(np.random.default_rng(2).choice(x, (1000, 1), p=weight)) + SIGMA * noise)
    threshold, points = calibrated(rule, true), Items.single(true)
    assert rule.supports(points, threshold)
    assert not stored.supports(points, threshold)
    assert not replace(rule, c=2).supports(points, threshold)


@pytest.mark.parametrize("gamma", [0.25, 0.5, 0.75])
def test_a_boundary_that_forgives_everything_with_some_probability(gamma: float) -> None:
    """One draw, kappa 0: h(1) = 1 - gamma. Where alpha is above it alpha' is 1."""
    alpha = 0.8 * (1 - gamma)
    rule = Exact().rule(asked_for(1000, 1, alpha=alpha), kappa=0, gamma=gamma, c=0)
    assert rule.p_value(round(M * (1 - alpha) - 200), M, 1000) < 1e-6
    assert rule.p_value(round(M * (1 - alpha)), M, 1000) > 0.1
    trivial = Exact().rule(asked_for(1000, 1, alpha=1 - gamma + 0.01), kappa=0, gamma=gamma, c=0)
    assert trivial.level == 1
    for covered in (0, round(M * gamma) - 60, round(M * gamma), M):
        assert trivial.p_value(covered, M, 1000) == pytest.approx(stats.binom.cdf(covered, M, gamma), rel=1e-6)
    assert trivial.supports(Items.single(Draws(torch.zeros(1000, 1))), -math.inf)


# -- audits of the majorant ----------------------------------------------------------------------------------------------


def tangent_rule(n: int, n_cal: int, r: float) -> MajorantRule:
    """One draw per query and a g fitted to points that all have the q whose attacked miss rate is alpha."""
    asked = asked_for(n, 1, r, calibration_draws=n_cal)
    weights = stats.binom.pmf(np.arange(n_cal + 1), n_cal, stats.norm.cdf(stats.norm.ppf(0.1) - r))
    g, _ = majorant(weights, asked.counts, 0)
    return ExactAsymmetric().rule(asked, kappa=0, g=g.tolist())


def majorant_thresholds(rule: MajorantRule, audits: int) -> ndarray:
    """Its thresholds if every x is 0."""
    generator = torch.Generator().manual_seed(0)
    noise = SIGMA * torch.randn(audits * rule.asked.n, rule.calibration_draws, generator=generator, dtype=torch.float64)
    return thresholds(rule, rule.statistic(Draws(noise)).unflatten(0, (audits, rule.asked.n))).numpy()


@pytest.mark.parametrize(("n", "n_cal", "r"), [(100, 1, 1.0), (300, 2, 1.5), (300, 4, 0.5), (1000, 4, 2.0)])
def test_honest_majorant_rules_are_not_accused(n: int, n_cal: int, r: float) -> None:
    """Few calibration draws and strong attacks make g steep, so that one calibration point more or less decides: a beta
    law of the same mean and variance accuses up to 2 % of these rules."""
    rule = tangent_rule(n, n_cal, r)
    t = majorant_thresholds(rule, 1000)
    assert np.isfinite(t).all()
    covered = covered_counts(rule, t, np.zeros(1), np.ones(1))
    assert not violated(accused(rule, covered, n), 1000, VIOLATION, LEVEL)


@pytest.mark.parametrize("scale", [0.5, 0.9, 0.999])
def test_a_scaled_g_is_seen(scale: float) -> None:
    honest = tangent_rule(1000, 4, 0.5)
    mutant = replace(honest, g=tuple(scale * value for value in honest.g))
    true = Draws(SIGMA * torch.randn(1000, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    points = Items.single(true)
    assert honest.majorises
    assert honest.supports(points, calibrated(honest, true))
    assert not mutant.majorises
    assert not mutant.supports(points, calibrated(mutant, true))
    assert mutant.p_value(M - 1, M, 1000) == 0  # what is correct with such a g keeps every label
    if scale < 0.9:  # and the true law sees by coverage alone what the smaller g made of the threshold
        covered = covered_counts(honest, majorant_thresholds(mutant, 100), np.zeros(1), np.ones(1))
        assert accused(honest, covered, 1000) >= 99


@pytest.mark.parametrize("change", ["kappa", "threshold", "r"])
def test_what_a_majorant_rule_was_not_calibrated_for_is_seen(change: str) -> None:
    asked = asked_for(500, 4, 0.5, calibration_draws=16)
    g, _ = majorant(stats.binom.pmf(np.arange(17), 16, 0.05), asked.counts, 1)
    rule = ExactAsymmetric().rule(asked, kappa=1, g=g.tolist())
    true = Draws(SIGMA * torch.randn(500, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    t, points = calibrated(rule, true), Items.single(true)
    assert rule.supports(points, t)
    assert rule.supports(points, t + 1)
    stored = {"kappa": replace(rule, kappa=0), "threshold": rule, "r": attacked_by(rule, 0.6 * SIGMA)}[change]
    assert not stored.supports(points, t - (1e-3 if change == "threshold" else 0))


# -- every method --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [99, 100, 1000])
@pytest.mark.parametrize("name", OWN)
def test_the_null_promises_alpha_and_no_less(name: str, n: int) -> None:
    """The mean miss rate under the law is at most alpha (a conservative law of risk control may exceed it a little), and
    a coverage of 1 - alpha is never accused while one far below is."""
    rule = fit(plainly(name), asked_for(n, 1 if name == "rcp1" else 64), LAWS["wide"], BOUNDED["smooth"])
    one_query = rule.p_value(0, 1, n)
    assert one_query <= 0.1 * (1.001 if name != "exact_asymmetric" else 1.5)
    assert rule.p_value(M, M, n) == 1
    assert rule.p_value(900, M, n) > 0.1 or one_query == 0
    assert rule.p_value(500, M, n) < VIOLATION


@pytest.mark.parametrize("n", [100, 300])
@pytest.mark.parametrize("spent", [0.0, 0.002, 0.04])
def test_what_is_spent_on_monte_carlo_error_comes_back_in_the_law(n: int, spent: float) -> None:
    """RSCP+: a clean statistic above the quantile at alpha - 2 beta, or one of two bounds failing, on top of each other."""
    method = RSCPPlus("hoeffding", spent / 2, None) if spent else get_method("rscp", transform=None)
    rule = method.rule(asked_for(n, 64))
    rank = conformal_rank(n, exact_level(0.1) - 2 * exact_level(spent / 2))
    missed = stats.beta(n + 1 - rank, rank).ppf((np.arange(20_000) + 0.5) / 20_000) + spent
    for covered in (860, 900):
        expected = float(stats.binom.cdf(covered, M, 1 - np.clip(missed, 0, 1)).mean())
        assert 0.999 * expected <= rule.p_value(covered, M, n) <= 1.1 * expected + 1e-6


@pytest.mark.parametrize("name", ["cp", "cp_smoothed", "rscp"])
def test_a_doubled_level_is_seen_on_clean_data(name: str) -> None:
    """What promises clean coverage only: 0.8 instead of 0.9 is accused in 99 of 100 audits, the honest rule is not."""
    asked, method = asked_for(1000, 1, r=0.0), plainly(name)
    rng, counts = np.random.default_rng(0), {}
    for factor in (1, 2):
        rule = method.rule(replace(asked, alpha=0.1 * factor))
        t = thresholds(rule, torch.from_numpy(rng.random((200, 1000)))).numpy()
        counts[factor] = accused(method.rule(asked), rng.binomial(M, t), 1000)
    assert counts[2] >= 198
    assert not violated(counts[1], 200, VIOLATION, LEVEL)


@pytest.mark.parametrize("name", [name for name, method in OWN.items() if method.certified])
def test_forgetting_the_attack_is_seen(name: str) -> None:
    """Calibrated for epsilon 0, stored as if for three standard deviations: coverage shows it, the points do too (not for
    cas_test_time, whose threshold knows no epsilon)."""
    draws = {"exact": 8, "exact_asymmetric": 8, "cas": 512, "cas_test_time": 512}.get(name, 64)
    method = get_method(plainly(name), beta=0.02) if name.startswith("rscp_plus") else plainly(name)
    increasing = (lambda s: s) if method.compares_only else BOUNDED["smooth"]
    rule = fit(method, asked_for(60, draws, r=0.0), LAWS["narrow"], increasing)
    stored = attacked_by(rule, 3 * SIGMA)
    misses = attacked_misses(rule, LAWS["narrow"], increasing, 3 * SIGMA, 300)
    assert stored.p_value(300 - misses, 300, 60) < VIOLATION
    generator = torch.Generator().manual_seed(5)
    noise = SIGMA * torch.randn(60, rule.calibration_draws, generator=generator)
    true = Draws(increasing(LAWS["narrow"]((60, 1), generator) + noise))
    threshold, points = calibrated(rule, true), Items.single(true)
    assert rule.supports(points, threshold)
    assert stored.supports(points, threshold) == (name == "cas_test_time")
