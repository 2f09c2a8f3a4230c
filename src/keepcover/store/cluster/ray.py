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
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from torch import nn

from keepcover.engine.smoother import Classifier, Smoother, evaluation_mode
from keepcover.errors import InputError, KeepcoverWarning, install
from keepcover.store import LogitStore
from keepcover.store.cluster.cluster import Cluster, ClusterFilled
from keepcover.store.cluster.pool import Pool, shortage
from keepcover.store.cluster.worker import Recipe
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
) -> ClusterFilled:
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
    store.key.refuse_smoother(smoother, anywhere=True)
    store.key.refuse_data(data)
    with contextlib.ExitStack() as stack:
        work = stack.enter_context(Filling(store, draws, smoother.progress))
        if not work.todo:
            return ClusterFilled(**work.facts, workers=0, lost_workers=0, repeated_chunks=0, most_in_flight=0)
        ray, alone = stack.enter_context(connected(cluster))
        recipe = Recipe(store.key, smoother.batch_size, cluster.own_threads)
        room = _room(ray, cluster, gpus)
        if not room:
            lacking = f"no node has room for a worker: {shortage(ray, cluster, gpus)}"
            if alone:
                raise InputError(f"{lacking}; ask for less, or name a larger cluster by its address")
            warnings.warn(f"{lacking}; waiting for one", KeepcoverWarning, stacklevel=2)
        count = min(cluster.workers or max(room, 1), len(work.todo))
        pool = Pool(ray, cluster, gpus, recipe, _send(ray, smoother, factory), factory is not None, count)
        stack.callback(pool.stop)
        pool.run(work, data)
    return ClusterFilled(
        **work.facts,
        workers=pool.used,
        lost_workers=pool.lost,
        repeated_chunks=pool.repeated,
        most_in_flight=pool.most_in_flight,
    )


@contextlib.contextmanager
def connected(cluster: Cluster) -> Iterator[tuple[Any, bool]]:
    """Ray, connected as this process has it already, or for as long as the context lasts; and whether it is this machine
    alone, to which no other can come."""
    try:
        ray: Any = import_module("ray")
    except ModuleNotFoundError:
        raise InputError(f"the cluster engine needs Ray: {install('ray')}") from None
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
    _refuse_silence(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a run reports to nobody
    log = logging.getLogger("ray")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        try:
            ray.init(address=address, **options)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise InputError(f"no Ray cluster at {address}: {reason}") from None
        yield ray, address == "local"
    finally:
        ray.shutdown()
        log.setLevel(before)


def _refuse_silence(address: str) -> None:
    """Ray waits for minutes where nobody answers; a person who mistyped an address should not."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=SECONDS_TO_ANSWER).close()
    except (OSError, OverflowError) as error:
        raise InputError(
            f"no Ray cluster at {address}: {error}; `ray start --head` prints its address, and `auto` finds it on its own nodes"
        ) from None


def _room(ray: Any, cluster: Cluster, gpus: float) -> int:
    """How many workers fit on the nodes there are."""
    fits = 0
    for node in ray.nodes():
        there = node["Resources"] if node["Alive"] else {}
        most = int(there.get("CPU", 0) / cluster.cpus)
        if gpus:
            cards = there.get("GPU", 0)
            most = min(most, int(cards) * int(1 / gpus) if gpus < 1 else int(cards / gpus))
        fits += most
    return fits


def _send(ray: Any, smoother: Smoother, factory: Callable[[], Classifier] | None) -> Any:
    """The model, or what builds it, in the cluster's memory: sent to each node once."""
    model = smoother.model
    try:
        if factory is not None:
            return ray.put(factory)
        with evaluation_mode(model):
            if isinstance(model, nn.Module) and smoother.device.type != "cpu":
                model = copy.deepcopy(model).cpu()
            return ray.put(model)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise InputError(
            f"this model cannot be sent to workers ({type(error).__name__}: {reason}); give factory=, a function without "
            "arguments that builds it there"
        ) from None
