"""The noise of :class:`keepcover.noise.stream.Stream` as one Triton kernel: images in, noisy images out, nothing in between.

Plain tensor operations make each Philox word in some hundred passes over memory; here a word never leaves its register.
The words are the same bit for bit; logarithm, sine and cosine are the device's, so numbers agree to rounding, and noisy
inputs to one step of the lattice. Images in float64 are added to in float64.

Triton comes with torch's CUDA builds. Only :mod:`keepcover.noise.stream` imports this module, and only where there is one.
"""

from __future__ import annotations

import math

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

_BLOCK = 256  # counters per program, four numbers each
_M0, _M1 = tl.constexpr(0xD2511F53), tl.constexpr(0xCD9E8D57)
_W0, _W1 = tl.constexpr(0x9E3779B9), tl.constexpr(0xBB67AE85)
_TAU = tl.constexpr(2 * math.pi)
_NEAR = tl.constexpr(2**24)


@triton.jit
def _unit(word, fraction):
    return (word.to(tl.float32) + fraction) * 2.3283064365386963e-10  # 2^-32


@triton.jit
def _radius(word, next_word):
    """As in :func:`keepcover.noise.stream.plain`: 40 bits, and a series where the logarithm is near 0."""
    fraction = ((next_word & 0xFF).to(tl.float32) + 0.5) * 0.00390625  # 2^-8
    rest = ~word
    t = _unit(rest, 1.0 - fraction)
    series = t * (t * (t * 0.6666667 + 1.0) + 2.0)
    return tl.sqrt(tl.where(rest < _NEAR, series, -2.0 * tl.log(_unit(word, fraction))))


@triton.jit(do_not_specialize=["key_0", "key_1", "mask_low", "mask_high", "first", "step", "draws"])
def _add_noise(
    out,
    images,
    ids,
    key_0,
    key_1,
    mask_low,
    mask_high,
    first,
    step,
    draws,
    size,
    sigma,
    lattice,
    per_lattice,
    BLOCK: tl.constexpr,
    ROUND: tl.constexpr,
):
    row = tl.program_id(0)
    image = row // draws
    identity = tl.load(ids + image)
    position = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    zero = tl.zeros([BLOCK], dtype=tl.uint32)
    c0 = position.to(tl.uint32)
    c1 = zero + (first + (row % draws) * step).to(tl.uint32)
    c2 = zero + ((identity & 0xFFFFFFFF).to(tl.uint32) ^ mask_low.to(tl.uint32, bitcast=True))
    c3 = zero + (((identity >> 32) & 0xFFFFFFFF).to(tl.uint32) ^ mask_high.to(tl.uint32, bitcast=True))
    k0 = zero + key_0.to(tl.uint32, bitcast=True)
    k1 = zero + key_1.to(tl.uint32, bitcast=True)
    m0, m1 = zero + _M0, zero + _M1
    for _ in tl.static_range(10):
        high_0, high_1 = tl.umulhi(c0, m0), tl.umulhi(c2, m1)
        low_0, low_1 = c0 * m0, c2 * m1
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = k0 + _W0, k1 + _W1
    radius_0, radius_1 = _radius(c0, c1), _radius(c2, c3)
    angle_0, angle_1 = _TAU * _unit(c1, 0.5), _TAU * _unit(c3, 0.5)
    # Four numbers per counter, side by side: a pair from each Box-Muller transform.
    noise = tl.interleave(
        tl.interleave(radius_0 * tl.cos(angle_0), radius_1 * tl.cos(angle_1)),
        tl.interleave(radius_0 * tl.sin(angle_0), radius_1 * tl.sin(angle_1)),
    )
    at = tl.program_id(1) * BLOCK * 4 + tl.arange(0, 4 * BLOCK)
    inside = at < size
    clean = tl.load(images + image.to(tl.int64) * size + at, mask=inside)
    noisy = clean + sigma * noise
    if ROUND:
        noisy = tl.floor(noisy * per_lattice + 0.5) * lattice
    tl.store(out + row.to(tl.int64) * size + at, noisy.to(tl.float32), mask=inside)


def _signed(word: int) -> int:
    """The same 32 bits as an int32, so that every key has one type and the kernel is compiled once."""
    return word - 2**32 if word >= 2**31 else word


def add_noise(
    images: Tensor, ids: Tensor, words: tuple[int, int, int, int], draws: range, sigma: float, lattice: float | None
) -> Tensor:
    """``images[:, None] + sigma * noise``, rounded to the lattice if there is one, [b, len(draws), ...] in float32."""
    images = images.contiguous()
    size = images[0].numel()
    out = torch.empty(len(images), len(draws), *images.shape[1:], dtype=torch.float32, device=images.device)
    steps = (0.0, 0.0) if lattice is None else (lattice, 1 / lattice)
    grid = (len(images) * len(draws), triton.cdiv(size, 4 * _BLOCK))
    with torch.cuda.device(images.device):
        _add_noise[grid](  # pyright: ignore[reportIndexIssue]
            out,
            images,
            ids.contiguous(),
            *map(_signed, words),
            draws.start,
            draws.step,
            len(draws),
            size,
            sigma,
            *steps,
            BLOCK=_BLOCK,
            ROUND=lattice is not None,
        )
    return out
