"""A progress line for long work: silent for the first two seconds, and where the output is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

Report = Callable[[int, int], None]


class Bar:
    """Counts steps and redraws one line on a terminal: ``smoothing  ━━━━━━────  60 %  12 s left``.

    Example:
        >>> bar = Bar("smoothing", total=3, show=False)
        >>> for _ in range(3): bar.advance()
        >>> bar.done
        3
    """

    def __init__(self, label: str, total: int | None, show: bool | Report = True) -> None:
        self.label, self.total, self.done = label, total, 0
        self.report = show if callable(show) else None
        self.visible = show is True and sys.stderr.isatty()
        self.start, self.drawn, self.width = time.monotonic(), False, 72

    def advance(self, steps: int = 1) -> None:
        self.done += steps
        if self.report:
            self.report(self.done, self.total or self.done)
        elapsed = time.monotonic() - self.start
        if not self.visible or elapsed < 2:
            return
        if self.total:
            share = min(self.done / self.total, 1.0)
            left = elapsed / share - elapsed if share else 0.0
            text = f"{self.label}  {'━' * round(24 * share):─<24}  {share:4.0%}  {left:.0f} s left"
        else:
            text = f"{self.label}  {self.done} done  {elapsed:.0f} s"
        self.width = max(self.width, len(text))
        sys.stderr.write(f"\r{text:<{self.width}}")
        sys.stderr.flush()
        self.drawn = True

    def close(self) -> None:
        if self.drawn:
            sys.stderr.write("\r" + " " * self.width + "\r")
            sys.stderr.flush()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
