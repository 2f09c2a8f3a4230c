"""Outcomes: what a ticket proves, that it counts once whichever worker it meets, and what is told when a promise breaks."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from keepcover import InputError, Promise
from keepcover.prediction.predictor import Predictor
from keepcover.serve import Settings, create_app
from keepcover.serve.schemas import Outcomes
from keepcover.serve.watching import Watch
from keepcover.web.requests import Problem

from .client import IMAGES, LABELS, TOKEN, ask, client, refused
from .serving import NAMES, bright, make_predictor

LEVEL = (0.1, 0.1)


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return make_predictor()


def ticket_for(watch: Watch, predictor: Predictor, labels: torch.Tensor = LABELS) -> str:
    ticket = watch.ticket(LEVEL, predictor.predict(bright(labels)))
    assert ticket is not None
    return ticket


async def told(app: Any, wrong: int = 0) -> dict[str, Any]:
    """An answer, then its outcomes, with some labels wrong."""
    labels = ((LABELS + (torch.arange(5) < wrong)) % 4).tolist()
    async with client(app) as caller:
        answer = (await caller.post("/v1/predict", json={"images": IMAGES.tolist()})).json()
        body = {"ticket": answer["ticket"], "labels": labels}
        return {
            "first": await caller.post("/v1/outcomes", json=body),
            "again": await caller.post("/v1/outcomes", json=body),
            "few": await caller.post("/v1/outcomes", json={**body, "labels": labels[1:]}),
            "monitor": (await caller.get("/v1/monitor")).json(),
            "metrics": (await caller.get("/metrics")).text,
            "health": await caller.get("/healthz"),
            "routes": (await caller.get("/")).json(),
        }


def test_outcomes_are_counted_once_and_shown(predictor: Predictor) -> None:
    found = asyncio.run(told(create_app(predictor), wrong=2))
    assert found["first"].json() == {"counted": 5, "missed": 2}
    refused(found["again"], 409, "counted", "a ticket counts once")
    refused(found["few"], 422, "invalid", "expected the labels of 5 sets, null where one stays unknown, got 4")
    (level,) = found["monitor"]["levels"]
    assert (level["promise"]["outcomes"], level["promise"]["misses"], level["queries"]["queries"]) == (5, 2, 5)
    assert 'keepcover_outcomes{kind="misses",alpha="0.1",epsilon="0.1"} 2' in found["metrics"]
    assert 'keepcover_alarm{kind="promise",alpha="0.1",epsilon="0.1"} 0' in found["metrics"]
    assert found["health"].status_code == 200
    assert {"GET /", "POST /v1/predict", "POST /v1/outcomes", "GET /v1/monitor"} <= set(found["routes"])


def test_names_indices_and_unknown_labels(predictor: Predictor) -> None:
    watch = Watch(predictor, Settings())
    labels = [NAMES[2], 0, None, None, 0]
    assert watch.outcomes(ticket_for(watch, predictor), labels) == {"counted": 3, "missed": 1}
    assert watch.outcomes(ticket_for(watch, predictor), [None] * 5) == {"counted": 0, "missed": 0}
    assert watch.outcomes(ticket_for(watch, predictor), [-1, None, None, None, None]) == {"counted": 1, "missed": 1}
    for label in [[0]], [[]]:
        with pytest.raises(Problem, match="expected one label per set, got"):
            watch.outcomes(ticket_for(watch, predictor), label * 5)
    for label in ("north", 4, -2):
        with pytest.raises(Problem, match="expected labels as class names or as indices below 4"):
            watch.outcomes(ticket_for(watch, predictor), [label] * 5)


def test_only_a_ticket_of_this_service_counts(predictor: Predictor) -> None:
    now = [1e9]
    watch = Watch(predictor, Settings(ticket_key=TOKEN, ticket_lifetime=60.0), lambda: now[0])
    ticket, labels = ticket_for(watch, predictor), LABELS.tolist()
    raw = bytearray(base64.urlsafe_b64decode(ticket))
    for at in range(len(raw)):  # expiry, number, level, sets, seal
        forged = raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]
        with pytest.raises(Problem, match="expected a ticket of this service"):
            watch.outcomes(base64.urlsafe_b64encode(forged).decode(), labels)
    for other in ("", "é", "AAAA", ticket[4:], f"{ticket}\n"):
        with pytest.raises(Problem, match="expected a ticket of this service"):
            watch.outcomes(other, labels)
    others = Watch(predictor, Settings()), Watch(make_predictor(alpha=0.2), Settings(ticket_key=TOKEN))
    for stranger in others:  # another key, another promise
        with pytest.raises(Problem, match="of the predictor it serves now"):
            stranger.outcomes(ticket, labels)
    now[0] += 61
    with pytest.raises(Problem, match="the ticket has expired; outcomes are taken for 60 s"):
        watch.outcomes(ticket, labels)
    now[0] -= 2
    assert watch.outcomes(ticket, labels)["counted"] == 5


def test_a_ticket_that_expires_while_it_waits_does_not_count_again(predictor: Predictor, tmp_path: Path) -> None:
    """Its number is forgotten at that moment: two workers, one of which waits for the file meanwhile."""
    now, settings = (
        [1e9],
        Settings(ticket_lifetime=60.0, monitor_file=str(tmp_path / "monitor.sqlite"), ticket_key=TOKEN),
    )
    one, two = (Watch(predictor, settings, lambda: now[0]) for _ in range(2))
    ticket, change = ticket_for(one, predictor), two._change
    assert one.outcomes(ticket, LABELS.tolist())["counted"] == 5

    def late(count: Any) -> Any:
        now[0] += 61
        return change(count)

    two._change = late  # type: ignore[method-assign]
    with pytest.raises(Problem, match="expired"):
        two.outcomes(ticket, LABELS.tolist())
    assert two.report()["levels"][0]["promise"]["outcomes"] == 5


def test_many_counted_tickets_do_not_slow_the_next(predictor: Predictor) -> None:
    plan = "EXPLAIN QUERY PLAN DELETE FROM counted WHERE expires < 0"
    assert "USING" in Watch(predictor, Settings())._file.execute(plan).fetchone()[3]


def test_workers_share_state_tickets_and_alarms(
    predictor: Predictor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two processes' worth of monitors over one file: no replay, one sum, each alarm said once; and it outlives them."""
    settings = Settings(monitor_file=str(tmp_path / "monitor.sqlite"))
    workers = [Watch(predictor, settings) for _ in range(2)]
    ticket = ticket_for(workers[0], predictor)
    workers[1].outcomes(ticket, LABELS.tolist())
    with pytest.raises(Problem, match="counted"):
        workers[0].outcomes(ticket, LABELS.tolist())
    wrong = [(label + 1) % 4 for label in LABELS.tolist()]
    with caplog.at_level(logging.WARNING):
        for turn in range(12):
            workers[turn % 2].outcomes(ticket_for(workers[0], predictor), wrong)
    alarms = [record.fields for record in caplog.records if record.getMessage() == "alarm"]  # type: ignore[attr-defined]
    assert [alarm["kind"] for alarm in alarms] == ["promise"]
    assert alarms[0]["evidence"] >= alarms[0]["alarm_at"] == 200
    later = Watch(predictor, settings).report()["levels"][0]["promise"]
    assert (later["outcomes"], later["misses"]) == (65, 60)
    assert later["since"] is not None
    with sqlite3.connect(settings.monitor_file or "") as file:
        assert file.execute("SELECT COUNT(*) FROM counted").fetchone() == (13,)


def test_numbers_are_forgotten_when_their_tickets_expire(predictor: Predictor) -> None:
    now = [1e9]
    watch = Watch(predictor, Settings(ticket_lifetime=60.0), lambda: now[0])
    for _ in range(5):
        watch.outcomes(ticket_for(watch, predictor), LABELS.tolist())
        now[0] += 50
    assert watch._file.execute("SELECT COUNT(*) FROM counted").fetchone() == (2,)


def test_drifting_queries_warn_and_the_service_stays_alive(
    predictor: Predictor, caplog: pytest.LogCaptureFixture
) -> None:
    watch = Watch(predictor, Settings())
    before, after = (predictor.predict(bright(torch.full((200,), label))) for label in (0, 3))
    with caplog.at_level(logging.WARNING):
        for sets in (before, after):
            watch.saw(LEVEL, sets)
            watch.write()
    assert [r.fields["kind"] for r in caplog.records if r.getMessage() == "alarm"] == ["queries"]  # type: ignore[attr-defined]
    assert watch.report()["levels"][0]["promise"]["since"] is None
    app = create_app(predictor)
    app.state.service.watch.outcomes = lambda *_: os.abort()  # never reached by health
    assert ask(app, "GET", "/readyz").json()["status"] == "ok"


def test_nothing_of_a_query_is_kept_but_sums(predictor: Predictor, tmp_path: Path) -> None:
    path = tmp_path / "monitor.sqlite"
    watch = Watch(predictor, Settings(monitor_file=str(path)))
    watch.saw(LEVEL, predictor.predict(IMAGES))
    watch.outcomes(ticket_for(watch, predictor), LABELS.tolist())
    watch.write()
    with sqlite3.connect(path) as file:
        ((state,),) = file.execute("SELECT monitors FROM state").fetchall()
    (kept,) = json.loads(state)
    assert len(state) < 2500
    sums = {"levels", "false_alarm", "luck", "cells", "scores", "outcomes", "streams", "alarms", "about"}
    assert set(kept) == sums
    assert kept["about"] == {"predictor": predictor.digest, "alpha": LEVEL[0], "epsilon": LEVEL[1]}
    assert np.sum(kept["streams"][0]["seen"]) == 10


@pytest.mark.parametrize(
    ("body", "status", "code", "match"),
    [
        (b"{", 400, "bad_request", "expected a JSON object"),
        (b"{}", 422, "invalid", "ticket: Field required"),
        (b'{"ticket": "x", "labels": [1.5]}', 422, "invalid", "labels.0"),
    ],
)
def test_bad_outcomes_are_explained(predictor: Predictor, body: bytes, status: int, code: str, match: str) -> None:
    app, head = create_app(predictor), {"content-type": "application/json"}
    refused(ask(app, "POST", "/v1/outcomes", content=body, headers=head), status, code, match)
    refused(ask(app, "POST", "/v1/outcomes", content=body), 415, "unsupported_media_type")
    closed = create_app(predictor, Settings(token=TOKEN))
    refused(ask(closed, "POST", "/v1/outcomes", content=body, headers=head), 401, "unauthorized")
    refused(ask(closed, "GET", "/v1/monitor"), 401, "unauthorized")


def test_long_outcomes_are_refused_before_they_are_parsed(predictor: Predictor) -> None:
    """Eight MiB of wrong labels took minutes of the event loop and gigabytes of errors."""
    app, head = create_app(predictor), {"content-type": "application/json"}
    body = b'{"ticket": "x", "labels": [' + b"1.5," * 2**18 + b"1]}"
    refused(
        ask(app, "POST", "/v1/outcomes", content=body, headers=head),
        413,
        "body_too_large",
        "expected a body of at most",
    )
    for labels in ("1.5," * 1000 + "1", f"[{'1.5,' * 1000}1]"):
        with pytest.raises(ValidationError) as error:
            Outcomes.model_validate_json(f'{{"ticket": "x", "labels": [{labels}]}}')
        assert error.value.error_count() < 9
    longest = Watch(predictor, Settings(max_images=5))
    text = json.dumps({"ticket": ticket_for(longest, predictor), "labels": [max(NAMES, key=len)] * 5}, indent=8)
    assert len(text) < longest.longest < 1024 + 4 * len(text)


def test_a_promise_that_cannot_be_watched_is_served_all_the_same() -> None:
    made = make_predictor(method="cp_smoothed", promise=Promise(label_weights=(1.0, 1.0, 2.0, 1.0)))
    found = asyncio.run(told(create_app(made)))
    refused(found["first"], 422, "invalid", "")
    assert "label_weights" in found["monitor"]["off"]


def test_settings_of_the_monitor_are_checked(predictor: Predictor, tmp_path: Path) -> None:
    for change, match in (
        ({"false_alarm": 0.0}, "expected false_alarm strictly between 0 and 1, got 0"),
        ({"ticket_lifetime": 0.0}, "expected ticket_lifetime in seconds"),
        ({"ticket_key": "short"}, "expected a ticket_key of at least 16 ASCII"),
    ):
        with pytest.raises(InputError, match=match):
            Settings(**change)
    assert TOKEN not in repr(Settings(ticket_key=TOKEN))
    with pytest.raises(InputError, match=r"cannot keep the monitor in .*local disk"):
        create_app(predictor, Settings(monitor_file=str(tmp_path)))


def test_the_monitor_can_be_switched_off(predictor: Predictor) -> None:
    watch = Watch(predictor, Settings(monitor=False))
    assert watch.ticket(LEVEL, predictor.predict(IMAGES)) is None
    assert watch.report() == {"off": "it was switched off", "levels": []}
    with pytest.raises(Problem, match="no monitor: it was switched off"):
        watch.outcomes("ticket", [0])


@pytest.mark.parametrize("junk", ["{", "[1]", "[{}]", "7"])
def test_a_damaged_monitor_file_is_refused_at_the_start(predictor: Predictor, tmp_path: Path, junk: str) -> None:
    settings = Settings(monitor_file=str(tmp_path / "monitor.sqlite"))
    Watch(predictor, settings)
    with sqlite3.connect(tmp_path / "monitor.sqlite") as file:
        file.execute("UPDATE state SET monitors = ?", (junk,))
    with pytest.raises(InputError, match="state that no monitor wrote"):
        Watch(predictor, settings)
    (tmp_path / "other.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(InputError, match="cannot keep the monitor in"):
        Watch(predictor, Settings(monitor_file=str(tmp_path / "other.sqlite")))
