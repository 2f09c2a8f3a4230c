"""TeX as MathML, which browsers set by themselves: no script, no font, no network."""

from __future__ import annotations

import re
from typing import Any

from latex2mathml.converter import convert
from markdown import Extension, Markdown
from markdown.inlinepatterns import InlineProcessor


def formula(tex: str, display: str = "inline") -> str:
    r"""One formula. An unknown command is an error, so that none is shown raw.

    Example:
        >>> formula(r"\alpha'")
        '<math xmlns="http://www.w3.org/1998/Math/MathML" display="inline"><mrow><msup><mi>&#x003B1;</mi><mi>&#x02032;</mi></msup></mrow></math>'
    """
    found = convert(" ".join(tex.split()), display=display)
    if raw := re.search(r"\\\w*", found):
        raise ValueError(f"the formula {tex!r} uses {raw[0]}, which latex2mathml does not know")
    return found


class _Dollars(InlineProcessor):
    def handleMatch(self, m: re.Match[str], data: str) -> tuple[Any, int, int]:  # type: ignore[override]  # noqa: ARG002, N802
        found = formula(m[1], "block") if m[1] else formula(m[2])
        return self.md.htmlStash.store(found), m.start(0), m.end(0)


class Formulas(Extension):
    r"""For Markdown: formulas between dollars, as GitHub reads them, ``$...$`` in a line and ``$$...$$`` on its own.

    Example:
        >>> page = Markdown(extensions=[Formulas()]).convert("**all $a$** of `$HOME`")
        >>> page == f"<p><strong>all {formula('a')}</strong> of <code>$HOME</code></p>"
        True
    """

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        # After code, which is 190, and before escapes, 180: a backslash is TeX's here.
        md.inlinePatterns.register(_Dollars(r"\$\$([^$]+)\$\$|\$(?! )([^$]+?)(?<! )\$", md), "formulas", 185)
