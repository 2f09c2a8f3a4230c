"""The FastAPI application around one predictor."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import BaseModel
from torch import Tensor

import keepcover
from keepcover.errors import InputError, refusing
from keepcover.prediction.predictor import Level, Predictor
from keepcover.serve.batching import Batcher, Groups, Query
from keepcover.serve.limits import Bearer, RepeatLimit
from keepcover.serve.observing import Metrics, Observe, log
from keepcover.serve.reading import Reader, takes_files
from keepcover.serve.schemas import PER_QUERY, Counted, Description, Outcomes, Refusal, State, answer_model
from keepcover.serve.watching import Watch
from keepcover.specs import load_predictor
from keepcover.web.images import FORMATS
from keepcover.web.requests import STATUS, Problem, json_of
from keepcover.web.server import bare_app
from keepcover.web.settings import Settings

READ = ("bad_request", "slow_body", "body_too_large", "unsupported_media_type", "invalid")
ABOUT = f"Prediction sets that keep their coverage under attack. {PER_QUERY}"


def image_shape(predictor: Predictor, settings: Settings) -> tuple[int, ...]:
    """The shape of one image: what the predictor was calibrated on, or what the operator says where it does not know."""
    seen, given = predictor.inputs, settings.shape
    known = given if seen is None or seen.shape is None else seen.shape
    if given is not None and known != given:
        raise InputError(f"the predictor was calibrated on images of shape {known}, not {given}; leave the shape out")
    if seen is not None and not seen.tokens and (seen.low < 0 or seen.high > 1):
        found = f"this predictor was calibrated on [{seen.low:.3g}, {seen.high:.3g}]"
        what_to_do = "scale the inputs inside the model and calibrate again"
        raise InputError(f"the service takes values in [0, 1], {found}; {what_to_do}")
    if known is None:
        raise InputError("this predictor's file does not say the shape of its images; give it, for instance 3x32x32")
    return known


def warm_up(predictor: Predictor, shape: tuple[int, ...]) -> None:
    """Answer one query for every level, so that a model that does not fit is found before a client finds it."""
    seen = predictor.inputs
    blank = torch.full((1, *shape), int(seen.low)) if seen is not None and seen.tokens else torch.zeros(1, *shape)
    groups = predictor.rule.asked.promise.groups
    # The exceptions are what models raise at a shape they do not take.
    fails, kinds = f"the model fails on an image of shape {shape}", (RuntimeError, TypeError, IndexError)
    with refusing(fails, *kinds, advice="give the right shape"):
        predictor.predict_all(blank, groups=groups and groups.per[:1])


class Service:
    """What the routes share, predictor, queue, limits and counts, and what they answer."""

    def __init__(self, predictor: Predictor, settings: Settings) -> None:
        self.predictor, self.settings = predictor, settings
        predictor.running.progress = False  # without a model there is nothing to serve, and this says so
        self.shape = image_shape(predictor, settings)
        self.reader = Reader(predictor, self.shape, settings)
        self.metrics = Metrics(predictor.task.candidates)
        self.batcher = Batcher(self._sets, settings, self.metrics)
        self.watch, self.monitoring = Watch(predictor, settings), ThreadPoolExecutor(1, "keepcover-monitor")
        limit = settings.repeat_limit
        self.repeats = None if limit is None else RepeatLimit(limit, settings.repeat_window, settings.repeat_entries)

    def _sets(self, images: Tensor, level: Level, groups: Groups) -> Any:
        """No seed and no ids: a fresh key from the operating system for this call, and positions as ids."""
        how = {"groups": groups, "unknown": self.settings.unknown}
        return self.predictor.predict(images, alpha=level[0], epsilon=level[1], **how)

    async def predict(self, request: Request) -> Response:
        read, limit = await self.reader.receive(request), self.settings.answer_timeout
        clock = asyncio.timeout(limit)  # one for everything after the body: parsing, decoding, waiting, the model
        try:
            async with clock:
                return JSONResponse(await self._answer(request, read))
        except TimeoutError:
            if not clock.expired():  # the model's own
                raise
            raise Problem("timeout", f"no answer within {limit:g} s; try again later", retry_after=limit) from None

    async def _answer(self, request: Request, read: Callable[[], Query]) -> dict[str, Any]:
        self.batcher.check_room(1)
        query = await self.reader.pool.run(read)
        request.state.images = len(query)
        self.batcher.check_room(len(query))
        if self.repeats is not None:
            self.repeats.count(request.client.host if request.client else "", query.images)
        sets, promise = await self.batcher.answer(query), self.reader.promises[query.level]
        self.metrics.sets(sets.size.tolist(), promise.draws, int(sets.trivial.sum()))
        if self.watch.saw(query.level, sets):
            self.monitoring.submit(self.watch.write)
        group = self.predictor.grouped(query.groups, len(sets), self.settings.unknown)
        return {
            "request_id": request.state.request_id,
            "guarantee": str(promise),
            "alpha": promise.alpha,
            "epsilon": promise.epsilon,
            "certified": promise.certified,
            "sets": sets.answers(),
            "ticket": self.watch.ticket(query.level, sets, group),
        }

    async def outcomes(self, request: Request) -> Response:
        given = await json_of(request, Outcomes, self.watch.longest)  # parsing holds up every other answer
        return JSONResponse(await self.watching(self.watch.outcomes, given.ticket, given.labels))

    async def watching(self, work: Callable[..., Any], *given: Any) -> Any:
        """On the one thread that waits for the monitor's file, so that no answer does."""
        return await asyncio.wrap_future(self.monitoring.submit(work, *given))

    def describe(self) -> dict[str, Any]:
        predictor, names = self.predictor, self.predictor.class_names
        return {
            "version": keepcover.__version__,
            "guarantees": [promise.to_dict() for promise in self.reader.promises.values()],
            "per_query": PER_QUERY,
            "warning": predictor.warning,
            "classes": predictor.task.candidates,
            "class_names": names and list(names),
            "groups": self.reader.groups and list(self.reader.groups.values()),
            "image_shape": list(self.shape),
            "pixel_range": list(map(float, self.reader.tokens or (0, 1))),
            "image_files": [name.lower() for name in FORMATS] if takes_files(self.shape) else [],
            "draws": predictor.draws,
            "model_fingerprint": predictor.identity and predictor.identity.fingerprint,
            "limits": self.settings.limits(),
        }

    def state(self, ready: bool) -> Response:
        """Alive unless the model has hung: longer in one call than any client would wait twice. Ready unless it is not
        alive, not running, or behind with what it has taken.
        """
        stuck, pool, limit = self.batcher.busy_for, self.reader.pool, self.settings.answer_timeout
        state = State(status="ok")
        if stuck > 2 * limit:
            state = State(status="stuck", detail=f"the model has not come back for {stuck:.0f} s")
        elif ready and not self.batcher.alive:
            state = State(status="stopping" if self.batcher.stopping else "starting")
        elif ready and (pool.full or pool.behind > limit / 2):
            state = State(status="overloaded", detail=f"requests wait {pool.behind:.0f} s to be parsed and decoded")
        return JSONResponse(state.model_dump(), 200 if state.status == "ok" else 503)


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
        await service.watching(service.watch.write)
        counts = {name: service.metrics.own(f"{name}_total") for name in ("accepted", "answered")}
        log.log(logging.INFO if free else logging.ERROR, "drained" if free else "model hangs", extra={"fields": counts})

    app = bare_app("keepcover", settings, lifespan, ABOUT)
    app.add_middleware(Observe, metrics=service.metrics)  # added last, so it is outermost
    app.state.service = service
    _routes(app, service)
    return app


def _refusals(*codes: str) -> dict[int | str, dict[str, Any]]:
    """What a route may refuse, for OpenAPI."""
    found: dict[int | str, dict[str, Any]] = {}
    for code in codes:
        headers = {"Retry-After": {"schema": {"type": "integer"}}} if STATUS[code] in (429, 503) else {}
        found[STATUS[code]] = {"model": Refusal, "description": code.replace("_", " "), "headers": headers}
    return found


def _reads(content: dict[str, Any], answer: type[BaseModel], *codes: str) -> dict[str, Any]:
    """A route that reads a body, for OpenAPI: what it takes, answers and may refuse."""
    body = {"requestBody": {"required": True, "content": content}}
    return {"response_model": answer, "responses": _refusals(*READ, *codes), "openapi_extra": body}


def _routes(app: FastAPI, service: Service) -> None:
    token, private = service.settings.token, APIRouter()
    if token is not None:
        private = APIRouter(dependencies=[Depends(Bearer(token))], responses=_refusals("unauthorized"))
    about = _reads(service.reader.openapi(), answer_model(service.predictor.task.name), "repeated", "overloaded")
    private.post("/v1/predict", summary="Prediction sets for images", **about)(service.predict)
    about = _reads({"application/json": {"schema": Outcomes.model_json_schema()}}, Counted, "counted")
    private.post("/v1/outcomes", summary="True labels, once they are known", **about)(service.outcomes)

    @private.get("/v1/monitor", summary="Whether the promise is kept and queries are as before")
    async def watched() -> dict[str, Any]:
        return await service.watching(service.watch.report)

    @private.get("/metrics", summary="Prometheus metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        own = await service.watching(service.watch.render)
        return Response(service.metrics.render() + own, media_type=CONTENT_TYPE_PLAIN_0_0_4)

    @private.get("/v1/predictor", summary="The promise, the classes and the limits", response_model=Description)
    async def describe() -> Response:
        return JSONResponse(service.describe())

    @private.get("/openapi.json", include_in_schema=False)
    async def schema() -> Response:
        return JSONResponse(app.openapi())

    @app.get("/", summary="The routes")
    async def index() -> dict[str, str]:
        paths = app.openapi()["paths"].items()
        return {f"{verb.upper()} {path}": about["summary"] for path, verbs in paths for verb, about in verbs.items()}

    unwell: dict[str, Any] = {"response_model": State, "responses": {503: {"model": State}}}

    @app.get("/healthz", summary="Whether the process works", **unwell)
    async def health() -> Response:
        return service.state(ready=False)

    @app.get("/readyz", summary="Whether to send requests here", **unwell)
    async def readiness() -> Response:
        return service.state(ready=True)

    app.include_router(private)


@dataclass(frozen=True)
class Deployment:
    """Names, not objects: it travels to worker processes and to Ray replicas, and each loads its own model.

    Args:
        predictor: what :meth:`Predictor.save` wrote.
        model: see :func:`keepcover.specs.load_model`.
        weights: checkpoint of a built-in model.
        fingerprint: the string given at calibration for a model that is not an ``nn.Module``.
        device: where the model runs; its own choice by default.
        model_output: what an ONNX file returns, ``logits`` or ``probabilities``.
        threads: CPU threads of torch in each process.
        settings: limits and policies.
    """

    predictor: Path
    model: str
    weights: str | Path | None = None
    fingerprint: str | None = None
    device: str | None = None
    model_output: str = "logits"
    threads: int | None = None
    settings: Settings = field(default_factory=Settings)

    def build(self) -> FastAPI:
        """Load the model in this process and build the application around it."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        how = (self.weights, self.device, self.model_output)
        predictor = load_predictor(self.predictor, self.model, *how, fingerprint=self.fingerprint)
        return create_app(predictor, self.settings)
