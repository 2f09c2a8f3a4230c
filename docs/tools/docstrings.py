"""Docstrings are written for ``help()``: this turns their roles, formulas and grouped arguments into what the site renders."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

ROLE = re.compile(r":(?:func|class|meth|mod|attr|data|exc):`~?([\w.]+)`")
MATHS = re.compile(r":math:`([^`]+)`")
DISPLAY = re.compile(r"^( *)\.\. math:: (.+(?:\n\1 +\S.*)*)$", re.MULTILINE)
EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)
GROUP = re.compile(r"^( {4})(\w+(?:, \w+)+)(: .*(?:\n {5,}\S.*)*)$", re.MULTILINE)


def rendered(text: str, module: str = "") -> str:
    """Roles as links where the name has an entry, else as code; formulas; a line per argument; ``Example:`` as a section of doctests.

    A name without a package is looked for in ``module``, where the docstring stands.
    """

    def link(match: re.Match[str]) -> str:
        full = match[1] if match[1].startswith("keepcover") else f"{module}.{match[1]}"
        return f'<autoref identifier="{full}" optional><code>{match[1]}</code></autoref>'

    text = ROLE.sub(link, text)
    text = MATHS.sub(lambda match: f"${match[1].strip()}$", text)
    text = DISPLAY.sub(lambda match: f"{match[1]}$${match[2]}$$", text)
    text = GROUP.sub(lambda m: "\n".join(f"{m[1]}{name}{m[3]}" for name in m[2].split(", ")), text)
    return EXAMPLE.sub("Examples:", text)


class Docstrings(Extension):
    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = rendered(obj.docstring.value, obj.module.path)
