"""Split evaluation: the splits themselves, rows recomputed by hand, refused input, and real logits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from keepcover.errors import InputError
from keepcover.evaluation.splits import (
    Attacked,
    Request,
    Row,
    check_logits,
    evaluate_methods,
    evaluate_requests,
    random_splits,
)
from keepcover.guarantee import conformal_quantile
from keepcover.methods import METHODS, Exact, Setting
from keepcover.methods.holdout import Holdout
from keepcover.scores.draws import Draws
from keepcover.scores.scores import hps, log_odds
from keepcover.scores.transforms import PTT

N, DRAWS, CLASSES = 600, 8, 5
ASK = {"sigma": 0.25, "epsilon": 0.05, "holdout": 100, "splits": 3}


@pytest.fixture(scope="module")
def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (N,), generator=generator)
    logits = 2 * torch.randn(N, 1, CLASSES, generator=generator) + torch.randn(N, DRAWS, CLASSES, generator=generator)
    logits[torch.arange(N), :, labels] += 4
    return logits, labels


# -- the splits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "holdout", "sizes"), [(100, 20, (40, 40)), (101, 20, (40, 41)), (3, 1, (1, 1))])
def test_every_split_is_a_partition(n: int, holdout: int, sizes: tuple[int, int]) -> None:
    for split in random_splits(n, 5, holdout, seed=1):
        parts = (split.holdout, split.calibration, split.test)
        assert tuple(len(part) for part in parts) == (holdout, *sizes)
        assert torch.cat(parts).sort().values.tolist() == list(range(n))
        assert set(split.more.tolist()) == set(range(n)) - set(split.test.tolist())


def test_the_holdout_is_fixed_per_seed_unless_redrawn() -> None:
    fixed, redrawn = list(random_splits(200, 4, 50, 7)), list(random_splits(200, 4, 50, 7, redraw_holdout=True))
    assert all(torch.equal(split.holdout, fixed[0].holdout) for split in fixed)
    assert len({tuple(split.holdout.sort().values.tolist()) for split in redrawn}) == 4
    for splits in (fixed, redrawn):
        assert len({tuple(split.test.sort().values.tolist()) for split in splits}) == 4
    other = next(random_splits(200, 1, 50, 8))
    assert set(other.holdout.tolist()) != set(fixed[0].holdout.tolist())


def test_splits_are_reproducible_by_seed() -> None:
    for redraw in (False, True):
        for a, b in zip(random_splits(50, 3, 10, 3, redraw), random_splits(50, 3, 10, 3, redraw)):
            assert torch.equal(a.calibration, b.calibration)
            assert torch.equal(a.test, b.test)
            assert torch.equal(a.holdout, b.holdout)


@pytest.mark.parametrize(
    ("holdout", "count", "message"),
    [(0, 1, "holdout of 1 to 98"), (99, 1, "of the 100 points, got 99"), (10, 0, "at least one split")],
)
def test_impossible_splits_are_refused(holdout: int, count: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        next(random_splits(100, count, holdout, 0))


# -- rows by hand ------------------------------------------------------------------------------------------------------


def expect_row(row: Row, sizes: list[float], coverages: list[float]) -> None:
    assert row.size.mean == pytest.approx(sum(sizes) / len(sizes), rel=1e-6)
    assert row.coverage.mean == pytest.approx(sum(coverages) / len(coverages), rel=1e-6)
    assert row.size.std == pytest.approx(float(torch.tensor(sizes).double().std()), rel=1e-4, abs=1e-7)


def judge(statistic: Tensor, labels: Tensor, test: Tensor, threshold: float) -> tuple[float, float]:
    mask = statistic[test] <= threshold
    return float(mask.double().sum(dim=1).mean()), float(mask[torch.arange(len(test)), labels[test]].double().mean())


@pytest.mark.parametrize("redraw", [False, True])
def test_untransformed_methods_calibrate_on_the_holdout_too(data: tuple[Tensor, Tensor], redraw: bool) -> None:
    """cp and cp_smoothed, recomputed from the splits: the holdout joins the calibration points."""
    logits, labels = data
    rows = evaluate_methods(
        logits, labels, methods=["cp", "cp_smoothed"], transforms=["none"], redraw_holdout=redraw, **ASK
    )
    statistics = log_odds(logits[:, 0]), hps(logits).double().mean(dim=1)
    for row, statistic in zip(rows, statistics, strict=True):
        true = statistic.gather(1, labels[:, None])[:, 0]
        results = [
            judge(
                statistic,
                labels,
                split.test,
                conformal_quantile(true[torch.cat([split.calibration, split.holdout])], 0.1),
            )
            for split in random_splits(N, 3, 100, 0, redraw)
        ]
        expect_row(row, *map(list, zip(*results)))


@pytest.mark.parametrize("redraw", [False, True])
def test_transformed_methods_spend_the_holdout_on_the_transform(data: tuple[Tensor, Tensor], redraw: bool) -> None:
    """PTT is fitted on one draw of each holdout point and calibrated without them."""
    logits, labels = data
    (row,) = evaluate_methods(logits, labels, methods=["cp_smoothed"], transforms=["ptt"], redraw_holdout=redraw, **ASK)
    order, results = log_odds(logits), []
    for split in random_splits(N, 3, 100, 0, redraw):
        held = split.holdout
        statistic = PTT.fit(order[held, 0, labels[held]])(order).double().mean(dim=1)
        true = statistic.gather(1, labels[:, None])[:, 0]
        results.append(judge(statistic, labels, split.test, conformal_quantile(true[split.calibration], 0.1)))
    expect_row(row, *map(list, zip(*results)))


def test_exact_is_fitted_on_the_holdout_alone(data: tuple[Tensor, Tensor]) -> None:
    logits, labels = data
    (row,) = evaluate_methods(logits, labels, methods=["exact"], transforms=["none"], draws=4, **ASK)
    order, results = Draws(log_odds(logits).transpose(1, 2).contiguous()), []
    rule = None
    for split in random_splits(N, 3, 100, 0):
        if rule is None:
            holdout = Holdout(order[split.holdout], labels[split.holdout])
            rule = Exact.fit(Setting(0.1, 0.05, 0.25, 4, 250, CLASSES, 4), holdout)
        few = order.first(4)
        threshold = rule.threshold(
            rule.calibration_statistic(few[split.calibration].of_label(labels[split.calibration]))
        )
        results.append(judge(rule.test_statistic(few), labels, split.test, threshold))
    expect_row(row, *map(list, zip(*results)))
    assert (row.draws, row.calibration_draws, row.certified) == (4, 4, True)


def test_all_methods_share_the_splits_and_rows_are_reproducible(data: tuple[Tensor, Tensor]) -> None:
    logits, labels = data
    calls: list[tuple[int, int]] = []
    rows = evaluate_methods(logits, labels, progress=lambda done, total: calls.append((done, total)), **ASK)
    again = evaluate_methods(logits, labels, **ASK)
    assert rows == again
    assert calls == [(i + 1, len(calls)) for i in range(3 * len(rows))]
    compare = {name for name, method in METHODS.items() if method.compares_only}
    assert {(row.method, row.transform) for row in rows} == {
        (name, transform)
        for name in METHODS
        for transform in ("none", "ptt")
        if transform == "none" or name not in compare
    }
    alone = evaluate_methods(logits, labels, methods=["rscp"], transforms=["none"], **ASK)
    assert alone == [row for row in rows if (row.method, row.transform) == ("rscp", "none")]
    assert (
        evaluate_methods(logits, labels, methods=["cp"], transforms=["none"], seed=1, **ASK)[0].coverage
        != rows[0].coverage
    )
    draws = {row.method: (row.draws, row.calibration_draws) for row in rows}
    assert (draws["cp"], draws["rcp1"], draws["exact"]) == ((1, 1), (1, 1), (8, 8))


def test_asymmetric_calibrates_on_all_draws_unless_told(data: tuple[Tensor, Tensor]) -> None:
    logits, labels = data
    ask = ASK | {"splits": 1, "methods": ["exact_asymmetric"], "transforms": ["none"], "draws": 2}
    assert evaluate_methods(logits, labels, **ask)[0].calibration_draws == DRAWS
    assert evaluate_methods(logits, labels, calibration_draws=3, **ask)[0].calibration_draws == 3


def test_trivial_splits_are_counted_not_hidden(data: tuple[Tensor, Tensor]) -> None:
    logits, labels = data
    (row,) = evaluate_methods(logits, labels, methods=["rscp_plus_hoeffding"], transforms=["none"], draws=2, **ASK)
    assert (row.trivial_splits, row.size.mean, row.coverage.mean) == (3, CLASSES, 1.0)
    assert row.to_dict()["trivial_splits"] == 3


# -- refused input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"draws": 9}, "asked for 9 draws, the file has 8"),
        ({"draws": 0}, "asked for 0 draws"),
        ({"calibration_draws": 9}, "asked for 9 draws"),
        ({"calibration_draws": 0}, "asked for 0 draws"),
        ({"methods": ["magic"]}, "expected a method among"),
        ({"transforms": ["log"]}, "transforms among none and ptt, got 'log'"),
        ({"score": "entropy"}, "expected a score among"),
        ({"holdout": 599}, "expected a holdout of 1 to 598"),
        ({"splits": 0}, "at least one split"),
        ({"alpha": 1.5}, "alpha strictly between 0 and 1"),
        ({"alpha": 0.001}, "350 calibration points cannot certify miscoverage 0.001: at least 999"),
        ({"beta": 0.05, "methods": ["rscp_plus_hoeffding"]}, "choose beta below 0.05"),
        ({"sigma": 0.0, "methods": ["rcp1"]}, "give sigma > 0"),
    ],
)
def test_bad_requests_are_refused(data: tuple[Tensor, Tensor], change: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        evaluate_methods(*data, **{**ASK, "methods": ["cp"], "transforms": ["none"], **change})


def test_bad_data_are_refused(data: tuple[Tensor, Tensor]) -> None:
    logits, labels = data
    for value in (math.nan, math.inf, -math.inf):
        broken = logits.clone()
        broken[37, 2, 1] = value
        with pytest.raises(InputError, match="NaN or infinity, first at image 37"):
            evaluate_methods(broken, labels, **ASK)
    with pytest.raises(InputError, match=r"labels between 0 and 4 \(the model has 5 outputs\), got 0 to 5"):
        evaluate_methods(logits, labels + (labels == 4), **ASK)
    with pytest.raises(InputError, match="at least 1 image, 1 draw and 2 classes"):
        evaluate_methods(logits[..., :1], labels * 0, **ASK)


def test_wrong_shapes_are_refused(data: tuple[Tensor, Tensor]) -> None:
    """By the run-time shape check here, by ``check_logits`` where that is not installed."""
    logits, labels = data
    with pytest.raises(InputError, match=r"float logits \[images, draws, classes\]"):
        check_logits(logits[:, 0], labels)
    with pytest.raises(InputError, match=r"got torch\.int64"):
        check_logits(logits.long(), labels)
    with pytest.raises(InputError, match="expected 600 labels in one dimension"):
        check_logits(logits, labels[:-1])


# -- real logits -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cifar10(assets: Path) -> tuple[Tensor, Tensor]:
    stored = load_file(assets / "models" / "cifar10-resnet110-sigma0.25.test-logits-64.safetensors")
    return stored["logits"], stored["labels"].long()


def size_on(
    cifar10: tuple[Tensor, Tensor], method: str, transform: str = "none", splits: int = 10, **options: int
) -> Row:
    ask = {"sigma": 0.25, "epsilon": 0.125, "redraw_holdout": True, "methods": [method], "transforms": [transform]}
    (row,) = evaluate_methods(*cifar10, splits=splits, **ask, **options)
    assert row.trivial_splits == 0
    return row


@pytest.mark.parametrize(("draws", "most"), [(4, 1.78), (16, 1.63), (64, 1.58)])
def test_exact_on_cifar10(cifar10: tuple[Tensor, Tensor], draws: int, most: float) -> None:
    assert size_on(cifar10, "exact", draws=draws).size.mean <= most


def test_one_draw_per_query_on_cifar10(cifar10: tuple[Tensor, Tensor]) -> None:
    assert size_on(cifar10, "exact_asymmetric", splits=5, draws=1, calibration_draws=64).size.mean <= 1.92


@pytest.mark.parametrize(
    ("method", "transform", "low", "high"), [("rscp", "ptt", 1.47, 1.57), ("cp_smoothed", "none", 1.26, 1.32)]
)
def test_uncertified_sizes_on_cifar10(
    cifar10: tuple[Tensor, Tensor], method: str, transform: str, low: float, high: float
) -> None:
    row = size_on(cifar10, method, transform)
    assert low <= row.size.mean <= high
    assert row.coverage.mean >= 0.89


# -- several requests, attacked test points ------------------------------------------------------------------------------


def test_requests_at_other_draws_and_radii_are_those_of_separate_runs(data: tuple[Tensor, Tensor]) -> None:
    """One pass over the scores serves every (method, draws, epsilon): the same rows as one call each."""
    requests = [
        Request("exact", 0.25, draws=4),
        Request("exact", 0.125, draws=8),
        Request("rscp", 0.25, "ptt", draws=4),
        Request("rscp_plus_bernstein", 0.125, "ptt"),
        Request("exact_asymmetric", 0.25, draws=1, calibration_draws=8),
    ]
    options: dict[str, Any] = {"sigma": 0.5, "splits": 3, "holdout": 40, "alpha": 0.2}
    together = evaluate_requests(*data, requests, **options)
    apart = [evaluate_requests(*data, [request], **options)[0] for request in requests]
    assert together == apart
    assert [rows[0].draws for rows in together] == [4, 8, 4, 8, 1]


def test_a_temperature_is_its_own_transform(data: tuple[Tensor, Tensor]) -> None:
    """Two PTTs in one call do not share a table: a flat one is not the steep one."""
    steep, flat = evaluate_requests(
        *data,
        [Request("rscp", 0.25, "ptt", T=1 / 400), Request("rscp", 0.25, "ptt", T=10.0)],
        sigma=0.5,
        splits=3,
        holdout=40,
        alpha=0.2,
    )
    assert steep[0].size != flat[0].size


def test_an_attack_that_does_nothing_changes_nothing(data: tuple[Tensor, Tensor]) -> None:
    """Unmoved images of every position: the attacked row is the clean row."""
    logits, labels = data
    still = Attacked("still", torch.arange(len(logits)), logits)
    clean, hit = evaluate_requests(
        logits, labels, [Request("exact", 0.25)], sigma=0.5, splits=3, holdout=40, alpha=0.2, attacked=still
    )[0]
    assert (clean.attack, hit.attack) == ("none", "still")
    assert (clean.size, clean.coverage) == (hit.size, hit.coverage)


def test_attacked_versions_are_judged_and_never_calibrated_on(data: tuple[Tensor, Tensor]) -> None:
    """Logits that point away from the truth: clean rows stay as they were, attacked ones cover nothing."""
    logits, labels = data
    worst = -100 * torch.nn.functional.one_hot(labels, logits.shape[2]).float()
    some = torch.arange(0, len(logits), 2)
    away = Attacked("away", some, worst[some, None].expand(-1, logits.shape[1], -1))
    options: dict[str, Any] = {"sigma": 0.5, "splits": 3, "holdout": 40, "alpha": 0.2}
    clean, hit = evaluate_requests(logits, labels, [Request("cp_smoothed", 0.25)], attacked=away, **options)[0]
    assert clean == evaluate_requests(logits, labels, [Request("cp_smoothed", 0.25)], **options)[0][0]
    assert hit.coverage.mean == 0.0
