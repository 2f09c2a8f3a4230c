"""``keepcover.check``: what a model can promise, from a small sample, before anything is paid for."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from keepcover.bounds import exact_level
from keepcover.engine.inputs import batches, length, take
from keepcover.engine.progress import Bar
from keepcover.engine.smoother import Classifier, Smoother
from keepcover.errors import InputError
from keepcover.methods import Exact, ExactAsymmetric, Holdout
from keepcover.models.denoiser import Denoised, Denoiser, denoised
from keepcover.noise import Gaussian, Stream, fresh_seed, get_norm
from keepcover.prediction.choosing import matching_sigma, seen_of, sigma_grid
from keepcover.prediction.collecting import warn_of_probabilities
from keepcover.prediction.question import DRAWS, Question, levels_of, numbers
from keepcover.prediction.report import Accuracy, wide
from keepcover.promises import Promise, Sample
from keepcover.scores import Score
from keepcover.tasks import Task, get_task

LEAST = 20  # points: fewer say nothing
RESAMPLED = 200  # bootstrap samples behind an interval
SIDE = 16  # pixels of the smallest photograph
WORTH = 0.95  # of the size alone: a denoiser that gives more is not worth its time


@dataclass(frozen=True)
class Trial:
    """One model at one sigma, on the sample.

    Attributes:
        denoised: whether the denoiser stands before the model.
        sigma: of the noise.
        accuracy: of one noisy draw.
        size: mean certified size to expect, with the ends ``low`` and ``high`` of its 95 % bootstrap interval.
        seconds: of one model evaluation.
    """

    denoised: bool
    sigma: float
    accuracy: float
    size: float
    low: float
    high: float
    seconds: float

    def __str__(self) -> str:
        name = "denoised" if self.denoised else "alone"
        size = f"{self.size:.2f} [{self.low:.2f}, {self.high:.2f}]"
        return f"{self.sigma:<8g}{name:<10}{self.accuracy:>9.1%}{size:>24}{1000 * self.seconds:>12.3g} ms"


@dataclass(frozen=True, repr=False)
class Check:
    """What :func:`check` found. Printed it is a table and a recommendation; :meth:`to_dict` is for JSON.

    Attributes:
        trials: every model at every sigma.
        best: the trial that the recommendation is about.
        clean: accuracy without noise.
        useful: whether sets of that size are worth having; if not, the model should learn to work under noise.
        points, classes, alpha, epsilon, draws: of the sample, of the model and of the question.
        norm: in which epsilon is measured.
        near: the sigma for fine-tuning, of those tried: networks that have learnt it do best near epsilon, as an L2 length.
        calibration_draws: model evaluations per calibration point that :func:`keepcover.calibrate` will make.
        note: why no denoiser was tried; empty where one was.
        denoiser: the file of the one that was; None for the bundled one.
        score: that was asked for; None for the usual one.
        smoother: whether the model came as a :class:`keepcover.Smoother`, as which it is then calibrated.
        model, rest: the model and the other points, as the command line names them.
        training: data to fine-tune it on, which are neither these points nor those.
    """

    trials: tuple[Trial, ...]
    best: Trial
    clean: float
    useful: bool
    points: int
    classes: int
    alpha: float
    epsilon: float
    draws: int
    calibration_draws: int
    norm: str
    near: float
    note: str = ""
    denoiser: str | None = None
    score: str | None = None
    smoother: bool = False
    model: str = "MODEL"
    rest: str = "--data DATA --part 4/4"
    training: str = "--data DATA"

    @property
    def query(self) -> str:
        """What a query costs."""
        return f"{self.draws} model evaluations, {_seconds(self.draws * self.best.seconds)}"

    def calibration(self, n: int = 1000) -> str:
        """What calibrating on n points costs."""
        count = n * (self.calibration_draws + 1)
        return f"{count} model evaluations, {_seconds(count * self.best.seconds)}"

    @property
    def recommendation(self) -> str:
        """Which sigma, denoiser or not, fine-tune or not, in a sentence."""
        sets = f"about {self.best.size:.1f} of {self.classes} labels"
        front = "with the denoiser before it" if self.best.denoised else "as it is"
        if self.useful:
            return f"Calibrate the model {front} at sigma {self.best.sigma:g}: sets will hold {sets}."
        would = f"{front} its sets would hold {sets}, at sigma {self.best.sigma:g}"
        if self.ruined:
            tune = f"Fine-tune the model under noise of sigma {self.near:g}, which takes images and no labels"
            return f"{tune}, and check it again: {would}."
        kept = f"although noise takes little of its accuracy, which is {self.clean:.1%} without"
        return f"Train the model further with labels, or ask for a smaller epsilon: {would}, {kept}."

    @property
    def ruined(self) -> bool:
        """Whether noise of sigma :attr:`near` takes accuracy that is there without: fine-tuning without labels gives it back."""
        alone = next(trial for trial in self.trials if trial.sigma == self.near and not trial.denoised)
        return Accuracy(alone.accuracy, self.clean).lost(self.classes) and not Accuracy(self.clean).lost(self.classes)

    @property
    def python(self) -> str:
        """The line that does it. The points that were checked may tune a rule, so they are its holdout, and others calibrate."""
        network, sigma = ("model.model" if self.smoother else "model"), self.best.sigma if self.useful else self.near
        wrapped = "model.under({sigma:g}, {model})" if self.smoother else "{model}"  # with the settings of the smoother
        if not self.useful:
            labels = "" if self.ruined else "labels, "
            tuned = wrapped.format(sigma=sigma, model=f"fit_under_noise({network}, images, {labels}sigma={sigma:g})")
            return f"from keepcover.training import fit_under_noise; model = {tuned}"
        own = "" if self.denoiser is None else f", {'denoiser' if self.denoiser == 'DENOISER' else repr(self.denoiser)}"
        model = wrapped.format(
            sigma=sigma, model=f"keepcover.denoised({network}{own})" if self.best.denoised else network
        )
        ask = f"epsilon={self.epsilon!r}, {'' if self.smoother else f'sigma={sigma:g}, '}alpha={self.alpha:g}, draws={self.draws}"
        ask += "" if self.norm == Gaussian.norms[0] else f", norm={self.norm!r}"
        ask += "" if self.score is None else f", score={'score' if self.score == 'SCORE' else repr(self.score)}"
        return f"predictor = keepcover.calibrate({model}, others, {ask}, holdout=checked)"

    @property
    def command(self) -> str:
        """The same on the command line."""
        if not self.useful:
            network = re.sub(r"^denoised(@[^:]*)?:", "", self.model)  # its weights alone are what training writes
            tune = f"--model {network} {self.training} --sigma {self.near:g} --out tuned.safetensors"
            return f"keepcover train base {tune}  # a built-in model; others in Python"
        front = "denoised" if self.denoiser is None else shlex.quote(f"denoised@{self.denoiser}")
        model = f"{front}:{self.model}" if self.best.denoised else self.model
        ask = f"--epsilon {self.epsilon!r} --sigma {self.best.sigma:g} --alpha {self.alpha:g} --draws {self.draws}"
        ask += "" if self.norm == Gaussian.norms[0] else f" --norm {self.norm}"
        ask += "" if self.score is None else f" --score {self.score}"
        return f"keepcover calibrate --model {model} {self.rest} {ask} --out predictor.safetensors"

    def to_dict(self) -> dict[str, Any]:
        """The numbers and the words, for JSON."""
        words = {"recommendation": self.recommendation, "python": self.python, "command": self.command}
        cost = {"query": self.query, "calibration of 1000 points": self.calibration()}
        return {**asdict(self), **words, "cost": cost}

    def __repr__(self) -> str:
        head = f"{'sigma':<8}{'model':<10}{'accuracy':>9}{'size of ' + str(self.classes):>24}{'evaluation':>15}"
        reach = f"{get_norm(self.norm).reach(self.epsilon)}, alpha {self.alpha:g}, {self.draws} draws per query"
        lines = [
            f"{self.points} points, {reach}; accuracy without noise {self.clean:.1%}",
            head,
            *map(str, self.trials),
            f"No denoiser was tried: {self.note}." if self.note else "",
            "Accuracy of one noisy draw; certified size with a 95 % bootstrap interval.",
            f"Calibration on 1000 points: {self.calibration()}. A query: {self.query}.",
            self.recommendation,
            f"    {self.python}",
            f"    {self.command}",
        ]
        return "\n".join(filter(None, lines))


def check(
    model: Classifier | Smoother,
    data: Any,
    *,
    epsilon: float,
    sigma: float | Sequence[float] | None = None,
    norm: str | None = None,
    alpha: float = 0.1,
    draws: int = DRAWS,
    score: str | Score | Callable[..., Tensor] | None = None,
    denoiser: Denoiser | str | None = None,
    points: int = 200,
    seed: int | None = None,
) -> Check:
    """What to expect of a model under noise: accuracy, certified set size and cost at several sigmas, and what to do.

    Sizes are those of ``exact`` with as many calibration draws as draws, fitted to the sample; a calibrated predictor, with
    more draws per calibration point, does a little better. What is chosen from these points depends on them: give
    points that will not calibrate, and use them afterwards as ``holdout=``.

    Args:
        model: ``images -> logits``, or a :class:`keepcover.Smoother` around it, which brings batch size, device and numerics.
        data: labelled images in [0, 1], of which ``points`` are looked at.
        epsilon: radius of the attack.
        sigma: one or several to try; a half, one, two and four times epsilon, as an L2 length, by default, of which those that a
            denoised model has never seen are left out.
        norm: in which epsilon is measured: ``l2``, ``l1`` or ``linf``. For other noise than Gaussian see :func:`keepcover.calibrate`.
        alpha, draws, score: as for :func:`keepcover.calibrate`.
        denoiser: what to try before the model where inputs are images; the bundled one by default.
        points: how many to look at, at random.
        seed: reproducible noise, for experiments.

    Example:
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
        >>> images = torch.rand(100, 1, 2, 2)
        >>> found = check(model, (images, model(images).argmax(dim=1)), epsilon=0.05, sigma=0.1, draws=2, points=50)
        >>> len(found.trials), found.points
        (1, 50)
    """
    smoother = model if isinstance(model, Smoother) else Smoother(model, 0.0)
    images, labels = _sample(data, max(1, points))
    shape, noiseless = tuple(images.shape[1:]), smoother.under(Gaussian(0.0))
    question = Question(get_task("classification", score=score), Exact(), levels_of(alpha, epsilon), norm, draws=draws)
    if len(question.levels) != 1:
        raise InputError(f"expected one alpha and one epsilon, got {alpha} and {epsilon}; check each by itself")
    question.check(Gaussian(1.0), None, shape)
    alpha, epsilon = question.levels[0]
    least, seen = max(LEAST, Promise().points_needed(exact_level(alpha))), min(points, len(images))
    if seen < least:
        raise InputError(
            f"expected at least {least} labelled points to look at for alpha = {alpha:g}, got {seen}; give more data and "
            "points, or raise alpha"
        )
    norm = Gaussian(1.0).check_norm(norm)
    if sigma is None:
        sigma = seen_of(smoother, sigma_grid([epsilon], norm, shape)[::2])
    sigmas = numbers(sigma, "sigma")
    if min(sigmas) <= 0:
        raise InputError(f"expected sigmas above 0, since noise is what certifies, got {min(sigmas):g}")
    stream = Stream(fresh_seed() if seed is None else seed, "holdout")
    outputs = noiseless.clean(images)[:, None]
    warn_of_probabilities(outputs)
    task, classes = question.task.seen(outputs), outputs.shape[2]
    truth = task.check_truth(labels, len(images))
    clean = _accuracy(task, outputs.cpu(), truth)
    wanted = [(False, smoother, one) for one in sigmas]
    before, note = _denoised(smoother, images, denoiser)
    if before is not None:
        low, high = before.model.denoiser.sigmas  # type: ignore[union-attr]
        wanted += [(True, before, one) for one in sigmas if low <= one <= high]
    question = replace(question, task=task)
    trials: list[Trial] = []
    with Bar("checking", len(wanted), smoother.progress) as bar:
        for one in wanted:
            trials.append(_trial(*one, images, truth, question, stream))
            bar.advance()
    best = min(trials, key=lambda trial: trial.size / (WORTH if trial.denoised else 1))
    useful = not (Accuracy(best.accuracy, clean).lost(classes) or wide(best.size, classes))
    matching = matching_sigma(epsilon, norm, shape)
    near, more = min(sigmas, key=lambda one: abs(one - matching)), ExactAsymmetric().usual_calibration_draws(draws)
    own = None if denoiser is None else "DENOISER" if isinstance(denoiser, Denoiser) else str(denoiser)
    named = score if score is None or isinstance(score, str) else "SCORE"
    asked = len(images), classes, alpha, epsilon, draws, more, norm, near
    return Check(tuple(trials), best, clean, useful, *asked, note, own, named, isinstance(model, Smoother))


def _accuracy(task: Task, outputs: Tensor, truth: Any) -> float:
    right = task.right(outputs, truth)
    assert right is not None
    return float(right.mean())


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"


def _sample(data: Any, points: int) -> tuple[Tensor, Tensor]:
    """Some labelled points, at random where that is possible: the first of a loader."""
    n = length(data)
    with suppress(InputError):  # it is then read in its own order
        order = torch.randperm(n or 0, generator=torch.Generator().manual_seed(0))
        data = data if n is None else take(data, order[:points].sort().values)
    seen: list[Any] = []
    for batch in batches(data, labelled=True):
        seen.append(batch)
        if sum(map(len, seen)) >= points:
            break
    return torch.cat([one.images for one in seen])[:points], torch.cat([one.labels for one in seen])[:points]


def _denoised(smoother: Smoother, images: Tensor, denoiser: Any) -> tuple[Smoother | None, str]:
    """The model behind a denoiser, where that makes sense, and else why it does not."""
    model = smoother.model
    if not isinstance(model, nn.Module):
        return None, "the model is no torch module"
    if any(isinstance(part, Denoised | Denoiser) for part in model.modules()):
        return None, "the model denoises already"
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        return None, "inputs are no images of 1 or 3 channels"
    if denoiser is None and min(images.shape[2:]) < SIDE:
        return None, f"the bundled one is for photographs, and images of less than {SIDE} pixels a side are none"
    try:
        return smoother.under(Gaussian(0.0), denoised(model, denoiser)), ""
    except InputError as error:
        if denoiser is not None:
            raise
        return None, str(error)


def _trial(
    front: bool, smoother: Smoother, sigma: float, images: Tensor, truth: Tensor, question: Question, stream: Stream
) -> Trial:
    """One model at one sigma: its accuracy, the size to expect and the time it takes."""
    noisy, draws, task, m = smoother.under(Gaussian(sigma)), question.draws, question.task, len(images)
    noisy.logits(images[:2], 1, stream)  # what the first call takes is paid once
    start = time.perf_counter()
    outputs = noisy.logits(images, draws, stream).cpu()
    seconds = (time.perf_counter() - start) / (m * draws)
    holdout = Holdout(task, outputs, truth, task.uniform(stream, torch.arange(m)))
    rule = question.method.fit(question.asked(question.levels[0], noisy.noise, m, tuple(images.shape[1:])), holdout)
    statistic = rule.statistic(holdout.items(rule.reading).draws)
    summary = task.summary(task.prepare(outputs, rule.reading, holdout.u), rule, torch.zeros(m))

    def size(rows: Tensor) -> float:
        """On these points, calibrated on them."""
        threshold = torch.tensor(rule.threshold_of(Sample(statistic[rows])), dtype=torch.float64)
        return float(task.sizes(task.inside(summary[rows], rule, threshold)).double().mean())

    generator = torch.Generator().manual_seed(0)
    again = torch.tensor([size(torch.randint(m, (m,), generator=generator)) for _ in range(RESAMPLED)])
    low, high = again.quantile(torch.tensor([0.025, 0.975])).tolist()
    return Trial(front, sigma, _accuracy(task, outputs, truth), size(torch.arange(m)), low, high, seconds)
