"""The command line: thin. Everything it prints comes from functions that return values."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import typer
import typer.main

from keepcover.cli import audit, data, demo, evaluate, explore, plan, predictor, reproduce, serve, smooth, train
from keepcover.cli.console import app, err
from keepcover.errors import InputError
from keepcover.methods import METHODS

COMMANDS = (
    audit,
    data,
    demo,
    evaluate,
    explore,
    plan,
    predictor,
    reproduce,
    serve,
    smooth,
    train,
)  # importing one registers it


def every_command() -> list[tuple[tuple[str, ...], Any]]:
    """Every command there is, by its full path: what the reference and the tests walk."""
    found: list[tuple[tuple[str, ...], Any]] = []

    def walk(path: tuple[str, ...], command: Any) -> None:
        inner = getattr(command, "commands", None)
        if inner is None:
            found.append((path, command))
            return
        for name, one in inner.items():
            walk((*path, name), one)

    walk((), typer.main.get_command(app))
    return found


def _repeat_method(arguments: Sequence[str]) -> list[str]:
    """Let ``--method a b`` mean ``--method a --method b``."""
    spelled: list[str] = []
    for word in arguments:
        if word in (*METHODS, "all", "auto") and len(spelled) >= 2 and spelled[-2] == "--method":
            spelled.append("--method")
        spelled.append(word)
    return spelled


_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; errors meant for people are one line on stderr."""
    try:
        result = app(args=_repeat_method(sys.argv[1:] if arguments is None else arguments), standalone_mode=False)
        if result == _INTERRUPTED:  # typer makes an exit code of Ctrl-C
            raise KeyboardInterrupt
        return result if isinstance(result, int) else 0
    except InputError as error:
        err.print(f"error: {error}", style="red")
        return 2
    except typer.Exit as stop:
        return stop.exit_code
    except (KeyboardInterrupt, typer.Abort):
        err.print("stopped")
        return _INTERRUPTED
    except Exception as error:
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        if message():  # a usage error of the command line itself; without a message it has shown its help
            err.print(f"error: {message()}", style="red")
        return 2
