"""From a model or its noisy outputs to a predictor: hold out, tune, calibrate. The network runs once; the rest is arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor

from keepcover.engine.fingerprint import Identity
from keepcover.engine.inputs import in_memory, length, warn_of_units
from keepcover.engine.smoother import Classifier, Smoother
from keepcover.errors import InputError
from keepcover.methods import Method, get_method
from keepcover.noise import Noise, Stream, fresh_seed
from keepcover.noise.stream import probes
from keepcover.prediction.choosing import pick, smoothers_of
from keepcover.prediction.collecting import Parts, chosen_rows, chunks_of, collect, run
from keepcover.prediction.concluding import conclude
from keepcover.prediction.predictor import Predictor
from keepcover.prediction.question import DRAWS, Question, budget, levels_of, one_noise
from keepcover.prediction.source import InMemory, source_of
from keepcover.promises import Promise
from keepcover.scores import Score
from keepcover.tasks import Task, get_task


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
    made = conclude(question, collected, added, seen.shape, smoother)
    identity = Identity.of(smoother, probes(first, seen.low, seen.high, seen.tokens), fingerprint)
    return replace(made, identity=identity, numerics=smoother.numerics, among=among)


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
