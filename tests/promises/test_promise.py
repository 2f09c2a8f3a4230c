"""Promise arithmetic: rank, budget and the points needed, for the marginal promise and for clauses that combine."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from keepcover.bounds import conformal_rank, exact_level
from keepcover.errors import InputError
from keepcover.noise import Gaussian, Threat
from keepcover.promises import CLAUSES, Clause, Promise
from keepcover.promises.base import MARGINAL, PER_QUERY
from keepcover.testing import check_promise

patient = settings(deadline=None, derandomize=True)
levels = st.integers(1, 999).map(lambda thousandths: Fraction(thousandths, 1000))


@dataclass(frozen=True)
class Spared(Clause):
    """Spends a share of alpha on something else."""

    share: float

    keyword = "spared"
    assumptions = ("Something else happens rarely.",)

    def level(self, alpha: Fraction) -> Fraction:
        return alpha * (1 - exact_level(self.share))

    def sentence(self) -> str:
        return f"having spared {self.share:g} of it"


@dataclass(frozen=True)
class Removed(Clause):
    """So many calibration points may be wrong: the rank and the sum pay for each."""

    points: int

    keyword = "removed"
    settles = ("the calibration data",)

    def rank(self, rank: int, n: int, level: Fraction) -> int:
        return rank + self.points

    def budget(self, budget: float, n: int | float, level: Fraction, top: float) -> float:
        return budget - self.points * top

    def tampering(self, threat: Threat) -> Threat | None:
        return Threat(threat.noise, 0.1)

    def confidence(self) -> str:
        return "with some confidence"


@pytest.fixture
def clauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (Spared, Removed):
        monkeypatch.setitem(CLAUSES, kind.keyword, kind)


@patient
@given(st.integers(1, 5000), levels)
def test_the_marginal_promise_is_the_conformal_rank(n: int, level: Fraction) -> None:
    promise = Promise()
    assert promise.level(float(level)) == level
    assert promise.rank(n, level) == conformal_rank(n, level) == math.ceil((n + 1) * (1 - level))
    for top in (1.0, 1.7):
        assert promise.budget(n, level, top) == pytest.approx(float(level * (n + 1)) - top, abs=1e-9)


@patient
@given(levels)
def test_points_needed_is_the_least_number_with_a_finite_threshold(level: Fraction) -> None:
    need = Promise().points_needed(level)
    assert need == max(math.ceil(1 / level) - 1, 1)
    scores = torch.arange(float(need))
    assert Promise().quantile(scores, level) < math.inf
    if need > 1:
        assert Promise().quantile(scores[1:], level) == math.inf


@pytest.mark.usefixtures("clauses")
@patient
@given(st.integers(1, 500), levels, st.integers(0, 5))
def test_clauses_change_what_they_say_and_nothing_else(n: int, level: Fraction, points: int) -> None:
    spared, removed = Promise(spared=0.25), Promise(removed=points)
    assert spared.level(float(level)) == level * Fraction(3, 4)
    assert spared.rank(n, level) == conformal_rank(n, level)
    assert removed.level(float(level)) == level
    assert removed.rank(n, level) == conformal_rank(n, level) + points
    assert removed.budget(n, level, 1.5) == pytest.approx(float(level * (n + 1)) - 1.5 * (points + 1), abs=1e-9)
    need = removed.points_needed(level)
    assert removed.rank(need, level) <= need
    assert need == 1 or removed.rank(need - 1, level) > need - 1


@pytest.mark.usefixtures("clauses")
def test_clauses_combine_in_the_order_of_the_registry() -> None:
    both = Promise(removed=2, spared=0.5)
    assert both == Promise(spared=0.5, removed=2)
    assert hash(both) == hash(Promise(spared=0.5, removed=2))
    assert repr(both) == "Promise(spared=0.5, removed=2)"
    assert Promise(**json.loads(json.dumps(both.config()))) == both
    assert both.level(0.1) == Fraction(1, 20)
    assert both.rank(99, both.level(0.1)) == 95 + 2
    assert both.budget(99, both.level(0.1), 1.0) == pytest.approx(100 * 0.05 - 1 - 2)
    assert (both.confidence, both.sentence) == ("with some confidence, ", ", having spared 0.5 of it")
    average = f"The promise is an average over classes and groups, and per query: {PER_QUERY}"
    assert both.assumptions == (average, "Something else happens rarely.")  # no longer marginal
    assert Promise(spared=0.5).assumptions == (MARGINAL, "Something else happens rarely.")
    threat = Threat(Gaussian(1.0), 0.5)
    assert both.tampering(threat) == Threat(Gaussian(1.0), 0.1)
    assert Promise(spared=0.5).tampering(threat) is None
    assert Promise(spared=None) == Promise()


@pytest.mark.usefixtures("clauses")
def test_the_suite_passes_clauses_and_tells_wrong_ones() -> None:
    check_promise(Promise(spared=0.25))
    check_promise(Promise(removed=2))
    with pytest.raises(AssertionError, match="below the marginal one"):
        check_promise(Promise(removed=-1))


def test_a_rank_below_one_keeps_nothing_and_above_n_everything() -> None:
    scores = torch.tensor([1.0, 2.0, 3.0])
    assert Promise().quantile(scores, Fraction(1)) == -math.inf
    assert Promise().quantile(scores, Fraction(1, 5)) == math.inf


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"delta": 0}, "delta strictly between 0 and 1.* got 0"),
        ({"delta": math.nan}, "delta strictly between 0 and 1.* got nan"),
        ({"delta": True}, "delta strictly between 0 and 1.* got True"),
        ({"per": "group"}, "per='class' or an array with the group of every point, got 'group'"),
        ({"per": []}, "names or whole numbers, one per point, got none"),
        ({"per": ["a", None]}, "names or whole numbers, one per point, got None"),
        ({"per": [1, None]}, "names or whole numbers, one per point, got None"),
        ({"per": [0.5, 1.0]}, "names or whole numbers, one per point, got 0.5"),
        ({"per": b"class"}, "as a sequence of names or whole numbers, got b'class'"),
        ({"per": {"a": 1}}, "as a sequence of names or whole numbers, got None"),
        ({"per": {"groups": ["a", "a"]}}, "every name once"),
        ({"per": "class", "clusters": (0, 2)}, "without gaps"),
        ({"per": "class", "clusters": "many"}, "clusters='auto' or the cluster of every class"),
        ({"poisoned": 1.5}, "a number of calibration points, 0 or more, got 1.5"),
        ({"poisoned": math.inf}, "a number of calibration points, 0 or more, got inf"),
        ({"calibration_epsilon": math.nan}, "a finite calibration_epsilon >= 0, got nan"),
        ({"drift": -0.1}, "a distance in total variation, in .0, 1., got -0.1"),
        ({"label_weights": (1, math.nan)}, "finite label_weights of 0 or more, one per class"),
        ({"label_weights": {0: 1.0, 1: 2.0}}, "finite label_weights of 0 or more, one per class"),
        ({"label_weights": {1.0, 2.0}}, "finite label_weights of 0 or more, one per class"),
        ({"label_weights": torch.tensor(1.0)}, "finite label_weights of 0 or more, one per class"),
    ],
)
def test_values_that_mean_nothing_are_refused(said: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Promise(**said)


def test_unknown_clauses_are_refused() -> None:
    with pytest.raises(InputError, match=r"a promise may say .* beyond the marginal one, got 'surely'"):
        Promise(surely=1)


def test_the_marginal_promise_holds_on_average_over_calibration() -> None:
    """P[fresh <= quantile] >= 1 - alpha, exactly ceil((n+1)(1-alpha)) / (n+1): binomial test at 1e-6 on both sides."""
    scores = torch.randn(20_000, 20, generator=torch.Generator().manual_seed(0))
    quantiles = scores[:, :19].kthvalue(Promise().rank(19, exact_level(0.1)), dim=1).values
    assert float(quantiles[0]) == Promise().quantile(scores[0, :19], exact_level(0.1))
    covered = int((scores[:, 19] <= quantiles).sum())
    assert stats.binomtest(covered, 20_000, 18 / 20).pvalue > 1e-6
