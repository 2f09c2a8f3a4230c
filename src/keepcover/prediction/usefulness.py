"""Whether sets will be of use: one sentence for all that show it, and the two comparisons that it rests on."""

from __future__ import annotations

from dataclasses import dataclass

from keepcover.noise import Noise

# Of the accuracy above guessing that noise may take, and of the labels beyond the first that sets may hold.
SHARE = 1 / 3


@dataclass(frozen=True)
class Accuracy:
    """The shares of calibration and holdout points that the model gets right, under one noise draw and without noise.

    Attributes:
        noisy: averaged over all draws.
        clean: None where only noisy outputs are known.

    Example:
        >>> Accuracy(0.5, 0.9).lost(10), Accuracy(0.8, 0.9).lost(10)
        (True, False)
    """

    noisy: float
    clean: float | None = None

    def lost(self, classes: int) -> bool:
        """Whether noise takes a third of the accuracy above guessing, or the model hardly does better than guessing."""
        guess = 1 / classes
        least = 0.1 * (1 - guess) if self.clean is None else max(0.1 * (1 - guess), (1 - SHARE) * (self.clean - guess))
        return self.noisy - guess < least


def wide(size: float, classes: int) -> bool:
    """Whether sets hold a third of the labels beyond the first.

    Example:
        >>> wide(4.75, 10), wide(1.35, 10)
        (True, False)
    """
    return size - 1 > SHARE * (classes - 1)


def warning(noise: Noise, accuracy: Accuracy, size: float | None, classes: int) -> str | None:
    """What a user should know before relying on such sets; None where they will do."""
    lost = accuracy.lost(classes)
    if not lost and (size is None or not wide(size, classes)):
        return None
    draws = f"{accuracy.noisy:.1%} of noisy draws under {noise}"
    draws += "" if accuracy.clean is None else f", on {accuracy.clean:.1%} without noise"
    sets = "sets will be large" if size is None else f"sets hold about {size:.1f} of {classes} labels"
    if lost:
        return f"the model is right on only {draws}, and {sets}; {noise.remedy}"
    more = "" if noise.deterministic else " or more draws"
    return f"{sets}, although the model is right on {draws}; choose more or less noise, a smaller epsilon{more}, or improve the model"
