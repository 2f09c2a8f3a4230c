"""From a model and labelled data to a predictor: hold out, smooth, tune, calibrate."""

from __future__ import annotations

import datetime
import importlib.metadata
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from keepcover.engine.fingerprint import Identity
from keepcover.engine.inputs import Batch, InputRange, Rows, batches, in_memory, length
from keepcover.engine.progress import Bar, Report
from keepcover.engine.smoother import Classifier, Smoother, evaluation_mode
from keepcover.errors import InputError, KeepcoverWarning
from keepcover.guarantee import Guarantee, warn_of_coverage
from keepcover.methods import Method, Setting, get_method
from keepcover.methods.exact import Exact, ExactAsymmetric
from keepcover.methods.holdout import Holdout
from keepcover.noise.stream import Stream, fresh_seed
from keepcover.prediction.predictor import (
    Calibrated,
    Level,
    Predictor,
    noisy_scores,
    noisy_scores_of,
    score_kind,
    score_uniform,
)
from keepcover.scores.draws import Draws
from keepcover.scores.scores import Score, get_score, top_label
from keepcover.scores.transforms import PTT
from keepcover.tasks.metrics import check_labels


def calibrate(
    model: Classifier | Smoother | Sequence[tuple[float, Classifier]],
    data: Any,
    *,
    epsilon: float | Sequence[float],
    sigma: float | None = None,
    alpha: float | Sequence[float] = 0.1,
    score: str | Score | Callable[..., Tensor] = "hps",
    method: str = "auto",
    draws: int = 16,
    calibration_draws: int | None = None,
    transform: str | None = None,
    beta: float = 0.001,
    holdout: Any = None,
    randomize: bool = False,
    class_names: Sequence[str] | None = None,
    open_labels: bool = False,
    ids: Any = None,
    seed: int | None = None,
    fingerprint: str | None = None,
    batch_size: int | None = None,
    device: torch.device | str | None = None,
    autocast: torch.dtype | None = None,
    channels_last: bool = False,
    compile: bool = False,
    progress: bool | Report = True,
) -> Predictor:
    """Calibrate a classifier for robust prediction sets.

    Args:
        model: ``images -> logits``; a :class:`Smoother` around it, which then brings sigma and numerics along; or several
            ``(sigma, model)`` pairs, of which the holdout picks the best.
        data: labelled images in [0, 1]: ``(images, labels)``, a dataset or a loader; never seen in training.
        epsilon: L2 radius of the attack, in pixel units; several give a predictor that answers for each.
        sigma: standard deviation of the noise; epsilon to 2 epsilon works well for a model trained under that noise.
        alpha: miscoverage, 0.1 for 90 % coverage; several are allowed.
        score: ``hps``, ``aps``, ``raps``, a :class:`Score` or a function of logits.
        method: ``auto`` takes the better of ``exact`` and ``exact_asymmetric`` on the holdout; or any name in ``METHODS``.
        draws: model evaluations per query.
        calibration_draws: model evaluations per calibration point, paid once; by default 64 (at least ``draws``) for
            the exact certificates and ``draws`` for other methods.
        transform: ``none`` or ``ptt``; by default ``ptt`` for methods that average scores.
        beta: Monte Carlo failure budget of RSCP+.
        holdout: labelled data for tuning, disjoint from ``data``, or how many points to take from ``data``; by default min(500, n // 10).
        randomize: let the exact certificates randomise their boundary.
        class_names: names for reading sets.
        open_labels: allow the label -1 for a point whose class the model does not have. Every set misses it, so it counts
            as missed, and a level that cannot be met because of such points is refused. The promise then includes
            queries of unknown classes.
        ids: integers that key each point's noise; positions by default.
        seed: reproducible calibration, for experiments; fresh operating-system entropy by default.
        fingerprint: a string that identifies a model that is not an ``nn.Module``; needed to save the predictor.
        batch_size, device, autocast, channels_last, compile, progress: see :class:`Smoother`.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
        >>> images = torch.rand(400, 1, 2, 2)
        >>> labels = model(images).argmax(dim=1)
        >>> predictor = calibrate(model, (images, labels), epsilon=0.1, sigma=0.1, draws=4)
        >>> len(predictor.predict(images[:5]))
        5
    """
    alphas, epsilons = _levels(alpha, "alpha"), _levels(epsilon, "epsilon")
    warn_of_coverage(*alphas)
    levels = [(a, e) for a in alphas for e in epsilons]
    request = _Request(get_score(score), method, draws, calibration_draws, transform, beta, randomize, open_labels)
    options = {
        "batch_size": batch_size,
        "device": device,
        "autocast": autocast,
        "channels_last": channels_last,
        "compile": compile,
        "progress": progress,
    }
    seed = fresh_seed() if seed is None else seed
    holdout = int(holdout) if isinstance(holdout, Integral) else holdout
    if isinstance(model, Smoother):
        if sigma is not None and sigma != model.sigma:
            raise InputError(f"the smoother already has sigma {model.sigma:g}; leave sigma out or make them agree")
        if any(options[name] for name in ("batch_size", "device", "autocast", "channels_last", "compile")):
            raise InputError("the smoother brings its own batch_size, device and numerics; set them there")
        smoothers = [model]
    elif isinstance(model, Sequence):
        if sigma is not None:
            raise InputError("give either sigma or several (sigma, model) pairs, not both")
        if len(model) == 0 or not all(isinstance(pair, Sequence) and len(pair) == 2 for pair in model):
            raise InputError("expected (sigma, model) pairs, for instance [(0.25, a), (0.5, b)]")
        smoothers = [Smoother(m, float(s), **options) for s, m in model]
        if len(smoothers) > 1 and not in_memory(data) and (holdout is None or isinstance(holdout, int)):
            raise InputError(
                "choosing among several (sigma, model) pairs reads the holdout once per pair: give it as holdout="
            )
    elif sigma is None:
        raise InputError("expected sigma, the standard deviation of the noise; epsilon to 2 epsilon works well")
    else:
        smoothers = [Smoother(model, sigma, **options)]
    for smoother in smoothers:
        request.refuse_impossible(levels, smoother.sigma, length(data))
    parts = _Parts(data, holdout, ids, seed, request.needs_holdout or len(smoothers) > 1)
    if len(smoothers) > 1:
        smoother = min(smoothers, key=lambda s: _expected_size(s, parts, request, levels, seed))
    else:
        smoother = smoothers[0]
    collected = _collect(smoother, parts, request, seed, fingerprint)
    return _conformalize(smoother, collected, request, levels, class_names)


conformalize = calibrate


# -- inside calibrate --------------------------------------------------------------------------------------------------


def _levels(values: float | Sequence[float], name: str) -> list[float]:
    many = values if isinstance(values, Sequence) and not isinstance(values, str) else [values]
    try:
        # Through str: a float32 0.1 is meant as 1/10 by whoever typed it.
        listed = [float(str(v.item() if hasattr(v, "item") else v)) for v in many]  # type: ignore[union-attr]
    except (TypeError, ValueError):
        raise InputError(f"expected one or several numbers for {name}, got {values!r}") from None
    if not listed or len(set(listed)) != len(listed):
        raise InputError(f"expected one or several distinct values of {name}, got {values!r}")
    return listed


@dataclass(frozen=True)
class _Request:
    """What the user asked for, apart from data and model."""

    score: Score
    method: str
    draws: int
    asked_calibration_draws: int | None
    asked_transform: str | None
    beta: float
    randomize: bool
    open_labels: bool

    def __post_init__(self) -> None:
        if self.draws < 1 or (self.asked_calibration_draws or 1) < 1:
            raise InputError(f"expected at least 1 draw, got {self.draws} (calibration {self.asked_calibration_draws})")
        if self.transform not in ("none", "ptt"):
            raise InputError(f"expected transform none or ptt, got {self.transform!r}")
        if self.kind == "plain" and not self.score.bounded:
            raise InputError(
                f"{self.main.name} without PTT assumes scores in [0, 1] and {self.score.name!r} does not promise that; use "
                "transform='ptt', a bounded score, or an exact certificate"
            )

    @property
    def main(self) -> type[Method]:
        return ExactAsymmetric if self.method == "auto" else get_method(self.method)

    @property
    def transform(self) -> str:
        return self.asked_transform or ("none" if self.main.compares_only else "ptt")

    @property
    def calibration_draws(self) -> int:
        asked = self.asked_calibration_draws
        if asked is None:
            asked = max(64, self.draws) if self.main is ExactAsymmetric else self.draws
        return self.main.draws_used(self.draws, asked)[1]

    @property
    def holdout_draws(self) -> int:
        return max(self.calibration_draws, self.main.draws_used(self.draws, self.calibration_draws)[0])

    @property
    def kind(self) -> str:
        return score_kind(self.main, self.transform)

    @property
    def needs_holdout(self) -> bool:
        return self.main.uses_holdout or self.transform == "ptt"

    def setting(
        self, level: Level, sigma: float, n: int, classes: int, calibration_draws: int | None = None
    ) -> Setting:
        return Setting(
            level[0], level[1], sigma, self.draws, n, classes, calibration_draws or self.calibration_draws, self.beta
        )

    def refuse_impossible(self, levels: list[Level], sigma: float, n: int | None) -> None:
        """Impossible promises are refused before the network runs; n is checked again once it is known exactly."""
        for level in levels:
            setting = self.setting(level, sigma, n or 10**9, 2)
            Guarantee(
                self.main.name,
                self.main.certified,
                *level,
                sigma,
                self.draws,
                setting.n,
                self.calibration_draws,
                self.beta if self.main.pays_beta else None,
            )

    def fit(self, level: Level, sigma: float, n: int, classes: int, holdout: Holdout | None) -> Method:
        setting = self.setting(level, sigma, n, classes)
        if self.method != "auto":
            more = {"randomize": self.randomize} if issubclass(self.main, Exact | ExactAsymmetric) else {}
            return self.main.fit(setting, holdout, **more)
        if holdout is None:
            raise InputError("no holdout point was read; give holdout=(images, labels)")
        short = self.setting(level, sigma, n, classes, min(self.draws, self.calibration_draws))
        rules: list[Method] = [Exact.fit(s, holdout, self.randomize) for s in dict.fromkeys((setting, short))]
        rules.append(ExactAsymmetric.fit(setting, holdout, self.randomize))
        return min(rules, key=lambda rule: rule.estimated_size(holdout))


class _Parts:
    """The data as (role, batch) pairs: holdout points and calibration points, disjoint, decided by id alone."""

    def __init__(self, data: Any, holdout: Any, ids: Any, seed: int, needed: bool) -> None:
        self.data, self.ids = data, ids
        self.given = None if holdout is None or isinstance(holdout, int) else holdout
        self.chosen = torch.zeros(0, dtype=torch.int64)
        self.rows = {"holdout": Rows(), "calibration": Rows()}
        self.watched = self.given is not None
        if self.given is not None and in_memory(data) and in_memory(self.given):  # no need to run the network first
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", KeepcoverWarning)  # of pixels: they come when the data are used
                for role, source in (("holdout", self.given), ("calibration", data)):
                    for batch in batches(source, labelled=True):
                        self.rows[role].add(batch)
            self._refuse_overlap()
            self.watched = False
        if self.given is None and needed:
            n = length(data)
            if n is None:
                raise InputError("the data have no length, so no holdout can be drawn from them: give one as holdout=")
            size = min(500, n // 10) if holdout is None else holdout
            if n == 0:
                raise InputError("expected labelled images to calibrate on, got none")
            if not 1 <= size < n:
                raise InputError(
                    f"expected a holdout of 1 to {n - 1} of the {n} points, got {size}; give more data or holdout=(images, labels)"
                )
            # Which points are held out is no secret: only the noise is.
            generator = torch.Generator().manual_seed(seed % 2**63)
            self.chosen = torch.randperm(n, generator=generator)[:size]

    def holdout_batches(self) -> Iterator[Batch]:
        """The holdout alone, for choosing sigma."""
        if self.given is not None:
            yield from batches(self.given, labelled=True)
        else:
            for role, batch in self.all_batches():
                if role == "holdout":
                    yield batch

    def _refuse_overlap(self) -> None:
        shared = self.rows["calibration"].shared(self.rows["holdout"])
        if shared:
            raise InputError(
                f"{shared} of the calibration points are in holdout= too: what is tuned on a point must not be calibrated on it, "
                "or the promise is void. Split the data into disjoint parts (holdout=500 does it), and drop duplicates first"
            )

    def all_batches(self) -> Iterator[tuple[str, Batch]]:
        """Every batch once; what streams by is compared when all of it has passed."""
        for role, batch in self._batches():
            if self.watched:
                self.rows[role].add(batch)
            yield role, batch
        if self.watched:
            self._refuse_overlap()

    def _batches(self) -> Iterator[tuple[str, Batch]]:
        if self.given is not None:
            for batch in batches(self.given, labelled=True):
                yield "holdout", batch
        position = 0
        for batch in batches(self.data, self.ids, labelled=True):
            held = torch.isin(torch.arange(position, position + len(batch)), self.chosen)
            position += len(batch)
            for role, mask in (("holdout", held), ("calibration", ~held)):
                if mask.any():
                    yield role, batch if mask.all() else batch[mask.nonzero()[:, 0]]


@dataclass
class _Collected:
    """Noisy scores: the holdout's for every label, the calibration points' for their true label only."""

    holdout: Holdout | None
    calibration: Draws | None
    classes: int
    accuracy: float
    inputs: InputRange | None
    unknown: int  # calibration points of classes that the model does not have
    worst: float  # their score: no class that the model has scores higher
    identity: Identity | None

    @property
    def first_draws(self) -> Tensor:
        """Sorted scores of the holdout's true labels, one draw each: what PTT is fitted on."""
        assert self.holdout is not None
        known = self.holdout.labels < self.classes
        return self.holdout.true.values[known, 0].sort().values

    def transformed(self, alpha: float) -> _Collected:
        assert self.holdout is not None
        ptt = PTT(self.first_draws, b=1 - alpha)
        held = Holdout(Draws(ptt(self.holdout.draws.values)), self.holdout.labels)
        calibration = None if self.calibration is None else Draws(ptt(self.calibration.values))
        worst = float(ptt(torch.tensor([self.worst], dtype=ptt.holdout.dtype)))
        return replace(self, holdout=held, calibration=calibration, worst=worst)

    def keeps_unknown(self, rule: Method, threshold: float) -> bool:
        """Whether this threshold counts a query of an unknown class as covered, which no set of the model can do."""
        draws = Draws(torch.full((1, 1, rule.test_draws), self.worst))
        return bool(rule.decide(draws, threshold, torch.zeros(1)).any())


def _collect(
    smoother: Smoother,
    parts: _Parts,
    request: _Request,
    seed: int,
    fingerprint: str | None = None,
    only_holdout: bool = False,
) -> _Collected:
    """One pass over the data. PTT comes later: it is fitted on what is collected here."""
    streams = {role: Stream(seed, role) for role in ("holdout", "calibration")}
    draws = {"holdout": request.holdout_draws, "calibration": request.calibration_draws}
    kind = "order" if request.kind == "ptt" else request.kind
    kept: dict[str, list[Tensor]] = {"holdout": [], "calibration": []}
    labels: list[Tensor] = []
    worst = 1.0 if kind == "plain" else torch.inf
    classes, right, seen, unknown = 0, 0.0, 0, 0
    inputs: InputRange | None = None
    shape: tuple[int, ...] = ()
    source = (("holdout", b) for b in parts.holdout_batches()) if only_holdout else parts.all_batches()
    bar = Bar("smoothing", None if only_holdout else length(parts.data), smoother.progress)
    with evaluation_mode(smoother.model), bar:
        for role, batch in _small(source, smoother, draws):
            seen_here = InputRange.of(batch.images)
            shape = seen_here.shape or shape
            inputs = seen_here if inputs is None else inputs.union(seen_here)
            logits = smoother.logits(batch.images, draws[role], streams[role], batch.ids)
            if seen == 0:
                _warn_of_probabilities(logits)
            assert batch.labels is not None
            classes = logits.shape[2]
            y = check_labels(batch.labels, len(batch), classes, -int(request.open_labels)).to(logits.device)
            foreign = y < 0
            right += float((top_label(logits) == y[:, None]).double().mean(dim=1).sum())
            seen += len(batch)
            u = score_uniform(request.score, streams[role], batch.ids.to(logits.device))
            if role == "holdout":
                scores = noisy_scores(request.score, kind, logits, u).values
                if request.open_labels:  # one more label, that of every unknown class
                    scores = torch.cat([scores, torch.full_like(scores[:, :1], worst)], dim=1)
                labels.append(y.where(~foreign, classes).cpu())
            else:
                scores = noisy_scores_of(y.clamp_min(0), request.score, kind, logits, u).values
                if request.open_labels:
                    scores = scores.masked_fill(foreign[:, None], worst)
                    unknown += int(foreign.sum())
            kept[role].append(scores.cpu())
            bar.advance(len(batch))
        # Of the model as it ran here: it may be trained on before the predictor is saved.
        known = (
            None
            if only_holdout or inputs is None
            else Identity.of(smoother, shape, inputs.low, inputs.high, fingerprint)
        )
    holdout = Holdout(Draws(torch.cat(kept["holdout"])), torch.cat(labels)) if labels else None
    calibration = Draws(torch.cat(kept["calibration"])) if kept["calibration"] else None
    return _Collected(holdout, calibration, classes, right / max(seen, 1), inputs, unknown, worst, known)


def _warn_of_probabilities(logits: Tensor) -> None:
    if bool(logits.amin() >= 0) and bool(((logits.sum(dim=-1) - 1).abs() < 1e-3).all()):
        warnings.warn(
            "the model seems to return probabilities where logits are expected, so its scores are squeezed together and sets "
            "will be large; return logits, or the logarithm of the probabilities",
            KeepcoverWarning,
            stacklevel=4,
        )


def _small(
    source: Iterator[tuple[str, Batch]], smoother: Smoother, draws: dict[str, int]
) -> Iterator[tuple[str, Batch]]:
    """Cut batches so that their noisy logits stay small, however large a loader's batches are."""
    for role, batch in source:
        step = max(32, smoother.images_per_chunk(batch.images, draws[role]))
        for at in range(0, len(batch), step):
            yield role, batch[at : at + step]


def _expected_size(smoother: Smoother, parts: _Parts, request: _Request, levels: list[Level], seed: int) -> float:
    """Mean set size to expect over the levels asked for, from the holdout alone."""
    collected = _collect(smoother, parts, request, seed, only_holdout=True)
    n = length(parts.data) or 10**6
    total = 0.0
    for level in levels:
        own = collected.transformed(level[0]) if request.transform == "ptt" else collected
        assert own.holdout is not None
        total += request.fit(level, smoother.sigma, n, own.classes, own.holdout).estimated_size(own.holdout)
    return total


def _conformalize(
    smoother: Smoother, collected: _Collected, request: _Request, levels: list[Level], class_names: Sequence[str] | None
) -> Predictor:
    if collected.calibration is None:
        raise InputError("no calibration points are left after the holdout; give more data")
    classes, n = collected.classes, len(collected.calibration)
    if class_names is not None and len(class_names) != classes:
        raise InputError(f"expected {classes} class names, one per output of the model, got {len(class_names)}")
    if collected.accuracy < 1 / classes + 0.1 * (1 - 1 / classes):  # a tenth of the way from guessing to perfect
        warnings.warn(
            f"the model is right on only {collected.accuracy:.1%} of noisy draws at sigma {smoother.sigma:g}, so sets will be "
            "large; train or fine-tune it under this noise, or choose a smaller sigma",
            KeepcoverWarning,
            stacklevel=3,
        )
    calibrated: dict[Level, Calibrated] = {}
    for level in levels:
        own = collected.transformed(level[0]) if request.transform == "ptt" else collected
        assert own.calibration is not None
        rule = request.fit(level, smoother.sigma, n, classes, own.holdout)
        rule.guarantee()
        statistic = rule.calibration_statistic(own.calibration.first(rule.calibration_draws))
        threshold = rule.threshold(statistic)
        if own.unknown and own.keeps_unknown(rule, threshold):
            raise InputError(
                f"{own.unknown} of {n} calibration points have a label that the model does not know, and its sets miss "
                f"every such query: {rule.name} cannot promise {1 - level[0]:.6g}. Train on more rows so that every label "
                "is met, merge rare labels, or raise alpha"
            )
        if rule.always_full(threshold):
            warnings.warn(
                f"{rule.name} at alpha {level[0]:g}, epsilon {level[1]:g} can only return the full label set here; "
                f"{_help(rule, statistic)}more calibration points, a larger sigma or a smaller epsilon may help",
                KeepcoverWarning,
                stacklevel=3,
            )
        calibrated[level] = Calibrated(rule, request.transform, threshold)
    return Predictor(
        smoother,
        request.score,
        calibrated,
        # In the order of their first draw: what is saved need not tell which point was which.
        calibration=collected.calibration.values[collected.calibration.values[:, 0].argsort()],
        holdout=collected.first_draws if request.transform == "ptt" else None,
        classes=classes,
        class_names=None if class_names is None else tuple(class_names),
        identity=collected.identity,
        holdout_size=0 if collected.holdout is None else len(collected.holdout),
        inputs=collected.inputs,
        provenance=_provenance(),
    )


def _help(rule: Method, statistic: Tensor) -> str:
    """How many draws would give other sets than the full one, where the rule's bounds tell: a mean stays what it is."""
    if rule.compares_only:
        return "more draws, "
    for draws in (2**k for k in range(1, 21)):
        more = replace(rule, setting=replace(rule.setting, draws=draws, calibration_draws=draws))
        if draws > rule.test_draws and not more.always_full(more.threshold(statistic)):
            return f"it takes about draws={draws} to do better, or "
    return "more draws alone will not help: "


def _provenance() -> dict[str, str]:
    """When and with what a predictor was made; whoever knows more adds to it."""
    try:
        version = importlib.metadata.version("keepcover")
    except importlib.metadata.PackageNotFoundError:  # run from its sources
        version = "unknown"
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"created": created, "keepcover": version, "torch": str(torch.__version__)}
