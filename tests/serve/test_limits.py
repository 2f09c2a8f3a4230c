"""Limits that hold: bodies, queue, time, token, repeated queries, connections, shutdown."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import httpx
import numpy as np
import pytest
import torch
import uvicorn
from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from keepcover.prediction.predictor import Predictor
from keepcover.serve import Settings, create_app
from keepcover.serve.limits import THREADS, Bearer, RepeatLimit
from keepcover.serve.observing import HEAD, Seldom
from keepcover.web.requests import Problem
from keepcover.web.server import BACKLOG, Protocol, bind, most_connections

from .client import IMAGES, TOKEN, Gate, ask, client, refused
from .serving import SHAPE, file_of, make_predictor

patient = settings(deadline=None, derandomize=True, max_examples=60)
T = TypeVar("T")


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return make_predictor(alpha=(0.1, 0.2), epsilon=(0.1, 0.05))


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch) -> tuple[Predictor, Gate]:
    return make_predictor(), Gate(monkeypatch)


# -- limits ------------------------------------------------------------------------------------------------------------


async def chunks(total: int, size: int = 1000) -> AsyncIterator[bytes]:
    for _ in range(total // size):
        yield b"x" * size


def test_bodies_are_limited_by_what_they_say_and_by_what_they_are(predictor: Predictor) -> None:
    app = create_app(predictor, Settings(max_body=5000))
    headers = {"content-type": "application/json"}
    said = ask(app, "POST", "/v1/predict", content=b"x" * 5001, headers=headers)
    refused(said, 413, "body_too_large", "the body exceeds 5000 bytes; send fewer images per request")
    streamed = ask(app, "POST", "/v1/predict", content=chunks(10_000), headers=headers)
    refused(streamed, 413, "body_too_large")
    form = {"content-type": "multipart/form-data; boundary=x"}
    part = b'--x\r\ncontent-disposition: form-data; name="images"; filename="a"\r\n\r\n'

    async def long_form() -> AsyncIterator[bytes]:
        yield part
        async for piece in chunks(10_000):
            yield piece

    refused(ask(app, "POST", "/v1/predict", content=long_form(), headers=form), 413, "body_too_large")
    refused(
        ask(app, "POST", "/v1/predict", content=chunks(5000), headers=headers), 400, "bad_request"
    )  # not a byte less
    lying = {**headers, "content-length": "9" * 30}
    refused(ask(app, "POST", "/v1/predict", content=b"{}", headers=lying), 422, "invalid")


def test_all_bodies_together_are_limited_and_given_back(predictor: Predictor) -> None:
    app = create_app(predictor, Settings(max_body=5000, max_bodies=6000))
    headers = {"content-type": "application/json"}

    async def several() -> list[httpx.Response]:
        async with client(app) as inner:
            go = asyncio.Event()

            async def held() -> AsyncIterator[bytes]:
                yield b"x" * 4000
                await go.wait()

            first = asyncio.create_task(inner.post("/v1/predict", content=held(), headers=headers))
            await asyncio.sleep(0.05)
            second = await inner.post("/v1/predict", content=b"x" * 4000, headers=headers)
            go.set()
            await first
            return [second, await inner.post("/v1/predict", content=b"x" * 4000, headers=headers)]

    crowded, alone = asyncio.run(several())
    refused(crowded, 503, "overloaded", "too many bytes are being received")
    assert crowded.headers["retry-after"] == "1"
    refused(alone, 400, "bad_request")


def test_a_body_that_dribbles_is_refused(predictor: Predictor) -> None:
    async def dribble() -> AsyncIterator[bytes]:
        while True:
            yield b" "
            await asyncio.sleep(0.02)

    begin = time.perf_counter()
    app = create_app(predictor, Settings(body_timeout=0.2))
    response = ask(app, "POST", "/v1/predict", content=dribble(), headers={"content-type": "application/json"})
    refused(response, 408, "slow_body", "did not arrive within 0.2 s")
    assert time.perf_counter() - begin < 5


def test_a_full_queue_answers_503_and_keeps_its_word(gated: tuple[Predictor, Gate]) -> None:
    """The queue is counted in images: ten wait, an eleventh is refused at once, and all that were accepted are answered."""
    predictor, gate = gated
    app = create_app(predictor, Settings(max_queue=10, max_images=10, batch_wait=0.0))

    async def crowd() -> tuple[list[httpx.Response], list[httpx.Response]]:
        async with client(app) as inner:

            def one(images: int) -> asyncio.Task[httpx.Response]:
                body = {"images": IMAGES[:1].repeat(images, 1, 1, 1).tolist()}
                return asyncio.create_task(inner.post("/v1/predict", json=body))

            accepted = [one(1)]
            while not gate.calls:
                await asyncio.sleep(0.001)
            accepted += [one(4), one(5)]
            while app.state.service.batcher.waiting < 9:
                await asyncio.sleep(0.001)
            rejected = [await asyncio.wait_for(one(images), 10) for images in (2, 10)]
            accepted.append(one(1))  # still fits
            await asyncio.sleep(0.05)
            rejected.append(await asyncio.wait_for(one(1), 10))
            gate.open.set()
            return list(await asyncio.gather(*accepted)), rejected

    accepted, rejected = asyncio.run(crowd())
    assert [len(response.json()["sets"]) for response in accepted] == [1, 4, 5, 1]
    for response in rejected:
        refused(response, 503, "overloaded", "do not fit the queue of 10; try again later")
        assert int(response.headers["retry-after"]) >= 1
    metrics = app.state.service.metrics
    assert metrics.own("accepted_total") == metrics.own("answered_total") == 4


def test_an_answer_that_takes_too_long_is_a_503_and_frees_its_place(gated: tuple[Predictor, Gate]) -> None:
    predictor, gate = gated
    app = create_app(predictor, Settings(answer_timeout=1.0, batch_wait=0.0, max_batch=5))

    async def two() -> tuple[list[httpx.Response], int]:
        async with client(app) as inner:
            body = {"images": IMAGES.tolist()}
            late = await asyncio.gather(*(inner.post("/v1/predict", json=body) for _ in range(2)))
            waiting = app.state.service.batcher.waiting
            gate.open.set()
            return list(late), waiting

    late, waiting = asyncio.run(two())
    for response in late:
        refused(response, 503, "timeout", "no answer within 1 s")
        assert "retry-after" in response.headers
    assert waiting == 0
    assert gate.calls == [5]  # what nobody waits for any more is not computed


def test_shutdown_answers_what_was_accepted_and_takes_no_more(gated: tuple[Predictor, Gate]) -> None:
    predictor, gate = gated
    app = create_app(predictor, Settings(batch_wait=0.0, max_batch=5))

    async def ending() -> tuple[list[httpx.Response], list[httpx.Response]]:
        async with client(app, lifespan=False) as inner:
            async with app.router.lifespan_context(app):
                pass  # a first life
            start = app.router.lifespan_context(app)
            await start.__aenter__()
            accepted = [
                asyncio.create_task(inner.post("/v1/predict", json={"images": IMAGES.tolist()})) for _ in range(4)
            ]
            while app.state.service.batcher.waiting < 15 or not gate.calls:
                await asyncio.sleep(0.001)
            end = asyncio.create_task(start.__aexit__(None, None, None))
            await asyncio.sleep(0.01)
            late = [await inner.post("/v1/predict", json={"images": IMAGES.tolist()}), await inner.get("/readyz")]
            assert not end.done()
            gate.open.set()
            answers = await asyncio.gather(*accepted)
            await end
            return list(answers), late

    answers, (late, ready) = asyncio.run(ending())
    assert [response.status_code for response in answers] == [200] * 4
    refused(late, 503, "stopping")
    assert (ready.status_code, ready.json()["status"]) == (503, "stopping")


def test_a_model_that_hangs_does_not_hang_the_shutdown(gated: tuple[Predictor, Gate]) -> None:
    predictor, gate = gated

    async def hanging(timeout: float, answer_timeout: float) -> tuple[float, bool, int]:
        app = create_app(predictor, Settings(answer_timeout=answer_timeout, shutdown_timeout=timeout, batch_wait=0.0))
        async with client(app, lifespan=False) as inner:
            service = app.state.service
            service.batcher.start()
            asked = asyncio.create_task(inner.post("/v1/predict", json={"images": IMAGES.tolist()}))
            while service.batcher.busy_for < 1.2:
                await asyncio.sleep(0.01)
            begin = time.perf_counter()
            free = await service.batcher.close(timeout)
            took = time.perf_counter() - begin
            gate.open.set()
            asked.cancel()
            return took, free, len(gate.calls)

    took, free, _ = asyncio.run(hanging(0.3, 30.0))  # somebody waits: as long as was agreed
    assert (0.25 < took < 5, free) == (True, False)
    gate.open.clear()
    took, free, _ = asyncio.run(hanging(20.0, 1.0))  # the client has its 503: no longer than a second
    assert (took < 5, free) == (True, False)


def test_health_and_readiness(gated: tuple[Predictor, Gate]) -> None:
    predictor, gate = gated
    app = create_app(predictor, Settings(answer_timeout=0.5, batch_wait=0.0))
    assert ask(app, "GET", "/readyz", lifespan=False).json() == {"status": "starting", "detail": None}

    async def stuck() -> list[httpx.Response]:
        async with client(app) as inner:
            fine = [await inner.get("/healthz"), await inner.get("/readyz")]
            await inner.post("/v1/predict", json={"images": IMAGES.tolist()})  # times out; the model hangs on
            while app.state.service.batcher.busy_for < 1.1:
                await asyncio.sleep(0.05)
            hung = [await inner.get("/healthz"), await inner.get("/readyz")]
            gate.open.set()
            return fine + hung

    found = asyncio.run(stuck())
    assert [response.status_code for response in found] == [200, 200, 503, 503]
    assert found[2].json()["status"] == "stuck"


def test_reading_has_threads_and_a_bound_of_its_own(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoders that do not come back: later requests are refused at once, time out from their arrival, and readiness says so."""
    go, begun = threading.Event(), list[str]()

    def stuck(*arguments: object) -> np.ndarray:
        begun.append(threading.current_thread().name)
        assert go.wait(30)
        return np.zeros(SHAPE, np.float32)

    monkeypatch.setattr("keepcover.serve.reading.decode", stuck)
    app = create_app(predictor, Settings(answer_timeout=2.0, max_queue=THREADS + 2, max_images=1))

    async def crowd() -> list[httpx.Response]:
        async with client(app) as inner:

            def one() -> asyncio.Task[httpx.Response]:
                return asyncio.create_task(inner.post("/v1/predict", files={"images": b"x"}))

            asked = [one() for _ in range(THREADS + 2)]
            while len(begun) < THREADS or not app.state.service.reader.pool.full:
                await asyncio.sleep(0.001)
            found = [await one(), await inner.get("/readyz"), await inner.get("/healthz")]
            found += await asyncio.gather(*asked)
            found.append(await inner.get("/readyz"))  # no longer full, but the oldest has waited for long
            go.set()
            while app.state.service.reader.pool.behind > 0:
                await asyncio.sleep(0.001)
            return [*found, await inner.get("/readyz")]

    full, ready, healthy, *late, behind, again = asyncio.run(crowd())
    refused(full, 503, "overloaded", "requests wait to be read")
    assert (ready.status_code, ready.json()["status"], healthy.status_code) == (503, "overloaded", 200)
    for response in late:
        refused(response, 503, "timeout", "no answer within 2 s")
    assert (behind.status_code, again.status_code) == (503, 200)
    assert len(begun) == THREADS  # what was given up while it waited was never begun
    assert all(name.startswith("keepcover-read") for name in begun)


# -- the token ---------------------------------------------------------------------------------------------------------


def test_with_a_token_only_health_is_open(predictor: Predictor) -> None:
    app = create_app(predictor, Settings(token=TOKEN))
    for path in ("/healthz", "/readyz"):
        assert ask(app, "GET", path).status_code == 200
    for method, path in (
        ("GET", "/v1/predictor"),
        ("GET", "/metrics"),
        ("GET", "/openapi.json"),
        ("POST", "/v1/predict"),
    ):
        for header in (
            None,
            TOKEN,
            "Bearer",
            "Bearer ",
            f"Bearer {TOKEN[:-1]}",
            f"Bearer {TOKEN}x",
            f"Basic {TOKEN}",
            "Bearer é",
        ):
            headers = {} if header is None else {"authorization": header.encode("latin-1")}
            response = ask(app, method, path, headers=headers)
            refused(response, 401, "unauthorized", "Authorization: Bearer TOKEN")
            assert response.headers["www-authenticate"] == "Bearer"
        assert ask(app, method, path, headers={"authorization": f"Bearer {TOKEN}"}).status_code in (200, 415)


def test_an_unauthorised_body_is_not_read(predictor: Predictor) -> None:
    read: list[bytes] = []

    async def body() -> AsyncIterator[bytes]:
        read.append(b"x")
        yield b"x"

    app = create_app(predictor, Settings(token=TOKEN))
    assert ask(app, "POST", "/v1/predict", content=body()).status_code == 401
    assert app.state.service.metrics.own("accepted_total") == 0


def test_tokens_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is header, one comparison of two digests of equal length, by the function made for it."""
    import hmac

    compared: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: (compared.append((a, b)), real(a, b))[1])
    bearer = Bearer(TOKEN)
    for header in ("", "Bearer 0", f"Bearer {TOKEN[:-1]}", f"Bearer {'x' * 10_000}", f"Bearer {TOKEN}"):
        if header.endswith(TOKEN):
            bearer.check(header)
        else:
            with pytest.raises(Problem):
                bearer.check(header)
    assert len(compared) == 5
    assert {(len(a), len(b)) for a, b in compared} == {(32, 32)}


# -- repeated queries --------------------------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_same_image_is_answered_so_often_and_no_more(predictor: Predictor) -> None:
    app = create_app(predictor, Settings(repeat_limit=2, repeat_window=50.0))
    app.state.service.repeats._clock = clock = Clock()

    async def many() -> list[httpx.Response]:
        async with client(app) as inner:

            async def one(images: Tensor) -> httpx.Response:
                return await inner.post("/v1/predict", json={"images": images.tolist()})

            same, other = IMAGES[:1], IMAGES[1:2]
            found = [await one(same), await one(same), await one(same), await one(other)]
            found.append(await one(torch.cat([other, same])))  # one of two images is too many: none is counted
            found.append(await one(other))
            clock.now = 50.0
            found += [await one(same), await one(same.repeat(2, 1, 1, 1)), await one(same)]
            return found

    found = asyncio.run(many())
    assert [r.status_code for r in found] == [200, 200, 429, 200, 429, 200, 200, 429, 200]
    refused(found[2], 429, "repeated", "the same image at most 2 times in 50 s: the guarantee is per query")
    assert found[2].headers["retry-after"] == "50"


def test_a_file_and_an_array_of_the_same_pixels_are_the_same_image(predictor: Predictor) -> None:
    app = create_app(predictor, Settings(repeat_limit=1))

    grey = np.arange(0, 256, 16, dtype=np.uint8).reshape(4, 4)

    async def both() -> list[int]:
        async with client(app) as inner:
            pixels = (grey.astype(np.float32) / np.float32(255)).tolist()
            first = await inner.post("/v1/predict", json={"images": [[pixels]]})
            second = await inner.post("/v1/predict", files={"images": file_of(grey)})
            return [first.status_code, second.status_code]

    assert asyncio.run(both()) == [200, 429]


def test_what_the_queue_refuses_is_not_counted(gated: tuple[Predictor, Gate]) -> None:
    predictor, gate = gated
    app = create_app(predictor, Settings(repeat_limit=1, max_queue=1, max_images=1, batch_wait=0.0))

    async def crowd() -> list[int]:
        async with client(app) as inner:

            def one(k: int) -> asyncio.Task[httpx.Response]:
                return asyncio.create_task(inner.post("/v1/predict", json={"images": IMAGES[k : k + 1].tolist()}))

            first = one(0)
            while not gate.calls:
                await asyncio.sleep(0.001)
            second = one(1)
            while not app.state.service.batcher.waiting:
                await asyncio.sleep(0.001)
            third = await inner.post("/v1/predict", json={"images": IMAGES[2:3].tolist()})
            gate.open.set()
            await asyncio.gather(first, second)
            again = await inner.post("/v1/predict", json={"images": IMAGES[2:3].tolist()})
            return [third.status_code, again.status_code]

    assert asyncio.run(crowd()) == [503, 200]


@given(
    st.lists(st.tuples(st.floats(0, 5), st.integers(0, 2), st.integers(0, 1)), max_size=60),
    st.integers(1, 3),
    st.floats(1, 10),
)
@patient
def test_no_window_ever_holds_more_than_the_limit(
    steps: list[tuple[float, int, int]], limit: int, window: float
) -> None:
    """And whatever the limit would allow is allowed."""
    clock = Clock()
    repeats = RepeatLimit(limit, window, entries=1000, clock=clock)
    answered: dict[tuple[int, int], list[float]] = {}
    for pause, image, who in steps:
        clock.now += pause
        past = answered.setdefault((image, who), [])
        room = sum(at > clock.now - window for at in past) < limit
        if room:
            repeats.count(f"192.0.2.{who}", IMAGES[image : image + 1])
            past.append(clock.now)
        else:
            with pytest.raises(Problem, match="the same image at most"):
                repeats.count(f"192.0.2.{who}", IMAGES[image : image + 1])


def test_the_memory_of_repeats_is_bounded_and_keyed() -> None:
    one, two = (RepeatLimit(1, 60.0, entries=10) for _ in range(2))
    for k in range(100):
        one.count("192.0.2.1", torch.full((1, *SHAPE), k / 100))
    assert len(one._times) == 10
    two.count("192.0.2.1", torch.full((1, *SHAPE), 0.99))
    assert not set(one._times) & set(two._times)  # another key, other hashes


@pytest.mark.parametrize(("one", "two"), [("::ffff:192.0.2.1", "192.0.2.1"), ("fe80::1%eth0", "fe80::2%eth0")])
def test_an_address_is_one_client_however_it_is_written(one: str, two: str) -> None:
    repeats = RepeatLimit(1, 60.0, entries=10)
    repeats.count(one, IMAGES[:1])
    with pytest.raises(Problem, match="the same image at most"):
        repeats.count(two, IMAGES[:1])


def test_clients_of_an_ipv6_socket_have_their_own_addresses() -> None:
    repeats = RepeatLimit(1, 60.0, entries=10)
    for k in range(5):
        repeats.count(f"::ffff:192.0.2.{k}", IMAGES[:1])


# -- the connection ----------------------------------------------------------------------------------------------------


def over_sockets(app: FastAPI, use: Callable[[int], Awaitable[T]], host: str = "127.0.0.1", **options: Any) -> T:
    """The application on a port of this machine while ``use`` lasts."""

    async def whole() -> T:
        config = uvicorn.Config(
            app, http=Protocol, ws="none", log_config=None, lifespan="on", timeout_keep_alive=60, **options
        )
        server = uvicorn.Server(config)
        listener = bind(host, 0)
        running = asyncio.create_task(server.serve([listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            return await use(listener.getsockname()[1])
        finally:
            server.should_exit = True
            await running

    return asyncio.run(whole())


GET = b"GET /healthz HTTP/1.1\r\nhost: x\r\n"


async def asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes = GET + b"\r\n") -> bytes:
    writer.write(request)
    async with asyncio.timeout(10):
        return await reader.readuntil(b"}")


def test_idle_connections_make_room_for_others(
    predictor: Predictor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Forty silent sockets where eight may be: the oldest silent ones go; who asks, and who has asked, stays."""
    monkeypatch.setattr(Protocol, "most", 8)
    app = create_app(predictor)

    async def crowd(port: int) -> tuple[list[bytes], int]:
        regular = await asyncio.open_connection("127.0.0.1", port)
        answers = [await asked(*regular)]
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
        late = await asyncio.open_connection("127.0.0.1", port)
        answers += [await asked(*late), await asked(*regular)]
        await asyncio.sleep(0.1)
        closed = sum(reader.at_eof() or reader.exception() is not None for reader, _ in silent)
        for _, writer in (regular, late, *silent):
            writer.close()
        return answers, closed

    answers, closed = over_sockets(app, crowd)
    assert [answer.split()[1] for answer in answers] == [b"200"] * 3
    assert closed == 40 - 6
    said = [record for record in caplog.records if "the longest idle are closed" in record.getMessage()]
    seldom = Seldom()
    assert len(said) == 34
    assert sum(seldom.filter(record) for record in said) == 1
    later = Seldom(pause=0.0)
    assert all(later.filter(record) for record in said)


def test_connections_fit_the_files_that_may_be_open() -> None:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert Protocol.most == most_connections()
    assert 16 <= Protocol.most <= 1024
    assert Protocol.most + 2 * BACKLOG < files or Protocol.most == 16


def test_the_limit_of_headers_is_exact_however_they_arrive(predictor: Predictor) -> None:
    def head(size: int) -> bytes:
        plain = len("/healthz") + len("host") + len("x") + 4
        return GET + b"x: " + b"a" * (size - plain - len("x") - 4) + b"\r\n\r\n"

    async def sizes(port: int) -> list[bytes]:
        found = []
        for size in (HEAD, HEAD + 1, HEAD + 1024):
            for pieces in (1, 8):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                request = head(size)
                cut = -(-len(request) // pieces)
                for at in range(0, len(request), cut):
                    writer.write(request[at : at + cut])
                    await asyncio.sleep(0.01 if pieces > 1 else 0)
                async with asyncio.timeout(10):
                    found.append((await reader.readuntil(b"\r\n")).split()[1])
                writer.close()
        return found

    app = create_app(predictor)
    assert over_sockets(app, sizes, h11_max_incomplete_event_size=2 * HEAD) == [b"200"] * 2 + [b"431"] * 4
    refused(ask(app, "GET", "/healthz", headers={"x": "a" * HEAD}), 431, "headers_too_large", "exceed 16384 bytes")


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
def test_the_log_names_ipv4_clients_of_an_ipv6_socket_plainly(
    predictor: Predictor, caplog: pytest.LogCaptureFixture
) -> None:
    async def once(port: int) -> bytes:
        streams = await asyncio.open_connection("127.0.0.1", port)
        answer = await asked(*streams)
        streams[1].close()
        return answer

    with caplog.at_level(logging.INFO, "keepcover.serve"):
        assert b"200" in over_sockets(create_app(predictor), once, host="::")
    (line,) = (vars(record)["fields"] for record in caplog.records if record.getMessage() == "request")
    assert line["client"] == "127.0.0.1"


def test_clients_that_neither_ask_nor_leave_are_hung_up_on(
    predictor: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silence, half a header, and a body that goes on after its answer; a client that asks keeps its connection."""
    monkeypatch.setattr(Protocol, "idle", 0.3)
    app = create_app(predictor, Settings(max_body=1000))

    async def four(port: int) -> tuple[list[bytes], bytes]:
        async def rude(first: bytes, more: bytes = b"") -> bytes:
            """Whatever comes back until the server hangs up."""
            reader, writer = await asyncio.open_connection("127.0.0.1", port)

            async def go_on() -> None:
                while more:
                    writer.write(more)
                    await asyncio.sleep(0.02)

            writer.write(first)
            speaking, answer = asyncio.create_task(go_on()), b""
            try:
                async with asyncio.timeout(10):
                    while piece := await reader.read(10_000):
                        answer += piece
            except ConnectionError:
                pass
            finally:
                speaking.cancel()
                writer.close()
            return answer

        async def polite() -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            answer = b""
            for _ in range(8):
                writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
                answer += await reader.readuntil(b"}")
                await asyncio.sleep(0.15)
            writer.close()
            return answer

        post = b"POST /v1/predict HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        endless = post + b"transfer-encoding: chunked\r\n\r\n"
        found = await asyncio.gather(rude(b""), rude(post), rude(endless, b"3e8\r\n" + b"x" * 1000 + b"\r\n"), polite())
        return list(found[:3]), found[3]

    (silent, half, endless), polite = over_sockets(app, four)
    assert (silent, half) == (b"", b"")
    assert b" 413 " in endless
    assert polite.count(b"HTTP/1.1 200") == 8
