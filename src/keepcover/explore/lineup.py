"""The methods side by side, each calibrated when it is first asked for and kept; their nested sets, and the bars that explain them."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from keepcover.engine.memory import RememberingSmoother
from keepcover.errors import InputError, KeepcoverWarning
from keepcover.explore.subject import Subject, refuse_groups
from keepcover.methods import Auto, Explanation, Method, RSCPPlus, SplitCP
from keepcover.noise import Gaussian, Noise, Stream, get_norm
from keepcover.prediction.calibration import calibrate
from keepcover.prediction.predictor import Predictor
from keepcover.scores import Reading

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


def radii(largest: float, norm: str = "l2", steps: int = STEPS) -> tuple[float, ...]:
    """The epsilons of the slider, 0 included, as short decimals, or as whole numbers where the norm counts.

    Example:
        >>> radii(0.75)[:4], radii(3, "l0")
        ((0.0, 0.05, 0.1, 0.15), (0.0, 1.0, 2.0, 3.0))
    """
    if not 0 < largest < float("inf"):
        raise InputError(f"expected a largest epsilon above 0, got {largest}")
    if get_norm(norm).replaces:
        return tuple(float(step) for step in range(int(get_norm(norm).check(largest)) + 1))
    return tuple(float(f"{largest * step / steps:.4g}") for step in range(steps + 1))


class Lineup:
    """Predictors by (method, alpha, draws), each for every epsilon of the slider, on noise that is the same each time.

    Args:
        subject: what is explored.
        alphas, draws: what the page offers.
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
        self.progress: dict[str, Any] = {}  # what is being calibrated, for a page that waits
        self.watch: Callable[..., None] | None = None  # told the same when it changes
        self.smoothers = {noisy: self._smoother(subject.noise if noisy else Gaussian(0.0)) for noisy in (True, False)}
        self._made: dict[tuple[str, float, int], Predictor] = {}
        self.notes = dict.fromkeys(subject.notes)  # and what calibration warned about, said once
        self._making = threading.Lock()
        listed, saved = [one for one in (VANILLA, RSCP_PLUS, EXACT) if self._fits(one.method)], subject.saved
        if saved is None:
            refuse_groups(subject.promise)
            offered = (subject.noise.positions(subject.shape),) if subject.noise.deterministic else draws
            self.contenders = tuple(listed)
            self.alphas, self.draws = tuple(sorted(set(alphas))), tuple(sorted(set(offered)))
            self.epsilons = radii(subject.reach, subject.norm) if epsilons is None else tuple(sorted(set(epsilons)))
        else:
            self._saved = replace(saved, smoother=self.smoothers[saved.noise.certifies])
            own = Contender("saved", f"Your predictor ({saved.guarantee.method})", None)
            beside = [] if subject.calibration is None else [one for one in listed if one is not EXACT]
            self.contenders = (*beside, own)
            self.alphas, every = (tuple(sorted(set(values))) for values in zip(*saved.levels))
            self.draws = (saved.draws,)
            self.epsilons = tuple(e for e in every if all((alpha, e) in saved.levels for alpha in self.alphas))
            if not self.epsilons:
                raise InputError("the predictor answers for no epsilon at all of its alphas; calibrate it for a grid")
        if not self.alphas or not self.draws or self.draws[0] < 1:
            raise InputError(f"expected alphas, and draws of at least 1, got {alphas} and {draws}")

    def _fits(self, method: Any) -> bool:
        return not (method.unfit(self.subject.noise) or method.refuses(self.subject.promise))

    def _smoother(self, noise: Noise) -> RememberingSmoother:
        own, look = self.subject.smoother, self._advance if noise.certifies else None
        how = {name: getattr(own, name) for name in ("device", "autocast", "channels_last", "compile")}
        return RememberingSmoother(own.model, noise, lock=self.lock, memory=MEMORY, look=look, progress=False, **how)

    @property
    def default(self) -> tuple[float, int]:
        """The alpha and the draws that the page starts with: the usual ones where they are offered."""
        alpha = 0.1 if 0.1 in self.alphas else self.alphas[len(self.alphas) // 2]
        return alpha, 16 if 16 in self.draws else self.draws[len(self.draws) // 2]

    def predictor(self, key: str, alpha: float, draws: int) -> Predictor:
        """A calibrated method; the first call for it may take a while."""
        contender = next(one for one in self.contenders if one.key == key)
        if contender.method is None:
            return self._saved
        place = key, alpha, draws if contender.noisy else 1
        if place not in self._made:  # one that is there is answered while another is calibrated
            with self._making:
                if place not in self._made:
                    self._made[place] = self._calibrate(contender, contender.method, alpha, place[2])
        return self._made[place]

    def sets(self, key: str, alpha: float, draws: int, images: Tensor, ids: Tensor, upto: float) -> Tensor:
        """The nested sets [e, n, k] of a method for images, one per epsilon of the slider up to the last one asked for."""
        epsilons = [epsilon for epsilon in self.epsilons if epsilon <= upto]
        return nested(own_sets(self.predictor(key, alpha, draws), images, ids, alpha, epsilons, self.stream))

    def _calibrate(self, contender: Contender, method: Method, alpha: float, draws: int) -> Predictor:
        subject = self.subject
        assert subject.calibration is not None
        assert subject.holdout is not None
        points = len(subject.calibration) + len(subject.holdout)
        what = f"calibrating {contender.title}, alpha {alpha:g}" + (f", {draws} draws" if contender.noisy else "")
        each = method.usual_calibration_draws(draws) if contender.noisy else 1
        self.progress = {"what": what, "done": 0, "total": points * each}
        with warnings.catch_warnings(record=True) as caught:  # only calibration does this, one at a time
            warnings.simplefilter("always")
            try:
                return calibrate(
                    self.smoothers[contender.noisy],
                    subject.calibration.pair,
                    alpha=alpha,
                    epsilon=self.epsilons,
                    norm=subject.norm if contender.noisy else None,
                    method=method,
                    promise=subject.promise,
                    task=subject.task,
                    draws=None if contender.noisy and subject.noise.deterministic else draws,
                    holdout=subject.holdout.pair if method.needs_holdout or subject.promise.needs_holdout else None,
                    seed=self.seed + 1,
                )
            finally:
                self.progress = {}
                for warning in caught:  # all but full sets, which show on the page
                    text = str(warning.message)
                    if issubclass(warning.category, KeepcoverWarning) and "can only return everything" not in text:
                        self.notes[f"{text[:1].upper()}{text[1:]}."] = None

    def _advance(self, rows: int) -> None:
        if self.progress:
            self.progress["done"] = min(self.progress["done"] + rows, self.progress["total"])
            if self.watch:
                self.watch(**self.progress)


def own_sets(
    predictor: Predictor, images: Tensor, ids: Tensor, alpha: float, epsilons: Sequence[float], stream: Stream
) -> Bool[Tensor, "e n k"]:
    """The sets of images [n, c, h, w] at every epsilon, each as its own rule gives it, from the same noise."""
    found = predictor.predict_all(images, ids=ids, seed=stream.seed)
    return torch.stack([found[alpha, epsilon].mask.cpu() for epsilon in epsilons])


def nested(own: Bool[Tensor, "e n k"]) -> Bool[Tensor, "e n k"]:
    """Running unions over growing epsilon: a superset keeps the guarantee, and no label leaves as epsilon grows.

    Example:
        >>> own = torch.tensor([[[True, False]], [[False, True]]])
        >>> nested(own)[1].tolist()
        [[True, True]]
    """
    return own.to(torch.uint8).cummax(dim=0).values.bool()


def bars(
    predictor: Predictor, image: Tensor, id: Tensor, alpha: float, epsilons: Sequence[float], stream: Stream
) -> list[Explanation]:
    """The bars [K] of one image [1, c, h, w] at every epsilon: a label is in the set iff its support reaches what is needed, which may
    lie outside [0, 1] where every label, or none, is in the set.
    """
    task: Any = predictor.task
    outputs = predictor.running.logits(image, predictor.draws, stream, id)
    ids = id.to(outputs.device)
    u, v = task.uniform(stream, ids), stream.uniform(ids, "boundary")
    prepared: dict[Reading, Any] = {}
    found = []
    for epsilon in epsilons:
        calibrated = predictor.levels[alpha, epsilon]
        rule, reading = calibrated.rule, calibrated.rule.reading
        if reading not in prepared:
            prepared[reading] = task.prepare(outputs, reading, u)
        draws, fit = prepared[reading].first(rule.test_draws), partial(task.fit, reading=reading)
        shown = rule.explain(draws, calibrated.threshold, fit, v)
        needed = shown.needed.cpu().clamp(-1.0, 2.0).expand(draws.values.shape[1])  # JSON knows no infinity
        words = "every label is in every set" if calibrated.full else shown.words
        found.append(replace(shown, support=shown.support[0].double().cpu(), needed=needed, words=words))
    return found
