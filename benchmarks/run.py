"""Every measurement, or those named: rows beside what they are compared with, printed as one table and kept as JSON.

python benchmarks/run.py [NAMES...] [--quick] [--device cuda] [--compile] [--data FOLDER] [--out results/benchmarks]

On a machine with torch, numpy, scipy, Pillow, safetensors and jaxtyping alone, from the sources:

PYTHONPATH=src python benchmarks/run.py engine published --device cuda --compile --data FOLDER_OF_CIFAR10
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import re
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
if not __package__:  # run as a script, Python looks for modules beside it first; they are a package of the folder above
    sys.path[0] = str(ROOT)

from benchmarks.table import as_text  # noqa: E402
from benchmarks.timing import Options, Row, SkippedError  # noqa: E402
from keepcover.evaluation.manifest import manifest, write_results  # noqa: E402

MEASUREMENTS = {
    "engine": "benchmarks.engine",
    "engine_224": "benchmarks.engine_224",
    "published": "benchmarks.published",
    "ptt": "benchmarks.ptt",
    "statistics": "benchmarks.score_statistics",
    "mapie": "benchmarks.beside_mapie",
    "certificates": "benchmarks.certificates",
    "early_exit": "benchmarks.early_exit",
    "store": "benchmarks.store",
    "ray": "benchmarks.ray_cluster",
    "growth": "benchmarks.growth",
    "attack": "benchmarks.attack",
    "denoiser": "benchmarks.denoiser",
    "importing": "benchmarks.importing",
}
# The others do not run a network on it.
ON_A_GPU = ("engine", "engine_224", "published", "ptt", "early_exit", "attack", "denoiser")


def measure(name: str, options: Options) -> list[Row]:
    """The rows of one measurement."""
    if options.compile:
        # Compiled code is kept per function, and after a few versions of one torch silently stops compiling it.
        torch.compiler.reset()
    return importlib.import_module(MEASUREMENTS[name]).measure(options)["rows"]


def about(name: str, options: Options, took: float, load: float) -> dict[str, Any]:
    """Where the numbers come from."""
    command = f"python benchmarks/run.py {name} --device {options.device}"
    command += "".join(f" --{flag}" for flag in ("compile", "quick") if getattr(options, flag))
    command += " --data FOLDER" if options.data is not None else ""
    config = {name: getattr(options, name) for name in ("device", "compile", "quick")}
    facts = manifest(command, config | {"cifar10": options.data is not None}, took)
    # Processes that wanted a core in the minute before: other people's work, if there is more of it than cores.
    facts["hardware"] |= {"cpu": _processor(), "cores": os.cpu_count(), "load_before": round(load, 2)}
    return facts


def _processor() -> str:
    about = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*: (.*)", about.read_text()) if about.exists() else None
    return named[1].strip() if named else platform.processor()


def run(names: Sequence[str], options: Options, out: Path) -> int:
    """Measure, write one file per measurement, print one table; the number of measurements that failed."""
    rows: list[Row] = []
    failed, load = 0, os.getloadavg()[0]
    if load > (os.cpu_count() or 1) / 2:
        print(f"this machine is busy (load {load:.1f} on {os.cpu_count()} cores): ratios may hold, seconds will not")
    for name in names:
        start = time.monotonic()
        try:
            found = measure(name, options)
        except SkippedError as reason:
            print(f"{name}: skipped, {reason}", flush=True)
            continue
        except Exception:
            traceback.print_exc()
            failed += 1
            continue
        took = time.monotonic() - start
        path = out / f"{name}-{options.kind}.json"
        write_results(path, found, about(name, options, took, load))
        print(f"{name}: {took:.0f} s, {path}", flush=True)
        rows += found
    if rows:
        print(f"\n{as_text(rows)}")
    return failed


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MEASUREMENTS)}")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", action="store_true", help="run networks through torch.compile")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that the scripts run, nothing else")
    parser.add_argument("--data", type=Path, help="folder of CIFAR-10; random images without it")
    parser.add_argument("--out", type=Path, help="default: results/benchmarks, out/benchmarks with --quick")
    asked = parser.parse_args(arguments)
    unknown = [name for name in asked.names if name not in MEASUREMENTS]
    if unknown:
        parser.error(f"no measurement {', '.join(unknown)}; there are {', '.join(MEASUREMENTS)}")
    options = Options(asked.device, asked.compile, asked.quick, asked.data)
    if options.gpu and not torch.cuda.is_available():
        parser.error("no GPU that torch can use here")
    names = asked.names or (ON_A_GPU if options.gpu else tuple(MEASUREMENTS))
    out = asked.out or ROOT / ("out/benchmarks" if asked.quick else "results/benchmarks")
    sys.exit(1 if run(names, options, out) else 0)


if __name__ == "__main__":
    main()
