"""calibrate and predict, end to end: every set recomputed by hand, the promise under the exact worst case, bad input.

Statistical tests state their false-alarm rates; seeds are fixed.
"""

from __future__ import annotations

import html
import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import keepcover
from keepcover import PTT, Gaussian, Threat
from keepcover.attacks import NoisyModel, pgd
from keepcover.bounds import conformal_rank, exact_level
from keepcover.engine.inputs import Rows, batches
from keepcover.engine.smoother import Smoother
from keepcover.errors import InputError, KeepcoverWarning
from keepcover.guarantee import Guarantee
from keepcover.methods import (
    METHODS,
    RCP1,
    Asked,
    Exact,
    ExactAsymmetric,
    Holdout,
    Method,
    RSCPPlus,
    get_method,
    usable,
)
from keepcover.methods.exact import HullRule
from keepcover.noise import Stream
from keepcover.prediction import Predictor, calibrate
from keepcover.prediction.predictor import Calibrated
from keepcover.promises import Sample
from keepcover.scores import APS, HPS, RAPS, CustomScore, Draws, Reading, get_score, hps
from keepcover.tasks import Classification, PredictionSets
from tests.toys import Recorder, nearest, network, toy

# Averaging methods need more draws than this to say anything; that they say nothing is warned about, and not at issue.
trivial_is_fine = pytest.mark.filterwarnings("ignore:.*can only return everything:keepcover.KeepcoverWarning")

ASK: dict[str, Any] = {"alpha": 0.1, "epsilon": 0.05, "sigma": 0.1, "draws": 8, "calibration_draws": 8, "seed": 1}
CAL, HELD, TEST = toy(120, seed=1), toy(40, seed=2), toy(60, seed=3)
RANDOM = usable(Gaussian(0.1), Classification())
EVERY = (*RANDOM, "auto")


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return nearest()


@pytest.fixture(scope="module")
def exact(model: nn.Module) -> Predictor:
    return calibrate(model, CAL, method="exact", holdout=HELD, **ASK)


def held_out(model: nn.Module, sigma: float, draws: int) -> Holdout:
    """The holdout as calibrate with seed 1 sees it."""
    logits = Smoother(model, sigma).logits(HELD[0], draws, Stream(1, "holdout"))
    return Holdout(Classification(classes=4), logits, HELD[1], torch.zeros(len(HELD[0])))


def same_level(one: Calibrated, two: Calibrated) -> bool:
    """The same rule, parameters and question included, and the same threshold."""
    return one.rule == two.rule and torch.equal(one.threshold, two.threshold)


def equal_but_for_ties(one: PredictionSets, two: PredictionSets) -> bool:
    """Rounding may move a score across the threshold: at most one label in a thousand."""
    return float((one.mask != two.mask).double().mean()) <= 1e-3


# -- every set by hand -------------------------------------------------------------------------------------------------


@trivial_is_fine
@pytest.mark.parametrize(("name", "score"), [*((name, "hps") for name in EVERY), *((name, "aps") for name in RANDOM)])
def test_sets_are_what_the_theorem_says(name: str, score: str, model: nn.Module) -> None:
    """Scores, transform, rule, threshold and sets from their definitions, on the keyed noise."""
    predictor = calibrate(model, CAL, method=name, score=score, holdout=HELD, **ASK)
    rule, function = predictor.rule, {"hps": HPS(), "aps": APS()}[score]
    ptt = rule.method.transform is not None
    assert ptt == (not rule.method.compares_only)
    assert list(predictor.levels) == [(0.1, 0.05)]

    def noisy(data: tuple[Tensor, Tensor], role: str, seed: int) -> tuple[Tensor, Tensor]:
        stream, images, ids = Stream(seed, role), data[0], torch.arange(len(data[0]))
        inputs = stream.noisy(images, ids, range(8), 0.1).flatten(0, 1)
        return model(inputs).detach().view(len(images), 8, 4), stream.uniform(ids, "aps")

    def scores(data: tuple[Tensor, Tensor], role: str, seed: int) -> Draws:
        logits, u = noisy(data, role, seed)
        return Draws(function.order(logits, u[:, None]).transpose(1, 2))

    held, cal, test = scores(HELD, "holdout", 1), scores(CAL, "calibration", 1), scores(TEST, "test", 7)
    if ptt:
        steps = PTT().fit(held.of_label(HELD[1]).values[:, 0], 0.1)
        cal, test = (Draws(steps(some.values)) for some in (cal, test))
    # The same method, fitted again on a holdout made by hand: every parameter that it chose, and whatever it compares by.
    logits, u = noisy(HELD, "holdout", 1)
    holdout = Holdout(Classification(score, classes=4), logits, HELD[1], u if score == "aps" else torch.zeros(40))
    refit = get_method(name).fit(
        Asked(0.1, Threat(Gaussian(0.1), 0.05), 8, 120, 4, get_method(name).draws_used(8, 8)[1]), holdout
    )
    assert (type(refit), refit.asked) == (type(rule), rule.asked)
    assert refit.parameters() == rule.parameters()
    true = cal.of_label(CAL[1]).first(rule.calibration_draws)
    threshold = refit.threshold_of(Sample(refit.statistic(true)))
    assert float(predictor.threshold) == pytest.approx(threshold, rel=1e-4, abs=1e-5)
    v = Stream(7, "test").uniform(torch.arange(60), "boundary")
    expected = rule.test_statistic(test.first(rule.test_draws), v) <= predictor.threshold
    found = predictor.predict(TEST[0], seed=7)
    assert equal_but_for_ties(found, PredictionSets(expected, predictor.guarantee))
    assert found.guarantee == predictor.guarantee
    assert isinstance(found.guarantee, Guarantee)
    assert (found.guarantee.score, found.guarantee.transform) == (score, "ptt" if ptt else "none")
    assert (predictor.guarantee.n, predictor.holdout_size, predictor.draws) == (120, 40, rule.test_draws)


@pytest.mark.parametrize("name", EVERY)
def test_every_method_covers_clean_points(name: str, model: nn.Module) -> None:
    """Covered counts of cp and cp_smoothed follow the beta-binomial law, of the others at least; rate 1e-6 each."""
    draws = 256 if name.startswith(("rscp_plus", "bincp", "cas")) else 8
    ask = {**ASK, "draws": draws, "calibration_draws": draws if name != "auto" else 16}
    predictor = calibrate(model, toy(160, seed=4), method=name, holdout=HELD, **ask)
    images, labels = toy(300, seed=5)
    sets = predictor.predict(images, seed=3)
    covered = int(sets.mask[torch.arange(300), labels].sum())
    rank = 161 - math.floor(161 * 0.1)
    assert stats.betabinom.cdf(covered, 300, rank, 161 - rank) > 1e-6
    assert sets.measure(labels).coverage.mean == covered / 300
    assert predictor.guarantee.certified == (name == "auto" or METHODS[name].certified)


def test_auto_is_no_worse_than_what_it_chooses_from(model: nn.Module) -> None:
    """By the holdout's estimate, which is what it minimises."""
    ask = {**ASK, "draws": 4, "calibration_draws": 16, "holdout": HELD}
    holdout = held_out(model, 0.1, 16)
    size = {
        name: calibrate(model, CAL, method=name, **ask).rule.estimated_size(holdout)
        for name in ("auto", "exact", "exact_asymmetric")
    }
    assert size["auto"] <= min(size["exact"], size["exact_asymmetric"]) + 1e-9


# -- the promise, end to end -------------------------------------------------------------------------------------------

WEIGHT = torch.tensor([0.6, 0.0, -0.8])  # a unit vector


class HalfSpace(nn.Module):
    """Two classes, margin linear in x: exceeding any threshold is a half-space event, so moving x by epsilon along the
    weights raises its probability q to shift(q, epsilon / sigma) exactly. Nothing is worse."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        with torch.no_grad():
            self.linear.weight.copy_(torch.stack([WEIGHT, -WEIGHT]))
            self.linear.bias.zero_()

    def forward(self, images: Tensor) -> Tensor:
        return self.linear(images)


def points(count: int, law: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Labels at random; w . x is the label's sign times a depth: one value, or one of two."""
    labels = torch.randint(2, (count,), generator=generator)
    depth = torch.full((count,), 0.4)
    if law == "mixture":
        depth[torch.rand(count, generator=generator) < 0.15] = -0.1
    return (depth * (1 - 2 * labels))[:, None] * WEIGHT + torch.tensor([0.4, 0.5, 0.3]), labels


def misses(law: str, repetitions: int, **options: Any) -> tuple[int, int]:
    """Independent calibrations, one fresh query each: how often its label was left out, clean and attacked."""
    model, generator, clean, attacked = HalfSpace(), torch.Generator().manual_seed(17), 0, 0
    epsilon = options["epsilon"]
    for repetition in range(repetitions):
        data, (x, y) = points(50, law, generator), points(1, law, generator)
        holdout = points(20, law, generator)
        predictor = calibrate(model, data, holdout=holdout, seed=repetition, **options)
        worst = x - epsilon * (1 - 2 * y)[:, None] * WEIGHT
        covered = predictor.predict(torch.cat([x, worst]), seed=10_000 + repetition).mask[:, y[0]]
        clean, attacked = clean + int(not covered[0]), attacked + int(not covered[1])
    return clean, attacked


def too_many(count: int, repetitions: int, rate: float) -> bool:
    """Exact one-sided binomial test with false-alarm rate 1e-7."""
    return bool(stats.binom.sf(count - 1, repetitions, rate) < 1e-7)


PROMISES: dict[str, tuple[int, dict[str, Any]]] = {
    "rcp1": (100, {"method": "rcp1"}),
    "exact-2": (80, {"method": "exact", "draws": 2, "calibration_draws": 2}),
    "exact-randomised": (40, {"method": Exact(randomize=True), "draws": 2, "calibration_draws": 4}),
    "exact_asymmetric-1": (40, {"method": "exact_asymmetric", "draws": 1, "calibration_draws": 4}),
    "bincp": (80, {"method": "bincp", "draws": 64}),
    "bincp_sharp": (80, {"method": "bincp_sharp", "draws": 32}),
    "bincp_threshold": (80, {"method": "bincp_threshold", "draws": 64}),
    "rscp_plus_hoeffding": (60, {"method": "rscp_plus_hoeffding", "draws": 256}),
}


@trivial_is_fine
@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("law", ["point", "mixture"])
@pytest.mark.parametrize("case", list(PROMISES))
def test_certified_coverage_survives_the_worst_attack(case: str, law: str) -> None:
    """32 exact tests at 1e-7 each. On a point mass RCP1 attains alpha, up to the n in 1/(n+1): not below 0.12, at 1e-7."""
    repetitions, options = PROMISES[case]
    clean, attacked = misses(law, repetitions, alpha=0.2, epsilon=0.3, sigma=0.25, **options)
    assert not too_many(clean, repetitions, 0.2)
    assert not too_many(attacked, repetitions, 0.2)
    if (case, law) == ("rcp1", "point"):
        assert stats.binom.cdf(attacked, repetitions, 0.12) > 1e-7


@pytest.mark.usefixtures("untyped")
def test_vanilla_coverage_does_not() -> None:
    """The same test rejects conformal prediction on one noisy draw, so it can reject. Its clean coverage is fine."""
    clean, attacked = misses("point", 80, alpha=0.2, epsilon=0.3, sigma=0.25, method="cp")
    assert not too_many(clean, 80, 0.2)
    assert too_many(attacked, 80, 0.2)


# -- seeds -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undecided() -> Predictor:
    """Noise far larger than the signal: whether a label is in is nearly a coin with weight 0.9."""
    images, labels = toy(400, classes=3, seed=6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KeepcoverWarning)
        return calibrate(nearest(3), (images, labels), method="rcp1", alpha=0.5, epsilon=0.01, sigma=5.0)


def test_without_a_seed_every_prediction_is_fresh(undecided: Predictor) -> None:
    """Each label is in with probability 0.3 to 0.7, so two calls agree on an image with probability below 0.71, on 100
    images below 1e-14."""
    images = toy(100, classes=3, seed=7)[0]
    one, two = (undecided.predict(images) for _ in range(2))
    assert 0.25 < float(one.mask.double().mean()) < 0.75
    assert not torch.equal(one.mask, two.mask)
    seeded = [undecided.predict(images, seed=seed).mask for seed in (5, 5, 6)]
    assert torch.equal(seeded[0], seeded[1])
    assert not torch.equal(seeded[1], seeded[2])


def test_without_a_seed_every_calibration_is_fresh() -> None:
    """Two thresholds of 108 continuous scores: equal with probability 0 but for float32; with one seed, equal."""
    ask = {"method": "rcp1", "epsilon": 0.01, "sigma": 0.1}

    def threshold(seed: int | None) -> float:
        return float(calibrate(nearest(), CAL, seed=seed, **ask).threshold)

    assert threshold(None) != threshold(None)
    assert threshold(3) == threshold(3) != threshold(4)


def test_holdout_calibration_test_and_attack_share_no_noise() -> None:
    """One seed, all images zero: whatever the network sees is the noise, and no vector comes twice."""
    recorder, zeros = Recorder(), torch.zeros(30, 5)
    labels = torch.arange(30) % 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KeepcoverWarning)
        predictor = calibrate(
            recorder,
            (zeros, labels),
            holdout=(zeros[:15], labels[:15]),
            method="exact",
            draws=4,
            calibration_draws=4,
            epsilon=0.1,
            sigma=1.0,
            seed=11,
        )
    predictor.predict(zeros, seed=11)
    NoisyModel(recorder, 1.0, 4, Stream(11, "attack")).outputs(zeros, torch.arange(30))
    vectors = recorder.inputs
    # And some inputs without noise, all of them zero, and the fixed inputs by which the model is known again.
    clean = 8 + 15
    assert len(vectors) == 4 * (30 + 15 + 30 + 30) + clean + 4
    assert len(vectors.unique(dim=0)) == len(vectors) - clean + 1


def test_the_seed_is_nowhere_to_be_seen(model: nn.Module, tmp_path: Any) -> None:
    secret = 918273645546372819
    predictor = calibrate(model, CAL, method="rcp1", **{**ASK, "seed": secret})
    sets = predictor.predict(TEST[0], seed=secret)
    predictor.save(tmp_path / "predictor.safetensors")
    saved = (tmp_path / "predictor.safetensors").read_bytes()
    for shown in (repr(predictor), str(sets), repr(vars(predictor)), repr(Stream(secret, "test")), repr(saved)):
        assert str(secret) not in shown


# -- levels ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def several(model: nn.Module) -> Predictor:
    ask = {**ASK, "alpha": (0.1, 0.2), "epsilon": (0.05, 0.0, 0.1, 0.02)}
    return calibrate(model, CAL, method="exact", holdout=HELD, **ask)


def test_one_predictor_answers_for_every_level(several: Predictor) -> None:
    every = several.predict_all(TEST[0], seed=9)
    assert list(every) == [(a, e) for a in (0.1, 0.2) for e in (0.05, 0.0, 0.1, 0.02)]
    for (alpha, epsilon), sets in every.items():
        alone = several.predict(TEST[0], alpha=alpha, epsilon=epsilon, seed=9)
        assert torch.equal(sets.mask, alone.mask)
        assert sets.guarantee == alone.guarantee == several.at(alpha, epsilon).guarantee
        assert (sets.guarantee.alpha, sets.guarantee.epsilon) == (alpha, epsilon)
    assert torch.equal(several.predict(TEST[0], seed=9).mask, every[0.1, 0.05].mask)  # the first named
    assert several.guarantee.epsilon == 0.05


def test_one_level_of_several_is_what_it_would_be_alone(several: Predictor, model: nn.Module) -> None:
    for level, calibrated in several.levels.items():
        ask = {**ASK, "alpha": level[0], "epsilon": level[1]}
        alone = calibrate(model, CAL, method="exact", holdout=HELD, **ask)
        assert same_level(alone.levels[level], calibrated)


@trivial_is_fine
@pytest.mark.parametrize("name", ["cp", "rscp", "rscp_plus_bernstein"])
def test_levels_of_averaging_methods_are_what_they_would_be_alone(name: str, model: nn.Module) -> None:
    """PTT is centred at 1 - alpha, so each alpha has its own."""
    alphas = (0.2, 0.1, 0.3)
    together = calibrate(model, CAL, method=name, holdout=HELD, **{**ASK, "alpha": alphas})
    every = together.predict_all(TEST[0], seed=2)
    for alpha in alphas:
        alone = calibrate(model, CAL, method=name, holdout=HELD, **{**ASK, "alpha": alpha})
        assert same_level(alone.levels[alpha, 0.05], together.levels[alpha, 0.05])
        assert torch.equal(alone.predict(TEST[0], seed=2).mask, every[alpha, 0.05].mask)


def test_nested_sets_are_unions_and_grow(several: Predictor) -> None:
    plain, nested = several.predict_all(TEST[0], seed=4), several.predict_all(TEST[0], nested=True, seed=4)
    for alpha in (0.1, 0.2):
        ordered = sorted(e for a, e in several.levels if a == alpha)
        for epsilon in ordered:
            union = torch.stack([plain[alpha, e].mask for e in ordered if e <= epsilon]).any(dim=0)
            assert torch.equal(nested[alpha, epsilon].mask, union)
            alone = several.predict(TEST[0], alpha=alpha, epsilon=epsilon, nested=True, seed=4)
            assert torch.equal(alone.mask, union)
            assert nested[alpha, epsilon].guarantee == plain[alpha, epsilon].guarantee
        for small, large in pairwise(ordered):
            assert (nested[alpha, small].mask <= nested[alpha, large].mask).all()


def test_at_is_the_predictor_of_one_level(several: Predictor) -> None:
    for level, calibrated in several.levels.items():
        one = several.at(*level)
        assert list(one.levels) == [level]
        assert (one.rule, one.guarantee, one.full) == (calibrated.rule, several.promised(calibrated), calibrated.full)
        assert one.threshold is calibrated.threshold
        assert (one.threshold.dtype, one.threshold.shape) == (torch.float64, ())
        assert torch.equal(
            one.predict(TEST[0], seed=4).mask, several.predict(TEST[0], alpha=level[0], epsilon=level[1], seed=4).mask
        )
    assert list(several.at().levels) == [(0.1, 0.05)]
    assert list(several.at(epsilon=0.1).levels) == [(0.1, 0.1)]
    assert list(several.at(alpha=0.2).levels) == [(0.2, 0.05)]


def test_thresholds_fall_with_alpha_and_rise_with_epsilon(model: nn.Module) -> None:
    """Of one rule, whatever the level: rcp1 has nothing to choose."""
    ask = {**ASK, "alpha": (0.05, 0.1, 0.3), "epsilon": (0.0, 0.02, 0.05)}
    found = calibrate(model, CAL, method="rcp1", **ask)
    at = torch.tensor([[float(found.at(a, e).threshold) for e in ask["epsilon"]] for a in ask["alpha"]])
    assert (at[1:] <= at[:-1]).all()
    assert (at[:, 1:] >= at[:, :-1]).all()
    assert len(at.unique()) > 4


def test_a_level_that_was_not_calibrated_is_refused(several: Predictor) -> None:
    with pytest.raises(InputError, match=r"calibrated for \(alpha 0.1, epsilon 0.05\).*got alpha 0.1, epsilon 0.3"):
        several.predict(TEST[0], epsilon=0.3)
    with pytest.raises(InputError, match=r"got alpha 0\.05, epsilon 0\.05"):
        several.at(alpha=0.05)


# -- the holdout -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("asked", "held"), [(None, 12), (7, 7), (60, 60)])
def test_holdout_and_calibration_are_disjoint_and_exhaustive(asked: int | None, held: int) -> None:
    """What is held out and what calibrates are all the points, each once: the ids of their noise say so."""
    recorder, zeros = Recorder(), torch.zeros(120, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KeepcoverWarning)
        predictor = calibrate(
            recorder,
            (zeros, torch.arange(120) % 3),
            holdout=asked,
            method="exact",
            draws=1,
            calibration_draws=1,
            epsilon=0.1,
            sigma=1.0,
            seed=4,
        )
    assert (predictor.holdout_size, predictor.guarantee.n) == (held, 120 - held)
    seen, ids = recorder.inputs, torch.arange(120)
    roles = {role: Stream(4, role).noisy(zeros, ids, range(1), 1.0)[:, 0] for role in ("holdout", "calibration")}
    used = {role: {i for i in range(120) if (seen == noise[i]).all(dim=1).any()} for role, noise in roles.items()}
    assert len(used["holdout"]) == held
    assert used["holdout"] | used["calibration"] == set(range(120))
    assert not used["holdout"] & used["calibration"]


def _joined(one: Any, two: Any) -> Any:
    return tuple(torch.cat(pair) for pair in zip(one, two))


CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "pair": lambda data: data,
    "arrays": lambda data: (data[0].double().numpy(), data[1].numpy()),
    "dataset": lambda data: TensorDataset(*data),
    "loader": lambda data: DataLoader(TensorDataset(*data), batch_size=7),
    "generator": lambda data: ((data[0][at : at + 9], data[1][at : at + 9]) for at in range(0, len(data[0]), 9)),
}


@pytest.mark.parametrize("held", list(CONTAINERS))
@pytest.mark.parametrize("kind", list(CONTAINERS))
def test_a_holdout_that_overlaps_the_calibration_points_is_refused(kind: str, held: str, model: nn.Module) -> None:
    """All of it, or one point; in memory before the network runs."""
    calls: list[int] = []

    def counting(images: Tensor) -> Tensor:
        calls.append(len(images))
        return model(images)

    one = tuple(part[17:18] for part in CAL)
    for holdout, shared in ((CAL, 120), (_joined(HELD, one), 1)):
        with pytest.raises(InputError, match=f"{shared} of the calibration points are in holdout= too.*disjoint parts"):
            calibrate(counting, CONTAINERS[kind](CAL), method="exact", holdout=CONTAINERS[held](holdout), **ASK)
    in_memory = {kind, held} <= {"pair", "arrays"}
    assert (calls == []) is in_memory
    calibrate(counting, CONTAINERS[kind](CAL), method="exact", holdout=CONTAINERS[held](HELD), **ASK)


def test_rows_that_repeat_by_chance_are_no_overlap() -> None:
    """Four binary features: holdout and calibration points cannot but coincide. The same points again are noticed."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    bits = torch.randint(0, 2, (300, 4), generator=generator).float()
    labels = model(bits).argmax(dim=1)
    calibrate(model, (bits[:200], labels[:200]), method="exact", holdout=(bits[200:], labels[200:]), **ASK)
    mixed = torch.cat([bits[:, :2], torch.rand(300, 2, generator=generator)], dim=1)
    labels = model(mixed).argmax(dim=1)
    with pytest.raises(InputError, match="100 of the calibration points"):
        calibrate(model, (mixed[:200], labels[:200]), method="exact", holdout=(mixed[100:], labels[100:]), **ASK)


def test_rows_of_large_numbers_are_told_apart(model: nn.Module) -> None:
    """Unix times a second apart are one float32 number."""
    times = 1.7e9 + torch.arange(60, dtype=torch.float64)[:, None]
    labels = torch.zeros(60, dtype=torch.int64)
    one, two, three = Rows(), Rows(), Rows()
    for rows, part in ((one, slice(0, 40)), (two, slice(40, 60)), (three, slice(39, 60))):
        for batch in batches((times[part], labels[part])):
            rows.add(batch)
    assert (one.shared(two), one.shared(three)) == (0, 1)


@pytest.mark.parametrize("alpha", [0.9, (0.1, 0.95)])
def test_alpha_that_looks_like_coverage_is_warned_about(alpha: Any, model: nn.Module) -> None:
    with pytest.warns(
        KeepcoverWarning, match=r"alpha is miscoverage: 0\.9.* % of sets hold the truth; for 9.* give alpha 0\."
    ):
        calibrate(model, CAL, method="rcp1", epsilon=0.01, sigma=0.1, alpha=alpha)
    with pytest.warns(
        KeepcoverWarning, match=r"promises that 10 % of sets hold the truth; for 90 % coverage give alpha 0\.1"
    ):
        keepcover.split_conformal((torch.eye(3).repeat(9, 1), torch.arange(27) % 3), torch.eye(3), alpha=0.9)


def test_the_default_holdout_is_a_tenth_and_at_most_500(model: nn.Module) -> None:
    images, labels = toy(5200, seed=1)
    ask = {**ASK, "draws": 1, "calibration_draws": 1, "method": "exact"}
    for n, held in ((95, 9), (5200, 500)):
        predictor = calibrate(model, (images[:n], labels[:n]), **ask)
        assert (predictor.holdout_size, predictor.guarantee.n) == (held, n - held)


@pytest.mark.parametrize("name", ["cp", "rcp1"])
def test_methods_that_need_no_holdout_calibrate_on_everything(name: str, model: nn.Module) -> None:
    predictor = calibrate(model, CAL, method=name, **ASK)
    assert (predictor.holdout_size, predictor.guarantee.n, predictor.reference) == (0, 120, None)


# -- choosing sigma ----------------------------------------------------------------------------------------------------


def lame() -> nn.Module:
    """A coarse error in every weight: larger sets."""
    model = nearest()
    with torch.no_grad():
        model[1].weight += 3 * torch.randn(model[1].weight.shape, generator=torch.Generator().manual_seed(1))
    return model


@trivial_is_fine
@pytest.mark.parametrize("name", ["exact", "rscp", "auto", "rcp1", "cp"])
@pytest.mark.parametrize("order", [1, -1])
def test_the_better_pair_is_chosen(name: str, order: int, model: nn.Module) -> None:
    ask = {key: value for key, value in ASK.items() if key != "sigma"}
    pairs: list[tuple[float, nn.Module]] = [(0.1, model), (0.1, lame())][::order]
    predictor = calibrate(pairs, CAL, method=name, **{**ask, "draws": 4})
    assert predictor.running.model is model


def test_the_better_sigma_is_chosen(model: nn.Module) -> None:
    """At epsilon 0.1 noise of 0.005 certifies nothing and noise of 3 drowns everything."""
    ask = {key: value for key, value in ASK.items() if key != "sigma"}
    pairs = [(0.005, model), (0.1, model), (3.0, model)]
    predictor = calibrate(pairs, CAL, method="exact", holdout=HELD, **{**ask, "epsilon": 0.1})
    assert predictor.noise == predictor.guarantee.threat.noise == Gaussian(0.1)


@pytest.mark.parametrize("method", [Exact(), ExactAsymmetric(), RCP1()])
def test_a_rule_that_can_only_say_everything_expects_that(method: Method, model: nn.Module) -> None:
    """At epsilon = 20 sigma no threshold is possible: the estimate that sigma and auto are chosen by must say K."""
    holdout = held_out(model, 0.005, 8)
    rule = method.fit(Asked(0.1, Threat(Gaussian(0.005), 0.1), 8, 120, 4, 8), holdout)
    assert rule.threshold(holdout.items(Reading(order=True))) == math.inf
    assert rule.estimated_size(holdout) == 4


def test_one_pair_is_that_model(model: nn.Module) -> None:
    ask = {key: value for key, value in ASK.items() if key != "sigma"}
    one = calibrate([(0.1, model)], CAL, method="exact", holdout=HELD, **ask)
    two = calibrate(model, CAL, method="exact", holdout=HELD, **ASK)
    assert one.levels.keys() == two.levels.keys()
    assert same_level(one.levels[0.1, 0.05], two.levels[0.1, 0.05])


# -- scores ------------------------------------------------------------------------------------------------------------


def negative_logit(logits: Tensor) -> Tensor:
    return -logits


@pytest.mark.parametrize("score", [negative_logit, CustomScore(negative_logit, "negative")])
def test_an_unbounded_score_of_your_own(score: Any, model: nn.Module) -> None:
    """Count rules take it as it is; what assumes [0, 1] refuses it and says what to do, or takes it through PTT."""
    ask = {**ASK, "holdout": HELD, "score": score}
    predictor = calibrate(model, CAL, method="exact", **ask)
    noisy = Draws(-predictor.running.logits(TEST[0], 8, Stream(5, "test")).transpose(1, 2))
    expected = predictor.rule.test_statistic(noisy) <= predictor.threshold
    assert torch.equal(predictor.predict(TEST[0], seed=5).mask, expected)
    for name in ("rscp", "rscp_plus_hoeffding"):
        with pytest.raises(InputError, match=rf"{name} .*scores in \[0, 1\].*use transform='ptt'.*exact"):
            calibrate(model, CAL, method=get_method(name, transform=None), **ask)
    assert calibrate(model, CAL, method="rscp", **ask).guarantee.transform == "ptt"


def test_a_score_may_use_u(model: nn.Module) -> None:
    """HPS plus a little of u: one number per image, the same for calibration here and for prediction below."""
    score = CustomScore(lambda logits, u: hps(logits) + torch.as_tensor(u)[..., None], name="jittered")
    predictor = calibrate(model, CAL, method="cp", score=score, **{**ASK, "sigma": 0.0, "draws": 1})
    u = Stream(1, "calibration").uniform(torch.arange(120), "aps")
    expected = hps(model(CAL[0]).detach())[torch.arange(120), CAL[1]] + u
    rank = 121 - math.floor(12.1)
    threshold = float(predictor.threshold)
    assert threshold == pytest.approx(float(expected.sort().values[rank - 1]), abs=1e-6)
    test_u = Stream(3, "test").uniform(torch.arange(60), "aps")
    mask = hps(model(TEST[0]).detach()) + test_u[:, None] <= threshold
    assert equal_but_for_ties(predictor.predict(TEST[0], seed=3), PredictionSets(mask, predictor.guarantee))


@pytest.mark.parametrize("score", ["aps", "raps", APS(), RAPS(penalty=0.2, k_reg=0)])
def test_adaptive_scores_share_one_u_per_image(score: Any, model: nn.Module) -> None:
    """cp without noise: labels in are those with APS (RAPS) at most the threshold, u keyed by id and seed."""
    predictor = calibrate(model, CAL, method="cp", score=score, **{**ASK, "sigma": 0.0, "draws": 1})
    ids = torch.arange(60) + 1000
    u = Stream(3, "test").uniform(ids, "aps")
    mask = get_score(score)(model(TEST[0]).detach(), u) <= predictor.threshold
    found = predictor.predict(TEST[0], ids=ids, seed=3)
    assert equal_but_for_ties(found, PredictionSets(mask, predictor.guarantee))
    assert not torch.equal(found.mask, predictor.predict(TEST[0], ids=ids, seed=4).mask)
    assert found.guarantee.score == get_score(score).name


def test_a_score_that_is_nan_is_refused(model: nn.Module) -> None:
    score = CustomScore(lambda logits: logits * torch.nan, name="broken")
    with pytest.raises(InputError, match="score 'broken' returned NaN; a NaN has no rank"):
        calibrate(model, CAL, method="exact", score=score, **ASK)


def test_a_randomised_boundary_is_chosen_where_it_helps(model: nn.Module) -> None:
    """With few draws counts are coarse: gamma > 0 then gives smaller sets on the holdout, and v is keyed by seed and id."""
    ask = {**ASK, "draws": 3, "calibration_draws": 3, "holdout": HELD, "epsilon": 0.1, "sigma": 0.3}
    plain = calibrate(model, CAL, method=Exact(), **ask)
    random = calibrate(model, CAL, method=Exact(randomize=True), **ask)
    rules = [predictor.rule for predictor in (plain, random)]
    assert all(type(rule) is HullRule for rule in rules)
    assert [rule.randomized for rule in rules] == [False, True]
    holdout = held_out(model, 0.3, 3)
    assert rules[1].estimated_size(holdout) < rules[0].estimated_size(holdout)
    # The sets by hand: with v = v(seed, id) below gamma, one more draw above t is forgiven.
    rule, threshold = random.rule, random.threshold
    assert isinstance(rule, HullRule)
    draws = Draws(
        Classification(classes=4)
        .prepare(random.running.logits(TEST[0], 3, Stream(1, "test")), Reading(order=True), torch.zeros(60))
        .values
    )
    forgiven = Stream(1, "test").uniform(torch.arange(60), "boundary") < rule.gamma
    assert 0 < int(forgiven.sum()) < 60
    allowed = rule.kappa + forgiven.long()
    found = random.predict(TEST[0], seed=1).mask
    assert torch.equal(found, draws.above(float(threshold)) <= allowed[:, None])
    assert not torch.equal(found, draws.above(float(threshold)) <= rule.kappa)


# -- containers, ids, names -----------------------------------------------------------------------------------


def test_every_container_calibrates_alike(model: nn.Module) -> None:
    containers: list[Any] = [
        (CAL[0].numpy(), CAL[1].numpy()),
        (CAL[0], CAL[1].tolist()),
        TensorDataset(*CAL),
        DataLoader(TensorDataset(*CAL), batch_size=32),
        list(zip(CAL[0].split(50), CAL[1].split(50))),
    ]
    expected = calibrate(model, CAL, method="exact", **{**ASK, "holdout": 20})
    for data in containers:
        found = calibrate(model, data, method="exact", **{**ASK, "holdout": 20})
        assert found.guarantee == expected.guarantee
        assert float(found.threshold) == pytest.approx(float(expected.threshold), abs=1e-5)
    generated = calibrate(model, iter(zip(CAL[0].split(50), CAL[1].split(50))), method="exact", holdout=HELD, **ASK)
    assert generated.guarantee.n == 120


def test_shuffled_loaders_keep_noise_and_labels_with_their_images(model: nn.Module) -> None:
    """A shuffled loader is another order of the points: valid, the promise the same, accuracy of labels untouched."""
    loader = DataLoader(TensorDataset(*toy(300, seed=9)), batch_size=64, shuffle=True)
    predictor = calibrate(model, loader, method="exact", **ASK)
    assert predictor.guarantee.n + predictor.holdout_size == 300
    images, labels = toy(300, seed=10)
    assert predictor.predict(images, seed=1).measure(labels).coverage.mean > 0.8


def test_ids_make_calibration_and_prediction_independent_of_order(model: nn.Module, exact: Predictor) -> None:
    order, ids = torch.randperm(120), torch.arange(120) * 7
    ask = {**ASK, "method": "exact", "holdout": HELD}
    one = calibrate(model, CAL, ids=ids, **ask)
    two = calibrate(model, (CAL[0][order], CAL[1][order]), ids=ids[order], **ask)
    assert float(one.threshold) == pytest.approx(float(two.threshold), abs=1e-5)
    assert not torch.equal(one.threshold, exact.threshold)
    turn, own = torch.randperm(60), torch.arange(60) + 5
    sets = exact.predict(TEST[0], ids=own, seed=2)
    assert equal_but_for_ties(exact.predict(TEST[0][turn], ids=own[turn], seed=2), sets[turn])


@pytest.mark.parametrize("batch_size", [7, 32, 120])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_holdout_is_drawn_from_a_loader_as_it_streams_by(batch_size: int, workers: int, model: nn.Module) -> None:
    """One pass, and the same points held out as from memory: by position, whatever the batches are."""
    passes: list[int] = []

    class Counted(TensorDataset):
        def __getitem__(self, index: int) -> tuple[Tensor, ...]:
            passes.append(index)
            return super().__getitem__(index)

    loader = DataLoader(Counted(*CAL), batch_size=batch_size, num_workers=workers)
    expected = calibrate(model, CAL, method="exact", **{**ASK, "holdout": 25})
    found = calibrate(model, loader, method="exact", **{**ASK, "holdout": 25})
    assert workers or passes == list(range(120))
    assert (found.rule, found.holdout_size, found.guarantee.n) == (expected.rule, 25, 95)
    assert float(found.threshold) == pytest.approx(float(expected.threshold), abs=1e-5)
    torch.testing.assert_close(found.items.draws.values, expected.items.draws.values, rtol=0, atol=1e-4)
    assert found.inputs == expected.inputs


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_sets_do_not_depend_on_the_batch_size(batch_size: int, exact: Predictor, model: nn.Module) -> None:
    smoother = Smoother(model, 0.1, batch_size=batch_size)
    other = calibrate(smoother, CAL, method="exact", holdout=HELD, **{**ASK, "sigma": None})
    assert float(other.threshold) == pytest.approx(float(exact.threshold), abs=1e-5)
    assert equal_but_for_ties(other.predict(TEST[0], seed=3), exact.predict(TEST[0], seed=3))


@pytest.mark.parametrize("score", ["hps", "aps"])
@pytest.mark.parametrize("name", ["cp", "rscp", "exact"])
@trivial_is_fine
def test_scores_are_computed_in_pieces(
    name: str, score: str, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU looks at a few images at a time: thresholds and sets are the same to the last bit."""
    ask = {**ASK, "method": name, "score": score, "epsilon": [0.01, 0.05], "holdout": HELD}
    whole = calibrate(model, CAL, **ask)
    sets = whole.predict_all(TEST[0], seed=3, nested=True)
    monkeypatch.setattr("keepcover.scores.draws.PIECE", 100)
    few = calibrate(model, CAL, **ask)
    assert [float(one.threshold) for one in few.levels.values()] == [
        float(one.threshold) for one in whole.levels.values()
    ]
    for level, own in few.predict_all(TEST[0], seed=3, nested=True).items():
        assert torch.equal(own.mask, sets[level].mask)


@pytest.mark.filterwarnings("ignore:alpha is miscoverage")
@pytest.mark.parametrize("classes", [3, 10, 1000])
@pytest.mark.parametrize("ties", [False, True])
def test_calibration_points_below_the_threshold_are_covered(classes: int, ties: bool) -> None:
    """Without noise a calibration point scores the same when it is predicted, to the last bit: at every alpha the point
    whose score is the threshold is in.

    Calibration scores true labels only. Were that a rounding away from the scores of all labels, whole atoms of tied
    scores would be lost.
    """
    generator = torch.Generator().manual_seed(classes)
    logits = 4 * torch.randn(300, classes, generator=generator)
    logits = logits[torch.arange(300) % 4] if ties else logits
    labels = torch.where(torch.rand(300, generator=generator) < 0.7, logits.argmax(dim=1), torch.arange(300) % classes)
    alphas = [percent / 100 for percent in range(1, 100)]
    predictor = calibrate(
        lambda x: x, (logits, labels), alpha=alphas, epsilon=0.0, sigma=0.0, method="cp", draws=1, seed=0
    )
    for (alpha, _), sets in predictor.predict_all(logits).items():
        covered = int(sets.mask.gather(1, labels[:, None]).sum())
        rank = conformal_rank(300, exact_level(alpha))
        assert covered >= rank if ties else covered == rank


def test_only_randomised_scores_and_rules_draw_numbers(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """One number takes some hundred kernels; nobody needs it for HPS or a boundary that is not randomised."""
    drawn: list[str] = []
    monkeypatch.setattr(
        Stream, "uniform", lambda self, ids, purpose: drawn.append(purpose) or torch.full((len(ids),), 0.5)
    )
    for score, expected in (("hps", set()), ("aps", {"aps"})):
        predictor = calibrate(model, CAL, method="exact", holdout=HELD, score=score, **ASK)
        predictor.predict(TEST[0])
        assert set(drawn) == expected
        drawn.clear()
    (level, calibrated), *_ = predictor.levels.items()
    assert isinstance(calibrated.rule, HullRule)
    predictor = replace(predictor, levels={level: replace(calibrated, rule=replace(calibrated.rule, gamma=0.5))})
    predictor.predict(TEST[0])
    assert set(drawn) == {"aps", "boundary"}


def test_numerics_reach_the_network() -> None:
    ask = {**ASK, "draws": 2, "calibration_draws": 2, "method": "exact", "holdout": HELD}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KeepcoverWarning)  # an untrained network
        full, mixed = (
            calibrate(Smoother(network(), 0.1, autocast=dtype), CAL, **ask) for dtype in (None, torch.bfloat16)
        )
    assert (
        mixed.numerics == mixed.running.numerics == {"autocast": "bfloat16", "channels_last": False, "compile": False}
    )
    assert not torch.equal(mixed.threshold, full.threshold)
    assert mixed.predict(TEST[0]).mask.any()


def test_class_names_are_what_sets_read_as(model: nn.Module) -> None:
    names = ["cat", "dog", "owl", "yak"]
    predictor = calibrate(model, CAL, method="exact", holdout=HELD, class_names=names, **ASK)
    sets = predictor.predict(TEST[0][:10], seed=1)
    assert list(sets) == [[names[k] for k in range(4) if row[k]] for row in sets.mask]
    assert list(calibrate(model, CAL, method="exact", holdout=HELD, **ASK).predict(TEST[0][:10], seed=1)) == [
        [k for k in range(4) if row[k]] for row in sets.mask
    ]
    assert str(sets).splitlines()[1] == f"  0: {{{', '.join(next(iter(sets)))}}}"


def test_what_a_predictor_and_its_sets_say(exact: Predictor) -> None:
    assert str(exact.guarantee) in repr(exact)
    assert "ready" in repr(exact)
    sets = exact.predict(TEST[0], seed=1)
    assert len(sets) == 60
    assert f"mean size {float(sets.mask.sum() / 60):.2f}" in repr(sets)
    assert "90 % certified within L2 0.05" in repr(sets)
    assert repr(sets).endswith("... 52 more")
    assert torch.equal(sets.size, sets.mask.sum(dim=1))
    assert torch.equal(sets.trivial, sets.mask.all(dim=1))
    assert len(repr(sets[:5]).splitlines()) == 6


def test_train_mode_is_warned_about_once(model: nn.Module) -> None:
    wavering = nn.Sequential(nearest(), nn.Dropout(0.2)).train()
    with pytest.warns(KeepcoverWarning, match="train mode") as caught:
        predictor = calibrate(wavering, CAL, method="exact", holdout=HELD, **ASK)
    assert len(caught) == 1
    with pytest.warns(KeepcoverWarning, match="train mode") as caught:
        sets = predictor.predict(TEST[0], seed=3)
    assert len(caught) == 1
    assert wavering[1].training
    assert torch.equal(
        sets.mask, calibrate(model, CAL, method="exact", holdout=HELD, **ASK).predict(TEST[0], seed=3).mask
    )


# -- warnings ----------------------------------------------------------------------------------------------------------


def test_a_useless_model_is_warned_about(model: nn.Module) -> None:
    with pytest.warns(
        KeepcoverWarning,
        match=r"right on only .* of noisy draws under Gaussian noise sigma 9.*fine-tune it under this noise",
    ) as caught:
        predictor = calibrate(model, CAL, method="rcp1", **{**ASK, "sigma": 9.0})
    assert str(caught[0].message) == predictor.warning
    assert f"Warning: {predictor.warning}" in repr(predictor)
    assert "put a denoiser before it" in (predictor.warning or "")
    vectors = calibrate(model, (CAL[0].flatten(1), CAL[1]), method="rcp1", **{**ASK, "sigma": 9.0})
    assert "sets hold about" in (vectors.warning or "")
    assert "denoiser" not in (vectors.warning or "")  # it takes images
    with pytest.warns(
        KeepcoverWarning, match="right on only .*; noise takes little from it, so train it further with labels"
    ):
        calibrate(model, (CAL[0], CAL[1].roll(1)), method="rcp1", **ASK)


@pytest.mark.parametrize("classes", [2, 3, 4])
def test_a_good_model_with_few_classes_is_not(classes: int) -> None:
    """Right on nine of ten noisy draws is good with two classes too."""
    images, labels = toy(300, classes=classes, seed=3, spread=0.1)
    sharp, stream = nearest(classes), Stream(1, "calibration")
    accuracy = (Smoother(sharp, 0.1).logits(images, 1, stream).argmax(dim=-1)[:, 0] == labels).double().mean()
    assert 0.9 < float(accuracy) < 1
    assert calibrate(sharp, (images, labels), method="rcp1", epsilon=0.02, sigma=0.1, seed=1).warning is None


def test_a_report_needs_no_data(model: nn.Module, tmp_path: Path) -> None:
    predictor = calibrate(model, CAL, method="exact", **{**ASK, "epsilon": (0.0, 0.05)})
    page = predictor.report(tmp_path / "report.html")._repr_html_()
    for level in predictor.levels:
        assert str(predictor.at(*level).guarantee) in page
    for assumption in predictor.guarantee.assumptions:
        assert html.escape(assumption) in page
        assert assumption in str(predictor.report())
    assert predictor.identity.fingerprint in page
    assert page in (tmp_path / "report.html").read_text()


def test_full_sets_are_warned_about(model: nn.Module) -> None:
    with pytest.warns(
        KeepcoverWarning, match="rcp1 at alpha 0.1, epsilon 0.5 can only return everything.*larger sigma"
    ):
        predictor = calibrate(model, CAL, method="rcp1", **{**ASK, "epsilon": 0.5})
    assert predictor.predict(TEST[0]).trivial.all()
    assert "every set holds everything" in repr(predictor)
    assert "<td>everything</td>" in predictor._repr_html_()
    silent = replace(predictor, smoother=None)  # no model, so none can have run
    assert silent.predict(TEST[0]).trivial.all()
    assert silent.predict_all(TEST[0])[0.1, 0.5].trivial.all()
    assert silent.predict(TEST[0], early_exit=True).draws_used.tolist() == [0] * len(TEST[0])
    with pytest.raises(InputError, match=r"calibrated on inputs .n, 1, 4, 4., got"):
        silent.predict(torch.rand(2, 5, 5))


@pytest.mark.parametrize("method", ["rscp_plus_hoeffding", "rscp_plus_bernstein", "cas"])
def test_the_warning_of_full_sets_says_how_many_draws_would_help(method: str, model: nn.Module) -> None:
    """The default of 16 draws is far too few for these; as many as the warning says are enough."""
    ask = {"alpha": 0.1, "epsilon": 0.02, "sigma": 0.1, "seed": 1, "method": method}
    with pytest.warns(KeepcoverWarning, match="can only return everything") as told:
        calibrate(model, CAL, **ask)
    (found,) = re.findall(r"it takes about draws=(\d+) to do better", " ".join(str(one.message) for one in told))
    assert 16 < int(found) <= 4096
    assert not calibrate(model, CAL, **ask, draws=int(found)).predict(TEST[0][:50]).trivial.all()


def test_more_draws_are_not_promised_to_help_where_they_do_not(model: nn.Module) -> None:
    with pytest.warns(KeepcoverWarning, match="more draws alone will not help: more calibration points"):
        calibrate(model, CAL, method="rscp_plus_hoeffding", **{**ASK, "epsilon": 20.0})


@pytest.mark.parametrize("labels", [["ant", "bee"] * 30, np.array(["ant", "bee"] * 30), np.array(["ant", None] * 30)])
def test_names_as_labels_are_refused_with_a_word_on_numbering(labels: Any, model: nn.Module) -> None:
    for data in ((TEST[0], labels), [(TEST[0], list(labels))]):
        with pytest.raises(InputError, match=r"integer class labels, got 'ant'; number them, .*np.unique"):
            calibrate(model, data, **ASK, holdout=HELD)
    with pytest.raises(InputError, match="integer class labels, got 'ant'"):
        calibrate(model, CAL, **ASK).predict(TEST[0]).measure(labels)


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "GPU"])
def test_devices_that_are_not_there_are_refused(device: str, model: nn.Module) -> None:
    with pytest.raises(InputError, match=rf"no device '{device}' here .*; use cpu, or cuda where there is a GPU"):
        Smoother(model, 0.1, device=device)
    with pytest.raises(InputError, match="no device"):
        pgd(NoisyModel(model, 0.1, 1, Stream(0, "attack")), TEST[0][:2], TEST[1][:2], 0.1, device=device)


def test_empty_sets_are_counted_where_sets_are_shown() -> None:
    promise = calibrate(nearest(), CAL, **ASK).guarantee
    sets = PredictionSets(torch.tensor([[True, False], [False, False]]), promise)
    assert "mean size 0.50, 0 of them the full label set, 1 empty" in repr(sets)
    assert "empty 50.0%" in str(sets.measure(torch.tensor([0, 1])))


# -- what is refused ---------------------------------------------------------------------------------------------------


def spoiled(value: float) -> Tensor:
    images = CAL[0].clone()
    images[70, 0, 0, 0] = value
    return images


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "nan-images": ({"data": (spoiled(math.nan), CAL[1])}, "NaN or infinity, first in image 70"),
    "infinite-images": ({"data": (spoiled(math.inf), CAL[1])}, "NaN or infinity"),
    "uint8": ({"data": ((CAL[0] * 255).byte(), CAL[1])}, r"convert with images.float\(\) / 255"),
    "label-too-large": ({"data": (CAL[0], CAL[1] + 1)}, r"labels between 0 and 3 .*got 1 to 4"),
    "label-negative": ({"data": (CAL[0], CAL[1] - 1)}, "labels between 0 and .*, got -1 to 2"),
    "float-labels": ({"data": (CAL[0], CAL[1].float())}, "integer class labels, got dtype torch.float32"),
    "bool-labels": ({"data": (CAL[0], CAL[1] > 1)}, "integer class labels, got dtype torch.bool"),
    "one-hot-labels": ({"data": (CAL[0], nn.functional.one_hot(CAL[1]))}, "labels in one dimension"),
    "fewer-labels": ({"data": (CAL[0], CAL[1][:-1])}, "120 images and 119 labels"),
    "no-labels": ({"data": CAL[0]}, "expected labelled data"),
    "flat-images": ({"data": (CAL[0].flatten()[:120], CAL[1])}, "add a batch dimension"),
    "no-data": ({"data": (CAL[0][:0], CAL[1][:0])}, "(?i)at least|calibration points cannot"),
    "few-points": (
        {"data": (CAL[0][:8], CAL[1][:8]), "method": "cp"},
        "8 calibration points cannot certify .* at least 9",
    ),
    "few-after-holdout": ({"data": (CAL[0][:9], CAL[1][:9]), "holdout": 3}, "6 calibration points cannot certify"),
    "few-for-a-holdout": (
        {"data": (CAL[0][:9], CAL[1][:9]), "holdout": None},
        "holdout of 1 to 8 of the 9 points, got 0",
    ),
    "holdout-too-large": ({"holdout": 120}, "holdout of 1 to 119 of the 120 points, got 120"),
    "holdout-zero": ({"holdout": 0}, "holdout of 1 to 119"),
    "holdout-negative": ({"holdout": -5}, "holdout of 1 to 119"),
    "holdout-unlabelled": ({"holdout": HELD[0]}, "expected labelled data"),
    "holdout-labels": ({"holdout": (HELD[0], HELD[1] + 9)}, "labels between 0 and 3"),
    "alpha-zero": ({"alpha": 0.0}, "alpha strictly between 0 and 1, got 0.0"),
    "alpha-one": ({"alpha": 1.0}, "alpha strictly between 0 and 1"),
    "alpha-ninety": ({"alpha": 90.0}, "alpha strictly between 0 and 1, got 90.0; 0.1 promises 90 %"),
    "alpha-nan": ({"alpha": math.nan}, "alpha strictly between 0 and 1, got nan"),
    "one-bad-alpha": ({"alpha": [0.1, -0.1]}, "alpha strictly between 0 and 1, got -0.1"),
    "same-alpha-twice": ({"alpha": [0.1, 0.1]}, "distinct values of alpha"),
    "no-epsilon": ({"epsilon": []}, "one or several distinct values of epsilon"),
    "epsilon-negative": ({"epsilon": -0.1}, "epsilon >= 0, the radius of the attack, got -0.1"),
    "epsilon-infinite": ({"epsilon": math.inf}, "finite epsilon"),
    "sigma-zero": (
        {"sigma": 0.0},
        "certifies through noise, and there is none; give sigma > 0 .* or choose the uncertified method cp",
    ),
    "sigma-negative": ({"sigma": -1.0}, "finite sigma >= 0"),
    "sigma-missing": ({"sigma": None}, "expected sigma, the standard deviation of Gaussian noise"),
    "sigma-and-noise": ({"noise": "gaussian:0.1"}, "or another noise=.*and not both"),
    "noise": ({"sigma": None, "noise": "magic:0.1"}, "a noise among gaussian.*, got 'magic'"),
    "norm": ({"norm": "l0"}, "gaussian noise certifies attacks in l2, .*, got 'l0'"),
    "beta": ({"method": RSCPPlus("hoeffding", beta=0.05)}, "spend all of alpha = 0.1 .*choose a smaller beta"),
    "task": ({"task": "magic"}, "a task among classification.*, got 'magic'"),
    "task-and-score": ({"task": Classification(), "score": "aps"}, "the task brings its own score and class names"),
    "method": ({"method": "magic"}, "method among auto, cp, .*got 'magic'"),
    "score": ({"score": "magic"}, "score among hps, aps, raps or a function, got 'magic'"),
    "draws": ({"draws": 0}, "at least 1 draw, got 0"),
    "calibration-draws": ({"calibration_draws": 0}, "at least 1 draw"),
    "ids-twice": ({"ids": [0, *range(119)]}, "two examples must not share noise"),
    "few-ids": ({"ids": range(119)}, "one id per image"),
    "names": ({"class_names": ["a", "b"]}, "4 class names, one per output of the model, got 2"),
    "seed-negative": ({"seed": -1}, "non-negative integer, got -1"),
    "bernstein-one-draw": ({"method": "rscp_plus_bernstein", "draws": 1, "calibration_draws": 1}, "at least 2 draws"),
}


@pytest.mark.parametrize("case", list(BAD))
def test_bad_input_is_refused_in_one_line(case: str, model: nn.Module) -> None:
    changes, match = BAD[case]
    options = {"data": CAL, "method": "exact", "holdout": HELD, **ASK, **changes}
    if isinstance(options.get("ids"), range):
        options["ids"] = list(options["ids"])
    with pytest.raises(InputError, match=match) as caught:
        calibrate(model, options.pop("data"), **options)
    assert "\n" not in str(caught.value)


PAIRS: dict[str, tuple[Callable[[nn.Module], Sequence[Any]], dict[str, Any], str]] = {
    "both": (lambda m: [(0.1, m), (0.2, m)], {"sigma": 0.1}, "either sigma or several"),
    "none": (lambda m: [], {"sigma": None}, r"\(sigma, model\)"),
    "one-impossible": (lambda m: [(0.1, m), (0.0, m)], {"sigma": None}, "there is none; give sigma > 0"),
}


@pytest.mark.parametrize("case", list(PAIRS))
def test_bad_pairs_are_refused(case: str, model: nn.Module) -> None:
    make, changes, match = PAIRS[case]
    with pytest.raises(InputError, match=match):
        calibrate(make(model), CAL, method="exact", holdout=HELD, **{**ASK, **changes})


def test_pairs_on_a_loader_need_their_holdout(model: nn.Module) -> None:
    """A shuffled loader would hold out other points each time it is read."""
    loader = DataLoader(TensorDataset(*CAL), batch_size=32, shuffle=True)
    ask = {**ASK, "sigma": None, "method": "exact"}
    with pytest.raises(InputError, match="reads the holdout once for each: give it as holdout="):
        calibrate([(0.1, model), (0.2, model)], loader, **ask)
    assert calibrate([(0.1, model), (0.2, lame())], loader, holdout=HELD, **ask).running.model is model


def test_data_without_a_length_need_their_holdout(model: nn.Module) -> None:
    with pytest.raises(InputError, match="no length, so no holdout can be drawn from them: give one as holdout="):
        calibrate(model, iter([CAL]), method="exact", **ASK)


def test_a_smoother_brings_its_sigma(model: nn.Module) -> None:
    smoother = Smoother(model, 0.1)
    with pytest.raises(
        InputError, match=r"already adds Gaussian noise sigma 0\.1; leave sigma and noise out or make them agree"
    ):
        calibrate(smoother, CAL, method="rcp1", **{**ASK, "sigma": 0.2})
    assert calibrate(smoother, CAL, method="rcp1", **ASK).smoother is smoother


@pytest.mark.parametrize(
    ("outputs", "match"),
    [
        (lambda x: x.flatten(1).sum(dim=1), r"float logits \[images, draws, classes\] of at least 2 classes"),
        (lambda x: x, r"float logits .*got torch.float32 \(120, 1, 1, 4, 4\)"),
        (lambda x: x.flatten(1)[:, :1], "at least 2 classes"),
    ],
)
def test_outputs_that_are_no_logits_are_refused(outputs: Callable[[Tensor], Tensor], match: str) -> None:
    with pytest.raises(InputError, match=match):
        calibrate(outputs, CAL, method="rcp1", **ASK)


def test_probabilities_are_warned_about(model: nn.Module) -> None:
    with pytest.warns(KeepcoverWarning, match="seems to return probabilities where logits are expected"):
        calibrate(nn.Sequential(model, nn.Softmax(dim=1)), CAL, method="rcp1", **ASK)


class Growing(nn.Module):
    """A model that changes its number of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.more = nearest(), 0

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.pad(self.inner(images), (0, self.more))


def test_bad_queries_are_refused(exact: Predictor) -> None:
    growing = Growing()
    other = calibrate(growing, CAL, method="rcp1", **ASK)
    growing.more = 2
    cases: list[tuple[Predictor, dict[str, Any], str]] = [
        (other, {"images": TEST[0]}, "calibrated on 4 classes, the model returned 6"),
        (exact, {"images": TEST[0][:0]}, "at least one image"),
        (exact, {"images": spoiled(math.nan)}, "NaN or infinity, first in image 70"),
        (exact, {"images": (TEST[0] * 255).byte()}, "convert with"),
        (exact, {"images": TEST[0], "ids": torch.zeros(60, dtype=torch.int64)}, "must not share noise"),
        (exact, {"images": TEST[0], "ids": torch.arange(59)}, "one id per image"),
        (exact, {"images": TEST[0], "seed": -1}, "non-negative integer"),
        (exact, {"images": "images.pt"}, "got str"),
    ]
    for predictor, query, match in cases:
        with pytest.raises(InputError, match=match) as caught:
            predictor.predict(**query)
        assert "\n" not in str(caught.value)


def test_labels_of_queries_are_ignored(exact: Predictor) -> None:
    expected = exact.predict(TEST[0], seed=1).mask
    for data in (TEST, (TEST[0], TEST[1] + 50), TensorDataset(*TEST), np.asarray(TEST[0])):
        assert torch.equal(exact.predict(data, seed=1).mask, expected)


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_what_is_known_to_hold_everything_needs_no_model(task: str) -> None:
    """Every set is full, so no network runs; inputs are checked all the same."""
    passes: list[int] = []

    def counted(inputs: Tensor) -> Tensor:
        passes.append(len(inputs))
        return inputs.flatten(1)[:, :4] if task == "classification" else inputs.flatten(1).sum(dim=1)

    images, labels = CAL
    truth = labels if task == "classification" else labels.double()
    asked: dict[str, Any] = {"epsilon": (2.0, 3.0), "sigma": 0.1, "draws": 2, "method": "rcp1", "task": task}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = calibrate(counted, (images, truth), **asked)
    assert made.full
    passes.clear()
    sets = made.predict(images[:7])
    assert passes == []
    assert sets.trivial.all()
    assert sets.covers(truth[:7]).all()
    assert len(made.predict_all(images[:7])[0.1, 3.0]) == 7
    assert passes == []
    with pytest.raises(InputError, match="calibrated on"):
        made.predict(torch.zeros(2, 1, 9, 9))
    finite = made.predict_outputs(torch.zeros(7, 2, 4) if task == "classification" else torch.zeros(7, 2))
    assert finite.rows() == sets.rows()
