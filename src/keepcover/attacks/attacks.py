r"""L2 attacks on smoothed classifiers: one loop, with hooks for the loss, the norm, the start and the goal.

SmoothAdv (Salman et al. 2019) is projected gradient ascent through the **expectation over noise**: the attacker draws
its own noise once, fixed during the attack and independent of the defender's, and climbs a loss of the mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keepcover.engine.devices import checked_device
from keepcover.engine.inputs import check_images
from keepcover.engine.progress import Bar, Report
from keepcover.engine.smoother import Classifier, evaluation_mode
from keepcover.errors import InputError
from keepcover.methods.exact import CountRule
from keepcover.noise.stream import Stream, fresh_seed, to_lattice_
from keepcover.prediction.predictor import Predictor, noisy_scores_of, score_uniform


class L2:
    """Euclidean steps and balls, per image.

    Example:
        >>> L2().project(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), 1.0)
        tensor([[0.6000, 0.8000],
                [0.3000, 0.4000]])
    """

    def length(self, delta: Tensor) -> Tensor:
        return delta.flatten(1).norm(dim=1).view(-1, *[1] * (delta.ndim - 1))

    def direction(self, gradient: Tensor) -> Tensor:
        """The unit step that raises the loss fastest."""
        return gradient / self.length(gradient).clamp_min(1e-30)

    def project(self, delta: Tensor, radius: float) -> Tensor:
        """The nearest point of the ball."""
        return delta * (radius / self.length(delta).clamp_min(1e-30)).clamp_max(1.0)

    def random(self, like: Tensor, radius: float, generator: torch.Generator) -> Tensor:
        """Uniform in the ball."""
        direction = self.direction(torch.randn(like.shape, generator=generator, device=like.device, dtype=like.dtype))
        u = torch.rand(len(like), generator=generator, device=like.device, dtype=like.dtype)
        return direction * radius * u.pow(1 / like[0].numel()).view_as(self.length(like))


# -- what the attacker maximises ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NoisyModel:
    """The attacker's view of a smoothed classifier: the model under the attacker's own noise, with gradients.

    sigma = 0 is the plain classifier, one evaluation per step. ``autocast`` runs the network in that dtype.
    """

    model: Classifier
    sigma: float
    draws: int
    stream: Stream
    autocast: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.stream.role != "attack":
            raise InputError(f"the attacker's noise must be its own: expected role 'attack', got {self.stream.role!r}")
        if self.draws < 1:
            raise InputError(f"expected at least 1 attacker draw, got {self.draws}")

    @property
    def rows(self) -> int:
        """Network evaluations per image and step."""
        return self.draws if self.sigma > 0 else 1

    def noise(self, ids: Tensor, shape: tuple[int, ...]) -> Tensor | None:
        return None if self.sigma == 0 else self.sigma * self.stream.gaussian(ids, range(self.draws), shape)

    def logits(self, images: Tensor, noise: Tensor | None) -> Float[Tensor, "b draws k"]:
        """As the defender makes them (:meth:`Stream.noisy`); gradients pass the rounding as if it were not there."""
        noisy = images[:, None] if noise is None else images[:, None] + noise
        if noise is not None:
            with torch.no_grad():
                to_lattice_(noisy, self.sigma)
        with torch.autocast(images.device.type, self.autocast) if self.autocast else nullcontext():
            out = self.model(noisy.flatten(0, 1).float())
        return out.float().view(len(images), noisy.shape[1], -1)


# Noisy logits [b, draws, K], true labels [b] and ids [b] -> what is maximised, one number per image.
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def mean_softmax(logits: Tensor, labels: Tensor, ids: Tensor) -> Tensor:  # noqa: ARG001
    r"""The paper's SmoothAdv loss: :math:`-\log` of the **mean over draws** of the true label's probability.

    Example:
        >>> logits = torch.tensor([[[0.0, 0.0], [0.0, 0.0]]])
        >>> mean_softmax(logits, torch.tensor([1]), torch.tensor([0]))
        tensor([0.6931])
    """
    own = logits.log_softmax(dim=-1).gather(-1, labels[:, None, None].expand(-1, logits.shape[1], 1))[..., 0]
    return math.log(own.shape[1]) - own.logsumexp(dim=1)


@dataclass(frozen=True)
class SmoothedScore:
    """The mean noisy score of the true label, as the predictor computes it: what RSCP and RSCP+ threshold.

    PTT is a step function with no gradient, so the attack climbs it through linear interpolation of its table.
    """

    predictor: Predictor
    stream: Stream

    def __call__(self, logits: Tensor, labels: Tensor, ids: Tensor) -> Tensor:
        (alpha, _), calibrated = next(iter(self.predictor.levels.items()))
        u = score_uniform(self.predictor.score, self.stream, ids)
        kind = "order" if calibrated.kind == "ptt" else calibrated.kind
        own = noisy_scores_of(labels, self.predictor.score, kind, logits, u).values
        if calibrated.kind == "ptt":
            ptt = self.predictor.ptt(alpha, own.device)
            assert ptt is not None
            own = _interpolate(own, ptt.holdout, ptt.table)
        return own.mean(dim=-1)


def _interpolate(scores: Tensor, knots: Tensor, table: Tensor) -> Tensor:
    """A table look-up that rises linearly between its knots."""
    at = torch.searchsorted(knots, scores.detach().contiguous()).clamp(1, len(knots) - 1)
    left, right = knots[at - 1], knots[at]
    share = ((scores - left) / (right - left).clamp_min(1e-9)).clamp(0, 1)
    return table[at] + share * (table[at + 1] - table[at])


@dataclass(frozen=True)
class CountMargin:
    """The margin of the exact rule: the (kappa+1)-th largest noisy score of the true label, minus t.

    The attacker's number of draws may differ from the rule's, so the position is scaled; a tenth of the draws around it
    is averaged, because the gradient of a single draw is noise.
    """

    predictor: Predictor
    stream: Stream

    def __call__(self, logits: Tensor, labels: Tensor, ids: Tensor) -> Tensor:
        calibrated = next(iter(self.predictor.levels.values()))
        rule = calibrated.rule
        assert isinstance(rule, CountRule)
        u = score_uniform(self.predictor.score, self.stream, ids)
        own = noisy_scores_of(labels, self.predictor.score, "order", logits, u).values
        descending = own.sort(dim=-1, descending=True).values
        draws = own.shape[-1]
        centre = min(draws - 1, round((rule.kappa + 0.5) / rule.test_draws * draws - 0.5))
        reach = draws // 20
        window = descending[:, max(0, centre - reach) : centre + reach + 1]
        return window.mean(dim=-1) - min(calibrated.threshold, 1e30)


def margin_loss(predictor: Predictor, stream: Stream) -> Loss:
    """The loss that attacks what a predictor certifies: the count margin, or the smoothed score."""
    rule = next(iter(predictor.levels.values())).rule
    return CountMargin(predictor, stream) if isinstance(rule, CountRule) else SmoothedScore(predictor, stream)


NO_GRADIENTS = (
    "gradient attacks need a model that PyTorch can differentiate, and this one gives no gradients (an ONNX file, an "
    "estimator, a remote service ...). What remains: a search by queries alone, attacks=['random'] (--attack random); "
    "images crafted on a similar PyTorch model, attacks={'transfer': keepcover.attacks.attacks.transfer(surrogate, sigma)} "
    "(--surrogate MODEL); or an attack of your own"
)

# -- the loop ----------------------------------------------------------------------------------------------------------


def pgd(
    noisy: NoisyModel,
    images: Float[Tensor, "n ..."],
    labels: Int[Tensor, " n"],
    epsilon: float,
    *,
    loss: Loss = mean_softmax,
    steps: int = 20,
    step_size: float | None = None,
    restarts: int = 1,
    random_start: bool = False,
    clip: tuple[float, float] | None = None,
    goal: float | None = None,
    norm: L2 | None = None,
    ids: Int[Tensor, " n"] | None = None,
    rows: int | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    progress: bool | Report = True,
    gradients: bool = True,
) -> Float[Tensor, "n ..."]:
    r"""Projected gradient ascent in the L2 ball: adversarial images, on the CPU.

    .. math:: \delta \leftarrow \Pi_{\|\delta\|_2 \le \epsilon}
        \left(\delta + \eta\, \nabla L / \|\nabla L\|_2\right), \qquad \eta = 2 \epsilon / steps

    The best iterate of all steps and restarts is returned. Its distance is checked in float64 after rounding: it is
    never above epsilon.

    Args:
        noisy: the model under the attacker's noise (sigma = 0 for plain PGD).
        images, labels: what is attacked and the labels to drive out.
        epsilon: L2 radius.
        loss: what is maximised; :func:`mean_softmax` is the paper's.
        step_size: 2 epsilon / steps by default.
        restarts, random_start: restarts after the first always start at random points of the ball.
        clip: keep pixels in this range, e.g. (0, 1).
        goal: stop working on an image once its loss exceeds this.
        rows: network evaluations held in memory at once.
        seed: of the random starts.
        gradients: False takes random directions instead, around the best point so far: see :func:`random_search`.

    Example:
        >>> model = torch.nn.Linear(2, 2)
        >>> x, y = torch.zeros(3, 2), torch.tensor([0, 1, 0])
        >>> adversarial = pgd(NoisyModel(model, 0.0, 1, Stream(0, "attack")), x, y, epsilon=0.5)
        >>> bool(((adversarial - x).norm(dim=1) <= 0.5).all())
        True
    """
    images = check_images(images)
    if not 0 <= epsilon < float("inf") or steps < 1 or restarts < 1:
        raise InputError(f"expected epsilon >= 0, steps >= 1 and restarts >= 1, got {epsilon}, {steps} and {restarts}")
    if len(labels) != len(images):
        raise InputError(f"expected one label per image, got {len(images)} images and {len(labels)} labels")
    norm = norm or L2()
    if step_size is None:
        step_size = 2 * epsilon / steps if gradients else epsilon / 2
    parameter = next(noisy.model.parameters(), None) if isinstance(noisy.model, torch.nn.Module) else None
    device = (
        checked_device(device)
        if device is not None
        else parameter.device
        if parameter is not None
        else torch.device("cpu")
    )
    ids = torch.arange(len(images)) if ids is None else ids
    if rows is None:
        rows = (2**20 if device.type == "cpu" else 2**24) // max(1, images[0].numel())
    per_chunk = max(1, rows // noisy.rows)
    generator = torch.Generator(device=device).manual_seed(seed)
    out = torch.empty_like(images, device="cpu")
    with evaluation_mode(noisy.model), Bar("attacking", len(images), progress) as bar, _FrozenParameters(noisy.model):
        for at in range(0, len(images), per_chunk):
            part = slice(at, at + per_chunk)
            x, y, i = images[part].to(device), labels[part].to(device), ids[part].to(device)
            noise = noisy.noise(i, tuple(x.shape[1:]))
            best, peak = x.clone(), torch.full((len(x),), -torch.inf, device=device)
            for restart in range(restarts):
                start = random_start or restart > 0
                delta = norm.random(x, epsilon, generator) if start else torch.zeros_like(x)
                _climb(
                    noisy,
                    loss,
                    norm,
                    x,
                    y,
                    i,
                    noise,
                    _inside(x, delta, clip),
                    epsilon,
                    step_size,
                    steps,
                    clip,
                    goal,
                    best,
                    peak,
                    None if gradients else generator,
                )
            out[part] = _within(x, best, epsilon).cpu()
            bar.advance(len(x))
    return out


def _climb(
    noisy: NoisyModel,
    loss: Loss,
    norm: L2,
    x: Tensor,
    y: Tensor,
    ids: Tensor,
    noise: Tensor | None,
    delta: Tensor,
    epsilon: float,
    step_size: float,
    steps: int,
    clip: tuple[float, float] | None,
    goal: float | None,
    best: Tensor,
    peak: Tensor,
    blind: torch.Generator | None,
) -> None:
    """One ascent; ``best`` and ``peak`` keep the highest point of every image, across restarts.

    ``blind`` draws the directions of a search without gradients.
    """
    active = torch.arange(len(x), device=x.device)
    for step in range(steps + 1):
        if goal is not None:
            keep = peak[active] <= goal
            active, delta = active[keep], delta[keep]
            if len(active) == 0:
                return
        needs_gradient = step < steps and blind is None
        here = (x[active] + delta).requires_grad_(needs_gradient)
        own_noise = None if noise is None else noise if len(active) == len(x) else noise[active]
        with torch.set_grad_enabled(needs_gradient):
            value = loss(noisy.logits(here, own_noise), y[active], ids[active])
        better = value.detach() > peak[active]
        peak[active] = torch.where(better, value.detach(), peak[active])
        best[active[better]] = here.detach()[better]
        if step < steps and blind is not None:
            around = torch.randn(delta.shape, generator=blind, device=delta.device)
            delta = norm.project(best[active] - x[active] + step_size * norm.direction(around), epsilon)
            delta = _inside(x[active], delta, clip)
        elif step < steps:
            if not value.requires_grad:
                raise InputError(NO_GRADIENTS)
            # Scaled against underflow in float16, where the mean over draws divides every row's gradient; what overflows
            # nevertheless is dropped. Only the direction counts.
            (gradient,) = torch.autograd.grad(8 * noisy.rows * value.sum(), here)
            gradient = gradient.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            delta = norm.project(delta + step_size * norm.direction(gradient), epsilon)
            delta = _inside(x[active], delta, clip)


def _inside(x: Tensor, delta: Tensor, clip: tuple[float, float] | None) -> Tensor:
    """Clip x + delta to the pixel range; for x in range this only shortens delta."""
    return delta if clip is None else (x + delta).clamp(*clip) - x


def _within(x: Tensor, attacked: Tensor, epsilon: float) -> Tensor:
    """Shrink until the distance of the **rounded** images, measured in float64, is at most epsilon."""
    shrink = torch.ones(len(x), dtype=torch.float64, device=x.device).view(-1, *[1] * (x.ndim - 1))
    original = attacked
    for _ in range(20):
        distance = (attacked.double() - x.double()).flatten(1).norm(dim=1).view_as(shrink)
        over = distance > epsilon
        if not over.any():
            return attacked
        shrink = torch.where(over, shrink * (epsilon / distance.clamp_min(1e-30)).clamp_max(1 - 1e-7), shrink)
        attacked = (x.double() + shrink * (original.double() - x.double())).to(x.dtype)
    distance = (attacked.double() - x.double()).flatten(1).norm(dim=1).view_as(shrink)
    return torch.where((distance <= epsilon).expand_as(x), attacked, x)


class _FrozenParameters:
    """Parameters need no gradients while only the input moves."""

    def __init__(self, model: Classifier) -> None:
        self.parameters = (
            [p for p in model.parameters() if p.requires_grad] if isinstance(model, torch.nn.Module) else []
        )

    def __enter__(self) -> None:
        for parameter in self.parameters:
            parameter.requires_grad_(False)

    def __exit__(self, *_: object) -> None:
        for parameter in self.parameters:
            parameter.requires_grad_(True)


def smooth_adv(
    model: Classifier,
    images: Tensor,
    labels: Tensor,
    epsilon: float,
    sigma: float,
    draws: int = 32,
    *,
    seed: int | None = None,
    **options: object,
) -> Tensor:
    """SmoothAdv as the paper uses it: 20 L2 steps on the mean softmax; ``options`` go to :func:`pgd`."""
    stream = Stream(fresh_seed() if seed is None else seed, "attack")
    return pgd(NoisyModel(model, sigma, draws, stream), images, labels, epsilon, **options)  # type: ignore[arg-type]


def plain_pgd(model: Classifier, images: Tensor, labels: Tensor, epsilon: float, **options: object) -> Tensor:
    """PGD on the classifier as it is, without noise: the attack on vanilla conformal prediction."""
    return pgd(NoisyModel(model, 0.0, 1, Stream(0, "attack")), images, labels, epsilon, **options)  # type: ignore[arg-type]


def random_search(
    noisy: NoisyModel, images: Tensor, labels: Tensor, epsilon: float, *, steps: int = 100, **options: object
) -> Tensor:
    """An attack without gradients, for models that are black boxes: queries alone, ``steps`` of them per image and draw.

    Each step tries a random direction from the best point so far and keeps it if the loss rises. It is far weaker than
    gradients: coverage that survives it has survived little. ``options`` go to :func:`pgd`.

    Example:
        >>> model = torch.nn.Linear(2, 2)
        >>> x, y = torch.zeros(3, 2), torch.tensor([0, 1, 0])
        >>> noisy = NoisyModel(lambda x: model(x).detach(), 0.0, 1, Stream(0, "attack"))
        >>> moved = (random_search(noisy, x, y, epsilon=0.5) - x).norm(dim=1)
        >>> bool((moved <= 0.5).all() and (moved > 0.4).all())
        True
    """
    return pgd(noisy, images, labels, epsilon, steps=steps, gradients=False, **options)  # type: ignore[arg-type]


def transfer(
    surrogate: Classifier, sigma: float, draws: int = 32, **options: Any
) -> Callable[[Tensor, Tensor, float], Tensor]:
    """An attack on a black box through a model with gradients that resembles it: for ``audit(..., attacks={...})``.

    Images are crafted by :func:`smooth_adv` against ``surrogate``; ``options`` go to :func:`pgd`.
    """

    def attack(images: Tensor, labels: Tensor, epsilon: float) -> Tensor:
        return smooth_adv(surrogate, images, labels, epsilon, sigma, draws, **options)

    return attack
