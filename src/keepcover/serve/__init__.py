"""A predictor behind HTTP: FastAPI, micro-batches, limits, metrics. Needs the extra ``serve``.

``create_app(predictor, Settings())`` is the application; ``keepcover serve`` runs it under uvicorn.
"""

from __future__ import annotations

from importlib.util import find_spec

from keepcover.errors import InputError, install

for _module in ("fastapi", "uvicorn", "python_multipart", "PIL"):
    if find_spec(_module) is None:
        raise InputError(f"the HTTP service needs {_module}: {install('serve')}")

from keepcover.serve.app import create_app  # noqa: E402
from keepcover.serve.deployment import Deployment  # noqa: E402
from keepcover.serve.settings import Settings  # noqa: E402

__all__ = ["Deployment", "Settings", "create_app"]
