"""`keepcover serve`: options, and errors before any port is open."""

from __future__ import annotations

import logging
import logging.config
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from keepcover import cli
from keepcover.errors import InputError
from keepcover.prediction.predictor import Predictor
from keepcover.serve import Deployment, Settings
from keepcover.serve.schemas import Description

from .serve_client import TOKEN
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


@pytest.fixture
def on_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    yield
    sys.modules.pop("serving", None)


@pytest.mark.usefixtures("on_path")
def test_the_command_can_check_a_deployment(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main(["serve", str(saved), "--model", "serving:sharp", "--check", "--max-images", "5", "--shape", "1x4x4"])
        == 0
    )
    found = Description.model_validate_json(capsys.readouterr().out)
    assert (found.classes, found.limits.max_images) == (CLASSES, 5)


@pytest.mark.usefixtures("on_path")
@pytest.mark.parametrize(
    ("options", "match"),
    [
        (["--shape", "3,32"], "expected a shape like 3x32x32, got '3,32'"),
        (["--shape", "3x4x4"], "the predictor was calibrated on images of shape (1, 4, 4)"),
        (["--token-file", "/no/such/file"], "cannot read the token from /no/such/file"),
        (["--workers", "0"], "expected at least 1 worker, got 0"),
        (["--port", "99999"], "cannot listen on 127.0.0.1 port 99999"),
        (["--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid"),
        (["--max-queue", "3"], "a request of 32 images never fits a queue of 3"),
    ],
)
def test_the_command_refuses_nonsense(
    saved: Path, capsys: pytest.CaptureFixture[str], options: list[str], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.config, "dictConfig", lambda config: None)  # this process keeps its own logging
    monkeypatch.setattr(logging, "captureWarnings", lambda capture: None)
    assert cli.main(["serve", str(saved), "--model", "serving:sharp", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert match in error


@pytest.mark.usefixtures("on_path")
def test_another_model_is_refused_before_the_port_opens(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the model differs from the one calibrated"):
        Deployment(saved, "torch.nn:Identity", fingerprint="another").build()
    deployment = Deployment(saved, "serving:sharp", settings=Settings(max_images=2))
    assert deployment.build().state.service.predictor.smoother.progress is False


def test_the_token_comes_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from keepcover.cli.serve import _token

    assert _token(None) is None
    monkeypatch.setenv("KEEPCOVER_TOKEN", "from-the-environment")
    assert _token(None) == "from-the-environment"
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    assert _token(tmp_path / "token") == TOKEN


def test_the_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    for name in [name for name in sys.modules if name.startswith("keepcover.serve")]:
        monkeypatch.delitem(sys.modules, name)
    real: Callable[..., Any] = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "fastapi" else real(name, *a))
    with pytest.raises(InputError, match=r"needs fastapi: pip install 'keepcover\[serve\]'"):
        importlib.import_module("keepcover.serve")
