"""``keepcover evidence``: from a file alone, with everything, and with what is wrong."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from torch import nn

import keepcover
from tests.cli.runner import as_json, refused, run
from tests.pages.reader import offline
from tests.toys import nearest, toy


def make_nearest() -> nn.Module:
    return nearest()


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(sys.modules, "own_models", sys.modules[__name__])
    monkeypatch.chdir(tmp_path)
    images, labels = toy(60, seed=2)
    save_file({"images": images, "labels": labels}, tmp_path / "toy.safetensors")
    made = keepcover.calibrate(
        nearest(), toy(300, seed=1), epsilon=(0.05, 0.1), sigma=0.1, draws=4, method="exact", seed=0
    )
    made.save(tmp_path / "p.safetensors")
    return tmp_path / "p.safetensors"


MODEL = ["--model", "own_models:make_nearest"]


@pytest.fixture
def service(saved: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Something that answers at ``/v1/monitor`` as a service does, to those who bring the token."""
    predictor = keepcover.load(saved)
    levels = [keepcover.monitor(predictor, alpha=a, epsilon=e).report() for a, e in predictor.levels]
    state: dict[str, Any] = {"off": None, "levels": levels}

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            allowed = self.headers.get("authorization") == "Bearer secret" and self.path == "/v1/monitor"
            moved = self.path.startswith("/elsewhere")
            self.send_response(302 if moved else 200 if allowed else 401)
            if moved:
                self.send_header("location", "/v1/monitor")
            self.end_headers()
            self.wfile.write(json.dumps(state).encode() if allowed else b"")

        def log_message(self, *_: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", state
    server.shutdown()
    server.server_close()


def test_from_the_file_to_the_page(
    saved: Path, service: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, _ = service
    attacked = ["--steps", "2", "--attack-draws", "2", "--images", "20"]
    printed = as_json(capsys, "audit", "--predictor", saved, *MODEL, "--data", "toy.safetensors", *attacked)
    Path("audit.json").write_text(json.dumps(printed))
    given = [*MODEL, "--data", "toy.safetensors", "--audit", "audit.json", "--card", "card.md", "--epsilon", "0.1"]
    assert "answers 401; set KEEPCOVER_TOKEN" in refused(capsys, "evidence", saved, *given, "--monitor", address)
    monkeypatch.setenv("KEEPCOVER_TOKEN", "secret")
    found = as_json(capsys, "evidence", saved, *given, "--monitor", f"{address}/v1/monitor")
    assert found["verdict"].startswith(
        "3 audited observations are consistent with the promise. In production 0 outcomes"
    )
    assert len(found["monitors"]) == len(found["promises"]) == 2
    assert found["threat"]["epsilon"] == 0.1
    assert "audit.json, SHA-256" in found["origin"]["audit 1"]
    page = Path("evidence.html").read_text()
    offline(page)
    assert page.count("data:image/png") == 15
    assert json.loads(Path("evidence.json").read_text())["verdict"] == found["verdict"]
    assert Path("card.md").read_text().startswith("## Robustness\n")
    code, out, _ = run(capsys, "evidence", saved, "--out", "only.html")
    assert code == 0
    assert "The promise has not been audited here" in out
    assert Path("only.json").is_file()


def test_what_is_wrong_is_said_in_a_line(saved: Path, service: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no predictor at" in refused(capsys, "evidence", "none.safetensors")
    assert "cannot read none.json" in refused(capsys, "evidence", saved, "--audit", "none.json")
    assert "is the service running?" in refused(capsys, "evidence", saved, "--monitor", "http://127.0.0.1:9")
    for strange in ("ftp://127.0.0.1/x", "http://user:secret@127.0.0.1"):
        assert "http://HOST:PORT or https://" in refused(capsys, "evidence", saved, "--monitor", strange)
    assert "cannot ask" in refused(capsys, "evidence", saved, "--monitor", "http://127.0.0.1:port")
    assert "answers 302" in refused(capsys, "evidence", saved, "--monitor", f"{service[0]}/elsewhere")
    Path("other.json").write_text(json.dumps({"rows": [], "predictors": {}}))
    assert "audit of another predictor" in refused(capsys, "evidence", saved, "--audit", "other.json")
    damaged = bytearray(saved.read_bytes())
    damaged[-1] ^= 1
    saved.write_bytes(bytes(damaged))
    assert "does not match its checksum" in refused(capsys, "evidence", saved)
