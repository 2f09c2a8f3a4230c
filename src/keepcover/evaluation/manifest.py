"""Where numbers come from: the facts that stand beside every result."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import scipy
import torch

from keepcover.files import make_folder, write_file


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that numbers depend on."""
    import keepcover

    python, packages = platform.python_version(), (keepcover, torch, numpy, scipy)
    return {"python": python, **{package.__name__: str(package.__version__) for package in packages}}


def manifest(command: str, config: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Configuration, versions, hardware, commit and wall-clock of a run."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "command": command,
        "config": config,
        "versions": versions(),
        "hardware": {"gpu": gpu, "machine": platform.machine(), "threads": torch.get_num_threads()},
        "commit": _commit(),
        "source": _source(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "seconds": round(seconds, 1),
    }


def command_of(program: str, options: Mapping[str, Any]) -> str:
    """The command that gives a program these options, without those that are None or False.

    Example:
        >>> command_of("keepcover reproduce table1", {"splits": 50, "images": None, "compile": True})
        'keepcover reproduce table1 --splits 50 --compile'
    """
    words = [program]
    for name, value in options.items():
        if value is not None and value is not False:
            listed = value if isinstance(value, list) else [] if value is True else [value]
            words += [f"--{name.replace('_', '-')}", *map(str, listed)]
    return " ".join(words)


def _source() -> str:
    """SHA-256 of the package's own code: what ran, whether or not it was committed."""
    root, digest = Path(__file__).resolve().parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--verify", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def write_results(path: Path, rows: list[dict[str, Any]], about: dict[str, Any]) -> None:
    """Rows and manifest as one small JSON file."""
    make_folder(path.parent)
    write_file(path, (json.dumps({"manifest": about, "rows": rows}, indent=1) + "\n").encode())
