"""Scores against their definitions, evaluated independently: in 60-digit decimals, or label by label in a loop."""

from __future__ import annotations

import json
import math
from decimal import Decimal, localcontext
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from keepcover.errors import InputError
from keepcover.scores import (
    APS,
    HPS,
    PTT,
    RAPS,
    CustomScore,
    Score,
    aps,
    as_logits,
    get_score,
    hps,
    log_odds,
    log_odds_of,
    raps,
    top_label,
)

patient = settings(deadline=None, derandomize=True)

# Relative rounding of exp(a - b) for |a - b| up to about 100.
TOLERANCE = {torch.float32: 3e-5, torch.float64: 1e-13}

tied_logits = st.integers(2, 12).flatmap(lambda k: st.lists(st.integers(-3, 3), min_size=k, max_size=k))
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def decimal_hps(logits: list[float]) -> tuple[list[float], list[float]]:
    """HPS and its log-odds with 60 digits, so that nothing cancels."""
    with localcontext() as context:
        context.prec = 60
        weights = [Decimal(value).exp() for value in logits]
        rest = [sum(weights[:k] + weights[k + 1 :], Decimal(0)) for k in range(len(weights))]
        return [float(r / sum(weights)) for r in rest], [float((r / w).ln()) for r, w in zip(rest, weights)]


def naive_aps(logits: list[float], u: float) -> list[float]:
    weights = [math.exp(value) for value in logits]
    total = sum(weights)
    return [(sum(w for w in weights if w > own) + u * own) / total for own in weights]


def naive_raps(logits: list[float], u: float, penalty: float, k_reg: int) -> list[float]:
    ranks = [1 + sum(other > own for other in logits) for own in logits]
    scale = 1 + penalty * max(len(logits) - k_reg, 0)
    return [(s + penalty * max(rank - k_reg, 0)) / scale for s, rank in zip(naive_aps(logits, u), ranks)]


def close(actual: Tensor, expected: list[float], dtype: torch.dtype, absolute: float = 0.0) -> bool:
    assert actual.dtype == dtype
    return torch.allclose(
        actual.double(), torch.tensor(expected, dtype=torch.float64), rtol=TOLERANCE[dtype], atol=absolute
    )


def confident_logits(dtype: torch.dtype, count: int = 40) -> list[Tensor]:
    """Networks from unsure to absurdly sure, 2 to 7 classes."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(2 + i % 6, generator=generator, dtype=torch.float64) * scale).to(dtype)
        for i in range(count)
        for scale in (1.0, 10.0, 30.0)
    ]


@dtypes
def test_hps_loses_nothing_when_the_network_is_sure(dtype: torch.dtype) -> None:
    for logits in confident_logits(dtype):
        assert close(hps(logits), decimal_hps(logits.tolist())[0], dtype)


@dtypes
def test_log_odds_are_the_log_odds_of_hps(dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    for logits in confident_logits(dtype):
        assert close(log_odds(logits), decimal_hps(logits.tolist())[1], dtype, absolute=4 * eps)
        torch.testing.assert_close(log_odds(logits).sigmoid(), hps(logits), rtol=TOLERANCE[dtype], atol=0)


def test_log_odds_keep_the_order_that_float32_hps_loses() -> None:
    """Over many images the float32 log-odds sort as the exact HPS does, also where the float32 HPS is exactly 1."""
    exact, fast, saturated = [], [], 0
    for logits in confident_logits(torch.float32, 60):
        exact += decimal_hps(logits.tolist())[1]
        fast += log_odds(logits).tolist()
        saturated += int((hps(logits) == 1).sum())
    assert saturated > 100
    order = sorted(range(len(exact)), key=exact.__getitem__)
    for a, b in pairwise(order):
        if exact[b] - exact[a] > 1e-4 * (1 + abs(exact[a])):
            assert fast[a] < fast[b]


def test_log_odds_reach_as_far_as_logits_do() -> None:
    """The top label's odds are no difference and no quotient: gaps that exp cannot express are still told apart."""
    logits = torch.tensor([[0.0, -gap, -gap - 1] for gap in (20.0, 90.0, 200.0, 3e38)])
    rest = math.log1p(math.exp(-1))
    expected = [[-gap + rest, gap, gap + 1] for gap in (20.0, 90.0, 200.0, 3e38)]
    torch.testing.assert_close(log_odds(logits), torch.tensor(expected))
    almost_even = torch.tensor([0.0, -1e-9])
    assert torch.equal(log_odds(almost_even), almost_even.flip(0) - almost_even)  # of two labels, their difference


@dtypes
@pytest.mark.parametrize("shape", [(2,), (5, 3), (40, 3, 10), (33, 1000)])
def test_log_odds_of_one_label_are_those_of_all_to_the_last_bit(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Calibration scores one label and prediction all: a rounding apart, tied scores would fall on either side."""
    generator = torch.Generator().manual_seed(4)
    for scale in (0.5, 5.0, 50.0):
        logits = (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)
        for values in (logits, logits.round(), logits.masked_fill(logits < -scale, -torch.inf)):
            every = log_odds(values)
            for label in {0, 1, shape[-1] - 1}:
                labels = torch.full(shape[:-1], label)
                assert torch.equal(log_odds_of(values, labels), every[..., label])
            top = values.argmax(dim=-1)
            assert torch.equal(log_odds_of(values, top), every.gather(-1, top[..., None])[..., 0])


class Turned(HPS):
    """Orders the other way round."""

    def order(self, logits: Tensor, u: Tensor | float = 0.0) -> Tensor:
        return -log_odds(logits)


@pytest.mark.parametrize(
    "score", [HPS(), APS(), RAPS(), Turned(), CustomScore(lambda x: -x)], ids=lambda one: type(one).__name__
)
def test_the_order_of_one_label_is_that_of_all(score: Score) -> None:
    logits, u = torch.randn(20, 3, 6), torch.rand(20, 1)
    labels = torch.arange(20)[:, None].expand(20, 3) % 6
    own = score.order(logits, u).gather(-1, labels[..., None])[..., 0]
    assert torch.equal(score.order_of(logits, labels, u), own)


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_log_odds_have_their_gradient(scale: float) -> None:
    """Attacks and training climb them: the gradient of log sum_{j != k} e^{l_j} - l_k, written as it stands."""
    logits = (scale * torch.randn(8, 5, dtype=torch.float64)).requires_grad_()
    weight, labels = torch.randn(8, 5, dtype=torch.float64), torch.arange(8) % 5
    others = logits[:, None, :].masked_fill(torch.eye(5, dtype=torch.bool), -torch.inf)
    naive = others.logsumexp(dim=-1) - logits
    (expected,) = torch.autograd.grad((naive * weight).sum(), logits, retain_graph=True)
    (found,) = torch.autograd.grad((log_odds(logits) * weight).sum(), logits)
    torch.testing.assert_close(found, expected)
    (expected,) = torch.autograd.grad(naive[torch.arange(8), labels].sum(), logits)
    (found,) = torch.autograd.grad(log_odds_of(logits, labels).sum(), logits)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_top_label_is_the_first_of_the_largest(dtype: torch.dtype) -> None:
    logits = torch.randint(-3, 4, (7, 4, 9), generator=torch.Generator().manual_seed(0)).to(dtype)
    first = [[row.index(max(row)) for row in rows] for rows in logits.tolist()]
    for values in (logits, logits.requires_grad_(), logits.detach().transpose(0, 2).contiguous().transpose(0, 2)):
        assert top_label(values).tolist() == first
    assert top_label(logits[0, 0]).tolist() == first[0][0]


def test_probabilities_of_any_precision_are_finite_logits() -> None:
    for dtype, wide in (
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        probabilities = torch.tensor([[0.25, 0.75, 0.0], [1.0, 0.0, 0.0]], dtype=dtype)
        logits = as_logits(probabilities)
        assert logits.dtype == wide
        assert logits.isfinite().all()
        torch.testing.assert_close(logits.softmax(dim=-1).to(dtype), probabilities, rtol=0, atol=1e-7)


@patient
@given(tied_logits, st.floats(0, 1))
def test_aps_is_the_mass_of_strictly_larger_labels_plus_u_of_its_own(logits: list[int], u: float) -> None:
    for dtype in TOLERANCE:
        assert close(
            aps(torch.tensor(logits, dtype=dtype), u),
            naive_aps(logits, u),
            dtype,
            absolute=1e-6 if dtype == torch.float32 else 1e-15,
        )


@patient
@given(tied_logits, st.floats(0, 1), st.sampled_from([0.0, 0.01, 0.2, 3.0]), st.integers(0, 13))
def test_raps_adds_the_penalty_of_the_strict_rank(logits: list[int], u: float, penalty: float, k_reg: int) -> None:
    expected = naive_raps(logits, u, penalty, k_reg)
    for dtype in TOLERANCE:
        actual = RAPS(penalty, k_reg)(torch.tensor(logits, dtype=dtype), u)
        assert close(actual, expected, dtype, absolute=1e-6 if dtype == torch.float32 else 1e-15)


@dtypes
@pytest.mark.parametrize("classes", [2, 3, 8, 10, 16, 17, 33, 100, 1000])
def test_exact_ties_share_one_score(classes: int, dtype: torch.dtype) -> None:
    """No label is strictly larger than its tie, wherever in memory they stand: every score is u / K."""
    scores = aps(torch.full((3, classes), 1.7, dtype=dtype), 0.5)
    torch.testing.assert_close(scores, torch.full_like(scores, 0.5 / classes))
    assert (scores == scores[0, 0]).all()


@pytest.mark.parametrize("score", [HPS(), APS(), RAPS(0.1, 2)])
@pytest.mark.parametrize("lead", [(), (4,), (2, 3), (2, 1, 3)])
def test_any_leading_shape(score: Score, lead: tuple[int, ...]) -> None:
    """A batch is scored image by image, each with its own u."""
    logits, u = torch.randn(*lead, 6, dtype=torch.float64), torch.rand(lead, dtype=torch.float64)
    batched = score(logits, u).reshape(-1, 6)
    for row, own_logits, own_u in zip(batched, logits.reshape(-1, 6), u.reshape(-1)):
        torch.testing.assert_close(row, score(own_logits, own_u))


def test_one_u_serves_all_draws_of_an_image() -> None:
    logits, u = torch.randn(5, 7, 4), torch.rand(5)
    torch.testing.assert_close(aps(logits, u[:, None]), torch.stack([aps(logits[:, j], u) for j in range(7)], dim=1))


@pytest.mark.parametrize("score", [HPS(), APS(), RAPS(), RAPS(0.1, 1), RAPS(0.3, 0), RAPS(1.0, 5)], ids=repr)
@pytest.mark.parametrize("classes", [2, 3, 10, 100])
def test_bounded_scores_never_leave_the_unit_interval(score: Score, classes: int) -> None:
    """Not even by a rounding error: methods that assume boundedness refuse 1.0000001."""
    for u in (0.0, 0.5, 1.0):
        for scale in (0.1, 3.0, 50.0):
            scores = score(torch.randn(50, classes) * scale, u)
            assert 0 <= float(scores.min()) <= float(scores.max()) <= 1


def test_aps_of_a_label_drawn_from_the_softmax_is_uniform() -> None:
    """The probability integral transform; Kolmogorov-Smirnov at a false-alarm rate of 1e-5."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(20_000, 5, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)
    u = torch.rand(20_000, generator=generator, dtype=torch.float64)
    scores = aps(logits, u).gather(1, labels)[:, 0]
    assert stats.kstest(scores.numpy(), "uniform").pvalue > 1e-5
    assert stats.kstest(aps(logits, 0.5).gather(1, labels)[:, 0].numpy(), "uniform").pvalue < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_hps_rounds_the_true_one(dtype: torch.dtype) -> None:
    logits = torch.randn(20, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert hps(logits).dtype == dtype
    assert float((hps(logits).double() - hps(logits.double())).abs().max()) < 2 * torch.finfo(dtype).eps


def test_probabilities_enter_through_their_logarithm() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64)
    expect = lambda *values: torch.tensor(values, dtype=torch.float64)  # noqa: E731
    torch.testing.assert_close(hps(probabilities.log()), expect(0.5, 0.7, 0.8, 1.0))
    torch.testing.assert_close(aps(probabilities.log(), 0.5), expect(0.25, 0.65, 0.9, 1.0))
    torch.testing.assert_close(raps(probabilities.log(), 0.5, 0.2, 1), expect(0.25, 0.85, 1.3, 1.6) / 1.6)
    assert log_odds(probabilities.log())[3] == math.inf
    certain = torch.tensor([1.0, 0.0, 0.0]).log()
    assert hps(certain).tolist() == [0.0, 1.0, 1.0]
    assert log_odds(certain).tolist() == [-math.inf, math.inf, math.inf]


def test_order_is_increasing_in_the_score() -> None:
    logits = torch.randn(50, 4, dtype=torch.float64)
    for score in (HPS(), APS(), RAPS(), CustomScore(lambda x: -x)):
        by_order, by_score = score.order(logits, 0.3).flatten(), score(logits, 0.3).flatten()
        assert (by_score[by_order.argsort()].diff() >= 0).all()


def test_custom_scores_say_what_they_take_and_give() -> None:
    logits, u = torch.randn(3, 4), torch.rand(3)
    plain = get_score(lambda x: -x)
    assert not plain.bounded
    assert not plain.randomized
    assert torch.equal(plain(logits, u), -logits)
    mixed = CustomScore(lambda x, u: u[..., None] - x, name="mixed", bounded=True)
    assert mixed.randomized
    assert mixed.config() == {"name": "mixed", "custom": True}
    assert torch.equal(mixed(logits, u), u[:, None] - logits)
    assert not CustomScore(lambda x, scale=2.0: scale * x).randomized
    assert get_score(mixed) is mixed


def test_bad_scores_are_refused() -> None:
    with pytest.raises(InputError, match=r"must return \(3, 4\), got \(3,\)"):
        CustomScore(lambda x: x.sum(dim=-1))(torch.randn(3, 4), 0.0)
    with pytest.raises(InputError, match="got 3 required arguments"):
        CustomScore(lambda x, u, v: x)
    with pytest.raises(InputError, match="among hps, aps, raps"):
        get_score("entropy")
    with pytest.raises(InputError, match="at least 2 classes"):
        log_odds(torch.zeros(3, 1))
    with pytest.raises(InputError, match="penalty >= 0"):
        RAPS(penalty=-0.1)


@pytest.mark.parametrize("score", ["hps", "aps", "raps"])
def test_scores_are_rebuilt_from_their_config(score: str) -> None:
    logits = torch.randn(4, 5)
    original = RAPS(0.3, 2) if score == "raps" else get_score(score)
    config = original.config()
    again = {"hps": HPS, "aps": APS, "raps": RAPS}[config.pop("name")](**config)
    assert torch.equal(original(logits, 0.4), again(logits, 0.4))


@pytest.mark.parametrize("name", ["hps", "aps", "raps", "ptt_hps"])
def test_golden_scores(name: str, golden_folder: Path) -> None:
    golden = json.loads((golden_folder / "core.json").read_text())
    expected = torch.tensor(golden["first_image_first_draws"][name], dtype=torch.float64)
    logits, u = torch.tensor(golden["logits"][0][: len(expected)], dtype=torch.float64), golden["u"][0]
    holdout = torch.tensor(golden["holdout"], dtype=torch.float64).sort().values
    actual = {
        "hps": lambda: hps(logits),
        "aps": lambda: aps(logits, u),
        "raps": lambda: raps(logits, u, penalty=0.2, k_reg=1),
        "ptt_hps": lambda: PTT(golden["ptt"]["T"]).fit(holdout, 1 - golden["ptt"]["b"])(hps(logits)),
    }[name]()
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("classes", [2, 3, 10, 16])
def test_comparing_pairs_and_sorting_give_the_same_aps(classes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few classes are compared, many are sorted: the same numbers to rounding, and ties stay exactly tied."""
    generator = torch.Generator().manual_seed(classes)
    logits = torch.randint(-3, 4, (50, 4, classes), generator=generator).float()  # integers: many ties
    u = torch.rand(50, 1, generator=generator)
    compared = aps(logits, u)
    monkeypatch.setattr("keepcover.scores.scores._FEW", 0)
    torch.testing.assert_close(compared, aps(logits, u), rtol=0, atol=1e-6)
    for a in range(classes):
        tied = logits == logits[..., a : a + 1]
        assert torch.equal(compared.masked_select(tied), compared[..., a : a + 1].expand_as(logits).masked_select(tied))
