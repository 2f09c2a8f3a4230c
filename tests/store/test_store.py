"""The store: what is read is what the network said, whatever was killed, damaged, full or added in between."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from keepcover.engine.smoother import Smoother
from keepcover.errors import InputError
from keepcover.evaluation import evaluate
from keepcover.noise.stream import Stream, probes
from keepcover.sealing import seal
from keepcover.store import Chunk, LogitStore, StoreKey, data_fingerprint, folder, read_logits
from keepcover.store.grid import Grid
from keepcover.store.logits_file import read_arrays
from tests.toys import network, toy

IMAGES, CLASSES, SIGMA = 23, 3, 0.25
patient = settings(deadline=None, derandomize=True, max_examples=100)


class Pixels(nn.Module):
    """Logits that are pixels, scaled: exact whatever the batch. Counts what it was asked, fixed probes of a key left out."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale))
        self.count = SimpleNamespace(seen=0, stop_after=None)  # no plain attribute, so no part of a key

    @property
    def seen(self) -> int:
        return self.count.seen

    def forward(self, images: Tensor) -> Tensor:
        if not torch.equal(images, PROBES.to(images.dtype)):
            if self.count.stop_after is not None and self.seen >= self.count.stop_after:
                raise KeyboardInterrupt
            self.count.seen += len(images)
        return images.flatten(1)[:, :CLASSES] * self.scale


DATA = (toy(IMAGES)[0], torch.arange(IMAGES) % CLASSES)
PROBES = probes(tuple(DATA[0].shape[1:]))
GRID = {"chunk_images": 5, "chunk_draws": 4}


def expected(draws: range, seed: int = 0, scale: float = 1.0) -> Tensor:
    """What the store must hold, from the definition: x + sigma * noise(position, draw), rounded to float16."""
    noisy = Stream(seed, "test").noisy(DATA[0], torch.arange(IMAGES), draws, SIGMA)
    return (noisy.flatten(2)[..., :CLASSES] * scale).half()


def smoother(model: nn.Module | None = None, **options: Any) -> Smoother:
    return Smoother(model or Pixels(), SIGMA, batch_size=16, progress=False, **options)


def make(root: Path, draws: int | range = 8, seed: int = 0, **grid: Any) -> LogitStore:
    run = smoother()
    store = LogitStore.open(root, StoreKey.of(run, DATA, seed), **(grid or GRID))
    store.fill(run, DATA, draws)
    return store


def content(path: Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones too."""
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a finished store of 8 draws, never changed."""
    root = tmp_path_factory.mktemp("whole")
    make(root)
    return root


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """The folder of a copy that may be changed."""
    shutil.copytree(whole, tmp_path / "copy")
    return next((tmp_path / "copy").iterdir())


# -- the grid ----------------------------------------------------------------------------------------------------------


@patient
@given(
    st.integers(1, 40),
    st.integers(1, 12),
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), min_size=1, max_size=5),
)
def test_chunks_tile_what_was_asked_for(images: int, wide: int, tall: int, asks: list[tuple[int, int]]) -> None:
    """Whatever was asked in whatever order, every (image, draw) asked for is in exactly one chunk, and no other is."""
    grid, there = Grid(images, wide, tall), []
    times, union = torch.zeros(images, 50, dtype=torch.int64), torch.zeros(50, dtype=torch.int64)
    for start, count in asks:
        new = grid.missing(there, range(start, start + count))
        assert all(len(chunk.rows) <= wide and len(chunk.draws) <= tall and grid.fits(chunk) for chunk in new)
        there += new
        assert grid.missing(there, range(start, start + count)) == []
        union[start : start + count] = 1
        for chunk in new:
            times[chunk.rows.start : chunk.rows.stop, chunk.draws.start : chunk.draws.stop] += 1
        assert torch.equal(times, union.expand(images, -1))
        assert grid.common_draws(there) == int(union.cumprod(dim=0).sum())
    assert [Chunk.of_name(chunk.name) for chunk in there] == there


def test_the_first_draws_of_all_images_come_first() -> None:
    """A run that is stopped early has left something useful."""
    chunks = Grid(10, 5, 4).missing([], range(8))
    assert [(chunk.draws.start, chunk.rows.start) for chunk in chunks] == [(0, 0), (0, 5), (4, 0), (4, 5)]


def test_other_files_are_no_chunks() -> None:
    good = Chunk(range(0, 5), range(0, 4)).name
    for name in (f".{good}", f"{good}.tmp", good.replace("00000005", "00000000"), good.upper()):
        assert Chunk.of_name(name) is None, name


# -- what is read is what was computed ---------------------------------------------------------------------------------


def test_a_store_holds_the_networks_logits(whole: Path) -> None:
    store = LogitStore.at(whole)
    assert torch.equal(store.read(), expected(range(8)))
    assert store.read().dtype == torch.float16
    assert torch.equal(store.labels, DATA[1])
    assert (store.draws, store.classes, len(store.entries)) == (8, CLASSES, 10)
    assert store.verify() == {}
    summary = json.loads(json.dumps(store.summary()))
    assert (summary["images"], summary["draws"], summary["classes"], summary["chunks"]) == (IMAGES, 8, CLASSES, 10)
    assert summary["bytes"] == sum(len(value) for name, value in content(whole).items() if name.endswith("safetensors"))
    assert summary["key"] == store.key.to_dict()


@patient
@given(st.lists(st.integers(0, IMAGES - 1), max_size=30), st.integers(0, 7), st.integers(1, 8))
def test_any_rows_and_draws_can_be_read(whole: Path, rows: list[int], start: int, count: int) -> None:
    store, draws = LogitStore.at(whole), range(start, min(start + count, 8))
    want = expected(range(8))[rows][:, draws.start : draws.stop]
    assert torch.equal(store.read(torch.tensor(rows, dtype=torch.int64), draws), want)
    found = store.read(rows, draws, torch.float32) if rows else want.float()
    assert found.dtype == torch.float32
    assert torch.equal(found, want.float())


def test_rows_may_be_slices_and_ranges(whole: Path) -> None:
    store, want = LogitStore.at(whole), expected(range(8))
    for rows in (slice(3, 17, 2), slice(-4, None), slice(0, 0), slice(None)):
        assert torch.equal(store.read(rows), want[rows])
    assert torch.equal(store.read(range(20, 3, -3), 2), want[torch.arange(20, 3, -3), :2])


@pytest.mark.parametrize("kind", ["pair", "arrays", "dataset"])
def test_data_may_come_in_any_form_that_can_be_read_in_any_order(kind: str, whole: Path, tmp_path: Path) -> None:
    forms: dict[str, Any] = {
        "pair": DATA,
        "arrays": (DATA[0].numpy(), DATA[1].numpy()),
        "dataset": TensorDataset(*DATA),
    }
    run = smoother()
    store = LogitStore.open(tmp_path, StoreKey.of(run, forms[kind], 0), **GRID)
    store.fill(run, forms[kind], 8)
    assert content(tmp_path) == content(whole)


def test_without_noise_every_draw_is_the_same(tmp_path: Path) -> None:
    run = Smoother(Pixels(), 0.0, progress=False)
    store = LogitStore.open(tmp_path, StoreKey.of(run, DATA, 0), chunk_draws=2)
    store.fill(run, DATA, 3)
    assert torch.equal(store.read(), DATA[0].flatten(1)[:, None, :CLASSES].expand(-1, 3, -1).half())


def test_logits_beyond_float16_are_refused_not_clamped(tmp_path: Path) -> None:
    run = smoother(Pixels(2e5))
    store = LogitStore.open(tmp_path, StoreKey.of(run, DATA, 0), **GRID)
    with pytest.raises(
        InputError, match=r"a logit of image \d+, draw \d is .*, beyond the 65504 that float16 can hold"
    ):
        store.fill(run, DATA, 4)
    assert store.entries == {}
    for value, fits in ((65504.0, True), (65505.0, False), (-65504.0, True), (float("nan"), False)):
        logits = torch.zeros(5, 4, CLASSES)
        logits[3, 2, 1] = value
        chunk = Chunk(range(5, 10), range(4))
        if fits:
            store.write(chunk, logits, DATA[1][5:10])
            assert float(store.read([8], range(2, 3))[0, 0, 1]) == value
        else:
            with pytest.raises(InputError, match="image 8, draw 2"):
                store.write(chunk, logits, DATA[1][5:10])


def test_a_chunk_is_a_logits_file(whole: Path) -> None:
    """Any program that reads safetensors can read it, and so can `keepcover evaluate`."""
    path = next(whole.rglob("images-00000005-00000010.draws-000004*"))
    logits, labels = read_arrays(path, "logits", "labels")
    assert torch.equal(logits, expected(range(4, 8))[5:10])
    assert torch.equal(labels, DATA[1][5:10])
    assert set(load_file(path)) == {"logits", "labels"}


def test_read_logits_takes_stores_and_files(whole: Path) -> None:
    for logits, labels in (read_logits(whole), read_logits(next(whole.iterdir()))):
        assert torch.equal(logits, expected(range(8)))
        assert torch.equal(labels, DATA[1])
    chunk = min(whole.rglob("*.safetensors"))
    assert torch.equal(read_logits(chunk)[0], expected(range(4))[:5])


def test_evaluation_of_a_store_is_that_of_its_logits(tmp_path: Path) -> None:
    images, labels = toy(120, classes=CLASSES)
    run = Smoother(network(), SIGMA, progress=False)
    store = LogitStore.open(tmp_path, StoreKey.of(run, (images, labels), 3))
    store.fill(run, (images, labels), 8)
    ask = {"sigma": SIGMA, "epsilon": 0.05, "splits": 2, "holdout": 30, "methods": ["exact", "rscp"]}
    logits = run.logits(images, 8, Stream(3, "test")).half()
    assert evaluate(store, **ask) == evaluate(logits, labels, **ask)


# -- appending ---------------------------------------------------------------------------------------------------------


def test_more_draws_extend_a_store_and_cost_only_themselves(tmp_path: Path) -> None:
    store, run = make(tmp_path, 8), smoother()
    before = content(tmp_path)
    done = store.fill(run, DATA, 16)
    assert run.model.seen == IMAGES * 8
    assert (done.computed, done.reused, done.noisy_images, done.damaged) == (10, 10, IMAGES * 8, {})
    after = content(tmp_path)
    assert all(after[name] == value for name, value in before.items() if name.endswith(".safetensors"))
    assert torch.equal(LogitStore.at(tmp_path).read(), expected(range(16)))


def test_a_store_that_grew_is_the_store_made_at_once(tmp_path: Path) -> None:
    make(tmp_path / "once", 16)
    for draws in (4, 8, 16):
        make(tmp_path / "grown", draws)
    assert content(tmp_path / "grown") == content(tmp_path / "once")


def test_draws_off_the_grid_are_extended_too(tmp_path: Path) -> None:
    """6 draws, then 7, then a range, then 12: nothing is computed twice and every number is right."""
    seen = []
    for draws in (6, 7, range(9, 11), 12):
        run = smoother()
        LogitStore.open(tmp_path, StoreKey.of(run, DATA, 0), **GRID).fill(run, DATA, draws)
        seen.append(run.model.seen // IMAGES)
    assert seen == [6, 1, 2, 3]
    store = LogitStore.at(tmp_path)
    assert torch.equal(store.read(), expected(range(12)))
    assert torch.equal(store.read(draws=range(5, 11)), expected(range(5, 11)))


def test_a_finished_store_costs_no_pass_and_is_not_touched(copy: Path) -> None:
    before, times = content(copy), {path: path.stat().st_mtime_ns for path in copy.iterdir()}
    run = smoother()
    done = LogitStore.at(copy).fill(run, DATA, 8)
    assert (done.computed, run.model.seen) == (0, 0)
    assert content(copy) == before
    assert {path: path.stat().st_mtime_ns for path in copy.iterdir()} == times


# -- interruption ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("passes", [0, 3, 20, 47, 100, 171])
def test_an_interrupted_store_is_usable_and_ends_as_if_it_had_not_been(
    passes: int, whole: Path, tmp_path: Path
) -> None:
    model = Pixels()
    model.count.stop_after = passes
    run = smoother(model)
    store = LogitStore.open(tmp_path, StoreKey.of(run, DATA, 0), **GRID)
    with pytest.raises(KeyboardInterrupt):
        store.fill(run, DATA, 8)
    later = LogitStore.open(tmp_path, store.key, **GRID)
    assert later.verify() == {}
    done = len(later.entries)
    if later.draws:
        assert torch.equal(later.read(), expected(range(8))[:, : later.draws])
    else:
        with pytest.raises(InputError, match="fill the store further"):
            later.read()
    model.count.stop_after = None
    assert store.fill(run, DATA, 8).computed == 10 - done
    assert content(tmp_path) == content(whole)


def test_leftovers_of_killed_writers_are_swept_up(copy: Path, whole: Path) -> None:
    """What is a day old has no writer; what is younger may have one, and files of other names are not the store's."""
    names = [Chunk(range(0, 5), range(0, 4)).name, Chunk(range(0, 5), range(8, 12)).name]
    stale, fresh = ([copy / f".{name}.{mark}.tmp" for name in names] for mark in ("0123456789abcdef", "f" * 16))
    alien = copy / ".notes.txt.0123456789abcdef.tmp"
    for path in (*stale, *fresh, alien):
        path.write_bytes(b"half")
    for path in (*stale, alien):
        os.utime(path, (time.time() - 90_000,) * 2)
    LogitStore.at(copy).fill(smoother(), DATA, 8)
    assert [path for path in stale if path.exists()] == []
    for path in (*fresh, alien):
        assert path.read_bytes() == b"half"
        path.unlink()
    assert content(copy.parent) == content(whole)


# -- damage ------------------------------------------------------------------------------------------------------------


def flips(size: int, generator: random.Random) -> Iterator[tuple[int, int]]:
    """Every byte once, each changed in a random way; then bits."""
    for at in range(size):
        yield at, generator.randrange(1, 256)
    for _ in range(50):
        yield generator.randrange(size), 1 << generator.randrange(8)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """The folder of a store of four draws in two files."""
    return make(tmp_path / "small", 4, chunk_images=IMAGES, chunk_draws=2).folder


def test_no_byte_of_a_chunk_can_change_unnoticed(small: Path) -> None:
    path = small / Chunk(range(IMAGES), range(2, 4)).name
    honest = path.read_bytes()
    for at, change in flips(len(honest), random.Random(0)):
        path.write_bytes(honest[:at] + bytes([honest[at] ^ change]) + honest[at + 1 :])
        store = LogitStore.at(small)
        with pytest.raises(InputError, match=f"{path.name} is damaged: .*keepcover smooth"):
            store.read()
        if at % 40 == 0:
            assert list(store.verify()) == [path.name], at
            assert torch.equal(store.read(draws=2), expected(range(2)))  # the rest is as it was


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda honest: b"",
    "half": lambda honest: honest[: len(honest) // 2],
    "a byte short": lambda honest: honest[:-1],
    "a byte more": lambda honest: honest + b"\x00",
    "zeros": lambda honest: bytes(len(honest)),
    "not a chunk": lambda honest: b"PK\x03\x04 something else altogether",
    "a forged checksum": lambda honest: honest.replace(b"checksum", b"checksun"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_chunks_are_named_and_computed_again(damage: str, copy: Path, whole: Path) -> None:
    paths = [copy / Chunk(range(0, 5), range(0, 4)).name, copy / Chunk(range(20, 23), range(4, 8)).name]
    for path in paths:
        path.write_bytes(DAMAGES[damage](path.read_bytes()))
    run = smoother()
    store = LogitStore.at(copy)
    assert sorted(store.verify()) == sorted(path.name for path in paths)
    done = store.fill(run, DATA, 8)
    assert sorted(done.damaged) == sorted(path.name for path in paths)
    assert (done.computed, done.reused, run.model.seen) == (2, 8, 8 * 4)
    assert content(copy.parent) == content(whole)


def test_an_intact_chunk_in_the_wrong_place_is_damage(copy: Path, whole: Path, tmp_path: Path) -> None:
    """Sealed and genuine, but of other images, of another seed, or of another grid."""
    a, b = (copy / Chunk(range(5, 10), range(start, start + 4)).name for start in (0, 4))
    other = make(tmp_path / "seed", seed=1).folder / a.name
    grid = make(tmp_path / "grid", chunk_images=5, chunk_draws=8).folder
    wide = grid / Chunk(range(5, 10), range(0, 8)).name
    for source, target, reason in (
        (a, b, "not its place"),
        (other, a, "another store"),
        (wide, copy / wide.name, "another store"),
    ):
        shutil.copy(source, target)
        store = LogitStore.at(copy)
        assert list(store.verify()) == [target.name]
        assert reason in store.verify()[target.name]
        assert target.name in store.fill(smoother(), DATA, 8).damaged or target == copy / wide.name
        assert torch.equal(LogitStore.at(copy).read(), expected(range(8)))
    (copy / wide.name).unlink()
    assert content(copy.parent) == content(whole)


def test_files_of_two_grids_in_one_folder_end_as_one_store(whole: Path, tmp_path: Path) -> None:
    """As two processes leave them that began at once and were told different sizes: the first file decides."""
    mixed = make(tmp_path, 8, chunk_images=10, chunk_draws=4).folder
    for path in sorted(next(whole.iterdir()).iterdir())[:4]:
        shutil.copy(path, mixed / path.name)
    store = LogitStore.at(tmp_path)
    assert store.grid == Grid(IMAGES, 5, 4)
    assert store.fill(smoother(), DATA, 8).reused == 4
    assert set(store.verify().values()) <= {"it belongs to another store"}
    assert torch.equal(LogitStore.at(tmp_path).read(), expected(range(8)))
    assert content(tmp_path).items() >= content(whole).items()


def test_damage_off_the_grid_is_replaced(tmp_path: Path) -> None:
    """A file of 6 draws is damaged, then 12 are asked for: other files take its place and it goes."""
    store = make(tmp_path, 6)
    bad = store.folder / Chunk(range(0, 5), range(4, 6)).name
    bad.write_bytes(b"")
    done = store.fill(smoother(), DATA, 12)
    assert list(done.damaged) == [bad.name]
    assert not bad.exists()
    later = LogitStore.at(tmp_path)
    assert later.verify() == {}
    assert torch.equal(later.read(), expected(range(12)))


def test_a_damaged_chunk_is_not_passed_over_in_silence(copy: Path) -> None:
    """Fewer draws would be left for all images, and nobody would know."""
    path = copy / Chunk(range(0, 5), range(4, 8)).name
    path.write_bytes(b"")
    store = LogitStore.at(copy)
    assert store.draws == 4
    with pytest.raises(InputError, match=f"{path.name} is damaged"):
        store.read()
    path.unlink()  # nothing is damaged now, only not yet computed
    assert torch.equal(LogitStore.at(copy).read(), expected(range(4)))


def test_damage_outside_what_is_asked_for_is_left_for_later(copy: Path) -> None:
    bad = copy / Chunk(range(0, 5), range(4, 8)).name
    bad.write_bytes(b"")
    store = LogitStore.at(copy)
    done = store.fill(smoother(), DATA, 4)
    assert (done.computed, done.damaged) == (0, {})
    assert list(store.verify()) == [bad.name]
    assert torch.equal(store.read(draws=4), expected(range(4)))


def test_a_chunk_that_changes_after_it_was_checked_is_checked_again(copy: Path) -> None:
    store, path = LogitStore.at(copy), copy / Chunk(range(0, 5), range(0, 4)).name
    store.read()
    honest = path.read_bytes()
    path.write_bytes(honest[:-1] + bytes([honest[-1] ^ 1]))
    os.utime(path, ns=(1, 1))
    with pytest.raises(InputError, match="does not match its checksum"):
        store.read()
    path.unlink()
    with pytest.raises(InputError, match=path.name):
        store.read(draws=4)


# -- a full disk -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [errno.ENOSPC, errno.EDQUOT, errno.EACCES])
@pytest.mark.parametrize("after", [1, 2, 5])
def test_a_full_disk_is_said_and_leaves_a_usable_store(
    kind: int, after: int, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After so many chunks half of the bytes fit and then none do."""
    honest, calls = Path.write_bytes, 0

    def limited(self: Path, data: bytes) -> int:
        nonlocal calls
        calls += 1
        if calls > after:
            honest(self, data[: len(data) // 2])
            raise OSError(kind, os.strerror(kind))
        return honest(self, data)

    run = smoother()
    store = LogitStore.open(tmp_path, StoreKey.of(run, DATA, 0), **GRID)
    monkeypatch.setattr(Path, "write_bytes", limited)
    with pytest.raises(InputError, match=rf"cannot write .*images-.*{os.strerror(kind)}.*intact.*run the same"):
        store.fill(run, DATA, 8)
    monkeypatch.undo()
    later = LogitStore.at(tmp_path)
    assert later.verify() == {}
    assert len(later.entries) == after
    assert not list(tmp_path.rglob("*.tmp"))
    for chunk in later.entries:
        rows = slice(chunk.rows.start, chunk.rows.stop)
        assert torch.equal(later.read(rows, chunk.draws), expected(chunk.draws)[rows])
    later.fill(run, DATA, 8)
    assert content(tmp_path) == content(whole)


def test_a_store_that_cannot_fit_is_refused_at_the_first_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Pixels()
    run = smoother(model)
    store = LogitStore.open(tmp_path, StoreKey.of(run, DATA, 0), **GRID)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(folder.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(InputError, match=r"needs \d+\.\d kB and .* has 1\.0 kB left; .*without storing"):
        store.fill(run, DATA, 8)
    assert model.seen in (10 * 4, 8 * 4)  # the first chunk, and the one computed while it was written
    monkeypatch.undo()
    assert store.fill(run, DATA, 8).computed == 9


def refuse(kind: int) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise OSError(kind, os.strerror(kind))

    return call


def test_a_place_that_takes_no_files_is_said_before_any_work(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    next(copy.glob("images-*")).unlink()
    model = Pixels()
    store = LogitStore.at(copy)
    for name in ("write_bytes", "touch"):
        monkeypatch.setattr(Path, name, refuse(errno.EROFS))
    with pytest.raises(InputError, match=r"cannot write .*Read-only file system") as caught:
        store.fill(smoother(model), DATA, 8)
    assert model.seen == 0
    assert "\n" not in str(caught.value)


def test_a_finished_store_is_read_where_nothing_can_be_written(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("write_bytes", "touch", "unlink"):
        monkeypatch.setattr(Path, name, refuse(errno.EROFS))
    store = LogitStore.at(copy)
    assert store.fill(smoother(), DATA, 8).computed == 0
    assert torch.equal(store.read(), expected(range(8)))


def test_what_cannot_be_deleted_or_listed_is_said_in_one_line(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = LogitStore.at(copy).key
    with monkeypatch.context() as limited:
        limited.setattr(Path, "unlink", refuse(errno.EROFS))
        with pytest.raises(InputError, match=r"cannot delete .*Read-only file system"):
            LogitStore.open(copy.parent, key, restart=True)
    with monkeypatch.context() as limited:
        limited.setattr(Path, "iterdir", refuse(errno.EACCES))
        for look in (lambda: LogitStore.at(copy), lambda: LogitStore.at(copy.parent)):
            with pytest.raises(InputError, match=r"cannot list .*Permission denied"):
                look()
        with pytest.raises(InputError, match=r"cannot list .*Permission denied"):
            LogitStore.open(copy.parent, key).fill(smoother(), DATA, 8)


def test_damage_that_cannot_be_deleted_is_said_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make(tmp_path, 6)
    bad = store.folder / Chunk(range(0, 5), range(4, 6)).name
    bad.write_bytes(b"")
    honest = Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda self, **o: refuse(errno.EPERM)() if self == bad else honest(self, **o))
    with pytest.raises(InputError, match=r"cannot delete .*Operation not permitted"):
        store.fill(run := smoother(), DATA, 12)
    assert run.model.seen == 0
    monkeypatch.undo()
    assert LogitStore.at(tmp_path).draws == 4


@pytest.mark.parametrize("text", ["[1]", "[" * 100_000, "nonsense", '"a"', '{"format": 1, "rows": 3}'])
def test_sealed_nonsense_is_damage(text: str, copy: Path, whole: Path) -> None:
    """A checksum that is right does not make sense of what it seals."""
    chunk = next(copy.glob("images-*"))
    header = json.dumps({"__metadata__": {"keepcover": text, "other": '"checksum": "' + "0" * 64 + '"'}}).encode()
    chunk.write_bytes(seal(len(header).to_bytes(8, "little") + header))
    store = LogitStore.at(copy)
    assert list(store.verify()) == [chunk.name]
    store.fill(smoother(), DATA, 8)
    assert content(copy.parent) == content(whole)


# -- many writers ------------------------------------------------------------------------------------------------------


def test_a_writer_that_finishes_leaves_what_others_are_writing(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the bytes of a temporary file and its name, another process finishes."""
    honest = Path.write_bytes
    run = smoother()
    key = StoreKey.of(run, DATA, 0)
    store, other = (LogitStore.open(tmp_path, key, **GRID) for _ in range(2))
    written: list[str] = []

    def meanwhile(self: Path, data: bytes) -> int:
        size = honest(self, data)
        with monkeypatch.context() as quiet:
            quiet.setattr(Path, "write_bytes", honest)
            other.sweep()
        written.append(self.name)
        return size

    monkeypatch.setattr(Path, "write_bytes", meanwhile)
    store.fill(run, DATA, 8)
    assert len(written) == 10
    monkeypatch.undo()
    assert content(tmp_path) == content(whole)


def test_workers_on_one_store_need_no_lock(whole: Path, tmp_path: Path) -> None:
    """Five fill it at once, each with its own eyes; the folder ends as one of them alone would have left it."""
    failures: list[BaseException] = []
    barrier = threading.Barrier(5)

    def work() -> None:
        try:
            run = smoother()
            store = LogitStore.open(tmp_path, StoreKey.of(run, DATA, 0), **GRID)
            barrier.wait()
            store.fill(run, DATA, 8)
        except BaseException as failure:
            failures.append(failure)

    for _ in range(3):
        threads = [threading.Thread(target=work) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert content(tmp_path) == content(whole)
        shutil.rmtree(next(tmp_path.iterdir()))


def test_work_can_be_dealt_out(whole: Path, tmp_path: Path) -> None:
    """What a cluster does: one lists the work, many write chunks and only chunks, one sums up."""
    run = smoother()
    store = LogitStore.open(tmp_path, StoreKey.of(run, DATA, 0), **GRID)
    for chunk in reversed(store.missing(8)):
        rows = torch.arange(chunk.rows.start, chunk.rows.stop)
        worker = LogitStore.open(tmp_path, StoreKey.from_dict(json.loads(json.dumps(store.key.to_dict()))), **GRID)
        size = worker.write(chunk, run.logits(DATA[0][rows], chunk.draws, worker.key.stream, rows), DATA[1][rows])
        assert (store.folder / chunk.name).stat().st_size == size
    store.refresh()
    assert store.missing(8) == []
    assert content(tmp_path) == content(whole)


def test_what_another_worker_has_stored_meanwhile_is_not_computed(whole: Path, tmp_path: Path) -> None:
    run, model = smoother(), Pixels()
    key = StoreKey.of(run, DATA, 0)
    store = LogitStore.open(tmp_path, key, **GRID)

    def another_worker(*_: Any) -> None:
        if model.seen:  # while this one computes its first chunk, another finishes the rest
            for path in next(whole.iterdir()).glob("*draws-000004*"):
                shutil.copy(path, tmp_path / key.folder / path.name)
            hook.remove()

    hook = model.register_forward_hook(another_worker)
    done = store.fill(smoother(model), DATA, 8)
    assert (done.computed, model.seen) == (5, IMAGES * 4)
    assert content(tmp_path) == content(whole)


def test_a_chunk_that_is_no_block_is_refused(whole: Path) -> None:
    store = LogitStore.at(whole)
    for rows in (range(0, 4), range(1, 6), range(20, 25), range(25, 30)):
        with pytest.raises(InputError, match=r"take chunks from missing\(\)"):
            store.write(Chunk(rows, range(4)), torch.zeros(len(rows), 4, CLASSES), torch.zeros(len(rows)).long())
    with pytest.raises(InputError, match=r"expected logits \[5, 4, classes\]"):
        store.write(Chunk(range(5), range(4)), torch.zeros(5, 3, CLASSES), torch.zeros(5).long())
    with pytest.raises(InputError, match="labels between 0 and 2"):
        store.write(Chunk(range(5), range(4)), torch.zeros(5, 4, CLASSES), torch.full((5,), 7))


# -- keys --------------------------------------------------------------------------------------------------------------


def test_every_part_of_a_key_makes_another_store() -> None:
    key = StoreKey.of(smoother(), DATA, 0)
    others = [
        replace(key, **{field.name: value})
        for field in fields(key)
        for value in [
            {str: "other", int: 7, tuple: (1, 2), bool: True, type(None): "float16"}[type(getattr(key, field.name))]
        ]
    ]
    assert len({key.folder, *(other.folder for other in others)}) == len(fields(StoreKey)) + 1
    assert StoreKey.from_dict(json.loads(json.dumps(key.to_dict()))) == key


def test_keys_follow_from_what_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)  # only whether it was asked for matters here
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3), nn.ReLU())
    run = Smoother(model, SIGMA)
    key = StoreKey.of(run, DATA, 0)
    assert key == StoreKey.of(Smoother(model, SIGMA, batch_size=3), TensorDataset(*DATA), 0)
    gelu = nn.Sequential(model[0], model[1], nn.GELU())  # the same state dict
    pixels = (DATA[0].clone(), DATA[1])
    pixels[0][5, 0, 1, 1] += 1e-3
    labels = (DATA[0], DATA[1].roll(1))
    changed = [
        StoreKey.of(Smoother(gelu, SIGMA), DATA, 0),
        StoreKey.of(Smoother(model, 0.5), DATA, 0),
        StoreKey.of(Smoother(model, SIGMA, autocast=torch.bfloat16), DATA, 0),
        StoreKey.of(Smoother(model, SIGMA, channels_last=True), DATA, 0),
        StoreKey.of(Smoother(model, SIGMA, compile=True), DATA, 0),
        StoreKey.of(Smoother(model, SIGMA, device="meta"), DATA, 0),
        StoreKey.of(run, DATA, 1),
        StoreKey.of(run, pixels, 0),
        StoreKey.of(run, labels, 0),
        StoreKey.of(run, (DATA[0][:-1], DATA[1][:-1]), 0),
    ]
    with torch.no_grad():
        model[1].weight[0, 0] += 1e-3
    changed.append(StoreKey.of(run, DATA, 0))
    assert len({key.folder, *(other.folder for other in changed)}) == len(changed) + 1


def test_a_changed_attribute_makes_another_store_and_a_counter_does_not(tmp_path: Path) -> None:
    """What a module computes depends on plain attributes, as well as on weights; a cache and a counter follow from its use."""

    class Scaled(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(16, CLASSES), scale
            self.register_buffer("table", torch.linspace(0, scale, 7).cos(), persistent=False)
            self.calls, self.last = 0, 0

        def forward(self, images: Tensor) -> Tensor:
            self.calls, self.last = self.calls + 1, len(images)
            return self.scale * self.layer(images.flatten(1))

    model = Scaled(1.0)
    run = smoother(model)
    key = StoreKey.of(run, DATA, 0)
    store = LogitStore.open(tmp_path, key, **GRID)
    store.fill(run, DATA, 8)
    assert StoreKey.of(run, DATA, 0) == key
    assert store.fill(run, DATA, 8).computed == 0
    same = Scaled(1.0)
    same.load_state_dict(model.state_dict())
    assert StoreKey.of(smoother(same), DATA, 0) == key
    for name, value in (("scale", 2.0), ("table", same.table + 0.01)):
        other = Scaled(1.0)
        other.load_state_dict(model.state_dict())
        setattr(other, name, value)
        assert StoreKey.of(smoother(other), DATA, 0).folder != key.folder
        with pytest.raises(InputError, match="for structure Scaled-"):
            store.fill(smoother(other), DATA, 8)


def test_targets_are_fingerprinted_to_their_last_digit() -> None:
    inputs, targets = torch.rand(4, 3), torch.rand(4)
    assert data_fingerprint((inputs, targets)) != data_fingerprint((inputs, targets + 1e-4))


def test_data_are_the_same_however_they_are_batched_but_not_in_another_order() -> None:
    images, labels = DATA
    whole = data_fingerprint(DATA)
    assert whole == data_fingerprint(DataLoader(TensorDataset(images, labels), batch_size=7))
    assert whole == data_fingerprint((images.numpy(), labels.int().numpy()))
    assert whole != data_fingerprint(
        (images.double(), labels)
    )  # noise is added in float64 there: other logits, by a bit
    assert whole != data_fingerprint((images.flip(0), labels.flip(0)))
    with pytest.raises(InputError, match="images of one shape"):
        data_fingerprint([(images[:2], labels[:2]), (images[2:, :, :2], labels[2:])])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"model": Pixels(2.0)}, "for model"),
        ({"model": nn.Sequential(Pixels())}, "for model"),
        ({"noise": 0.5}, "for noise gaussian:0.25, not gaussian:0.5"),
        ({"autocast": torch.bfloat16}, "for autocast None, not bfloat16"),
        ({"channels_last": True}, "for channels_last"),
        ({"data": (DATA[0] + 0.01, DATA[1])}, "for data"),
        ({"data": (DATA[0], DATA[1].roll(1))}, "for data"),
        ({"data": TensorDataset(DATA[0][:5], DATA[1][:5])}, "for images 23, not 5"),
    ],
)
def test_a_store_is_never_filled_with_something_else(change: dict[str, Any], match: str, whole: Path) -> None:
    options = {"model": Pixels(), "noise": SIGMA, "data": DATA, **change}
    data = options.pop("data")
    with pytest.raises(InputError, match=match):
        LogitStore.at(whole).fill(Smoother(**options, progress=False), data, 8)


def test_callables_and_lazy_data_need_a_name(tmp_path: Path) -> None:
    model = Pixels()
    plain, dataset = Smoother(lambda images: model(images), SIGMA, progress=False), TensorDataset(*DATA)
    with pytest.raises(InputError, match="give model_fingerprint="):
        StoreKey.of(plain, DATA, 0)
    with pytest.raises(InputError, match="leave model_fingerprint out"):
        StoreKey.of(smoother(), DATA, 0, model_fingerprint="mine")
    with pytest.raises(InputError, match="leave images_fingerprint out"):
        StoreKey.of(smoother(), DATA, 0, images_fingerprint="mine")
    for nothing in ((DATA[0][:0], DATA[1][:0]), iter([DATA])):
        with pytest.raises(InputError, match="whose number is known"):
            StoreKey.of(smoother(), nothing, 0)
    key = StoreKey.of(plain, dataset, 0, model_fingerprint="mine", images_fingerprint="theirs")
    assert (key.model, key.structure, key.data) == ("mine", "callable", "theirs")
    store = LogitStore.open(tmp_path, key)
    store.fill(plain, dataset, 2)
    assert torch.equal(store.read(), expected(range(2)))
    with pytest.raises(InputError, match="pass its dataset"):
        store.fill(plain, DataLoader(dataset), 4)


# -- opening -----------------------------------------------------------------------------------------------------------


def test_one_root_holds_many_stores(tmp_path: Path) -> None:
    for seed in (0, 1):
        make(tmp_path, 2, seed=seed)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert [name.rsplit("-", 1)[0] for name in names] == ["Pixels-gaussian0.25-seed0", "Pixels-gaussian0.25-seed1"]
    with pytest.raises(InputError, match=f"several stores, name one of {names[0]}, {names[1]}"):
        LogitStore.at(tmp_path)
    for seed, name in enumerate(names):
        store = LogitStore.at(tmp_path / name)
        assert store.key.seed == seed
        assert torch.equal(store.read(), expected(range(2), seed))


def test_what_is_no_store_is_refused(tmp_path: Path, whole: Path) -> None:
    with pytest.raises(InputError, match="no folder at"):
        LogitStore.at(tmp_path / "nowhere")
    with pytest.raises(InputError, match="holds no store"):
        LogitStore.at(tmp_path)
    (tmp_path / Chunk(range(5), range(4)).name).write_bytes(b"nothing")
    with pytest.raises(InputError, match="has no intact chunk"):
        LogitStore.at(tmp_path)
    key = LogitStore.at(whole).key
    shutil.copytree(next(whole.iterdir()), tmp_path / "root" / replace(key, seed=5).folder)
    with pytest.raises(InputError, match="the store of another key"):
        LogitStore.open(tmp_path / "root", replace(key, seed=5))


def test_the_grid_is_the_stores_until_it_is_restarted(copy: Path) -> None:
    key, root = LogitStore.at(copy).key, copy.parent
    (copy / "notes.txt").write_text("mine")
    half = copy / f".{Chunk(range(5), range(4)).name}.0123456789abcdef.tmp"  # another process may be writing it
    half.write_bytes(b"half")
    for change in ({"chunk_images": 7}, {"chunk_draws": 3}):
        with pytest.raises(InputError, match="the store was made with"):
            LogitStore.open(root, key, **change)
        with pytest.raises(InputError, match="of at least 1, got 0"):
            LogitStore.open(root, key, **dict.fromkeys(change, 0))
    assert LogitStore.open(root, key).grid == LogitStore.open(root, key, **GRID).grid == Grid(IMAGES, 5, 4)
    again = LogitStore.open(root, key, chunk_images=23, chunk_draws=3, restart=True)
    assert sorted(path.name for path in copy.iterdir()) == [half.name, "notes.txt"]
    assert again.fill(smoother(), DATA, 8).computed == 3
    assert torch.equal(again.read(), expected(range(8)))


@pytest.mark.parametrize(("device", "wide"), [("cuda", 256), ("cpu", 32), ("mps", 256)])
def test_chunks_are_of_moderate_size_unless_asked_otherwise(device: str, wide: int, tmp_path: Path) -> None:
    """One forward pass of a GPU, about a minute of a deep network on a CPU: what a kill can cost."""
    key = replace(StoreKey.of(smoother(), DATA, 0), device=device)
    assert LogitStore.open(tmp_path, key).grid == Grid(IMAGES, wide, 64)
    assert LogitStore.open(tmp_path, key, draws=16).grid == Grid(IMAGES, 4 * wide, 64)
    assert LogitStore.open(tmp_path, key, draws=1024).grid == Grid(IMAGES, wide, 64)
    assert LogitStore.open(tmp_path, key, chunk_images=9, draws=16).grid == Grid(IMAGES, 9, 64)


def test_what_is_not_there_cannot_be_read(whole: Path, tmp_path: Path) -> None:
    store = LogitStore.at(whole)
    with pytest.raises(InputError, match="has no images 0 to 4, draws 8 to 8; every image has 8 draws"):
        store.read(draws=9)
    with pytest.raises(InputError, match="at least 1 draw"):
        store.read(draws=0)
    with pytest.raises(InputError, match="of step 1"):
        store.read(draws=range(0, 8, 2))
    for rows in ([23], [-1]):
        with pytest.raises(InputError, match="rows between 0 and 22"):
            store.read(rows)
    for rows in (torch.zeros(2, 2).long(), torch.ones(IMAGES, dtype=torch.bool), torch.tensor([0.5])):
        with pytest.raises(InputError, match="integers in one dimension"):
            store.read(rows)
    empty = LogitStore.open(tmp_path, store.key)
    assert (empty.draws, empty.classes, empty.verify()) == (0, None, {})
    for act in (lambda: empty.read(), lambda: empty.labels, lambda: empty.read(draws=1)):
        with pytest.raises(InputError, match="fill the store further"):
            act()


def test_chunks_that_overlap_are_read_the_same_way_every_time(copy: Path) -> None:
    """Two workers asked for different draws at once: the longer file wins."""
    store = LogitStore.at(copy)
    store.write(Chunk(range(0, 5), range(0, 6)), torch.ones(5, 6, CLASSES), DATA[1][:5])
    want = expected(range(8))
    want[:5, :6] = 1
    assert torch.equal(LogitStore.at(copy).read(), want)


# -- needs -------------------------------------------------------------------------------------------------------------


def test_a_store_needs_neither_typer_nor_rich() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('typer', 'rich', 'sklearn', 'jinja2', 'matplotlib')));"
        "import tempfile, torch; from keepcover.engine.smoother import Smoother; from keepcover.store import LogitStore, StoreKey;"
        "run = Smoother(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3)), 0.5);"
        "data = (torch.rand(6, 1, 2, 2), torch.zeros(6).long()); root = tempfile.mkdtemp();"
        "store = LogitStore.open(root, StoreKey.of(run, data, 0)); store.fill(run, data, 2); print(tuple(store.read().shape))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "(6, 2, 3)\n"), done.stderr
