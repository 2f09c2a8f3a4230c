"""The cluster engine: a store filled by many workers and GPUs, on Ray. Needs the extra ``ray``.

The driver knows the data and the store, workers know the model. Chunks go out with their images, logits come back, and
the driver alone writes: no shared file system is needed, and nothing that a worker does can harm the store.

A worker is a Ray actor that Ray never restarts. When it is gone (killed, out of memory, its node lost) the chunks it had
go back to the front of the queue and another worker is asked for; what was stored before stays stored. Ray's own restarts
would keep the chunks of a lost node waiting for a node like it.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import os
import platform
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from keepcover.engine.smoother import AUTOCAST, Classifier, Smoother, evaluation_mode
from keepcover.errors import InputError, optional, refusing, warn
from keepcover.store import Chunk, Filled, LogitStore, StoreKey
from keepcover.store.cluster import Cluster
from keepcover.store.folder import Filling, compute_chunk, read_chunk
from keepcover.store.layout import to_half

SECONDS_TO_WAIT, SECONDS_TO_ANSWER = 1.0, 10.0


def versions() -> str:
    """What must be equal on all machines for their logits to be of one kind."""
    import keepcover

    return f"keepcover {keepcover.__version__} with torch {torch.__version__.split('+')[0]}"


@dataclass(frozen=True)
class Recipe:
    """All that a worker needs besides the model. The key says everything that changes a logit; the rest is geometry."""

    key: StoreKey
    batch_size: int | None
    threads: int
    versions: str = field(default_factory=versions)  # of the driver


class Worker:
    """One process of a cluster. It knows the noise and the model; images come to it, logits go back.

    Example:
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
        >>> data = (torch.rand(6, 1, 2, 2), torch.zeros(6).long())
        >>> key = StoreKey.of(Smoother(model, 0.5), data, seed=0)
        >>> worker = Worker(Recipe(key, batch_size=None, threads=torch.get_num_threads()))
        >>> worker.prepare(lambda: model)
        >>> worker.compute(data[0][:2].numpy(), range(2), range(8)).shape
        (2, 8, 3)
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def prepare(self, build: Callable[[], Classifier]) -> None:
        """Build the model; refuse it unless it is the store's.

        Nothing of this happens when the process starts, so that what goes wrong is an answer, not a death.
        """
        key, here = self.recipe.key, platform.node()
        if versions() != self.recipe.versions:
            mixed = "logits of two versions are never mixed: install the same everywhere"
            raise InputError(f"{here} has {versions()} and the driver {self.recipe.versions}; {mixed}")
        torch.set_num_threads(self.recipe.threads)
        try:
            model = build()
            if key.device == "cuda" and not torch.cuda.is_available():
                raise InputError(f"the store is for cuda and a worker on {here} has no GPU that torch can use")
            model = model.to(key.device) if isinstance(model, nn.Module) else model
        except InputError:
            raise
        except Exception as error:  # a function of the user's may raise anything
            said = f"{type(error).__name__}: {error}"
            raise InputError(f"a worker cannot load the model: {said}; is all that it needs on {here}?") from error
        how = {name: getattr(key, name) for name in ("device", "channels_last", "compile")}
        how |= {"autocast": AUTOCAST[key.autocast], "batch_size": self.recipe.batch_size}
        self.smoother = Smoother(model, key.added, progress=False, **how)
        try:
            key.refuse_other(self.smoother)
        except InputError as error:
            raise InputError(f"a worker on {here} has another model: {error}. Are its files the same there?") from None

    def compute(self, images: np.ndarray, rows: range, draws: range) -> np.ndarray:
        """Logits [rows, draws, classes] in float16."""
        chunk = Chunk(rows, draws)
        own = torch.from_numpy(np.array(images))  # shared memory is read-only, and torch has no such tensors
        return to_half(compute_chunk(self.smoother, own, chunk, self.recipe.key.stream), chunk).numpy()


@dataclass(eq=False)
class WorkerHandle:
    """One worker as the driver sees it."""

    actor: Any
    chunks: list[Chunk] = field(default_factory=list)  # in the order in which it computes them
    ready: bool = False
    used: bool = False


class Task(NamedTuple):
    """What was asked of a worker: a chunk with its labels, or (None) to prepare itself."""

    worker: WorkerHandle
    asked: tuple[Chunk, Tensor] | None = None


class Pool:
    """Workers and their tasks.

    Args:
        ray: the module, connected.
        cluster: what to take of it.
        recipe, build: for :class:`Worker`; ``build`` may be a reference to an object in the cluster.
        count: how many workers to keep.
    """

    def __init__(self, ray: Any, cluster: Cluster, recipe: Recipe, build: Callable[[], Any] | Any, count: int) -> None:
        self.ray, self.cluster, self.recipe, self.build, self.count = ray, cluster, recipe, build, count
        self.gpus = cluster.gpus_for(recipe.key.device)
        takes: dict[str, Any] = {"num_cpus": cluster.cpus, "num_gpus": self.gpus}
        self._make = ray.remote(Worker).options(**takes, max_restarts=0, max_task_retries=0)
        self.workers, self.running = list[WorkerHandle](), dict[Any, Task]()
        # How many workers ended with a chunk; under None, how many in a row ended before they were ready.
        self._failures: Counter[Chunk | None] = Counter()

    @property
    def in_flight(self) -> int:
        """Chunks that are in the cluster: waiting, being computed, or computed and not yet taken."""
        return sum(task.asked is not None for task in self.running.values())

    def run(self, work: Filling, data: Any) -> None:
        """Until nothing is left to compute; then, or when something goes wrong, all workers are let go."""
        last_ready = time.monotonic()
        try:
            while True:
                while len(self.workers) < self.count:
                    worker = WorkerHandle(self._make.remote(self.recipe))
                    self.workers.append(worker)
                    self.running[worker.actor.prepare.remote(self.build)] = Task(worker)
                self._feed(work, data)
                if not work.todo and not self.in_flight:
                    return
                if self._collect(work) or any(worker.ready for worker in self.workers):
                    last_ready = time.monotonic()
                elif time.monotonic() - last_ready > self.cluster.patience:
                    lacking = shortage(self.ray, self.cluster, self.gpus)
                    raise _stopped(f"no worker could start for {self.cluster.patience:g} s: {lacking}.", work)
        finally:
            for worker in self.workers:
                self._end(worker)

    def _feed(self, work: Filling, data: Any) -> None:
        """One more chunk for the worker that has fewest, until all have as many as they may."""
        while free := [worker for worker in self.workers if worker.ready and len(worker.chunks) < self.cluster.ahead]:
            chunk = work.next()
            if chunk is None:
                return
            worker = min(free, key=lambda worker: len(worker.chunks))
            batch = read_chunk(data, chunk.rows)
            images = self.ray.put(batch.images.detach().cpu().numpy())
            task = Task(worker, (chunk, torch.as_tensor(batch.labels)))
            self.running[worker.actor.compute.remote(images, chunk.rows, chunk.draws)] = task
            worker.chunks.append(chunk)
            work.done.most_in_flight = max(work.done.most_in_flight, self.in_flight)

    def _collect(self, work: Filling) -> bool:
        """Take one answer, if one comes; a worker that cannot give one is lost."""
        ready, _ = self.ray.wait(list(self.running), num_returns=1, timeout=SECONDS_TO_WAIT)
        for ref in ready:
            task = self.running.pop(ref)
            try:
                self._take(task, self.ray.get(ref), work)
            except self.ray.exceptions.RayTaskError as error:  # as this process would have raised it
                raise InputError(str(error.cause)) if isinstance(error.cause, InputError) else error from error
            except self.ray.exceptions.RayError as error:
                self._lose(task, error, work)
        return bool(ready)

    def _take(self, task: Task, logits: Any, work: Filling) -> None:
        worker = task.worker
        if task.asked is None:
            worker.ready, self._failures[None] = True, 0
            return
        chunk, labels = task.asked
        worker.chunks.remove(chunk)
        work.done.workers += not worker.used
        worker.used = True
        work.put(chunk, torch.from_numpy(np.array(logits)), labels)  # a copy: Ray's memory is read-only
        work.bar.advance(chunk.count)

    def _lose(self, task: Task, error: Exception, work: Filling) -> None:
        """Give back the chunk of a task that was not answered; its worker goes, and another will be asked for."""
        worker = task.worker
        if worker in self.workers:
            work.done.lost_workers += 1
            self.workers.remove(worker)
            self._end(worker)  # one that is only out of reach must not go on
            chunk = next(iter(worker.chunks), None)  # it was computing the first; the others only waited there
            self._failures[chunk] += 1
            if self._failures[chunk] >= self.cluster.attempts:
                raise _hopeless(chunk, self._failures[chunk], error, work)
        if task.asked is not None:
            work.todo.insert(0, task.asked[0])
            work.done.repeated_chunks += 1

    def _end(self, worker: WorkerHandle) -> None:
        with contextlib.suppress(Exception):  # it may be gone already, and so may the cluster
            self.ray.kill(worker.actor, no_restart=True)


def shortage(ray: Any, cluster: Cluster, gpus: float) -> str:
    """What a worker needs beside what the cluster has, in words."""
    there = ray.cluster_resources()
    needs = f"{cluster.cpus:g} CPU" + (f" and {gpus:g} GPU" if gpus else "")
    return f"each needs {needs} on one node, and the cluster has {there.get('CPU', 0):g} CPU and {there.get('GPU', 0):g} GPU in all"


def _stopped(why: str, work: Filling) -> InputError:
    stored = f"What is stored is intact ({len(work.store.entries)} chunks)"
    return InputError(f"{why} {stored}; run the same again, it goes on from there")


def _hopeless(chunk: Chunk | None, times: int, error: Exception, work: Filling) -> InputError:
    """Ray's words, without the part that is the same every time."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith("\t")]
    said = " ".join(lines).split(" Some common causes")[0][:400]
    if chunk is None:
        what, advice = f"{times} workers in a row ended before they were ready", "Is the model too large for them?"
    else:
        what, advice = f"{chunk} ended {times} workers", "Out of memory? Try a smaller batch size or larger workers."
    return _stopped(f"{what}, the last with: {said} {advice}", work)


def fill(
    store: LogitStore,
    smoother: Smoother,
    data: Any,
    draws: int | range,
    cluster: Cluster | None = None,
    *,
    factory: Callable[[], Classifier] | None = None,
) -> Filled:
    """:meth:`keepcover.LogitStore.fill` on a cluster: the same noise and, for equal ``batch_size`` and hardware, the same
    files, byte for byte.

    A lost worker or node loses nothing and repeats only the chunks it had. An error of the model is not repeated but
    raised. Stop it at any moment and call again, here or with ``store.fill``.

    Args:
        store: where chunks go; this process writes them. Workers compute on its key's kind of device, so a key made where
            there is no GPU is first told of theirs: ``dataclasses.replace(key, device="cuda")``.
        smoother: the model under noise, the one of the key; workers take its ``batch_size``.
        data: the images and labels of the key: ``(images, labels)`` or a dataset. Workers get the images of one chunk at
            a time and need not see any file.
        draws: how many draws every image shall have, or which.
        cluster: where the workers are, and how many.
        factory: builds the model on a worker, instead of sending it there. It must be the same model.

    Example:
        .. code-block:: python

            from keepcover.store.cluster import Cluster
            from keepcover.store.cluster.ray import fill

            done = fill(store, smoother, data, draws=256, cluster=Cluster(workers=4))
    """
    cluster = cluster or Cluster()
    gpus = cluster.gpus_for(store.key.device)
    store.key.refuse_other(smoother, data, anywhere=True)
    with Filling(store, draws, smoother.progress) as work:
        if work.todo:
            with connected(cluster) as (ray, alone):
                room = _room(ray, cluster, gpus)
                if not room:
                    lacking = f"no node has room for a worker: {shortage(ray, cluster, gpus)}"
                    if alone:
                        raise InputError(f"{lacking}; ask for less, or name a larger cluster by its address")
                    warn(f"{lacking}; waiting for one")
                count = min(cluster.workers or max(room, 1), len(work.todo))
                recipe = Recipe(store.key, smoother.batch_size, cluster.own_threads)
                Pool(ray, cluster, recipe, _send(ray, smoother, factory), count).run(work, data)
    return work.done


@contextlib.contextmanager
def connected(cluster: Cluster) -> Iterator[tuple[Any, bool]]:
    """Ray, connected as this process has it already, or for as long as the context lasts; and whether it is this machine
    alone, to which no other can come."""
    ray = optional("ray", "the cluster engine needs Ray", "ray")
    if ray.is_initialized():
        if cluster.address is not None:
            raise InputError("this process is connected to Ray already; leave the address out, or ray.shutdown() first")
        yield ray, False
        return
    address = cluster.address or os.environ.get("RAY_ADDRESS") or "local"
    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if address == "local":
        asked = math.ceil((cluster.workers or 0) * cluster.cpus)
        options |= {"include_dashboard": False, "num_cpus": max(os.cpu_count() or 1, asked)}
    _expect_answer(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a run sends no statistics
    log = logging.getLogger("ray")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with refusing(f"no Ray cluster at {address}", RuntimeError, ValueError, OSError):
            ray.init(address=address, **options)
        yield ray, address == "local"
    finally:
        ray.shutdown()
        log.setLevel(before)


def _expect_answer(address: str) -> None:
    """Refuse an address where nothing answers; Ray itself would wait for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    advice = "`ray start --head` prints its address, and `auto` finds it on its own nodes"
    with refusing(f"no Ray cluster at {address}", OSError, OverflowError, advice=advice):
        socket.create_connection((host.strip("[]"), int(port)), timeout=SECONDS_TO_ANSWER).close()


def _room(ray: Any, cluster: Cluster, gpus: float) -> int:
    """How many workers fit on the nodes there are."""
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cards = [int(there.get("GPU", 0)) for there in alive]
    most = [int(there.get("CPU", 0) / cluster.cpus) for there in alive]
    if not gpus:
        return sum(most)
    on_cards = [count * int(1 / gpus) if gpus < 1 else int(count / gpus) for count in cards]
    return sum(map(min, most, on_cards))


def _send(ray: Any, smoother: Smoother, factory: Callable[[], Classifier] | None) -> Any:
    """What builds the model, in the cluster's memory: sent to each node once."""
    advice = "give factory=, a function without arguments that builds it there"
    with refusing("this model cannot be sent to workers", advice=advice), evaluation_mode(smoother.model):
        if factory is not None:
            return ray.put(factory)
        model = smoother.model
        if isinstance(model, nn.Module) and smoother.device.type != "cpu":
            model = copy.deepcopy(model).cpu()
        return ray.put(lambda: model)
