"""Whatever the OpenAPI schema allows, and much that it forbids, gets the answer the schema describes and never a 5xx."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import schemathesis
import uvicorn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from keepcover.serve import Settings, create_app, watching
from keepcover.web.server import Protocol

from .serving import file_of, make_predictor


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A real server, in a thread of this process."""
    predictor = make_predictor(alpha=(0.1, 0.2), epsilon=(0.1, 0.05))
    # Checked types draw from `random`; a thread that does so while Hypothesis draws looks like a flaky strategy.
    watching.PAUSE = math.inf
    app = create_app(predictor, Settings(max_images=3, max_body=20_000, batch_wait=0.0))
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(app, http=Protocol, ws="none", log_config=None, lifespan="on", loop="asyncio")
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join()
    watching.PAUSE = 1.0


@pytest.fixture(scope="module")
def caller(address: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=address) as caller:
        yield caller


@pytest.fixture(scope="module")
def api(address: str) -> Any:
    return schemathesis.openapi.from_url(f"{address}/openapi.json")


@st.composite
def pictures(draw: st.DrawFn) -> bytes:
    pixels = draw(st.lists(st.integers(0, 255), min_size=16, max_size=16))
    return file_of(np.array(pixels, np.uint8).reshape(4, 4))


def test_every_route_but_the_schema_is_in_the_schema(caller: httpx.Client) -> None:
    paths = caller.get("/openapi.json").json()["paths"]
    assert {path: list(methods) for path, methods in paths.items()} == {
        "/": ["get"],
        "/v1/predict": ["post"],
        "/v1/outcomes": ["post"],
        "/v1/monitor": ["get"],
        "/v1/predictor": ["get"],
        "/healthz": ["get"],
        "/readyz": ["get"],
        "/metrics": ["get"],
    }


@pytest.mark.parametrize("path", ["/", "/v1/monitor", "/v1/predictor", "/healthz", "/readyz", "/metrics"])
def test_what_can_be_read_is_what_the_schema_says(api: Any, path: str) -> None:
    api[path]["GET"].Case().call_and_validate()


patient = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize(
    ("mode", "media_type"),
    [
        (GenerationMode.POSITIVE, "application/json"),
        (GenerationMode.NEGATIVE, "application/json"),
        (GenerationMode.NEGATIVE, "multipart/form-data"),
    ],
)
@given(st.data())
@patient
def test_requests_get_what_the_schema_says(
    api: Any, mode: GenerationMode, media_type: str, data: st.DataObject
) -> None:
    """Status codes, content types, headers and bodies as described; what the schema allows is answered, what it forbids is
    refused; no server error."""
    strategy = api["/v1/predict"]["POST"].as_strategy(mode)
    case = data.draw(strategy.filter(lambda case: case.media_type == media_type))
    case.call_and_validate()


@given(
    st.lists(pictures(), min_size=1, max_size=3), st.sampled_from([None, 0.1, 0.2]), st.sampled_from([None, 0.1, 0.05])
)
@patient
def test_files_get_what_the_schema_says(
    api: Any, caller: httpx.Client, files: list[bytes], alpha: float | None, epsilon: float | None
) -> None:
    """Schemathesis sends files without a name, which no form does; so these are sent here, and it judges the answers."""
    fields = {name: str(value) for name, value in (("alpha", alpha), ("epsilon", epsilon)) if value is not None}
    response = caller.post("/v1/predict", files=[("images", file) for file in files], data=fields)
    assert response.status_code == 200
    assert len(response.json()["sets"]) == len(files)
    response.request.read()
    api["/v1/predict"]["POST"].validate_response(response)


@given(
    st.binary(max_size=300),
    st.sampled_from(
        ["application/json", "multipart/form-data; boundary=x", "multipart/form-data; boundary=", "image/png", "é"]
    ),
    st.sampled_from(["POST", "GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"]),
    st.sampled_from(["/v1/predict", "/v1/predictor", "/metrics", "/healthz", "/", "/v1/%00", "/..;/metrics", "//"]),
)
@patient
def test_anything_at_all_gets_no_server_error(
    caller: httpx.Client, body: bytes, kind: str, method: str, path: str
) -> None:
    headers = {"content-type": kind.encode("latin-1")}
    response = caller.request(method, httpx.URL(caller.base_url, raw_path=path.encode()), content=body, headers=headers)
    assert response.status_code < 500
    assert response.status_code == 200 or method == "HEAD" or response.json()["error"]["message"]
