"""The FastAPI application around one predictor."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import torch
from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from torch import Tensor

import keepcover
from keepcover.errors import InputError
from keepcover.prediction.predictor import Level, Predictor
from keepcover.serve.batching import Batcher
from keepcover.serve.images import takes_files
from keepcover.serve.limits import Bearer, RepeatLimit
from keepcover.serve.logs import log
from keepcover.serve.metrics import CONTENT_TYPE, Metrics
from keepcover.serve.observing import Observe
from keepcover.serve.reading import Query, Reader
from keepcover.serve.schemas import PER_QUERY, Answer, Description, Refusal, State
from keepcover.tasks import PredictionSets
from keepcover.web.bodies import BodyLimit
from keepcover.web.images import FORMATS
from keepcover.web.problems import STATUS, Problem
from keepcover.web.server import bare_app
from keepcover.web.settings import Settings

PREDICT = ["bad_request", "slow_body", "body_too_large", "unsupported_media_type", "invalid", "repeated", "overloaded"]
ABOUT = f"Prediction sets that keep their coverage under attack. {PER_QUERY}"


def image_shape(predictor: Predictor, settings: Settings) -> tuple[int, ...]:
    """The shape of one image: what the predictor was calibrated on, or what the operator says where it does not know."""
    seen, given = predictor.inputs, settings.shape
    known = None if seen is None else seen.shape
    if known is not None and given is not None and known != given:
        raise InputError(f"the predictor was calibrated on images of shape {known}, not {given}; leave the shape out")
    if seen is not None and (seen.low < 0 or seen.high > 1):
        raise InputError(
            f"the service takes values in [0, 1], this predictor was calibrated on [{seen.low:.3g}, {seen.high:.3g}]; scale the "
            "inputs inside the model and calibrate again"
        )
    shape = known or given
    if shape is None:
        raise InputError("this predictor's file does not say the shape of its images; give it, for instance 3x32x32")
    return shape


def warm_up(predictor: Predictor, shape: tuple[int, ...]) -> None:
    """Answer one query for every level, so that a model that does not fit is found before a client finds it."""
    try:
        predictor.predict_all(torch.zeros(1, *shape))
    except (RuntimeError, TypeError, IndexError) as error:  # what models raise at a shape they do not take
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"the model fails on an image of shape {shape}: {reason}; give the right shape") from None


class Service:
    """What the routes share: predictor, queue, limits, counts."""

    def __init__(self, predictor: Predictor, settings: Settings) -> None:
        self.predictor, self.settings = predictor, settings
        predictor.running.progress = False  # without a model there is nothing to serve, and this says so
        self.shape = image_shape(predictor, settings)
        self.reader = Reader(predictor, self.shape, settings)
        self.metrics = Metrics(predictor.classes)
        self.batcher = Batcher(
            self._sets,
            max_batch=settings.max_batch,
            max_wait=settings.batch_wait,
            max_queue=settings.max_queue,
            observe=self.metrics.batch,
        )
        self.bearer = None if settings.token is None else Bearer(settings.token)
        limit = settings.repeat_limit
        self.repeats = None if limit is None else RepeatLimit(limit, settings.repeat_window, settings.repeat_entries)

    def _sets(self, images: Tensor, level: Level) -> PredictionSets:
        # No seed and no ids: a fresh key from the operating system for this call, and positions as ids.
        return self.predictor.predict(images, alpha=level[0], epsilon=level[1])

    async def answer(self, request: Request) -> dict[str, Any]:
        """One clock for everything after the body: parsing, decoding, waiting, the model."""
        read, limit = await self.reader.receive(request), self.settings.answer_timeout
        clock = asyncio.timeout(limit)
        try:
            async with clock:
                return await self._answer(request, read)
        except TimeoutError:
            if not clock.expired():  # the model's own
                raise
            raise Problem("timeout", f"no answer within {limit:g} s; try again later", retry_after=limit) from None

    async def _answer(self, request: Request, read: Callable[[], Query]) -> dict[str, Any]:
        self.batcher.check_room(1)
        query = await self.reader.pool.run(read)
        request.state.images = len(query.images)
        self.batcher.check_room(len(query.images))
        if self.repeats is not None:
            self.repeats.count(request.client.host if request.client else "", query.images)
        job = self.batcher.accept(query.images, query.level)
        self.metrics.accepted.inc()
        self.metrics.queue.set(self.batcher.waiting)
        try:
            sets = await self.batcher.answer(job)
        finally:
            self.metrics.queue.set(self.batcher.waiting)
        self.metrics.answered.inc()
        promise = self.reader.promises[query.level]
        self.metrics.sets(sets.size.tolist(), promise.draws)
        return {
            "request_id": request.state.request_id,
            "guarantee": str(promise),
            "alpha": promise.alpha,
            "epsilon": promise.epsilon,
            "certified": promise.certified,
            "sets": rows(sets),
        }

    def describe(self) -> dict[str, Any]:
        predictor, names = self.predictor, self.predictor.class_names
        return {
            "version": keepcover.__version__,
            "guarantees": [promise.to_dict() for promise in self.reader.promises.values()],
            "per_query": PER_QUERY,
            "classes": predictor.classes,
            "class_names": None if names is None else list(names),
            "image_shape": list(self.shape),
            "pixel_range": [0.0, 1.0],
            "image_files": [name.lower() for name in FORMATS] if takes_files(self.shape) else [],
            "draws": predictor.draws,
            "model_fingerprint": None if predictor.identity is None else predictor.identity.fingerprint,
            "limits": self.settings.limits(),
        }

    def health(self) -> tuple[int, str, str | None]:
        """Alive unless the model has hung: longer in one call than any client would wait twice."""
        stuck = self.batcher.busy_for
        if stuck > 2 * self.settings.answer_timeout:
            return 503, "stuck", f"the model has not come back for {stuck:.0f} s"
        return 200, "ok", None

    def readiness(self) -> tuple[int, str, str | None]:
        status, word, detail = self.health()
        if status == 200 and not self.batcher.alive:
            return 503, "stopping" if self.batcher.stopping else "starting", None
        pool = self.reader.pool
        if status == 200 and (pool.full or pool.behind > self.settings.answer_timeout / 2):
            return 503, "overloaded", f"requests wait {pool.behind:.0f} s to be parsed and decoded"
        return status, word, detail


def rows(sets: PredictionSets) -> list[dict[str, Any]]:
    """The sets as they are sent: labels as text, and their indices beside them."""
    numbers = replace(sets, class_names=None).labels()
    return [
        {**row, "labels": [str(label) for label in row["labels"]], "indices": indices}
        for row, indices in zip(sets.rows(), numbers, strict=True)
    ]


def create_app(predictor: Predictor, settings: Settings | None = None) -> FastAPI:
    """The service as an ASGI application, for uvicorn, Ray Serve or to mount in another application.

    Args:
        predictor: calibrated, or loaded from its file; its model is called from one thread only.
        settings: limits and policies.

    Where it is mounted, the outer application should run ``app.router.lifespan_context(app)`` in its own lifespan:
    that warms the model up and, on shutdown, answers what was accepted. Without it the first request starts the queue.
    """
    settings = settings or Settings()
    service = Service(predictor, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(warm_up, predictor, service.shape)
        service.batcher.start()
        log.info("ready", extra={"fields": {"guarantee": str(predictor.guarantee)}})
        yield
        free = await service.batcher.close(settings.shutdown_timeout)
        counts = {name: service.metrics.own(f"{name}_total") for name in ("accepted", "answered")}
        log.log(logging.INFO if free else logging.ERROR, "drained" if free else "model hangs", extra={"fields": counts})

    app = bare_app("keepcover", lifespan, description=ABOUT)
    app.state.service = service
    # Added last is outermost.
    app.add_middleware(
        BodyLimit, max_body=settings.max_body, max_bodies=settings.max_bodies, timeout=settings.body_timeout
    )
    app.add_middleware(Observe, metrics=service.metrics)
    app.add_exception_handler(Problem, _refuse)
    app.add_exception_handler(HTTPException, _refuse)
    _routes(app, service)
    return app


async def _refuse(request: Request, error: Exception) -> Response:
    problem = Problem.of(error)
    request.state.code = problem.code
    return problem.response(request_id=request.state.request_id)


def _refusals(*codes: str) -> dict[int | str, dict[str, Any]]:
    found: dict[int | str, dict[str, Any]] = {}
    for code in codes:
        headers = {"Retry-After": {"schema": {"type": "integer"}}} if STATUS[code] in (429, 503) else {}
        found[STATUS[code]] = {"model": Refusal, "description": code.replace("_", " "), "headers": headers}
    return found


def _routes(app: FastAPI, service: Service) -> None:
    guarded: dict[str, Any] = {}
    if service.bearer is not None:
        bearer = service.bearer

        async def authorize(request: Request) -> None:
            bearer.check(request.headers.get("authorization"))

        scheme = HTTPBearer(auto_error=False)
        guarded = {"dependencies": [Depends(authorize), Depends(scheme)]}
    unauthorized = ("unauthorized",) if guarded else ()

    @app.post(
        "/v1/predict",
        summary="Prediction sets for images",
        response_model=Answer,
        responses=_refusals(*unauthorized, *PREDICT),
        openapi_extra={"requestBody": service.reader.openapi()},
        **guarded,
    )
    async def predict(request: Request) -> Response:
        return JSONResponse(await service.answer(request))

    @app.get(
        "/v1/predictor",
        summary="The promise, the classes and the limits",
        response_model=Description,
        responses=_refusals(*unauthorized),
        **guarded,
    )
    async def describe() -> Response:
        return JSONResponse(service.describe())

    state: dict[str, Any] = {"response_model": State, "responses": {503: {"model": State}}}

    @app.get("/healthz", summary="Whether the process works", **state)
    async def health() -> Response:
        return _state(*service.health())

    @app.get("/readyz", summary="Whether to send requests here", **state)
    async def readiness() -> Response:
        return _state(*service.readiness())

    @app.get(
        "/metrics",
        summary="Prometheus metrics",
        response_class=PlainTextResponse,
        responses=_refusals(*unauthorized),
        **guarded,
    )
    async def metrics() -> Response:
        return Response(service.metrics.render(), media_type=CONTENT_TYPE)

    @app.get("/openapi.json", include_in_schema=False, **guarded)
    async def schema() -> Response:
        return JSONResponse(app.openapi())


def _state(status: int, word: str, detail: str | None) -> Response:
    return JSONResponse({"status": word, "detail": detail}, status)
