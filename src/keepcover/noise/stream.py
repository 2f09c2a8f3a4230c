"""Gaussian noise keyed by (seed, role, example, draw): a pure function, the same for any batch, order or resume.

The generator is Philox4x32-10 (Salmon et al. 2011), counter based: the key comes from the seed and the role, the
counter is (position, draw, example). No state is carried, so nothing depends on who asked for what first.
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
from jaxtyping import Float, Int
from torch import Tensor

from keepcover.errors import InputError
from keepcover.noise import cpu as noise_cpu

ROLES = ("holdout", "calibration", "test", "attack", "train")

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def fresh_seed() -> int:
    """A 128-bit seed from the operating system's entropy: what a deployed predictor uses for every call."""
    return secrets.randbits(128)


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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


def plain(ids: Tensor, words: tuple[int, int, int, int], draws: range, size: int) -> Tensor:
    """The definition of the noise in tensor operations, for devices that have no faster way: [b, len(draws), size]."""
    k0, k1, low_mask, high_mask = words
    position = torch.arange(math.ceil(size / 4), device=ids.device)  # a counter gives four words: two Box-Muller pairs
    draw = torch.arange(draws.start, draws.stop, draws.step, device=ids.device)[:, None]
    low, high = ((ids & _MASK) ^ low_mask)[:, None, None], (((ids >> 32) & _MASK) ^ high_mask)[:, None, None]
    four = philox((position, draw, low, high), (k0, k1))
    noise = []
    for pair in (0, 2):
        radius = _unit(four[pair]).log_().mul_(-2).sqrt_()
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

    seed: int = field(repr=False)  # whoever learns it knows the noise, and then nothing is certified
    role: str

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise InputError(f"expected a role among {', '.join(ROLES)}, got {self.role!r}")
        if not isinstance(self.seed, int) or self.seed < 0:
            raise InputError(f"expected a seed that is a non-negative integer, got {self.seed!r}")

    def _words(self, purpose: str) -> tuple[int, int, int, int]:
        """128 secret bits: the generator's key, and masks for the two words of the example's id."""
        digest = hashlib.sha256(f"holdfast/{purpose}/{self.role}/{self.seed}".encode()).digest()
        return tuple(int.from_bytes(digest[at : at + 4], "little") for at in (0, 4, 8, 12))  # type: ignore[return-value]

    def gaussian(self, ids: Int[Tensor, " b"], draws: range, shape: tuple[int, ...]) -> Float[Tensor, "b d ..."]:
        """Standard normal noise ``[b, len(draws), *shape]`` in float32 on the device of ``ids``."""
        ids, words = ids.long(), self._words("gaussian")
        if fused(ids.device):
            from keepcover.noise.kernel import add_noise

            return add_noise(torch.zeros(len(ids), *shape, device=ids.device), ids, words, draws, 1.0)
        make = noise_cpu.gaussian if ids.device.type == "cpu" else plain
        return make(ids, words, draws, prod(shape)).reshape(len(ids), len(draws), *shape)

    def noisy(
        self, images: Float[Tensor, "b ..."], ids: Int[Tensor, " b"], draws: range, sigma: float
    ) -> Float[Tensor, "b d ..."]:
        """``images[:, None] + sigma * gaussian(...)``: on a GPU straight into the batch that the network will read.

        Example:
            >>> stream, ids, images = Stream(seed=7, role="test"), torch.tensor([5, 3]), torch.ones(2, 1, 4, 4)
            >>> noise = stream.gaussian(ids, range(3), (1, 4, 4))
            >>> torch.equal(stream.noisy(images, ids, range(3), 0.5), 1 + 0.5 * noise)
            True
        """
        if fused(images.device):
            from keepcover.noise.kernel import add_noise

            return add_noise(images, ids.long(), self._words("gaussian"), draws, sigma)
        return self.gaussian(ids, draws, tuple(images.shape[1:])).mul_(sigma).add_(images[:, None])

    def uniform(self, ids: Int[Tensor, " b"], purpose: str) -> Float[Tensor, " b"]:
        """One U(0, 1) number per example, independent of its noise and of every other purpose."""
        ids = ids.long()
        k0, k1, low_mask, high_mask = self._words(f"uniform/{purpose}")
        zero = torch.zeros_like(ids)
        words = philox((zero, zero, (ids & _MASK) ^ low_mask, ((ids >> 32) & _MASK) ^ high_mask), (k0, k1))
        return _unit(words[0])


@cache
def fused(device: torch.device) -> bool:
    """Whether noise is made there by one kernel: NVIDIA and AMD devices, where Triton is installed."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def _unit(words: Tensor) -> Tensor:
    """32-bit words -> float32 in (0, 1]: the logarithm is finite and the largest radius is 6.8."""
    return (words.to(torch.float32) + 0.5) * 2.0**-32


def probes(shape: tuple[int, ...], low: float = 0.0, high: float = 1.0) -> Float[Tensor, "4 ..."]:
    """Four fixed inputs of a shape, in a range: noise, dark noise, bright noise and nearly grey.

    From the raw words of Philox, which no version of numpy changes.

    Example:
        >>> probes((3,), 0.0, 1.0)[0]
        tensor([0.1403, 0.2072, 0.3741])
    """
    words = np.random.Philox(key=20).random_raw(4 * math.prod(shape)) >> 40
    dark, bright, grey, plain = (words / 2.0**24).reshape(4, *shape)
    values = np.stack([plain, dark**2, 1 - bright**2, 0.375 + grey / 4])
    return torch.from_numpy((low + (high - low) * values).astype(np.float32))
