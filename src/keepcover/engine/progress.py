"""Progress of long work, silent for the first two seconds: a bar on a terminal and in a notebook, else a line every ten seconds."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

Progress = bool | Callable[[int, int], None]  # show a bar, or a function called with (done, total)

WAIT, EVERY = 2.0, 10.0  # seconds before anything is shown, and between two lines of a log


def _notebook() -> bool:
    return hasattr(getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)(), "kernel")


class Bar(AbstractContextManager["Bar"]):
    """Counts steps and redraws one line on a terminal: ``smoothing  ━━━━━━────  60 %  12 s left``.

    In a notebook the same is a bar of the page. Anywhere else work that will take longer than ten seconds writes a line with
    its estimate as soon as it has one, and one more every ten seconds.

    Example:
        >>> bar = Bar("smoothing", total=3, show=False)
        >>> for _ in range(3): bar.advance()
        >>> bar.done
        3
    """

    def __init__(self, label: str, total: int | None, show: Progress = True) -> None:
        self.label, self.total, self.done = label, total, 0
        self.report = show if callable(show) else None
        self.visible = show is True
        self.start, self.drawn, self.width = time.monotonic(), False, 72
        self.line, self.page = -EVERY, None  # when the last line of a log was written; the display of a notebook

    def advance(self, steps: int = 1) -> None:
        self.done += steps
        if self.report:
            self.report(self.done, self.total or self.done)
        elapsed = time.monotonic() - self.start
        if not self.visible or elapsed < WAIT:
            return
        share = min(self.done / self.total, 1.0) if self.total else 0.0
        left = elapsed / share - elapsed if share else 0.0
        if _notebook():
            self._show(share, left)
        elif sys.stderr.isatty():
            bar = f"{'━' * round(24 * share):─<24}  {share:4.0%}  {left:.0f} s left"
            text = f"{self.label}  {bar if self.total else f'{self.done} done  {elapsed:.0f} s'}"
            self.width, self.drawn = max(self.width, len(text)), True
            sys.stderr.write(f"\r{text:<{self.width}}")
            sys.stderr.flush()
        elif elapsed - self.line >= EVERY and (elapsed + left > EVERY or not self.total) and share < 1:
            self.line = elapsed
            of = f" of {self.total}, about {left:.0f} s left" if self.total else ""
            sys.stderr.write(f"{self.label}: {self.done}{of} after {elapsed:.0f} s\n")
            sys.stderr.flush()

    def _show(self, share: float, left: float) -> None:
        """A bar of the page, redrawn in place."""
        text = f"{share:.0%}, {left:.0f} s left" if self.total else f"{self.done} done"
        html = f"{self.label} <progress max='1' value='{share:.3f}'></progress> {text}"
        shown: dict[str, Any] = {"text/plain": f"{self.label} {text}", "text/html": html}
        if self.page is None:
            display = importlib.import_module("IPython.display").display
            self.page = display(shown, raw=True, display_id=True)
        else:
            self.page.update(shown, raw=True)

    def close(self, *_: object) -> None:
        if self.drawn:
            sys.stderr.write("\r" + " " * self.width + "\r")
            sys.stderr.flush()

    __exit__ = close
