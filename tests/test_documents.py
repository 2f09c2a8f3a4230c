"""README, docs and examples run as written, and say what the code and results say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.cli import every_command

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted(p.name for p in (ROOT / "examples").glob("*.py"))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment
    )


@pytest.mark.parametrize("page", [page for page in PAGES if "```python" in (ROOT / page).read_text()])
def test_every_python_block_of_a_page_runs(page: str) -> None:
    """Blocks of one page run in order, in one process, as a reader would paste them."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    done = run("-c", "\n".join(blocks))
    assert done.returncode == 0, done.stderr
    assert "With probability at least 90 %" in done.stdout or "consistent" in done.stdout


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_runs(example: str) -> None:
    done = run(f"examples/{example}")
    assert done.returncode == 0, done.stderr


def test_generated_parts_are_current() -> None:
    """The README table and figure follow from results/, the command reference from the commands."""
    done = run("docs/generate.py", "--check")
    assert done.returncode == 0, done.stderr


def test_every_command_is_documented() -> None:
    reference = (ROOT / "docs" / "cli.md").read_text()
    commands = {" ".join(path) for path, _ in every_command()}
    assert commands == set(re.findall(r"^## holdfast ([\w ]+)", reference, re.MULTILINE))


@pytest.mark.parametrize("page", PAGES)
def test_no_internal_link_is_dead(page: str) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (ROOT / page).read_text())
    for link in links:
        if not link.startswith(("http://", "https://")):
            assert ((ROOT / page).parent / link).exists(), link


def test_every_public_name_has_a_docstring() -> None:
    import holdfast

    for name in holdfast.__all__:
        assert (getattr(holdfast, name).__doc__ or "").strip() or name == "METHODS", name
