"""Micro-batching: jobs of several requests share one call of the model, on one thread, behind a bounded queue.

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
from keepcover.web.problems import Problem

Groups = Sequence[str | int] | None
# Images [n, ...], a level and the groups of the images -> n sets, which can be sliced.
Predict = Callable[[Tensor, Level, Groups], Any]


@dataclass(eq=False)
class Job:
    """The images of one request, and the promise of their sets."""

    images: Tensor
    level: Level
    groups: Groups
    answer: asyncio.Future[Any]


class Batcher:
    """A bounded queue in front of one thread that runs the model.

    Args:
        predict: called on that thread only, never twice at once.
        max_batch: images per call; a larger job is a call of its own.
        max_wait: seconds a batch that is not full waits for more.
        max_queue: images that may wait.
        observe: told the images and seconds of every call.
    """

    def __init__(
        self,
        predict: Predict,
        *,
        max_batch: int,
        max_wait: float,
        max_queue: int,
        observe: Callable[[int, float], None] | None = None,
    ) -> None:
        self._predict, self._observe = predict, observe
        self.max_batch, self.max_wait, self.max_queue = max_batch, max_wait, max_queue
        self.waiting = 0  # images
        self.stopping = False
        self.busy_since: float | None = None
        self._jobs: deque[Job] = deque()
        self._running: list[Job] = []
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
        awaited = any(not job.answer.done() for job in (*self._jobs, *self._running))
        await asyncio.wait([self._task], timeout=timeout if awaited else min(timeout, 1.0))
        if self._task.done():
            return True
        self._task.cancel()
        return False

    def check_room(self, images: int) -> None:
        """Refuse what the queue cannot take now, before it has cost anything."""
        if self.stopping:
            raise Problem("stopping", "the service is shutting down; ask another replica", retry_after=1.0)
        if self.waiting + images > self.max_queue:
            raise Problem(
                "overloaded",
                f"{self.waiting} images are waiting and {images} more do not fit the queue of {self.max_queue}; try again later",
                retry_after=self.waiting * self._seconds_per_image,
            )

    def accept(self, images: Tensor, level: Level, groups: Groups = None) -> Job:
        """Put the images of one request in the queue; from here on it will be answered."""
        self.check_room(len(images))
        self.start()  # for an application that mounts this one and does not run our lifespan
        job = Job(images, level, groups, asyncio.get_running_loop().create_future())
        self._jobs.append(job)
        self.waiting += len(images)
        self._wake.set()
        return job

    async def answer(self, job: Job) -> Any:
        """The sets of an accepted job; cancelled, the job gives its place in the queue back."""
        try:
            return await job.answer
        finally:
            if job in self._jobs:  # its client has gone
                self._jobs.remove(job)
                self.waiting -= len(job.images)

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        thread = ThreadPoolExecutor(1, thread_name_prefix="keepcover-model")
        try:
            while await self._fill():
                batch = self._running = self._take()
                if not batch:
                    continue
                self.busy_since = time.monotonic()
                results = await loop.run_in_executor(thread, self._run, batch)
                images, seconds, self.busy_since = sum(len(job.images) for job in batch), self.busy_for, None
                self._seconds_per_image = 0.8 * self._seconds_per_image + 0.2 * seconds / images
                for job, result in results.items():
                    if job.answer.done():  # timed out or gone
                        continue
                    if isinstance(result, Exception):
                        job.answer.set_exception(result)
                    else:
                        job.answer.set_result(result)
                if self._observe is not None:
                    self._observe(images, seconds)
        finally:
            thread.shutdown(wait=False)  # it ends with its call; a model that hangs must not hang the event loop

    async def _fill(self) -> bool:
        """Wait for a first job, then a little for a full batch; False when stopping with nothing left to do."""
        while not self._jobs:
            if self.stopping:
                return False
            self._wake.clear()
            await self._wake.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(self.max_wait):
                while self.waiting < self.max_batch and not self.stopping:
                    self._wake.clear()
                    await self._wake.wait()
        return True

    def _take(self) -> list[Job]:
        batch: list[Job] = []
        taken = 0
        while self._jobs and (not batch or taken + len(self._jobs[0].images) <= self.max_batch):
            batch.append(self._jobs.popleft())
            taken += len(batch[-1].images)
        self.waiting -= taken
        return batch

    def _run(self, batch: list[Job]) -> dict[Job, Any]:
        """On the model's thread: one call per level; where a call fails, each of its jobs alone."""
        results: dict[Job, Any] = {}
        for level in dict.fromkeys(job.level for job in batch):
            members = [job for job in batch if job.level == level]
            try:
                known = [job.groups for job in members if job.groups is not None]
                groups = [name for names in known for name in names] if known else None
                sets = self._predict(torch.cat([job.images for job in members]), level, groups)
                ends = accumulate((len(job.images) for job in members), initial=0)
                results.update(zip(members, (sets[a:b] for a, b in pairwise(ends)), strict=True))
            except Exception as error:
                for job in members:
                    results |= {job: error} if len(members) == 1 else self._run([job])
        return results
