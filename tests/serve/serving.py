"""What the tests of the HTTP service share: models, predictors, image files, a server process and a bare client.

Server processes find the models by name: ``--model tests.serve.serving:sharp``.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from keepcover.engine.smoother import Smoother
from keepcover.prediction.calibration import calibrate
from keepcover.prediction.predictor import Predictor

SHAPE, CLASSES, NAMES = (1, 4, 4), 4, ["north-west", "north-east", "south-west", "south-east"]
SECONDS_PER_CALL = 0.02
ROOT = Path(__file__).resolve().parents[2]


class Quadrants(nn.Module):
    """Logits: how bright each quadrant is. Under noise of 0.1 a gain of 60 leaves no doubt, a gain of 4 leaves much."""

    def __init__(self, gain: float = 60.0, seconds: float = 0.0) -> None:
        super().__init__()
        self.gain, self.seconds = nn.Parameter(torch.tensor(gain)), seconds

    def forward(self, images: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return self.gain * nn.functional.adaptive_avg_pool2d(images, 2).flatten(1)


def sharp() -> nn.Module:
    return Quadrants().eval()


def slow() -> nn.Module:
    """The same function, with a nap in every call."""
    return Quadrants(seconds=SECONDS_PER_CALL).eval()


def other() -> nn.Module:
    return Quadrants(61.0).eval()


def broken() -> nn.Module:
    raise RuntimeError("no such GPU")


class Trap(Quadrants):
    """Never comes back from a white image."""

    def forward(self, images: Tensor) -> Tensor:
        if float(images.mean()) > 0.7:
            time.sleep(1000)
        return super().forward(images)


def trap() -> nn.Module:
    return Trap().eval()


def bright(labels: Tensor, level: float = 0.95) -> Tensor:
    """Images of which one quadrant is bright and the rest dark."""
    blocks = nn.functional.one_hot(labels, CLASSES).view(-1, 1, 2, 2) * level
    return blocks.repeat_interleave(2, 2).repeat_interleave(2, 3)


def make_predictor(model: nn.Module | None = None, **options: Any) -> Predictor:
    """Calibrated with a known seed: what it serves must not depend on it.

    The calibration images are dim and those of the tests are bright, so their sets are certain: the label and no other.
    """
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (300,), generator=generator)
    images = (bright(labels, 0.5) + 0.05 * torch.rand(300, *SHAPE, generator=generator)).clamp(0, 1)
    request: dict[str, Any] = {
        "epsilon": 0.1,
        "draws": 2,
        "calibration_draws": 2,
        "method": "exact",
        "class_names": NAMES,
        "seed": 7,
    }
    smoother = Smoother(sharp() if model is None else model, 0.1, progress=False)
    return calibrate(smoother, (images, labels), **(request | options))


class Recorder:
    """A classifier that keeps every noisy image it was given."""

    def __init__(self) -> None:
        self.model, self.seen = sharp(), list[Tensor]()

    def __call__(self, images: Tensor) -> Tensor:
        self.seen.append(images.detach().clone())
        return self.model(images)


def file_of(pixels: np.ndarray | Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


# -- a server in another process ---------------------------------------------------------------------------------------


@dataclass
class Server:
    """``keepcover serve`` on a free port of the loopback interface, and the log lines it wrote."""

    process: subprocess.Popen[str]
    log: Path
    port: int = 0
    lines: list[dict[str, Any]] = field(default_factory=list)

    def events(self, name: str) -> list[dict[str, Any]]:
        self.lines = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [line for line in self.lines if line["event"] == name]

    def resident(self) -> float:
        """MiB of memory in use."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024

    def cpu(self) -> float:
        """Seconds of processor time used so far."""
        user, system = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def stop(self, timeout: float = 60) -> int:
        self.process.terminate()
        return self.process.wait(timeout)


def start(predictor: Path, model: str, log: Path, *options: str, workers: int = 1) -> Server:
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    with log.open("w") as stream:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "keepcover",
                "serve",
                str(predictor),
                "--model",
                f"tests.serve.serving:{model}",
                "--fingerprint",
                "quadrants",
                "--port",
                "0",
                "--workers",
                str(workers),
                *options,
            ],
            stderr=stream,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
    server = Server(process, log)
    deadline = time.monotonic() + 120
    while len(server.events("Application startup complete.")) < workers:
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"the server did not start, exit code {process.wait()}: {log.read_text()}")
        time.sleep(0.1)
    server.port = server.events("serving")[0]["port"]
    return server


# -- a client that costs little ----------------------------------------------------------------------------------------


@dataclass
class Reply:
    """An answer; status 0 where the connection ended without one."""

    status: int
    headers: dict[str, str]
    body: bytes
    seconds: float
    request_id: str
    expected: int

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def encoded(label: int, request_id: str) -> bytes:
    """One predict request for an image of this label, ready to write."""
    body = json.dumps({"images": bright(torch.tensor([label])).tolist()}).encode()
    head = (
        f"POST /v1/predict HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\nx-request-id: {request_id}\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def _ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> tuple[int, dict[str, str], bytes]:
    writer.write(request)
    await writer.drain()
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in head[1:] if line)}
    return int(head[0].split()[1]), headers, await reader.readexactly(int(headers["content-length"]))


async def _client(port: int, name: str, requests: int | None, replies: list[Reply]) -> None:
    """One keep-alive connection, one request at a time; ends at the first broken connection."""
    reader = writer = None
    number = 0
    while requests is None or number < requests:
        label, request_id = number % CLASSES, f"{name}-{number}"
        number += 1
        begin = time.perf_counter()
        try:
            if writer is None:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
            assert reader is not None
            found = await _ask(reader, writer, encoded(label, request_id))
        except (OSError, asyncio.IncompleteReadError):
            replies.append(Reply(0, {}, b"", time.perf_counter() - begin, request_id, label))
            break
        replies.append(Reply(*found, time.perf_counter() - begin, request_id, label))
        if found[1].get("connection") == "close":
            writer.close()
            writer = None
    if writer is not None:
        writer.close()


def load(port: int, connections: int, requests: int | None, prefix: str = "r") -> list[Reply]:
    """So many connections at once, each with so many requests (or until the server is gone)."""
    replies: list[Reply] = []

    async def everybody() -> None:
        await asyncio.gather(*(_client(port, f"{prefix}{n}", requests, replies) for n in range(connections)))

    asyncio.run(everybody())
    return replies


def quiet_load(path: Path, model: Any) -> Predictor:
    """Load under a recorder, which stands for the module it runs."""
    from keepcover.engine.fingerprint import fingerprint
    from keepcover.prediction.artifact import load as read

    own = fingerprint(model.model) if isinstance(model, Recorder) else None
    return read(path, model, fingerprint=own, progress=False)
