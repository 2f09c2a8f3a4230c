"""The methods side by side, each calibrated when it is first asked for and kept."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from keepcover.engine.memory import RememberingSmoother
from keepcover.errors import InputError, KeepcoverWarning
from keepcover.explore.subject import Subject
from keepcover.guarantee import Guarantee
from keepcover.methods import Auto, Method, RSCPPlus, SplitCP
from keepcover.noise import Gaussian, Noise, Stream
from keepcover.prediction.calibration import calibrate
from keepcover.prediction.predictor import Predictor

ALPHAS, DRAWS = (0.05, 0.1, 0.2), (1, 4, 16, 64, 256)
STEPS = 15  # of the slider
MEMORY = 2**28  # bytes of noisy logits kept


@dataclass(frozen=True)
class Contender:
    """One column of the page. ``method`` is what :func:`calibrate` is asked for; None for a saved predictor."""

    key: str
    title: str
    method: Method | None
    noisy: bool = True


VANILLA = Contender("vanilla", "Vanilla CP", SplitCP(), noisy=False)
RSCP_PLUS = Contender("rscp", "RSCP+ with PTT", RSCPPlus("hoeffding"))
EXACT = Contender("exact", "Exact certificate", Auto())


def radii(largest: float, steps: int = STEPS) -> tuple[float, ...]:
    """The epsilons of the slider, 0 included, as short decimals.

    Example:
        >>> radii(0.75)[:4]
        (0.0, 0.05, 0.1, 0.15)
    """
    if not 0 < largest < float("inf"):
        raise InputError(f"expected a largest epsilon above 0, got {largest}")
    return tuple(float(f"{largest * step / steps:.4g}") for step in range(steps + 1))


def sentence(guarantee: Guarantee) -> str:
    """What one method promises, in words for people."""
    share, promise = f"{100 * (1 - guarantee.alpha):.6g} %", guarantee.promise
    start = f"{promise.confidence}contains the true label with probability at least {share}"
    start = start[0].upper() + start[1:]
    if not guarantee.certified:
        return f"{start} if the image is untouched{promise.sentence}. No promise under attack."
    reach = f"for any perturbation up to {guarantee.threat.reach}" if guarantee.epsilon else "of an untouched image"
    return f"{start} {reach}{promise.sentence}."


class Lineup:
    """Predictors by (method, alpha, draws), each for every epsilon of the slider, on noise that is the same each time.

    Args:
        subject: what is explored.
        alphas, draws: what people may choose among.
        epsilons: the stops of the slider; sixteen from 0 to the subject's reach by default.
        seed: of calibration and of the noise on show.

    A saved predictor brings its own alphas, epsilons and draws.
    """

    def __init__(
        self,
        subject: Subject,
        *,
        alphas: Sequence[float] = ALPHAS,
        draws: Sequence[int] = DRAWS,
        epsilons: Sequence[float] | None = None,
        seed: int = 0,
    ) -> None:
        self.subject, self.seed = subject, seed
        self.stream = Stream(seed, "test")
        self.lock = threading.Lock()  # around the model
        self.progress: dict[str, Any] = {}  # what is being calibrated, for those who wait
        self.watch: Callable[[], None] | None = None  # called when that changes
        self._clean = self._smoother(Gaussian(0.0))
        self._noisy = self._smoother(subject.noise)
        self._saved: Predictor | None = None
        self._made: dict[tuple[str, float, int], Predictor] = {}
        self._notes: list[str] = list(subject.notes)
        self._making = threading.Lock()
        if subject.saved is not None:
            self.contenders, self.alphas, self.epsilons, self.draws = self._around(subject.saved)
        else:
            self.contenders = (VANILLA, RSCP_PLUS, EXACT)
            self.alphas, self.draws = tuple(sorted(set(alphas))), tuple(sorted(set(draws)))
            self.epsilons = radii(subject.reach) if epsilons is None else tuple(sorted(set(epsilons)))
        if not self.alphas or not self.draws or self.draws[0] < 1:
            raise InputError(f"expected alphas, and draws of at least 1, got {alphas} and {draws}")

    def _smoother(self, noise: Noise) -> RememberingSmoother:
        look, own = self._advance if noise.certifies else None, self.subject.smoother
        options = {name: getattr(own, name) for name in ("device", "autocast", "channels_last", "compile")}
        return RememberingSmoother(
            own.model, noise, lock=self.lock, memory=MEMORY, look=look, progress=False, **options
        )

    def _around(
        self, saved: Predictor
    ) -> tuple[tuple[Contender, ...], tuple[float, ...], tuple[float, ...], tuple[int, ...]]:
        """Contenders, alphas, epsilons and draws where a saved predictor sets them."""
        self._saved = replace(saved, smoother=self._noisy if saved.noise.certifies else self._clean)
        alphas = tuple(sorted({alpha for alpha, _ in saved.levels}))
        every = {epsilon for _, epsilon in saved.levels}
        epsilons = tuple(sorted(e for e in every if all((alpha, e) in saved.levels for alpha in alphas)))
        if not epsilons:
            raise InputError("the predictor answers for no epsilon at all of its alphas; calibrate it for a grid")
        own = Contender("saved", f"Your predictor ({saved.guarantee.method})", None)
        beside = (VANILLA, RSCP_PLUS) if self.subject.calibration is not None else ()
        return (*beside, own), alphas, epsilons, (saved.draws,)

    @property
    def notes(self) -> tuple[str, ...]:
        """What calibration warned about, said once."""
        return tuple(dict.fromkeys(self._notes))

    @property
    def default(self) -> tuple[float, int]:
        """The alpha and the draws that the page starts with: the usual ones where they are offered."""
        alpha = 0.1 if 0.1 in self.alphas else self.alphas[len(self.alphas) // 2]
        return alpha, 16 if 16 in self.draws else self.draws[len(self.draws) // 2]

    def contender(self, key: str) -> Contender:
        return next(contender for contender in self.contenders if contender.key == key)

    def predictor(self, key: str, alpha: float, draws: int) -> Predictor:
        """A calibrated method; the first call for it may take a while."""
        contender = self.contender(key)
        if contender.method is None:
            assert self._saved is not None
            return self._saved
        place = (key, alpha, draws if contender.noisy else 1)
        if place not in self._made:
            with self._making:
                if place not in self._made:
                    self._made[place] = self._calibrate(contender, alpha, draws)
        return self._made[place]

    def _calibrate(self, contender: Contender, alpha: float, draws: int) -> Predictor:
        subject = self.subject
        assert contender.method is not None
        assert subject.calibration is not None
        assert subject.holdout is not None
        points = len(subject.calibration) + len(subject.holdout)
        per_point = contender.method.usual_calibration_draws(draws)
        what = f"calibrating {contender.title}, alpha {alpha:g}" + (f", {draws} draws" if contender.noisy else "")
        self.progress = {"what": what, "done": 0, "total": points * per_point if contender.noisy else points}
        with warnings.catch_warnings(record=True) as told:  # only calibration does this, one at a time
            warnings.simplefilter("always")
            try:
                return calibrate(
                    self._noisy if contender.noisy else self._clean,
                    subject.calibration.pair,
                    alpha=alpha,
                    epsilon=self.epsilons,
                    method=contender.method,
                    task=subject.task,
                    draws=draws if contender.noisy else 1,
                    holdout=subject.holdout.pair if contender.method.needs_holdout else None,
                    seed=self.seed + 1,
                )
            finally:
                self.progress = {}
                self._hear(told)

    def _hear(self, told: Sequence[warnings.WarningMessage]) -> None:
        """Keep what calibration warned of, but for full sets, which show on the page."""
        for warning in told:
            text = str(warning.message)
            if issubclass(warning.category, KeepcoverWarning) and "can only return everything" not in text:
                self._notes.append(f"{text[:1].upper()}{text[1:]}.")

    def _advance(self, rows: int) -> None:
        if self.progress:
            self.progress["done"] = min(self.progress["done"] + rows, self.progress["total"])
            if self.watch:
                self.watch()

    def smoother(self, noisy: bool) -> RememberingSmoother:
        return self._noisy if noisy else self._clean
