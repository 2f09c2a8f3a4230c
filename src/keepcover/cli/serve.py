"""The HTTP service."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from keepcover.cli import console as ui
from keepcover.cli import options as opt
from keepcover.errors import InputError
from keepcover.web.settings import Settings


@opt.command
def serve(
    predictor: Annotated[Path, typer.Argument()],
    using: opt.Model,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    workers: int = 1,
    threads: int | None = None,
    token_file: Path | None = None,
    trusted_proxies: str | None = None,
    log_level: Literal["debug", "info", "warning", "error"] = "info",
    check: bool = False,
    settings: Settings,
) -> int:
    """Serve a predictor over HTTP: `POST /v1/predict`, `GET /v1/predictor`, outcomes and monitor, health, metrics and OpenAPI.

    Noise comes fresh from the operating system for every answer; no option and no request sets a seed. SIGTERM ends the
    service once everything accepted is answered.

    Args:
        predictor: What `Predictor.save` wrote.
        host: Address to listen on; 0.0.0.0 for every one.
        port: Port; 0 takes a free one and logs it.
        workers: Processes, each with its own model and queue.
        threads: CPU threads per worker; the cores shared out by default.
        token_file: File with the bearer token clients must send; or set KEEPCOVER_TOKEN.
        trusted_proxies: Addresses and networks whose X-Forwarded-For is believed, comma separated.
        log_level: Logs are JSON lines on stderr.
        check: Load, answer one query, print what `/v1/predictor` says, and stop.
    """
    from keepcover.serve import Deployment
    from keepcover.serve.app import warm_up
    from keepcover.serve.server import run

    settings = replace(settings, token=_token(token_file), ticket_key=os.environ.get("KEEPCOVER_TICKET_KEY"))
    deployment = Deployment(predictor, threads=threads, settings=settings, **vars(using))
    if check:
        service = deployment.build().state.service
        warm_up(service.predictor, service.shape)
        ui.print_json(service.describe())
        return 0
    return run(deployment, host=host, port=port, workers=workers, trusted_proxies=trusted_proxies, log_level=log_level)


def _token(path: Path | None) -> str | None:
    if path is None:
        return os.environ.get("KEEPCOVER_TOKEN")  # set and empty is a mistake, and refused: it must not mean open
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the token from {path} ({error})") from None
