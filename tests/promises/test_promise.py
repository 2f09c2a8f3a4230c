"""Promise arithmetic: rank, budget and the points needed, for the marginal promise and for clauses that combine."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from keepcover.bounds import conformal_rank, exact_level
from keepcover.errors import InputError
from keepcover.noise import Gaussian, Threat
from keepcover.promises import CLAUSES, Clause, Promise
from keepcover.promises.base import MARGINAL
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
    marginal = False

    def rank(self, rank: int, n: int, level: Fraction) -> int:
        return rank + self.points

    def budget(self, budget: float, n: int, level: Fraction, top: float) -> float:
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
    assert both.assumptions == ("Something else happens rarely.",)  # no longer marginal
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
