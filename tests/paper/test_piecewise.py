"""Piecewise linear scores: smoothing against quadrature, every turn and every root."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.special import ndtr

from keepcover.paper.closed_form import HIGH, LOW, S_B, Score, Smoothed
from tests.paper.scores import Parts, expectation, mirrored, monotone_scores, odd_scores, patient, sigmas

# -- the smoothed score ------------------------------------------------------------------------------------------------


@patient
@given(st.one_of(monotone_scores(), odd_scores()), sigmas, st.integers(-60, 60))
def test_smoothing_agrees_with_quadrature(parts: Parts, sigma: float, x: int) -> None:
    """The mean, and its derivative as E[Z S(x + sigma Z)] / sigma (Stein), which shares no formula with the code."""
    score = Score(*parts)
    h = Smoothed(score, sigma)
    value = float(h(x / 100))
    assert ndtr(value) == pytest.approx(expectation(score, sigma, x / 100), abs=1e-10)
    if abs(value) < 5:
        slope = float(h.derivative(x / 100)) * math.exp(-value * value / 2) / math.sqrt(2 * math.pi)
        assert slope == pytest.approx(expectation(score, sigma, x / 100, lambda z: z) / sigma, abs=1e-8)


@patient
@given(st.one_of(monotone_scores(), odd_scores()), sigmas, st.floats(0.1, 10), st.floats(-3, 3))
def test_smoothing_knows_no_units_and_no_origin(parts: Parts, sigma: float, scale: float, shift: float) -> None:
    """Stretching and moving the line with its noise changes nothing; mirroring it changes signs."""
    score, x = Score(*parts), np.linspace(-0.5, 0.5, 11)
    values = Smoothed(score, sigma)(x)
    assume(np.abs(values).max() < 4)
    moved = Score(tuple(scale * k + shift for k in score.knots), score.before, score.after)
    np.testing.assert_allclose(Smoothed(moved, scale * sigma)(scale * x + shift), values, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(-Smoothed(mirrored(score), sigma)(-x), values, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("sigma", [0.15, 0.3, 10.0])
def test_a_step_becomes_a_line(sigma: float) -> None:
    x = np.linspace(-0.5, 0.5, 201)
    h = Smoothed(Score((0.0,), (0.0,), (1.0,)), sigma)
    np.testing.assert_allclose(h(x), x / sigma, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(h.derivative(x), 1 / sigma, rtol=1e-10)


def test_a_very_short_ramp_is_a_step() -> None:
    x = np.linspace(-0.5, 0.5, 201)
    for width in (1e-9, 1e-6):
        ramp = Score((0.0, width), (0.0, 1.0), (0.0, 1.0))
        np.testing.assert_allclose(Smoothed(ramp, 0.2)(x), x / 0.2, rtol=1e-4, atol=1e-4)


def test_shapes_are_kept() -> None:
    x = np.linspace(-1, 1, 12)
    for function in (Smoothed(S_B, 0.2), Smoothed(S_B, 0.2).derivative):
        assert function(x.reshape(3, 4)).shape == (3, 4)
        np.testing.assert_array_equal(function(x.reshape(3, 4)).ravel(), [function(float(each)) for each in x])


# -- roots -------------------------------------------------------------------------------------------------------------


@patient
@given(odd_scores(), sigmas)
def test_every_turn_is_found(parts: Parts, sigma: float) -> None:
    """On a fine grid h' changes sign where turns says, and nowhere else."""
    h = Smoothed(Score(*parts), sigma)
    x = np.linspace(-1, 1, 4001) + 1e-5
    rise = h.rise(x)
    signs = np.sign(rise) * (np.abs(rise) > 1e-12)  # far out it is the rounding of sums
    changes = x[1:][signs[1:] * signs[:-1] < 0]
    inside = [turn for turn in h.turns if abs(turn) < 1]
    assert len(changes) == len(inside)
    np.testing.assert_allclose(changes, inside, atol=6e-4)
    assert len(h.turns) in (0, 2)


@patient
@given(st.one_of(monotone_scores(), odd_scores()), sigmas, st.floats(0, 1))
def test_sublevel_sets_agree_with_a_fine_grid(parts: Parts, sigma: float, share: float) -> None:
    h = Smoothed(Score(*parts), sigma)
    x = (np.arange(2000) + 0.5) / 2000 - 0.5
    values = h(x)
    assume(np.isfinite(values).all())
    t = float(values.min() + share * (values.max() - values.min()))
    assert h.below(t, LOW, HIGH) == pytest.approx((values <= t).mean(), abs=3 / 2000)
    assert len(h.crossings(t, LOW, HIGH)) <= len(h.score.directions)


@patient
@given(odd_scores(), sigmas)
def test_no_smoothed_score_is_steeper_than_one_over_sigma(parts: Parts, sigma: float) -> None:
    """Why the certificate adds epsilon / sigma, and why 2 sigma is the least slope: monotone or not."""
    h, x = Smoothed(Score(*parts), sigma), np.linspace(-1, 1, 201)
    assert np.abs(h.derivative(x[np.abs(h(x)) < 4])).max(initial=0) <= (1 + 1e-9) / sigma
