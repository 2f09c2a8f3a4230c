"""The cluster engine without a cluster: options, refusals, and its bookkeeping on a make-believe Ray."""

from __future__ import annotations

import contextlib
import random
import re
import socket
import sys
import threading
from collections import Counter, deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from keepcover.errors import InputError, KeepcoverWarning
from keepcover.store import Chunk, LogitStore, StoreKey
from keepcover.store.cluster import Cluster
from keepcover.store.cluster import ray as engine
from keepcover.store.cluster.ray import Pool, Recipe, Worker
from keepcover.store.folder import Filling, scattered
from tests.cli.runner import arguments, place, refused
from tests.store.test_store import DATA, GRID, IMAGES, Pixels, content, make, patient, smoother

__all__ = ["place"]  # a fixture

CHUNKS = 10  # of a store of eight draws


# -- a Ray of which every turn is decided here -------------------------------------------------------------------------


class RayError(Exception):
    """As in ray.exceptions."""


class RayTaskError(RayError):
    """As in ray.exceptions: what was raised over there is its cause."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(f"worker said: {cause}")
        self.cause = cause


class Ray:
    """Actors that take turns in this process. ``fate`` says what happens at each turn: True, and the actor dies there."""

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self, fate: Any, order: random.Random) -> None:
        self.fate, self.order = fate, order
        self.actors: list[Actor] = []
        self.answers: dict[Any, Any] = {}
        self.most = 0

    def remote(self, kind: type) -> Any:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *args: self._start(kind(*args))))

    def _start(self, inner: Any) -> Actor:
        self.actors.append(Actor(self, inner))
        return self.actors[-1]

    def put(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            value = value.copy()
            value.flags.writeable = False  # as in Ray's shared memory
        return value

    def wait(self, refs: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        assert refs
        assert num_returns == 1
        self.most = max(self.most, sum(ref[0] == "compute" for ref in refs))
        while not any(ref in self.answers for ref in refs):
            self.order.choice([actor for actor in self.actors if actor.queue]).turn()
        done = [self.order.choice([ref for ref in refs if ref in self.answers])]
        return done, [ref for ref in refs if ref not in done]

    def get(self, ref: Any) -> Any:
        answer = self.answers.pop(ref)
        if isinstance(answer, Exception):
            raise answer
        return self.put(answer)

    def kill(self, actor: Actor, no_restart: bool) -> None:
        assert no_restart
        actor.die()


class Actor:
    """One worker: its tasks in order, one answer a turn."""

    def __init__(self, ray: Ray, inner: Any) -> None:
        self.ray, self.inner, self.alive = ray, inner, True
        self.queue: deque[tuple[Any, tuple[Any, ...]]] = deque()

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> Any:
            ref = (name, object())
            if self.alive:
                self.queue.append((ref, arguments))
            else:
                self.ray.answers[ref] = RayError("the actor is dead")
            return ref

        return SimpleNamespace(remote=remote)

    def turn(self) -> None:
        ref, arguments = self.queue[0]
        if self.ray.fate(ref[0], arguments):
            self.die()
            return
        try:
            self.ray.answers[ref] = getattr(self.inner, ref[0])(*arguments)
        except Exception as error:
            self.ray.answers[ref] = RayTaskError(error)
        self.queue.popleft()

    def die(self) -> None:
        self.alive = False
        for ref, _ in self.queue:
            self.ray.answers[ref] = RayError("the actor is dead")
        self.queue.clear()


def run_pool(
    root: Path, ray: Any, cluster: Cluster, count: int = 2, model: Any = None, data: Any = DATA, **recipe: str
) -> tuple[Pool, Filling]:
    """What :func:`keepcover.store.cluster.ray.fill` does once it is connected."""
    run = smoother()
    store = LogitStore.open(root, StoreKey.of(run, DATA, 0), **GRID)
    recipe = Recipe(store.key, run.batch_size, torch.get_num_threads(), **recipe)
    with Filling(store, 8, False) as work:
        pool = Pool(ray, cluster, recipe, lambda: model or Pixels(), count)
        pool.run(work, data)
    return pool, work


def never(*_: Any) -> bool:
    return False


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a store of eight draws that this process made alone."""
    root = tmp_path_factory.mktemp("local")
    make(root)
    return root


@settings(patient, max_examples=40)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**32), st.floats(0, 0.4))
def test_workers_die_at_any_time_and_the_store_is_the_local_engines(
    whole: Path, tmp_path_factory: pytest.TempPathFactory, count: int, ahead: int, seed: int, deadly: float
) -> None:
    """Workers die at random, when preparing or computing, answers come in any order: same files, bounded queue."""
    root, luck, deaths, model = tmp_path_factory.mktemp("fuzz"), random.Random(seed), Counter(), Pixels()

    def fate(name: str, arguments: tuple[Any, ...]) -> bool:
        deaths[name] += (dies := luck.random() < deadly)
        return dies

    ray = Ray(fate, luck)
    pool, work = run_pool(root, ray, Cluster(ahead=ahead, attempts=1000), count, model)
    assert content(root) == content(whole)
    assert model.seen == IMAGES * 8  # here no worker dies halfway, so nothing that was computed is computed again
    assert (work.done.lost_workers, work.done.computed, pool.in_flight) == (deaths.total(), CHUNKS, 0)
    assert deaths["compute"] <= work.done.repeated_chunks <= ahead * deaths["compute"]
    assert ray.most <= work.done.most_in_flight <= ahead * count
    assert not any(actor.alive for actor in ray.actors)


def test_a_chunk_that_ends_its_worker_again_and_again_stops_the_run(whole: Path, tmp_path: Path) -> None:
    """Three times for that chunk, however many others wait behind it; the store is what it was, and goes on."""
    bad, deaths = Chunk(range(10, 15), range(4, 8)), Counter()

    def fate(name: str, given: tuple[Any, ...]) -> bool:
        deaths[name] += (dies := name == "compute" and Chunk(*given[1:]) == bad)
        return dies

    ray = Ray(fate, random.Random(1))
    said = (
        r"images 10 to 14, draws 4 to 7 ended 3 workers, the last with: the actor is dead .*intact \(\d chunks\); run"
    )
    with pytest.raises(InputError, match=said):
        run_pool(tmp_path, ray, Cluster())
    assert deaths["compute"] == 3  # each was counted against it, none against the chunk that waited behind it
    assert not any(actor.alive for actor in ray.actors)
    store = LogitStore.at(tmp_path)
    assert store.verify() == {}
    assert bad in store.missing(8)
    store.fill(smoother(), DATA, 8)
    assert content(tmp_path) == content(whole)


def test_workers_that_never_get_ready_stop_the_run(tmp_path: Path) -> None:
    ray = Ray(lambda name, _: name == "prepare", random.Random(0))
    with pytest.raises(InputError, match="3 workers in a row ended before they were ready"):
        run_pool(tmp_path, ray, Cluster(), count=1)
    assert len(ray.actors) == 3


def test_a_worker_that_is_ready_forgives_those_that_were_not(whole: Path, tmp_path: Path) -> None:
    """Two of three starts fail for ever, never three in a row."""
    starts = Counter()

    def fate(name: str, _: Any) -> bool:
        starts[name] += 1
        return starts[name] % 3 != 0 if name == "prepare" else starts[name] % 2 == 0

    _, work = run_pool(tmp_path, Ray(fate, random.Random(0)), Cluster(attempts=3, ahead=1), count=1)
    assert work.done.lost_workers > 6
    assert content(tmp_path) == content(whole)


def test_an_error_of_the_model_is_raised_not_repeated(tmp_path: Path) -> None:
    """As this process would raise it; a bug in a user's model keeps its traceback from over there."""

    def failing(error: Exception | None) -> Pixels:
        model = Pixels()

        def broken(_: Any, images: Any, logits: Tensor) -> Tensor:
            if model.seen > 60 and error is not None:
                raise error
            return logits * torch.nan if model.seen > 60 else logits

        model.register_forward_hook(broken)
        return model

    for error, kind, said in (
        (RuntimeError("shapes do not fit"), InputError, "the model fails on inputs .*: shapes do not fit"),
        (KeyError("oops"), RayTaskError, "worker said: 'oops'"),
        (None, InputError, "NaN or infinite logits"),
    ):
        ray, own = Ray(never, random.Random(0)), tmp_path / kind.__name__ / type(error).__name__
        with pytest.raises(kind, match=said):
            run_pool(own, ray, Cluster(), model=failing(error))
        assert len(ray.actors) == 2
        assert LogitStore.at(own).verify() == {}


def test_a_worker_with_another_model_is_refused(tmp_path: Path) -> None:
    for other in (Pixels(2.0), nn.Sequential(Pixels())):
        with pytest.raises(InputError, match=r"a worker on .* has another model: this store is for model"):
            run_pool(tmp_path, Ray(never, random.Random(0)), Cluster(), model=other)
    assert not list(tmp_path.rglob("images-*"))


def test_a_worker_with_other_versions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"has keepcover .* with torch .* and the driver keepcover 0\.0\.1 with torch 1\.0"
    ):
        run_pool(tmp_path, Ray(never, random.Random(0)), Cluster(), versions="keepcover 0.0.1 with torch 1.0")


def test_patience_ends_where_no_worker_can_start(tmp_path: Path) -> None:
    class Full(Ray):
        def wait(self, refs: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
            return [], refs

        def cluster_resources(self) -> dict[str, float]:
            return {"CPU": 0.5}

    said = (
        r"no worker could start for 0.01 s: each needs 1 CPU on one node, and the cluster has 0.5 CPU and 0 GPU in all"
    )
    with pytest.raises(InputError, match=said):
        run_pool(tmp_path, Full(never, random.Random(0)), Cluster(patience=0.01))


def test_data_are_read_as_they_are_needed(tmp_path: Path) -> None:
    """A dataset on disk is never ahead of the store by more than what is in flight."""
    store = LogitStore.open(tmp_path, StoreKey.of(smoother(), DATA, 0), **GRID)
    ahead: list[int] = []

    class Lazy(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return IMAGES

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            reads.append(index)
            ahead.append(len(reads) - 5 * len(list(store.folder.glob("images-*"))))
            return DATA[0][index], DATA[1][index]

    reads: list[int] = []
    run_pool(tmp_path, Ray(never, random.Random(0)), Cluster(ahead=2), count=2, data=Lazy())
    assert len(reads) == 2 * IMAGES
    assert max(ahead) <= 5 * 4


# -- a worker ----------------------------------------------------------------------------------------------------------


def test_a_worker_gives_what_the_store_would_hold() -> None:
    run = smoother()
    key = StoreKey.of(run, DATA, 0)
    worker = Worker(Recipe(key, 16, 1))
    worker.prepare(Pixels)
    images = DATA[0][5:10].numpy()
    images.flags.writeable = False
    found = worker.compute(images, range(5, 10), range(4, 8))
    assert found.dtype == np.float16
    want = run.logits(DATA[0][5:10], range(4, 8), key.stream, torch.arange(5, 10)).half()
    assert torch.equal(torch.from_numpy(found), want)
    worker = Worker(Recipe(StoreKey.of(smoother(Pixels(1e6)), DATA, 0), 16, 1))
    worker.prepare(lambda: Pixels(1e6))
    with pytest.raises(InputError, match="beyond the 65504 that float16 can hold"):
        worker.compute(images, range(5, 10), range(4, 8))


def test_a_worker_without_the_stores_device_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    key = replace(StoreKey.of(smoother(), DATA, 0), device="cuda")
    with pytest.raises(InputError, match=r"the store is for cuda and a worker on .* has no GPU"):
        Worker(Recipe(key, 16, 1)).prepare(Pixels)


# -- several at once ---------------------------------------------------------------------------------------------------


def test_processes_that_begin_together_share_the_work(tmp_path: Path) -> None:
    """Two in lockstep, pass by pass. In one order they would compute all 46 chunks twice.

    In orders of their own they meet by chance, about 1 / (2 left) of the time: five times in all is usual, 23 times has a
    probability far below 1e-9.
    """
    grid = {"chunk_images": 1, "chunk_draws": 4}
    barrier, models = threading.Barrier(2), [Pixels(), Pixels()]

    def work(model: Pixels) -> None:
        run = smoother(model)
        store = LogitStore.open(tmp_path / "both", StoreKey.of(run, DATA, 0), **grid)

        def together(*_: Any) -> None:
            with contextlib.suppress(threading.BrokenBarrierError):  # the other has finished
                barrier.wait(timeout=10)

        model.register_forward_pre_hook(together)
        store.fill(run, DATA, 8)
        barrier.abort()

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    make(tmp_path / "one", **grid)
    assert content(tmp_path / "both") == content(tmp_path / "one")
    assert IMAGES * 8 <= sum(model.seen for model in models) < 1.5 * IMAGES * 8


def test_an_order_of_ones_own_keeps_the_draws_in_order() -> None:
    chunks = [Chunk(range(k, k + 1), range(d, d + 2)) for d in (0, 2) for k in range(200)]
    own = scattered(chunks)
    assert own != chunks
    assert sorted(own, key=chunks.index) == chunks
    assert [chunk.draws.start for chunk in own] == [0] * 200 + [2] * 200


# -- asking ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workers": 0}, "workers of at least 1, got 0"),
        ({"ahead": 0}, "ahead of at least 1"),
        ({"attempts": -1}, "attempts of at least 1"),
        ({"threads": 0}, "threads of at least 1"),
        ({"cpus": 0.0}, "cpus above 0, got 0"),
        ({"cpus": float("nan")}, "cpus above 0, got nan"),
        ({"patience": -1.0}, "patience above 0"),
        ({"gpus": 1.5}, "a part of a GPU below 1 or a whole number"),
        ({"gpus": -1.0}, "a part of a GPU below 1 or a whole number"),
        ({"gpus": float("inf")}, "a part of a GPU below 1 or a whole number"),
        ({"address": " "}, "expected an address"),
    ],
)
def test_impossible_clusters_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        Cluster(**options)


def test_gpus_follow_from_the_store() -> None:
    assert [Cluster().gpus_for(kind) for kind in ("cpu", "cuda")] == [0.0, 1.0]
    assert Cluster(gpus=0.25).gpus_for("cuda") == 0.25
    with pytest.raises(InputError, match="every worker needs a part of a GPU"):
        Cluster(gpus=0.0).gpus_for("cuda")
    assert [Cluster(cpus=cpus).own_threads for cpus in (0.5, 1.0, 4.0)] == [1, 1, 4]
    assert Cluster(cpus=4.0, threads=1).own_threads == 1


def test_room_is_counted_node_by_node() -> None:
    nodes = [
        {"Alive": True, "Resources": {"CPU": 3.0, "GPU": 2.0}},
        {"Alive": True, "Resources": {"CPU": 1.0}},
        {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}},
        {"Alive": True, "Resources": {"memory": 1.0}},
    ]
    ray = SimpleNamespace(nodes=lambda: nodes)
    for cpus, gpus, fits in ((1, 0, 4), (2, 0, 1), (1, 1, 2), (1, 2, 1), (0.5, 0.4, 4), (1, 0.5, 3), (1, 4, 0)):
        assert engine._room(ray, Cluster(cpus=float(cpus)), float(gpus)) == fits, (cpus, gpus)


def test_without_ray_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    run = smoother()
    store = LogitStore.open(tmp_path, StoreKey.of(run, DATA, 0), **GRID)
    with pytest.raises(InputError, match=r"the cluster engine needs Ray: pip install '.\[ray\]'"):
        engine.fill(store, run, DATA, 8)
    store.fill(run, DATA, 8)
    done = engine.fill(store, run, DATA, 8)  # a finished store needs no cluster
    assert (done.computed, done.reused, done.workers) == (0, CHUNKS, 0)
    for change, said in (({"model": Pixels(2.0)}, "for model"), ({"data": (DATA[0] + 0.01, DATA[1])}, "for data")):
        with pytest.raises(InputError, match=said):
            engine.fill(store, smoother(change.get("model")), change.get("data", DATA), 8)


def test_ray_is_used_as_it_is_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    ray = SimpleNamespace(
        is_initialized=lambda: True, shutdown=lambda: calls.append("shutdown"), init=lambda **_: calls.append("init")
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    with engine.connected(Cluster()) as found:
        assert found == (ray, False)
    assert calls == []
    with pytest.raises(InputError, match="connected to Ray already"), engine.connected(Cluster("auto")):
        pass


def test_where_ray_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    ray = SimpleNamespace(
        is_initialized=lambda: False,
        shutdown=lambda: calls.append("shutdown"),
        init=lambda **options: calls.append(options),
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with engine.connected(Cluster(workers=200)) as (_, alone):
        assert alone
    assert (calls[0]["address"], calls[0]["num_cpus"], calls[1]) == ("local", 200, "shutdown")
    with socket.create_server(("127.0.0.1", 0)) as head:
        there = f"127.0.0.1:{head.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", there)
        for given_address, used in ((None, there), (f"ray://{there}", f"ray://{there}"), ("auto", "auto")):
            with engine.connected(Cluster(given_address)) as (_, alone):
                assert not alone
            assert calls[-2] == {"address": used, "log_to_driver": False, "configure_logging": False}
    before = len(calls)
    for nowhere in (there, f"ray://{there}", "[::1]:1", "127.0.0.1:99999"):
        with (
            pytest.raises(InputError, match=rf"no Ray cluster at {re.escape(nowhere)} \(.*ray start --head"),
            engine.connected(Cluster(nowhere)),
        ):
            pass
    assert len(calls) == before
    ray.init = lambda **_: (_ for _ in ()).throw(ConnectionError("no answer\nmore"))
    with pytest.raises(InputError, match=r"^no Ray cluster at auto \(no answer\)$"), engine.connected(Cluster("auto")):
        pass


def test_a_machine_without_room_is_refused_and_a_cluster_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Small(Ray):
        connected = False

        def nodes(self) -> list[dict[str, Any]]:
            return [{"Alive": True, "Resources": {"CPU": 1.0}}]

        def cluster_resources(self) -> dict[str, float]:
            return {"CPU": 1.0}

        def is_initialized(self) -> bool:
            return self.connected

        def init(self, **_: Any) -> None: ...

        def shutdown(self) -> None: ...

    ray, run = Small(never, random.Random(0)), smoother()
    monkeypatch.setitem(sys.modules, "ray", ray)  # type: ignore[arg-type]
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    store = LogitStore.open(tmp_path, StoreKey.of(run, DATA, 0), **GRID)
    with pytest.raises(InputError, match="each needs 2 CPU on one node, and the cluster has 1 CPU"):
        engine.fill(store, run, DATA, 8, Cluster(cpus=2.0))
    ray.connected = True
    with pytest.warns(KeepcoverWarning, match="waiting for one"):
        done = engine.fill(store, run, DATA, 8, Cluster(cpus=2.0))
    assert (done.computed, done.workers, len(ray.actors)) == (CHUNKS, 1, 1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workers": 2}, "--workers is for workers on Ray: add --engine ray"),
        ({"address": "auto"}, "--address is for workers on Ray"),
        ({"gpus_per_worker": 1}, "--gpus-per-worker is for workers on Ray"),
        ({"cpus_per_worker": 1}, "--cpus-per-worker is for workers on Ray"),
        ({"engine": "ray", "workers": 0}, "workers of at least 1"),
        (
            {"engine": "ray", "gpus_per_worker": 1, "device": "cpu"},
            "the store is for cpu, and a worker there needs no GPU",
        ),
        ({"engine": "ray", "gpus_per_worker": 0, "device": "cuda"}, "every worker needs a part of a GPU"),
        ({"engine": "ray", "device": "cuda:1"}, "expected --device cpu or cuda with --engine ray"),
        ({"engine": "ray"}, "pip install '.[ray]'"),
        ({"engine": "spark"}, "spark"),
    ],
)
def test_the_command_refuses_what_cannot_be(
    options: dict[str, Any], said: str, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert said in refused(capsys, *arguments(place, **options))
