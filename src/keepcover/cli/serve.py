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
    predictor: Annotated[Path, typer.Argument(help="What `Predictor.save` wrote.")],
    using: opt.Model,
    *,
    host: Annotated[str, "Address to listen on; 0.0.0.0 for every one."] = "127.0.0.1",
    port: Annotated[int, "Port; 0 takes a free one and logs it."] = 8000,
    workers: Annotated[int, "Processes, each with its own model and queue."] = 1,
    threads: Annotated[int | None, "CPU threads per worker; the cores shared out by default."] = None,
    token_file: Annotated[Path | None, "File with the bearer token clients must send; or set KEEPCOVER_TOKEN."] = None,
    trusted_proxies: Annotated[
        str | None, "Addresses and networks whose X-Forwarded-For is believed, comma separated."
    ] = None,
    log_level: Annotated[Literal["debug", "info", "warning", "error"], "Logs are JSON lines on stderr."] = "info",
    check: Annotated[bool, "--check", "Load, answer one query, print what `/v1/predictor` says, and stop."] = False,
    settings: Settings,
) -> int:
    """Serve a predictor over HTTP: `POST /v1/predict`, `GET /v1/predictor`, outcomes and monitor, health, metrics and OpenAPI.

    Noise comes fresh from the operating system for every answer; no option and no request sets a seed. SIGTERM ends the
    service once everything accepted is answered.
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
