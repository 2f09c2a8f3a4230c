"""Appendix B of the paper: printed digits, the paper's formulas in thirty digits, quadrature, limits, optimality."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import mpmath as mp
import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from matplotlib import pyplot
from numpy import ndarray
from scipy.special import expit, ndtri

from keepcover.errors import InputError
from keepcover.noise import Gaussian
from keepcover.pages import plots
from keepcover.paper import closed_form
from keepcover.paper.closed_form import (
    HIGH,
    HPS,
    LOW,
    MIDDLE,
    S_B,
    S_B_PTT,
    Score,
    Smoothed,
    as_printed,
    cdf,
    density,
    failure_case,
    hps_after_ptt,
    mean_size,
    one_dimensional,
    sigmoid_cdf,
    threshold,
)
from keepcover.scores.transforms import sigmoid
from tests.paper.scores import Parts, expectation, monotone_scores, patient, sigmas, values

alphas = st.sampled_from([0.01, 0.1, 0.3, 0.5, 0.9])

UPSIDE_DOWN = Score(knots=(-0.5, 0.5), before=(0.5, 0.0), after=(1.0, 0.5))
"""1 - S_b, which rises, falls and rises."""


# -- the printed tables ------------------------------------------------------------------------------------------------

PINNED_1D = [
    (0.01, "HPS", "0.07916", "7.95%", "0.98", "0.08"),
    (0.01, "PTT", "0.02", "2.00%", "0.92", "0.02"),
    (0.001, "HPS", "0.2503", "10.00%", "1.15", "0.25"),
    (0.001, "PTT", "0.02", "2.00%", "0.92", "0.02"),
    (0.0001, "HPS", "0.7916", "10.00%", "1.62", "0.72"),
    (0.0001, "PTT", "0.02", "2.00%", "0.92", "0.02"),
]
PINNED_FAILURE = [
    (0.1, "S_b", "-0.620", "0.512", "0.012"),
    (0.1, "PTT", "-1.250", "0.504", "0.004"),
    (0.2, "S_b", "-0.464", "0.529", "0.029"),
    (0.2, "PTT", "-0.536", "0.511", "0.011"),
    (0.3, "S_b", "-0.302", "0.525", "0.025"),
    (0.3, "PTT", "-0.169", "0.529", "0.029"),
]


def test_the_one_dimensional_table() -> None:
    columns = ("slope_times_r", "coverage_gap", "size", "conservativeness")
    rows = one_dimensional()
    assert [(row["variance"], row["score"]) for row in rows] == [pinned[:2] for pinned in PINNED_1D]
    for row, (_, _, *texts) in zip(rows, PINNED_1D, strict=True):
        assert [as_printed(row[column], text) for column, text in zip(columns, texts, strict=True)] == texts


def test_the_failure_table() -> None:
    columns = ("tau", "size", "conservativeness")
    rows = failure_case()
    assert [(row["sigma"], row["score"]) for row in rows] == [pinned[:2] for pinned in PINNED_FAILURE]
    for row, (_, _, *texts) in zip(rows, PINNED_FAILURE, strict=True):
        assert [as_printed(row[column], text) for column, text in zip(columns, texts, strict=True)] == texts


def test_printed_digits_that_differ_are_named_and_no_others() -> None:
    """One gap and one tau; and the changes of size, which the paper takes from sizes already rounded."""
    assert [row["differs"] for row in one_dimensional()] == [
        "coverage_gap: computed 7.95%, printed 7.98%",
        "size_change: computed -6.08%, printed -6.12%",
        None,
        "size_change: computed -20.08%, printed -20.00%",
        None,
        "size_change: computed -43.14%, printed -43.21%",
    ]
    assert [row["differs"] for row in failure_case()] == [
        None,
        "tau: computed -1.250, printed -1.245",
        None,
        None,
        None,
        None,
    ]


def test_printed_changes_of_size_are_those_of_rounded_sizes() -> None:
    for hps, ptt in zip(*[iter(one_dimensional())] * 2, strict=True):
        rounded = float(ptt["paper"]["size"]) / float(hps["paper"]["size"]) - 1
        assert as_printed(rounded, "-0.00%") == ptt["paper"]["size_change"]


def test_rows_are_plain_and_other_settings_have_no_printed_values() -> None:
    rows = one_dimensional() + failure_case()
    assert json.loads(json.dumps(rows)) == rows
    assert {key for row in rows for key in row["paper"]} <= set(rows[1]) | set(rows[-1])
    others = [
        *one_dimensional(0.01, 0.1, [0.02]),
        *one_dimensional(0.02, 0.1, [0.01]),
        *one_dimensional(0.01, 0.2, [0.01]),
        *failure_case(0.01, 0.5, [0.15]),
        *failure_case(0.02, 0.5, [0.1]),
        *failure_case(0.01, 0.4, [0.1]),
    ]
    assert all(row["paper"] is None and row["differs"] is None for row in others)


# -- the paper's formulas in thirty digits -----------------------------------------------------------------------------


def normal_quantile(p: Any) -> Any:
    return mp.sqrt(2) * mp.erfinv(2 * p - 1)


def printed_formula(name: str, x: Any, s: Any) -> Any:
    """E S(x + delta) as the paper's Appendix B writes it out, for every score."""
    half, Phi = mp.mpf("0.5"), mp.ncdf
    ramp = s / mp.sqrt(2 * mp.pi) * (mp.exp(-((x + half) ** 2) / (2 * s**2)) - mp.exp(-((x - half) ** 2) / (2 * s**2)))
    ramp += (x + half) * (Phi((half - x) / s) - Phi((-half - x) / s))
    return {
        "HPS": lambda: ramp + Phi((x - half) / s),
        "S_b": lambda: ramp + Phi((x - half) / s) / 2 + Phi((-x - half) / s) / 2,
        "PTT": lambda: Phi((-x - half) / s) + Phi((half - x) / s) - Phi(-x / s),
    }[name]()


def test_hps_rows_agree_with_the_theorem_to_twelve_digits() -> None:
    with mp.workdps(30):
        epsilon, alpha = mp.mpf("0.01"), mp.mpf("0.1")
        for row in [row for row in one_dimensional() if row["score"] == "HPS"]:
            s = mp.sqrt(mp.mpf(repr(row["variance"])))
            tau = normal_quantile(printed_formula("HPS", -alpha / 2, s))
            middle = mp.ncdf((0.5 + alpha / 2) / s) - mp.ncdf((-0.5 + alpha / 2) / s)
            level = mp.ncdf(tau + epsilon / s)
            edge = mp.findroot(lambda x, s=s, q=level: printed_formula("HPS", x, s) - q, (-0.49, 0.49), "anderson")
            expected = {
                "tau": tau,
                "slope_times_r": 2 * mp.npdf(tau) / middle * epsilon / s,
                "coverage_gap": alpha + min(2 * edge + 1, 1) - 1,
                "size": 2 * edge + 1,
                "conservativeness": 2 * edge + alpha,
            }
            for key, value in expected.items():
                assert row[key] == pytest.approx(float(value), rel=1e-12), key


@pytest.mark.parametrize(("sigma", "error"), [(0.1, 1e-12), (0.2, 1e-12), (0.3, 1e-12), (1.0, 1e-12), (10.0, 1e-9)])
@pytest.mark.parametrize(("name", "score"), [("S_b", S_B), ("PTT", S_B_PTT)])
def test_failure_rows_solve_the_papers_equations(name: str, score: Score, sigma: float, error: float) -> None:
    """Crossings are polished in thirty digits at the row's tau; the lengths between them must give level and size."""
    (row,) = [row for row in failure_case(sigmas=[sigma]) if row["score"] == name]
    h = Smoothed(score, sigma)

    def length(t: Any, high: float) -> Any:
        equation = lambda x: printed_formula(name, x, mp.mpf(repr(sigma))) - mp.ncdf(t)  # noqa: E731
        roots = [mp.findroot(equation, (x, x + 1e-6)) for x in h.crossings(float(t), LOW, high)]
        ends = [mp.mpf(LOW), *roots, mp.mpf(high)]
        return sum(b - a for a, b in pairwise(ends) if equation((a + b) / 2) < 0)

    with mp.workdps(30):
        inflated = mp.mpf(row["tau"]) + mp.mpf("0.01")
        assert float(2 * length(row["tau"], MIDDLE)) == pytest.approx(0.5, abs=error)
        assert float(2 * length(inflated, HIGH)) == pytest.approx(row["size"], abs=error)
        assert float(2 * length(inflated, MIDDLE)) - 0.5 == pytest.approx(row["coverage_gap"], abs=error)


# -- the scores and their law -----------------------------------------------------------------------------------------


def test_ptt_scores_are_thresholded_scores() -> None:
    x = np.linspace(-0.499, 0.499, 1000)  # 0 is not among them
    np.testing.assert_array_equal(values(S_B_PTT, x), values(S_B, x) > 0.5)
    np.testing.assert_array_equal(values(hps_after_ptt(0.1), x), values(HPS, x) > 0.45)
    steep = sigmoid(torch.from_numpy(values(HPS, x)), b=0.45, T=1e-5).numpy()
    np.testing.assert_allclose(values(hps_after_ptt(0.1), x), steep, atol=1e-9)


def test_the_washed_out_middle_has_no_turns() -> None:
    """h' at 0 is positive iff exp(-1 / (8 sigma^2)) < 1/2; beyond, PTT of the failure case only falls."""
    critical = math.sqrt(1 / (8 * math.log(2)))
    assert len(Smoothed(S_B_PTT, critical * (1 - 1e-9)).turns) == 2
    assert Smoothed(S_B_PTT, critical * (1 + 1e-9)).turns == ()
    (_, ptt) = failure_case(sigmas=[0.5])
    # The smallest scores are then those of inputs near 1/2: the set is large before it is inflated, not because of it.
    assert ptt["size"] - ptt["conservativeness"] == pytest.approx(1.5, abs=1e-12)
    assert 0 < ptt["conservativeness"] < 0.05


@pytest.mark.parametrize("score", [HPS, S_B, S_B_PTT, UPSIDE_DOWN, hps_after_ptt(0.1)])
@pytest.mark.parametrize("sigma", [0.1, 0.2, 0.3, 0.43, 1.0])
@pytest.mark.parametrize("alpha", [0.05, 0.5, 0.8])
def test_thresholds_are_quantiles_and_densities_derivatives(score: Score, sigma: float, alpha: float) -> None:
    h = Smoothed(score, sigma)
    tau = threshold(h, alpha)
    assert cdf(h, tau) == pytest.approx(1 - alpha, abs=1e-10)
    slope, step = density(h, tau), 1e-5 * max(1, abs(tau))
    numeric = (cdf(h, tau + step) - cdf(h, tau - step)) / (2 * step)
    assert slope == pytest.approx(numeric, rel=1e-3)


def test_the_cdf_runs_from_zero_to_one() -> None:
    for score in (HPS, S_B, S_B_PTT):
        h = Smoothed(score, 0.25)
        assert (cdf(h, -10.0), cdf(h, 10.0), mean_size(h, -10.0), mean_size(h, 10.0)) == (0, 1, 0, 2)
        values = [cdf(h, float(t)) for t in np.linspace(-2, 2, 81)]
        assert all(a <= b for a, b in pairwise(values))


# -- limits and invariances --------------------------------------------------------------------------------------------


def test_without_an_attack_nothing_is_lost() -> None:
    for row in one_dimensional(epsilon=0.0) + failure_case(r=0.0):
        for key in ("slope_times_r", "coverage_gap", "conservativeness"):
            assert row[key] == pytest.approx(0, abs=1e-12)


def test_the_gap_is_the_slope_times_r_to_first_order() -> None:
    for row in one_dimensional(epsilon=1e-7) + failure_case(r=1e-6):
        assert row["coverage_gap"] == pytest.approx(row["slope_times_r"], rel=1e-4)
        assert row["conservativeness"] == pytest.approx(row["slope_times_r"], rel=1e-4)


def test_little_noise_makes_hps_useless_and_leaves_ptt_alone() -> None:
    hps, ptt = one_dimensional(variances=[1e-5])
    assert (hps["size"], hps["coverage_gap"]) == (2, pytest.approx(0.1, abs=1e-12))
    assert hps["tau"] == pytest.approx(float(ndtri(0.45)), abs=1e-12)  # h is then Phi^-1 of the score itself
    assert ptt["size"] == pytest.approx(0.92, abs=1e-12)


@pytest.mark.parametrize("epsilon", [0.001, 0.01, 0.04])
@pytest.mark.parametrize("alpha", [0.1, 0.3])
@pytest.mark.parametrize("sigma", [0.01, 0.03, 0.5, 10.0])
def test_ptt_pays_two_epsilon_whatever_the_noise(epsilon: float, alpha: float, sigma: float) -> None:
    _, ptt = one_dimensional(epsilon, alpha, [sigma**2])
    assert ptt["slope_times_r"] == pytest.approx(2 * epsilon, rel=1e-12)
    assert ptt["coverage_gap"] == pytest.approx(2 * epsilon, abs=1e-12)
    assert ptt["size"] == pytest.approx(1 - alpha + 2 * epsilon, abs=1e-12)


def test_much_noise_brings_hps_to_ptt() -> None:
    """Far from its bends HPS looks like one step: its slope tends to the least one from above."""
    slopes = [one_dimensional(variances=[sigma**2])[0]["slope_times_r"] for sigma in (0.1, 0.3, 1.0, 3.0, 10.0)]
    assert all(a > b > 0.02 for a, b in pairwise(slopes))
    assert slopes[-1] == pytest.approx(0.02, rel=1e-3)


@pytest.mark.parametrize("b", [0.1, 0.45, 0.6, 0.9])
@pytest.mark.parametrize("sigma", [0.1, 0.3, 1.0])
def test_where_the_step_stands_changes_tau_alone(b: float, sigma: float) -> None:
    h = Smoothed(Score((b - 0.5,), (0.0,), (1.0,)), sigma)
    tau = threshold(h, 0.1)
    assert tau == pytest.approx((0.45 - b) / sigma, abs=1e-9)
    assert density(h, tau) == pytest.approx(2 * sigma, rel=1e-8)
    assert mean_size(h, tau + 0.01 / sigma) == pytest.approx(0.92, abs=1e-10)


@pytest.mark.parametrize("score", [HPS, S_B, S_B_PTT])
@pytest.mark.parametrize("sigma", [0.05, 0.2, 0.4])
def test_sizes_and_coverage_grow_with_the_radius(score: Score, sigma: float) -> None:
    h = Smoothed(score, sigma)
    levels = threshold(h, 0.5) + np.linspace(0, 1, 21)
    for law in (mean_size, cdf):
        values = [law(h, float(t)) for t in levels]
        assert all(a <= b + 1e-12 for a, b in pairwise(values))


def test_inflating_tau_is_the_gaussian_shift_of_the_mean() -> None:
    """The library's certificates shift E S itself; the closed form adds r to Phi^-1 of it. One edge, two ways."""
    h, r = Smoothed(HPS, 0.1), 0.1
    (edge,) = h.crossings(threshold(h, 0.1) + r, LOW, HIGH)
    shifted = Gaussian(0.1).up(expectation(HPS, 0.1, -0.05), epsilon=0.1 * r)
    assert expectation(HPS, 0.1, edge) == pytest.approx(float(shifted), abs=1e-10)


# -- optimality of PTT -------------------------------------------------------------------------------------------------


@patient
@given(monotone_scores(), sigmas, alphas)
def test_no_score_has_a_smaller_slope_than_the_step_with_its_threshold(
    parts: Parts, sigma: float, alpha: float
) -> None:
    """The paper's optimality of PTT, for any threshold: the step that shares tau attains 2 sigma, others do not beat it.

    (The paper names the step at -alpha / 2, whose threshold is 0; with tau elsewhere the step stands at -alpha / 2 -
    sigma tau and is as good.)
    """
    h = Smoothed(Score(*parts), sigma)
    tau = threshold(h, alpha)
    assume(abs(tau) < 30)
    step = Smoothed(Score((-alpha / 2 - sigma * tau,), (0.0,), (1.0,)), sigma)
    assert threshold(step, alpha) == pytest.approx(tau, abs=1e-9)
    least = density(step, tau)
    assert least == pytest.approx(2 * sigma, rel=1e-9)
    steepness = float(h.derivative(-alpha / 2))
    if steepness > 0:  # else h is flat there to the last digit, and the slope of its cdf beyond all bounds
        assert 2 / steepness >= least * (1 - 1e-9)
    if steepness > 1e-3:
        assert density(h, tau) == pytest.approx(2 / steepness, rel=1e-6)


@pytest.mark.parametrize("sigma", [0.05, 0.1, 0.3])
def test_the_sigmoid_tends_to_the_least_slope_as_its_temperature_falls(sigma: float) -> None:
    """HPS after a sigmoid of temperature T, by quadrature: 2 sigma is approached from above."""

    def slope(T: float) -> float:
        z = np.linspace(-10, 10, 40001)
        score = expit((values(HPS, -0.05 + sigma * z) - 0.45) / T)
        phi = np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        mean, rise = (np.trapezoid(f * score * phi, z) for f in (1.0, z / sigma))
        tau = ndtri(mean)
        return 2 * math.exp(-tau * tau / 2) / math.sqrt(2 * math.pi) / rise

    slopes = [slope(T) for T in (1.0, 0.1, 0.03, 0.01, 1 / 400)]
    assert all(a > b > 2 * sigma for a, b in pairwise(slopes))
    assert slopes[-1] == pytest.approx(2 * sigma, rel=0.01)


# -- the sigmoid's cdf -------------------------------------------------------------------------------------------------


@patient
@given(st.floats(0.001, 0.999), st.floats(0, 1), st.sampled_from([1 / 400, 1 / 20, 1.0]))
def test_the_cdf_inverts_the_transform(u: float, b: float, T: float) -> None:
    t = float(sigmoid(torch.tensor(u, dtype=torch.float64), b, T))
    assume(1e-12 < t < 1 - 1e-6)
    assert sigmoid_cdf(t, b, T) == pytest.approx(u, abs=1e-8)


@pytest.mark.parametrize("T", [1 / 400, 1 / 20])
def test_its_slope_at_the_threshold_is_four_temperatures(T: float) -> None:
    numeric = (sigmoid_cdf(0.5 + 1e-6, 0.9, T) - sigmoid_cdf(0.5 - 1e-6, 0.9, T)) / 2e-6
    assert numeric == pytest.approx(4 * T, rel=1e-6)
    assert sigmoid_cdf(0.5, 0.9, T) == 0.9


def test_the_cdf_ends_at_zero_and_one_and_is_constant_beyond() -> None:
    np.testing.assert_array_equal(sigmoid_cdf(np.array([-1.0, 0.0, 1.0, 2.0])), [0, 0, 1, 1])
    t = np.linspace(0, 1, 1001)
    for T in (1 / 400, 1 / 20, 10.0):
        values = sigmoid_cdf(t, 0.9, T)
        assert (np.diff(values) >= 0).all()
        highest = 1 / (1 + math.exp(-0.1 / T))
        assert (values[t >= highest] == 1).all()


# -- curves and figures ------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    pyplot.close("all")


def drawn(axis: Any) -> dict[str, tuple[ndarray, ndarray]]:
    """Labelled lines of a panel."""
    return {line.get_label(): line.get_data() for line in axis.get_lines() if not line.get_label().startswith("_")}


def test_the_failure_figure_draws_the_scores_and_their_law() -> None:
    scores, cdfs = closed_form.failure_case_figure().axes
    lines = drawn(cdfs)
    assert list(lines) == ["τ = −0.302, slope 2.61", "τ = −0.169, slope 2.95", "1 − α = 0.5"]
    marks = [line.get_xydata()[0] for line in cdfs.get_lines() if line.get_marker() == "o"]
    cases = (("original score", S_B), ("after PTT", S_B_PTT))
    for (label, score), (t, law), (tau, level) in zip(cases, lines.values(), marks, strict=False):
        x, curve = drawn(scores)[label]
        np.testing.assert_allclose(curve, [ndtri(expectation(score, 0.3, float(each))) for each in x], atol=1e-9)
        assert (tau, level) == (threshold(Smoothed(score, 0.3), 0.5), 0.5)
        assert np.interp(tau, t, law) == pytest.approx(0.5, abs=2e-3)
        grid = Smoothed(score, 0.3)((np.arange(4000) + 0.5) / 8000 - 0.5)
        np.testing.assert_allclose(law, [(grid <= each).mean() for each in t], atol=0.02)


def test_the_sigmoid_figure_draws_both_temperatures() -> None:
    before, after = closed_form.sigmoid_cdf_figure().axes
    t, uniform = drawn(before)["slope 1 at τ"]
    np.testing.assert_array_equal(t, uniform)
    lines = drawn(after)
    assert list(lines) == ["T = 1/400: slope 0.01 at τ", "T = 1/20: slope 0.2 at τ", "1 − α = 0.9"]
    for T, (t, found) in zip((1 / 400, 1 / 20), lines.values(), strict=False):
        np.testing.assert_array_equal(found, sigmoid_cdf(t, 0.9, T))


def test_the_one_dimensional_figure_shows_the_table() -> None:
    scores, edges, sizes = closed_form.one_dimensional_figure().axes
    hps = Smoothed(HPS, 0.1)
    for axis, name in ((scores, "{}"), (edges, "{}: edge moves {}")):
        x, line = drawn(axis)[name.format("PTT", "0.010")]
        np.testing.assert_allclose(line, (x + 0.05) / 0.1, atol=1e-12)
        x, line = drawn(axis)[name.format("HPS", "0.040")]
        np.testing.assert_allclose(line, hps(x) - hps(-0.05), atol=1e-12)
    (moved,) = hps.crossings(float(hps(-0.05)) + 0.1, LOW, HIGH)
    marks = [line.get_xydata()[0] for line in edges.get_lines() if line.get_marker() == "o"]
    np.testing.assert_allclose(marks, [(moved, 0.1), (-0.04, 0.1), (-0.05, 0)], atol=1e-12)
    assert list(drawn(edges)) == ["HPS: edge moves 0.040", "PTT: edge moves 0.010"]
    printed = drawn(sizes)["as printed"]
    assert sorted(printed[1]) == [0.92, 0.92, 0.92, 0.98, 1.15, 1.62]
    sigma, size = drawn(sizes)["HPS"]
    np.testing.assert_allclose(np.interp(printed[0][::2], sigma, size), printed[1][::2], atol=0.01)


FIGURES = (closed_form.failure_case_figure, closed_form.sigmoid_cdf_figure, closed_form.one_dimensional_figure)


@pytest.mark.parametrize("draw", FIGURES)
def test_figures_render_alike_every_time_with_labelled_axes(draw: Any) -> None:
    figure = draw()
    assert all(axis.get_xlabel() and axis.get_title() and axis.get_legend() for axis in figure.axes)
    assert figure.axes[0].get_ylabel()
    text = plots.svg(figure)
    assert text.startswith("<svg")
    assert len(text) > 20_000
    assert text == plots.svg(draw())


@pytest.mark.parametrize("draw", FIGURES)
def test_figures_name_the_extra_they_need(draw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"pip install '.\[report\]'"):
        draw()
