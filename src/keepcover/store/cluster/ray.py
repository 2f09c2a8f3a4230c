"""The cluster engine: a store filled by many workers and GPUs, on Ray. Needs the extra ``ray``.

The driver knows the data and the store, workers know the model. Chunks go out with their images, logits come back, and
the driver alone writes: no shared file system is needed, and nothing that a worker does can harm the store.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from keepcover.engine.smoother import Classifier, Smoother, evaluation_mode
from keepcover.errors import InputError, optional, refusing, warn
from keepcover.store import Filled, LogitStore
from keepcover.store.cluster import Cluster
from keepcover.store.cluster.pool import Pool, Recipe, shortage
from keepcover.store.filling import Filling

SECONDS_TO_ANSWER = 10.0


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
            raise InputError(
                "this process is connected to Ray already; leave the address out, or call ray.shutdown() first"
            )
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
