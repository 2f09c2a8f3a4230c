"""``python -m keepcover`` and the ``keepcover`` command."""

from __future__ import annotations

import sys
import warnings

from keepcover.errors import install


def _one_line(message: Warning | str, *_: object, **__: object) -> None:
    from keepcover.cli.console import err

    err.print(f"warning: {message}", highlight=False, soft_wrap=True)


def main() -> int:
    """Run the command line, or say what it needs."""
    try:
        from keepcover.cli import main as run
    except ModuleNotFoundError as missing:
        if (missing.name or "").split(".")[0] not in ("typer", "rich"):
            raise
        sys.stderr.write(f"error: the command line needs typer and rich: {install('cli')}\n")
        return 2
    warnings.showwarning = _one_line  # the line of code that warned is no help to users of a command
    return run()


if __name__ == "__main__":
    sys.exit(main())
