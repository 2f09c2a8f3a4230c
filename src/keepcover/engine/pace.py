"""How many noisy images share a forward pass, chosen by timing a few sizes."""

from __future__ import annotations

import math

# Passes at the usual size first: short work is not worth a trial, and the first pass is slow for other reasons.
WARM = 8
TRIED = (0.25, 0.5, 2.0, 4.0)  # of the usual size
EACH = 2  # passes per size; the faster counts, since other work on the machine only slows


class Pace:
    """The share of the usual number of rows that passes have: 1, then each of four others, then the fastest per row.

    A batch too large makes the system map and zero fresh memory for every layer, one too small leaves the processor idle;
    where the best lies depends on network and machine.

    Example:
        >>> pace = Pace()
        >>> while not pace.settled:
        ...     pace.passed(rows=int(100 * pace.share), full=100 * pace.share, seconds=pace.share**2)
        >>> pace.share
        0.25
    """

    def __init__(self, measured: bool = True) -> None:
        self.share, self.settled, self.passes = 1.0, not measured, 0
        self.fastest = {1.0: math.inf}

    def passed(self, rows: int, full: float, seconds: float) -> None:
        """Take note of a pass; one that was less than half full tells nothing about its size."""
        if self.settled or rows <= full / 2:
            return
        self.passes += 1
        if self.passes > 1:  # the first pass ever pays for other things
            self.fastest[self.share] = min(seconds / rows, self.fastest.get(self.share, math.inf))
        turn = (self.passes - WARM) // EACH if self.passes >= WARM else -1
        self.settled = turn >= len(TRIED)
        if self.settled:
            best = min(self.fastest, key=lambda share: self.fastest[share])
            # A gain below 5 % is within what timing can tell.
            self.share = best if self.fastest[best] < 0.95 * self.fastest[1.0] else 1.0
        elif turn >= 0:
            self.share = TRIED[turn]
