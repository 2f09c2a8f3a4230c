r"""Attacks on smoothed models: one loop, with hooks for the loss, the norm, the start and the goal.

SmoothAdv (Salman et al. 2019) is projected gradient ascent through the **expectation over noise**: the attacker draws
its own noise once, fixed during the attack and independent of the defender's, and climbs a loss of the mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from keepcover.engine.inputs import check_images
from keepcover.engine.progress import Bar, Progress
from keepcover.engine.smoother import Classifier, bound, checked_device, evaluation_mode
from keepcover.errors import InputError
from keepcover.noise import Noise, Norm, Stream, fresh_seed, get_noise, get_norm
from keepcover.prediction.predictor import Predictor

CustomAttack = Callable[[Tensor, Tensor, float], Tensor]  # images, labels and radius -> attacked images
NO_GRADIENTS = (
    "gradient attacks need a model that PyTorch can differentiate, and this one gives no gradients (an ONNX file, an "
    "estimator, a remote service ...). What remains: a search by queries alone, attacks=['random'] (--attack random); "
    "images crafted on a similar PyTorch model, attacks={'transfer': keepcover.attacks.transfer(surrogate, sigma)} "
    "(--surrogate MODEL); or an attack of your own"
)


@dataclass(frozen=True)
class NoisyModel:
    """The attacker's view of a smoothed model: the model under the attacker's own noise, with gradients.

    Without noise it is the plain model, one evaluation per step; a deterministic noise is evaluated as the defender does, whatever
    ``draws`` says. ``autocast`` runs the network in that dtype.
    """

    model: Classifier
    noise: Noise | float
    draws: int
    stream: Stream
    autocast: torch.dtype | None = None

    def __post_init__(self) -> None:
        noise = get_noise(self.noise)
        vars(self).update(noise=noise, model=bound(self.model, noise))
        if self.stream.role != "attack":
            raise InputError(f"the attacker's noise must be its own: expected role 'attack', got {self.stream.role!r}")
        if self.draws < 1:
            raise InputError(f"expected at least 1 attacker draw, got {self.draws}")

    def rows(self, images: Tensor) -> int:
        """Network evaluations per image and step."""
        noise = get_noise(self.noise)
        if noise.deterministic:
            return noise.positions(tuple(images.shape[1:]))
        return self.draws if noise.certifies else 1

    def outputs(self, images: Tensor, ids: Tensor) -> Float[Tensor, "b draws ..."]:
        """As the defender makes them; gradients pass the noise as :meth:`Noise.through` says."""
        noise = get_noise(self.noise)
        with torch.no_grad():
            noisy = noise.noisy(images.detach(), self.stream, ids, range(self.rows(images)))
        if images.is_floating_point():
            noisy = noise.through(images, noisy).float()
        with torch.autocast(images.device.type, self.autocast) if self.autocast else nullcontext():
            out = self.model(noisy.flatten(0, 1))
        return out.float().view(*noisy.shape[:2], *out.shape[1:])


# -- losses: the higher, the nearer the truth is to being missed -------------------------------------------------------

# Noisy outputs [b, draws, ...], truth [b, ...] and ids [b] -> what is maximised, one number per input.
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
class Margin:
    """What the predictor's own rule compares, as :meth:`keepcover.tasks.Task.climb` states it: the attack on what is
    certified. ``stream`` is the attacker's.
    """

    predictor: Predictor
    stream: Stream

    def __call__(self, outputs: Tensor, truth: Tensor, ids: Tensor) -> Tensor:
        task, threshold = self.predictor.task, self.predictor.threshold
        while threshold.ndim > 1:  # the smallest of any group
            threshold = threshold.amin(dim=0)
        return task.climb(outputs, truth, self.predictor.rule, threshold, task.uniform(self.stream, ids))


# -- the loop ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Ascent:
    """Everything about an attack that is the same for all images."""

    noisy: NoisyModel
    loss: Loss
    norm: Norm
    epsilon: float
    step_size: float
    steps: int
    clip: tuple[float, float] | None
    goal: float | None
    blind: torch.Generator | None  # draws the directions of a search without gradients

    def climb(self, x: Tensor, y: Tensor, ids: Tensor, delta: Tensor, best: Tensor, peak: Tensor) -> None:
        """One ascent from ``delta``; ``best`` and ``peak`` keep the highest point of every image, across restarts."""
        active = torch.arange(len(x), device=x.device)
        delta, free = self.inside(x, delta), None
        for step in range(self.steps + 1):
            if self.goal is not None:
                keep = peak[active] <= self.goal
                active, delta, free = active[keep], delta[keep], None if free is None else free[keep]
                if len(active) == 0:
                    return
            needs_gradient = step < self.steps and self.blind is None
            here = (x[active] + delta).requires_grad_(needs_gradient)
            with torch.set_grad_enabled(needs_gradient):
                value = self.value(here, y[active], ids[active])
            better = value.detach() > peak[active]
            peak[active] = torch.where(better, value.detach(), peak[active]).to(peak.dtype)
            best[active[better]] = here.detach()[better]
            if step == self.steps:
                return
            if self.blind is not None:
                delta = self.norm.propose(best[active] - x[active], x[active], self.epsilon, self.blind)
            elif not value.requires_grad:
                raise InputError(NO_GRADIENTS)
            else:
                # Scaled against underflow in float16, where the mean over draws divides every row's gradient; what
                # overflows nevertheless is dropped. Only the direction counts.
                (uphill,) = torch.autograd.grad(8 * self.noisy.rows(x) * value.sum(), here)
                uphill = uphill.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
                gain = uphill * self.room(here.detach(), uphill)

                def probe(move: Tensor, some: Tensor = active) -> Tensor:
                    with torch.no_grad():
                        return self.value(x[some] + self.inside(x[some], move), y[some], ids[some])

                free = self.norm.free(free, delta, gain, self.epsilon, (step + 1) / self.steps, probe)
                if self.norm.sparse:  # where nothing is to be gained a step would be wasted
                    uphill = uphill * (gain != 0) * (1 if free is None else free)
                delta = self.norm.project(delta + self.step_size * self.norm.direction(uphill), self.epsilon)
            delta = self.inside(x[active], delta)

    def value(self, here: Tensor, y: Tensor, ids: Tensor) -> Tensor:
        """The loss of every input."""
        return self.loss(self.noisy.outputs(here, ids), y, ids)

    def room(self, here: Tensor, uphill: Tensor) -> Tensor | float:
        """How far every number can go uphill inside the pixel range."""
        if self.clip is None:
            return 1.0
        return torch.where(uphill > 0, self.clip[1] - here, here - self.clip[0]).clamp_min(0)

    def inside(self, x: Tensor, delta: Tensor) -> Tensor:
        """Clip x + delta to the pixel range; for x in range this only shortens delta."""
        return delta if self.clip is None else ((x + delta).clamp(*self.clip) - x).masked_fill(delta == 0, 0)


def pgd(
    noisy: NoisyModel,
    images: Shaped[Tensor, "n ..."],
    labels: Shaped[Tensor, "n ..."],
    epsilon: float,
    *,
    loss: Loss = mean_softmax,
    steps: int = 20,
    step_size: float | None = None,
    restarts: int = 1,
    random_start: bool = False,
    clip: tuple[float, float] | None = None,
    goal: float | None = None,
    norm: str | Norm = "l2",
    ids: Int[Tensor, " n"] | None = None,
    rows: int | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    progress: Progress = True,
    gradients: bool = True,
) -> Shaped[Tensor, "n ..."]:
    r"""Projected gradient ascent in a ball: adversarial images, on the CPU.

    .. math:: \delta \leftarrow \Pi_{\|\delta\| \le \epsilon}
        \left(\delta + \eta\, \nabla L / \|\nabla L\|\right), \qquad \eta = 2 \epsilon / steps

    The best iterate of all steps and restarts is returned. Its distance is checked in float64 after rounding: it is
    never above epsilon.

    Args:
        noisy: the model under the attacker's noise (none for plain PGD).
        images, labels: what is attacked and the truth to drive out.
        epsilon: radius.
        loss: what is maximised; :func:`mean_softmax` is the paper's.
        step_size: 2 epsilon / steps by default; 4 / steps, of pixels in [0, 1], where whole positions are replaced.
        restarts, random_start: restarts after the first always start at random points of the ball.
        clip: keep pixels in this range, e.g. (0, 1).
        goal: stop working on an image once its loss exceeds this.
        norm: of the ball. Positions are chosen greedily under ``l0``; under ``patch`` a place is searched first.
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
    if gradients and not images.is_floating_point():
        raise InputError("tokens have no gradients: search by queries alone, attacks=['random'] (--attack random)")
    parameter = next(noisy.model.parameters(), None) if isinstance(noisy.model, torch.nn.Module) else None
    place = checked_device(device if device is not None else "cpu" if parameter is None else parameter.device)
    ids = torch.arange(len(images)) if ids is None else ids
    rows = rows or (2**20 if place.type == "cpu" else 2**24) // max(1, images[0].numel())
    per_chunk = max(1, rows // noisy.rows(images))
    generator = torch.Generator(device=place).manual_seed(seed)
    chosen = get_norm(norm) if isinstance(norm, str) else norm
    step_size = chosen.step(chosen.check(epsilon), steps) if step_size is None else step_size
    ascent = _Ascent(noisy, loss, chosen, epsilon, step_size, steps, clip, goal, None if gradients else generator)
    out = torch.empty_like(images, device="cpu")
    with evaluation_mode(noisy.model), Bar("attacking", len(images), progress) as bar, _frozen(noisy.model):
        for at in range(0, len(images), per_chunk):
            part = slice(at, at + per_chunk)
            x, y, i = images[part].to(place), labels[part].to(place), ids[part].to(place)
            best, peak = x.clone(), torch.full((len(x),), -torch.inf, device=place)
            for restart in range(restarts):
                random = random_start or restart > 0
                delta = chosen.random(x, epsilon, generator) if random else torch.zeros_like(x)
                ascent.climb(x, y, i, delta, best, peak)
            out[part] = _within(x, best, epsilon, chosen).cpu()
            bar.advance(len(x))
    return out


def _within(x: Tensor, attacked: Tensor, epsilon: float, norm: Norm) -> Tensor:
    """Shrink until the distance of the **rounded** images, measured in float64, is at most epsilon."""
    original, shape = attacked, (-1, *[1] * (x.ndim - 1))
    shrink = torch.ones(len(x), dtype=torch.float64, device=x.device)
    for _ in range(20):
        distance = norm.length(attacked.double() - x.double())
        over = distance > epsilon
        if not over.any():
            return attacked
        shrink = torch.where(over, shrink * (epsilon / distance.clamp_min(1e-30)).clamp_max(1 - 1e-7), shrink)
        attacked = (x.double() + shrink.view(shape) * (original.double() - x.double())).to(x.dtype)
    near = norm.length(attacked.double() - x.double()) <= epsilon
    return torch.where(near.view(shape), attacked, x)


@contextmanager
def _frozen(model: Classifier) -> Iterator[None]:
    """Parameters need no gradients while only the input moves."""
    trained = [p for p in model.parameters() if p.requires_grad] if isinstance(model, torch.nn.Module) else []
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


# -- attacks by name ---------------------------------------------------------------------------------------------------


def smooth_adv(
    model: Classifier,
    images: Tensor,
    labels: Tensor,
    epsilon: float,
    noise: Noise | float,
    draws: int = 32,
    *,
    seed: int | None = None,
    **options: Any,
) -> Tensor:
    """SmoothAdv as the paper uses it: 20 steps on the mean softmax; ``options`` go to :func:`pgd`."""
    stream = Stream(fresh_seed() if seed is None else seed, "attack")
    return pgd(NoisyModel(model, noise, draws, stream), images, labels, epsilon, **options)


def random_search(
    noisy: NoisyModel, images: Tensor, labels: Tensor, epsilon: float, *, steps: int = 100, **options: Any
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
    return pgd(noisy, images, labels, epsilon, steps=steps, gradients=False, **options)


def transfer(surrogate: Classifier, noise: Noise | float, draws: int = 32, **options: Any) -> CustomAttack:
    """An attack on a black box through a model with gradients that resembles it: for ``audit(..., attacks={...})``.

    Images are crafted by :func:`smooth_adv` against ``surrogate``; ``options`` go to :func:`pgd`.
    """
    return partial(smooth_adv, surrogate, noise=noise, draws=draws, **options)
