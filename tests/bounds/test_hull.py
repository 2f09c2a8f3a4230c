"""The hull certificate against closed forms, golden values and hulls computed by brute force."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from keepcover.bounds import Counts, hull_bracket, hull_curve, hull_level, hull_levels
from keepcover.errors import InputError
from keepcover.noise import Gaussian, Threat
from tests.bounds.brute import counts_of, crossing, curve

patient = settings(deadline=None, derandomize=True)


def level_of(
    calibration_draws: int, c: int, draws: int, kappa: int, r: float, alpha: float, gamma: float = 0.0
) -> float:
    return hull_level(counts_of(calibration_draws, draws, r), c, kappa, alpha, gamma)


RULES = [
    (1, 0, 1, 0, 0.5, 0.1, 0.0),
    (2, 0, 2, 0, 0.5, 0.1, 0.0),
    (4, 1, 4, 1, 0.5, 0.1, 0.0),
    (4, 1, 4, 2, 1.0, 0.1, 0.5),
    (8, 1, 8, 2, 0.25, 0.05, 0.25),
    (16, 4, 16, 7, 0.5, 0.1, 0.0),
    (16, 8, 2, 1, 1.0, 0.2, 0.0),
    (64, 20, 1, 0, 0.5, 0.1, 0.75),
    (32, 3, 32, 12, 1.0, 0.01, 0.0),
    (256, 60, 256, 120, 0.5, 0.1, 0.0),
    (4096, 1500, 4096, 2270, 0.5, 0.1, 0.0),
    (4096, 40, 64, 2, 0.5, 0.1, 0.0),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_hull_level_is_just_below_the_brute_force_hull(rule: tuple) -> None:
    *counts, r, alpha, gamma = rule
    _, f, h = curve(*counts, r, gamma)
    brute, _, _ = crossing(f, h, alpha)
    level = level_of(*counts, r, alpha, gamma)
    assert brute * (1 - 1e-3) <= level <= brute


def test_golden_hull_levels(golden_folder: Path) -> None:
    """Within 1e-4 from below and, up to the rounding of the golden value itself, never above."""
    for row in json.loads((golden_folder / "exact.json").read_text())["rows"]:
        level = level_of(row["n_cal"], row["c"], row["n_test"], row["kappa"], row["r"], row["alpha"])
        assert row["alpha_prime"] * (1 - 1e-4) <= level <= row["alpha_prime"] * (1 + 1e-9), row


@settings(patient, max_examples=40)
@given(st.floats(0.001, 0.5), st.floats(0.05, 3))
def test_one_draw_has_a_closed_form(alpha: float, r: float) -> None:
    exact = stats.norm.cdf(stats.norm.ppf(alpha) - r)
    assert exact * (1 - 1e-4) <= level_of(1, 0, 1, 0, r, alpha) <= exact


@settings(patient, max_examples=40)
@given(st.integers(1, 16), st.data(), st.floats(0.05, 1.5), st.floats(0, 0.5), st.floats(0.02, 0.4))
def test_hull_level_falls_with_the_radius_and_rises_with_alpha(
    draws: int, data: st.DataObject, r: float, more: float, alpha: float
) -> None:
    """Up to the relative accuracy of 1e-4 that each value has; and it is never above alpha when c >= kappa."""
    c, kappa = data.draw(st.integers(0, draws - 1)), data.draw(st.integers(0, draws - 1))
    level = level_of(draws, c, draws, kappa, r, alpha)
    assert level_of(draws, c, draws, kappa, r + more, alpha) <= level * (1 + 2e-4) + 1e-300
    assert level_of(draws, c, draws, kappa, r, alpha / 2) <= level * (1 + 2e-4) + 1e-300
    if c >= kappa:
        assert level <= alpha


def test_without_an_attack_nothing_is_paid() -> None:
    for draws, c in ((1, 0), (4, 1), (64, 20)):
        assert 0.0999 <= level_of(draws, c, draws, c, 0.0, 0.1) <= 0.1


def test_tampering_is_an_attack_on_the_other_side() -> None:
    """One draw: f(q) = down(q), so that alpha' = Phi(Phi^-1(alpha) - r - tampering), as if the attack were longer."""
    threat = Threat(Gaussian(1.0), 0.5)
    tampered = hull_level(Counts(threat, 1, 1, Threat(Gaussian(1.0), 0.3)), 0, 0, 0.1)
    exact = stats.norm.cdf(stats.norm.ppf(0.1) - 0.8)
    assert exact * (1 - 2e-4) <= tampered <= exact
    for counts in ((4, 4), (16, 2)):
        plain = hull_level(Counts(threat, *counts), 1, 1, 0.1)
        assert hull_level(Counts(threat, *counts, Threat(Gaussian(1.0), 0.3)), 1, 1, 0.1) < plain


@pytest.mark.parametrize("r", [10.0, 30.0, 40.0, 60.0, 1000.0])
def test_a_hopeless_radius_certifies_nothing(r: float) -> None:
    assert 0 <= level_of(4, 1, 4, 1, r, 0.1) < 1e-8


@pytest.mark.parametrize("rule", [(64, 60, 64, 0), (64, 63, 64, 0), (256, 250, 256, 1)], ids=str)
def test_a_hopeless_rule_is_settled_quickly(rule: tuple[int, int, int, int]) -> None:
    """alpha' is around 1e-200 here; whatever is said, it is said within five seconds and is no more than nothing."""

    def give_up(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"the hull of {rule} was still being refined")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, 5.0)
    try:
        assert 0 <= level_of(*rule, 0.5, 0.1) < 1e-12
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("gamma", [0.0, 0.5])
@pytest.mark.parametrize("draws", [(4, 4), (16, 2), (64, 64)])
def test_the_batch_of_levels_is_close_to_the_certified_ones(draws: tuple[int, int], gamma: float) -> None:
    n_cal, n_test = draws
    counts = counts_of(n_cal, n_test, 0.5)
    c, kappa = (
        grid.ravel()
        for grid in np.meshgrid(np.arange(0, n_cal, 1 + n_cal // 16), np.arange(0, n_test, 1 + n_test // 8))
    )
    batch = hull_levels(counts, c, kappa, 0.1, gamma)
    useful = batch > 1e-3
    single = [hull_level(counts, int(a), int(b), 0.1, gamma) for a, b in zip(c[useful], kappa[useful])]
    assert len(single) >= 2
    np.testing.assert_allclose(batch[useful], single, rtol=0.03)


HULLS = {"1": (1, 0, 1, 0), "4": (4, 1, 4, 1), "16": (16, 4, 16, 6), "16-2": (16, 3, 2, 1)}


@pytest.mark.parametrize("counts", HULLS.values(), ids=HULLS)
@pytest.mark.parametrize("r", [0.0, 0.5, 1.0])
def test_no_correct_level_exceeds_the_bracket(counts: tuple[int, int, int, int], r: float) -> None:
    n_cal, c, n_test, kappa = counts
    low, high = hull_bracket(counts_of(n_cal, n_test, r), c, kappa, 0.1)
    _, f, h = curve(*counts, r)
    assert low <= crossing(f, h, 0.1)[0] <= high * (1 + 1e-3)
    assert low <= high <= low * (1 + 2e-4)
    assert stats.norm.cdf(stats.norm.ppf(0.1) - r) <= hull_bracket(counts_of(1, 1, r), 0, 0, 0.1)[1]


@pytest.mark.parametrize("counts", HULLS.values(), ids=HULLS)
def test_the_curve_is_a_concave_bound_of_every_point(counts: tuple[int, int, int, int]) -> None:
    """Above (f(q), h(q)) for every q of a dense sample, concave, and close: within 2 % of the hull where alpha lives."""
    n_cal, c, n_test, kappa = counts
    a, height = hull_curve(counts_of(n_cal, n_test, 0.5), c, kappa)
    _, f, h = curve(*counts, 0.5)
    assert (np.interp(f, a, height) >= h - 1e-12).all()
    assert (np.diff(a) > 0).all()
    assert (np.diff(np.diff(height) / np.diff(a)) <= 1e-9).all()
    brute, _, _ = crossing(f, h, 0.1)
    assert 0.1 * (1 - 1e-3) <= float(np.interp(brute, a, height)) <= 0.102


@pytest.mark.parametrize("gamma", [0.25, 0.5, 0.75])
def test_a_boundary_that_forgives_everything_with_some_probability(gamma: float) -> None:
    """One draw, kappa 0: h(1) = 1 - gamma. H ends there, not at 1, and where alpha is above it alpha' is 1."""
    counts = counts_of(1, 1, 0.5)
    assert hull_curve(counts, 0, 0, gamma)[1][-1] == pytest.approx(1 - gamma)
    assert hull_bracket(counts, 0, 0, 1 - gamma + 0.01, gamma) == (1.0, 1.0)
    assert hull_level(counts, 0, 0, 1 - gamma - 0.01, gamma) < 1


def test_bad_rules_and_levels_are_refused() -> None:
    with pytest.raises(InputError, match="c = 4 of 4"):
        level_of(4, 4, 4, 0, 0.5, 0.1)
    with pytest.raises(InputError, match="kappa = -1 of 4"):
        level_of(4, 0, 4, -1, 0.5, 0.1)
    for alpha in (0.0, 1.0, math.nan):
        with pytest.raises(InputError, match="0 < alpha < 1"):
            level_of(4, 0, 4, 0, 0.5, alpha)
