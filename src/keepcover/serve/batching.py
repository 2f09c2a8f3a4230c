"""Micro-batching: queries of several requests share one call of the model, on one thread, behind a bounded queue.

Every call draws its own key from the operating system *after* its images were taken from the queue, and keys each
image's noise by its position in the call. So no image can be chosen in the knowledge of the noise it will get, its own
or that of a neighbour in the batch.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from keepcover.prediction.predictor import Level
from keepcover.serve.observing import Metrics
from keepcover.web.requests import Problem
from keepcover.web.settings import Settings

Groups = Sequence[str | int] | None


@dataclass(eq=False)
class Query:
    """Images [n, ...] in [0, 1], the (alpha, epsilon) to answer for, and the group of each where the promise is per group."""

    images: Tensor
    level: Level
    groups: Groups = None
    answer: Any = None  # a future, from the moment it is accepted

    def __len__(self) -> int:
        return len(self.images)


class Batcher:
    """A bounded queue in front of one thread that runs the model.

    Args:
        predict: images [n, ...], a level and the groups of the images -> n sets, which can be sliced; called on that
            thread only, never twice at once.
        settings: images per call (a larger query is a call of its own), seconds that a batch waits to be filled, and
            images that may wait.
        metrics: told what is accepted and answered, what waits, and every call.
    """

    def __init__(self, predict: Callable[[Tensor, Level, Groups], Any], settings: Settings, metrics: Metrics) -> None:
        self.predict, self.settings, self.metrics = predict, settings, metrics
        self.waiting = 0  # images
        self.stopping = False
        self.busy_since: float | None = None
        self._queue: deque[Query] = deque()
        self._running: list[Query] = []
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._seconds_per_image = 0.0

    def start(self) -> None:
        """Begin, or begin again; within a running event loop. Nothing happens where it runs already."""
        if self._task is None or self._task.done():
            self.stopping, self._wake = False, asyncio.Event()
            self._task = asyncio.create_task(self._work(), name="keepcover-batcher")

    @property
    def alive(self) -> bool:
        return self._task is not None and not self._task.done() and not self.stopping

    @property
    def busy_for(self) -> float:
        """Seconds since the running call of the model began; 0 when idle."""
        return 0.0 if self.busy_since is None else time.monotonic() - self.busy_since

    async def close(self, timeout: float) -> bool:
        """Take no more, answer what was taken, and stop; whether the model's thread is free by then.

        A call whose clients have all gone is given a second.
        """
        self.stopping = True
        self._wake.set()
        if self._task is None:
            return True
        awaited = any(not query.answer.done() for query in (*self._queue, *self._running))
        await asyncio.wait([self._task], timeout=timeout if awaited else min(timeout, 1.0))
        return not self._task.cancel()  # nothing is left to cancel where it is done

    def check_room(self, images: int) -> None:
        """Refuse what the queue cannot take now, before it has cost anything."""
        if self.stopping:
            raise Problem("stopping", "the service is shutting down; ask another replica", retry_after=1.0)
        most = self.settings.max_queue
        if self.waiting + images > most:
            full = f"{self.waiting} images are waiting and {images} more do not fit the queue of {most}"
            later = self.waiting * self._seconds_per_image
            raise Problem("overloaded", f"{full}; try again later", retry_after=later)

    async def answer(self, query: Query) -> Any:
        """The sets of a query for which there is room; cancelled, it gives its place in the queue back."""
        self.start()  # for an application that mounts this one and does not run our lifespan
        query.answer = asyncio.get_running_loop().create_future()
        self._queue.append(query)
        self._wait_for(len(query))
        self.metrics.accepted.inc()
        self._wake.set()
        try:
            sets = await query.answer
        finally:
            if query in self._queue:  # its client has gone
                self._queue.remove(query)
                self._wait_for(-len(query))
        self.metrics.answered.inc()
        return sets

    def _wait_for(self, more: int) -> None:
        self.waiting += more
        self.metrics.queue.set(self.waiting)

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        thread = ThreadPoolExecutor(1, thread_name_prefix="keepcover-model")
        try:
            while await self._fill():
                batch = self._running = self._take()
                self.busy_since = time.monotonic()
                results = await loop.run_in_executor(thread, self._run, batch)
                images, seconds, self.busy_since = sum(map(len, batch)), self.busy_for, None
                self._seconds_per_image = 0.8 * self._seconds_per_image + 0.2 * seconds / images
                self.metrics.batch_images.observe(images)
                self.metrics.batch_seconds.observe(seconds)
                for query, result in results.items():
                    if not query.answer.done():  # else timed out or gone
                        failed = isinstance(result, Exception)
                        (query.answer.set_exception if failed else query.answer.set_result)(result)
        finally:
            thread.shutdown(wait=False)  # it ends with its call; a model that hangs must not hang the event loop

    async def _fill(self) -> bool:
        """Wait for a first query, then a little for a full batch; False when stopping with nothing left to do."""
        settings = self.settings
        while True:
            await self._until(lambda: self._queue or self.stopping)
            if not self._queue:
                return False
            with suppress(TimeoutError):
                async with asyncio.timeout(settings.batch_wait):
                    await self._until(lambda: self.waiting >= settings.max_batch or self.stopping)
            if self._queue:  # else their clients have gone
                return True

    async def _until(self, enough: Callable[[], Any]) -> None:
        while not enough():
            self._wake.clear()
            await self._wake.wait()

    def _take(self) -> list[Query]:
        batch = [self._queue.popleft()]
        while self._queue and sum(map(len, batch)) + len(self._queue[0]) <= self.settings.max_batch:
            batch.append(self._queue.popleft())
        self._wait_for(-sum(map(len, batch)))
        return batch

    def _run(self, batch: list[Query]) -> dict[Query, Any]:
        """On the model's thread: one call per level; where a call fails, each of its queries alone."""
        results: dict[Query, Any] = {}
        for level in dict.fromkeys(query.level for query in batch):
            members = [query for query in batch if query.level == level]
            try:
                groups = [name for query in members for name in query.groups or ()] or None
                sets = self.predict(torch.cat([query.images for query in members]), level, groups)
                ends = accumulate(map(len, members), initial=0)
                results.update(zip(members, (sets[a:b] for a, b in pairwise(ends)), strict=True))
            except Exception as error:
                for query in members:
                    results |= {query: error} if len(members) == 1 else self._run([query])
        return results
