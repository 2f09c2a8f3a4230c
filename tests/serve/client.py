"""The service in this process: a client, the shape of refusals, a gate in front of the model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import torch
from fastapi import FastAPI
from torch import Tensor

from keepcover.prediction.predictor import Predictor
from keepcover.serve.schemas import Refusal

from .serving import bright

LABELS = torch.tensor([2, 0, 3, 1, 1])
IMAGES = bright(LABELS)
TOKEN = "0123456789abcdef-token"


@asynccontextmanager
async def client(app: FastAPI, lifespan: bool = True) -> AsyncIterator[httpx.AsyncClient]:
    """An in-process client; the application's start and end included."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as inner:
        if not lifespan:
            yield inner
            return
        async with app.router.lifespan_context(app):
            yield inner


def ask(app: FastAPI, method: str, path: str, lifespan: bool = True, **options: Any) -> httpx.Response:
    """One request to a fresh start of the application."""

    async def once() -> httpx.Response:
        async with client(app, lifespan) as inner:
            return await inner.request(method, path, **options)

    return asyncio.run(once())


def refused(response: httpx.Response, status: int, code: str, match: str = "") -> str:
    """The refusal's message; the body is exactly a refusal and holds no trace of code."""
    assert response.status_code == status, response.text
    body = Refusal.model_validate_json(response.content, strict=True)
    assert body.error.code == code
    assert body.request_id == response.headers["x-request-id"]
    assert match in body.error.message, body.error.message
    for word in ("Traceback", "File ", ".py", "Error("):
        assert word not in response.text
    return body.error.message


class Gate:
    """Stands before :meth:`Predictor.predict` and holds every call until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.calls, inner = threading.Event(), list[int](), Predictor.predict

        def held(predictor: Predictor, images: Tensor, **options: Any) -> Any:
            self.calls.append(len(images))
            assert self.open.wait(30)
            return inner(predictor, images, **options)

        monkeypatch.setattr(Predictor, "predict", held)
