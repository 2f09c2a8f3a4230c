"""A subject that is ready in a moment: tests of the explorer share it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import uvicorn
from torch import nn

from keepcover.data import Labelled
from keepcover.engine.smoother import Smoother
from keepcover.explore.answers import Explorer
from keepcover.explore.app import create_app
from keepcover.explore.lineup import Lineup
from keepcover.explore.subject import Subject

NAMES = ("circle", "square", "<b>star</b>", "cross")
SIGMA = 0.5


def toy_data(n: int = 460, seed: int = 0) -> Labelled:
    """Four corners of a 4 x 4 picture, bright where the class is, blurred by enough noise to be uncertain."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (n,), generator=generator)
    images = 0.35 + 0.12 * torch.randn(n, 1, 4, 4, generator=generator)
    for k in range(4):
        row, column = 2 * (k // 2), 2 * (k % 2)
        images[labels == k, :, row : row + 2, column : column + 2] += 0.3
    return Labelled("corners", images.clamp(0, 1), labels, NAMES)


def toy_model() -> nn.Module:
    """Logits are the brightness of the corners: linear, so attacks and sets are quick and not trivial."""
    layer = nn.Linear(16, 4, bias=False)
    with torch.no_grad():
        layer.weight.zero_()
        for k in range(4):
            for row in range(2):
                for column in range(2):
                    layer.weight[k, (2 * (k // 2) + row) * 4 + 2 * (k % 2) + column] = 3.0
    return nn.Sequential(nn.Flatten(), layer).eval()


def toy_subject() -> Subject:
    holdout, calibration, gallery = toy_data().split(60, 250, 150)
    return Subject("corners", Smoother(toy_model(), SIGMA), gallery, holdout, calibration)


EPSILONS = (0.0, 0.1, 0.2, 0.3)


def toy_explorer() -> Explorer:
    return Explorer(Lineup(toy_subject(), alphas=(0.1, 0.2), draws=(4, 64), epsilons=EPSILONS))


@contextmanager
def running(explorer: Explorer) -> Iterator[str]:
    """The explorer on a free port of this machine, in a thread."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(create_app(explorer), log_level="error", ws="none")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        deadline = time.monotonic() + 30
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.02)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        server.should_exit = True
        thread.join(timeout=10)
