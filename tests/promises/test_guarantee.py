"""What a Guarantee refuses and says."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepcover.bounds import conformal_rank
from keepcover.errors import InputError, KeepcoverWarning
from keepcover.guarantee import GENERAL, Guarantee, warn_of_coverage
from keepcover.noise import Gaussian, Threat
from keepcover.noise.base import FRESH
from keepcover.promises import Promise
from keepcover.promises.base import MARGINAL
from keepcover.promises.clause import NEVER

patient = settings(deadline=None, derandomize=True)
levels = st.integers(1, 999).map(lambda thousandths: Fraction(thousandths, 1000))

GOOD: dict[str, Any] = {
    "method": "exact",
    "certified": True,
    "alpha": 0.1,
    "threat": Threat(Gaussian(0.25), 0.125),
    "draws": 16,
    "n": 100,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alpha": 0.0}, "alpha strictly between 0 and 1, got 0.0; 0.1 promises 90 %"),
        ({"alpha": 1.0}, "alpha strictly between 0 and 1"),
        ({"alpha": math.nan}, "alpha strictly between 0 and 1"),
        ({"threat": Threat(Gaussian(0.0), 0.1)}, "give sigma > 0 .* or choose the uncertified method cp"),
        ({"draws": 0}, "at least 1 draw"),
        ({"calibration_draws": 0}, "at least 1 draw"),
        ({"spent": 0.1}, "spend all of alpha = 0.1 before a quantile is taken; .*choose a smaller beta"),
        ({"spent": 0.2}, "spend all of alpha"),
        (
            {"n": 8},
            "8 calibration points cannot certify miscoverage 0.1: at least 9 are needed; add data or raise alpha",
        ),
        ({"n": 9, "spent": 0.02}, "miscoverage 0.08: at least 12 are needed"),
    ],
)
def test_impossible_promises_are_refused(change: dict[str, Any], message: str) -> None:
    Guarantee(**GOOD)
    with pytest.raises(InputError, match=message):
        Guarantee(**GOOD | change)


@patient
@given(levels)
def test_the_number_of_points_it_asks_for_is_the_smallest_that_works(alpha: Fraction) -> None:
    need = max(math.ceil(1 / alpha) - 1, 1)
    assert conformal_rank(need, alpha) <= need
    Guarantee(**GOOD | {"alpha": float(alpha), "n": need})
    with pytest.raises(InputError, match=f"at least {need} are needed"):
        Guarantee(**GOOD | {"alpha": float(alpha), "n": need - 1})


def test_the_sentence_of_a_certified_method() -> None:
    assert str(Guarantee(**GOOD | {"method": "rscp_plus_hoeffding", "alpha": 0.05, "spent": 0.002, "draws": 1})) == (
        "With probability at least 95 %, the set contains the true label of a query even if an adversary has moved it "
        "by up to 0.125 in L2 norm (method rscp_plus_hoeffding, Gaussian noise sigma 0.25, 1 draw per query, "
        "Monte Carlo budget 0.002 inside the 5 %, 100 calibration points)."
    )


def test_the_sentence_of_an_uncertified_method_promises_nothing_under_attack() -> None:
    plain = {"method": "cp", "certified": False, "threat": Threat(Gaussian(0.0), 0.0)}
    assert str(Guarantee(**GOOD | plain)) == (
        "With probability at least 90 %, the set contains the true label of a query that is not attacked "
        "(method cp, 100 calibration points); under attack cp promises nothing."
    )


def test_a_class_that_no_number_of_points_helps_is_said_so() -> None:
    made = Guarantee(**GOOD | {"promise": Promise(per="class"), "least": 17})
    assert str(made).endswith("100 calibration points; a class with fewer than 17 has its label in every set).")
    none = Guarantee(**GOOD | {"promise": Promise(per="class"), "least": NEVER})
    assert str(none).endswith("; every class, however many its points, has its label in every set).")


def test_numbers_sentence_and_assumptions_travel_together() -> None:
    guarantee = Guarantee(**GOOD | {"assumed": ("The moon is round.",)})
    stated = guarantee.to_dict()
    assert {key: stated[key] for key in ("method", "certified", "alpha", "draws", "n")} == {
        key: GOOD[key] for key in ("method", "certified", "alpha", "draws", "n")
    }
    assert (stated["epsilon"], stated["norm"], stated["noise"]) == (0.125, "l2", {"name": "gaussian", "sigma": 0.25})
    assert stated["statement"] == str(guarantee)
    assert stated["assumptions"] == list(guarantee.assumptions)
    assert set(GENERAL) | {"The moon is round.", FRESH, MARGINAL} <= set(guarantee.assumptions)
    clean = Guarantee(**GOOD | {"method": "cp", "certified": False})
    assert FRESH not in clean.assumptions  # an uncertified method says nothing of noise


def test_alpha_that_looks_like_coverage_is_warned_of() -> None:
    with pytest.warns(KeepcoverWarning, match=r"0.9 promises that 10 % of sets .* for 90 % coverage give alpha 0.1"):
        warn_of_coverage(0.9)
    warn_of_coverage(0.5)
