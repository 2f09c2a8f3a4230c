"""The driver's side of a cluster: who has which chunk, and what to do when somebody is lost.

A worker is a Ray actor that Ray never restarts. When it is gone (killed, out of memory, its node lost) the chunks it had
go back to the front of the queue and another worker is asked for; what was stored before stays stored.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keepcover.errors import InputError
from keepcover.store import Chunk
from keepcover.store.cluster.cluster import Cluster
from keepcover.store.cluster.worker import Recipe, Worker, versions
from keepcover.store.filling import Filling, read_chunk

SECONDS_TO_WAIT = 1.0


@dataclass(eq=False)
class Hand:
    """One worker as the driver sees it."""

    actor: Any
    chunks: list[Chunk] = field(default_factory=list)  # in the order in which it computes them
    ready: bool = False
    lost: bool = False
    computed: int = 0


@dataclass(frozen=True)
class Task:
    """What was asked of a worker: a chunk, or (None) to prepare itself."""

    hand: Hand
    chunk: Chunk | None = None
    labels: Tensor | None = None


class Pool:
    """Workers and their tasks.

    Args:
        ray: the module, connected.
        cluster: what to take of it.
        gpus: per worker.
        recipe, model, build: for :class:`Worker`; the model is a reference to an object in the cluster.
        count: how many workers to keep.
    """

    def __init__(
        self, ray: Any, cluster: Cluster, gpus: float, recipe: Recipe, model: Any, build: bool, count: int
    ) -> None:
        self.ray, self.cluster, self.gpus = ray, cluster, gpus
        self.recipe, self.model, self.build = recipe, model, build
        self._make = ray.remote(Worker).options(
            num_cpus=cluster.cpus, num_gpus=gpus, max_restarts=0, max_task_retries=0
        )
        self.hands: list[Hand] = []
        self.running: dict[Any, Task] = {}
        self.used = self.lost = self.repeated = self.most_in_flight = 0
        self._deaths: Counter[Chunk] = Counter()
        self._stillborn, self._seen_alive = 0, time.monotonic()
        for _ in range(count):
            self._hire()

    def _hire(self) -> None:
        hand = Hand(self._make.remote(self.recipe))
        self.hands.append(hand)
        self.running[hand.actor.prepare.remote(self.model, self.build)] = Task(hand)

    @property
    def in_flight(self) -> int:
        """Chunks that are in the cluster: waiting, being computed, or computed and not yet taken."""
        return sum(task.chunk is not None for task in self.running.values())

    def run(self, work: Filling, data: Any) -> None:
        """Until nothing is left to compute."""
        while True:
            self._feed(work, data)
            if not work.todo and not self.in_flight:
                return
            self._collect(work)

    def _feed(self, work: Filling, data: Any) -> None:
        """One more chunk for whoever has fewest, until all have as many as they may."""
        while free := [hand for hand in self.hands if hand.ready and len(hand.chunks) < self.cluster.ahead]:
            chunk = work.next()
            if chunk is None:
                return
            hand = min(free, key=lambda hand: len(hand.chunks))
            batch = read_chunk(data, chunk.rows)
            images = self.ray.put(batch.images.detach().cpu().numpy())
            task = Task(hand, chunk, torch.as_tensor(batch.labels))
            self.running[hand.actor.compute.remote(images, chunk.rows, chunk.draws)] = task
            hand.chunks.append(chunk)
            self.most_in_flight = max(self.most_in_flight, self.in_flight)

    def _collect(self, work: Filling) -> None:
        """Take one answer; a worker that cannot give one is lost."""
        ready, _ = self.ray.wait(list(self.running), num_returns=1, timeout=SECONDS_TO_WAIT)
        if any(hand.ready for hand in self.hands):
            self._seen_alive = time.monotonic()
        elif not ready and time.monotonic() - self._seen_alive > self.cluster.patience:
            raise InputError(
                f"no worker could start for {self.cluster.patience:g} s: {shortage(self.ray, self.cluster, self.gpus)}. "
                f"{_intact(work)}"
            )
        for ref in ready:
            task = self.running.pop(ref)
            try:
                answer = self.ray.get(ref)
            except self.ray.exceptions.RayTaskError as error:
                raise _failure(error, task) from error
            except self.ray.exceptions.RayError as error:
                self._bury(task, error, work)
                continue
            if task.chunk is None:
                self._welcome(task.hand, answer)
            else:
                self._take(task, answer, work)

    def _welcome(self, hand: Hand, facts: dict[str, Any]) -> None:
        if facts["versions"] != versions():
            raise InputError(
                f"{facts['host']} has {_words(facts['versions'])} and this machine {_words(versions())}; logits of two "
                "versions are never mixed: install the same everywhere"
            )
        hand.ready, self._stillborn = True, 0

    def _take(self, task: Task, logits: np.ndarray, work: Filling) -> None:
        assert task.chunk is not None
        assert task.labels is not None
        task.hand.chunks.remove(task.chunk)
        self.used += task.hand.computed == 0
        task.hand.computed += 1
        work.put(task.chunk, torch.from_numpy(np.array(logits)), task.labels)  # a copy: Ray's memory is read-only
        work.bar.advance(task.chunk.count)

    def _bury(self, task: Task, error: Exception, work: Filling) -> None:
        """Ask for another worker, once; give back the chunk, one of those that the lost worker had."""
        hand = task.hand
        if not hand.lost:
            hand.lost = True
            self.lost += 1
            self.hands.remove(hand)
            self._end(hand)  # one that is only out of reach must not go on
            self._blame(hand, error, work)
            self._hire()
        if task.chunk is not None:
            work.again(task.chunk)
            self.repeated += 1

    def _blame(self, hand: Hand, error: Exception, work: Filling) -> None:
        """It was computing the first of its chunks; the others only waited there."""
        if not hand.chunks:
            self._stillborn += 1
            if self._stillborn >= self.cluster.attempts:
                raise InputError(
                    f"{self._stillborn} workers in a row ended before they were ready, the last with: {_reason(error)} Is the "
                    f"model too large for them? {_intact(work)}"
                )
            return
        chunk = hand.chunks[0]
        self._deaths[chunk] += 1
        if self._deaths[chunk] >= self.cluster.attempts:
            raise InputError(
                f"{chunk} ended {self._deaths[chunk]} workers, the last with: {_reason(error)} Out of memory? Then a smaller "
                f"batch size or more room for each worker may help. {_intact(work)}"
            )

    def _end(self, hand: Hand) -> None:
        with contextlib.suppress(Exception):  # it may be gone already, and so may the cluster
            self.ray.kill(hand.actor, no_restart=True)

    def stop(self) -> None:
        """Let all workers go; what they were computing is dropped."""
        for hand in self.hands:
            self._end(hand)


def shortage(ray: Any, cluster: Cluster, gpus: float) -> str:
    """What a worker needs beside what the cluster has, in words."""
    there = ray.cluster_resources()
    needs = f"{cluster.cpus:g} CPU" + (f" and {gpus:g} GPU" if gpus else "")
    return f"each needs {needs} on one node, and the cluster has {there.get('CPU', 0):g} CPU and {there.get('GPU', 0):g} GPU in all"


def _intact(work: Filling) -> str:
    return f"What is stored is intact ({len(work.store.entries)} chunks); run the same again, it goes on from there"


def _words(found: dict[str, str]) -> str:
    return " with ".join(f"{name} {value}" for name, value in found.items())


def _reason(error: Exception) -> str:
    """Ray's words, without the part that is the same every time."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith("\t")]
    return " ".join(lines).split(" Some common causes")[0][:400]


def _failure(error: Any, task: Task) -> Exception:
    """What a worker raised, as this process would have; what stopped it from being ready is named as such."""
    cause = error.cause
    if isinstance(cause, InputError):
        return InputError(str(cause))
    if task.chunk is None:
        return InputError(
            f"a worker cannot load the model: {type(cause).__name__}: {cause}; is all that it needs installed there?"
        )
    return error
