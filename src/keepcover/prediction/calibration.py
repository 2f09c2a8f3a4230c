"""From noisy outputs to a predictor: hold out, tune, calibrate, and renew. The network runs once; the rest is arithmetic on its
outputs.
"""

from __future__ import annotations

import datetime
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor

from keepcover.engine.fingerprint import Identity
from keepcover.engine.inputs import check_probabilities, check_table, in_memory, in_order, length, warn_of_units
from keepcover.engine.smoother import Classifier, Smoother, bound
from keepcover.errors import InputError, KeepcoverWarning, warn
from keepcover.methods import Holdout, Method, Rule, SplitCP, get_method
from keepcover.noise import Gaussian, Noise, Stream, Threat, fresh_seed, get_noise
from keepcover.noise.stream import probes
from keepcover.prediction.artifact import digest
from keepcover.prediction.collecting import Chunk, Collected, Parts, chosen_rows, chunk_of, chunks_of, collect, run
from keepcover.prediction.predictor import Calibrated, Predictor
from keepcover.prediction.question import DRAWS, Level, Question, Shape, budget, levels_of, one_noise
from keepcover.prediction.source import InMemory, source_of
from keepcover.promises import Promise
from keepcover.scores import HPS, CustomScore, Draws, Items, Score, Tally, as_logits, get_score
from keepcover.store import LogitStore
from keepcover.tasks import Classification, PredictionSets, Task, get_task

AUTO = "auto"
FACTORS = (0.5, 0.5**0.5, 1.0, 2.0**0.5, 2.0, 3.0, 4.0)  # of epsilon, that sigma="auto" tries
Read = Callable[[int, Stream], Iterable[Chunk]]  # so many draws of every new point, under this noise


def calibrate(
    model: Classifier | Smoother | Sequence[tuple[float | Noise, Classifier]],
    data: Any,
    *,
    epsilon: float | Sequence[float],
    sigma: float | Literal["auto"] | None = None,
    noise: Noise | str | None = None,
    norm: str | None = None,
    alpha: float | Sequence[float] = 0.1,
    promise: Promise | None = None,
    method: str | Method = "auto",
    task: str | Task = "classification",
    score: str | Score | Callable[..., Tensor] | None = None,
    draws: int | None = None,
    calibration_draws: int | None = None,
    holdout: Any = None,
    class_names: Sequence[str] | None = None,
    input_scale: Sequence[float] | str | None = None,
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
            ``"auto"`` lets the holdout pick the one with the smallest sets, of seven from epsilon / 2 to 4 epsilon.
        noise: any other noise, in place of sigma.
        norm: in which epsilon is measured; the noise's own by default.
        alpha: miscoverage, 0.1 for 90 % coverage; several are allowed.
        promise: for whom, how surely and despite what; marginal by default.
        method: ``auto`` takes the better of ``exact`` and ``exact_asymmetric`` on the holdout; or a name in ``METHODS``; or
            a method with its own options, such as ``Exact(randomize=True)``.
        task: what outputs mean and what a set is.
        score: ``hps`` (the default), ``aps``, ``raps``, a :class:`Score` or a function of logits.
        draws: model evaluations per query, 16 by default; a deterministic noise has its own number.
        calibration_draws: model evaluations per calibration point, paid once; the method's usual number by default: 64 for
            ``auto`` and ``exact_asymmetric``, as many as per query for the others.
        holdout: labelled data for tuning, disjoint from ``data``, or how many points to take from ``data``; by default
            min(500, n // 10).
        class_names: names for reading sets.
        input_scale: for inputs [n, features] of different units: one unit per feature in which sigma and epsilon are measured,
            or ``"std"``, the standard deviations of the holdout.
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
    known, levels = get_task(task, score=score, class_names=class_names), levels_of(alpha, epsilon)
    seed = fresh_seed() if seed is None else seed
    inputs, labels = data if isinstance(data, tuple) and len(data) == 2 else (data, None)
    shape = tuple(getattr(inputs, "shape", ()))[1:] or None  # of one input, where it is known before reading
    smoothers = smoothers_of(model, sigma, noise, levels, norm, shape)
    spent = budget(smoothers[0].noise, draws, calibration_draws, shape)
    question = Question(known, get_method(method), levels, norm, Promise.of(promise), *spent)
    for smoother in smoothers:
        question.check(smoother.noise, length(data), shape)
    parts = Parts(data, holdout, ids, seed, question.needs_holdout or len(smoothers) > 1 or input_scale == "std")
    smoothers = _in_units(smoothers, input_scale, parts, inputs)
    group, label = question.groups(data, parts.calibrating), None
    if known.classed and labels is not None and not isinstance(labels, tuple):  # which would be a batch
        label = known.check_truth(labels, len(inputs))[parts.calibrating].cpu()
    question.warn_of_few(label, group)
    smoother = pick(smoothers, parts, question, seed, shape)
    collected = run(smoother, parts, question, seed, group)
    among = tuple(str(one.noise) for one in smoothers) if len(smoothers) > 1 else ()
    seen, first, added = collected.inputs, collected.shape, smoother.noise
    assert seen is not None
    if seen.shape is None and added.needs_shape(added.check_norm(norm)):
        raise InputError(f"with {added} the promise depends on the shape of an input, and several came; calibrate each")
    made = conclude(question, collected, added, seen.shape)
    identity = Identity.of(smoother, probes(first, seen.low, seen.high, seen.tokens), fingerprint)
    return replace(made, smoother=smoother, identity=identity, numerics=smoother.numerics, among=among)


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
    source = source_of(outputs, truth, None if sigma is None and noise is None else one_noise(sigma, noise))
    n, available = source.points, source.draws
    known, where = get_task(task, score=score, class_names=class_names), None if shape is None else tuple(shape)
    wanted, _ = budget(source.noise, draws, None, where, min(DRAWS, available))
    if wanted > available or (source.noise.deterministic and wanted != available):
        raise InputError(f"asked for {wanted} draws per query, {available} outputs per point are there")
    levels, promised = levels_of(alpha, epsilon), Promise.of(promise)
    question = Question(known, get_method(method), levels, norm, promised, wanted, available)
    question.check(source.noise, n, where)
    seed = fresh_seed() if seed is None else seed
    held = torch.zeros(n, dtype=torch.bool)
    if question.needs_holdout:
        held[chosen_rows(n, holdout, seed)] = True
    group = question.groups(n, ~held)
    label = known.check_truth(source.truth, n)[~held].cpu() if isinstance(source, InMemory) and known.classed else None
    question.warn_of_few(label, group)
    roles = {"holdout": held, "calibration": ~held}
    parts = (chunks_of(source, at.nonzero()[:, 0], Stream(seed, role), ids, available) for role, at in roles.items())
    return conclude(question, collect(chain.from_iterable(parts), question, n, group), source.noise, where)


def split_conformal(
    calibration: Any,
    test: Any,
    *,
    alpha: float = 0.1,
    score: str | Score | Callable[..., Tensor] | None = "hps",
    class_names: Sequence[str] | None = None,
    seed: int | None = None,
) -> PredictionSets:
    """Prediction sets from probabilities, or from scores of your own, that any model has given.

    The sets of :func:`keepcover.calibrate` and ``predict`` with ``method="cp"`` and no noise. They contain the true label of
    an exchangeable point with probability at least 1 - alpha; under attack they promise nothing.

    Args:
        calibration: ``(probabilities, labels)`` of points that the model has not been trained on: tensors or arrays [n, K],
            rows that sum to one, and [n].
        test: probabilities [m, K] of the points to predict, in the same precision.
        alpha: miscoverage.
        score: ``hps``, ``aps``, ``raps``, a :class:`Score` or a function of logits, which are the logarithms here; or
            ``None`` if both arrays hold scores already, small where a label fits.
        class_names: names for reading sets.
        seed: reproducible numbers for a randomised score, for experiments; fresh operating-system entropy by default.

    Example:
        >>> import keepcover
        >>> probabilities = torch.tensor([0.7, 0.2, 0.1]).repeat(19, 1)
        >>> labels = torch.tensor([0] * 15 + [1] * 4)
        >>> new = torch.tensor([[0.9, 0.05, 0.05], [0.5, 0.3, 0.2]])
        >>> sets = keepcover.split_conformal((probabilities, labels), new, class_names=["cat", "dog", "fox"])
        >>> list(sets)
        [['cat'], ['cat', 'dog', 'fox']]
        >>> print(sets.guarantee)
        With probability at least 90 %, the set contains the true label of a query that is not attacked (method cp, 19 calibration points); under attack cp promises nothing.

        Logits enter as probabilities, or as scores that do not saturate:

        >>> from keepcover.scores import log_odds
        >>> logits, more = torch.randn(99, 10), torch.randn(5, 10)
        >>> known = logits.argmax(dim=1)
        >>> len(keepcover.split_conformal((log_odds(logits), known), log_odds(more), score=None))
        5
    """
    if not (isinstance(calibration, tuple | list) and len(calibration) == 2):
        raise InputError("expected calibration points as (probabilities, labels), or (scores, labels) with score=None")
    asked = None if score is None else get_score(score)
    known, values = (_checked(part, what, asked) for part, what in ((calibration[0], "calibration"), (test, "test")))
    if values.shape[1] != known.shape[1] or values.dtype != known.dtype:
        what = "expected calibration and test points with the same classes in the same precision"
        found = f"{known.shape[1]} of {known.dtype} and {values.shape[1]} of {values.dtype}"
        raise InputError(f"{what}, got {found}; rounding one of them would move its ties")
    given: Score
    if asked is None:
        given = CustomScore(lambda scores: scores, "given")
    elif type(asked) is HPS:
        given = CustomScore(torch.neg, "hps")  # the order of 1 - p, and nothing is rounded
    else:
        known, values, given = as_logits(known), as_logits(values), asked
    levels = levels_of(alpha, 0.0)
    if len(levels) != 1:
        raise InputError(f"expected one number for alpha, got {alpha!r}")
    seed = fresh_seed() if seed is None else seed
    task = Classification(given, None if class_names is None else tuple(class_names)).seen(known[:, None])
    question = Question(task, SplitCP(), levels)
    question.check(Gaussian(0.0), len(known), None)
    stream, truth = Stream(seed, "calibration"), task.check_truth(calibration[1], len(known)).to(known.device)
    items = task.items(known[:, None], truth, question.reading, task.uniform(stream, _positions(known)))
    made = conclude(question, Collected(None, items, task), Gaussian(0.0), None)
    (inside,) = made.decide(values[:, None], _positions(values), Stream(seed, "test")).values()
    return task.sets(inside, made.guarantee)


def _positions(values: Tensor) -> Tensor:
    return torch.arange(len(values), device=values.device)


def _checked(values: Any, what: str, score: Score | None) -> Tensor:
    """Stored numbers as a tensor [n, K], or an error that says what is wrong with them."""
    if score is not None:
        return check_probabilities(values, f"{what} probabilities")
    scores = check_table(values, f"{what} scores")
    if scores.isnan().any():
        raise InputError(f"{what} scores contain NaN; a NaN has no rank, so no guarantee can be given")
    return scores


def _in_units(smoothers: list[Smoother], input_scale: Any, parts: Parts, inputs: Any) -> list[Smoother]:
    """The smoothers with one unit per feature; a warning where features need some and have none."""
    if input_scale is None:
        if getattr(inputs, "ndim", 0) == 2 and smoothers[0].input_scale is None and smoothers[0].noise.certifies:
            warn_of_units(torch.as_tensor(inputs))
        return smoothers
    if isinstance(input_scale, str):
        if input_scale != "std":
            raise InputError(f'expected input_scale="std" or one positive number per feature, got {input_scale!r}')
        # A loader may hold out other points when it is read again.
        if not in_memory(parts.data) and parts.given is None:
            raise InputError('input_scale="std" reads the holdout before the network does: give it as holdout=')
        # On the holdout alone: units that calibration points had a say in would void their exchangeability with queries.
        held = torch.cat([batch.images for role, batch in parts.batches(only_holdout=True) if role == "holdout"])
        if held.ndim != 2 or len(held) < 2:
            raise InputError(f"input_scale is for inputs [n, features] and a holdout of some, got {list(held.shape)}")
        input_scale = held.double().std(dim=0).tolist()
    return [smoother.under(smoother.noise, input_scale=input_scale) for smoother in smoothers]


# -- which noise: several, of which the holdout alone picks one --------------------------------------------------------


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
        seen = [one for one in grid if _bound_quietly(smoother, one)]  # a denoiser has not seen every sigma
        return [smoother.under(Gaussian(one)) for one in seen or grid]
    if isinstance(model, Smoother):
        if (sigma is not None or noise is not None) and one_noise(sigma, noise) != model.noise:
            raise InputError(f"the smoother already adds {model.noise}; leave sigma and noise out or make them agree")
        return [model]
    return [Smoother(model, one_noise(sigma, noise))]


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


# -- thresholds --------------------------------------------------------------------------------------------------------


def conclude(question: Question, collected: Collected, noise: Noise, shape: Shape) -> Predictor:
    """Fit every level's rule on the holdout, then look at the calibration points once."""
    if collected.items is None:
        raise InputError("no calibration points are left after the holdout; give more data")
    items, holdout, question = collected.items, collected.holdout, replace(question, task=collected.task)
    question.promise.check(question.task)
    levels: dict[Level, Calibrated] = {}
    for level in question.levels:
        asked = question.asked(level, noise, items.points, shape).settled(holdout)
        rule = question.method.fit(asked, holdout)
        rule.guarantee(question.task)
        levels[level] = calibrated(rule, items, collected.sample, collected.unknown)
    made = Predictor(
        question.task,
        levels,
        items.unordered(),
        noise,
        reference=holdout.reference.sort().values.cpu() if holdout and question.method.transform else None,
        holdout_size=0 if holdout is None else len(holdout),
        inputs=collected.inputs,
        accuracy=collected.accuracy,
        history=(entry("calibrate", items, collected.unknown, [0]),),
    )
    return announced(made)


def announced(made: Predictor) -> Predictor:
    """The predictor, once nothing that it promises is refused; a warning where its sets may be of little use."""
    for one in made.levels.values():
        made.promised(one)
    if made.warning is not None:
        warn(made.warning)
    return made


def calibrated(rule: Rule, items: Any, sample: Holdout | None, unknown: int) -> Calibrated:
    """The thresholds that calibration points give a rule, ``unknown`` of them of classes that the model does not have."""
    own = rule.read(items)
    threshold, alpha = rule.threshold(own), rule.asked.alpha
    made = Calibrated(rule, threshold, _size(rule, sample, threshold, items))
    worst = torch.full((1, rule.test_draws), torch.inf if rule.reading.order else 1.0)
    draws = Draws(worst if rule.transform is None else rule.transform(worst))
    # A class that the model does not have is in no set: a threshold that counts its points as covered promises too much.
    if unknown and bool((rule.test_statistic(draws, torch.zeros(1)) <= threshold).any()):
        what = f"{unknown} of {items.points} calibration points have a label that the model does not know"
        missed = f"its sets miss every such query: {rule.name} cannot promise {1 - alpha:.6g}"
        advice = "Train on more rows so that every label is met, merge rare labels, or raise alpha"
        raise InputError(f"{what}, and {missed}. {advice}")
    if made.full:
        threat, where = rule.asked.threat, f"{rule.name} at alpha {alpha:g}, epsilon {rule.asked.threat.epsilon:g}"
        advice = f"{_advice(rule, own)}more calibration points, {threat.noise.weaker} or a smaller epsilon may help"
        warn(f"{where} can only return everything here; {advice}")
    return made


def _size(rule: Rule, sample: Holdout | None, threshold: Tensor, items: Items | Tally) -> float | None:
    """Mean size to expect, with groups as frequent as among the calibration points."""
    if sample is None:
        return None
    if items.group is None:
        return float(rule.sizes(sample, threshold).mean())
    shares = (items.group.bincount(items.count, minlength=len(threshold)) / items.points).tolist()
    return sum(share * float(rule.sizes(sample, row).mean()) for share, row in zip(shares, threshold, strict=True))


def _advice(rule: Rule, items: Items | Tally) -> str:
    """How many draws would help, where that can be told."""
    if rule.method.compares_only or not isinstance(items, Items):
        return "" if rule.asked.threat.noise.deterministic else "more draws, "
    draws = rule.enough_draws(items.first(rule.calibration_draws))
    return "more draws alone will not help: " if draws is None else f"it takes about draws={draws} to do better, or "


def entry(how: str, items: Items | Tally, unknown: int, of: Sequence[int]) -> dict[str, Any]:
    """One line of a predictor's history: how, when and with what, which points came, and which batches thresholds come from."""
    import keepcover

    when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    made = {"how": how, "created": when, "keepcover": keepcover.__version__, "torch": str(torch.__version__)}
    return {**made, "points": items.points, "unknown": unknown, "scores": digest(items.scores), "of": list(of)}


# -- new thresholds for old rules: calibration points come and go in batches -------------------------------------------
#
# A rule that was fixed before a point was seen is as valid on that point as on those it was first calibrated on: given the
# holdout, the kept points and the next query are exchangeable, and that is all a threshold needs. Which batches stay depends on
# their order alone, never on their scores.


def from_network(old: Predictor, data: Any, ids: Any, **asked: Any) -> Predictor:
    """From new inputs: one pass of the network over them alone."""
    smoother = old.running

    def read(draws: int, stream: Stream) -> Iterable[Chunk]:
        for batch, outputs in smoother.stream(old.checked(data), draws, stream, ids, labelled=True):
            yield chunk_of(smoother, batch, stream, outputs)

    return renewed(old, read, length(data) if asked["groups"] is None else in_order(data), **asked)


def from_outputs(old: Predictor, outputs: Any, truth: Any, ids: Any, **asked: Any) -> Predictor:
    """From noisy outputs that were drawn elsewhere."""
    source = source_of(outputs, truth, old.noise)
    if isinstance(outputs, LogitStore) and old.identity and outputs.key.model != old.identity.fingerprint:
        raise InputError("the store holds the outputs of another model; smooth with the one that was calibrated")

    def read(draws: int, stream: Stream) -> Iterable[Chunk]:
        if source.draws < draws or (old.noise.deterministic and source.draws != draws):
            raise InputError(f"expected at least {draws} noisy outputs per point, as calibrated, got {source.draws}")
        return chunks_of(source, torch.arange(source.points), stream, ids, draws)

    return renewed(old, read, source.points, **asked)


def renewed(
    old: Predictor, read: Read, n: int | None, how: str, window: int | None, groups: Any, seed: int | None
) -> Predictor:
    """The predictor with thresholds from the batches that stay and from n new points, where n is known before they are read.

    What can be refused without them is refused first. See :meth:`Predictor.recalibrate` for the rest.
    """
    if how not in ("replace", "add", "window"):
        raise InputError(f"expected how to be 'replace', 'add' or 'window', got {how!r}")
    if (how == "window") != (window is not None) or (window is not None and window < 1):
        what = "expected how='window' together with window, the number of batches that stay, at least 1"
        raise InputError(f"{what}; got how={how!r}, window={window}")
    group, before, number = old.grouped(groups, n), old.provenance["of"], len(old.history)
    kept = {"replace": [], "add": before, "window": before[max(0, len(before) + 1 - (window or 1)) :]}[how]
    points, unknown = (sum(old.history[at][what] for at in kept) for what in ("points", "unknown"))

    def rules(points: int) -> dict[Level, Rule]:
        grown = ((level, one.rule, replace(one.rule.asked, n=points)) for level, one in old.levels.items())
        return {level: replace(rule, asked=asked) for level, rule, asked in grown}

    for rule in rules(points + n).values() if n is not None else ():
        rule.verify(old.task)
    widest = max((one.rule for one in old.levels.values()), key=lambda rule: rule.calibration_draws)
    asked, width = widest.asked, widest.calibration_draws  # so many draws are kept of every point
    question = Question(old.task, widest.method, tuple(old.levels), None, asked.promise, asked.draws, width)
    # Noise that no earlier batch has had, for the same seed either.
    stream = Stream(((fresh_seed() if seed is None else seed) + (number << 100)) % 2**128, "calibration")
    collected = collect(read(max(width, old.draws), stream), question, n, group, renewing=True)
    if collected.items is None:
        raise InputError("expected new labelled points, got none")
    new: Any = collected.items.first(width)
    old.grouped(groups, new.points)
    stay: Any = old.items.numbered(before[0]).first(width).of_batches(kept) if kept else None
    items = stay.plus(new.numbered(number)) if kept else new
    question.warn_of_few(items.label, None if items.group is None else items.group.repeat_interleave(items.count))
    missed, grown = collected.unknown + unknown, rules(items.points)
    levels = {level: calibrated(rule, items, collected.sample, missed) for level, rule in grown.items()}
    history = (*old.history, entry(how, new, collected.unknown, [*kept, number]))
    return announced(replace(old, levels=levels, items=items.unordered(), accuracy=collected.accuracy, history=history))
