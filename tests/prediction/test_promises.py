"""Promises in a predictor: every query is compared with its own threshold, however sets are asked for, saved or drawn."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SubsetRandomSampler, TensorDataset

import keepcover
from keepcover import Promise
from keepcover.errors import InputError, KeepcoverWarning
from keepcover.evaluation import evaluate
from keepcover.prediction import Predictor, calibrate, calibrate_outputs
from keepcover.tasks import Proportion
from tests.toys import nearest, toy

DATA, TEST = toy(900, seed=1), toy(50, seed=2)
NAMES = ("cat", "dog", "bird", "fish")
SITES = ["east", "west", "north"]
AT = [SITES[i % 3] for i in range(900)]
QUERIES = [SITES[(i // 2) % 3] for i in range(50)]
PROMISES: dict[str, dict[str, Any]] = {
    "class": {"per": "class"},
    "class, delta": {"per": "class", "delta": 0.2, "poisoned": 1},
    "clusters": {"per": "class", "clusters": (0, 1, 0, 1)},
    "group": {"per": AT},
    "weights": {"label_weights": (1.0, 0.5, 2.0, 0.0)},
    "group, weights": {"per": AT, "label_weights": (1.0, 0.5, 2.0, 0.0)},
    "moved, drift": {"calibration_epsilon": 0.02, "drift": 0.02},
}


def made(name: str, **options: Any) -> Predictor:
    asked: dict[str, Any] = {"alpha": 0.2, "epsilon": (0.02, 0.08), "sigma": 0.15, "draws": 6, "calibration_draws": 8}
    promise = Promise(**PROMISES[name])
    return calibrate(nearest(), DATA, promise=promise, class_names=NAMES, seed=0, **(asked | options))


def thresholds(predictor: Predictor, groups: list[str]) -> Tensor:
    """[n, K], looked up one by one."""
    table, clause = predictor.threshold, predictor.rule.asked.promise.groups
    rows = [table if clause is None else table[clause.per.index(name)] for name in groups]
    return torch.stack([row.expand(4) for row in rows])


@pytest.mark.parametrize("method", ["exact", "exact_asymmetric"])
@pytest.mark.parametrize("name", PROMISES)
def test_a_label_is_in_iff_few_enough_draws_exceed_its_own_threshold(name: str, method: str) -> None:
    predictor = made(name, method=method)
    groups = QUERIES if predictor.rule.asked.promise.groups else None
    whole = predictor.predict(TEST[0], seed=3, groups=groups)
    outputs = predictor.running.logits(TEST[0], predictor.draws, predictor._stream(3))
    score = torch.stack(  # the order of HPS: the logits of the others, summed as exponentials, minus one's own
        [
            outputs[..., [j for j in range(4) if j != k]].double().logsumexp(-1) - outputs[..., k].double()
            for k in range(4)
        ],
        dim=-1,
    )
    own = thresholds(predictor, QUERIES)
    assert predictor.rule.counting is not None
    expected = (score > own[:, None]).sum(dim=1) <= predictor.rule.counting[0]
    near = ((score - own[:, None]).abs() < 1e-5).any(dim=1)
    assert ((whole.mask == expected) | near).all()
    assert near.float().mean() < 0.01
    early = predictor.predict(TEST[0], seed=3, groups=groups, early_exit=True)
    assert torch.equal(early.mask, whole.mask)
    assert torch.equal(predictor.predict_outputs(outputs, seed=3, groups=groups).mask, whole.mask)
    if name != "moved, drift":
        assert len(own.unique(dim=0).flatten().unique()) > 1  # thresholds that could be mixed up


def apart() -> Predictor:
    """Groups whose thresholds are far from each other, and a rule that leaves some queries open longer than others."""
    predictor, far = made("group, weights", method="exact"), torch.tensor([[-3.0], [0.0], [3.0]])
    moved = {
        level: replace(one, rule=replace(one.rule, kappa=3), threshold=one.threshold + far)  # type: ignore[call-arg]
        for level, one in predictor.levels.items()
    }
    return replace(predictor, levels=moved)


def test_early_exit_compares_every_open_query_with_its_own_group() -> None:
    predictor, images, groups = apart(), toy(300, seed=6)[0], [SITES[i % 7 % 3] for i in range(300)]
    whole = predictor.predict(images, seed=3, groups=groups)
    early = predictor.predict(images, seed=3, groups=groups, early_exit=True)
    assert torch.equal(early.mask, whole.mask)
    assert early.draws_used is not None
    assert len(early.draws_used.unique()) > 1


@pytest.mark.parametrize("name", PROMISES)
def test_saved_predictors_keep_their_promise_and_nested_sets_are_unions(name: str, tmp_path: Path) -> None:
    predictor = made(name)
    groups = QUERIES if predictor.rule.asked.promise.groups else None
    predictor.save(tmp_path / "p.safetensors")
    again = keepcover.load(tmp_path / "p.safetensors", nearest())
    assert again.rule.asked.promise == predictor.rule.asked.promise
    assert torch.equal(again.threshold, predictor.threshold)
    assert str(again.guarantee) == str(predictor.guarantee)
    small, large = (again.predict(TEST[0], epsilon=e, seed=1, groups=groups).mask for e in (0.02, 0.08))
    nested = predictor.predict(TEST[0], epsilon=0.08, seed=1, groups=groups, nested=True)
    assert torch.equal(nested.mask, small | large)
    every = predictor.predict_all(TEST[0], seed=1, groups=groups)
    assert torch.equal(every[0.2, 0.08].mask, large)


def test_groups_are_named_and_unknown_ones_are_an_error_or_get_the_widest_sets() -> None:
    predictor = made("group")
    groups = ["south", *QUERIES[1:]]
    with pytest.raises(InputError, match="the group 'south' was not among the calibration points"):
        predictor.predict(TEST[0], groups=groups)
    with pytest.raises(InputError, match="expected the groups of 50 queries, got 3"):
        predictor.predict(TEST[0], groups=SITES)
    with pytest.raises(InputError, match="give groups=, one per query"):
        predictor.predict(TEST[0])
    with pytest.raises(InputError, match="the promise is not per group"):
        made("class").predict(TEST[0], groups=groups)
    wide = predictor.predict(TEST[0], groups=groups, unknown="widest", seed=4).mask
    each = [predictor.predict(TEST[0], groups=[site] * 50, seed=4).mask for site in SITES]
    assert torch.equal(
        wide[0], torch.stack(each).any(dim=0)[0]
    )  # thresholds of one label are nested: the union is the widest
    assert torch.equal(wide[1:], predictor.predict(TEST[0], groups=QUERIES, seed=4).mask[1:])
    assert (
        "A group that calibration never saw has no promise, the widest sets or not." in predictor.guarantee.assumptions
    )


def test_groups_belong_to_points_by_their_places() -> None:
    """A loader that shuffles would give each point the group of another: thresholds of mixed groups, and no promise."""
    pairs, predictor = TensorDataset(*DATA), made("group")
    mixed, straight = DataLoader(pairs, batch_size=64, shuffle=True), DataLoader(pairs, batch_size=64)
    own_order = DataLoader(pairs, batch_sampler=BatchSampler(RandomSampler(pairs), 64, drop_last=False))
    some = DataLoader(pairs, batch_size=64, sampler=SubsetRandomSampler(range(900)))
    options: dict[str, Any] = {"alpha": 0.2, "epsilon": 0.02, "sigma": 0.15, "draws": 4, "method": "rcp1", "seed": 0}
    for loader in (mixed, own_order, some):
        for act in (
            lambda data: calibrate(nearest(), data, promise=Promise(per=AT), **options),
            lambda data: predictor.predict(data, groups=AT),
            lambda data: predictor.predict_all(data, groups=AT),
            lambda data: predictor.recalibrate(data, groups=AT),
            lambda data: keepcover.audit(predictor, data, groups=AT),
        ):
            with pytest.raises(InputError, match="reads points in an order of its own: give its dataset"):
                act(loader)
    found = [calibrate(nearest(), data, promise=Promise(per=AT), **options) for data in (DATA, pairs, straight)]
    assert all(torch.equal(one.threshold, found[0].threshold) for one in found)
    calibrate(nearest(), mixed, promise=Promise(per="class"), **options)  # labels come along


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("many", [1, 20, 26, 49, 51])
def test_a_stream_of_queries_has_as_many_groups(many: int, early: bool) -> None:
    """26 is the trap: one group is left for the second batch, and would be that of all its queries."""
    predictor = apart()
    with pytest.raises(InputError, match=f"expected one group per query, got {many} groups for (25|50) queries"):
        predictor.predict(iter(TEST[0].split(25)), groups=(2 * QUERIES)[:many], early_exit=early)
    whole = predictor.predict(TEST[0], groups=QUERIES, seed=0, early_exit=early)
    stream = predictor.predict(iter(TEST[0].split(25)), groups=QUERIES, seed=0, early_exit=early)
    assert torch.equal(whole.mask, stream.mask)


def test_no_group_is_an_unknown_group() -> None:
    with pytest.raises(InputError, match="names or whole numbers, one per point, got None"):
        made("group").predict(TEST[0], groups=[None, *QUERIES[1:]])


class Untouched(torch.nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        raise AssertionError("the network ran")


def test_classes_with_too_few_points_are_named_before_the_network_runs() -> None:
    images, labels = DATA
    few = torch.cat([(labels != 2).nonzero()[:, 0], (labels == 2).nonzero()[:3, 0]])
    data, promise = (images[few], labels[few]), Promise(per="class")
    asked: dict[str, Any] = {"alpha": 0.1, "epsilon": 0.05, "sigma": 0.15, "class_names": NAMES, "seed": 0}
    said = r"1 of 4 classes have fewer than the 9 calibration points .* labels are in every set: bird \([0-3]\); clusters='auto'"
    with pytest.warns(KeepcoverWarning, match=said), pytest.raises(AssertionError, match="the network ran"):
        calibrate(Untouched(), data, promise=promise, **asked)
    with pytest.warns(KeepcoverWarning, match=said):
        predictor = calibrate(nearest(), data, promise=promise, **asked)
    assert predictor.predict(TEST[0]).mask[:, 2].all()
    assert predictor.threshold.isinf().tolist() == [False, False, True, False]
    assert "has its label in every set, here bird)" in str(predictor.guarantee)


@pytest.mark.parametrize(
    ("promise", "label", "names", "message"),
    [
        (Promise(per="class"), -1, None, "expected labels between 0 and"),
        (Promise(per="class"), 9, NAMES, "expected labels between 0 and 3, of 4 classes, got 9"),
        (Promise(per="class"), 2**40, None, "expected labels between 0 and"),
        (Promise(per="class"), 0.5, None, "expected integer class labels"),
        (Promise(per="class", clusters=(0, 1)), 3, None, "the cluster of each of 4 classes or more, got 2"),
        ("class", 0, None, r"expected a Promise, such as Promise\(per='class'\), got 'class'"),
        ({"per": "class"}, 0, None, "expected a Promise"),
        (Promise(drift=0.2), 0, None, "spend all of alpha"),
        (Promise(poisoned=400), 0, None, "at least [0-9]+ are needed"),
    ],
)
@pytest.mark.usefixtures("untyped")
def test_what_cannot_be_promised_is_refused_before_the_network_runs(
    promise: Any, label: float, names: Any, message: str
) -> None:
    images, labels = DATA[0], DATA[1].clone()
    labels = labels.to(torch.float32) if isinstance(label, float) else labels
    labels[:50] = label  # some of them are in no holdout
    asked: dict[str, Any] = {"alpha": 0.2, "epsilon": 0.05, "sigma": 0.15, "promise": promise, "draws": 4}
    with pytest.raises(InputError, match=message):
        calibrate(Untouched(), (images, labels), class_names=names, **asked)
    outputs = torch.zeros(900, 4, 4)
    with pytest.raises(InputError, match=message):
        calibrate_outputs(outputs, labels, class_names=names, **asked)
    if not isinstance(promise, Promise):
        with pytest.raises(InputError, match=message):
            evaluate(outputs, labels, epsilon=0.05, sigma=0.15, promise=promise, methods=["rcp1"], splits=1)


def test_clusters_are_chosen_on_the_holdout_alone() -> None:
    """Other calibration points, the same clusters; another holdout, others. Alike classes are pooled."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.arange(2500) % 10
    # Classes 0 to 4 are easy, 5 to 9 are hard.
    outputs = 3 * torch.nn.functional.one_hot(truth, 10)[:, None] * (1 + (truth < 5).float())[:, None, None]
    outputs = outputs + torch.randn(2500, 4, 10, generator=generator)
    held = torch.zeros(2500, dtype=torch.bool)
    from keepcover.prediction.collecting import chosen_rows

    held[chosen_rows(2500, 500, 0)] = True
    asked: dict[str, Any] = {"epsilon": 0.05, "sigma": 0.25, "method": "exact", "holdout": 500, "seed": 0}
    promise = Promise(per="class", clusters="auto")

    def found(changed: Tensor) -> tuple[int, ...]:
        return calibrate_outputs(changed, truth, promise=promise, **asked).rule.asked.promise.config()["clusters"]

    clusters = found(outputs)
    assert len(set(clusters)) == 10  # 2000 points, 200 each
    assert max(clusters[:5]) < min(clusters[5:])
    other = outputs.clone()
    other[~held] = torch.randn(2000, 4, 10, generator=generator)
    assert found(other) == clusters
    other = outputs.clone()
    other[held] = torch.randn(500, 4, 10, generator=generator)
    assert found(other) != clusters


def test_splits_calibrate_and_judge_every_group_by_its_own_points() -> None:
    """The mutant: groups one place off. The hard group's points are covered by chance then, under its own promise too."""
    generator, truth = torch.Generator().manual_seed(0), torch.arange(1600) % 3
    hard = torch.rand(1600, generator=generator) < 0.3
    outputs = torch.where(hard, 0.0, 6.0)[:, None, None] * torch.nn.functional.one_hot(truth, 3)[:, None]
    outputs = outputs + torch.randn(1600, 2, 3, generator=generator)
    promises = [Promise(), Promise(per=["hard" if one else "easy" for one in hard.tolist()])]
    rows = evaluate(
        outputs, truth, epsilon=0.0, sigma=0.25, methods=["cp"], promise=promises, splits=10, holdout=50, seed=3
    )
    (easy, worse), (own, own_hard) = ([row.observed.by_group.proportion(k).mean for k in (0, 1)] for row in rows)
    assert easy > 0.99
    assert worse < 0.75
    assert own == pytest.approx(0.9, abs=0.03)
    assert own_hard == pytest.approx(0.9, abs=0.03)


def test_the_worst_class_and_group_are_those_of_the_splits() -> None:
    generator = torch.Generator().manual_seed(0)
    truth = torch.arange(1500) % 3
    outputs = 2 * torch.nn.functional.one_hot(truth, 3)[:, None] + torch.randn(1500, 4, 3, generator=generator)
    outputs[truth == 1, :, 1] -= 1.5  # the hard class
    groups = ["old" if i % 4 else "new" for i in range(1500)]
    promises = [Promise(), Promise(per="class"), Promise(per=groups)]
    rows = evaluate(
        outputs, truth, epsilon=0.0, sigma=0.25, methods=["cp"], promise=promises, splits=10, holdout=50, seed=3
    )
    marginal, per_class, per_group = rows
    assert marginal.worst["worst_class"]["of"] == 1
    for row in rows:
        for kind, by in (("worst_class", row.observed.by_class), ("worst_group", row.observed.by_group)):
            shares = {k: sum(by(k)[0]) / 10 for k in by.members}
            worst = row.worst[kind]
            assert worst["mean"] == pytest.approx(min(shares.values()))
            assert shares[worst["of"]] == min(shares.values())
            count = worst["count"]
            plain = Proportion.of(round(worst["mean"] * count), count, 0.05 / len(shares))
            assert worst["low"] < plain.low  # wider than Bonferroni alone: the luck of the splits is in it
            assert worst["high"] > plain.high or math.isclose(worst["high"], 1.0)
    assert marginal.worst["worst_class"]["high"] < 0.9  # significantly below, and the promise per class is not
    assert per_class.worst["worst_class"]["high"] >= 0.9
    assert per_group.cost(rows) == pytest.approx(per_group.size.mean / marginal.size.mean - 1)
    assert marginal.cost(rows) == 0
    assert per_group.cost([per_group]) is None
