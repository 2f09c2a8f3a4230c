"""Several labels, pixels and losses of one's own: the risk under the worst attack, brute force, and bad input."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import keepcover
from keepcover import InputError, Promise
from keepcover.bounds import hoeffding_bentkus, mean_interval
from keepcover.methods import METHODS, ExactAsymmetric, get_method
from keepcover.scores import GRID, Draws, Items, Tally
from keepcover.scores.tally import kept, places
from keepcover.tasks import Loss, Multilabel, Segmentation, Task
from keepcover.tasks.pixels import PixelSets
from keepcover.testing import check_task
from tests.methods.worst import LAWS, SIGMA
from tests.tasks.several import FORMS, above, asked_for, attacked_losses, exceeds, fitted, points

ALPHA = 0.2

# -- the worst attack --------------------------------------------------------------------------------------------------

CASES = [
    (form, method, law)
    for form in FORMS
    for method in ("exact_asymmetric", "one_draw")
    for law in ("point", "wide", "mixture")
    if form != "loss" or method == "one_draw"
]


@pytest.mark.parametrize(("form", "method", "law"), CASES)
def test_the_attacked_risk_is_at_most_alpha(form: str, method: str, law: str) -> None:
    """False alarms: 18 tests at 5e-8."""
    task, rule = fitted(FORMS[form], method, LAWS[law], asked_for(60, 4, 16))
    losses = attacked_losses(FORMS[form], rule, LAWS[law], 1200, 0.5 * SIGMA, task=task)
    assert float(losses.mean()) > 0
    assert not exceeds(losses, ALPHA)
    assert rule.asked.alpha == ALPHA


@pytest.mark.parametrize(
    ("form", "method", "least"), [("multilabel", "one_draw", 0.17), ("masks", "exact_asymmetric", 0.15)]
)
def test_the_worst_case_is_close_to_alpha(form: str, method: str, least: float) -> None:
    """Many points, all alike, every item at the threshold at once: little is left to give away."""
    task, rule = fitted(FORMS[form], method, LAWS["point"], asked_for(500, 4, 16))
    losses = attacked_losses(FORMS[form], rule, LAWS["point"], 1500, 0.5 * SIGMA, task=task)
    there = losses[losses >= 0]
    assert float(there.mean()) > least
    assert not exceeds(losses, ALPHA)


def test_an_attack_twice_as_long_breaks_it() -> None:
    """The simulation can see a broken promise."""
    task, rule = fitted(FORMS["multilabel"], "one_draw", LAWS["point"], asked_for(200, 1, 1))
    assert exceeds(attacked_losses(FORMS["multilabel"], rule, LAWS["point"], 1200, SIGMA, task=task), ALPHA)


# -- thresholds --------------------------------------------------------------------------------------------------------


@given(st.data(), st.sampled_from([0.1, 0.3, 0.7]))
def test_the_threshold_is_brute_force(data: st.DataObject, alpha: float) -> None:
    """The smallest number of the grid whose weighted risk fits; some points have nothing to miss."""
    counts = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=8))
    owner = [point for point, count in enumerate(counts) for _ in range(count)]
    share = [data.draw(st.sampled_from([0.25, 0.5, 1.0])) / counts[point] for point in owner]
    draws = [[data.draw(st.integers(-2, 3)) / 4 for _ in range(2)] for _ in owner]
    g = tuple(sorted(data.draw(st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0])) for _ in range(3)))
    values = torch.tensor(draws, dtype=torch.float64).view(-1, 2)
    items = Items(
        Draws(values), len(counts), torch.tensor(share, dtype=torch.float64), torch.tensor(owner, dtype=torch.int64)
    )
    rule = ExactAsymmetric().rule(asked_for(len(counts), 1, 2, alpha=alpha), kappa=0, g=g)
    found = float(rule.threshold(items))
    assert float(rule.threshold(items.total())) == found

    def risk(t: float) -> float:
        losses = [w * g[sum(s > t for s in row)] for w, row in zip(share, draws, strict=True)]
        return (sum(losses) + g[-1]) / (len(counts) + 1)

    assert found == math.inf or risk(found) <= alpha + 1e-9
    assert all(risk(t) > alpha - 1e-9 for t in (-math.inf, -0.5, -0.25, 0.0, 0.25, 0.5, 0.75) if t < found)


def test_unit_weights_are_one_thing_per_point() -> None:
    """On scores that are numbers of the grid already, the threshold is that of the certificate for one thing per point."""
    draws = Draws(torch.randn(60, 8, generator=torch.Generator().manual_seed(0)).mul(8).round().div(8))
    rule = ExactAsymmetric().rule(asked_for(60, 1, 8), kappa=0, g=tuple(j / 8 for j in range(9)))
    several = Items(draws, 60, torch.ones(60), torch.arange(60))
    assert rule.threshold(several) == rule.threshold(Items.single(draws))
    halves = Items(
        Draws(draws.values.repeat_interleave(2, dim=0)),
        60,
        torch.full((120,), 0.5),
        torch.arange(60).repeat_interleave(2),
    )
    assert rule.threshold(halves) == rule.threshold(several)
    for t in (-math.inf, *GRID[::200].tolist(), math.inf):
        assert rule.supports(several, t) == (t == math.inf or (rule.majorises and t >= float(rule.threshold(several))))


def test_the_grid_is_fixed_and_fine() -> None:
    assert (GRID.diff() > 0).all()
    assert GRID[0] == -torch.inf
    assert GRID[-1] == torch.inf
    inside = GRID[1:-1]
    assert torch.equal(inside, inside.float().double())
    large = inside[inside >= 1 / 64]
    assert float((large[1:] / large[:-1]).max()) <= 1 + 1 / 64
    scores = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 3
    at = places(scores)
    assert bool((GRID[at - 1] < scores).all() and (scores <= GRID[at]).all())
    rows = torch.stack([scores[:500], scores[500:]])
    assert torch.allclose(kept(rows)[:, 900], (rows <= GRID[900]).double().mean(dim=1))


def test_a_tally_is_all_that_a_rule_asks() -> None:
    """In one piece, piece by piece, by group: the same losses."""
    generator = torch.Generator().manual_seed(1)
    owner = torch.tensor([0, 0, 1, 3, 3, 3])
    items = Items(Draws(torch.randn(6, 5, generator=generator)), 5, torch.tensor([0.5, 0.5, 1.0, 0.2, 0.3, 0.4]), owner)
    g = (0.1, 0.2, 0.2, 0.7, 1.0, 1.5)
    curves = items.losses(g)
    assert torch.allclose(items.total().losses(g)[0], curves.sum(dim=0))
    group = torch.tensor([0, 1, 1, 0, 0])
    apart = items.total(group)
    assert torch.allclose(apart.losses(g)[1], curves[group == 1].sum(dim=0))
    assert apart.count.tolist() == [3, 2]
    joined = Items.joined([items, items]).total()
    assert torch.allclose(items.total().plus(items.total()).above, joined.above)
    assert joined.points == 10
    for t in (300, 961, 1200):
        brute = [
            sum(
                w * g[int((row > GRID[t]).sum())]
                for w, row, o in zip(items.weights[0], items.draws.values, owner, strict=True)
                if o == p
            )
            for p in range(5)
        ]
        assert np.allclose(curves[:, t].numpy(), np.array([float(b) for b in brute]))
    with pytest.raises(InputError, match="counted with 5 draws each"):
        joined.first(4)


def test_thinned_items_keep_their_points_weight() -> None:
    owner = torch.tensor([0] * 10 + [2] * 3)
    items = Items(Draws(torch.randn(13, 2)), 3, torch.full((13,), 0.1), owner).thinned(4)
    assert items.owner is not None
    assert items.owner.tolist() == [0, 0, 0, 0, 2, 2, 2]
    assert items.weight is not None
    assert torch.allclose(items.weight, torch.tensor([0.25] * 4 + [0.1] * 3))


# -- the laws of a task ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_the_suite_passes(form: str) -> None:
    outputs, truth = points(FORMS[form], LAWS["wide"], 40, 6, torch.Generator().manual_seed(2))
    check_task(FORMS[form].task, outputs, truth)


def test_the_suite_passes_masks_of_several_classes() -> None:
    generator = torch.Generator().manual_seed(3)
    outputs, truth = (
        torch.randn(30, 5, 4, 3, 3, generator=generator),
        torch.randint(0, 4, (30, 3, 3), generator=generator),
    )
    for of in ((), (2,), (3, 1), (0, 1, 2, 3)):
        check_task(Segmentation(of=of), outputs, truth)


class Elsewhere(Multilabel):
    """Sets by another score than that of the items."""

    def prepare(self, outputs: Tensor, reading: Any, u: Tensor) -> Draws:
        return super().prepare(-outputs, reading, u)


def test_the_suite_catches_sets_by_another_score() -> None:
    outputs, truth = points(FORMS["multilabel"], LAWS["wide"], 40, 6, torch.Generator().manual_seed(2))
    with pytest.raises(AssertionError, match="misses what its rule keeps"):
        check_task(Elsewhere(), outputs, truth)


# -- through the library -----------------------------------------------------------------------------------------------


def toy(form: str, n: int = 300, draws: int = 16, seed: int = 4) -> tuple[Tensor, Tensor]:
    return points(FORMS[form], LAWS["wide"], n, draws, torch.Generator().manual_seed(seed))


def calibrated(form: str, **more: Any) -> keepcover.Predictor:
    outputs, truth = toy(form)
    return keepcover.calibrate_outputs(
        outputs, truth, task=FORMS[form].task, epsilon=0.1, sigma=SIGMA, seed=1, draws=4, **more
    )


@pytest.mark.parametrize("form", FORMS)
def test_calibrate_and_predict_from_outputs(form: str) -> None:
    predictor = calibrated(form)
    outputs, truth = toy(form, 200, seed=5)
    sets = predictor.predict_outputs(outputs)
    measured = sets.measure(truth)
    assert len(sets) == 200
    assert measured.risk.low <= 0.1
    assert measured.nothing == 0 if form == "loss" else measured.nothing > 5
    assert math.isclose(measured.coverage.mean + measured.risk.mean, 1)
    said = str(predictor.guarantee)
    assert "expected" in said
    assert "is at most 10 %" in said
    assert "probability" not in said
    assert predictor.rule.name == ("one_draw" if form == "loss" else "exact_asymmetric")
    if form != "loss":
        assert "misses nothing: it counts as 0" in " ".join(predictor.guarantee.assumptions)


def test_more_draws_make_smaller_sets_than_one() -> None:
    outputs, _ = toy("multilabel", 200, seed=5)
    one, many = (
        float(calibrated("multilabel", method=name).predict_outputs(outputs).size.double().mean())
        for name in ("one_draw", "exact_asymmetric")
    )
    assert many < one


@pytest.mark.parametrize("form", ["multilabel", "masks"])
@pytest.mark.parametrize("method", ["exact_asymmetric", "one_draw"])
def test_where_nothing_is_true_nothing_is_kept(form: str, method: str) -> None:
    outputs, truth = toy(form)
    predictor = keepcover.calibrate_outputs(
        outputs, torch.zeros_like(truth), task=FORMS[form].task, method=method, epsilon=0.1, sigma=SIGMA, draws=2
    )
    assert predictor.threshold == -torch.inf
    sets = predictor.predict_outputs(outputs)
    assert float(sets.size.double().sum()) == 0
    measured = sets.measure(torch.zeros_like(truth))
    assert (measured.risk.mean, measured.nothing) == (0, 300)


def test_all_pixels_ignored_is_nothing_to_miss() -> None:
    outputs, truth = toy("pixels")
    predictor = keepcover.calibrate_outputs(
        outputs, torch.full_like(truth, 7), task=FORMS["pixels"].task, epsilon=0.1, sigma=SIGMA
    )
    assert predictor.threshold == -torch.inf


def test_too_few_points_keep_everything() -> None:
    outputs, truth = toy("multilabel", 40)
    with pytest.warns(UserWarning, match="can only return everything"):
        predictor = keepcover.calibrate_outputs(
            outputs, truth, task="multilabel", epsilon=0.5, sigma=SIGMA, alpha=0.05, draws=1
        )
    assert predictor.threshold == torch.inf
    assert bool(predictor.predict_outputs(outputs).trivial.all())


@pytest.mark.parametrize("form", ["multilabel", "masks"])
def test_the_other_methods_refuse(form: str) -> None:
    for name, method in METHODS.items():
        if name in ("exact_asymmetric", "one_draw") or method.unfit(keepcover.Gaussian(1.0)):
            continue
        with pytest.raises(InputError, match=r"needs one thing to cover per point, and \w+ has several; choose"):
            calibrated(form, method=name)
    with pytest.raises(InputError, match="has one; choose rcp1"):
        keepcover.calibrate_outputs(
            torch.randn(50, 2, 3), torch.zeros(50).long(), method="one_draw", epsilon=0.1, sigma=1
        )
    with pytest.raises(InputError, match="a loss of your own has none; choose one_draw"):
        calibrated("loss", method="exact_asymmetric")


# -- promises ----------------------------------------------------------------------------------------------------------


def test_every_group_has_its_own_threshold() -> None:
    """A promise per group is what each group's points alone would give, empty points among them."""
    outputs, truth = toy("multilabel", 600)
    groups = np.array(["a", "b", "b"] * 200)
    task = Multilabel().seen(outputs)
    made = keepcover.calibrate_outputs(
        outputs, truth, task="multilabel", method="one_draw", epsilon=0.1, sigma=SIGMA, promise=Promise(per=groups)
    )
    rule = made.rule
    for at, name in enumerate("ab"):
        own = torch.as_tensor(groups == name)
        items = task.items(outputs[own][:, :1], truth[own], rule.reading, torch.zeros(int(own.sum())))
        assert rule.threshold_of(rule.sample(items)) == float(made.threshold[at, 0])
    assert "for every group" in str(made.guarantee)
    sets = made.predict_outputs(outputs[:30], groups=groups[:30])
    assert len(sets) == 30


def test_a_confident_promise_is_a_test_on_the_sum_of_losses() -> None:
    outputs, truth = toy("multilabel", 600)
    task = Multilabel().seen(outputs)
    made = keepcover.calibrate_outputs(
        outputs, truth, task="multilabel", method="one_draw", epsilon=0.1, sigma=SIGMA, promise=Promise(delta=0.05)
    )
    items = task.items(outputs[:, :1], truth, made.rule.reading, torch.zeros(600))
    mean = items.losses((0.0, 1.0)).mean(dim=0)
    level = made.rule.asked.threat.most(0.1)
    fits = [float(hoeffding_bentkus(float(m), 600, level)) <= 0.05 for m in mean]
    first = fits.index(True)
    assert all(fits[first:])
    assert float(GRID[first]) == float(made.threshold)
    assert "With confidence 95 %" in str(made.guarantee)


@pytest.mark.parametrize(
    ("promise", "smaller"), [({"poisoned": 3}, True), ({"drift": 0.02}, True), ({"delta": 0.1}, True)]
)
@pytest.mark.parametrize("method", ["exact_asymmetric", "one_draw"])
def test_stronger_promises_keep_more(promise: dict[str, Any], smaller: bool, method: str) -> None:
    plain, strong = (calibrated("multilabel", method=method, promise=Promise(**one)) for one in ({}, promise))
    outputs, _ = toy("multilabel", 100, seed=6)
    assert strong.predict_outputs(outputs).size.sum() > plain.predict_outputs(outputs).size.sum()


@pytest.mark.parametrize("form", FORMS)
def test_promises_that_are_not_proved_are_refused(form: str) -> None:
    with pytest.raises(InputError, match="speaks of the class of every point"):
        calibrated(form, promise=Promise(per="class"))
    with pytest.raises(InputError, match="speaks of the class of every point"):
        calibrated(form, promise=Promise(label_weights=(1.0, 1.0)))
    with pytest.raises(InputError, match="proved for one thing to cover per point"):
        calibrated(form, promise=Promise(calibration_epsilon=0.1))


# -- reading and measuring ---------------------------------------------------------------------------------------------


def test_sets_of_several_labels_read_and_measured() -> None:
    predictor = calibrated("multilabel")
    sets = predictor.task.sets(
        torch.tensor([[True, True, False, False], [False, False, False, False]]), predictor.guarantee
    )
    truth = [[1, 0, 1, 0], [0, 0, 0, 0]]
    assert sets.covers(truth).tolist() == [0.5, 1.0]
    measured = sets.measure(truth)
    assert (measured.risk.mean, measured.nothing, measured.by_class) == (0.25, 1, {0: 1.0, 2: 0.0})
    assert "1 with nothing to miss" in str(measured)
    assert "at most 10 % of true labels missed on average" in repr(sets)


def test_pixels_are_certain_possible_or_excluded() -> None:
    predictor = calibrated("masks")
    # class 1 alone, class 1 with another, another alone, nothing
    mask = torch.tensor([[[[1, 1], [0, 0]], [[0, 1], [1, 0]]]]).bool()
    sets = PixelSets(mask, predictor.guarantee, of=(1,), class_names=("road", "car"))
    assert sets.certain("car").tolist() == [[[True, False], [False, False]]]
    assert sets.possible(1).tolist() == [[[False, True], [False, False]]]
    assert sets.excluded().tolist() == [[[False, False], [True, True]]]
    assert (float(sets.size), float(sets.area)) == (0.5, 0.5)
    truth = torch.tensor([[[1, 0], [1, 0]]])
    assert sets.covers(truth).tolist() == [0.5]
    assert sets.rows()[0] == {
        "certain": 0.25, "possible": 0.25, "excluded": 0.5, "masks": {"car": 0.5}, "size": 0.5, "trivial": False,
    }  # fmt: skip
    with pytest.raises(InputError, match=r"one of the classes \['car'\], got 'road'"):
        sets.certain("road")
    every = PixelSets(mask, predictor.guarantee)
    assert every.certain().tolist() == [[[True, False], [True, False]]]
    assert every.covers(truth).tolist() == [0.5]
    assert len(every[0]) == 1


def test_the_interval_of_a_mean_holds() -> None:
    """Means of 40 values in [0, 1] that are 0 or 1, or all alike, against their intervals: missed less often than said."""
    generator = torch.Generator().manual_seed(0)
    for values in (torch.rand(4000, 40, generator=generator) < 0.1, torch.rand(4000, 40, generator=generator)):
        mean = 0.1 if values.dtype == torch.bool else 0.5
        ends = {round(float(m), 6): None for m in values.double().mean(dim=1)}
        intervals = {m: mean_interval(m, 40, 0.2) for m in list(ends)[:400]}
        seen = [intervals[round(float(m), 6)] for m in values.double().mean(dim=1) if round(float(m), 6) in intervals]
        assert sum(not low <= mean <= high for low, high in seen) <= 0.2 * len(seen)
    assert mean_interval(0.0, 10, 0.1)[0] == 0
    assert mean_interval(1.0, 10, 0.1)[1] == 1


# -- bad input ---------------------------------------------------------------------------------------------------------

LOGITS = torch.randn(50, 4, 3, generator=torch.Generator().manual_seed(0))
MAPS = torch.randn(50, 4, 3, 2, 2, generator=torch.Generator().manual_seed(0))
TRUE = torch.zeros(50, 3, dtype=torch.bool)
PIXEL = torch.zeros(50, 2, 2, dtype=torch.int64)


def refused(task: Task | str, outputs: Any, truth: Any, words: str, **more: Any) -> None:
    with pytest.raises(InputError, match=words):
        keepcover.calibrate_outputs(outputs, truth, task=task, epsilon=0.1, sigma=0.5, **more)


def test_bad_input_is_refused() -> None:
    refused("multilabel", LOGITS, TRUE[:, :2], r"table \[5, 3\], one column per output of the model, got \[5, 2\]")
    refused("multilabel", LOGITS, torch.zeros(50).long(), "one_hot")
    refused("multilabel", LOGITS, TRUE.float(), "as booleans, or whole numbers 0 and 1, got torch.float32")
    refused("multilabel", LOGITS, 2 * TRUE.long() + 2, "as booleans, or whole numbers 0 and 1")
    refused("multilabel", LOGITS[:, :, 0], TRUE, r"float logits \[points, draws, labels\]")
    refused("multilabel", LOGITS.where(LOGITS > -9, torch.nan).index_fill(0, torch.tensor([3]), torch.nan), TRUE, "NaN")
    refused("multilabel", LOGITS, TRUE, "multilabel has no score; leave it out", score="hps")
    refused("multilabel", LOGITS, TRUE, "3 class names|expected 3", class_names=["a", "b"])
    refused("segmentation", MAPS, PIXEL[:, :, 0], r"a class for every pixel, \[5, height, width\]")
    refused("segmentation", MAPS, PIXEL.float(), "whole numbers as classes of pixels, got torch.float32")
    refused("segmentation", MAPS, PIXEL + 3, r"expected classes 0 to 2 in the truth, got 3; .* say ignore=3")
    refused("segmentation", MAPS, PIXEL - 1, "got -1")
    refused("segmentation", MAPS, np.full((50, 2, 2), "road"), "expected numbers, .* got 'road'")
    refused("multilabel", LOGITS, [["cat", "dog"]] * 50, "expected numbers, .* got 'cat'")
    refused("multilabel", LOGITS, [[1]] * 49 + [[1, 2]], "expected numbers")
    refused("segmentation", MAPS, torch.zeros(50, 3, 2).long(), "bring both to one size")
    refused("segmentation", LOGITS, PIXEL, r"\[images, draws, classes, height, width\]")
    wrong: list[dict[str, Any]] = [{"of": ("car",)}, {"of": (1, 1)}, {"of": (1,), "ignore": 1}, {"of": (-1,)}]
    for bad in wrong:
        with pytest.raises(InputError, match=r"no class 'car'|different classes of the model"):
            Segmentation(**bad)
    refused(Segmentation(of=(5,)), MAPS, PIXEL, "different classes of the model")
    predictor = keepcover.calibrate_outputs(LOGITS, TRUE, task="multilabel", epsilon=0.1, sigma=0.5)
    with pytest.raises(InputError, match="calibrated on 3 labels, the model returned 2"):
        predictor.predict_outputs(LOGITS[:, :, :2])


def test_a_loss_that_breaks_its_contract_is_refused() -> None:
    outputs, truth = LOGITS[:, :1], torch.zeros(50, 3)
    grid = (0.0, 1.0, 2.0)
    refused(
        Loss(lambda o, y, t: o[:, 0] * 0 + t, (0.0, 0.5, 1.0)),
        outputs,
        truth,
        "does not grow with its parameter; at point 0",
    )
    refused(Loss(lambda o, y, t: o[:, 0] * 0 + 3, grid), outputs, truth, r"losses in \[0, 1\], got 3 to 3")
    refused(
        Loss(lambda o, y, t: o[:, 0] * 0 + 0.5, grid),
        outputs,
        truth,
        "a loss of 0 at the largest parameter, 2, got 0.5",
    )
    refused(Loss(lambda o, y, t: o * 0, grid), outputs, truth, "one loss for each of 50 points")
    refused(Loss(lambda o, y, t: o[:, 0] * torch.nan, grid), outputs, truth, r"losses in \[0, 1\], got nan")
    refused("loss", outputs, truth, "given as a value, which brings function and grid of yours")
    for bad in ((1.0,), (1.0, 0.5), (1.0, 1.0)):
        with pytest.raises(InputError, match="at least two ascending parameters"):
            Loss(above, bad)


def test_an_attack_that_lifts_zero_above_alpha_leaves_the_largest_parameter() -> None:
    """up(0) > alpha under noise that hides pixels: no clean loss is small enough."""
    task = Loss(above, (0.0, 1.0, 1e9))
    with pytest.warns(UserWarning, match="can only return everything"):
        made = keepcover.calibrate_outputs(
            LOGITS[:, :1].repeat(4, 1, 1), TRUE.repeat(4, 1), task=task, noise=keepcover.Uniform(1.0), epsilon=0.5
        )
    assert made.full
    assert made.predict_outputs(LOGITS[:5, :1]).parameter.tolist() == [1e9] * 5


def test_get_method_knows_one_draw() -> None:
    assert get_method("one_draw").certified
    assert isinstance(calibrated("multilabel").items, Tally)


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("strange", [None, 1.5, (1.5,), {"car"}])
def test_masks_are_of_classes(strange: Any) -> None:
    with pytest.raises(InputError, match="expected of= as names or numbers of classes"):
        Segmentation(of=strange)


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("of", [np.array([1, 0]), torch.tensor([1, 0]), (np.int64(1), np.int64(0)), [1, 0]])
def test_masks_are_of_classes_numbered_by_any_library(of: Any) -> None:
    assert Segmentation(of=of).config() == Segmentation(of=(1, 0)).config()
    assert all(type(one) is int for one in Segmentation(of=of).of)


def test_no_points_are_one_row() -> None:
    nothing = Items(Draws(torch.zeros(0, 2)), 0, torch.zeros(0), torch.zeros(0, dtype=torch.int64)).total()
    assert nothing.points == 0
    assert nothing.above.shape == (1, len(GRID), 2)
