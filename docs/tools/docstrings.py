"""Docstrings are written for ``help()``: this turns their roles, formulas and grouped arguments into what the site renders."""

from __future__ import annotations

import html
import re
from typing import Any

from griffe import Extension, Object

ROLE = re.compile(r":(?:func|class|meth|mod|attr|data|exc):`~?([\w.]+)`")
MATHS = re.compile(r":math:`([^`]+)`")
DISPLAY = re.compile(r"^( *)\.\. math:: (.+(?:\n\1 +\S.*)*)$", re.MULTILINE)
EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)
GROUP = re.compile(r"^( {4})(\w+(?:, \w+)+)(: .*(?:\n {5,}\S.*)*)$", re.MULTILINE)

SYMBOLS = {
    "alpha": "α",
    "beta": "β",
    "gamma": "γ",
    "delta": "δ",
    "epsilon": "ε",
    "eta": "η",
    "kappa": "κ",
    "lambda": "λ",
    "mu": "μ",
    "pi": "π",
    "rho": "ρ",
    "sigma": "σ",
    "tau": "τ",
    "theta": "θ",
    "Phi": "Φ",
    "Pi": "Π",
    "le": "≤",
    "ge": "≥",
    "ne": "≠",
    "sim": "∼",
    "circ": "∘",
    "mapsto": "↦",
    "leftarrow": "←",
    "nabla": "∇",
    "dots": "…",
    "lfloor": "⌊",
    "rfloor": "⌋",
    "sum": "Σ",
    "sqrt": "√",
    "in": "∈",
    "infty": "∞",
    "cdot": "·",
    "times": "×",
    "quad": "\u2003",
    "qquad": "\u2003",
    "sup": "sup",
    "max": "max",
    "min": "min",
    "log": "log",
    "ln": "ln",
    "left": "",
    "right": "",
    "bigl": "",
    "bigr": "",
    "textstyle": "",
}
ACCENTS = {"hat": "\u0302", "tilde": "\u0303", "overline": "\u0305"}
PUNCTUATION = {",": "\u2009", ";": "\u2009", " ": " ", "|": "‖", "#": "#", "{": "\\{", "}": "\\}"}
INNER = r"\{((?:[^{}]|\{[^{}]*\})*)\}"  # braces, with at most one pair inside


def symbol(command: str) -> str:
    if command not in SYMBOLS:
        raise ValueError(
            f"a docstring uses \\{command}, which docs/tools/docstrings.py does not know; add it to SYMBOLS"
        )
    return SYMBOLS[command]


def formula(tex: str) -> str:
    r"""A formula of our docstrings as HTML without a typesetter. An unknown command is an error, so that none is shown raw.

    Example:
        >>> formula(r"\alpha' = \sup\{a : H(a) \le \alpha\}, N_{cal}")
        '<span class="maths">α\' = sup{a : H(a) ≤ α}, N<sub>cal</sub></span>'
    """
    text = html.escape(" ".join(tex.split()), quote=False)
    text = re.sub(r"\\(?:mathrm|operatorname)\{(\w+)\}", r"\1", text)
    text = re.sub(rf"\\frac{INNER}{INNER}", r"(\1) / (\2)", text)
    text = re.sub(r"\\(hat|tilde|overline)[ {]*(\\?\w+)\}?", lambda m: f"{m[2]}{ACCENTS[m[1]]}", text)
    text = re.sub(r"\\([A-Za-z]+)", lambda m: symbol(m[1]), text)
    text = re.sub(r"\\([{},;|# ])", lambda m: PUNCTUATION[m[1]], text)
    text = re.sub(r"√\{([^{}]*)\}", r"√(\1)", text)
    for mark, tag in (("_", "sub"), (r"\^", "sup")):
        script = re.compile(rf"{mark}(?:\{{([^{{}}]*)\}}|(\S))")
        while script.search(text):
            text = script.sub(lambda m, tag=tag: f"<{tag}>{m[1] or m[2]}</{tag}>", text)
    text = re.sub(r"(?<!\\)[{}]", "", text).replace("\\", "")
    return f'<span class="maths">{text}</span>'


def rendered(text: str, module: str = "") -> str:
    """Roles as links where the name has an entry, else as code; formulas; a line per argument; ``Example:`` as a section of doctests.

    A name without a package is looked for in ``module``, where the docstring stands.
    """

    def link(match: re.Match[str]) -> str:
        full = match[1] if match[1].startswith("keepcover") else f"{module}.{match[1]}"
        return f'<autoref identifier="{full}" optional><code>{match[1]}</code></autoref>'

    text = ROLE.sub(link, text)
    text = MATHS.sub(lambda match: formula(match[1]), text)
    text = DISPLAY.sub(lambda match: match[1] + formula(match[2]), text)
    text = GROUP.sub(lambda m: "\n".join(f"{m[1]}{name}{m[3]}" for name in m[2].split(", ")), text)
    return EXAMPLE.sub("Examples:", text)


class Docstrings(Extension):
    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = rendered(obj.docstring.value, obj.module.path)
