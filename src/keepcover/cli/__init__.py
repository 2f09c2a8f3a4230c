"""The command line: thin. Everything it prints comes from functions that return values."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer.main

from keepcover.cli.console import app, err, out
from keepcover.errors import InputError
from keepcover.methods import METHODS

for _module in pkgutil.iter_modules(__path__):  # importing a module registers its commands
    importlib.import_module(f"{__name__}.{_module.name}")


def every_command(command: Any = None, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Every command by its full path, for the reference and the tests."""
    command = command or typer.main.get_command(app)
    if not hasattr(command, "commands"):
        return [(path, command)]
    return [found for name, one in command.commands.items() for found in every_command(one, (*path, name))]


def _repeat_method(arguments: Sequence[str]) -> list[str]:
    """Let ``--method a b`` mean ``--method a --method b``."""
    spelled: list[str] = []
    for word in arguments:
        if word in (*METHODS, "all", "auto") and len(spelled) >= 2 and spelled[-2] == "--method":
            spelled.append("--method")
        spelled.append(word)
    return spelled


def _version(asked: bool) -> bool:
    if asked:
        import keepcover

        out.print(f"keepcover {keepcover.__version__}")
        raise typer.Exit
    return asked


@app.callback()
def every(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="The version.")] = False,
) -> None:
    """Prediction sets that keep their coverage under attack."""


_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; errors of the user are one line on stderr."""
    try:
        result = app(args=_repeat_method(sys.argv[1:] if arguments is None else arguments), standalone_mode=False)
    except typer.Exit as stop:
        return stop.exit_code
    except (KeyboardInterrupt, typer.Abort):
        result = _INTERRUPTED
    except Exception as error:
        usage = getattr(error, "format_message", None)  # of an error of the command line itself; empty after its help
        if usage is None and not isinstance(error, InputError):
            raise
        if message := usage() if usage else str(error):
            err.print(f"error: {message}", style="red")
        return 2
    if result == _INTERRUPTED:  # typer makes an exit code of Ctrl-C
        err.print("stopped")
    return result if isinstance(result, int) else 0
