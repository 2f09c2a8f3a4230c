"""What the site makes of the pages: formulas for browsers, the changelog, the examples, and links that leave the folder."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).parent))  # mkdocs loads this file alone

from formulas import Formulas  # noqa: E402

OUTSIDE = re.compile(r"\[([^\]\n]+)\]\((\.\./[^)\s]+)\)")


def examples_page() -> str:
    """Every file of examples/ on one page, under its own name."""
    parts = [
        "# Examples",
        "",
        "Every file of `examples/` in the repository. Each one runs as it stands, and the tests run them all.",
    ]
    for path in sorted((ROOT / "examples").glob("*.py")):
        source = path.read_text(encoding="utf-8").rstrip()
        parts += ["", f"## {path.name}", "", "```python", source, "```"]
    return "\n".join(parts) + "\n"


def inside(markdown: str) -> str:
    """Links to files of the repository, as a reader of the site can follow them.

    Examples and the changelog have pages here; other files are named without a link.
    """

    def replaced(match: re.Match[str]) -> str:
        text, target = match[1], match[2].removeprefix("../")
        if target.startswith("examples/"):
            return f"[{text}](examples.md#{Path(target).name.replace('.', '')})"
        if target == "CHANGELOG.md":
            return f"[{text}](changelog.md)"
        return text

    return OUTSIDE.sub(replaced, markdown)


def on_config(config: Any) -> None:
    config.markdown_extensions.append(Formulas())


def on_files(files: Files, config: Any) -> Files:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "changelog.md", content=changelog))
    files.append(File.generated(config, "examples.md", content=examples_page()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return inside(markdown)


def on_post_page(output: str, **_: Any) -> str:
    """The theme's search dialog has no name for those who hear the page instead of seeing it."""
    return output.replace(
        'data-md-component="search" role="dialog"', 'data-md-component="search" role="dialog" aria-label="Search"'
    )
