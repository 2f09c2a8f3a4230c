"""The one evaluation loop: splits are partitions, rows are what the definitions give, and every source gives the same rows."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from keepcover.bounds import conformal_quantile
from keepcover.engine.smoother import Smoother
from keepcover.errors import InputError
from keepcover.evaluation import Attacked, Entry, InMemory, Network, Row, Stored, entries, evaluate, evaluate_entries
from keepcover.evaluation.random_splits import random_splits
from keepcover.methods import METHODS, RSCP, Asked, Exact, Holdout, get_method, usable
from keepcover.noise import Gaussian, Stream, Threat
from keepcover.prediction import source
from keepcover.scores import PTT, CustomScore, Reading, hps, log_odds
from keepcover.store import LogitStore, StoreKey
from keepcover.tasks import Classification
from tests.toys import nearest, network, toy

N, DRAWS, CLASSES = 600, 8, 5
ASK: dict[str, Any] = {"sigma": 0.25, "epsilon": 0.05, "holdout": 100, "splits": 3}


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
        assert set(split.calibration_with_holdout.tolist()) == set(range(n)) - set(split.test.tolist())


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
        for a, b in zip(random_splits(50, 3, 10, 3, redraw), random_splits(50, 3, 10, 3, redraw), strict=True):
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


def expect_row(row: Row, results: list[tuple[float, float]]) -> None:
    sizes, coverages = map(list, zip(*results, strict=True))
    assert row.size.mean == pytest.approx(sum(sizes) / len(sizes), rel=1e-12)
    assert row.coverage.mean == pytest.approx(sum(coverages) / len(coverages), rel=1e-12)
    assert row.size.std == pytest.approx(float(torch.tensor(sizes).double().std()), rel=1e-4, abs=1e-7)


def judge(statistic: Tensor, labels: Tensor, test: Tensor, threshold: float) -> tuple[float, float]:
    mask = statistic[test] <= threshold
    return float(mask.double().sum(dim=1).mean()), float(mask[torch.arange(len(test)), labels[test]].double().mean())


@pytest.mark.parametrize("redraw", [False, True])
def test_untransformed_methods_calibrate_on_the_holdout_too(data: tuple[Tensor, Tensor], redraw: bool) -> None:
    """cp and cp_smoothed, recomputed from the splits: the holdout joins the calibration points."""
    logits, labels = data
    rows = evaluate(logits, labels, methods=["cp", "cp_smoothed"], transforms=["none"], redraw_holdout=redraw, **ASK)
    statistics = log_odds(logits[:, 0]), hps(logits).double().mean(dim=1)
    for row, statistic in zip(rows, statistics, strict=True):
        true = statistic.gather(1, labels[:, None])[:, 0]
        results = [
            judge(statistic, labels, split.test, conformal_quantile(true[split.calibration_with_holdout], 0.1))
            for split in random_splits(N, 3, 100, 0, redraw)
        ]
        expect_row(row, results)


@pytest.mark.parametrize("redraw", [False, True])
def test_transformed_methods_spend_the_holdout_on_the_transform(data: tuple[Tensor, Tensor], redraw: bool) -> None:
    """PTT is fitted on one draw of each holdout point and calibrated without them."""
    logits, labels = data
    (row,) = evaluate(logits, labels, methods=["cp_smoothed"], transforms=["ptt"], redraw_holdout=redraw, **ASK)
    order, results = log_odds(logits), []
    for split in random_splits(N, 3, 100, 0, redraw):
        held = split.holdout
        statistic = PTT().fit(order[held, 0, labels[held]])(order).double().mean(dim=1)
        true = statistic.gather(1, labels[:, None])[:, 0]
        results.append(judge(statistic, labels, split.test, conformal_quantile(true[split.calibration], 0.1)))
    expect_row(row, results)


@pytest.mark.parametrize("redraw", [False, True])
def test_exact_is_fitted_on_the_holdout_alone(data: tuple[Tensor, Tensor], redraw: bool) -> None:
    logits, labels = data
    (row,) = evaluate(logits, labels, methods=["exact"], draws=4, redraw_holdout=redraw, **ASK)
    task, u, results = Classification().seen(logits), torch.zeros(N), []
    every = task.prepare(logits, Reading(order=True), u).first(4)
    asked = Asked(0.1, Threat(Gaussian(0.25), 0.05), 4, 250, CLASSES, 4)
    for split in random_splits(N, 3, 100, 0, redraw):
        rule = Exact().fit(asked, Holdout(task, logits[split.holdout], labels[split.holdout]))
        rows = split.calibration
        threshold = rule.threshold(task.items(logits[rows], labels[rows], Reading(order=True), u[rows]))
        results.append(judge(rule.test_statistic(every), labels, split.test, threshold))
    expect_row(row, results)
    g = row.guarantee
    assert (g.draws, g.calibration_draws, g.certified, g.n) == (4, 4, True, 250)


def test_all_methods_share_the_splits_and_rows_are_reproducible(data: tuple[Tensor, Tensor]) -> None:
    logits, labels = data
    calls: list[tuple[int, int]] = []
    rows = evaluate(logits, labels, progress=lambda done, total: calls.append((done, total)), **ASK)
    assert rows == evaluate(logits, labels, **ASK)
    assert calls == [(i + 1, len(calls)) for i in range(3 * len(rows))]
    compare = {name for name, method in METHODS.items() if method.compares_only}
    assert {(row.method, row.transform) for row in rows} == {
        (name, transform)
        for name in usable(Gaussian(0.1), Classification())
        for transform in ("none", "ptt")
        if transform == "none" or name not in compare
    }
    alone = evaluate(logits, labels, methods=["rscp"], transforms=["none"], **ASK)
    assert alone == [row for row in rows if (row.method, row.transform) == ("rscp", "none")]
    assert evaluate(logits, labels, methods=["cp"], seed=1, **ASK)[0].coverage != rows[0].coverage
    draws = {row.method: (row.guarantee.draws, row.guarantee.calibration_draws) for row in rows}
    assert (draws["cp"], draws["rcp1"], draws["exact"]) == ((1, 1), (1, 1), (8, 8))


def test_asymmetric_calibrates_on_its_usual_draws_as_far_as_there_are_so_many(data: tuple[Tensor, Tensor]) -> None:
    logits, labels = data
    ask = ASK | {"splits": 1, "methods": ["exact_asymmetric"], "draws": 2}
    assert evaluate(logits, labels, **ask)[0].guarantee.calibration_draws == DRAWS
    assert evaluate(logits, labels, calibration_draws=3, **ask)[0].guarantee.calibration_draws == 3
    many = logits[:300].repeat(1, 10, 1)
    assert evaluate(many, labels[:300], **ask)[0].guarantee.calibration_draws == 64


def test_trivial_splits_are_counted_not_hidden(data: tuple[Tensor, Tensor]) -> None:
    logits, labels = data
    (row,) = evaluate(logits, labels, methods=["rscp_plus_hoeffding"], transforms=["none"], draws=2, **ASK)
    assert (row.trivial_splits, row.size.mean, row.coverage.mean) == (3, CLASSES, 1.0)
    shown = row.to_dict()
    assert (shown["trivial_splits"], shown["norm"], shown["noise"], shown["sigma"]) == (3, "l2", "gaussian", 0.25)


# -- several entries ---------------------------------------------------------------------------------------------------

OVER: dict[str, Any] = {"splits": 3, "holdout": 40}


def entry(method: str, epsilon: float, **more: Any) -> Entry:
    own = {name: more.pop(name) for name in ("transform",) if name in more}
    return Entry(get_method(method, **own), epsilon, alpha=0.2, **more)


def memory(data: tuple[Tensor, Tensor]) -> InMemory:
    return InMemory(*data, Gaussian(0.5))


def test_entries_at_other_draws_radii_and_scores_are_those_of_separate_runs(data: tuple[Tensor, Tensor]) -> None:
    """One pass over the outputs serves every entry: the same rows as one call each."""
    listed = [
        entry("exact", 0.25, draws=4),
        entry("exact", 0.125, draws=8),
        entry("rscp", 0.25, draws=4),
        entry("rscp", 0.25, draws=4, task=Classification("aps")),
        entry("rscp_plus_bernstein", 0.125),
        entry("exact_asymmetric", 0.25, draws=1, calibration_draws=8),
    ]
    for more in ({}, {"redraw_holdout": True}):
        together = evaluate_entries(memory(data), listed, **OVER, **more)
        assert together == [evaluate_entries(memory(data), [one], **OVER, **more)[0] for one in listed]
        assert [rows[0].guarantee.draws for rows in together] == [4, 8, 4, 4, 8, 1]
        assert len({rows[0].size.mean for rows in together}) == len(listed)


def test_a_temperature_is_its_own_transform(data: tuple[Tensor, Tensor]) -> None:
    """Two PTTs in one call do not share a table: a flat one is not the steep one."""
    kinds = [Entry(RSCP(transform=PTT(T)), 0.25, alpha=0.2) for T in (1 / 400, 10.0)]
    steep, flat = evaluate_entries(memory(data), kinds, **OVER)
    assert steep[0].size != flat[0].size


def test_methods_with_options_keep_them(data: tuple[Tensor, Tensor]) -> None:
    wide, narrow = entries([get_method("rscp_plus_hoeffding", beta=0.02), "rscp_plus_hoeffding"], ("ptt",), epsilon=0.1)
    assert (wide.method.spent, narrow.method.spent) == (0.04, 0.002)
    assert wide.method.transform == PTT()


# -- attacked test points ----------------------------------------------------------------------------------------------


def test_an_attack_that_does_nothing_changes_nothing(data: tuple[Tensor, Tensor]) -> None:
    """Unmoved images of every position: the attacked row is the clean row, randomised scores included."""
    for task in (Classification(), Classification("aps")):
        still = Attacked("still", torch.arange(N), memory(data))
        clean, hit = evaluate_entries(memory(data), [entry("exact", 0.25, task=task)], attacked=still, **OVER)[0]
        assert (clean.attack, hit.attack) == ("none", "still")
        assert (clean.size, clean.coverage) == (hit.size, hit.coverage)


@pytest.mark.parametrize("redraw", [False, True])
def test_attacked_versions_are_judged_and_never_calibrated_on(data: tuple[Tensor, Tensor], redraw: bool) -> None:
    """Logits that point away from the truth: clean rows stay as they were, attacked ones cover nothing."""
    labels = data[1]
    some = torch.arange(0, N, 2)
    worst = -100 * torch.nn.functional.one_hot(labels, CLASSES)[some, None].float().expand(-1, DRAWS, -1)
    away = Attacked("away", some, InMemory(worst, labels[some], Gaussian(0.5)))
    listed = [entry("cp_smoothed", 0.25, transform=None), entry("rscp", 0.25)]
    found = evaluate_entries(memory(data), listed, attacked=away, redraw_holdout=redraw, **OVER)
    plain = evaluate_entries(memory(data), listed, redraw_holdout=redraw, **OVER)
    for (clean, hit), (want,) in zip(found, plain, strict=True):
        assert clean == want
        assert hit.coverage.mean == 0.0


def test_attacked_rows_are_those_of_the_attacked_test_points(data: tuple[Tensor, Tensor]) -> None:
    """By hand: only test points with an attacked version count, at the clean points' threshold."""
    logits, labels = data
    some = torch.arange(0, N, 3)
    moved = logits[some] - torch.nn.functional.one_hot(labels, CLASSES)[some, None]
    away = Attacked("pushed", some, InMemory(moved, labels[some], Gaussian(0.5)))
    ((_, row),) = evaluate_entries(memory(data), [entry("cp_smoothed", 0.25, transform=None)], attacked=away, **OVER)
    statistic, pushed = hps(logits).double().mean(dim=1), hps(moved).double().mean(dim=1)
    true, results = statistic.gather(1, labels[:, None])[:, 0], []
    for split in random_splits(N, 3, 40, 0):
        hit = torch.isin(some, split.test).nonzero()[:, 0]
        threshold = conformal_quantile(true[split.calibration_with_holdout], 0.2)
        results.append(judge(pushed, labels[some], hit, threshold))
    assert row.coverage.mean == pytest.approx(sum(c for _, c in results) / 3)
    assert row.size.mean == pytest.approx(sum(s for s, _ in results) / 3)


# -- every source gives the same rows ----------------------------------------------------------------------------------

POINTS, SIGMA, SEED = 260, 0.15, 4
SPLITS: dict[str, Any] = {"splits": 4, "holdout": 60, "seed": SEED}
TEST = Stream(SEED, "test")


@pytest.fixture(scope="module")
def images() -> tuple[Tensor, Tensor]:
    return toy(POINTS, seed=1)


def smoother(model: nn.Module | None = None, batch_size: int | None = 64, sigma: float = SIGMA) -> Smoother:
    return Smoother(model or nearest(), sigma, batch_size=batch_size, progress=False)


def kept(images: tuple[Tensor, Tensor], draws: int = DRAWS) -> InMemory:
    """All noisy outputs, as a file would have them."""
    return InMemory(smoother().logits(images[0], draws, TEST), images[1], Gaussian(SIGMA))


@pytest.fixture(scope="module")
def store(images: tuple[Tensor, Tensor], tmp_path_factory: pytest.TempPathFactory) -> LogitStore:
    root = tmp_path_factory.mktemp("store")
    made = LogitStore.open(root, StoreKey.of(smoother(), images, SEED), chunk_images=48, chunk_draws=3)
    made.fill(smoother(), images, DRAWS)
    return made


@pytest.mark.parametrize("score", ["hps", "aps", "raps"])
def test_the_network_gives_the_rows_of_outputs_in_memory(images: tuple[Tensor, Tensor], score: str) -> None:
    """Every method and transform: the same rules, thresholds, sets and trivial splits."""
    ask: dict[str, Any] = {"epsilon": 0.1, "alpha": 0.15, "score": score, **SPLITS}
    rows = evaluate(Network(smoother(), images, DRAWS, TEST), **ask)
    assert rows == evaluate(kept(images), **ask)
    assert {row.method for row in rows} == set(usable(Gaussian(0.1), Classification()))
    assert len({row.size.mean for row in rows}) > 7  # and they are not all alike


@pytest.mark.parametrize("batch_size", [24, None])
@pytest.mark.parametrize("draws", [(1, None), (3, None), (2, 5), (None, 4)])
def test_rows_do_not_depend_on_how_the_data_stream(
    images: tuple[Tensor, Tensor], batch_size: int | None, draws: tuple[int | None, int | None]
) -> None:
    ask: dict[str, Any] = {
        "epsilon": 0.05,
        "draws": draws[0],
        "calibration_draws": draws[1],
        "methods": ("cp", "cp_smoothed", "rscp_plus_hoeffding", "exact", "exact_asymmetric"),
        **SPLITS,
    }
    rows = evaluate(Network(smoother(batch_size=batch_size), images, DRAWS, TEST), **ask)
    assert rows == evaluate(kept(images), **ask)


def test_attacked_rows_are_the_same_from_the_network(images: tuple[Tensor, Tensor]) -> None:
    """Attacked images keep the noise of their positions, whatever source they come from."""
    some = torch.arange(0, POINTS, 3)
    moved = (images[0][some] + 0.05).clamp(0, 1)
    outputs = smoother().logits(moved, DRAWS, TEST, some)
    listed = [entry("exact", 0.1), entry("rscp", 0.1), entry("rscp", 0.1, task=Classification("aps"))]
    network_rows = evaluate_entries(
        Network(smoother(), images, DRAWS, TEST),
        listed,
        attacked=Attacked("moved", some, Network(smoother(), moved, DRAWS, TEST, some, labelled=False)),
        **SPLITS,
    )
    memory_rows = evaluate_entries(
        kept(images),
        listed,
        attacked=Attacked("moved", some, InMemory(outputs, images[1][some], Gaussian(SIGMA))),
        **SPLITS,
    )
    assert network_rows == memory_rows
    assert all([row.attack for row in rows] == ["none", "moved"] for rows in network_rows)
    assert all(clean.size != hit.size for clean, hit in network_rows)


def test_one_pass_serves_several_entries(images: tuple[Tensor, Tensor]) -> None:
    passes, model = 0, nearest()

    def counted(inputs: Tensor) -> Tensor:
        nonlocal passes
        passes += len(inputs)
        return model(inputs)

    margin = Classification(CustomScore(lambda logits: -logits, "margin"))
    listed = [
        entry("exact", 0.1),
        entry("rscp", 0.1, transform=None),
        entry("rscp", 0.05, task=Classification("aps")),
        entry("bincp", 0.05, task=Classification("aps")),
        entry("exact_asymmetric", 0.1, task=margin, draws=2),
    ]
    run = Smoother(counted, SIGMA, batch_size=64, progress=False)
    rows = evaluate_entries(Network(run, images, DRAWS, TEST), listed, **SPLITS)
    assert rows == evaluate_entries(kept(images), listed, **SPLITS)
    assert passes == POINTS * DRAWS


def test_datasets_stream_like_tensors(images: tuple[Tensor, Tensor]) -> None:
    ask: dict[str, Any] = {"epsilon": 0.1, "methods": ("exact", "rscp"), **SPLITS}
    want = evaluate(Network(smoother(), images, 4, TEST), **ask)
    for form in (TensorDataset(*images), (images[0].numpy(), images[1].numpy())):
        assert evaluate(Network(smoother(), form, 4, TEST), **ask) == want


def test_a_deeper_network_gives_the_same_rows(images: tuple[Tensor, Tensor]) -> None:
    """Convolutions round differently in other batches; sizes and coverages agree to what that can change."""
    ask: dict[str, Any] = {"epsilon": 0.02, "methods": ("exact", "rscp", "cp"), **SPLITS}
    rows = evaluate(Network(smoother(network(), 48), images, 4, TEST), **ask)
    outputs = smoother(network(), None).logits(images[0], 4, TEST)
    want = evaluate(outputs, images[1], sigma=SIGMA, **ask)
    for found, row in zip(rows, want, strict=True):
        assert found.size.mean == pytest.approx(row.size.mean, abs=0.02)
        assert found.coverage.mean == pytest.approx(row.coverage.mean, abs=0.02)


def test_without_noise_the_uncertified_methods_stream_too(images: tuple[Tensor, Tensor]) -> None:
    ask: dict[str, Any] = {"epsilon": 0.1, "methods": ("cp",), **SPLITS}
    rows = evaluate(Network(smoother(sigma=0.0), images, 1, TEST), **ask)
    assert rows == evaluate(nearest()(images[0]).detach()[:, None], images[1], sigma=0.0, **ask)


@pytest.mark.parametrize("piece", [300, 2**24])
def test_a_store_gives_the_rows_of_its_outputs(store: LogitStore, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "PIECE", piece)
    ask: dict[str, Any] = {"epsilon": 0.1, "methods": ("exact", "rscp_plus_bernstein", "cas", "rcp1"), **SPLITS}
    want = evaluate(store.read(), store.labels, sigma=SIGMA, **ask)
    assert evaluate(Stored(store), **ask) == want
    fewer = evaluate(store.read(draws=4), store.labels, sigma=SIGMA, **ask)
    assert evaluate(Stored(store, draws=4), **ask) == fewer


def test_large_stores_are_read_in_slices_and_small_ones_are_not(
    store: LogitStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask: dict[str, Any] = {"epsilon": 0.1, "methods": ["exact", "rscp"], **SPLITS}
    want = evaluate(store, **ask)
    assert isinstance(source.source_of(store, None, None), InMemory)
    monkeypatch.setattr(source, "IN_MEMORY", POINTS * DRAWS * 4 - 1)
    assert isinstance(source.source_of(store, None, None), Stored)
    assert evaluate(store, **ask) == want
    with pytest.raises(InputError, match="that needs them in memory"):
        evaluate(store, redraw_holdout=True, **ask)
    with pytest.raises(InputError, match=r"under Gaussian noise sigma 0\.15, not Gaussian noise sigma 0\.5"):
        evaluate(store, sigma=0.5, **ask)


def test_a_damaged_store_is_not_evaluated(store: LogitStore, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(store.folder, copy)
    bad = max(copy.glob("*.safetensors"))
    bad.write_bytes(b"")
    with pytest.raises(InputError, match=f"{bad.name} is damaged"):
        evaluate(Stored(LogitStore.at(copy)), epsilon=0.1, methods=["exact"], **SPLITS)


# -- memory ------------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Remembers the most numbers that one tensor held."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, Tensor):
                self.numbers = max(self.numbers, value.numel())
        return out


def test_memory_does_not_grow_with_images_times_draws() -> None:
    """No tensor is larger than the images, a statistic of all labels, or what tuning makes of the holdout."""
    draws, classes, pixels, held, thresholds, batch = 24, 4, 16, 8, 257, 240
    ask: dict[str, Any] = {"epsilon": 0.1, "draws": 4, "splits": 2, "holdout": held}
    for n in (200, 500):
        with Largest() as largest:
            run = Network(smoother(None, batch), toy(n), draws, Stream(0, "test"))
            evaluate(run, methods=("exact", "rscp_plus_bernstein", "cas"), **ask)
        assert largest.numbers <= max(
            n * pixels, n * classes, held * classes * max(draws, thresholds), batch * pixels * 4
        )
        assert largest.numbers < n * draws * classes / 2
    with Largest() as largest:
        evaluate(kept(toy(200), draws), methods=("exact",), **ask)
    assert largest.numbers >= 200 * draws * classes  # the measure sees what it must


# -- refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"draws": 9}, "asked for 9 draws, there are 8"),
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
        ({"methods": [get_method("rscp_plus_hoeffding", beta=0.05)]}, "spend all of alpha = 0.1"),
        ({"sigma": 0.0, "methods": ["rcp1"]}, "give sigma > 0"),
        ({"sigma": None}, "expected sigma or noise="),
    ],
)
def test_bad_questions_are_refused(data: tuple[Tensor, Tensor], change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        evaluate(*data, **{**ASK, "methods": ["cp"], "transforms": ["none"], **change})


def test_bad_data_are_refused(data: tuple[Tensor, Tensor]) -> None:
    logits, labels = data
    for value in (math.nan, math.inf, -math.inf):
        broken = logits.clone()
        broken[37, 2, 1] = value
        with pytest.raises(InputError, match="NaN or infinity, first at point 37"):
            evaluate(broken, labels, **ASK)
    with pytest.raises(InputError, match=r"labels between 0 and 4 \(the model has 5 outputs\), got 0 to 5"):
        evaluate(logits, labels + (labels == 4), **ASK)
    with pytest.raises(InputError, match="at least 2 classes"):
        evaluate(logits[..., :1], labels * 0, **ASK)
    with pytest.raises(InputError, match=r"expected float logits \[images, draws, classes\]"):
        evaluate(logits[:, 0], labels, **ASK)
    with pytest.raises(InputError, match=r"float noisy outputs .* got torch\.int64"):
        evaluate(logits.long(), labels, **ASK)
    with pytest.raises(InputError, match="expected the truth of 600 points, got 599"):
        evaluate(logits, labels[:-1], **ASK)
    with pytest.raises(InputError, match="expected the truth of every point"):
        evaluate(logits, **ASK)


def test_data_that_cannot_stream_are_refused(images: tuple[Tensor, Tensor]) -> None:
    ask: dict[str, Any] = {"epsilon": 0.1, "methods": ("cp",)}
    with pytest.raises(InputError, match="pass its dataset"):
        evaluate(Network(smoother(), DataLoader(TensorDataset(*images)), 2, TEST), **ask, **SPLITS)
    with pytest.raises(InputError, match="whose length is known"):
        Network(smoother(), iter([images]), 2, TEST)
    with pytest.raises(InputError, match="labels between 0 and 3"):
        evaluate(Network(smoother(), (images[0], images[1] + 1), 2, TEST), **ask, **SPLITS)
    with pytest.raises(InputError, match="labelled"):
        evaluate(Network(smoother(), images[0], 2, TEST), **ask, **SPLITS)
    with pytest.raises(InputError, match="expected a holdout of 1 to 258"):
        evaluate(Network(smoother(), images, 2, TEST), splits=2, holdout=259, **ask)
    with pytest.raises(InputError, match="that needs them in memory"):
        evaluate(Network(smoother(), images, 2, TEST), redraw_holdout=True, **ask, **SPLITS)


# -- real logits -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cifar10(assets: Path) -> tuple[Tensor, Tensor]:
    stored = load_file(assets / "models" / "cifar10-resnet110-sigma0.25.test-logits-64.safetensors")
    return stored["logits"], stored["labels"].long()


def size_on(
    cifar10: tuple[Tensor, Tensor], method: str, transform: str = "none", splits: int = 10, **options: int
) -> Row:
    ask: dict[str, Any] = {"sigma": 0.25, "epsilon": 0.125, "redraw_holdout": True}
    (row,) = evaluate(*cifar10, splits=splits, methods=[method], transforms=[transform], **ask, **options)
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
