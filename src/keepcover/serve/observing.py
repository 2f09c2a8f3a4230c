"""The outermost layer: an id, a log line and a count for every request, and the last word on every exception."""

from __future__ import annotations

import re
import secrets
import time

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from keepcover.serve.limits import check_head
from keepcover.serve.logs import log
from keepcover.serve.metrics import Metrics
from keepcover.web.problems import Problem

_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Observe:
    """ASGI middleware. A client's own ``X-Request-ID`` is kept where it is short and plain."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        start, status = time.perf_counter(), 0
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")
        state = scope.setdefault("state", {})
        state["request_id"] = given if _ID.fullmatch(given) else secrets.token_hex(8)

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = state["request_id"]
                headers["cache-control"] = "no-store"  # the next answer to the same request is another draw
            await send(message)

        async def refuse(problem: Problem) -> None:
            state["code"] = problem.code
            await problem.response(request_id=state["request_id"])(scope, receive, watched)

        try:
            check_head(scope)
            await self.app(scope, receive, watched)
        except ClientDisconnect:
            pass
        except Problem as problem:
            await refuse(problem)
        except Exception:
            log.exception("failure", extra={"fields": {"request_id": state["request_id"]}})
            if not status:
                await refuse(Problem("internal", "the service failed on this request; it is logged under its id"))
        finally:
            self._note(scope, str(status or "gone"), time.perf_counter() - start)

    def _note(self, scope: Scope, status: str, seconds: float) -> None:
        """The route as the application names it, so that there are few of them."""
        state, client = scope["state"], scope.get("client")
        route = getattr(scope.get("route"), "path", "other")
        self.metrics.requests.labels(route, status).inc()
        self.metrics.seconds.labels(route).observe(seconds)
        if "code" in state:
            self.metrics.refusals.labels(state["code"]).inc()
        fields = {"request_id": state["request_id"], "client": client[0] if client else None, "method": scope["method"]}
        fields |= {"route": route, "status": status, "ms": round(1000 * seconds, 2)}
        fields |= {name: state[name] for name in ("images", "code") if name in state}
        log.info("request", extra={"fields": fields})
