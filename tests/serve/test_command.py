"""`keepcover serve`: options, and errors before any port is open."""

from __future__ import annotations

import importlib
import logging
import logging.config
import signal
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import settings

from keepcover import cli
from keepcover.errors import InputError
from keepcover.prediction.predictor import Predictor
from keepcover.serve import Deployment, Settings
from keepcover.serve.schemas import Description
from keepcover.serve.server import STARTUP_FAILURE, supervise

from . import ending
from .client import TOKEN
from .serving import CLASSES, make_predictor

patient = settings(deadline=None, derandomize=True, max_examples=60)


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return make_predictor(alpha=(0.1, 0.2), epsilon=(0.1, 0.05))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "predictor.safetensors"
    make_predictor().save(path)  # calibrated with seed 7
    return path


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_can_check_a_deployment(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main(
            [
                "serve",
                str(saved),
                "--model",
                "tests.serve.serving:sharp",
                "--check",
                "--max-images",
                "5",
                "--shape",
                "1x4x4",
            ]
        )
        == 0
    )
    found = Description.model_validate_json(capsys.readouterr().out)
    assert (found.classes, found.limits.max_images) == (CLASSES, 5)


def test_every_setting_has_an_option_and_an_environment_variable(
    saved: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written wins over the environment; token and key of tickets are no options, because others could read them."""
    (command,) = (command for path, command in cli.every_command() if path == ("serve",))
    options = {option.name: option for option in command.params}
    names = {one.name for one in fields(Settings)} - {"token", "ticket_key"}
    assert names <= set(options)
    assert {options[name].envvar for name in names} == {f"KEEPCOVER_{name.upper()}" for name in names}
    assert not {"token", "ticket_key"} & set(options)
    monkeypatch.setenv("KEEPCOVER_MAX_IMAGES", "6")
    monkeypatch.setenv("KEEPCOVER_MAX_BATCH", "7")
    asked = ["serve", str(saved), "--model", "tests.serve.serving:sharp", "--check", "--max-batch", "8"]
    assert cli.main(asked) == 0
    limits = Description.model_validate_json(capsys.readouterr().out).limits
    assert (limits.max_images, limits.max_batch) == (6, 8)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (["--shape", "3,32"], "for instance 3x32x32, got '3,32'"),
        (["--shape", "3x4x4"], "the predictor was calibrated on images of shape (1, 4, 4)"),
        (["--token-file", "/no/such/file"], "cannot read the token from /no/such/file"),
        (["--workers", "0"], "expected at least 1 worker, got 0"),
        (["--port", "99999"], "cannot listen on 127.0.0.1 port 99999"),
        (["--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid"),
        (
            ["--trusted-proxies", "*"],
            "expected --trusted-proxies as addresses or networks like 10.0.0.5,10.1.0.0/16, got '*'",
        ),
        (["--trusted-proxies", "10.0.0.1, 0.0.0.0/0"], "got '0.0.0.0/0'; if every address is trusted"),
        (["--trusted-proxies", "::/0"], "got '::/0'"),
        (["--trusted-proxies", "proxy.example"], "got 'proxy.example'"),
        (["--max-queue", "3"], "a request of 32 images never fits a queue of 3"),
    ],
)
def test_the_command_refuses_nonsense(
    saved: Path, capsys: pytest.CaptureFixture[str], options: list[str], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.config, "dictConfig", lambda config: None)  # this process keeps its own logging
    monkeypatch.setattr(logging, "captureWarnings", lambda capture: None)
    assert cli.main(["serve", str(saved), "--model", "tests.serve.serving:sharp", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert match in error


def test_another_model_is_refused_before_the_port_opens(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the model differs from the one calibrated"):
        Deployment(saved, "torch.nn:Identity", fingerprint="another").build()
    deployment = Deployment(saved, "tests.serve.serving:sharp", settings=Settings(max_images=2))
    assert deployment.build().state.service.predictor.smoother.progress is False


def test_the_token_comes_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from keepcover.cli.serve import _token

    monkeypatch.delenv("KEEPCOVER_TOKEN", raising=False)
    assert _token(None) is None
    monkeypatch.setenv("KEEPCOVER_TOKEN", "from-the-environment")
    assert _token(None) == "from-the-environment"
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    assert _token(tmp_path / "token") == TOKEN


@pytest.mark.parametrize("token", ["", " ", "0123456789abcdef\t0123456789"])
def test_an_empty_token_does_not_mean_open(
    saved: Path, token: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KEEPCOVER_TOKEN", token)
    (tmp_path / "token").write_text("\n")
    for options in ([], ["--token-file", str(tmp_path / "token")]):
        assert cli.main(["serve", str(saved), "--model", "tests.serve.serving:sharp", "--check", *options]) == 2
        assert "expected a token of at least 16 ASCII characters" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "code", "begun"), [(ending.at_once, 3, 1), (ending.at_once, 11, 3), (ending.once_ready, 3, 4)]
)
def test_workers_that_end_before_they_are_ready_are_not_replaced_for_ever(
    target: Callable[..., None],
    code: int,
    begun: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An exception at the first start ends it at once; a crash, or failures after a good start, after three in a row."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))  # as where workers run: their gauges end with them
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        assert supervise(target, (code, tmp_path / "mark"), workers=1, patience=5.0) == STARTUP_FAILURE
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert sum(record.getMessage() == "worker ended" for record in caplog.records) == begun
    assert "gave up" in caplog.records[-1].getMessage()


@pytest.mark.parametrize("missing", ["fastapi", "uvicorn", "python_multipart", "PIL", "prometheus_client"])
def test_the_missing_extra_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("keepcover.serve")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(InputError, match=rf"needs {missing}: pip install '.\[serve\]'"):
        importlib.import_module("keepcover.serve")
