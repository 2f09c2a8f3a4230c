"""A predictor behind HTTP: FastAPI, micro-batches, limits, metrics. Needs the extra ``serve``.

``create_app(predictor, Settings())`` is the application; ``keepcover serve`` runs it under uvicorn.
"""

from __future__ import annotations

from keepcover.web import require

require("the HTTP service", "serve", "prometheus_client")

from keepcover.serve.app import Deployment, create_app  # noqa: E402
from keepcover.web.settings import Settings  # noqa: E402

__all__ = ["Deployment", "Settings", "create_app"]
