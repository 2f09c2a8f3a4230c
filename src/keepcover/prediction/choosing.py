"""Which noise: several smoothers, of which the holdout alone picks one."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from keepcover.engine.inputs import in_memory, length
from keepcover.engine.smoother import Smoother, bound
from keepcover.errors import InputError, KeepcoverWarning
from keepcover.methods import Holdout
from keepcover.noise import Gaussian, Noise, Threat, get_noise
from keepcover.prediction.collecting import Parts, run
from keepcover.prediction.question import Level, Question, Shape, one_noise

AUTO = "auto"
FACTORS = (0.5, 0.5**0.5, 1.0, 2.0**0.5, 2.0, 3.0, 4.0)  # of epsilon, that sigma="auto" tries


def matching_sigma(epsilon: float, norm: str | None = None, shape: Shape = None) -> float:
    """The sigma at which an attack is as strong as one of L2 length sigma: epsilon itself in L2.

    Example:
        >>> round(matching_sigma(0.125), 4), round(matching_sigma(1 / 255, "linf", (3, 32, 32)), 4)
        (0.125, 0.2174)
    """
    strength, low, high = Gaussian(1.0).up(0.5, 1.0), 1e-3, 1e6
    for _ in range(60):
        middle = math.sqrt(low * high)
        weak = Threat(Gaussian(middle), 1.0, norm, shape).up(0.5) <= strength
        low, high = (low, middle) if weak else (middle, high)
    return high * epsilon


def sigma_grid(epsilons: Sequence[float], norm: str | None = None, shape: Shape = None) -> list[float]:
    """The sigmas around :func:`matching_sigma` of these radii, to three digits: of their geometric mean where there are several.

    Example:
        >>> sigma_grid([0.125])
        [0.0625, 0.0884, 0.125, 0.177, 0.25, 0.375, 0.5]
    """
    if not epsilons or min(epsilons) <= 0:
        raise InputError("sigma is looked for around epsilon, which must be above 0; give sigma as a number")
    centre = matching_sigma(math.exp(sum(map(math.log, epsilons)) / len(epsilons)), norm, shape)
    return [float(f"{factor * centre:.3g}") for factor in FACTORS]


def smoothers_of(
    model: Any, sigma: Any, noise: Any, levels: Sequence[Level], norm: str | None, shape: Shape
) -> list[Smoother]:
    """The model under the noise that was asked for, or under each that the holdout may choose."""
    if isinstance(model, Sequence):
        if sigma is not None or noise is not None:
            raise InputError("give either sigma or several (sigma, model) pairs, not both")
        if len(model) == 0 or not all(isinstance(pair, Sequence) and len(pair) == 2 for pair in model):
            raise InputError("expected (sigma, model) pairs, for instance [(0.25, a), (0.5, b)]")
        return [Smoother(one, get_noise(added)) for added, one in model]
    if sigma == AUTO and noise is None:
        smoother = model if isinstance(model, Smoother) else Smoother(model, 0.0)
        grid = sigma_grid(sorted({epsilon for _, epsilon in levels}), norm, shape)
        return [smoother.under(Gaussian(one)) for one in seen_of(smoother, grid)]
    if isinstance(model, Smoother):
        if (sigma is not None or noise is not None) and one_noise(sigma, noise) != model.noise:
            raise InputError(f"the smoother already adds {model.noise}; leave sigma and noise out or make them agree")
        return [model]
    return [Smoother(model, one_noise(sigma, noise))]


def seen_of(smoother: Smoother, grid: Sequence[float]) -> Sequence[float]:
    """Those of a grid that a model which denoises has seen; all of them where that leaves none."""
    return [one for one in grid if _bound_quietly(smoother, one)] or grid


def _bound_quietly(smoother: Smoother, sigma: float) -> bool:
    """Whether a model that must know its noise takes this one without a warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", KeepcoverWarning)
        bound(smoother.model, Gaussian(sigma))
    return not any(issubclass(one.category, KeepcoverWarning) for one in caught)


def pick(smoothers: Sequence[Smoother], parts: Parts, question: Question, seed: int, shape: Shape) -> Smoother:
    """The smoother whose sets are smallest on the holdout, summed over the levels. No calibration point is looked at."""
    if len(smoothers) == 1:
        return smoothers[0]
    if not in_memory(parts.data) and parts.given is None:
        raise InputError("choosing among several noises reads the holdout once for each: give it as holdout=")

    def size(one: Smoother) -> float:
        collected = run(one, parts, question, seed, only_holdout=True)
        assert collected.holdout is not None
        known = replace(question, task=collected.task)
        return expected_size(collected.holdout, known, one.noise, length(parts.data) or 10**6, shape)

    return min(smoothers, key=size)


def expected_size(holdout: Holdout, question: Question, noise: Noise, n: int, shape: Shape) -> float:
    """Mean set size summed over the levels with n calibration points, from the holdout alone."""
    asked = [question.asked(level, noise, n, shape).settled(holdout) for level in question.levels]
    return sum(question.method.fit(one, holdout).estimated_size(holdout) for one in asked)
