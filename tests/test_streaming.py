"""Streamed statistics give the rows that stored logits give, and keep no logits."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from keepcover.engine.smoother import Smoother
from keepcover.errors import InputError
from keepcover.evaluation.splits import evaluate_methods
from keepcover.evaluation.stored import evaluate_logits
from keepcover.evaluation.streaming import Question, evaluate_store, evaluate_streaming
from keepcover.methods import METHODS
from keepcover.noise.stream import Stream
from keepcover.paper import stored, streaming
from keepcover.scores.scores import CustomScore
from keepcover.store import LogitStore, StoreKey

from .test_smoothing import nearest, network, toy

N, DRAWS, SIGMA, SEED = 260, 8, 0.15, 4
OVER: dict[str, Any] = {"splits": 4, "holdout": 60, "seed": SEED}


@pytest.fixture(scope="module")
def data() -> tuple[Tensor, Tensor]:
    return toy(N, seed=1)


def smoother(model: nn.Module | None = None, batch_size: int | None = 64, sigma: float = SIGMA) -> Smoother:
    return Smoother(model or nearest(), sigma, batch_size=batch_size, progress=False)


def kept(data: tuple[Tensor, Tensor], draws: int = DRAWS) -> Tensor:
    """All noisy logits, as a file would have them."""
    return smoother().logits(data[0], draws, Stream(SEED, "test"))


# -- the same rows -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("score", ["hps", "aps", "raps"])
def test_rows_are_those_of_stored_logits(data: tuple[Tensor, Tensor], score: str) -> None:
    """Every method and transform: the same rules, thresholds, sets and trivial splits."""
    ask: dict[str, Any] = {"epsilon": 0.1, "alpha": 0.15, "score": score}
    rows = evaluate_streaming(smoother(), data, Question(**ask), draws=DRAWS, **OVER)
    want = evaluate_methods(kept(data), data[1], sigma=SIGMA, **ask, **OVER)
    assert rows == want
    assert {row.method for row in rows} == set(METHODS)
    assert len({row.size.mean for row in rows}) > 8  # and they are not all alike


@pytest.mark.parametrize("batch_size", [24, None])
@pytest.mark.parametrize("draws", [(1, None), (3, None), (2, 5), (None, 4)])
def test_rows_do_not_depend_on_how_the_data_stream(
    data: tuple[Tensor, Tensor], batch_size: int | None, draws: tuple[int | None, int | None]
) -> None:
    ask: dict[str, Any] = {
        "epsilon": 0.05,
        "draws": draws[0],
        "calibration_draws": draws[1],
        "methods": ("cp", "cp_smoothed", "rscp_plus_hoeffding", "exact", "exact_asymmetric"),
    }
    rows = evaluate_streaming(smoother(batch_size=batch_size), data, Question(**ask), draws=DRAWS, **OVER)
    assert rows == evaluate_methods(kept(data), data[1], sigma=SIGMA, **ask, **OVER)


def test_one_pass_serves_several_requests(data: tuple[Tensor, Tensor]) -> None:
    passes = 0
    model = nearest()

    def counted(images: Tensor) -> Tensor:
        nonlocal passes
        passes += len(images)
        return model(images)

    margin = CustomScore(lambda logits: -logits, "margin")
    asks: list[dict[str, Any]] = [
        {"epsilon": 0.1, "methods": ("exact", "rscp")},
        {"epsilon": 0.05, "alpha": 0.2, "score": "aps", "methods": ("rscp", "bincp"), "transforms": ("ptt",)},
        {"epsilon": 0.1, "score": margin, "methods": ("exact_asymmetric",), "draws": 2},
    ]
    run = Smoother(counted, SIGMA, batch_size=64, progress=False)
    rows = evaluate_streaming(run, data, [Question(**ask) for ask in asks], draws=DRAWS, **OVER)
    want = [row for ask in asks for row in evaluate_methods(kept(data), data[1], sigma=SIGMA, **ask, **OVER)]
    assert rows == want
    assert passes == N * DRAWS


def test_datasets_stream_like_tensors(data: tuple[Tensor, Tensor]) -> None:
    request = Question(0.1, methods=("exact", "rscp"))
    for form in (TensorDataset(*data), (data[0].numpy(), data[1].numpy())):
        rows = evaluate_streaming(smoother(), form, request, draws=4, **OVER)
        assert rows == evaluate_streaming(smoother(), data, request, draws=4, **OVER)


def test_a_deeper_network_gives_the_same_rows(data: tuple[Tensor, Tensor]) -> None:
    """Convolutions round differently in other batches; sizes and coverages agree to what that can change."""
    images, labels = data[0], data[1] % 4
    run = Smoother(network(), SIGMA, batch_size=48, progress=False)
    request = Question(0.02, methods=("exact", "rscp", "cp"))
    rows = evaluate_streaming(run, (images, labels), request, draws=4, **OVER)
    want = evaluate_methods(
        Smoother(network(), SIGMA).logits(images, 4, Stream(SEED, "test")),
        labels,
        sigma=SIGMA,
        epsilon=0.02,
        methods=request.methods,
        **OVER,
    )
    for found, row in zip(rows, want, strict=True):
        assert found.size.mean == pytest.approx(row.size.mean, abs=0.02)
        assert found.coverage.mean == pytest.approx(row.coverage.mean, abs=0.02)


def test_without_noise_the_uncertified_methods_stream_too(data: tuple[Tensor, Tensor]) -> None:
    request = Question(0.1, methods=("cp",), transforms=("none",))
    (row,) = evaluate_streaming(smoother(sigma=0.0), data, request, draws=1, **OVER)
    logits = nearest()(data[0]).detach()[:, None]
    assert [row] == evaluate_methods(
        logits, data[1], sigma=0.0, epsilon=0.1, methods=("cp",), transforms=("none",), **OVER
    )


# -- from a store ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def store(data: tuple[Tensor, Tensor], tmp_path_factory: pytest.TempPathFactory) -> LogitStore:
    root = tmp_path_factory.mktemp("store")
    made = LogitStore.open(root, StoreKey.of(smoother(), data, SEED), chunk_images=48, chunk_draws=3)
    made.fill(smoother(), data, DRAWS)
    return made


@pytest.mark.parametrize("piece", [300, 2**24])
def test_a_store_streams(store: LogitStore, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "PIECE", piece)
    ask: dict[str, Any] = {"epsilon": 0.1, "methods": ("exact", "rscp_plus_bernstein", "cas", "rcp1")}
    want = evaluate_methods(store.read(), store.labels, sigma=SIGMA, **ask, **OVER)
    assert evaluate_store(store, Question(**ask), **OVER) == want
    fewer = evaluate_methods(store.read(draws=4), store.labels, sigma=SIGMA, **ask, **OVER)
    assert evaluate_store(store, Question(**ask), draws=4, **OVER) == fewer


def test_large_stores_are_streamed_and_small_ones_are_not(store: LogitStore, monkeypatch: pytest.MonkeyPatch) -> None:
    ask: dict[str, Any] = {
        "sigma": None,
        "epsilon": 0.1,
        "alpha": 0.1,
        "beta": 0.001,
        "score": "hps",
        "methods": ["exact", "rscp"],
        "transforms": ("none", "ptt"),
        "draws": None,
        "calibration_draws": None,
        "redraw_holdout": False,
        **OVER,
    }
    want = evaluate_logits(store.folder, **ask)
    assert (want.images, want.sigma) == (N, SIGMA)
    streamed = []
    honest = stored.evaluate_store
    monkeypatch.setattr(stored, "evaluate_store", lambda *args, **more: streamed.append(1) or honest(*args, **more))
    assert evaluate_logits(store.folder, **ask) == want
    assert streamed == []
    monkeypatch.setattr(stored, "IN_MEMORY", N * DRAWS * 4 - 1)
    assert evaluate_logits(store.folder, **ask) == want
    assert streamed == [1]
    evaluate_logits(store.folder, **{**ask, "redraw_holdout": True})  # needs every logit again and again
    assert streamed == [1]


def test_a_damaged_store_is_not_evaluated(store: LogitStore, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(store.folder, copy)
    bad = max(copy.glob("*.safetensors"))
    bad.write_bytes(b"")
    with pytest.raises(InputError, match=f"{bad.name} is damaged"):
        evaluate_store(LogitStore.at(copy), Question(0.1, methods=("exact",)), **OVER)


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
    request = Question(0.1, methods=("exact", "rscp_plus_bernstein", "cas"), draws=4)
    for n in (200, 500):
        with Largest() as largest:
            evaluate_streaming(smoother(None, batch), toy(n), request, draws=draws, splits=2, holdout=held, seed=0)
        assert largest.numbers <= max(
            n * pixels, n * classes, held * classes * max(draws, thresholds), batch * pixels * 4
        )
        assert largest.numbers < n * draws * classes / 2
    with Largest() as largest:
        evaluate_methods(
            kept(toy(200), draws), toy(200)[1], sigma=SIGMA, epsilon=0.1, methods=("exact",), splits=2, holdout=held
        )
    assert largest.numbers >= 200 * draws * classes  # the measure sees what it must


# -- refused -----------------------------------------------------------------------------------------------------------


def test_bad_requests_are_refused(data: tuple[Tensor, Tensor]) -> None:
    for change, match in (
        ({"draws": 9}, "asked for 9 draws, the file has 8"),
        ({"methods": ("magic",)}, "expected a method among"),
        ({"transforms": ("log",)}, "transforms among none and ptt"),
        ({"alpha": 0.001}, "cannot certify miscoverage"),
    ):
        with pytest.raises(InputError, match=match):
            evaluate_streaming(smoother(), data, Question(**{"epsilon": 0.1, **change}), draws=DRAWS, **OVER)
    request = Question(0.1, methods=("cp",))
    with pytest.raises(InputError, match="pass its dataset"):
        evaluate_streaming(smoother(), DataLoader(TensorDataset(*data)), request, draws=2, **OVER)
    with pytest.raises(InputError, match="whose length is known"):
        evaluate_streaming(smoother(), iter([data]), request, draws=2, **OVER)
    with pytest.raises(InputError, match="labels between 0 and 3"):
        evaluate_streaming(smoother(), (data[0], data[1] + 1), request, draws=2, **OVER)
    with pytest.raises(InputError, match="expected a holdout of 1 to 258"):
        evaluate_streaming(smoother(), data, request, draws=2, splits=2, holdout=259)
