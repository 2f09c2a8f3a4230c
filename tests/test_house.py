"""The house: who may import whom, what importing costs, and what a missing extra is told."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

import keepcover
from keepcover.__main__ import main
from keepcover.data import digits, image_folder
from keepcover.errors import InputError, install
from keepcover.pages import plots
from keepcover.pages.report import Page

ROOT = Path(__file__).resolve().parents[1] / "src" / "keepcover"

# A file imports only from rooms before its own, at its top and inside functions.
ORDER = [
    "errors",
    "files",
    "sealing",
    "assumption",
    "noise",
    "scores",
    "bounds",
    "promises",
    "guarantee",
    "tasks",
    "methods",
    "engine",
    "store",
    "prediction",
    "evaluation",
    "attacks",
    "monitoring",
    "testing",
    "combinations",
    "data",
    "models",
    "training",
    "advice",
    "adapters",
    "specs",
    "mlflow",
    "pages",
    "demo",
    "web",
    "serve",
    "explore",
    "paper",
    "cli",
]
HEAVY = [
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
    "fastapi",
    "mlflow",
]


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


# -- the order ---------------------------------------------------------------------------------------------------------


def room(path: Path) -> str:
    """The module or package directly under keepcover that a file belongs to."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(source: str) -> set[str]:
    """Every room that code imports from; ``import keepcover`` alone asks for the version and counts for none."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("keepcover.")}
    return found


FILES = sorted(path for path in ROOT.rglob("*.py") if path.parent != ROOT or not path.stem.startswith("__"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_rooms_import_only_from_rooms_before_them(path: Path) -> None:
    own = room(path)
    late = {other for other in imported(path.read_text(encoding="utf-8")) if ORDER.index(other) > ORDER.index(own)}
    assert not late, f"{own} imports {', '.join(late)}"


def test_the_walk_sees_what_it_must() -> None:
    """Imports in functions, of names, under aliases."""
    code = "import keepcover.cli\nfrom keepcover import pages as p\ndef f():\n    from keepcover.methods.exact import Exact\n    import numpy\n"
    assert imported(code) == {"cli", "pages", "methods"}


def test_importing_needs_nothing_heavy() -> None:
    found = run(f"import keepcover, sys; print([name for name in {HEAVY!r} if name in sys.modules])")
    assert found.stdout.strip() == "[]", found.stderr


def test_every_public_name_is_there_and_documented() -> None:
    assert sorted(keepcover.__all__) == sorted(set(keepcover.__all__))
    for name in keepcover.__all__:
        assert getattr(getattr(keepcover, name), "__doc__", None), name
    assert (ROOT / "py.typed").is_file()


# -- without extras ----------------------------------------------------------------------------------------------------


def test_install_lines_come_from_one_place_and_name_extras_that_exist() -> None:
    extras = tomllib.loads((ROOT.parents[1] / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked: set[str] = set()
    for path in FILES:
        source = path.read_text(encoding="utf-8")
        asked |= set(re.findall(r"""(?:install\('|require\("[^"]+", "|optional\("[^"]+", [^)]*, ")([\w-]+)""", source))
        assert path.name == "errors.py" or "pip install" not in source, path
    assert {"report", "serve"} <= asked <= set(extras)


HINT = f"error: the command line needs typer and rich: {install('cli')}\n"


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
        ("jinja2", lambda: Page("", "").html(), "report"),
        ("matplotlib", lambda: plots.radius_curves({}, {}, "epsilon"), "report"),
    ],
)
def test_missing_extras_are_named(
    missing: str, use: Callable[[], object], extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(InputError, match=re.escape(install(extra))):
        use()
