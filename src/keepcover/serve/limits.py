"""Limits on what clients may do: work, a token, repetitions. All of them bounded in memory."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import math
import os
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from fastapi.security import HTTPBearer
from starlette.requests import HTTPConnection
from torch import Tensor

from keepcover.web.requests import Problem
from keepcover.web.server import plain_address

THREADS = min(4, os.cpu_count() or 1)


class ReadingPool:
    """Threads that parse and decode bodies: a few at work, so many waiting, and no more.

    A body is untrusted work, so it gets no thread of the event loop's own pool, and what is given up while it waits is
    never done.

    Args:
        room: requests that may be here, at work or waiting.
        threads: how many are at work.
    """

    def __init__(self, room: int, threads: int = THREADS) -> None:
        self.room = room
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="keepcover-read")
        self._here: dict[Future[Any], float] = {}  # since when

    @property
    def full(self) -> bool:
        return len(self._here) >= self.room

    @property
    def behind(self) -> float:
        """Seconds since the oldest request that is still here came."""
        return time.monotonic() - min(list(self._here.values()), default=math.inf)

    async def run(self, work: Callable[[], Any]) -> Any:
        """Do the work on one of the threads, or refuse at once."""
        if self.full:
            raise Problem("overloaded", f"{self.room} requests wait to be read; try again later", retry_after=1.0)
        future = self._threads.submit(work)
        self._here[future] = time.monotonic()
        future.add_done_callback(self._here.pop)
        return await asyncio.wrap_future(future)


class Bearer(HTTPBearer):
    """Whether an ``Authorization`` header carries the token, in time that does not depend on what it carries.

    Example:
        >>> bearer = Bearer("correct horse battery")
        >>> bearer.check("Bearer correct horse battery")
        >>> bearer.check("Bearer correct horse batterz")
        Traceback (most recent call last):
        keepcover.web.requests.Problem: expected the header Authorization: Bearer TOKEN with this service's token
    """

    def __init__(self, token: str) -> None:
        super().__init__(scheme_name="HTTPBearer")
        self._digest = hashlib.sha256(token.encode()).digest()

    async def __call__(self, request: HTTPConnection) -> None:
        self.check(request.headers.get("authorization", ""))

    def check(self, header: str) -> None:
        scheme, _, given = header.partition(" ")
        same = hmac.compare_digest(hashlib.sha256(given.encode()).digest(), self._digest)
        if not (same and scheme.lower() == "bearer"):
            message = "expected the header Authorization: Bearer TOKEN with this service's token"
            raise Problem("unauthorized", message, headers={"www-authenticate": "Bearer"})


class RepeatLimit:
    """At most ``limit`` answers to one image for one client within ``window`` seconds.

    The guarantee is per query: a client that asks about one image until a label is missing sees that sooner or later.
    This makes it later. Images are remembered as keyed hashes; the key is drawn here and never leaves the process.
    """

    def __init__(self, limit: int, window: float, entries: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit, self.window, self.entries, self._clock = limit, window, entries, clock
        self._key = secrets.token_bytes(32)
        self._times: OrderedDict[bytes, list[float]] = OrderedDict()

    def count(self, client: str, images: Tensor) -> None:
        """Count every image of a request, or refuse the request and count none."""
        now = self._clock()
        asked = Counter(self._hash(client, image) for image in images)
        for key, times in asked.items():
            recent = [at for at in self._times.get(key, []) if at > now - self.window]
            if len(recent) + times > self.limit:
                wait = recent[0] + self.window - now if recent else self.window
                allowed = f"the same image at most {self.limit} times in {self.window:g} s"
                why = "the guarantee is per query, and not for the best of many"
                raise Problem("repeated", f"{allowed}: {why}", retry_after=wait)
        for key, times in asked.items():
            recent = [at for at in self._times.pop(key, []) if at > now - self.window]
            self._times[key] = recent + [now] * times
        while len(self._times) > self.entries:
            self._times.popitem(last=False)

    def _hash(self, client: str, image: Tensor) -> bytes:
        digest = hashlib.blake2b(key=self._key, digest_size=16)
        digest.update(_network(client).encode() + b"\0")
        digest.update((image.double() + 0.0).contiguous().numpy().tobytes())  # -0.0 is the same pixel
        return digest.digest()


def _network(client: str) -> str:
    """The address, or for IPv6 its /64: one client has all of those.

    Example:
        >>> _network("192.0.2.1"), _network("2001:db8::1") == _network("2001:db8::2"), _network("a socket")
        ('192.0.2.1', True, 'a socket')
    """
    client = plain_address(client)
    try:
        address = ipaddress.ip_address(client)
    except ValueError:
        return client
    return client if address.version == 4 else str(ipaddress.ip_network((int(address), 64), strict=False))
