"""From noisy outputs to a predictor: hold out, tune, calibrate. The network runs once; the rest is arithmetic on its outputs."""

from __future__ import annotations

import datetime
import importlib.metadata
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from keepcover.engine.arrivals import Gathered
from keepcover.engine.fingerprint import Identity
from keepcover.engine.inputs import Batch, InputRange, Rows, batches, check_ids, in_memory, length
from keepcover.engine.smoother import Classifier, Smoother
from keepcover.errors import InputError, KeepcoverWarning
from keepcover.methods import Asked, Holdout, Method, Rule, get_method
from keepcover.noise import Noise, Stream, Threat, fresh_seed, get_noise
from keepcover.prediction.outputs import check_outputs
from keepcover.prediction.predictor import Calibrated, Level, Predictor
from keepcover.prediction.source import source_of
from keepcover.promises import Promise
from keepcover.scores import Draws, Items, Reading, Score
from keepcover.tasks import Task, get_task

DRAWS = 16  # per query, where the user names none


def calibrate(
    model: Classifier | Smoother | Sequence[tuple[float | Noise, Classifier]],
    data: Any,
    *,
    epsilon: float | Sequence[float],
    sigma: float | None = None,
    noise: Noise | str | None = None,
    norm: str | None = None,
    alpha: float | Sequence[float] = 0.1,
    promise: Promise | None = None,
    method: str | Method = "auto",
    task: str | Task = "classification",
    score: str | Score | Callable[..., Tensor] | None = None,
    draws: int = DRAWS,
    calibration_draws: int | None = None,
    holdout: Any = None,
    class_names: Sequence[str] | None = None,
    ids: Any = None,
    seed: int | None = None,
    fingerprint: str | None = None,
) -> Predictor:
    """Calibrate a model for robust prediction sets.

    Args:
        model: ``images -> outputs``; a :class:`Smoother` around it, which brings noise, batch size, device and numerics
            along; or several ``(sigma, model)`` pairs, of which the holdout picks the best.
        data: labelled images in [0, 1]: ``(images, labels)``, a dataset or a loader; never seen in training.
        epsilon: radius of the attack, in pixel units; several give a predictor that answers for each.
        sigma: standard deviation of Gaussian noise; epsilon to 2 epsilon works well for a model trained under that noise.
        noise: any other noise, in place of sigma.
        norm: in which epsilon is measured; the noise's own by default.
        alpha: miscoverage, 0.1 for 90 % coverage; several are allowed.
        promise: for whom, how surely and despite what; marginal by default.
        method: ``auto`` takes the better of ``exact`` and ``exact_asymmetric`` on the holdout; or a name in ``METHODS``; or
            a method with its own options, such as ``Exact(randomize=True)``.
        task: what outputs mean and what a set is.
        score: ``hps`` (the default), ``aps``, ``raps``, a :class:`Score` or a function of logits.
        draws: model evaluations per query.
        calibration_draws: model evaluations per calibration point, paid once; the method's usual number by default: 64 for
            ``auto`` and ``exact_asymmetric``, as many as per query for the others.
        holdout: labelled data for tuning, disjoint from ``data``, or how many points to take from ``data``; by default
            min(500, n // 10).
        class_names: names for reading sets.
        ids: integers that key each point's noise; positions by default.
        seed: reproducible calibration, for experiments; fresh operating-system entropy by default.
        fingerprint: a string that identifies a model that is not an ``nn.Module``.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
        >>> images = torch.rand(400, 1, 2, 2)
        >>> labels = model(images).argmax(dim=1)
        >>> predictor = calibrate(model, (images, labels), epsilon=0.1, sigma=0.1, draws=4)
        >>> len(predictor.predict(images[:5]))
        5
    """
    smoothers = _smoothers(model, sigma, noise)
    question = Question.of(
        _task(task, score, class_names), method, alpha, epsilon, norm, promise, draws, calibration_draws
    )
    seed = fresh_seed() if seed is None else seed
    shape = _shape(data)
    for smoother in smoothers:
        question.check(smoother.noise, length(data), shape)
    parts = _Parts(data, holdout, ids, seed, question.method.needs_holdout or len(smoothers) > 1)
    if len(smoothers) > 1:
        if not in_memory(data) and parts.given is None:
            raise InputError(
                "choosing among several (sigma, model) pairs reads the holdout once per pair: give it as holdout="
            )
        smoother = min(smoothers, key=lambda one: _expected_size(one, parts, question, seed, shape))
    else:
        smoother = smoothers[0]
    collected = _run(smoother, parts, question, seed)
    made = conclude(question, collected, smoother.noise, shape)
    seen, first = collected.inputs, collected.shape
    assert seen is not None
    identity = Identity.of(smoother, first, seen.low, seen.high, fingerprint)
    return replace(made, smoother=smoother, identity=identity, numerics=smoother.numerics)


def calibrate_outputs(
    outputs: Any,
    truth: Any = None,
    *,
    epsilon: float | Sequence[float],
    sigma: float | None = None,
    noise: Noise | str | None = None,
    norm: str | None = None,
    shape: Sequence[int] | None = None,
    alpha: float | Sequence[float] = 0.1,
    promise: Promise | None = None,
    method: str | Method = "auto",
    task: str | Task = "classification",
    score: str | Score | Callable[..., Tensor] | None = None,
    draws: int | None = None,
    holdout: int | None = None,
    class_names: Sequence[str] | None = None,
    ids: Any = None,
    seed: int | None = None,
) -> Predictor:
    """Calibrate on noisy outputs that any framework has computed: ``outputs[i, j]`` is what the model returned for point i
    under the j-th noise vector.

    The guarantee adds that they were drawn under this noise, independently over points and draws, and that the noise of
    queries is fresh and secret. All N draws calibrate where the method has a use for them; ``draws`` are spent per query.

    Args:
        outputs: [n, N, ...], a tensor, an array or a :class:`LogitStore`, which knows its truth and its noise and is read in
            pieces where it is large.
        truth: of every point.
        shape: of one input, for norms whose bound depends on it.
        draws: model evaluations per query; min(16, N) by default.
        holdout: how many points to take for tuning; by default min(500, n // 10).
        epsilon, sigma, noise, norm, alpha, promise, method, task, score, class_names, ids, seed: as for :func:`calibrate`.

    Example:
        >>> logits = torch.randn(400, 8, 3) + 4 * torch.nn.functional.one_hot(torch.arange(400) % 3)[:, None]
        >>> predictor = calibrate_outputs(logits, torch.arange(400) % 3, epsilon=0.1, sigma=0.2, draws=4)
        >>> len(predictor.predict_outputs(logits[:5, :4]))
        5
    """
    source = source_of(outputs, truth, None if sigma is None and noise is None else _noise(sigma, noise))
    n, available = source.points, source.draws
    question = Question.of(
        _task(task, score, class_names),
        method,
        alpha,
        epsilon,
        norm,
        promise,
        min(DRAWS, available) if draws is None else draws,
        None,
    )
    if question.draws > available:
        raise InputError(f"asked for {question.draws} draws per query, only {available} outputs per point are there")
    per_point = question.method.draws_used(question.draws, available)[1]
    question = replace(question, calibration_draws=min(available, max(per_point, question.calibration_draws)))
    where = None if shape is None else tuple(shape)
    question.check(source.noise, n, where)
    seed = fresh_seed() if seed is None else seed
    keys = torch.arange(n) if ids is None else check_ids(ids, n)
    held = torch.zeros(n, dtype=torch.bool)
    if question.method.needs_holdout:
        held[chosen_rows(n, holdout, seed)] = True

    def chunks() -> Iterator[Chunk]:
        for role, some in (("holdout", held), ("calibration", ~held)):
            stream = Stream(seed, role)
            for piece in source.read(some.nonzero()[:, 0]) if some.any() else ():
                values = piece.outputs if source.kept else check_outputs(piece.outputs)
                yield Chunk(stream, keys[piece.rows].to(values.device), values, piece.truth)

    return conclude(question, collect(chunks(), question, n), source.noise, where)


# -- what is asked -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """What the user asked for, apart from data, model and noise."""

    task: Task
    method: Method
    levels: tuple[Level, ...]
    norm: str | None
    promise: Promise
    draws: int
    calibration_draws: int

    @classmethod
    def of(
        cls,
        task: Task,
        method: str | Method,
        alpha: Any,
        epsilon: Any,
        norm: str | None,
        promise: Promise | None,
        draws: int,
        calibration_draws: int | None,
    ) -> Question:
        if draws < 1 or (calibration_draws is not None and calibration_draws < 1):
            raise InputError(f"expected at least 1 draw, got {draws} (calibration {calibration_draws})")
        chosen = get_method(method)
        per_point = chosen.usual_calibration_draws(draws) if calibration_draws is None else calibration_draws
        levels = tuple((a, e) for a in numbers(alpha, "alpha") for e in numbers(epsilon, "epsilon"))
        return cls(task, chosen, levels, norm, promise or Promise(), draws, chosen.draws_used(draws, per_point)[1])

    @property
    def reading(self) -> Reading:
        """How calibration items are kept: the score, or its order where that will do."""
        return Reading(self.method.compares_only or self.method.transform is not None)

    @property
    def holdout_draws(self) -> int:
        return max(self.calibration_draws, self.method.draws_used(self.draws, self.calibration_draws)[0])

    def asked(self, level: Level, noise: Noise, n: int, shape: Any) -> Asked:
        threat = Threat(noise, level[1], self.norm, shape)
        return Asked(level[0], threat, self.draws, n, self.task.candidates, self.calibration_draws, self.promise)

    def check(self, noise: Noise, n: int | None, shape: Any) -> None:
        """Impossible promises are refused before the network runs; n is checked again once it is known exactly."""
        for level in self.levels:
            self.method.check(self.asked(level, noise, n or 10**9, shape), self.task)


def _task(task: str | Task, score: Any, class_names: Sequence[str] | None) -> Task:
    if isinstance(task, Task):
        if score is not None or class_names is not None:
            raise InputError("the task brings its own score and class names; give them there")
        return task
    options = {"score": score, "class_names": None if class_names is None else tuple(class_names)}
    return get_task(task, **{name: value for name, value in options.items() if value is not None})


def numbers(values: Any, name: str) -> list[float]:
    """One or several levels as the user typed them: a float32 0.1 is meant as 1/10."""
    many = values if isinstance(values, Sequence) and not isinstance(values, str) else [values]
    try:
        listed = [float(str(np.asarray(v)[()])) for v in many]
    except (TypeError, ValueError):
        raise InputError(f"expected one or several numbers for {name}, got {values!r}") from None
    if not listed or len(set(listed)) != len(listed):
        raise InputError(f"expected one or several distinct values of {name}, got {values!r}")
    return listed


def _noise(sigma: float | None, noise: Noise | str | None) -> Noise:
    if (sigma is None) == (noise is None):
        raise InputError(
            "expected sigma, the standard deviation of Gaussian noise (epsilon to 2 epsilon works well), or another noise=..., "
            "and not both"
        )
    return get_noise(noise if noise is not None else float(sigma or 0.0))


def _smoothers(model: Any, sigma: float | None, noise: Noise | str | None) -> list[Smoother]:
    if isinstance(model, Smoother):
        if (sigma is not None or noise is not None) and _noise(sigma, noise) != model.noise:
            raise InputError(f"the smoother already adds {model.noise}; leave sigma and noise out or make them agree")
        return [model]
    if not isinstance(model, Sequence):
        return [Smoother(model, _noise(sigma, noise))]
    if sigma is not None or noise is not None:
        raise InputError("give either sigma or several (sigma, model) pairs, not both")
    if len(model) == 0 or not all(isinstance(pair, Sequence) and len(pair) == 2 for pair in model):
        raise InputError("expected (sigma, model) pairs, for instance [(0.25, a), (0.5, b)]")
    return [Smoother(one, get_noise(added)) for added, one in model]


def _shape(data: Any) -> tuple[int, ...] | None:
    """The shape of one input, where it is known before reading."""
    first: Any = data[0] if isinstance(data, tuple) and len(data) == 2 else data
    shape = tuple(getattr(first, "shape", ()))
    return shape[1:] if len(shape) > 1 else None


# -- from data to noisy scores -----------------------------------------------------------------------------------------


def chosen_rows(n: int, size: int | None, seed: int) -> Tensor:
    """Which of n points are held out; that is no secret, only the noise is."""
    size = min(500, n // 10) if size is None else size
    if n == 0:
        raise InputError("expected labelled points to calibrate on, got none")
    if not 1 <= size < n:
        raise InputError(
            f"expected a holdout of 1 to {n - 1} of the {n} points, got {size}; give more data or holdout=(images, labels)"
        )
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed % 2**63))[:size]


class _Parts:
    """The data as (role, batch) pairs: holdout points and calibration points, disjoint, decided by position alone."""

    def __init__(self, data: Any, holdout: Any, ids: Any, seed: int, needed: bool) -> None:
        self.data, self.ids = data, ids
        size = int(holdout) if isinstance(holdout, Integral) else None
        self.given = None if holdout is None or size is not None else holdout
        self.chosen = torch.zeros(0, dtype=torch.int64)
        if self.given is None and needed:
            n = length(data)
            if n is None:
                raise InputError("the data have no length, so no holdout can be drawn from them: give one as holdout=")
            self.chosen = chosen_rows(n, size, seed)
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

    def _refuse_overlap(self) -> None:
        shared = self.rows["calibration"].shared(self.rows["holdout"])
        if shared:
            raise InputError(
                f"{shared} of the calibration points are in holdout= too: what is tuned on a point must not be calibrated on it, "
                "or the promise is void. Split the data into disjoint parts (holdout=500 does it), and drop duplicates first"
            )

    def batches(self, only_holdout: bool = False) -> Iterator[tuple[str, Batch]]:
        """Every batch once; what streams by is compared when all of it has passed."""
        watched = self.watched and not only_holdout
        for role, batch in self._batches(only_holdout):
            if watched:
                self.rows[role].add(batch)
            yield role, batch
        if watched:
            self._refuse_overlap()

    def _batches(self, only_holdout: bool) -> Iterator[tuple[str, Batch]]:
        if self.given is not None:
            for batch in batches(self.given, labelled=True):
                yield "holdout", batch
            if only_holdout:
                return
        position = 0
        for batch in batches(self.data, self.ids, labelled=True):
            held = torch.isin(torch.arange(position, position + len(batch)), self.chosen)
            position += len(batch)
            for role, mask in (("holdout", held), ("calibration", ~held)):
                if mask.any() and not (only_holdout and role == "calibration"):
                    yield role, batch if mask.all() else batch[mask.nonzero()[:, 0]]


class Chunk(NamedTuple):
    """Noisy outputs of some points in one role, whose name is that of their stream."""

    stream: Stream
    ids: Tensor
    outputs: Tensor
    truth: Any


@dataclass(frozen=True)
class Collected:
    """What calibration keeps: the holdout's noisy outputs, and of calibration points the scores of what they must cover."""

    holdout: Holdout | None
    items: Items | None
    task: Task
    right: Tensor | None = None
    inputs: InputRange | None = None
    shape: tuple[int, ...] = ()
    unknown: int = 0  # calibration points of classes that the model does not have


def _run(smoother: Smoother, parts: _Parts, question: Question, seed: int, only_holdout: bool = False) -> Collected:
    """One pass of the network over the data."""
    streams = {role: Stream(seed, role) for role in ("holdout", "calibration")}
    spans = {"holdout": range(question.holdout_draws), "calibration": range(question.calibration_draws)}
    total = length(parts.data)
    inputs: InputRange | None = None
    shape: tuple[int, ...] = ()

    def wanted() -> Iterator[tuple[Batch, range, Stream]]:
        nonlocal inputs, shape
        for role, batch in parts.batches(only_holdout):
            here = InputRange.of(batch.images)
            shape = here.shape or shape
            inputs = here if inputs is None else inputs.union(here)
            yield batch, spans[role], streams[role]

    running = smoother.streams(wanted(), None if only_holdout else total)
    chunks = (Chunk(stream, batch.ids, outputs, batch.labels) for batch, stream, outputs in running)
    return replace(collect(chunks, question, total), inputs=inputs, shape=shape)


def collect(chunks: Iterable[Chunk], question: Question, total: int | None) -> Collected:
    """Read noisy outputs once and keep what calibration needs of them."""
    items: list[Items] = []
    values, held, right = Gathered(total), Gathered(), Gathered(total)
    truths: list[Tensor] = []
    u: list[Tensor] = []
    task, warned, judged, unknown = question.task, False, False, 0
    for stream, ids, outputs, given in chunks:
        task = task.seen(outputs)
        if not warned:
            _warn_of_probabilities(outputs)
            warned = True
        known = task.check_truth(given, len(outputs))
        truth = known.to(outputs.device, non_blocking=True)
        good = task.right(outputs, truth)
        if good is not None:
            right.add(good)
            judged = True
        if stream.role == "holdout":
            held.add(outputs)
            truths.append(known.cpu())
            u.append(task.uniform(stream, ids).cpu())
            continue
        own = task.items(outputs, truth, question.reading, task.uniform(stream, ids))
        items.append(own)
        unknown += int((known < 0).sum()) if task.open_labels else 0
        values.add(own.draws.values)
    holdout = Holdout(task, held.whole(), torch.cat(truths), torch.cat(u)) if truths else None
    found = None
    if items:
        weights = [part.weight.cpu() for part in items if part.weight is not None]
        draws = Draws(values.whole(), items[0].draws.unit)
        found = Items(draws, sum(part.points for part in items), torch.cat(weights) if weights else None)
    return Collected(holdout, found, task, right.whole() if judged else None, unknown=unknown)


def _warn_of_probabilities(outputs: Tensor) -> None:
    if outputs.ndim == 3 and bool(outputs.amin() >= 0) and bool(((outputs.sum(dim=-1) - 1).abs() < 1e-3).all()):
        warnings.warn(
            "the model seems to return probabilities where logits are expected, so its scores are squeezed together and sets "
            "will be large; return logits, or the logarithm of the probabilities",
            KeepcoverWarning,
            stacklevel=4,
        )


def _expected_size(smoother: Smoother, parts: _Parts, question: Question, seed: int, shape: Any) -> float:
    """Mean set size to expect over the levels asked for, from the holdout alone."""
    collected = _run(smoother, parts, question, seed, only_holdout=True)
    assert collected.holdout is not None
    n = length(parts.data) or 10**6
    question = replace(question, task=collected.task)
    rules = [
        question.method.fit(question.asked(level, smoother.noise, n, shape), collected.holdout)
        for level in question.levels
    ]
    return sum(rule.estimated_size(collected.holdout) for rule in rules)


# -- from noisy scores to a predictor ----------------------------------------------------------------------------------


def conclude(question: Question, collected: Collected, noise: Noise, shape: Any) -> Predictor:
    """Fit every level's rule on the holdout, then look at the calibration points once."""
    if collected.items is None:
        raise InputError("no calibration points are left after the holdout; give more data")
    items, question = collected.items, replace(question, task=collected.task)
    if collected.right is not None and noise.certifies:
        _warn_of_accuracy(float(collected.right.mean()), question.task.candidates or 2, noise)
    levels: dict[Level, Calibrated] = {}
    for level in question.levels:
        asked = question.asked(level, noise, items.points, shape)
        rule = question.method.fit(asked, collected.holdout)
        rule.guarantee(question.task)
        own = rule.read(items)
        levels[level] = Calibrated(rule, torch.tensor(rule.threshold(own), dtype=torch.float64))
        _refuse_what_is_missed_anyway(levels[level], collected.unknown, items.points, level[0])
        if levels[level].full:
            warnings.warn(
                f"{rule.name} at alpha {level[0]:g}, epsilon {level[1]:g} can only return everything here; "
                f"{_advice(rule, own)}more calibration points, a larger sigma or a smaller epsilon may help",
                KeepcoverWarning,
                stacklevel=4,
            )
    holdout = collected.holdout
    return Predictor(
        question.task,
        levels,
        _unordered(items),
        noise,
        reference=None
        if question.method.transform is None or holdout is None
        else holdout.reference.sort().values.cpu(),
        holdout_size=0 if holdout is None else len(holdout),
        inputs=collected.inputs,
        provenance=_provenance(),
    )


def _refuse_what_is_missed_anyway(calibrated: Calibrated, unknown: int, n: int, alpha: float) -> None:
    """A class that the model does not have is in no set: a threshold that counts its points as covered promises too much."""
    rule = calibrated.rule
    worst = torch.full((1, rule.test_draws), torch.inf if rule.reading.order else 1.0)
    draws = Draws(
        worst if rule.transform is None else rule.transform(worst),
        unit=not rule.reading.order or rule.transform is not None,
    )
    if unknown and bool((rule.test_statistic(draws, torch.zeros(1)) <= calibrated.threshold).any()):
        raise InputError(
            f"{unknown} of {n} calibration points have a label that the model does not know, and its sets miss every such query: "
            f"{rule.name} cannot promise {1 - alpha:.6g}. Train on more rows so that every label is met, merge rare labels, or "
            "raise alpha"
        )


def _advice(rule: Rule, items: Items) -> str:
    """How many draws would help, where that can be told."""
    if rule.method.compares_only:
        return "more draws, "
    draws = rule.enough_draws(items.first(rule.calibration_draws))
    return "more draws alone will not help: " if draws is None else f"it takes about draws={draws} to do better, or "


def _unordered(items: Items) -> Items:
    """In the order of their first draw: what is saved need not tell which point was which."""
    order = items.draws.values[:, 0].argsort()
    weight = None if items.weight is None else items.weight[order]
    return Items(items.draws[order], items.points, weight)


def _warn_of_accuracy(accuracy: float, classes: int, noise: Noise) -> None:
    if accuracy < 1 / classes + 0.1 * (1 - 1 / classes):  # a tenth of the way from guessing to perfect
        warnings.warn(
            f"the model is right on only {accuracy:.1%} of noisy draws under {noise}, so sets will be large; train or fine-tune "
            "it under this noise, or choose less noise",
            KeepcoverWarning,
            stacklevel=4,
        )


@cache
def _version() -> str:
    try:
        return importlib.metadata.version("keepcover")
    except importlib.metadata.PackageNotFoundError:  # run from its sources
        return "unknown"


def _provenance() -> dict[str, str]:
    """When and with what a predictor was made."""
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"created": created, "keepcover": _version(), "torch": str(torch.__version__)}
