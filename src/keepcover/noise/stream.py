"""Noise keyed by (seed, role, example, draw): a pure function, the same for any batch, order or resume.

The generator is Philox4x32-10 (Salmon et al. 2011), counter based: the key comes from the seed and the role, the
counter is (position, draw, example). No state is carried, so nothing depends on who asked for what first.

The certificates are about x + n with real Gaussian n, and about anything computed from that sum. What runs is

1. n, a float32 number: a finite set of values stands in for the Gaussian law;
2. one IEEE addition x + n, in the precision of x: float64 is not rounded to float32 first, because a small change of x may
   cross a float32 step and become a large one. The addition rounds the exact sum, and so it is computed from the sum alone;
3. the sum rounded down or up to a multiple of :func:`lattice`, about sigma / 1024, and then to float32: computed from the
   sum too. This hides where the values of n lie. Without it the low bits of x + n tell how far x is from 0, and a model
   may read x from them under any noise.

Half a step always goes up. Rounded to even, every second point of the lattice would get the sums that fall on half a step,
one in some thousands, and the points would differ by that much from their Gaussian probabilities.

Other noises begin with :meth:`Stream.unit`, uniform numbers of 52 bits, and use correctly rounded operations alone (no
transcendental functions), so that every device gives the same bits.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import secrets
from dataclasses import dataclass, field
from functools import cache
from math import prod

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from keepcover.errors import InputError
from keepcover.noise import cpu as noise_cpu

Four = tuple[Tensor, Tensor, Tensor, Tensor]  # the words of counters
ROLES = ("holdout", "calibration", "test", "attack", "train")

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
NEAR = noise_cpu.NEAR


def fresh_seed() -> int:
    """A 128-bit seed from the operating system's entropy: what a deployed predictor uses for every call."""
    return secrets.randbits(128)


def philox(counter: Four, key: tuple[int, int]) -> Four:
    """Philox4x32-10 on int64 tensors that hold 32-bit words.

    Example:
        The first known-answer vector of the authors' Random123 library:

        >>> zero = torch.zeros(1, dtype=torch.int64)
        >>> [hex(int(word)) for word in philox((zero, zero, zero, zero), (0, 0))]
        ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = (word.clone() for word in torch.broadcast_tensors(*counter))
    k0, k1 = key
    for _ in range(10):
        # The product of two 32-bit words wraps modulo 2^64 in int64, but its bits are right: shift and mask them out.
        # In place throughout: this loop is bound by memory traffic. c1 and c3 are only xored before a mask: they need none.
        low, high = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = torch.bitwise_right_shift(high, 32, out=c0).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(_MASK)
        c2 = torch.bitwise_right_shift(low, 32, out=c2).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(_MASK)
        c1, c3 = high, low
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1.bitwise_and_(_MASK), c2, c3.bitwise_and_(_MASK)


def widened(images: Tensor) -> Tensor:
    """The same numbers in float32 or, where they come in it, float64: the precision in which noise is added.

    Integers are tokens, which have no precision: they stay what they are.
    """
    return images.to(torch.promote_types(images.dtype, torch.float32)) if images.is_floating_point() else images


def summable(images: Tensor) -> Tensor:
    """:func:`widened`, or an error where nothing can be added because the inputs are tokens."""
    if not images.is_floating_point():
        found = f"{images.dtype}; tokens can be hidden: noise=Ablation(keep)"
        raise InputError(f"noise that is added needs float inputs, got {found}")
    return widened(images)


def lattice(sigma: float) -> float:
    """The step to which noisy inputs are rounded: the power of two in (sigma / 2048, sigma / 1024].

    Example:
        >>> lattice(0.25) == 0.25 / 1024, lattice(0.3) == 0.25 / 1024
        (True, True)
    """
    return 2.0 ** (math.frexp(sigma)[1] - 11)


def to_lattice_(noisy: Tensor, sigma: float) -> Tensor:
    """Round to :func:`lattice`, in place, half a step upwards; scaling by a power of two is exact.

    Example:
        >>> (to_lattice_(torch.tensor([0.1, 0.5, -0.5, 1.6]) / 1024, 1.0) * 1024).tolist()
        [0.0, 1.0, 0.0, 2.0]
    """
    step = lattice(sigma)
    return noisy.mul_(1 / step).add_(0.5).floor_().mul_(step)


def added(images: Tensor, noise: Tensor, scale: float) -> Tensor:
    """``images[:, None] + noise`` in float64, rounded to the lattice of ``scale``, in float32; ``noise`` is overwritten."""
    return to_lattice_(noise.add_(summable(images)[:, None].to(torch.float64)), scale).float()


def _four(ids: Tensor, words: noise_cpu.Words, draws: range, counters: int) -> Four:
    """The four words of every counter, [b, len(draws), counters] each."""
    k0, k1, low_mask, high_mask = words
    position = torch.arange(counters, device=ids.device)
    draw = torch.arange(draws.start, draws.stop, draws.step, device=ids.device)[:, None]
    low, high = ((ids & _MASK) ^ low_mask)[:, None, None], (((ids >> 32) & _MASK) ^ high_mask)[:, None, None]
    return philox((position, draw, low, high), (k0, k1))


def plain_unit(ids: Tensor, words: noise_cpu.Words, draws: range, size: int) -> Tensor:
    """The definition of :meth:`Stream.unit`: two words of a counter give the 52 bits of one number."""
    four = _four(ids, words, draws, math.ceil(size / 2))
    bits = torch.stack([(four[pair] << 20) | (four[pair + 1] >> 12) for pair in (0, 2)], dim=-1)
    return bits.to(torch.float64).add_(0.5).mul_(2.0**-52).flatten(2)[..., :size]


def plain(ids: Tensor, words: noise_cpu.Words, draws: range, size: int) -> Tensor:
    """The definition of the noise in tensor operations, for devices that have no faster way: [b, len(draws), size]."""
    four = _four(ids, words, draws, math.ceil(size / 4))  # two Box-Muller pairs of each counter
    noise = []
    for pair in (0, 2):
        # The angle keeps 24 of its 32 bits, so the last eight continue the radius: 40 bits leave no gaps in the tails.
        fraction = (four[pair + 1] & 0xFF).to(torch.float32).add_(0.5).mul_(2.0**-8)
        square = _unit(four[pair], fraction).log_().mul_(-2)
        # u near 1 has 24 bits too, few for small radii: -2 log(1 - t) = 2t + t^2 + 2t^3/3 + ... from t = 1 - u, which has all.
        rest = _MASK - four[pair]
        t = _unit(rest, 1 - fraction)
        radius = torch.where(rest < NEAR, t * (t * (t * (2 / 3) + 1) + 2), square).sqrt_()
        angle = _unit(four[pair + 1]).mul_(2 * math.pi)
        noise += [radius * angle.cos(), radius * angle.sin()]
    return torch.stack(noise, dim=-1).flatten(2)[..., :size]


@dataclass(frozen=True)
class Stream:
    """One role's noise under one seed. Streams of different roles share no key, so they never meet.

    Example:
        >>> stream = Stream(seed=7, role="test")
        >>> ids = torch.tensor([5, 3])
        >>> both = stream.gaussian(ids, draws=range(0, 4), shape=(1, 8, 8))
        >>> one = stream.gaussian(ids[1:], draws=range(2, 3), shape=(1, 8, 8))
        >>> both.shape, torch.equal(both[1, 2], one[0, 0])
        (torch.Size([2, 4, 1, 8, 8]), True)
    """

    seed: int = field(repr=False)  # an attacker who learns it knows the noise, and then nothing is certified
    role: str

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise InputError(f"expected a role among {', '.join(ROLES)}, got {self.role!r}")
        if not isinstance(self.seed, int) or self.seed < 0:
            raise InputError(f"expected a seed that is a non-negative integer, got {self.seed!r}")

    def _words(self, purpose: str) -> noise_cpu.Words:
        """128 secret bits: the generator's key, and masks for the two words of the example's id."""
        digest = hashlib.sha256(f"holdfast/{purpose}/{self.role}/{self.seed}".encode()).digest()
        return tuple(int.from_bytes(digest[at : at + 4], "little") for at in (0, 4, 8, 12))  # type: ignore[return-value]

    def gaussian(self, ids: Int[Tensor, " b"], draws: range, shape: tuple[int, ...]) -> Float[Tensor, "b d ..."]:
        """Standard normal noise ``[b, len(draws), *shape]`` in float32 on the device of ``ids``."""
        ids, words = ids.long(), self._words("gaussian")
        if fused(ids.device):
            from keepcover.noise.kernel import add_noise

            return add_noise(torch.zeros(len(ids), *shape, device=ids.device), ids, words, draws, 1.0, None)
        make = noise_cpu.gaussian if ids.device.type == "cpu" else plain
        return make(ids, words, draws, prod(shape)).reshape(len(ids), len(draws), *shape)

    def noisy(
        self, images: Shaped[Tensor, "b ..."], ids: Int[Tensor, " b"], draws: range, sigma: float
    ) -> Float[Tensor, "b d ..."]:
        """``images[:, None] + sigma * gaussian(...)``, rounded to :func:`lattice`, in float32: what the network reads.

        The sum is made in float64 where images are, and on a GPU straight into the batch.

        Example:
            >>> stream, ids, images = Stream(seed=7, role="test"), torch.tensor([5, 3]), torch.ones(2, 1, 4, 4)
            >>> noise = stream.gaussian(ids, range(3), (1, 4, 4))
            >>> noisy = stream.noisy(images, ids, range(3), 0.5)
            >>> bool(((noisy - (1 + 0.5 * noise)).abs() <= lattice(0.5) / 2).all())
            True
        """
        images = summable(images)
        if fused(images.device):
            from keepcover.noise.kernel import add_noise

            return add_noise(images, ids.long(), self._words("gaussian"), draws, sigma, lattice(sigma))
        noise = self.gaussian(ids, draws, tuple(images.shape[1:])).mul_(sigma).to(images.dtype)
        return to_lattice_(noise.add_(images[:, None]), sigma).float()

    def unit(self, ids: Int[Tensor, " b"], draws: range, shape: tuple[int, ...]) -> Float[Tensor, "b d ..."]:
        """Uniform numbers in (0, 1), odd multiples of 2^-53, ``[b, len(draws), *shape]`` in float64: the same bits everywhere.

        Example:
            >>> Stream(seed=7, role="test").unit(torch.tensor([5]), range(1), (2,))
            tensor([[[0.8751, 0.4042]]], dtype=torch.float64)
        """
        ids = ids.long()
        make = noise_cpu.unit if ids.device.type == "cpu" else plain_unit
        return make(ids, self._words("unit"), draws, prod(shape)).reshape(len(ids), len(draws), *shape)

    def uniform(self, ids: Int[Tensor, " b"], purpose: str) -> Float[Tensor, " b"]:
        """One U(0, 1) number per example, independent of its noise and of every other purpose."""
        return _unit(_four(ids.long(), self._words(f"uniform/{purpose}"), range(1), 1)[0]).flatten()


@cache
def fused(device: torch.device) -> bool:
    """Whether noise is made there by one kernel: NVIDIA and AMD devices, where Triton is installed."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def _unit(words: Tensor, fraction: Tensor | float = 0.5) -> Tensor:
    """32-bit words and what follows their last bit -> float32 in (0, 1]: the logarithm is finite, the largest radius 7.5."""
    return (words.to(torch.float32) + fraction) * 2.0**-32


def probes(
    shape: tuple[int, ...], low: float = 0.0, high: float = 1.0, tokens: bool = False
) -> Shaped[Tensor, "4 ..."]:
    """Four fixed inputs of a shape, in a range: noise, dark noise, bright noise and nearly grey; whole numbers for tokens.

    From the raw words of Philox, which no version of numpy changes.

    Example:
        >>> probes((3,), 0.0, 1.0)[0]
        tensor([0.1402, 0.2487, 0.1282])
    """
    words = np.random.Philox(key=20).random_raw(4 * math.prod(shape)) >> 40
    dark, bright, grey, plain = (words / 2.0**24).reshape(4, *shape)
    values = np.stack([plain, dark**2, 1 - bright**2, 0.375 + grey / 4])
    inputs = low + ((high - low) or 1.0) * values
    return torch.from_numpy(inputs.clip(low, high).round().astype(np.int64) if tokens else inputs.astype(np.float32))
