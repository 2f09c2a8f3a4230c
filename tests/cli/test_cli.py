"""The command line as a whole: help, errors in one line with exit code 2, an end that is no traceback."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

import keepcover
from keepcover import cli
from keepcover.cli.options import Question
from tests.cli.runner import refused, run

COMMANDS = {" ".join(path): command for path, command in cli.every_command()}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *command.split(), "--help")
    assert (code, err) == (0, "")
    words = " ".join((COMMANDS[command].help or "").split()[:5])
    assert words
    assert words in " ".join(out.replace("│", " ").split())
    assert "--json" in out or command == "serve"  # which speaks JSON to its clients and in its log


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for command in COMMANDS:
        assert f" {command.split()[0]} " in out


def test_no_command_shows_help_and_no_empty_error(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, err = run(capsys)
    assert "evaluate" in out + err
    assert "error" not in err


PLAN = ["plan", "--epsilon", "0.1", "--sigma", "0.2", "--draws", "4", "--calibration-draws", "8"]


def test_missing_options_and_commands_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--epsilon" in refused(capsys, "plan")
    assert "nonsense" in refused(capsys, "nonsense")


def test_stopping_is_not_a_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("keepcover.evaluation.plan.make_plan", interrupted)
    code, out, err = run(capsys, *PLAN)
    assert (code, out) == (130, "")
    assert "Traceback" not in err


def test_bugs_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any, **options: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("keepcover.evaluation.plan.make_plan", broken)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        cli.main(PLAN)


def test_what_is_asked_of_a_method_is_asked_alike_by_every_command() -> None:
    """A field of the shared question is an option of all four commands."""
    shared = {field.name for field in fields(Question)}
    assert {"sigma", "noise", "norm"} <= shared
    for command in ("calibrate", "evaluate", "plan", "audit"):
        assert shared <= {option.name for option in COMMANDS[command].params}


def test_the_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"keepcover {keepcover.__version__}\n", "")
