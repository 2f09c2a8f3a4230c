"""The HTTP service."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from keepcover.cli.console import ModelOutput, Weights, app, print_json
from keepcover.errors import InputError

Resize = Literal["refuse", "stretch", "crop"]
LogLevel = Literal["debug", "info", "warning", "error"]


@app.command()
def serve(
    predictor: Annotated[Path, typer.Argument(help="What `Predictor.save` wrote.")],
    model: Annotated[str, typer.Option(help="`small-cnn`, `cifar-resnet20/56/110`, or `package.module:function`.")],
    weights: Weights = None,
    model_output: ModelOutput = "logits",
    fingerprint: Annotated[str | None, typer.Option(help="The string given at calibration for a callable.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the model's own by default.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for every one.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one and logs it.")] = 8000,
    workers: Annotated[int, typer.Option(help="Processes, each with its own model and queue.")] = 1,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads per worker; the cores shared out by default.")
    ] = None,
    shape: Annotated[str | None, typer.Option(help="Image shape like 3x32x32, for files that do not say it.")] = None,
    max_images: Annotated[int, typer.Option(help="Images in one request.")] = 32,
    max_batch: Annotated[int, typer.Option(help="Images in one call of the model, over several requests.")] = 64,
    batch_wait_ms: Annotated[float, typer.Option(help="How long a lone request waits for company.")] = 2.0,
    max_queue: Annotated[int, typer.Option(help="Images that may wait; beyond it 503 with Retry-After.")] = 256,
    max_body_mib: Annotated[float, typer.Option(help="Size of one request body, in MiB.")] = 8.0,
    timeout: Annotated[float, typer.Option(help="Seconds from the arrival of the body to the answer.")] = 30.0,
    shutdown_timeout: Annotated[float, typer.Option(help="Seconds to answer what was accepted, after SIGTERM.")] = 30.0,
    resize: Annotated[
        Resize, typer.Option(help="Image files of another size; resizing changes what epsilon means.")
    ] = "refuse",
    token_file: Annotated[
        Path | None, typer.Option(help="File with the bearer token clients must send; or set KEEPCOVER_TOKEN.")
    ] = None,
    repeat_limit: Annotated[
        int | None, typer.Option(help="Answers to the same image per client and window; no limit by default.")
    ] = None,
    repeat_window: Annotated[float, typer.Option(help="Seconds of that window.")] = 60.0,
    trusted_proxies: Annotated[
        str | None, typer.Option(help="Addresses and networks whose X-Forwarded-For is believed, comma separated.")
    ] = None,
    log_level: Annotated[LogLevel, typer.Option(help="Logs are JSON lines on stderr.")] = "info",
    check: Annotated[
        bool, typer.Option("--check", help="Load, answer one query, print what `/v1/predictor` says, and stop.")
    ] = False,
) -> int:
    """Serve a predictor over HTTP: `POST /v1/predict`, `GET /v1/predictor`, health, metrics and OpenAPI.

    Noise comes fresh from the operating system for every answer; no option and no request sets a seed. SIGTERM ends the
    service once everything accepted is answered.
    """
    from keepcover.serve import Deployment, Settings
    from keepcover.serve.app import warm_up
    from keepcover.serve.server import run
    from keepcover.serve.settings import MIB

    if not 0 < max_body_mib < 2**20:
        raise InputError(f"expected --max-body-mib above 0, got {max_body_mib:g}")
    settings = Settings(
        image_shape=None if shape is None else _shape(shape),
        max_images=max_images,
        max_batch=max_batch,
        batch_wait=batch_wait_ms / 1000,
        max_queue=max_queue,
        max_body=round(max_body_mib * MIB),
        max_bodies=max(Settings.max_bodies, round(max_body_mib * MIB)),
        answer_timeout=timeout,
        shutdown_timeout=shutdown_timeout,
        resize=resize,
        token=_token(token_file),
        repeat_limit=repeat_limit,
        repeat_window=repeat_window,
    )
    deployment = Deployment(predictor, model, weights, fingerprint, device, model_output, threads, settings)
    if check:
        service = deployment.build().state.service
        warm_up(service.predictor, service.shape)
        print_json(service.describe())
        return 0
    return run(deployment, host=host, port=port, workers=workers, trusted_proxies=trusted_proxies, log_level=log_level)


def _shape(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d{1,9}(x\d{1,9})*", text):
        raise InputError(f"expected a shape like 3x32x32, got {text!r}")
    return tuple(int(part) for part in text.split("x"))


def _token(path: Path | None) -> str | None:
    if path is None:
        return os.environ.get("KEEPCOVER_TOKEN")  # set and empty is a mistake, and refused: it must not mean open
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the token from {path} ({error})") from None
