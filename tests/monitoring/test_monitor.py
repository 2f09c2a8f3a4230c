"""False alarms at most as often as stated, by simulation of 1e5 streams; and what breaks that is found.

A count is compared with its exact binomial law at 1e-7, so all these checks together accuse a correct monitor with
probability below 1e-6. Seeds are fixed.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy import ndarray
from scipy import stats

import keepcover
from benchmarks.false_alarms import (
    ALPHA,
    RATE,
    STREAMS,
    N,
    alarms,
    martingales,
    predictor_of,
    query_values,
    random_outputs,
    worst_misses,
)
from keepcover import Gaussian, Guarantee, InputError, Monitor, PredictionSets, Promise, Threat
from keepcover.monitoring.outcomes import Outcomes, growth, log_evidence
from keepcover.monitoring.queries import BETS, Queries, reserve

LEVEL = 1e-7
CLEAN = Guarantee("cp", False, ALPHA, Threat(Gaussian(0.0), 0.0), draws=1, n=N)


def too_many(alarms: int, rate: float, streams: int = STREAMS) -> bool:
    return bool(stats.binom.sf(alarms - 1, streams, rate) < LEVEL)


@pytest.fixture(scope="module")
def outputs() -> tuple[torch.Tensor, torch.Tensor]:
    return random_outputs()


# -- outcomes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.001, 0.1, 0.9])
def test_no_bettor_gains_on_average_at_the_level_and_all_lose_below_it(p: float) -> None:
    """The supermartingale, without simulation: exact at the level; and the mixture starts with 1 on whatever days."""
    hit, miss = np.exp(growth([False, True], p))
    np.testing.assert_allclose((1 - p) * hit + p * miss, 1, rtol=1e-12)
    assert ((1 - p / 2) * hit + p / 2 * miss < 1).all()
    assert (hit > 0).all()
    for days in ([0], [0, 1, 2], [5, 40, 41, 365]):
        assert log_evidence(np.array(days), np.zeros((len(days), 8))) == pytest.approx(0, abs=1e-12)


def test_attacks_within_epsilon_are_silent_and_beyond_it_are_found(outputs: Any) -> None:
    """Luck of the calibration included. Without room for it false alarms are far too many: the simulation would notice."""
    predictor = predictor_of(outputs)
    watch = keepcover.monitor(predictor, false_alarm=RATE)
    within, beyond = (worst_misses(predictor, r) for r in (0.5, 1.5))
    assert stats.binom.sf((within > watch.levels[0]).sum() - 1, STREAMS, RATE / 2) > LEVEL
    assert watch.levels[0] < np.quantile(within, 1 - RATE / 4)  # not for nothing
    assert not too_many(alarms(within, watch), RATE)
    assert alarms(beyond[:2000], watch) > 1990
    naive = Monitor((ALPHA,), RATE)
    assert too_many(alarms(within, naive), RATE)


def test_a_promise_with_delta_is_watched_at_alpha(outputs: Any) -> None:
    """False for all but delta of the calibrations, where the promise itself allows more."""
    watch = keepcover.monitor(predictor_of(outputs, "cp", promise=Promise(delta=0.05)), false_alarm=RATE)
    assert watch.levels == (ALPHA,)
    assert watch.limits["promise"] == 100
    kept = np.full(STREAMS, ALPHA)
    assert not too_many(alarms(kept, watch), RATE)
    assert too_many(alarms(kept, Monitor((0.8 * ALPHA,), RATE)), RATE)


@pytest.mark.parametrize("method", ["cp", "exact", "exact_asymmetric", "rscp_plus_bernstein", "bincp_sharp"])
def test_every_law_gives_a_level_above_alpha_that_shrinks_with_data(method: str) -> None:
    generator = torch.Generator().manual_seed(0)
    found = []
    warnings.simplefilter("ignore")  # random outputs have large sets
    for n in (400, 4000):
        data = torch.randn(n, 64, 4, generator=generator), torch.arange(n) % 4
        made = keepcover.calibrate_outputs(
            *data, method=method, alpha=ALPHA, epsilon=0.05, sigma=0.25, draws=64, holdout=n // 5, seed=0
        )
        (level,) = keepcover.monitor(made).levels
        found.append(level)
    assert found[0] == 0 or ALPHA < found[1] < found[0] < 0.25


@pytest.mark.parametrize("p", [0.02, 0.3])
def test_shares_are_bet_on_as_misses_are(p: float) -> None:
    """A share is as fair a bet as a miss of the same mean; where nothing can be missed a hit costs nothing, a miss is proof."""
    shares = np.exp(growth([0.0, 0.25, 1.0], p))
    weights = np.array([1 - 2 * p, 4 * p / 3, 2 * p / 3])
    np.testing.assert_allclose(weights @ [0.0, 0.25, 1.0], p)
    np.testing.assert_allclose(weights @ shares, 1, rtol=1e-12)
    np.testing.assert_array_equal(growth([0.0], 0.0), 0)
    assert (growth([True], 0.0) > 14).all()
    for wrong in ([1.5], [-0.1], [np.nan]):
        with pytest.raises(InputError, match=r"booleans or shares in \[0, 1\]"):
            Outcomes().add(wrong, p, 0)


def test_a_class_that_is_in_every_set_hides_no_other() -> None:
    """Half of all queries are of a class with too few calibration points, so never missed: they must not use the capital up."""
    rng, watch = np.random.default_rng(0), Monitor((0.0, 0.1), cells=(0, 1))
    cell = rng.integers(0, 2, 2000)
    assert watch.add_outcomes((rng.random(2000) < 0.2) & (cell == 1), cell, now=0.0) == ["promise"]


def several(n: int, generator: torch.Generator, draws: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Points of which half have nothing to cover and the others two labels; the worst that an attack can move."""
    truth = torch.zeros(n, 3, dtype=torch.bool)
    truth[torch.rand(n, generator=generator) < 0.5, :2] = True
    return torch.randn(n, draws, 3, generator=generator), truth


@pytest.mark.filterwarnings("ignore::keepcover.errors.KeepcoverWarning")
@pytest.mark.parametrize("promise", [Promise(), Promise(delta=0.1)])
def test_shares_of_several_labels_are_watched(promise: Promise) -> None:
    """False alarms over calibrations under the worst attack within epsilon; with delta, where the level is
    alpha, a long one is found. Points without labels lose nothing: a law in which all lose g(0) says of the first rule that it cannot
    miss, and accuses it.
    """
    generator, sigma, r, n = torch.Generator().manual_seed(0), 0.25, 0.5, 200
    asked: dict[str, Any] = {
        "alpha": 0.15,
        "epsilon": r * sigma,
        "sigma": sigma,
        "draws": 8,
        "seed": 0,
        "promise": promise,
    }
    first = keepcover.calibrate_outputs(*several(n + 400, generator), task="multilabel", holdout=400, **asked)
    rule: Any = first.rule
    if not promise.clauses:  # g(0) above the mean that is allowed, where the difference is largest
        rule = replace(rule, g=tuple(np.maximum(rule.g, 1.2 * rule._budget(n) / n).tolist()))
        first = replace(first, levels={level: replace(one, rule=rule) for level, one in first.levels.items()})
    asked_of = keepcover.monitor(first, false_alarm=RATE)
    (level,), runs = asked_of.levels, 80
    threshold = np.array([float(first.recalibrate_outputs(*several(n, generator)).threshold) for _ in range(runs)])
    q = stats.norm.sf(threshold)

    def risk(r: float) -> ndarray:
        return stats.binom.sf(rule.kappa, 8, stats.norm.cdf(stats.norm.ppf(q) + r))

    kept, allowed = 0.5 * risk(r), 0.1 if promise.clauses else RATE / 2
    assert stats.binom.sf((kept > level).sum() - 1, runs, allowed) > LEVEL
    rng, found = np.random.default_rng(0), []
    for attack in (risk(r), risk(2.0)):
        watches = [Monitor((level,), RATE, asked_of.luck) for _ in range(runs)]
        for watch, miss in zip(watches, attack, strict=True):
            for day in range(3):
                missed = rng.binomial(2, miss, 300) / 2 * (rng.random(300) < 0.5)
                watch.add_outcomes(missed, now=day * 86_400.0)
        found.append(sum("promise" in watch.alarms for watch in watches))
    assert not too_many(found[0], RATE + allowed, runs)
    assert found[1] == runs or not promise.clauses
    covered = float(1000 * (1 - kept.max()))
    assert rule.p_value(covered, 1000, n) > 1e-3  # an audit has the same law


@pytest.mark.filterwarnings("ignore::keepcover.errors.KeepcoverWarning")
def test_pixels_and_labels_are_counted_by_their_share() -> None:
    generator = torch.Generator().manual_seed(0)
    outputs, truth = several(600, generator)
    outputs[:, :, :2] += 2 * truth[:, None, :2]
    made = keepcover.calibrate_outputs(outputs, truth, task="multilabel", epsilon=0.05, sigma=0.25, draws=8, seed=0)
    watch, sets = keepcover.monitor(made), made.predict_outputs(outputs, seed=1)
    watch.add_queries(watch.statistics(sets))
    assert watch.add_labels(sets, truth, now=0.0) == []
    count, missed = watch.outcomes.counts
    assert (count, missed) == (600, pytest.approx(float((1 - sets.covers(truth)).sum())))
    assert 0 < missed < 60
    assert watch.report()["promise"]["misses"] == round(missed, 3)
    assert watch.add_labels(sets[:100], ~sets.mask[:100]) == ["promise"]


def test_a_label_that_the_model_does_not_have_is_a_miss(outputs: Any) -> None:
    """As the assumption says that labels are known; per class it has no promise. It is not the last class."""
    for promise, counted in ((Promise(), 5), (Promise(per="class"), 0)):
        predictor = predictor_of(outputs, "cp", promise=promise)
        watch = keepcover.monitor(predictor)
        watch.add_labels(predictor.predict_outputs(outputs[0][:5], seed=0), [-1] * 5)
        assert watch.outcomes.counts == (counted, counted)


def test_every_outcome_says_which_level_it_has() -> None:
    watch = Monitor((0.0, 0.1), cells=(0, 1))
    for cell in (None, -1, 2, [0, 2]):
        with pytest.raises(InputError, match="which of the 2 levels every outcome has"):
            watch.add_outcomes([True, True], cell)
    assert watch.outcomes.counts == (0, 0)


def test_labels_of_classes_have_the_level_of_their_class(outputs: Any) -> None:
    _, labels = outputs
    predictor = predictor_of(outputs, "cp", promise=Promise(per="class"))
    watch = keepcover.monitor(predictor)
    assert watch.cells == (0, 1, 2, 3)
    assert min(watch.levels) > keepcover.monitor(predictor_of(outputs, "cp")).levels[0]
    sets = predictor.predict_outputs(outputs[0], seed=0)
    watch.add_labels(sets, labels, now=0.0)
    again = Outcomes().add(~sets.covers(labels).numpy(), np.array(watch.levels)[labels], 0)
    assert watch.outcomes.days[0] == pytest.approx(again.days[0])


def test_groups_are_needed_where_the_promise_is_per_group(outputs: Any) -> None:
    groups = ["north", "south"] * (N // 2)
    predictor = predictor_of(outputs, "cp", promise=Promise(per=groups))
    watch, sets = keepcover.monitor(predictor), predictor.predict_outputs(outputs[0], groups=groups, seed=0)
    with pytest.raises(InputError, match=r"per group: give groups=predictor\.grouped"):
        watch.add_labels(sets, outputs[1])
    watch.add_labels(sets, outputs[1], predictor.grouped(groups, N))
    assert watch.outcomes.counts[0] == N


def test_a_late_change_is_found_though_a_year_was_quiet() -> None:
    """Bettors start every day. One that started on the first day alone has nothing left."""
    outcomes, rng = Outcomes(), np.random.default_rng(0)
    for day in range(365):
        outcomes.add(rng.random(100) < 0.07, 0.1, day)
    assert outcomes.evidence < 1
    outcomes.add(rng.random(200) < 0.4, 0.1, 365)
    assert outcomes.evidence > 1e3
    first = np.sum([sums[2:] for sums in outcomes.days.values()], axis=0)
    assert log_evidence(np.array([0]), first[None]) < 0


# -- queries -----------------------------------------------------------------------------------------------------------


def test_exchangeable_queries_are_silent() -> None:
    """Where most values are ties. Ties that are not broken at random make p-values that are not uniform: alarms."""
    rng = np.random.default_rng(0)
    values = query_values(rng)
    assert not too_many(int(martingales(values, rng.random(values.shape)).sum()), RATE)
    some = values[:, :2000]
    assert too_many(int(martingales(some, np.ones(some.shape)).sum()), RATE, 2000)


@pytest.mark.parametrize("together", [1, 7, 1000])
def test_queries_one_by_one_or_together(together: int) -> None:
    """The same capital, by the recursion that proves it: it starts, it is multiplied."""
    rng = np.random.default_rng(0)
    values, ties, again = (
        rng.integers(0, 5, (1000, 2)),
        np.random.default_rng(7).random((1000, 2)),
        np.random.default_rng(7),
    )
    values[700:] += 3
    queries = Queries(2)
    for at in range(0, 1000, together):
        queries.add(values[at : at + together], again)
    capital = np.zeros((2, len(BETS)))
    for t in range(1, 1001):
        so_far, own = values[:t], values[t - 1]
        p = ((so_far > own).sum(0) + ties[t - 1] * (so_far == own).sum(0)) / t
        c = (2 * p - 1)[:, None]
        capital += (reserve(t - 1) - reserve(t)) / len(BETS)
        capital = np.minimum(capital * (1 + BETS[:, 0] * c + BETS[:, 1] * (3 * c * c - 1) / 2), 1e300)
    np.testing.assert_allclose(queries.capital, capital, rtol=1e-9)
    assert queries.count == 1000
    assert queries.evidence > 1e6


def test_every_bet_is_fair_and_never_ruinous() -> None:
    c = np.linspace(-1, 1, 2001)
    factor = 1 + np.stack([c, (3 * c * c - 1) / 2], -1) @ BETS.T
    assert (factor > 0).all()
    np.testing.assert_allclose(np.trapezoid(factor, c, axis=0) / 2, 1, atol=1e-6)


def test_drifts_are_found_without_labels() -> None:
    rng, watch = np.random.default_rng(0), Monitor((0.1,), scores=("confidence",))

    def queries(n: int, size: float, shift: float = 0.0) -> ndarray:
        mask = torch.from_numpy(rng.random((n, 10)) < size)
        return watch.statistics(PredictionSets(mask, CLEAN), confidence=rng.beta(8, 2 + shift, n))

    assert watch.add_queries(queries(1000, 0.15), rng) == []
    assert watch.add_queries(queries(300, 0.15, shift=2.0), rng) == ["queries"]  # of the scores alone
    assert watch.add_queries(queries(10, 0.15), rng) == []  # said once
    assert watch.report()["queries"]["queries"] == 1310
    assert watch.report()["alarms"] == ["queries have changed; a warning, no breach"]
    with pytest.raises(InputError, match="expected the scores confidence, got none"):
        watch.statistics(PredictionSets(torch.ones(1, 2, dtype=torch.bool), CLEAN))


# -- state -------------------------------------------------------------------------------------------------------------


def test_state_is_small_json_and_replicas_add_up() -> None:
    rng, whole, parts = np.random.default_rng(0), Monitor((0.1,)), [Monitor((0.1,)), Monitor((0.1,))]
    for day in range(30):
        missed = rng.random(40) < 0.12
        whole.add_outcomes(missed, now=day * 86_400.0)
        parts[day % 2].add_outcomes(missed[:25], now=day * 86_400.0)
        parts[1 - day % 2].add_outcomes(missed[25:], now=day * 86_400.0)
    for part in parts:
        part.add_queries(rng.integers(0, 3, (50, 2)), rng)
    text = json.dumps(parts[1].to_dict())
    assert len(text) < 20_000
    merged = parts[0].merged(Monitor.from_dict(json.loads(text)))
    assert merged.evidence["promise"] == pytest.approx(whole.evidence["promise"], rel=1e-9)
    assert merged.evidence["queries"] == max(part.evidence["queries"] for part in parts) / 2
    assert Monitor.from_dict(json.loads(json.dumps(merged.to_dict()))) == merged
    with pytest.raises(InputError, match="different promises"):
        whole.merged(Monitor((0.2,)))


def test_what_cannot_be_watched_is_refused(outputs: Any) -> None:
    with pytest.raises(InputError, match="expected false_alarm strictly between 0 and 1, got 1"):
        keepcover.monitor(predictor_of(outputs), false_alarm=1.0)
    weighted = predictor_of(outputs, "cp", promise=Promise(label_weights=(1.0, 2.0, 1.0, 1.0)))
    with pytest.raises(InputError, match="label_weights is not monitored"):
        keepcover.monitor(weighted)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"levels": 3},
        {**Monitor((0.1,)).to_dict(), "outcomes": {"days": {"0": [1.0]}}},
        {**Monitor((0.1,)).to_dict(), "outcomes": {"days": {"monday": [1.0] * 10}}},
        {**Monitor((0.1,)).to_dict(), "streams": [{"statistics": 2, "count": "many"}]},
        {**Monitor((0.1,)).to_dict(), "more": 1},
        {**Monitor((0.1,)).to_dict(), "false_alarm": 0},
        {**Monitor((0.1,)).to_dict(), "false_alarm": float("nan")},
        {**Monitor((0.1,)).to_dict(), "levels": [7.0]},
    ],
)
def test_a_state_that_no_monitor_wrote_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="not the state of a monitor"):
        Monitor.from_dict(state)


def test_intervals_are_watched_too() -> None:
    """Length and middle of intervals, at whatever scale: a drift of the inputs is found, none is silent."""
    generator, rng = torch.Generator().manual_seed(0), np.random.default_rng(0)
    for unit in (1e-3, 1e5):
        outputs, truth = unit * torch.randn(900, 4, generator=generator).double(), unit * torch.randn(900).double()
        made = keepcover.calibrate_outputs(
            outputs[:500], truth[:500], task="regression", epsilon=0.1, sigma=0.25, draws=4, seed=0
        )
        watch = keepcover.monitor(made)
        assert watch.add_queries(watch.statistics(made.predict_outputs(outputs[500:], seed=0)), rng) == []
        moved = made.predict_outputs(outputs[:300] + 2 * unit, seed=1)
        assert watch.add_queries(watch.statistics(moved), rng) == ["queries"]
        assert watch.add_labels(moved, truth[:300]) == ["promise"]
