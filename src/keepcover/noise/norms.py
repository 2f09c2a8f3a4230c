"""How far an attacker may move an input: one small object per norm, shared by guarantees and attacks.

An attack is one loop with these hooks: where it may act (:meth:`Norm.free`), which step climbs fastest
(:meth:`Norm.direction`), and what is admissible (:meth:`Norm.project`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from keepcover.errors import InputError

Shape = tuple[int, ...]
ALONE, EVERY = "one number alone moves by", "every number moves by"
Mask = Tensor | None  # 1 or 0 for every number; None for everywhere
Probe = Callable[[Tensor], Tensor]  # moves [b, ...] -> the loss that they reach, [b]


class Norm(ABC):
    """A norm as attacks and guarantees need it: the length of a move, its ball, and how to start inside it.

    Attributes:
        name: in the command line, JSON and saved predictors.
        words: in sentences, after the radius.
        short: in tables, before the radius.
        answer: the noise to use against it.
        sparse: whether a step acts on few numbers only.
        replaces: whether what is changed may become anything.
    """

    name: str
    words: str
    short: str
    answer: str
    sparse = False
    replaces = False

    def check(self, radius: float) -> float:
        """The radius, or an error that says what it must be."""
        if not (math.isfinite(radius) and radius >= 0):
            raise InputError(f"expected a finite epsilon >= 0, the radius of the attack, got {radius}")
        return float(radius)

    def shown(self, radius: float) -> str:
        """The radius as people write it."""
        return f"{radius:g}"

    def reach(self, radius: float) -> str:
        """How far the attacker may go, in few words: ``L2 0.125``."""
        return f"{self.short} {self.shown(radius)}"

    def deed(self, radius: float, shape: Shape | None = None) -> str:
        """What the adversary has done, for the guarantee's sentence."""
        return f"has moved it by up to {self.shown(radius)} {self.words}"

    @abstractmethod
    def spent(self, radius: float, shape: Shape) -> dict[str, float]:
        """What the whole radius buys, by how it is spent: how far numbers move; where the norm ``replaces``, the share of
        positions.
        """

    @abstractmethod
    def length(self, delta: Tensor) -> Tensor:
        """The length of every move ``[b, ...]`` -> ``[b]``."""

    @abstractmethod
    def direction(self, gradient: Tensor) -> Tensor:
        """The step of length 1 that raises the loss fastest."""

    @abstractmethod
    def project(self, delta: Tensor, radius: float) -> Tensor:
        """The nearest move within the radius, or one that is inside and near."""

    @abstractmethod
    def random(self, like: Tensor, radius: float, generator: torch.Generator) -> Tensor:
        """A random move of the inputs ``like`` within the radius."""

    def step(self, radius: float, steps: int) -> float:
        """The usual size of one of ``steps`` steps."""
        return 2 * radius / steps

    def free(self, before: Mask, delta: Tensor, gradient: Tensor, radius: float, share: float, probe: Probe) -> Mask:
        """Where a step may act, 1 or 0 for every number; None for everywhere.

        Args:
            before: what the last step was given; None at the first.
            delta, gradient: the move so far and the way uphill, each number times how far it may go.
            share: of the steps that will have been made with this one.
            probe: tries moves.
        """
        return None

    def propose(self, best: Tensor, like: Tensor, radius: float, generator: torch.Generator) -> Tensor:
        """A random move near the best so far: what a search without gradients tries next."""
        way = torch.randn(best.shape, generator=generator, device=best.device, dtype=best.dtype)
        return self.project(best + radius / 2 * self.direction(way), radius)


class L2(Norm):
    """Euclidean length.

    Example:
        >>> L2().project(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), 1.0)
        tensor([[0.6000, 0.8000],
                [0.3000, 0.4000]])
    """

    name, short, words, answer = "l2", "L2", "in L2 norm", "Gaussian(sigma)"

    def spent(self, radius: float, shape: Shape) -> dict[str, float]:
        return {ALONE: radius, EVERY: radius / math.sqrt(math.prod(shape))}

    def length(self, delta: Tensor) -> Tensor:
        return delta.flatten(1).norm(dim=1)

    def direction(self, gradient: Tensor) -> Tensor:
        return gradient / _beside(self.length(gradient).clamp_min(1e-30), gradient)

    def project(self, delta: Tensor, radius: float) -> Tensor:
        return delta * _beside((radius / self.length(delta).clamp_min(1e-30)).clamp_max(1.0), delta)

    def random(self, like: Tensor, radius: float, generator: torch.Generator) -> Tensor:
        """Uniform in the ball."""
        direction = self.direction(torch.randn(like.shape, generator=generator, device=like.device))
        u = torch.rand(len(like), generator=generator, device=like.device)
        return direction * radius * _beside(u.pow(1 / like[0].numel()), like)


class Linf(Norm):
    """The largest change of a number; every channel of a pixel is a number.

    Example:
        >>> Linf().project(torch.tensor([[3.0, -0.4]]), 1.0)
        tensor([[ 1.0000, -0.4000]])
        >>> Linf().reach(1 / 255), Linf().reach(0.004)
        ('Linf 1/255', 'Linf 0.004')
    """

    name, short, words, answer = "linf", "Linf", "in every number (Linf norm)", "Gaussian(sigma)"

    def spent(self, radius: float, shape: Shape) -> dict[str, float]:
        return {EVERY: radius}

    def shown(self, radius: float) -> str:
        """Steps of 8-bit pixels as such, ``1/255``; never a smaller or larger radius than is meant."""
        steps = round(255 * radius)
        return f"{steps}/255" if 0 < steps < 255 and radius == steps / 255 else super().shown(radius)

    def length(self, delta: Tensor) -> Tensor:
        return delta.flatten(1).abs().amax(dim=1)

    def direction(self, gradient: Tensor) -> Tensor:
        return gradient.sign()

    def project(self, delta: Tensor, radius: float) -> Tensor:
        return delta.clamp(-radius, radius)

    def random(self, like: Tensor, radius: float, generator: torch.Generator) -> Tensor:
        return radius * (2 * torch.rand(like.shape, generator=generator, device=like.device) - 1)


class L1(Norm):
    """The sum of absolute changes.

    A step goes along the steepest hundredth of the numbers (Tramer & Boneh 2019): one alone would meet its bound at once.

    Example:
        >>> L1().project(torch.tensor([[3.0, 1.0, -1.0], [0.3, 0.4, 0.0]]), 2.0)
        tensor([[2.0000, 0.0000, -0.0000],
                [0.3000, 0.4000, 0.0000]])
    """

    name, short, words, answer = "l1", "L1", "in L1 norm", "Laplace(scale) or Uniform(half_width)"
    sparse = True

    def spent(self, radius: float, shape: Shape) -> dict[str, float]:
        return {ALONE: radius, EVERY: radius / math.prod(shape)}

    def length(self, delta: Tensor) -> Tensor:
        return delta.flatten(1).abs().sum(dim=1)

    def direction(self, gradient: Tensor) -> Tensor:
        flat = gradient.flatten(1)
        count = math.ceil(flat.shape[1] / 100)
        at = flat.abs().topk(count, dim=1).indices
        return torch.zeros_like(flat).scatter(1, at, flat.gather(1, at).sign() / count).view_as(gradient)

    def project(self, delta: Tensor, radius: float) -> Tensor:
        """The nearest point: every number comes nearer to 0 by the same amount (Duchi et al. 2008)."""
        size = delta.flatten(1).abs()
        ordered = size.sort(dim=1, descending=True).values
        excess = (ordered.cumsum(dim=1) - radius) / torch.arange(1, size.shape[1] + 1, device=delta.device)
        last = (ordered > excess).sum(dim=1, keepdim=True).clamp_min(1) - 1
        nearer = torch.where(size.sum(dim=1, keepdim=True) > radius, excess.gather(1, last), 0.0)
        return (size - nearer).clamp_min(0).view_as(delta) * delta.sign()

    def random(self, like: Tensor, radius: float, generator: torch.Generator) -> Tensor:
        return self.project(torch.randn(like.shape, generator=generator, device=like.device), radius)


class _Replaced(Norm):
    """Attacks that replace whole positions by anything: how far a number moves does not matter."""

    sparse = replaces = True
    axes: int  # along which the radius counts positions

    def check(self, radius: float) -> float:
        if super().check(radius) != int(radius):
            raise InputError(f"expected a whole number of {self.short} for epsilon, got {radius}")
        return float(radius)

    def spent(self, radius: float, shape: Shape) -> dict[str, float]:
        return {"share of positions that become anything": min(1.0, radius**self.axes / positions(shape))}

    def direction(self, gradient: Tensor) -> Tensor:
        return gradient.sign()

    def step(self, radius: float, steps: int) -> float:
        return 4 / steps  # pixels span 1: a quarter of the steps crosses it

    def fresh(self, like: Tensor, generator: torch.Generator) -> Tensor:
        """The move that replaces everything: by the least or the greatest value there is, or by any token there is."""
        low, high = like.min(), like.max()
        if like.is_floating_point():
            coin = torch.rand(like.shape, generator=generator, device=like.device) < 0.5
            return torch.where(coin, low, high) - like
        return torch.randint(int(low), int(high) + 1, like.shape, generator=generator, device=like.device) - like


class L0(_Replaced):
    """The number of changed positions: pixels, all channels together; tokens; features.

    Example:
        >>> L0().length(torch.tensor([[[[0.1, 0.0]], [[0.2, 0.0]]]]))        # one pixel of two, in both channels
        tensor([1.])
    """

    name, short, words, answer = "l0", "positions", "in positions", "Ablation(keep)"
    axes = 1

    def reach(self, radius: float) -> str:
        return f"{radius:g} changed position{'s' if radius != 1 else ''}"

    def deed(self, radius: float, shape: Shape | None = None) -> str:
        what = "" if shape is None else f" of its {positions(shape)} {'pixels' if len(shape) > 2 else 'entries'}"
        return f"has changed up to {radius:g}{what} at will"

    def length(self, delta: Tensor) -> Tensor:
        return (by_position(delta) != 0).sum(dim=1).to(torch.promote_types(delta.dtype, torch.float32))

    def project(self, delta: Tensor, radius: float) -> Tensor:
        return delta * self._most(by_position(delta), radius, delta).to(delta.dtype)

    def random(self, like: Tensor, radius: float, generator: torch.Generator) -> Tensor:
        move = self.fresh(like, generator)
        keys = torch.rand(by_position(move).shape, generator=generator, device=like.device)
        return move * self._most(keys, radius, like).to(move.dtype)

    def propose(self, best: Tensor, like: Tensor, radius: float, generator: torch.Generator) -> Tensor:
        """About half of the positions move elsewhere, or to another value."""
        other = self.random(like, radius, generator)
        changed = (by_position(best) != 0) | (by_position(other) != 0)
        keys = torch.rand(changed.shape, generator=generator, device=like.device) * changed
        return torch.where(best != 0, best, other) * self._most(keys, radius, like).to(best.dtype)

    def free(self, before: Mask, delta: Tensor, gradient: Tensor, radius: float, share: float, probe: Probe) -> Mask:
        """Greedy: the positions with the steepest gradients join those that are changed already, all by half of the steps."""
        steep = by_position(gradient, total=True).nan_to_num().masked_fill(by_position(delta) != 0, torch.inf)
        return self._most(steep, min(radius, math.ceil(2 * radius * share)), delta).to(delta.dtype)

    @staticmethod
    def _most(values: Tensor, count: float, like: Tensor) -> Tensor:
        """1 at the ``count`` positions with the largest values, for every number of the inputs."""
        at = values.topk(min(int(count), values.shape[1]), dim=1).indices
        return everywhere(torch.zeros_like(values, dtype=torch.bool).scatter(1, at, True), like)


class Patch(_Replaced):
    """The side of the smallest square that holds all changes.

    Example:
        >>> delta = torch.zeros(1, 3, 8, 8)
        >>> delta[0, 1, 2:4, 5] = 1
        >>> Patch().length(delta)
        tensor([2.])
    """

    name, short, words, answer = "patch", "pixels of a patch's side", "as the side of a patch", "Bands(width)"
    axes = 2
    places = 8  # that are tried

    def reach(self, radius: float) -> str:
        return f"a patch of {radius:g} x {radius:g}"

    def deed(self, radius: float, shape: Shape | None = None) -> str:
        return f"has replaced a patch of up to {radius:g} x {radius:g} pixels anywhere in it"

    def length(self, delta: Tensor) -> Tensor:
        changed = (delta != 0).reshape(len(delta), -1, *_plane(delta)).any(dim=1)
        sides = []
        for line in (changed.any(dim=2), changed.any(dim=1)):
            at = torch.arange(1, line.shape[1] + 1, device=delta.device) * line
            first = at.masked_fill(~line, line.shape[1] + 1).amin(dim=1)
            sides.append((at.amax(dim=1) - first + 1).clamp_min(0))
        return torch.maximum(*sides).to(torch.promote_types(delta.dtype, torch.float32))

    def project(self, delta: Tensor, radius: float) -> Tensor:
        return delta * self._squares(delta.abs(), radius, 1)[0]

    def random(self, like: Tensor, radius: float, generator: torch.Generator) -> Tensor:
        spot = torch.rand(like.shape, generator=generator, device=like.device)
        return self.fresh(like, generator) * self._squares(spot**16, radius, 1)[0]

    def propose(self, best: Tensor, like: Tensor, radius: float, generator: torch.Generator) -> Tensor:
        """A new square, or new colours in the one that is there."""
        other = self.random(like, radius, generator)
        stays = _beside(torch.rand(len(best), generator=generator, device=best.device) < 0.5, best) & (best != 0)
        return self.project(torch.where(stays, self.fresh(like, generator), other), radius)

    def free(self, before: Mask, delta: Tensor, gradient: Tensor, radius: float, share: float, probe: Probe) -> Mask:
        """The best of the squares with the steepest gradients, by the loss that a first step in them reaches; then the same."""
        if before is not None:
            return before
        if bool((delta != 0).any()):
            return self._squares(delta.abs(), radius, 1)[0]
        squares = self._squares(gradient.abs(), radius, self.places)
        tried = torch.stack([probe(gradient.sign() * square) for square in squares])
        return squares[tried.argmax(dim=0), torch.arange(len(delta), device=delta.device)]

    @staticmethod
    def _squares(values: Tensor, radius: float, count: int) -> Tensor:
        """1 on the ``count`` squares of this side with the largest sums, as far as they are in the image, [count, b, ...]."""
        height, width = _plane(values)
        tall, wide = int(min(radius, height)), int(min(radius, width))
        if tall == 0:
            return torch.zeros_like(values).expand(count, *values.shape)
        total = by_position(values, total=True).view(-1, 1, height, width)
        sums = functional.avg_pool2d(total.nan_to_num().float(), (tall, wide), stride=1)
        at = sums.flatten(1).topk(min(count, sums[0].numel()), dim=1).indices.T
        row, column = at // sums.shape[3], at % sums.shape[3]
        down = torch.arange(height, device=values.device) - row[..., None]
        right = torch.arange(width, device=values.device) - column[..., None]
        inside = ((down >= 0) & (down < tall))[..., :, None] & ((right >= 0) & (right < wide))[..., None, :]
        return torch.stack([everywhere(one, values) for one in inside.flatten(2)]).to(values.dtype)


# -- positions ---------------------------------------------------------------------------------------------------------


def positions(shape: Shape) -> int:
    """How many pixels, tokens or features an input has: the last two axes of an image, the last one of anything else.

    Example:
        >>> positions((3, 32, 32)), positions((20,))
        (1024, 20)
    """
    return math.prod(shape[-2:] if len(shape) > 2 else shape[-1:])


def by_position(values: Tensor, total: bool = False) -> Tensor:
    """Inputs ``[b, ...]`` -> ``[b, positions]``: the largest absolute value, or their sum, over what belongs to a position."""
    size = values.abs().reshape(len(values), -1, positions(tuple(values.shape[1:])))
    return size.sum(dim=1) if total else size.amax(dim=1)


def everywhere(mask: Tensor, like: Tensor) -> Tensor:
    """A mask ``[b, positions]`` for every number of inputs ``like``."""
    kept = like.shape[-2:] if like.ndim > 3 else like.shape[-1:]
    return mask.view(len(mask), *[1] * (like.ndim - 1 - len(kept)), *kept).expand(len(mask), *like.shape[1:])


def _plane(values: Tensor) -> tuple[int, int]:
    if values.ndim < 4:
        raise InputError(f"a patch needs images [n, channels, height, width], got shape {tuple(values.shape)}")
    return values.shape[-2], values.shape[-1]


def _beside(values: Tensor, images: Tensor) -> Tensor:
    """One number per image, shaped to multiply images."""
    return values.view(-1, *[1] * (images.ndim - 1))


NORMS: dict[str, Norm] = {norm.name: norm for norm in (L2(), L1(), Linf(), L0(), Patch())}


def get_norm(name: str) -> Norm:
    """A norm by name.

    Example:
        >>> get_norm("l2").words
        'in L2 norm'
    """
    if name not in NORMS:
        raise InputError(f"expected a norm among {', '.join(NORMS)}, got {name!r}")
    return NORMS[name]
