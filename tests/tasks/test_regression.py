"""Regression: unions of intervals against brute force, the worst attack there can be, and every broken part noticed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import keepcover
from keepcover import Gaussian, InputError, Regression, Threat
from keepcover.methods import METHODS, Asked, Holdout, get_method
from keepcover.promises import Sample
from keepcover.scores import Items, Reading
from keepcover.tasks import PredictionIntervals, get_task, regression
from keepcover.tasks.intervals import deep, depth
from keepcover.testing import check_task
from tests.methods.worst import LAWS, SIGMA, thresholds, violated

Ends = tuple[Tensor, Tensor, Tensor]


# -- the sweep ---------------------------------------------------------------------------------------------------------


def brute(low: Tensor, high: Tensor, need: int, y: Tensor) -> Tensor:
    """Whether so many intervals [rows, N] hold each y [points], one by one."""
    held = [[sum(a <= v <= b for a, b in zip(*row, strict=True)) >= need for v in y.tolist()] for row in
            zip(low.tolist(), high.tolist(), strict=True)]  # fmt: off
    return torch.tensor(held)


def agrees() -> bool:
    """On whole numbers, where ends meet often and a third of the intervals hold nothing; at and between the ends."""
    generator, y = torch.Generator().manual_seed(3), torch.arange(-2, 12.5, 0.5)
    low = torch.randint(0, 10, (60, 5), generator=generator).double()
    high = low + torch.randint(-2, 5, (60, 5), generator=generator)
    for need in range(7):
        pieces = deep(low, high, torch.full((60,), need), max(1, 6 - need))
        union = ((pieces[..., :1] <= y) & (y <= pieces[..., 1:])).any(dim=1)
        if not torch.equal(union, brute(low, high, need, y)):
            return False
    return True


def inverted_kept(low: Tensor, high: Tensor) -> Ends:
    ends, order = torch.cat([low, high], dim=-1).sort(dim=-1, stable=True)
    steps = torch.cat([torch.ones_like(low), -torch.ones_like(low)], dim=-1).int().gather(-1, order)
    return ends, steps, steps.cumsum(dim=-1)


def inverted_turned(low: Tensor, high: Tensor) -> Ends:
    return depth(torch.minimum(low, high), torch.maximum(low, high))


def ends_before_starts(low: Tensor, high: Tensor) -> Ends:
    ends, steps, _ = depth(low, high)
    order = (2 * ends + steps.clamp_min(0)).sort(dim=-1, stable=True).indices
    steps = steps.gather(-1, order)
    return ends.gather(-1, order), steps, steps.cumsum(dim=-1)


def open_intervals(low: Tensor, high: Tensor) -> Ends:
    return depth(low + 1e-9, high - 1e-9)


def test_the_sweep_is_what_counting_gives() -> None:
    assert agrees()


@pytest.mark.parametrize("mutant", [inverted_kept, inverted_turned, ends_before_starts, open_intervals])
def test_a_wrong_sweep_is_noticed(mutant: Callable[..., Ends], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepcover.tasks.intervals.depth", mutant)
    assert not agrees()


# -- the laws of a task ------------------------------------------------------------------------------------------------


def outputs_of(score: str, n: int = 40, draws: int = 6) -> Tensor:
    values = torch.randn(n, draws, 2, generator=torch.Generator().manual_seed(1))
    if score == "residual":
        return values[..., 0]
    mean, other = values.unbind(dim=-1)
    # A sixth of the quantiles cross: such intervals hold nothing at small thresholds.
    return torch.stack([mean, other.exp() if score == "scaled" else mean + 1 + other], dim=-1)


@pytest.mark.parametrize("score", regression.SCORES)
def test_the_suite_passes_every_score(score: str) -> None:
    check_task(Regression(score), outputs_of(score), torch.linspace(-2, 2, 40))


class Crossed(Regression):
    """Keeps intervals whose ends are the wrong way round."""

    def _intervals(self, parts: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
        low, high = super()._intervals(parts, threshold)
        return torch.minimum(low, high), torch.maximum(low, high)


class Unscaled(Regression):
    """Forgets the scale of a draw where sets are made."""

    def _intervals(self, parts: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
        return parts[:, :, 0] - threshold, parts[:, :, 0] + threshold


@pytest.mark.parametrize(("mutant", "score"), [(Crossed, "quantiles"), (Unscaled, "scaled")])
def test_the_suite_catches_mutants(mutant: type[Regression], score: str) -> None:
    with pytest.raises(AssertionError, match="misses what its rule keeps, or keeps what it misses"):
        check_task(mutant(score), outputs_of(score), torch.linspace(-2, 2, 40))


def test_several_targets_are_held_together() -> None:
    """Whatever the joint rule keeps is in every target's union; with kappa 0 nothing else is."""
    outputs = torch.randn(300, 6, 3, generator=torch.Generator().manual_seed(2))
    truth = 0.7 * torch.randn(300, 3, generator=torch.Generator().manual_seed(3))
    task = Regression("residual").seen(outputs)
    items = task.items(outputs, truth, Reading(True), torch.zeros(300))
    for kappa in (0, 3):
        asked = Asked(0.1, Threat(Gaussian(1.0), 0.1), 6, 300, None, 6)
        rule = get_method("exact").rule(asked, kappa=kappa, c=0)
        joint = rule.test_statistic(items.draws) <= 2.0
        summary = task.summary(task.prepare(outputs, Reading(True), torch.zeros(300)), rule, torch.zeros(300))
        sets = task.sets(task.inside(summary, rule, torch.tensor(2.0)), rule.guarantee(task))
        assert 30 < joint.sum() < 295
        assert bool(sets.contains(truth)[joint].all())
        assert kappa or torch.equal(sets.contains(truth), joint)
        assert sets.hull.shape == (300, 3, 2)


# -- the worst attack --------------------------------------------------------------------------------------------------


HALF_SPACE: dict[str, Callable[[Tensor], Tensor]] = {
    "residual": lambda s: -s,  # the truth is 9, far above: |9 - f| = 9 + s
    "quantiles": lambda s: torch.stack([-s - 1, -s], dim=-1),
    "scaled": lambda s: torch.stack([torch.zeros_like(s), (-s).exp()], dim=-1),  # the scale alone sees the noise
    "crossing": lambda s: torch.stack([torch.zeros_like(s), 0.25 - s], dim=-1),  # a scale that noise makes negative
}
"""Outputs whose score of the truth increases with the noisy input, so that missing it is a half-space event."""


def misses(score: str, method: str, law: str, promised: float = 0.5, task: type[Regression] = Regression) -> int:
    """In how many of 2,000 calibrations on 60 points the interval of a point attacked by half a sigma misses its truth."""
    generator, repetitions, n, draws = torch.Generator().manual_seed(5), 2000, 60, 4
    make, x = HALF_SPACE[score], LAWS[law]

    def noisy(points: Tensor) -> Tensor:
        return make(points[:, None] + SIGMA * torch.randn(len(points), draws, generator=generator))

    def items(outputs: Tensor) -> Items:
        return known.items(outputs, torch.full((len(outputs), 1), 9.0), Reading(True), torch.zeros(len(outputs)))

    held = noisy(x((100,), generator))
    known = task("scaled" if score == "crossing" else score, targets=1)
    asked = Asked(0.1, Threat(Gaussian(SIGMA), promised * SIGMA), draws, n, None, draws)
    rule = get_method(method).fit(asked, Holdout(known, held, torch.full((100, 1), 9.0)))
    statistic = rule.statistic(items(noisy(x((repetitions * n,), generator))).draws.first(rule.calibration_draws))
    query = known.prepare(noisy(x((repetitions,), generator) + 0.5 * SIGMA), Reading(True), torch.zeros(repetitions))
    summary = known.summary(query, rule, torch.rand(repetitions, generator=generator))
    inside = known.inside(summary, rule, thresholds(rule, statistic.unflatten(0, (repetitions, n)))[:, None])
    return int((~known.sets(inside, rule.guarantee(known)).contains(torch.full((repetitions,), 9.0))).sum())


@pytest.mark.parametrize("method", ["exact", "exact_asymmetric", "rcp1"])
@pytest.mark.parametrize("score", HALF_SPACE)
def test_intervals_hold_in_the_worst_case(score: str, method: str) -> None:
    """False alarms: 12 tests at 5e-8. Where scales cross zero many thresholds are infinite, and such sets hold everything."""
    law = "point" if score == "crossing" else "mixture"
    assert not violated(misses(score, method, law), 2000, 0.1)


class Short(Regression):
    """Intervals lose a twentieth of what they reach."""

    def _intervals(self, parts: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
        return super()._intervals(parts, threshold - 0.05 * threshold.abs())


def test_what_breaks_the_promise_is_noticed() -> None:
    assert violated(misses("residual", "cp", "point"), 2000, 0.1)  # promises nothing under attack
    assert violated(misses("residual", "exact", "point", promised=0.0), 2000, 0.1)
    assert violated(misses("residual", "exact", "point", task=Short), 2000, 0.1)


# -- through the library -----------------------------------------------------------------------------------------------


class Line(nn.Module):
    """y is a sum of features, with quantiles or a scale where they are asked for."""

    def __init__(self, score: str) -> None:
        super().__init__()
        self.score, self.line = score, nn.Linear(3, 1)
        nn.init.ones_(self.line.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = self.line(x)
        if self.score == "residual":
            return y
        both = (y - 0.1, y + 0.1) if self.score == "quantiles" else (y, 0.1 + nn.functional.softplus(y))
        return torch.cat(both, dim=1)


@pytest.mark.parametrize("score", regression.SCORES)
def test_every_score_goes_through_the_library(score: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Line(score), torch.rand(500, 3)
    y = x.sum(dim=1) + 0.1 * torch.randn(500)
    old, new = (x[:300], y[:300]), (x[300:], y[300:])
    predictor = keepcover.calibrate(
        model, old, task="regression", score=score, epsilon=[0.02, 0.05], sigma=0.1, draws=8, seed=3
    )
    sets = predictor.predict(new[0], seed=4)
    assert sets.measure(new[1]).coverage.high > 0.9
    assert 0.2 < sets.measure(new[1]).size < 2
    nested = predictor.predict(new[0], epsilon=0.05, nested=True, seed=4)
    assert bool((nested.length >= sets.length - 1e-9).all())
    predictor.save(tmp_path / "predictor.safetensors")
    loaded = keepcover.load(tmp_path / "predictor.safetensors", model)
    assert str(loaded.guarantee) == str(predictor.guarantee)
    assert loaded.predict(new[0], seed=4).rows() == sets.rows()
    outputs = predictor.running.logits(x, 16, keepcover.Stream(5, "test"))
    rows = keepcover.evaluate(
        outputs, y, epsilon=0.05, sigma=0.1, methods=["exact", "rcp1", "cp"], draws=8, splits=5, holdout=60,
        task="regression", score=score,
    )  # fmt: off
    assert all(row.coverage.mean > 0.85 for row in rows)
    assert rows[0].size.mean < rows[1].size.mean  # eight draws beat one
    audit = keepcover.audit(predictor, new, steps=3, draws=8, seed=6, progress=False)
    assert [(row.attack, row.verdict) for row in audit.rows] == [("none", "consistent"), ("margin", "consistent")]
    with pytest.raises(InputError, match="label by label"):
        predictor.predict(new[0], early_exit=True)
    with pytest.raises(InputError, match="probability of the true class"):
        keepcover.audit(predictor, new, attacks=["softmax"])


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if not method.counts])
def test_other_methods_refuse(method: str) -> None:
    with pytest.raises(InputError, match=r"does not count draws|is about|bands"):
        keepcover.calibrate_outputs(
            torch.randn(60, 4), torch.randn(60), task="regression", epsilon=0.1, sigma=0.2, method=method
        )


def test_what_outputs_and_truths_may_be() -> None:
    with pytest.raises(InputError, match="name one"):
        Regression().seen(torch.zeros(5, 4, 2))
    with pytest.raises(InputError, match=r"expects float outputs \[n, 2\]"):
        Regression("quantiles").seen(torch.zeros(5, 4, 3))
    with pytest.raises(InputError, match="positive scales"):
        Regression("scaled").seen(torch.zeros(5, 4, 2))
    with pytest.raises(InputError, match="among residual"):
        Regression("hps")
    with pytest.raises(InputError, match="no class_names"):
        get_task("regression", class_names=["a"])
    task = Regression().seen(torch.zeros(2, 4))
    for truth in ([1.0], [1.0, float("nan")], [[1.0, 2.0], [1.0, 2.0]], ["a", "b"]):
        with pytest.raises(InputError, match=r"true values|numbers"):
            task.check_truth(truth, 2)
    for text in (["a"] * 60, np.array(["a"] * 60), np.array([None] * 60)):
        with pytest.raises(InputError, match="expected numbers"):
            keepcover.calibrate_outputs(torch.randn(60, 4), text, task="regression", epsilon=0.1, sigma=0.2)


def test_a_scale_that_an_attack_makes_negative_keeps_nothing() -> None:
    task = Regression("scaled", targets=1)
    outputs: Any = torch.tensor([[[0.0, -1.0], [0.0, 1.0]]]).repeat(1, 2, 1)
    scores = task.items(outputs, torch.zeros(1, 1), Reading(True), torch.zeros(1)).draws.values
    assert scores.tolist() == [[float("inf"), 0.0, float("inf"), 0.0]]
    rule = get_method("exact").rule(Asked(0.1, Threat(Gaussian(1.0), 0.1), 4, 30, None, 4), kappa=1, c=0)
    summary = task.summary(task.prepare(outputs, Reading(True), torch.zeros(1)), rule, torch.zeros(1))
    sets = task.sets(task.inside(summary, rule, torch.tensor(5.0)), rule.guarantee(task))
    assert sets.empty.tolist() == [True]
    assert sets.hull.isnan().all()
    every = task.sets(task.inside(summary, rule, torch.tensor(torch.inf)), rule.guarantee(task))
    assert every.hull.tolist() == [[-torch.inf, torch.inf]]  # nothing exceeds it


def test_intervals_as_people_and_files_read_them() -> None:
    nan, inf = float("nan"), float("inf")
    pieces = torch.tensor([[[[0.0, 1.0], [2.0, 2.5]]], [[[nan, nan]] * 2], [[[-inf, inf], [nan, nan]]]])
    promise = get_method("rcp1").rule(Asked(0.1, Threat(Gaussian(1.0), 0.1), 1, 99)).guarantee(Regression())
    sets = PredictionIntervals(pieces, promise)
    assert sets.length.tolist() == [1.5, 0.0, inf]
    assert sets.contains([1.5, 0.0, 1e9]).tolist() == [False, False, True]
    assert sets.trivial.tolist() == [False, False, True]
    found = json.loads(json.dumps(sets.to_dict(), allow_nan=False))["rows"]
    assert [row["intervals"] for row in found] == [[[0.0, 1.0], [2.0, 2.5]], [], [[None, None]]]
    assert sets[0].rows() == sets.rows()[:1]
    assert "3 prediction intervals" in repr(sets)
    measured = sets.measure([1.0, 0.0, 0.0])
    assert (measured.coverage.mean, measured.empty, measured.full) == (2 / 3, 1 / 3, 1 / 3)


def test_a_quantile_of_the_calibration_scores_is_what_a_sample_gives() -> None:
    """The threshold is in the unit of the truth: half the points are within it where alpha is a half."""
    outputs, truth = torch.zeros(199, 1), torch.arange(199.0) - 99
    predictor = keepcover.calibrate_outputs(
        outputs, truth, task="regression", epsilon=0.0, sigma=1.0, alpha=0.5, method="cp"
    )
    assert float(predictor.threshold) == float(predictor.rule.threshold_of(Sample(truth.abs()))) == 50
    assert predictor.predict_outputs(outputs[:1]).hull[0].tolist() == pytest.approx([-50, 50])


# -- features of different units ---------------------------------------------------------------------------------------


UNITS = torch.tensor([1000.0, 1.0, 0.001], dtype=torch.float64)


class InUnits(nn.Module):
    """The line on features of very different units."""

    def __init__(self) -> None:
        super().__init__()
        self.line = Line("residual")

    def forward(self, x: Tensor) -> Tensor:
        return self.line((x / UNITS).float())


def test_units_of_features_are_those_of_noise_and_attack(tmp_path: Path) -> None:
    """Sets and attacks are those of the features divided by their units, from calibration to the audit of a file."""
    torch.manual_seed(0)
    x = torch.rand(400, 3, dtype=torch.float64)
    y = x.sum(dim=1) + 0.1 * torch.randn(400)
    asked: dict[str, Any] = {"task": "regression", "epsilon": 0.1, "sigma": 0.1, "draws": 4, "seed": 3}
    model = InUnits()
    plain = keepcover.calibrate(model.line, (x[:300], y[:300]), **asked)
    made = keepcover.calibrate(model, ((x * UNITS)[:300], y[:300]), input_scale=UNITS.tolist(), **asked)
    made.save(tmp_path / "predictor.safetensors")
    loaded = keepcover.load(tmp_path / "predictor.safetensors", model)
    expected = plain.predict(x[300:], seed=1).hull
    assert torch.allclose(loaded.predict((x * UNITS)[300:], seed=1).hull, expected, atol=1e-5)
    assert "one per feature" in " ".join(loaded.guarantee.to_dict()["assumptions"])
    attack: dict[str, Any] = {"steps": 3, "draws": 8, "seed": 6, "progress": False}
    found = keepcover.audit(loaded, ((x * UNITS)[300:], y[300:]), **attack)
    alike = keepcover.audit(plain, (x[300:], y[300:]), **attack)
    moved, same = (next(iter(list(one.attacked.values())[1:])) for one in (found, alike))
    assert torch.allclose(moved / UNITS, same.double(), atol=1e-4)
    assert float((moved / UNITS - x[300:]).norm(dim=1).max()) == pytest.approx(0.1, rel=1e-3)


def test_units_come_from_the_holdout_alone() -> None:
    torch.manual_seed(0)
    x = torch.randn(200, 3) * torch.tensor([1.0, 2.0, 100.0])
    held = (torch.randn(100, 3) * torch.tensor([5.0, 1.0, 1.0]), torch.randn(100))
    asked: dict[str, Any] = {"task": "regression", "epsilon": 0.1, "sigma": 0.1, "method": "rcp1"}
    with pytest.warns(keepcover.KeepcoverWarning, match="standard deviations of features reach"):
        keepcover.calibrate(Line("residual"), (x, torch.randn(200)), **asked)
    made = keepcover.calibrate(Line("residual"), (x, torch.randn(200)), input_scale="std", holdout=held, **asked)
    assert made.numerics["input_scale"] == pytest.approx(held[0].double().std(dim=0).tolist())
    mixed = DataLoader(
        TensorDataset(x, torch.randn(200)), batch_size=50, shuffle=True
    )  # holds out others when read again
    with pytest.raises(InputError, match="reads the holdout before the network does: give it as holdout="):
        keepcover.calibrate(Line("residual"), mixed, input_scale="std", **asked)
    for wrong, said in (("iqr", "input_scale"), ([1.0, 0.0, 1.0], "feature 1"), ([1.0], "1 units")):
        with pytest.raises(InputError, match=said):
            keepcover.calibrate(Line("residual"), (x, torch.randn(200)), input_scale=wrong, **asked)
