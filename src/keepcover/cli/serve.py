"""The HTTP service."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from keepcover.cli.console import Device, ModelOutput, Weights, app, print_json
from keepcover.errors import InputError
from keepcover.web.settings import Settings, offered

LogLevel = Literal["debug", "info", "warning", "error"]


def _with_settings(command: Callable[..., int]) -> Callable[..., int]:
    """The command with an option and an environment variable for every setting, in place of its parameter ``settings``."""
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "settings"]
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[
                kind | None if default is None else kind, typer.Option(help=text, envvar=f"KEEPCOVER_{name.upper()}")
            ],
        )
        for name, (kind, default, text) in offered().items()
    ]

    @wraps(command)
    def expanded(**given: Any) -> int:
        settings = {option.name: given.pop(option.name) for option in options}
        return command(settings=Settings(**settings, token=_token(given["token_file"])), **given)

    expanded.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *options)}
    return expanded


@app.command()
@_with_settings
def serve(
    predictor: Annotated[Path, typer.Argument(help="What `Predictor.save` wrote.")],
    model: Annotated[str, typer.Option(help="`small-cnn`, `cifar-resnet20/56/110`, or `package.module:function`.")],
    *,
    settings: Settings,
    weights: Weights = None,
    model_output: ModelOutput = "logits",
    fingerprint: Annotated[str | None, typer.Option(help="The string given at calibration for a callable.")] = None,
    device: Device = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for every one.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one and logs it.")] = 8000,
    workers: Annotated[int, typer.Option(help="Processes, each with its own model and queue.")] = 1,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads per worker; the cores shared out by default.")
    ] = None,
    token_file: Annotated[  # noqa: ARG001, it is among the settings
        Path | None, typer.Option(help="File with the bearer token clients must send; or set KEEPCOVER_TOKEN.")
    ] = None,
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
    from keepcover.serve import Deployment
    from keepcover.serve.app import warm_up
    from keepcover.serve.server import run

    deployment = Deployment(predictor, model, weights, fingerprint, device, model_output, threads, settings)
    if check:
        service = deployment.build().state.service
        warm_up(service.predictor, service.shape)
        print_json(service.describe())
        return 0
    return run(deployment, host=host, port=port, workers=workers, trusted_proxies=trusted_proxies, log_level=log_level)


def _token(path: Path | None) -> str | None:
    if path is None:
        return os.environ.get("KEEPCOVER_TOKEN")  # set and empty is a mistake, and refused: it must not mean open
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the token from {path} ({error})") from None
