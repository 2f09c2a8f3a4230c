"""The audit: verdicts by the exact law, mutants caught, cheating attacks refused, reproducible by seed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

from keepcover.attacks import NoisyModel, mean_softmax, pgd, transfer
from keepcover.attacks.audit import VIOLATION, Audit, audit, judge
from keepcover.errors import InputError
from keepcover.methods.exact import HullRule
from keepcover.noise import Gaussian, Stream
from keepcover.prediction import Predictor, calibrate
from tests.toys import nearest, toy

EPSILON, SIGMA = 0.15, 0.15
CAL, HELD, TEST = toy(300, seed=1), toy(60, seed=2), toy(150, seed=3)
TINY: dict[str, Any] = {"steps": 8, "draws": 8, "seed": 5, "progress": False}
METHODS: dict[str, dict[str, Any]] = {
    "vanilla": {"method": "cp", "sigma": 0.0, "draws": 1},
    "rscp": {"method": "rscp", "draws": 16},
    "rcp1": {"method": "rcp1"},
    "exact": {"method": "exact", "draws": 16, "calibration_draws": 16},
    "hoeffding": {"method": "rscp_plus_hoeffding", "draws": 256},
}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return nearest()


@pytest.fixture(scope="module")
def predictors(model: nn.Module) -> dict[str, Predictor]:
    shared: dict[str, Any] = {"epsilon": EPSILON, "sigma": SIGMA, "holdout": HELD, "seed": 1}
    return {name: calibrate(model, CAL, **{**shared, **own}) for name, own in METHODS.items()}


@pytest.fixture(scope="module")
def report(predictors: dict[str, Predictor]) -> Audit:
    return audit(predictors, TEST, **TINY)


def seen(covered: int, m: int) -> tuple[Tensor, Tensor]:
    """So many of m queries covered, all of one class."""
    return torch.arange(m) < covered, torch.zeros(m, dtype=torch.int64)


# -- the law -----------------------------------------------------------------------------------------------------------


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.integers(1, 400), st.integers(0, 400), st.sampled_from([0.01, 0.05, 0.1, 0.3, 0.5]))
def test_the_p_value_is_the_beta_binomial_law(m: int, covered: int, alpha: float) -> None:
    """For a conformal quantile: rank k of n scores, so BetaBinomial(m, k, n + 1 - k)."""
    covered = min(covered, m)
    predictor = calibrate(nearest(), CAL, method="cp", alpha=alpha, epsilon=0.01, sigma=SIGMA, seed=1)
    rank = 301 - math.floor(301 * round(100 * alpha) / 100 + 1e-9)
    promised, p_value, verdict = judge(predictor, *seen(covered, m), 0.0)
    expected = stats.betabinom.cdf(covered, m, rank, 301 - rank)
    assert p_value == pytest.approx(expected, rel=1e-7, abs=1e-14)
    assert promised
    assert verdict == ("violated" if expected < VIOLATION else "consistent")


@pytest.mark.parametrize("covered", [0, 60, 120, 135, 149])
def test_the_p_value_of_a_certificate_is_its_own_law(covered: int, predictors: dict[str, Predictor]) -> None:
    """RCP1: the clean miss rate is Beta(n + 1 - k, k), the attacked one its shift, at worst; integrated numerically. The
    rule may err on the safe side, that of too large a p-value, by what its grid costs: a tenth at most."""
    _, p_value, _ = judge(predictors["rcp1"], *seen(covered, 150), EPSILON)
    rank = 301 - math.floor(301 * stats.norm.cdf(stats.norm.ppf(0.1) - EPSILON / SIGMA))
    missed = stats.beta(301 - rank, rank).ppf((np.arange(20_000) + 0.5) / 20_000)
    attacked = stats.norm.cdf(stats.norm.ppf(missed) + EPSILON / SIGMA)
    expected = float(stats.binom.cdf(covered, 150, 1 - attacked).mean())
    assert 0.999 * expected - 1e-9 <= p_value <= 1.1 * expected + 1e-6


@pytest.mark.parametrize(
    ("name", "radius", "promised"),
    [
        ("exact", 0.0, True),
        ("exact", EPSILON / 2, True),
        ("exact", EPSILON, True),
        ("exact", 1.01 * EPSILON, False),
        ("vanilla", 0.0, True),
        ("vanilla", EPSILON / 2, False),
        ("rscp", 0.0, True),
        ("rscp", EPSILON, False),
    ],
)
def test_what_is_promised_where(name: str, radius: float, promised: bool, predictors: dict[str, Predictor]) -> None:
    """Certified methods within epsilon, the others on clean data only; the verdict follows from that and the p-value."""
    for covered in (150, 135, 40):
        said, p_value, verdict = judge(predictors[name], *seen(covered, 150), radius)
        low = p_value < VIOLATION
        assert said == promised
        words = ("violated" if low else "consistent") if promised else ("no promise, lost" if low else "no promise")
        assert verdict == words
        assert low == (covered == 40)


# -- real attacks ------------------------------------------------------------------------------------------------------


def test_vanilla_coverage_is_lost_and_certified_coverage_holds(report: Audit) -> None:
    """Clean rows and attacked rows of certified methods are consistent, at 0.001 each by the law; vanilla CP is lost."""
    verdicts = {(row.name, row.attack): row.verdict for row in report.rows}
    assert set(verdicts) == {(name, attack) for name in METHODS for attack in ("none", "softmax", "margin")}
    for name in METHODS:
        assert verdicts[name, "none"] == "consistent"
    for attack in ("softmax", "margin"):
        assert verdicts["vanilla", attack] == "no promise, lost"
        for name in ("rcp1", "exact", "hoeffding"):
            assert verdicts[name, attack] == "consistent"
        assert verdicts["rscp", attack].startswith("no promise")
    assert report.broken == ()


def test_rows_are_what_the_sets_say(report: Audit, predictors: dict[str, Predictor]) -> None:
    """Every row again from the kept images: same sets from the same seed, same coverage and size, radius kept."""
    assert torch.equal(report.images, TEST[0])
    assert torch.equal(report.labels, TEST[1])
    for row in report.rows:
        key = (row.name, row.attack, row.radius)
        images, sets = report.attacked[key], report.sets[key]
        assert torch.equal(sets.mask, predictors[row.name].predict(images, seed=5).mask)
        measured = sets.measure(TEST[1])
        assert row.coverage == measured.coverage.__dict__
        assert row.size == measured.size
        assert float((images.double() - TEST[0].double()).flatten(1).norm(dim=1).max()) <= row.radius
        assert row.radius == (0 if row.attack == "none" else EPSILON)
        guarantee = predictors[row.name].guarantee
        assert (row.method, row.certified, row.draws) == (guarantee.method, guarantee.certified, guarantee.draws)
    assert torch.equal(report.attacked["exact", "none", 0.0], TEST[0])


def test_the_softmax_attack_is_smooth_adv_and_shared(report: Audit, model: nn.Module) -> None:
    noisy = NoisyModel(model, SIGMA, 8, Stream(5, "attack"))
    expected = pgd(noisy, *TEST, EPSILON, loss=mean_softmax, steps=8)
    for name in ("rscp", "rcp1", "exact", "hoeffding"):
        assert torch.equal(report.attacked[name, "softmax", EPSILON], expected)
    assert not torch.equal(report.attacked["vanilla", "softmax", EPSILON], expected)


def test_the_audit_is_reproducible_by_seed(report: Audit, predictors: dict[str, Predictor]) -> None:
    some = {"exact": predictors["exact"]}
    again, other = audit(some, TEST, **TINY), audit(some, TEST, **{**TINY, "seed": 6})
    assert list(again.rows) == [row for row in report.rows if row.name == "exact"]
    for key, images in again.attacked.items():
        assert torch.equal(images, report.attacked[key])
    assert not torch.equal(other.attacked["exact", "softmax", EPSILON], again.attacked["exact", "softmax", EPSILON])


def test_without_a_seed_noise_is_fresh(predictors: dict[str, Predictor]) -> None:
    one, two = (audit(predictors["rcp1"], TEST, **{**TINY, "seed": None, "steps": 1}) for _ in range(2))
    assert not torch.equal(one.attacked["rcp1", "softmax", EPSILON], two.attacked["rcp1", "softmax", EPSILON])


def test_an_audit_as_json_and_text(report: Audit) -> None:
    found = json.loads(json.dumps(report.to_dict()))
    assert (found["images"], found["violated"], len(found["rows"])) == (150, 0, 15)
    for row, entry in zip(report.rows, found["rows"]):
        assert entry == row.__dict__
    lines = str(report).splitlines()
    assert len(lines) == 16
    for row, line in zip(report.rows, lines[1:]):
        assert line.startswith(row.name)
        assert line.endswith(row.verdict)


def test_the_summary_takes_the_worse_attack(report: Audit) -> None:
    rows = report.summary(EPSILON)
    assert [row["name"] for row in rows] == list(METHODS)
    for row in rows:
        own = [r for r in report.rows if r.name == row["name"]]
        assert row["attacked_coverage"]["mean"] == min(r.coverage["mean"] for r in own if r.attack != "none")
        assert row["coverage"] == next(r.coverage for r in own if r.attack == "none")


def test_one_predictor_goes_by_its_method_and_radii_by_request(predictors: dict[str, Predictor]) -> None:
    found = audit(predictors["rcp1"], TEST, attacks=["softmax"], radii=[0.05, 0.0, 0.3], **TINY)
    assert [(row.name, row.attack, row.radius) for row in found.rows] == [
        ("rcp1", "none", 0.0),
        ("rcp1", "softmax", 0.05),
        ("rcp1", "softmax", 0.3),
    ]
    assert [row.promised for row in found.rows] == [True, True, False]
    assert found.rows[1].coverage["mean"] >= found.rows[2].coverage["mean"]


def test_clipped_attacks_stay_in_the_box(predictors: dict[str, Predictor]) -> None:
    found = audit(predictors["rcp1"], TEST, clip=(0.0, 1.0), **TINY)
    for images in found.attacked.values():
        assert 0 <= float(images.min()) <= float(images.max()) <= 1


# -- mutants -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [-math.inf, -3.0])
def test_a_predictor_that_breaks_its_promise_is_found(threshold: float, model: nn.Module) -> None:
    """A threshold lowered on purpose: empty sets, or sets too small. The audit says violated, clean and attacked."""
    mutant = calibrate(model, CAL, method="exact", epsilon=EPSILON, sigma=SIGMA, draws=16, holdout=HELD, seed=1)
    level = (0.1, EPSILON)
    honest = mutant.levels[level]
    assert float(honest.threshold) > threshold
    mutant = replace(mutant, levels={level: replace(honest, threshold=torch.tensor(threshold).double())})
    found = audit({"mutant": mutant}, TEST, **TINY)
    attacked = [row for row in found.rows if row.attack != "none"]
    assert {row.verdict for row in attacked} == {"violated"}
    assert all(row in found.broken for row in attacked)
    if threshold == -math.inf:
        assert {row.coverage["mean"] for row in found.rows} == {0.0}
        assert found.broken == found.rows
    assert found.to_dict()["violated"] == len(found.broken)


class AtAlpha(HullRule):
    """Reads its threshold off at alpha, as if no adversary attacked; its own level cannot tell."""

    @property
    def level(self) -> float:
        return self.asked.alpha


@pytest.mark.parametrize("change", ["level", "kappa", "g", "g and threshold", "threshold", "sigma", "alpha"])
def test_a_rule_that_was_changed_is_found_without_a_single_miss(change: str, model: nn.Module) -> None:
    """What the calibration points contradict is violated wherever something is promised, whatever coverage was seen."""
    method = "exact_asymmetric" if change.startswith("g") else "exact"
    honestly = calibrate(model, CAL, method=method, epsilon=EPSILON, sigma=SIGMA, draws=16, holdout=HELD, seed=1)
    ((level, honest),) = honestly.levels.items()
    rule, threshold = honest.rule, float(honest.threshold)
    if change == "level":
        rule = AtAlpha(**vars(rule))
        threshold = rule.threshold(honestly.items)
    elif change == "sigma":  # calibrated for more noise than is drawn
        rule = replace(rule, asked=replace(rule.asked, threat=replace(rule.asked.threat, noise=Gaussian(2 * SIGMA))))
        threshold = rule.threshold(honestly.items)
    elif change == "alpha":  # calibrated for less than what is promised
        rule = replace(rule, asked=replace(rule.asked, alpha=0.3))
        threshold = rule.threshold(honestly.items)
    elif change == "threshold":
        threshold -= 0.1
    elif change.startswith("g"):
        rule = replace(rule, g=tuple(0.7 * value for value in rule.parameters()["g"]))
        threshold = rule.threshold(honestly.items) if "threshold" in change else threshold
    else:
        rule = replace(rule, kappa=rule.parameters()["kappa"] - 1)
    changed = replace(honest, rule=rule, threshold=torch.as_tensor(threshold, dtype=torch.float64))
    mutant = replace(honestly, levels={level: changed})
    for radius in (0.0, EPSILON):
        assert judge(honestly, *seen(150, 150), radius)[1:] == (1.0, "consistent")
        assert judge(mutant, *seen(150, 150), radius)[1:] == (0.0, "violated")
    assert judge(mutant, *seen(150, 150), 2 * EPSILON)[2] == "no promise"


def test_one_predictor_of_several_levels_is_audited_at_its_first(model: nn.Module) -> None:
    options: dict[str, Any] = {
        "method": "rcp1",
        "sigma": SIGMA,
        "seed": 1,
        "alpha": [0.2, 0.1],
        "epsilon": [0.05, EPSILON],
    }
    several = calibrate(model, CAL, **options)
    for level in several.levels:
        found = audit(several.at(*level), TEST, attacks=["margin"], **TINY)
        assert [(row.alpha, row.epsilon) for row in found.rows] == [level] * 2
        assert [row.radius for row in found.rows] == [0.0, level[1]]
        assert torch.equal(
            found.sets["rcp1", "none", 0.0].mask,
            several.predict(TEST[0], alpha=level[0], epsilon=level[1], seed=TINY["seed"]).mask,
        )
    assert (
        audit(several, TEST, attacks=["margin"], **TINY).rows
        == audit(several.at(), TEST, attacks=["margin"], **TINY).rows
    )


def test_a_p_value_that_is_no_number_is_an_error(
    predictors: dict[str, Predictor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HullRule, "p_value", lambda *_: math.nan)
    with pytest.raises(RuntimeError, match="the law of exact gave the p-value nan"):
        judge(predictors["exact"], *seen(100, 150), EPSILON)


# -- attacks of one's own ----------------------------------------------------------------------------------------------


def test_an_attack_of_your_own(predictors: dict[str, Predictor], model: nn.Module) -> None:
    calls: list[float] = []

    def towards(images: Tensor, labels: Tensor, epsilon: float) -> Tensor:
        calls.append(epsilon)
        assert torch.equal(labels, TEST[1])
        weight = model[1].weight.detach()[labels].view_as(images)
        return images - (1 - 1e-6) * epsilon * weight / weight.flatten(1).norm(dim=1).view(-1, 1, 1, 1)

    own: Mapping[str, Any] = {"away": towards, "nothing": lambda images, labels, epsilon: images.clone()}
    found = audit(predictors["exact"], TEST, attacks=own, radii=[0.05, 0.1], **TINY)
    assert [(row.attack, row.radius) for row in found.rows] == [
        ("none", 0.0),
        ("away", 0.05),
        ("nothing", 0.05),
        ("away", 0.1),
        ("nothing", 0.1),
    ]
    assert calls == [0.05, 0.1]
    clean = found.sets["exact", "none", 0.0].mask
    assert torch.equal(found.sets["exact", "nothing", 0.1].mask, clean)
    assert found.broken == ()


def test_one_step_of_8_bits_is_within_one_step_of_8_bits(model: nn.Module) -> None:
    """Rounded to float32, two neighbouring pixels are up to 8e-6 of 1/255 farther apart; a further thousandth is refused."""
    pixels = (TEST[0] * 254).round() / 255
    predictor = calibrate(model, CAL, epsilon=1 / 255, norm="linf", sigma=SIGMA, method="rcp1", seed=1)

    def step(images: Tensor, labels: Tensor, epsilon: float) -> Tensor:
        return ((images * 255).round() + 1) / 255

    assert float((step(pixels, TEST[1], 0.0).double() - pixels.double()).abs().max()) > (1 + 1e-6) / 255
    found = audit(predictor, (pixels, TEST[1]), attacks={"step": step}, **TINY)
    assert found.rows[-1].promised
    with pytest.raises(InputError, match="moved an image by Linf"):
        audit(predictor, (pixels, TEST[1]), attacks={"more": lambda x, y, e: x + 1.001 * e}, **TINY)


@pytest.mark.parametrize(
    ("cheat", "match"),
    [
        (lambda x, y, e: x + 1.001 * e / 4, r"moved an image by L2 0.1501\d*, allowed are 0.15"),
        (lambda x, y, e: torch.cat([x[:-1], x[-1:] + 1]), "moved an image by L2 4"),
        (lambda x, y, e: x[:-1], "must return finite images of shape"),
        (lambda x, y, e: x.flatten(1), "must return finite images of shape"),
        (lambda x, y, e: x * torch.nan, "must return finite images of shape"),
    ],
)
def test_a_cheating_attack_is_refused(cheat: Any, match: str, predictors: dict[str, Predictor]) -> None:
    with pytest.raises(InputError, match=f"attack 'cheat' {match}"):
        audit(predictors["rcp1"], TEST, attacks={"cheat": cheat}, **TINY)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "options", "match"),
    [
        (TEST[0], {}, "expected labelled data"),
        ((TEST[0], TEST[1] + 9), {}, "labels between 0 and 3"),
        ((TEST[0], TEST[1].float()), {}, "integer class labels"),
        (TEST, {"attacks": ["magic"]}, "attacks among softmax, margin, random, or functions by name, got 'magic'"),
        (TEST, {"radii": [-0.1]}, "epsilon >= 0"),
        (TEST, {"steps": 0}, "steps >= 1"),
        ((TEST[0][:0], TEST[1][:0]), {}, "at least one image"),
    ],
)
def test_bad_requests_are_refused(
    data: Any, options: dict[str, Any], match: str, predictors: dict[str, Predictor]
) -> None:
    with pytest.raises(InputError, match=match):
        audit(predictors["rcp1"], data, **{**TINY, **options})


def test_nothing_to_audit_is_refused() -> None:
    with pytest.raises(InputError, match="at least one predictor"):
        audit({}, TEST)


def test_a_black_box_is_audited_by_queries_or_through_a_surrogate(model: nn.Module) -> None:
    """The same classifier with and without gradients: the search finds less, the surrogate as much as its own gradients."""

    def box(images: Tensor) -> Tensor:
        return model(images).detach()

    options: dict[str, Any] = {"epsilon": EPSILON, "sigma": SIGMA, "method": "rcp1", "seed": 1, "fingerprint": "box-1"}
    hidden, plain = calibrate(box, CAL, **options), calibrate(model, CAL, **options)
    with pytest.raises(InputError, match="no gradients"):
        audit(hidden, TEST, **TINY)
    attacks: dict[str, Any] = {"blind": "random", "through": transfer(model, SIGMA, TINY["draws"], steps=8, seed=5)}
    found = audit(hidden, TEST, attacks=attacks, radii=[1.0], **TINY)
    assert [row.attack for row in found.rows] == ["none", "blind", "through"]
    clean, blind, through = (row.coverage["mean"] for row in found.rows)
    assert through < blind < clean
    own = audit(plain, TEST, attacks=["softmax"], radii=[1.0], **TINY)
    assert abs(own.rows[1].coverage["mean"] - through) < 0.05
    assert audit(hidden, TEST, attacks=["random"], **TINY).rows[1].verdict == "consistent"
