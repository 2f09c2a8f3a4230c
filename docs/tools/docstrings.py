"""Docstrings are written for ``help()``: this turns their roles, formulas and grouped arguments into what the site renders."""

from __future__ import annotations

import html
import re
from typing import Any

from griffe import Extension, Object

ROLE = re.compile(r":(?:func|class|meth|mod|attr|data|exc):`~?([\w.]+)`")
MATHS = re.compile(r":math:`([^`]+)`")
EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)
GROUP = re.compile(r"^( {4})(\w+(?:, \w+)+)(: .*(?:\n {5,}\S.*)*)$", re.MULTILINE)

SYMBOLS = {
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "epsilon": "ε", "kappa": "κ", "lambda": "λ", "mu": "μ", "pi": "π",
    "rho": "ρ", "sigma": "σ", "tau": "τ", "theta": "θ", "Phi": "Φ", "le": "≤", "ge": "≥", "ne": "≠", "sim": "∼", "circ": "∘",
    "mapsto": "↦", "dots": "…", "lfloor": "⌊", "rfloor": "⌋", "sum": "Σ", "sqrt": "√", "sup": "sup", "max": "max", "min": "min",
    "log": "log", "ln": "ln", "in": "∈", "infty": "∞", "cdot": "·", "times": "×",
}  # fmt: skip
ACCENTS = {"hat": "\u0302", "tilde": "\u0303", "overline": "\u0305"}


def symbol(command: str) -> str:
    if command not in SYMBOLS:
        raise ValueError(f"a docstring uses \\{command}, which docs/tools/docstrings.py does not know; add it to SYMBOLS")
    return SYMBOLS[command]


def formula(tex: str) -> str:
    r"""A formula of our docstrings as HTML without a typesetter. An unknown command is an error, so that none is shown raw.

    Example:
        >>> formula(r"\alpha' = \sup\{a : H(a) \le \alpha\}, N_{cal}")
        "<span class=\"maths\">α' = sup{a : H(a) ≤ α}, N<sub>cal</sub></span>"
    """
    text = html.escape(tex, quote=False)
    text = re.sub(r"\\mathrm\{(\w+)\}", r"\1", text)
    text = re.sub(r"\\(hat|tilde|overline)[ {]*(\\?\w+)\}?", lambda m: f"{m[2]}{ACCENTS[m[1]]}", text)
    text = re.sub(r"\\([A-Za-z]+)", lambda m: symbol(m[1]), text)
    text = re.sub(r"\\([{},; ])", lambda m: "\u2009" if m[1] in ",; " else f"\\{m[1]}", text)
    for mark, tag in (("_", "sub"), (r"\^", "sup")):
        text = re.sub(rf"{mark}(?:\{{([^{{}}]*)\}}|(\S))", lambda m, tag=tag: f"<{tag}>{m[1] or m[2]}</{tag}>", text)
    text = re.sub(r"√\{([^{}]*)\}", r"√(\1)", text)
    text = re.sub(r"(?<!\\)[{}]", "", text).replace("\\", "")
    return f'<span class="maths">{text}</span>'


def rendered(text: str) -> str:
    """Roles as links where the name has an entry, else as code; one line per argument; ``Example:`` as a section of doctests."""
    text = ROLE.sub(r'<autoref identifier="\1" optional><code>\1</code></autoref>', text)
    text = MATHS.sub(lambda match: formula(match[1]), text)
    text = GROUP.sub(lambda m: "\n".join(f"{m[1]}{name}{m[3]}" for name in m[2].split(", ")), text)
    return EXAMPLE.sub("Examples:", text)


class Docstrings(Extension):
    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = rendered(obj.docstring.value)
