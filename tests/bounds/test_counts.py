"""The two laws of counts: clean ones are binomial, attacked ones binomial of what the attack can reach."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from keepcover.bounds import Counts
from keepcover.bounds.counts import between
from keepcover.errors import InputError
from keepcover.noise import Gaussian, Threat
from tests.bounds.brute import counts_of

patient = settings(deadline=None, derandomize=True)


@patient
@given(st.integers(1, 40), st.data(), st.floats(-4, 4), st.floats(0, 2), st.floats(0, 1))
def test_missed_is_the_binomial_law_of_the_attacked_count(
    draws: int, data: st.DataObject, z: float, r: float, gamma: float
) -> None:
    kappa = data.draw(st.integers(0, draws - 1))
    law = stats.binom(draws, stats.norm.cdf(z + r))
    expected = law.sf(kappa + 1) + (1 - gamma) * law.pmf(kappa + 1)
    found = float(counts_of(1, draws, r).missed(kappa, stats.norm.cdf(z), gamma))
    assert found == pytest.approx(expected, rel=1e-8, abs=1e-12)
    assert found >= expected * (1 - 1e-11) - 1e-15  # what certifies is rounded upwards


@patient
@given(st.integers(1, 40), st.data(), st.floats(0, 1))
def test_clean_is_the_binomial_law_of_the_clean_count(draws: int, data: st.DataObject, q: float) -> None:
    c = data.draw(st.integers(-1, draws))
    assert float(counts_of(draws, 1, 0.7).clean(c, q)) == pytest.approx(
        stats.binom.sf(c, draws, q), rel=1e-9, abs=1e-15
    )


@patient
@given(st.integers(1, 20), st.data(), st.floats(0, 2), st.floats(0, 0.9))
def test_both_laws_rise_with_q_and_fall_with_what_is_forgiven(
    draws: int, data: st.DataObject, r: float, gamma: float
) -> None:
    kappa, counts = data.draw(st.integers(0, draws - 1)), counts_of(draws, draws, r)
    q = counts.grid()
    h = counts.missed(kappa, q, gamma)
    assert (h[0], counts.clean(kappa, q)[0], counts.clean(kappa, q)[-1]) == (0.0, 0.0, 1.0)
    assert (np.diff(h) >= 0).all()
    assert (np.diff(counts.clean(kappa, q)) >= 0).all()
    assert (counts.missed(kappa, q) >= h).all()
    assert (counts.missed(kappa + 1, q) <= h).all()
    assert (h >= counts_of(draws, draws, r / 2).missed(kappa, q, gamma) - 1e-15).all()
    assert (counts.missed(kappa, q) >= counts.clean(kappa, q) - 1e-15).all()  # an attack may do nothing


def test_tampering_lowers_what_calibration_sees() -> None:
    """A calibration point moved by up to 0.3 before its noise was drawn: down(q) in place of q, and h as it was."""
    threat, moved = Threat(Gaussian(1.0), 0.5), Threat(Gaussian(1.0), 0.3)
    plain, tampered = Counts(threat, 8, 4), Counts(threat, 8, 4, moved)
    q = tampered.grid()
    expected = stats.binom.sf(2, 8, stats.norm.cdf(stats.norm.ppf(q) - 0.3))
    np.testing.assert_allclose(tampered.clean(2, q), expected, rtol=1e-6, atol=1e-11)
    assert (tampered.clean(2, q) <= plain.clean(2, q)).all()
    assert np.array_equal(tampered.missed(1, q), plain.missed(1, q))


@pytest.mark.parametrize("finer", [2, 6, 13])
def test_a_finer_grid_refines_the_coarse_one(finer: int) -> None:
    """All of its points, both ends, and each gap in log-odds cut into so many equal parts."""
    counts = counts_of(4, 4, 0.5)
    coarse, fine = counts.grid(), counts.grid(finer)
    assert (coarse[0], coarse[-1], fine[0], fine[-1]) == (0.0, 1.0, 0.0, 1.0)
    assert (np.diff(fine) > 0).all()
    assert set(coarse) <= set(fine)
    inside = len(coarse) - 2
    assert inside * finer * 0.95 <= len(fine) <= 2 + inside * finer  # fewer only where float64 has no room
    z = np.log(fine[1:-1]) - np.log1p(-fine[1:-1])
    some = (z > -600) & (z < 20)
    assert np.diff(z[some]).max() <= np.diff(np.log(coarse[1:-1]) - np.log1p(-coarse[1:-1])).max() / finer * (1 + 1e-6)


@patient
@given(st.floats(1e-300, 0.5), st.floats(1e-6, 1), st.integers(1, 9))
def test_what_lies_between_starts_at_the_low_end_and_stays_below_the_high_one(
    low: float, gap: float, parts: int
) -> None:
    high = min(low * (1 + gap), 1 - 1e-9)
    points = between(low, high, parts)
    assert points[0] == low
    assert len(points) == parts
    assert (np.diff(points) >= 0).all()
    assert (points <= high).all()


def test_impossible_counts_are_refused() -> None:
    threat = Threat(Gaussian(1.0), 0.5)
    for draws in ((0, 1), (1, 0)):
        with pytest.raises(InputError, match="at least 1 draw"):
            Counts(threat, *draws)
    for c, kappa, words in (
        (4, 0, "c = 4 of 4"),
        (0, -1, "kappa = -1 of 3"),
        (-1, 0, "c = -1"),
        (0, 3, "kappa = 3 of 3"),
    ):
        with pytest.raises(InputError, match=words):
            Counts(threat, 4, 3).check(c, kappa)


def test_counts_under_equal_threats_are_one_key() -> None:
    """Bounds are cached by them."""
    assert hash(counts_of(4, 2, 0.5)) == hash(counts_of(4, 2, 0.5))
    assert len({counts_of(4, 2, 0.5), counts_of(4, 2, 0.5), counts_of(4, 2, 0.25), counts_of(2, 4, 0.5)}) == 3
