"""The wheel and the sdist as others get them: built, looked into, installed in clean environments. ``make wheel-test``.

Python 3.11, 3.12 and 3.13, where they can be had: on PATH, from pyenv, or from uv if it can download. Torch is installed from a
CPU build alone, since PyPI's for Linux brings gigabytes of CUDA; where there is none for an interpreter, the wheel is installed
without its dependencies and every module is compiled by that interpreter, and the reason is said.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

pytestmark = pytest.mark.wheel
ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = ("3.11", "3.12", "3.13")
DATA = {".safetensors", ".json", ".html", ".toml", ".typed", ".css", ".js", ".svg"}
SMALL = """
import keepcover, pathlib, torch
assert "site-packages" in keepcover.__file__, keepcover.__file__
images = torch.rand(200, 1, 8, 8)
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3)).eval()
labels = model(images).argmax(dim=1)
predictor = keepcover.calibrate(model, (images, labels), epsilon=0.05, sigma=0.1, draws=4)
predictor.save("p.safetensors")
sets = keepcover.load("p.safetensors", model).predict(images[:5])
assert len(sets.rows()) == 5 and "90 %" in str(sets.guarantee)
keepcover.denoised(torch.nn.Flatten())  # the weights that come with the package
print(keepcover.__version__)
"""


def said(command: Sequence[str | Path], **options: object) -> str:
    """What a command prints; its output where it fails."""
    found = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    assert found.returncode == 0, f"{' '.join(map(str, command))}\n{found.stdout}{found.stderr}"
    return found.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that is made from it."""
    out = tmp_path_factory.mktemp("dist")
    said([sys.executable, "-m", "build", "--outdir", out, ROOT])
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


def test_the_wheel_holds_the_package_and_no_weights_but_the_denoiser(wheel: Path) -> None:
    assert wheel.name == f"keepcover-{PROJECT['version']}-py3-none-any.whl"
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    package = ROOT / "src" / "keepcover"
    there = [path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sorted(names) == sorted(f"keepcover/{path.relative_to(package).as_posix()}" for path in there)
    assert [name for name in names if name.endswith((".safetensors", ".pt", ".pth", ".onnx"))] == [
        "keepcover/models/denoiser.safetensors"
    ]
    assert {Path(name).suffix for name in names} <= DATA | {".py"}


def test_the_sdist_holds_what_it_takes_to_build_and_nothing_that_git_ignores(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as content:
        names = {name.partition("/")[2] for name in content.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "src/keepcover/models/denoiser.safetensors"} <= names
    assert not [name for name in names if name.startswith((".venv", "out/", "demo/")) or "__pycache__" in name]


# -- clean environments ------------------------------------------------------------------------------------------------


def interpreter(version: str) -> Path | None:
    """A Python of this version: on PATH, from pyenv, or from uv."""
    folders = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*"), reverse=True)
    names = [shutil.which(f"python{version}"), *(folder / "bin" / "python3" for folder in folders)]
    for name in filter(None, names):
        asked = [str(name), "-c", "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"]
        found = subprocess.run(asked, capture_output=True, text=True, check=False)
        if found.stdout.strip() == version:  # a shim of pyenv may be there without what it stands for
            return Path(name)
    uv = shutil.which("uv")
    if (
        uv
        and subprocess.run([uv, "python", "install", version], capture_output=True, timeout=300, check=False).returncode
        == 0
    ):
        return Path(said([uv, "python", "find", version]).strip())
    return None


def cpu_torch(python: Path) -> str | None:
    """The CPU build of the pinned torch for this interpreter, where an index or a folder that pip knows has one."""
    pinned = next(
        line.strip() for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")
    )
    wanted = f"{pinned}+cpu"
    command = [python, "-m", "pip", "install", "--dry-run", "--no-deps", "--quiet", *pip_arguments(), wanted]
    found = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    return wanted if found.returncode == 0 else None


def pip_arguments() -> list[str]:
    return os.environ.get("PIP_ARGS", "").split()


@pytest.mark.parametrize("version", PYTHONS)
def test_a_clean_environment(wheel: Path, tmp_path: Path, version: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = interpreter(version)
    if source is None:
        pytest.skip(f"Python {version} is not on PATH, not in pyenv, and uv cannot bring it")
    said([source, "-m", "venv", tmp_path / "venv"])
    python, clean = tmp_path / "venv" / "bin" / "python", {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": ""}}
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *pip_arguments()]
    torch = cpu_torch(python)
    if torch is None:
        said([*install, "--no-deps", wheel], **clean)
        place = said([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip()
        said([python, "-W", "error", "-m", "compileall", "-q", "-f", f"{place}/keepcover"], **clean)
        with capsys.disabled():
            print(
                f"\nPython {version}: no CPU build of torch can be had; installed without dependencies, every module compiles"
            )
        return
    said([*install, torch, f"{wheel}[cli]", "--constraint", ROOT / "constraints.txt"], **clean)
    assert said([python, "-W", "error::SyntaxWarning", "-c", SMALL], **clean).strip() == PROJECT["version"]
    command = tmp_path / "venv" / "bin" / "keepcover"
    assert "calibrate" in said([command, "--help"], **clean)
    assert "Miscoverage" in said([command, "calibrate", "--help"], **clean)
    assert PROJECT["version"] in said([command, "--version"], **clean)
    assert "With probability at least 90 %" in said([command, "show", "p.safetensors"], **clean)
    (sdist,) = wheel.parent.glob("*.tar.gz")
    said([*install, "--no-deps", "--force-reinstall", sdist], **clean)
    assert said([python, "-c", SMALL], **clean).strip() == PROJECT["version"]
    with capsys.disabled():
        print(f"\nPython {version}: wheel and sdist installed with {torch}, calibrated, predicted")
