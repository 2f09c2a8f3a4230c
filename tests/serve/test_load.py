"""The service under load, in its own process, from this one over the loopback interface. ``make load-test``.

Every run writes its row (rates, percentiles, memory) to ``out/load/serve.json``.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from keepcover.evaluation.manifest import manifest, write_results

from .serving import NAMES, Reply, Server, load, make_predictor, start

pytestmark = pytest.mark.load
OUT = Path("out/load/serve.json")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("load") / "predictor.safetensors"
    make_predictor().save(path, fingerprint="quadrants")  # a string stands for the function, however it is written
    return path


@pytest.fixture(scope="module")
def rows() -> Iterator[dict[str, Any]]:
    found: dict[str, Any] = {}
    begin = time.monotonic()
    yield found
    about = manifest("make load-test", {"cores": os.cpu_count(), "images per request": 1}, time.monotonic() - begin)
    write_results(OUT, [{"name": name, **row} for name, row in found.items()], about)


def right(reply: Reply) -> bool:
    """A 200 with exactly the label of the image that was sent, under the id that was sent."""
    body = reply.json
    return body["request_id"] == reply.request_id and body["sets"] == [
        {"labels": [NAMES[reply.expected]], "indices": [reply.expected], "size": 1, "trivial": False}
    ]


def summary(replies: list[Reply], seconds: float) -> dict[str, Any]:
    times = 1000 * np.array([reply.seconds for reply in replies if reply.status == 200])
    statuses = [reply.status for reply in replies]
    return {
        "requests": len(replies),
        "statuses": {str(s): statuses.count(s) for s in sorted(set(statuses))},
        "answers_per_second": round(len(times) / seconds, 1),
        "seconds": round(seconds, 2),
        **{f"p{q}_ms": round(float(np.percentile(times, q)), 2) for q in (50, 90, 99)},
    }


def counters(server: Server) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics") as response:
        families = text_string_to_metric_families(response.read().decode())
    return {sample.name: sample.value for family in families for sample in family.samples if not sample.labels}


def test_ten_thousand_requests_are_answered_right_and_memory_stays_flat(
    saved: Path, tmp_path: Path, rows: dict[str, Any]
) -> None:
    server = start(saved, "sharp", tmp_path / "log", "--max-queue", "256")
    try:
        load(server.port, 32, 60, "warm")
        before, begin = server.resident(), time.perf_counter()
        replies = load(server.port, 32, 320)
        seconds, after = time.perf_counter() - begin, server.resident()
        counts = counters(server)
    finally:
        code = server.stop()
    rows["steady"] = {**summary(replies, seconds), "connections": 32, "MiB_before": before, "MiB_after": after}
    assert len(replies) == 10_240
    assert {reply.status for reply in replies} == {200}
    assert all(right(reply) for reply in replies)
    assert counts["keepcover_accepted_total"] == counts["keepcover_answered_total"] == 10_240 + 32 * 60
    assert counts["keepcover_batch_images_count"] < 0.8 * counts["keepcover_batch_images_sum"]  # calls were shared
    assert after - before < 16  # MiB; a kilobyte kept per request would be 10
    assert code == 0


def test_monitoring_keeps_the_load(saved: Path, tmp_path: Path, rows: dict[str, Any]) -> None:
    """One server that watches and one that does not, in turns, so that whatever else the machine does slows both. What other
    work cannot change is asserted: the processor time of an answer.
    """
    switches, found = ("--monitor", "--no-monitor"), list[dict[str, dict[str, Any]]]()
    servers = {one: start(saved, "sharp", tmp_path / one, one, "--max-queue", "256") for one in switches}
    try:
        for turn in range(7):
            found.append({})
            for switch in switches if turn % 2 else switches[::-1]:
                server = servers[switch]
                begin, spent = time.perf_counter(), server.cpu()
                replies = load(server.port, 32, 60, f"turn{turn}")
                row = summary(replies, time.perf_counter() - begin)
                found[-1][switch] = {**row, "cpu_ms": 1000 * (server.cpu() - spent) / len(replies)}
                assert {reply.status for reply in replies} == {200}
                assert all((reply.json["ticket"] is None) == (switch == "--no-monitor") for reply in replies)
    finally:
        codes = [server.stop() for server in servers.values()]

    def typical(switch: str, name: str) -> float:  # without the first turn, which warms up
        return round(float(np.median([turn[switch][name] for turn in found[1:]])), 3)

    names = ("answers_per_second", "p50_ms", "p90_ms", "p99_ms", "cpu_ms")
    watched, plain = ({name: typical(switch, name) for name in names} for switch in switches)
    ratios = {name: round(watched[name] / plain[name], 3) for name in ("answers_per_second", "cpu_ms")}
    rows["monitor"] = {**watched, "without": plain, "ratios": ratios, "connections": 32, "requests": 2 * 6 * 32 * 60}
    rows["monitor"] |= {"load_average": round(os.getloadavg()[0], 1)}
    assert ratios["cpu_ms"] < 1.25
    assert codes == [0, 0]


def test_overload_is_answered_with_503_and_survived(saved: Path, tmp_path: Path, rows: dict[str, Any]) -> None:
    """Sixty-four connections at a service that has room for eight images and naps in every call."""
    server = start(saved, "slow", tmp_path / "log", "--max-queue", "8", "--max-batch", "4", "--max-images", "4")
    try:
        begin = time.perf_counter()
        replies = load(server.port, 64, 40)
        seconds = time.perf_counter() - begin
        counts = counters(server)
        calm = load(server.port, 1, 8, "calm")
    finally:
        code = server.stop()
    rows["overload"] = {**summary(replies, seconds), "connections": 64}
    assert {reply.status for reply in replies} == {200, 503}
    accepted = [reply for reply in replies if reply.status == 200]
    assert all(right(reply) for reply in accepted)
    assert len(accepted) == counts["keepcover_accepted_total"] == counts["keepcover_answered_total"]
    for reply in replies:
        if reply.status == 503:
            assert reply.json["error"]["code"] == "overloaded"
            assert 1 <= int(reply.headers["retry-after"]) <= 5
    assert [reply.status for reply in calm] == [200] * 8  # and afterwards it is as before
    assert code == 0


@pytest.mark.parametrize("workers", [1, 2])
def test_sigterm_under_load_loses_no_accepted_request(
    saved: Path, tmp_path: Path, rows: dict[str, Any], workers: int
) -> None:
    """Every id that the server accepted has its answer at the client; connections that broke were never accepted."""
    server = start(saved, "slow", tmp_path / "log", "--max-batch", "4", "--max-images", "4", workers=workers)
    stopped: list[int] = []
    killer = threading.Timer(2.0, lambda: stopped.append(server.stop()))
    killer.start()
    begin = time.perf_counter()
    try:
        replies = load(server.port, 24, None)
    finally:
        killer.join()
    rows[f"sigterm, {workers} worker{'s' if workers > 1 else ''}"] = summary(replies, time.perf_counter() - begin)
    assert stopped == [0]
    drained = server.events("drained")
    assert len(drained) == workers
    answered = {reply.request_id for reply in replies if reply.status == 200}
    assert all(right(reply) for reply in replies if reply.status == 200)
    assert sum(line["accepted"] for line in drained) == sum(line["answered"] for line in drained) == len(answered)
    logged = {line["request_id"] for line in server.events("request") if line["status"] == "200"}
    assert logged == answered
    broken = {reply.request_id for reply in replies if reply.status == 0}
    assert not broken & logged
    assert len(broken) <= 24  # one per connection, at the end
    assert {reply.status for reply in replies} <= {0, 200, 503}
    assert len(answered) > 50


def test_a_model_that_hangs_does_not_keep_the_process(saved: Path, tmp_path: Path) -> None:
    server = start(saved, "trap", tmp_path / "log", "--shutdown-timeout", "2", "--answer-timeout", "60")
    body = json.dumps({"images": [[[[1.0] * 4] * 4]]}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/v1/predict", body, {"content-type": "application/json"}
    )
    outcome: list[str] = []

    def ask() -> None:
        try:
            urllib.request.urlopen(request, timeout=60)
        except Exception as error:
            outcome.append(type(error).__name__)

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(1)
    begin = time.perf_counter()
    assert server.stop() == 1
    assert time.perf_counter() - begin < 20
    asking.join()
    assert outcome
    assert server.events("model hangs")


@pytest.mark.parametrize(
    ("model", "reason"),
    [("other", "the model differs from the one calibrated"), ("broken", "RuntimeError: no such GPU")],
)
def test_workers_that_cannot_start_end_the_parent(saved: Path, tmp_path: Path, model: str, reason: str) -> None:
    """Another model, or a factory that raises, in two workers: one clear line, exit code 3, no endless restarts."""
    begin = time.perf_counter()
    with pytest.raises(AssertionError, match=f"(?s)exit code 3:.*{reason}"):
        start(saved, model, tmp_path / "log", workers=2)
    assert time.perf_counter() - begin < 60


def test_a_worker_that_dies_is_replaced_and_none_outlives_its_parent(saved: Path, tmp_path: Path) -> None:
    server = start(saved, "sharp", tmp_path / "log", workers=2)

    def workers() -> set[int]:
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
        return {int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()}

    def eventually(condition: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + 60
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.1)
        return condition()

    before = workers()
    assert len(before) == 2
    load(server.port, 8, 20, "before")
    victim = min(before)
    os.kill(victim, signal.SIGKILL)
    assert eventually(lambda: len(server.events("Application startup complete.")) == 3)
    assert len(workers() - before) == 1
    replies = load(server.port, 8, 20, "after")
    assert all(reply.status == 200 and right(reply) for reply in replies)
    assert counters(server)["keepcover_answered_total"] == 320  # those of the dead worker included
    left = workers()
    server.process.kill()  # no goodbye
    server.process.wait()
    assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in left))
    assert len(server.events("drained")) == 2
