"""The noise of :class:`keepcover.noise.stream.Stream` on a CPU: numpy makes the words, torch the logarithm, root, sine and cosine.

Numbers are those of :func:`keepcover.noise.stream.plain` bit for bit, two to three times as fast: numpy multiplies 64-bit
integers with vector instructions, works in place, and costs less per operation. Nothing is kept between calls.

One thread makes the words; torch's functions run on as many as torch has. Pieces on a pool of threads gained at most a
quarter and mostly lost: operations of microseconds wait for the interpreter lock, and for the threads of torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = tuple[int, int, int, int]  # the key of a stream, and the masks of ids
_Uint32 = NDArray[np.uint32]
_Finish = Callable[[_Uint32, _Uint32, NDArray[Any]], None]

# Counters at a time: their words take 3 MiB, within the last cache, and each of torch's parallel regions is long enough
# that a busy neighbour on one core does not hold up the other every few microseconds.
_PIECE = 65536

_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
NEAR = 2**24  # 1 - u below 2^-8: where the logarithm becomes a series
_FAR = np.uint32(2**32 - 1 - NEAR)
_MASK, _WORD = np.array(0xFFFFFFFF, dtype=np.uint64), np.array(32, dtype=np.uint64)


def philox(scratch: NDArray[np.uint64], key: tuple[int, int]) -> tuple[_Uint32, _Uint32]:
    """Philox4x32-10: the words (c0, c2) and (c1, c3) of n counters, [2, n] each.

    Args:
        scratch: [3, 2, n], holding the words of the counters in that order, then room for products. It is overwritten.
        key: two 32-bit words.

    Example:
        >>> even, odd = philox(np.zeros((3, 2, 1), dtype=np.uint64), (0, 0))
        >>> [hex(word) for word in (*even[:, 0], *odd[:, 0])]
        ['0x6627e8d5', '0xbc57ac4c', '0xe169c58d', '0x9b00dbd8']
    """
    even, odd, product = scratch
    keys = np.array(key, dtype=np.uint64)[:, None]
    for _ in range(10):
        # Both halves of a round at once, crosswise. The low words of a product are the next (c1, c3). Its high words stay
        # above them, as do the carries of the keys: all that these meet is exclusive or, and then the mask.
        np.multiply(even, _MULTIPLIERS, out=product[::-1])
        np.right_shift(product, _WORD, out=even)
        np.bitwise_xor(even, odd, out=even)
        np.bitwise_xor(even, keys, out=even)
        np.bitwise_and(even, _MASK, out=even)
        odd, product, keys = product, odd, keys + _WEYL
    return even.astype(np.uint32), odd.astype(np.uint32)


def gaussian(ids: Tensor, words: Words, draws: range, size: int) -> Tensor:
    """Standard normal noise [len(ids), len(draws), size] in float32, as :func:`keepcover.noise.stream.plain`."""
    return _filled(ids, words, draws, size, torch.empty(0, 4, dtype=torch.float32), _box_muller)


def unit(ids: Tensor, words: Words, draws: range, size: int) -> Tensor:
    """Uniform numbers [len(ids), len(draws), size] in float64, as :func:`keepcover.noise.stream.plain_unit`."""
    return _filled(ids, words, draws, size, torch.empty(0, 2, dtype=torch.float64), _fraction)


def _filled(ids: Tensor, words: Words, draws: range, size: int, like: Tensor, finish: _Finish) -> Tensor:
    """[len(ids), len(draws), size]: a counter gives as many numbers as ``like`` has columns, made of its words by ``finish``."""
    k0, k1, low_mask, high_mask = words
    identity, count, per = ids.numpy().astype(np.uint64), len(ids) * len(draws), like.shape[1]
    low = np.repeat((identity & _MASK) ^ np.uint64(low_mask), len(draws))[:, None]
    high = np.repeat((identity >> _WORD) ^ np.uint64(high_mask), len(draws))[:, None]
    draw = np.tile(np.arange(draws.start, draws.stop, draws.step, dtype=np.int64).astype(np.uint64), len(ids))[:, None]
    position = np.arange(math.ceil(size / per), dtype=np.uint64)
    out = torch.empty(count, len(position), per, dtype=like.dtype, device="cpu")
    # A piece is some whole rows or, of a row that is too long, a part: contiguous in either case, so reshape copies nothing.
    rows, columns = max(1, _PIECE // max(1, len(position))), min(_PIECE, max(1, len(position)))
    scratch = np.empty(6 * min(rows, count) * columns, dtype=np.uint64)
    for top in range(0, count, rows):
        for left in range(0, len(position), columns):
            row, column = slice(top, top + rows), slice(left, left + columns)
            piece = out.numpy()[row, column]
            counters = scratch[: 6 * piece[..., 0].size].reshape(3, 2, *piece.shape[:2])
            counters[0, 0], counters[0, 1] = position[column], low[row]
            counters[1, 0], counters[1, 1] = draw[row], high[row]
            finish(*philox(counters.reshape(3, 2, -1), (k0, k1)), piece.reshape(-1, per))
    return out.flatten(1)[:, :size].reshape(len(ids), len(draws), size)


def _fraction(even: _Uint32, odd: _Uint32, out: NDArray[Any]) -> None:
    """Words [2, n] -> numbers of 52 bits in ``out`` [n, 2]."""
    bits = (even.astype(np.uint64) << np.uint64(20)) | (odd >> np.uint32(12))
    np.multiply(bits.T.astype(np.float64) + 0.5, 2.0**-52, out=out)


def _box_muller(even: _Uint32, odd: _Uint32, out: NDArray[Any]) -> None:
    """Words [2, n] -> standard normal numbers in ``out`` [n, 4]. Tensors and arrays of one name share their memory."""
    fraction = odd.astype(np.uint8).astype(np.float32)  # the last eight bits
    fraction += np.float32(0.5)
    fraction *= np.float32(2.0**-8)
    radius, angle = _unit(even, fraction), _unit(odd)
    angle *= np.float32(2 * math.pi)
    torch.from_numpy(radius).log_()
    radius *= np.float32(-2)
    few = np.flatnonzero(even > _FAR)  # one in 256: log1p of all would cost a third of the whole
    t = _unit(~even.ravel()[few], 1 - fraction.ravel()[few])
    radius.ravel()[few] = t * (t * (t * np.float32(2 / 3) + 1) + 2)
    torch.from_numpy(radius).sqrt_()
    np.multiply(radius, torch.from_numpy(angle).cos().numpy(), out=out[:, 0::2].T)
    np.multiply(radius, torch.from_numpy(angle).sin_().numpy(), out=out[:, 1::2].T)


def _unit(words: _Uint32, fraction: NDArray[np.float32] | float = 0.5) -> NDArray[np.float32]:
    """32-bit words and what follows their last bit -> float32 in (0, 1]."""
    unit = words.astype(np.float32)
    unit += fraction
    unit *= np.float32(2.0**-32)
    return unit
