"""What importing costs and who may import whom."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import keepcover
from keepcover.__main__ import main
from keepcover.data import digits, image_folder
from keepcover.errors import InputError
from keepcover.pages import plots, report

ROOT = Path(__file__).resolve().parents[1] / "src" / "keepcover"

# A module imports only from modules before it. Packages stand for all of their files, which may import each other.
ORDER = (
    "errors",
    "files",
    "devices",
    "sealing",
    "zipped",
    "bounds",
    "conformal",
    "draws",
    "scores",
    "transforms",
    "noise_kernel",
    "noise_cpu",
    "noise",
    "progress",
    "arrivals",
    "inputs",
    "metrics",
    "tuning",
    "methods",
    "early_exit",
    "sets",
    "smoothing",
    "fingerprint",
    "predictor",
    "plain",
    "artifact",
    "calibration",
    "attacks",
    "audit",
    "models",
    "datasets",
    "logits_file",
    "store",
    "engines",
    "training",
    "adapters",
    "specs",
    "set_rows",
    "plots",
    "report",
    "predictor_page",
    "experiments",
    "serve",
    "explore",
    "cli",
)
EXCEPTIONS = {("predictor", "artifact")}  # Predictor.save, inside the function
HEAVY = (
    "sklearn",
    "PIL",
    "matplotlib",
    "typer",
    "rich",
    "jinja2",
    "pandas",
    "torchvision",
    "scipy.stats",
    "scipy.optimize",
    "onnx",
    "onnxruntime",
    "triton",
    "ray",
    "transformers",
)


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


# -- the graph ---------------------------------------------------------------------------------------------------------


def room(path: Path) -> str:
    """The module or package directly under keepcover that a file belongs to."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Every room a file imports from, at its top or inside a function; the package itself counts as all it exports."""
    package, rooms, found = ROOT.name, {p.stem for p in ROOT.iterdir()}, set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == package:
                known = len(parts) > 1 and parts[1] in rooms
                found |= {parts[1]} if known else imported(ROOT / "__init__.py")
    return found


def files() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if path.parent != ROOT or not path.stem.startswith("__"))


def test_the_order_names_every_module() -> None:
    """Nothing is left out and nothing is invented, so that a new module must find its place."""
    assert {room(path) for path in files()} == set(ORDER)
    assert len(set(ORDER)) == len(ORDER)


@pytest.mark.parametrize("path", files(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_modules_import_only_from_modules_before_them(path: Path) -> None:
    own = room(path)
    for other in imported(path) - {own}:
        assert (own, other) in EXCEPTIONS or ORDER.index(other) < ORDER.index(own), f"{own} imports {other}"


def test_the_exception_is_inside_a_function() -> None:
    tree = ast.parse((ROOT / "predictor.py").read_text(encoding="utf-8"))
    top = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert "keepcover.prediction.artifact" not in {node.module for node in top}
    assert "artifact" in imported(ROOT / "predictor.py")


def test_the_walk_sees_what_it_must(tmp_path: Path) -> None:
    """Imports in functions, of names, under aliases and of the package itself are all found."""
    source = tmp_path / "module.py"
    source.write_text(
        "import keepcover.cli\n"
        "from keepcover import plots as p\n"
        "def f():\n    from keepcover.methods.exact import Exact\n    import numpy\n"
    )
    assert imported(source) == {"cli", "plots", "methods"}
    source.write_text("def f():\n    import keepcover\n    return keepcover.__version__\n")
    assert {"calibration", "artifact"} <= imported(source)


# -- the cost ----------------------------------------------------------------------------------------------------------


def test_importing_is_cheap_beside_torch_and_needs_nothing_heavy() -> None:
    """Three fresh processes: nothing on the list, and the least time keepcover adds is less than half of torch's least."""
    code = (
        "import time, json, sys; a = time.perf_counter(); import torch; b = time.perf_counter(); import keepcover; "
        f"c = time.perf_counter(); print(json.dumps([b - a, c - b, [n for n in {HEAVY!r} if n in sys.modules]]))"
    )
    results = [json.loads(run(code).stdout) for _ in range(3)]
    assert [heavy for _, _, heavy in results] == [[], [], []]
    assert min(own for _, own, _ in results) < 0.5 * min(torch for torch, _, _ in results)


def test_every_public_name_is_there_and_documented() -> None:
    assert sorted(keepcover.__all__) == sorted(set(keepcover.__all__))
    for name in keepcover.__all__:
        value = getattr(keepcover, name)
        assert getattr(value, "__doc__", None), name
    assert (ROOT / "py.typed").is_file()


# -- without extras ----------------------------------------------------------------------------------------------------


HINT = "error: the command line needs typer and rich: pip install '.[cli]' in a checkout\n"


def test_the_command_line_says_what_it_needs() -> None:
    found = run(
        "import sys, runpy; sys.modules['typer'] = None; sys.argv = ['keepcover', 'plan']; "
        "runpy.run_module('keepcover', run_name='__main__')"
    )
    assert (found.returncode, found.stderr, found.stdout) == (2, HINT, "")


def test_rich_is_needed_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in [name for name in sys.modules if name.startswith(("rich", "keepcover.cli"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    assert main() == 2
    assert capsys.readouterr().err == HINT


def test_a_broken_import_of_our_own_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("keepcover.cli")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "keepcover.methods", None)
    with pytest.raises(ModuleNotFoundError, match=r"keepcover\.methods"):
        main()


@pytest.mark.parametrize(
    ("missing", "use", "extra"),
    [
        ("sklearn.datasets", digits, "demo"),
        ("PIL", lambda: image_folder("."), "images"),
        ("jinja2", lambda: report.Page("", "").html(), "report"),
        ("matplotlib", lambda: plots.size_curves({}, 2, {}), "report"),
    ],
)
def test_missing_extras_are_named(
    missing: str, use: Callable[[], object], extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(InputError, match=rf"pip install '.\[{extra}\]'"):
        use()
