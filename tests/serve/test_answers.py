"""The HTTP service: right answers, micro-batches, fresh noise, metrics and logs."""

from __future__ import annotations

import asyncio
import json
import logging
import logging.config
import random
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from fastapi import FastAPI
from hypothesis import settings
from prometheus_client.parser import text_string_to_metric_families
from torch import Tensor

import keepcover.prediction.predictor
from keepcover.errors import InputError
from keepcover.noise.stream import Stream
from keepcover.prediction.predictor import Predictor
from keepcover.serve import Settings, create_app
from keepcover.serve.app import image_shape, warm_up
from keepcover.serve.batching import Batcher, Query
from keepcover.serve.observing import JsonFormatter, Metrics, log
from keepcover.serve.observing import config as log_config
from keepcover.serve.schemas import Answer, Description

from . import serving
from .client import IMAGES, LABELS, TOKEN, Gate, ask, client, refused
from .serving import CLASSES, NAMES, ROOT, SHAPE, Recorder, bright, make_predictor

patient = settings(deadline=None, derandomize=True, max_examples=60)


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return make_predictor(alpha=(0.1, 0.2), epsilon=(0.1, 0.05))


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch) -> tuple[Predictor, Gate]:
    return make_predictor(), Gate(monkeypatch)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "predictor.safetensors"
    make_predictor().save(path)  # calibrated with seed 7
    return path


# -- answers -----------------------------------------------------------------------------------------------------------


def test_an_answer_is_the_predictors_sets_with_their_promise(predictor: Predictor) -> None:
    response = ask(create_app(predictor), "POST", "/v1/predict", json={"images": IMAGES.tolist()})
    assert response.status_code == 200
    answer = Answer.model_validate_json(response.content, strict=True)
    assert answer.guarantee == str(predictor.guarantee)
    assert (answer.alpha, answer.epsilon, answer.certified) == (0.1, 0.1, True)
    assert answer.request_id == response.headers["x-request-id"]
    assert response.headers["cache-control"] == "no-store"
    assert [one.indices for one in answer.sets] == [[int(label)] for label in LABELS]
    assert [one.labels for one in answer.sets] == [[NAMES[label]] for label in LABELS]
    assert [(one.size, one.trivial) for one in answer.sets] == [(1, False)] * 5
    assert set(json.loads(response.content)) == {
        "request_id",
        "guarantee",
        "alpha",
        "epsilon",
        "certified",
        "sets",
        "ticket",
    }


def test_without_names_labels_are_indices_and_full_sets_are_called_trivial() -> None:
    with pytest.warns(match="can only return everything"):
        predictor = make_predictor(class_names=None, method="rcp1", epsilon=2.0)
    response = ask(create_app(predictor), "POST", "/v1/predict", json={"images": IMAGES[:1].tolist()})
    assert response.json()["sets"] == [
        {"labels": ["0", "1", "2", "3"], "indices": [0, 1, 2, 3], "size": 4, "trivial": True}
    ]


@pytest.mark.parametrize("level", [(0.1, 0.1), (0.2, 0.1), (0.1, 0.05), (0.2, 0.05)])
def test_every_calibrated_level_is_served(predictor: Predictor, level: tuple[float, float]) -> None:
    body = {"images": IMAGES.tolist(), "alpha": level[0], "epsilon": level[1]}
    answer = ask(create_app(predictor), "POST", "/v1/predict", json=body).json()
    assert (answer["alpha"], answer["epsilon"]) == level
    assert answer["guarantee"] == str(predictor.at(*level).guarantee)


@pytest.mark.parametrize("level", [{"alpha": 0.15}, {"epsilon": 0.0}, {"alpha": 0.1, "epsilon": 9}])
def test_other_levels_are_refused_with_those_there_are(predictor: Predictor, level: dict[str, float]) -> None:
    response = ask(create_app(predictor), "POST", "/v1/predict", json={"images": IMAGES.tolist(), **level})
    refused(response, 422, "invalid", "this predictor was calibrated for (alpha 0.1, epsilon 0.1), (alpha 0.1, ")


def test_the_description_says_what_is_promised_and_to_whom(predictor: Predictor) -> None:
    response = ask(create_app(predictor, Settings(max_images=3)), "GET", "/v1/predictor")
    found = Description.model_validate_json(response.content, strict=True)
    assert [g["statement"] for g in found.guarantees] == [
        str(predictor.at(*level).guarantee) for level in predictor.levels
    ]
    assert all(g["assumptions"] for g in found.guarantees)
    assert "for each query separately" in found.per_query
    assert "not for the best of many repeated queries" in found.per_query
    assert (found.classes, found.class_names, found.image_shape, found.draws) == (CLASSES, NAMES, [1, 4, 4], 2)
    assert (found.limits.max_images, found.limits.repeat_limit, found.limits.resize) == (3, None, "refuse")
    assert predictor.identity is not None
    assert found.model_fingerprint == predictor.identity.fingerprint


# -- batches -----------------------------------------------------------------------------------------------------------


def test_requests_share_calls_and_get_their_own_sets(gated: tuple[Predictor, Gate]) -> None:
    """One request occupies the model while others queue; the next call holds them all, and nobody's sets are mixed up."""
    predictor, gate = gated
    app = create_app(predictor, Settings(max_batch=12, batch_wait=0.0))
    asked = [torch.tensor([k % CLASSES] * (1 + k % 3)) for k in range(8)]  # 15 images: the last request is left over

    async def crowd() -> list[httpx.Response]:
        async with client(app) as inner:

            async def one(labels: Tensor) -> httpx.Response:
                return await inner.post("/v1/predict", json={"images": bright(labels).tolist()})

            first = asyncio.create_task(one(LABELS))
            while not gate.calls:
                await asyncio.sleep(0.001)
            rest = [asyncio.create_task(one(labels)) for labels in asked]
            while app.state.service.batcher.waiting < 15:
                await asyncio.sleep(0.001)
            gate.open.set()
            return await asyncio.gather(first, *rest)

    responses = asyncio.run(crowd())
    assert (len(gate.calls), gate.calls[0], sum(gate.calls)) == (3, 5, 20)
    assert max(gate.calls) <= 12
    for labels, response in zip([LABELS, *asked], responses, strict=True):
        assert [one["indices"] for one in response.json()["sets"]] == [[int(label)] for label in labels]


def test_levels_in_one_batch_keep_their_own_rules(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, float, float]] = []
    inner = Predictor.predict

    def spy(predictor: Predictor, images: Tensor, *, alpha: float, epsilon: float, **rest: Any) -> Any:
        calls.append((len(images), alpha, epsilon))
        return inner(predictor, images, alpha=alpha, epsilon=epsilon, **rest)

    monkeypatch.setattr(Predictor, "predict", spy)
    app = create_app(predictor, Settings(batch_wait=0.2, max_batch=6))

    async def crowd() -> list[httpx.Response]:
        async with client(app) as inner:
            bodies = [{"images": IMAGES[:2].tolist(), "alpha": alpha} for alpha in (0.1, 0.2, 0.1)]
            return await asyncio.gather(*(inner.post("/v1/predict", json=body) for body in bodies))

    responses = asyncio.run(crowd())
    assert [r.json()["alpha"] for r in responses] == [0.1, 0.2, 0.1]
    assert sorted(calls) == [(2, 0.2, 0.1), (4, 0.1, 0.1)]


def test_a_lone_request_does_not_wait_long(predictor: Predictor) -> None:
    async def once() -> float:
        async with client(create_app(predictor, Settings(batch_wait=0.001))) as inner:
            await inner.post("/v1/predict", json={"images": IMAGES.tolist()})
            begin = time.perf_counter()
            await inner.post("/v1/predict", json={"images": IMAGES.tolist()})
            return time.perf_counter() - begin

    assert asyncio.run(once()) < 1


# -- noise -------------------------------------------------------------------------------------------------------------


def noise_of(recorder: Recorder, image: Tensor) -> Tensor:
    """Noise vectors [draws, pixels] in units of sigma, of everything the model has seen."""
    return ((torch.cat(recorder.seen) - image) / 0.1).flatten(1)


def test_every_request_and_every_draw_has_its_own_noise(saved: Path) -> None:
    """Under a predictor that was calibrated with a seed and saved: nothing of that seed is left."""
    recorder = Recorder()
    app = create_app(serving.quiet_load(saved, recorder), Settings(batch_wait=0.01))
    image = IMAGES[:1]

    async def many() -> None:
        async with client(app) as inner:
            recorder.seen.clear()  # of the warm-up
            body, headers = {"images": image.repeat(3, 1, 1, 1).tolist()}, {"x-request-id": "always-the-same"}
            for _ in range(10):
                await asyncio.gather(*(inner.post("/v1/predict", json=body, headers=headers) for _ in range(2)))

    asyncio.run(many())
    noise = noise_of(recorder, image[0])
    assert len(noise) == 20 * 3 * 2  # requests, images, draws
    distances = torch.cdist(noise, noise) + 100 * torch.eye(len(noise))
    assert float(distances.min()) > 0.5
    for role in ("holdout", "calibration", "test"):  # the noise that seed 7 would have given
        guessed = Stream(7, role).gaussian(torch.arange(400), range(0, 2), SHAPE).flatten(0, 1).flatten(1)
        assert float(torch.cdist(noise, guessed).min()) > 0.5
    # The noise is what is certified: standard normal. 1920 values, |mean| * sqrt(n) beyond 4.5 has probability 7e-6.
    assert abs(float(noise.mean())) * noise.numel() ** 0.5 < 4.5


def test_one_key_from_the_operating_system_per_call_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    real = keepcover.prediction.predictor.fresh_seed

    def fresh() -> int:
        drawn.append(real())
        return drawn[-1]

    monkeypatch.setattr(keepcover.prediction.predictor, "fresh_seed", fresh)
    predictor = make_predictor()
    app = create_app(predictor, Settings(batch_wait=0.0))

    async def many() -> int:
        async with client(app) as inner:
            before = len(drawn)
            for _ in range(5):
                await inner.post("/v1/predict", json={"images": IMAGES.tolist()})
            return len(drawn) - before

    assert asyncio.run(many()) == 5
    assert len(set(drawn)) == len(drawn)
    assert max(seed.bit_length() for seed in drawn) > 100


def test_the_same_image_twice_gives_independent_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """One draw decides; a label is in about half of the sets. Within a request and between requests its inclusion is
    uncorrelated: |r| sqrt(n) beyond 4.5 has probability 7e-6 each. The keys are those of a fixed generator here."""
    keys = random.Random(0)
    monkeypatch.setattr(keepcover.prediction.predictor, "fresh_seed", lambda: keys.getrandbits(128))
    predictor = make_predictor(serving.Quadrants(4.0), draws=1, calibration_draws=1)
    levels = torch.linspace(0.2, 0.8, 61)
    share = [
        float(
            predictor.predict(bright(torch.zeros(200, dtype=torch.int64), float(v)), seed=0).mask[:, 0].double().mean()
        )
        for v in levels
    ]
    level = float(levels[int((torch.tensor(share) - 0.5).abs().argmin())])
    doubtful = bright(torch.zeros(8, dtype=torch.int64), level)
    app = create_app(predictor, Settings(batch_wait=0.0))

    async def many() -> list[list[bool]]:
        async with client(app) as inner:
            found = []
            for _ in range(100):
                answer = (await inner.post("/v1/predict", json={"images": doubtful.tolist()})).json()
                found.append([0 in one["indices"] for one in answer["sets"]])
            return found

    included = np.array(asyncio.run(many()), dtype=float)
    assert 0.2 < included.mean() < 0.8
    pairs = [(included[:, ::2], included[:, 1::2]), (included[:-1], included[1:])]
    for one, two in pairs:
        assert abs(np.corrcoef(one.ravel(), two.ravel())[0, 1]) * one.size**0.5 < 4.5


ONE_PROCESS = """
import asyncio, sys, torch, httpx
from keepcover.serve import create_app
from tests.serve import serving
recorder = serving.Recorder()
app = create_app(serving.quiet_load(sys.argv[1], recorder))
async def main():
    async with app.router.lifespan_context(app):
        recorder.seen.clear()
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            await client.post("/v1/predict", json={"images": torch.zeros(1, 1, 4, 4).tolist()})
asyncio.run(main())
print(torch.cat(recorder.seen).flatten().tolist())
"""


def test_two_processes_from_one_file_draw_different_noise(saved: Path) -> None:
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "OMP_NUM_THREADS": "1", "PATH": ""}
    started = [
        subprocess.Popen([sys.executable, "-c", ONE_PROCESS, str(saved)], stdout=subprocess.PIPE, env=environment)
        for _ in range(2)
    ]
    one, two = (torch.tensor(json.loads(process.communicate(timeout=120)[0])) for process in started)
    assert one.shape == two.shape == (32,)
    assert float((one - two).abs().min()) > 0
    assert float((one - two).norm()) > 0.1


@pytest.mark.parametrize(
    "change",
    [
        {"json": {"images": IMAGES.tolist(), "seed": 1}},
        {"json": {"images": IMAGES.tolist()}, "params": {"seed": "1"}},
        {"files": {"images": b"x"}, "data": {"seed": "1"}},
    ],
)
def test_no_seed_can_be_set_over_the_network(predictor: Predictor, change: dict[str, Any]) -> None:
    response = ask(create_app(predictor), "POST", "/v1/predict", **change)
    refused(
        response, 422, "invalid", "noise is drawn fresh from the operating system for every answer and cannot be set"
    )


def test_nothing_that_leaves_the_process_tells_the_key(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Answers, refusals, failures, description, metrics and logs: no part of a key in any spelling."""
    key = 0x0123456789ABCDEF_FEDCBA9876543210
    monkeypatch.setattr(keepcover.prediction.predictor, "fresh_seed", lambda: key)
    predictor = make_predictor()
    app = create_app(predictor, Settings(token=TOKEN))
    texts: list[str] = []

    async def everything() -> None:
        headers = {"authorization": f"Bearer {TOKEN}"}
        async with client(app) as inner:
            paths = ("/v1/predictor", "/metrics", "/healthz", "/readyz", "/openapi.json", "/nowhere")
            texts.extend([_whole(await inner.get(path, headers=headers)) for path in paths])
            bodies = ({"images": IMAGES.tolist()}, {"images": []}, {"images": IMAGES.tolist(), "alpha": 3})
            texts.extend([_whole(await inner.post("/v1/predict", json=body, headers=headers)) for body in bodies])
            monkeypatch.setattr(predictor.running, "_forward", lambda images: images.no_such_thing)
            failed = await inner.post("/v1/predict", json={"images": IMAGES.tolist()}, headers=headers)
            assert failed.status_code == 500
            texts.append(_whole(failed))

    with caplog.at_level(logging.DEBUG):
        asyncio.run(everything())
    lines = [JsonFormatter().format(record) for record in caplog.records]
    assert any("no_such_thing" in line for line in lines)  # the failure is in the log, with its trace
    words = Stream(key, "test")._words("gaussian")
    spellings = [str(key), f"{key:x}", f"{key:X}", "0123456789ABCDEF", "FEDCBA98", *(str(word) for word in words)]
    for text in [*texts, *lines]:
        assert TOKEN not in text
        for spelling in spellings:
            assert spelling.lower() not in text.lower()


def _whole(response: httpx.Response) -> str:
    return response.text + repr(response.headers)


# -- metrics and logs --------------------------------------------------------------------------------------------------


def samples(text: str | bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text if isinstance(text, str) else text.decode())
        for sample in family.samples
    }


def test_metrics_are_prometheus_and_add_up(predictor: Predictor) -> None:
    app = create_app(predictor, Settings(batch_wait=0.0))

    async def some() -> str:
        async with client(app) as inner:
            for images in (IMAGES, IMAGES[:2]):
                await inner.post("/v1/predict", json={"images": images.tolist()})
            await inner.post("/v1/predict", json={})
            await inner.get("/healthz")
            await inner.get("/made/up/path")
            response = await inner.get("/metrics")
            assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
            return response.text

    found = samples(asyncio.run(some()))

    def value(name: str, **labels: str) -> float:
        return found[f"keepcover_{name}", frozenset(labels.items())]

    assert value("requests_total", route="/v1/predict", status="200") == 2
    assert value("requests_total", route="/v1/predict", status="422") == 1
    assert value("requests_total", route="other", status="404") == 1
    assert value("refusals_total", code="invalid") == 1
    assert value("request_seconds_count", route="/v1/predict") == 3
    assert 0 < value("request_seconds_sum", route="/v1/predict") < 30
    assert value("draws_total") == 7 * 2
    assert (value("set_size_count"), value("set_size_sum")) == (7, 7)
    assert (value("set_size_bucket", le="0.0"), value("set_size_bucket", le="1.0")) == (0, 7)
    assert value("set_size_bucket", le="+Inf") == 7
    assert (value("trivial_sets_total"), value("trivial_share")) == (0, 0)
    assert (value("batch_images_count"), value("batch_images_sum")) == (2, 7)
    assert (value("accepted_total"), value("answered_total"), value("queue_images")) == (2, 2, 0)


def test_buckets_and_shares() -> None:
    metrics = Metrics(classes=100)
    metrics.sets([0, 1, 5, 6, 100, 100], draws=3, trivial=2)
    found = samples(metrics.render())
    name = "keepcover_set_size_bucket"
    bounds = {float(dict(labels)["le"]): v for (own, labels), v in found.items() if own == name}
    assert bounds == {0: 1, 1: 2, 2: 2, 3: 2, 5: 3, 10: 4, 20: 4, 50: 4, 100: 6, float("inf"): 6}
    assert found["keepcover_trivial_share", frozenset()] == pytest.approx(1 / 3)
    assert found["keepcover_draws_total", frozenset()] == 18


WORKER = """
import os, sys
from prometheus_client.multiprocess import mark_process_dead
from keepcover.serve.observing import Metrics
metrics = Metrics(10)
sizes = [int(size) for size in sys.argv[2].split(",")]
metrics.sets(sizes, draws=4, trivial=sizes.count(10))
metrics.queue.set(int(sys.argv[1]))
print(os.getpid(), metrics.own("draws_total"), flush=True)
for line in sys.stdin:
    mark_process_dead(int(line)) if line.strip() else sys.stdout.write(metrics.render().decode() + "END\\n")
    sys.stdout.flush()
"""


def test_workers_add_up_their_counters_and_the_dead_leave_no_gauges(tmp_path: Path) -> None:
    source = str(ROOT / "src")
    environment = {"PYTHONPATH": source, "OMP_NUM_THREADS": "1", "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    one, two = (
        subprocess.Popen(
            [sys.executable, "-c", WORKER, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for words in (("5", "1,2"), ("2", "3"))
    )
    assert one.stdin is not None
    assert one.stdout is not None
    assert two.stdout is not None
    first, second = one.stdout.readline().split(), two.stdout.readline().split()
    assert (first[1], second[1]) == ("8", "4")  # its own

    def asked(line: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        one.stdin.write(line)
        one.stdin.flush()
        return samples("".join(iter(one.stdout.readline, "END\n")))

    found = asked("\n")
    assert found["keepcover_draws_total", frozenset()] == 12
    assert found["keepcover_queue_images", frozenset()] == 7
    two.communicate()
    found = asked(f"{second[0]}\n\n")
    assert found["keepcover_draws_total", frozenset()] == 12
    assert found["keepcover_queue_images", frozenset()] == 5
    one.communicate()


def test_logs_are_json_lines_that_tell_requests_apart(predictor: Predictor, caplog: pytest.LogCaptureFixture) -> None:
    app = create_app(predictor)
    with caplog.at_level(logging.INFO):
        ask(app, "POST", "/v1/predict", json={"images": IMAGES.tolist()}, headers={"x-request-id": "mine-1"})
        ask(app, "POST", "/v1/predict", json={"images": []}, headers={"x-request-id": 'evil"\\n{}'})
    lines = [json.loads(JsonFormatter().format(record)) for record in caplog.records if record.name == log.name]
    good, bad = (line for line in lines if line["event"] == "request")
    assert (
        good.items()
        >= {
            "request_id": "mine-1",
            "route": "/v1/predict",
            "status": "200",
            "images": 5,
            "method": "POST",
            "level": "info",
        }.items()
    )
    assert (bad["status"], bad["code"]) == ("422", "invalid")
    assert bad["request_id"].isalnum()  # a fresh one
    assert set(good) == {"time", "level", "event", "request_id", "client", "method", "route", "status", "ms", "images"}
    drained = [line for line in lines if line["event"] == "drained"]
    assert [(line["accepted"], line["answered"]) for line in drained] == [(1, 1), (1, 1)]


def test_exceptions_are_one_line_each_and_config_is_valid() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "f", 1, "failure %s", ("here",), sys.exc_info())
    line = JsonFormatter().format(record)
    assert "\n" not in line
    assert json.loads(line)["event"] == "failure here"
    assert "two\nlines" in json.loads(line)["exception"]
    logging.config.DictConfigurator(log_config("warning"))  # raises on nonsense


def test_a_client_that_hangs_up_is_no_failure(predictor: Predictor, caplog: pytest.LogCaptureFixture) -> None:
    app = create_app(predictor)
    messages = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])

    async def receive() -> Any:
        return next(messages)

    async def send(message: Any) -> None:
        raise AssertionError(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/predict",
        "raw_path": b"/v1/predict",
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "client": ("192.0.2.1", 1),
        "headers": [(b"content-type", b"application/json")],
        "server": ("test", 80),
    }
    with caplog.at_level(logging.INFO):
        asyncio.run(app(scope, receive, send))
    lines = [json.loads(JsonFormatter().format(record)) for record in caplog.records if record.name == log.name]
    assert [(line["event"], line["status"]) for line in lines] == [("request", "gone")]


# -- elsewhere ---------------------------------------------------------------------------------------------------------


def test_it_works_mounted_in_another_application(predictor: Predictor) -> None:
    outer = FastAPI()
    outer.mount("/sets", create_app(predictor, Settings(token=TOKEN)))
    headers = {"authorization": f"Bearer {TOKEN}"}
    response = ask(outer, "POST", "/sets/v1/predict", json={"images": IMAGES.tolist()}, headers=headers)
    assert response.status_code == 200
    refused(ask(outer, "GET", "/sets/metrics"), 401, "unauthorized")
    assert ask(outer, "GET", "/sets/healthz").status_code == 200


def test_the_batcher_outlives_a_call_that_nobody_waits_for() -> None:
    """A client gone while its batch runs: the result is dropped, the next job is served."""
    release = threading.Event()

    def predict(images: Tensor, level: tuple[float, float], groups: None) -> Tensor:
        release.wait(30)
        return images.flatten(1) > 0.5

    async def both() -> Tensor:
        batcher = Batcher(predict, Settings(max_batch=4, batch_wait=0.0), Metrics(CLASSES))
        batcher.start()
        gone = asyncio.create_task(batcher.answer(Query(IMAGES[:1], (0.1, 0.1))))
        while batcher.busy_for == 0:
            await asyncio.sleep(0.001)
        gone.cancel()
        release.set()
        mask = await batcher.answer(Query(IMAGES[1:2], (0.1, 0.1)))
        assert await batcher.close(30.0)
        return mask

    assert torch.equal(asyncio.run(both()), IMAGES[1:2].flatten(1) > 0.5)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"max_batch": 0}, "expected max_batch of at least 1, got 0"),
        ({"repeat_limit": 0}, "expected repeat_limit of at least 1"),
        ({"answer_timeout": 0.0}, "expected answer_timeout in seconds, above 0"),
        ({"body_timeout": float("nan")}, "expected body_timeout in seconds"),
        ({"batch_wait": 1.5}, "expected batch_wait between 0 and 1 second"),
        ({"max_images": 300}, "a request of 300 images never fits a queue of 256"),
        ({"max_body": 2**40}, "max_body .* exceeds max_bodies"),
        ({"resize": "bicubic"}, "expected resize among refuse, stretch, crop, got 'bicubic'"),
        ({"token": "short"}, "at least 16 ASCII characters without spaces, got 5 characters: openssl"),
        ({"token": "x" * 15 + "é" * 5}, "at least 16 ASCII"),
        ({"shape": (3, 0)}, "expected a shape as positive numbers"),
    ],
)
def test_settings_are_checked(change: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        Settings(**change)
    assert TOKEN not in repr(Settings(token=TOKEN))


def test_the_shape_of_images_is_known_or_given(predictor: Predictor, saved: Path) -> None:
    assert image_shape(predictor, Settings()) == image_shape(predictor, Settings(shape=SHAPE)) == SHAPE
    with pytest.raises(InputError, match=r"calibrated on images of shape \(1, 4, 4\), not \(3, 4, 4\)"):
        create_app(predictor, Settings(shape=(3, 4, 4)))
    nameless = replace(serving.quiet_load(saved, serving.sharp()), inputs=None)
    with pytest.raises(InputError, match="does not say the shape of its images; give it, for instance 3x32x32"):
        create_app(nameless)
    assert create_app(nameless, Settings(shape=SHAPE)).state.service.shape == SHAPE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it knows nothing, and is told so
        linear = make_predictor(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, CLASSES)).eval())
    with pytest.raises(InputError, match=r"calibrated on inputs \[n, 1, 4, 4\], got \[1, 1, 5, 5\]"):
        warm_up(linear, (1, 5, 5))
