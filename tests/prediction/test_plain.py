"""Plain split conformal prediction from stored numbers: its definition, its law, and the long way round."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

import keepcover
from keepcover.bounds import conformal_rank, exact_level
from keepcover.errors import InputError
from keepcover.methods import METHODS
from keepcover.scores import APS, HPS, RAPS, CustomScore, as_logits, get_score, hps, log_odds

patient = settings(deadline=None, derandomize=True)


def like_a_network(n: int, classes: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Probabilities [n, classes] and labels drawn from them."""
    generator = torch.Generator().manual_seed(seed)
    probabilities = (2 * torch.randn(n, classes, generator=generator, dtype=dtype)).softmax(dim=1)
    return probabilities, torch.multinomial(probabilities, 1, generator=generator)[:, 0]


CAL, LABELS = like_a_network(99, 5, seed=1)
TEST, TRUTH = like_a_network(60, 5, seed=2)


# -- the definition ----------------------------------------------------------------------------------------------------


@st.composite
def tied_tables(draw: st.DrawFn) -> tuple[list[list[int]], list[int], list[list[int]], Fraction]:
    """Probabilities in eighths, so that most are tied, with labels and a level that their number allows."""
    classes = draw(st.integers(2, 5))
    cuts = st.lists(st.integers(0, 8), min_size=classes - 1, max_size=classes - 1).map(sorted)
    row = cuts.map(lambda at: [b - a for a, b in zip([0, *at], [*at, 8])])
    known = draw(st.lists(row, min_size=4, max_size=25))
    labels = draw(st.lists(st.integers(0, classes - 1), min_size=len(known), max_size=len(known)))
    return known, labels, draw(st.lists(row, min_size=1, max_size=6)), Fraction(draw(st.integers(20, 90)), 100)


@pytest.mark.filterwarnings("ignore:alpha is miscoverage")
@patient
@given(tied_tables())
def test_a_label_is_in_iff_its_score_is_at_most_the_conformal_quantile(
    case: tuple[list[list[int]], list[int], list[list[int]], Fraction],
) -> None:
    """In eighths every step is exact, and a tie with the threshold is in."""
    known, labels, new, alpha = case
    sets = keepcover.split_conformal(
        (torch.tensor(known) / 8, torch.tensor(labels)), torch.tensor(new) / 8, alpha=float(alpha)
    )
    own = sorted(8 - row[label] for row, label in zip(known, labels))
    rank = math.ceil((len(known) + 1) * (1 - alpha))
    assert sets.mask.tolist() == [[8 - eighths <= own[rank - 1] for eighths in row] for row in new]


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize(
    ("n", "alpha", "score"), [(25, 0.1, "hps"), (9, 0.1, "hps"), (40, 0.37, "hps"), (25, 0.1, "aps"), (25, 0.1, None)]
)
def test_covered_counts_are_beta_binomial(n: int, alpha: float, score: str | None) -> None:
    """Of m fresh points BetaBinomial(m, k, n + 1 - k) are covered, k the rank: scores have no ties here.

    Massart's inequality bounds the distance to the empirical cdf for any law and sample size: false-alarm rate 1e-6. The
    binomial law that ignores the luck of calibration is rejected by the same test.
    """
    m, repetitions = 200, 600  # many fresh points each: the luck of calibration is then most of what counts vary by
    values, labels = like_a_network(repetitions * (n + m), 3, seed=n, dtype=torch.float64)
    values, labels = (log_odds(values.log()) if score is None else values).view(-1, n + m, 3), labels.view(-1, n + m)
    counts = [
        int(
            keepcover.split_conformal((rows[:n], truth[:n]), rows[n:], alpha=alpha, score=score, seed=i)
            .mask.gather(1, truth[n:, None])
            .sum()
        )
        for i, (rows, truth) in enumerate(zip(values, labels))
    ]
    at = np.arange(m + 1)
    empirical = (np.array(counts)[:, None] <= at).mean(axis=0)
    k = conformal_rank(n, exact_level(alpha))
    radius = math.sqrt(math.log(2 / 1e-6) / (2 * repetitions))
    assert np.abs(empirical - stats.betabinom(m, k, n + 1 - k).cdf(at)).max() <= radius
    assert np.abs(empirical - stats.binom(m, k / (n + 1)).cdf(at)).max() > radius


def test_what_is_promised_is_said() -> None:
    sets = keepcover.split_conformal((CAL, LABELS), TEST, alpha=0.2, class_names=list("abcde"))
    promise = sets.guarantee
    assert (promise.method, promise.certified, promise.alpha, promise.n) == ("cp", False, 0.2, 99)
    assert (promise.epsilon, promise.threat.noise, promise.draws, promise.score) == (
        0.0,
        keepcover.Gaussian(0.0),
        1,
        "hps",
    )
    assert "that is not attacked" in str(promise)
    assert json.loads(json.dumps(promise.to_dict()))["alpha"] == 0.2
    assert set(sets.labels()[0]) <= set("abcde")
    assert sets.measure(TRUTH).coverage.count == 60
    assert keepcover.split_conformal((CAL, LABELS), TEST, score=None).guarantee.score == "given"


# -- the same sets on other ways ---------------------------------------------------------------------------------------


def through_a_predictor(score: Any, alpha: float, seed: int) -> Tensor:
    predictor = keepcover.calibrate(
        as_logits, (CAL, LABELS), epsilon=0.0, sigma=0.0, alpha=alpha, method="cp", score=score, draws=1, seed=seed
    )
    return predictor.predict(TEST, seed=seed).mask


@pytest.mark.parametrize("alpha", [0.1, 0.3])
@pytest.mark.parametrize(
    "score",
    ["hps", "aps", "raps", HPS(), APS(), RAPS(0.2, 0), CustomScore(lambda x: -x), lambda x, u: u[..., None] - x],
)
def test_they_are_the_sets_of_calibrate_and_predict(score: Any, alpha: float) -> None:
    """To the last label: randomised scores use the same numbers, and no two of these scores are within rounding."""
    sets = keepcover.split_conformal((CAL, LABELS), TEST, alpha=alpha, score=score, seed=7)
    assert torch.equal(sets.mask, through_a_predictor(score, alpha, 7))
    assert sets.guarantee.score == get_score(score).name
    assert 0 < sets.mask.double().mean() < 1


def test_randomised_scores_draw_fresh_numbers() -> None:
    sets = [keepcover.split_conformal((CAL, LABELS), TEST, score="aps").mask for _ in range(2)]
    assert not torch.equal(*sets)
    sets = [keepcover.split_conformal((CAL, LABELS), TEST, score="hps").mask for _ in range(2)]
    assert torch.equal(*sets)


@pytest.mark.parametrize("increasing", [torch.exp, lambda x: x**3, lambda x: 2 * x - 5])
def test_only_the_order_of_scores_counts(increasing: Any) -> None:
    plain = keepcover.split_conformal((CAL, LABELS), TEST)
    scores = keepcover.split_conformal((increasing(-CAL.double()), LABELS), increasing(-TEST.double()), score=None)
    assert torch.equal(plain.mask, scores.mask)


def test_certain_and_impossible_labels_have_a_rank() -> None:
    """Odds of 0 and infinity are scores like others; probabilities of 0 and 1 serve every score."""
    sure = torch.eye(4)[torch.arange(40) % 4]
    labels = torch.arange(40) % 4
    new = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.4, 0.3, 0.2, 0.1]])
    for score in ("hps", "aps", "raps"):
        mask = keepcover.split_conformal((sure, labels), new, score=score, seed=0).mask
        assert mask[0].tolist() == [True, False, False, False], score
    odds, infinite = log_odds(sure.log()), log_odds(new.log())
    assert infinite[0].tolist() == [-math.inf, math.inf, math.inf, math.inf]
    mask = keepcover.split_conformal((odds, labels), infinite, score=None).mask
    assert mask.tolist() == [[True, False, False, False], [False] * 4]


def test_tiny_probabilities_are_told_apart() -> None:
    """1 - p is 1 for all of these in float32."""
    known = torch.tensor([[1.0, 1e-10 * (1 + i)] for i in range(19)])
    new = torch.tensor([[1.0, 1.5e-10], [1.0, 2.5e-10]])
    assert keepcover.split_conformal((known, torch.ones(19).long()), new).mask.tolist() == [[True, False], [True, True]]


def test_a_subclass_of_hps_is_asked_itself() -> None:
    class Reversed(HPS):
        def order(self, logits: Tensor, u: Any = 0.0) -> Tensor:
            return -hps(logits)

    sets = keepcover.split_conformal((CAL, LABELS), TEST, score=Reversed())
    negative = keepcover.split_conformal((-hps(CAL.log()), LABELS), -hps(TEST.log()), score=None)
    assert torch.equal(sets.mask, negative.mask)
    assert torch.equal(sets.mask, through_a_predictor(Reversed(), 0.1, 0))


@pytest.mark.parametrize("score", ["hps", "aps", None])
def test_numbers_are_looked_at_in_pieces(score: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = keepcover.split_conformal((CAL, LABELS), TEST, score=score, seed=1).mask
    monkeypatch.setattr("keepcover.scores.draws.PIECE", 17)
    assert torch.equal(whole, keepcover.split_conformal((CAL, LABELS), TEST, score=score, seed=1).mask)


@pytest.mark.parametrize(
    "of", [Tensor.numpy, Tensor.tolist, lambda x: x.double().numpy() if x.is_floating_point() else x.int().numpy()]
)
def test_arrays_and_lists_do_as_well(of: Any) -> None:
    expected = keepcover.split_conformal((CAL, LABELS), TEST).mask
    assert torch.equal(expected, keepcover.split_conformal((of(CAL), of(LABELS)), of(TEST)).mask)
    assert torch.equal(expected, keepcover.split_conformal([of(CAL), of(LABELS)], of(TEST)).mask)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("score", ["hps", "aps"])
def test_half_precision_is_enough(dtype: torch.dtype, score: str) -> None:
    """Rounded scores are scores: the sets are those of the rounded numbers."""
    sets = keepcover.split_conformal((CAL.to(dtype), LABELS), TEST.to(dtype), score=score, seed=0)
    wide = keepcover.split_conformal((CAL.to(dtype).float(), LABELS), TEST.to(dtype).float(), score=score, seed=0)
    assert torch.equal(sets.mask, wide.mask)


# -- bad input ---------------------------------------------------------------------------------------------------------


def broken(value: float, what: Tensor = CAL) -> Tensor:
    return what.clone().index_put_((torch.tensor(3), torch.tensor(1)), torch.tensor(value))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "logits": ({"known": 5 * torch.randn(99, 5)}, r"calibration probabilities, rows that sum to 1.*are they logits\?"),
    "nan": ({"known": broken(math.nan)}, r"calibration probabilities, rows that sum to 1, got values in \[nan"),
    "nan-test": ({"test": broken(math.nan)}, "test probabilities, rows that sum to 1"),
    "infinite": ({"known": broken(math.inf)}, "rows that sum to 1"),
    "negative": ({"known": torch.tensor([[1.2, -0.2]]).repeat(99, 1)}, r"got values in \[-0.2, 1.2\]"),
    "rows": ({"known": CAL * 0.9}, r"with sums in \[0.9, 0.9\]"),
    "flat": ({"known": CAL[0]}, r"calibration probabilities \[n, classes\].*got \(5,\)"),
    "deep": ({"test": TEST[None]}, r"test probabilities \[n, classes\].*got \(1, 60, 5\)"),
    "one-class": ({"known": torch.ones(99, 1)}, "at least 2 classes"),
    "integers": ({"test": torch.eye(5).long()}, "of torch.int64"),
    "no-test": ({"test": TEST[:0]}, "at least 1 point"),
    "no-calibration": ({"known": CAL[:0], "labels": LABELS[:0]}, "at least 1 point"),
    "classes": ({"test": torch.full((3, 4), 0.25)}, "same classes.*got 5 of torch.float32 and 4 of torch.float32"),
    "precision": ({"test": TEST.double()}, "same precision.*rounding one of them would move its ties"),
    "too-few": ({"known": CAL[:8], "labels": LABELS[:8]}, "8 calibration points cannot certify.*at least 9 are needed"),
    "label": ({"labels": LABELS + 1}, "expected labels between 0 and 4"),
    "negative-label": ({"labels": LABELS - 1}, "expected labels between 0 and 4"),
    "labels": ({"labels": LABELS[:-1]}, "expected 99 labels"),
    "float-labels": ({"labels": LABELS.float()}, "integer class labels"),
    "names-for-labels": ({"labels": ["cat"] * 99}, "integer class labels, got 'cat'; number them"),
    "names": ({"class_names": ["a", "b"]}, "expected 5 class names, one per output of the model, got 2"),
    "alpha-0": ({"alpha": 0.0}, "alpha strictly between 0 and 1"),
    "alpha-1": ({"alpha": 1.0}, "alpha strictly between 0 and 1"),
    "alpha-nan": ({"alpha": math.nan}, "alpha strictly between 0 and 1, got nan"),
    "score": ({"score": "entropy"}, "among hps, aps, raps"),
    "nan-score": ({"score": CustomScore(lambda x: x * math.nan, "broken")}, "score 'broken' returned NaN"),
    "given-nan": ({"score": None, "known": broken(math.nan)}, "calibration scores contain NaN; a NaN has no rank"),
    "given-nan-test": ({"score": None, "test": broken(math.nan)}, "test scores contain NaN; a NaN has no rank"),
    "given-flat": ({"score": None, "known": CAL[:, 0]}, r"calibration scores \[n, classes\]"),
    "object": ({"test": {"a": 1}}, "test probabilities as a tensor or array, got dict"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_in_one_line(case: str) -> None:
    change, match = REFUSED[case]
    asked = {"known": CAL, "labels": LABELS, "test": TEST, **change}
    calibration, test = (asked.pop("known"), asked.pop("labels")), asked.pop("test")
    with pytest.raises(InputError, match=match) as caught:
        keepcover.split_conformal(calibration, test, **asked)
    assert "\n" not in str(caught.value)


def test_calibration_points_come_as_a_pair() -> None:
    with pytest.raises(InputError, match=r"as \(probabilities, labels\)"):
        keepcover.split_conformal((CAL, LABELS, LABELS), TEST)


@pytest.mark.usefixtures("untyped")
def test_alpha_is_one_number_as_it_was_typed() -> None:
    """Numbers of NumPy and PyTorch, and what is none."""
    for typed in (0.1, np.float32(0.1), torch.tensor(0.1), "0.1"):
        assert keepcover.split_conformal((CAL, LABELS), TEST, alpha=typed).guarantee.alpha == 0.1
    for wrong in (None, [0.1, 0.2], "a tenth", True, []):
        with pytest.raises(InputError, match=r"expected one .*alpha"):
            keepcover.split_conformal((CAL, LABELS), TEST, alpha=wrong)


def test_it_is_the_method_cp() -> None:
    """Nothing else in the registry says what this promises."""
    sets = keepcover.split_conformal((CAL, LABELS), TEST)
    assert sets.guarantee.method in METHODS
    assert not METHODS[sets.guarantee.method].certified


def test_a_model_is_not_asked_to_tolerate_noise_where_there_is_none() -> None:
    """Scores of one's own are small where a label fits, so their largest entry is no label: nothing is warned of."""
    labels = torch.arange(400) % 3
    scores = -torch.randn(400, 3) - 4 * torch.eye(3)[labels]
    sets = keepcover.split_conformal((scores[:300], labels[:300]), scores[300:], score=None)
    assert sets.measure(labels[300:]).coverage.high > 0.9
