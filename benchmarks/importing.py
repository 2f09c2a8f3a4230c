"""What ``import keepcover`` adds to ``import torch``, in fresh processes."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from benchmarks.timing import Options, beside, goal

CODE = (
    "import json, time; a = time.perf_counter(); import torch; b = time.perf_counter(); import keepcover; "
    "print(json.dumps([time.perf_counter() - b, b - a]))"
)


def measure(options: Options) -> dict[str, Any]:
    first = 0 if options.quick else 1  # it reads the disk
    runs = [subprocess.check_output([sys.executable, "-c", CODE], text=True) for _ in range(first + options.repeats)]
    own, torch = zip(*map(json.loads, runs[first:]), strict=True)
    row = beside("import keepcover, after torch", own, "import torch", torch, {"processes": options.repeats})
    return {"rows": [goal(row, at_most=0.5)]}
