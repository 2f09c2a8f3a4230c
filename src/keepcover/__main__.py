"""``python -m keepcover`` and the ``keepcover`` command."""

from __future__ import annotations

import sys
import warnings

from keepcover.errors import install


def main() -> int:
    """Run the command line, or say what it needs."""
    try:
        from keepcover.cli import console
        from keepcover.cli import main as run
    except ModuleNotFoundError as missing:
        if (missing.name or "").split(".")[0] not in ("typer", "rich"):
            raise
        sys.stderr.write(f"error: the command line needs typer and rich: {install('cli')}\n")
        return 2
    # The line of code that warned is no help to users of a command.
    warnings.showwarning = lambda message, *_, **__: console.err.print(f"warning: {message}")
    return run()


if __name__ == "__main__":
    sys.exit(main())
