"""The fast way on a CPU makes the words of Philox and the numbers of the plain tensor operations, bit for bit."""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from keepcover.noise import cpu as noise_cpu
from keepcover.noise import stream as noise
from keepcover.noise.stream import Stream
from tests.noise.known import KNOWN, words

patient = settings(deadline=None, derandomize=True)
word = st.integers(0, 2**32 - 1)

# Edges of the two words of an id, and where int64 ends.
IDS = [0, 1, 5, 2**31, 2**32 - 1, 2**32, 2**32 + 5, 2**40 + 3, 2**62, 2**63 - 1]


# -- a reference in Python's own integers ------------------------------------------------------------------------------


def philox(counter: list[int], key: list[int]) -> list[int]:
    """The round function as Salmon et al. (2011) print it."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        high_0, low_0 = divmod(0xD2511F53 * c0, 2**32)
        high_1, low_1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


def reference_words(stream: Stream, ids: list[int], draws: range, size: int) -> Tensor:
    """[b, d, size rounded up to whole counters], each number's counter computed on its own."""
    digest = hashlib.sha256(f"holdfast/gaussian/{stream.role}/{stream.seed}".encode()).digest()
    k0, k1, low, high = (int.from_bytes(digest[at : at + 4], "little") for at in (0, 4, 8, 12))
    return torch.tensor(
        [
            [
                [
                    w
                    for position in range(math.ceil(size / 4))
                    for w in philox([position, draw, (i % 2**32) ^ low, (i >> 32) ^ high], [k0, k1])
                ]
                for draw in draws
            ]
            for i in ids
        ]
    )


def squared_radius(first: Tensor, second: Tensor) -> Tensor:
    """-2 log u in float32, u = 0.(32 bits of the first word)(last 8 bits of the second)1 in binary."""
    fraction = (second % 256 + 0.5) / 256
    u = (first.to(torch.float32) + fraction.to(torch.float32)) * 2.0**-32
    t = ((2**32 - 1 - first).to(torch.float32) + (1 - fraction).to(torch.float32)) * 2.0**-32
    return torch.where(first >= 2**32 - 2**24, t * (t * (t * (2 / 3) + 1) + 2), -2 * torch.log(u))


def angle(second: Tensor) -> Tensor:
    return (second.to(torch.float32) + 0.5) * 2.0**-32 * (2 * math.pi)


def reference(stream: Stream, ids: list[int], draws: range, size: int) -> Tensor:
    """Box-Muller in float32: a pair of words gives a radius and an angle, they give two numbers side by side."""
    words = reference_words(stream, ids, draws, size)
    radius, turn = squared_radius(words[..., 0::2], words[..., 1::2]).sqrt(), angle(words[..., 1::2])
    pairs = torch.stack([radius * torch.cos(turn), radius * torch.sin(turn)], dim=-1)
    return pairs.flatten(2)[..., :size]


# -- the words ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter: str, key: str, expected: str) -> None:
    c0, c1, c2, c3 = words(counter)
    scratch = np.empty((3, 2, 7), dtype=np.uint64)
    scratch[0], scratch[1], scratch[2] = [[c0], [c2]], [[c1], [c3]], 2**64 - 1
    k0, k1 = words(key)
    even, odd = noise_cpu.philox(scratch, (k0, k1))
    for row, answer in zip((even[0], odd[0], even[1], odd[1]), words(expected)):
        assert (row == answer).all()


@patient
@given(st.lists(st.tuples(word, word, word, word), min_size=1, max_size=9), st.tuples(word, word))
def test_three_ways_to_the_same_words(counters: list[tuple[int, int, int, int]], key: tuple[int, int]) -> None:
    expected = torch.tensor([philox(list(counter), list(key)) for counter in counters])
    c0, c1, c2, c3 = torch.tensor(counters).unbind(1)
    assert torch.equal(torch.stack(noise.philox((c0, c1, c2, c3), key), dim=1), expected)
    scratch = np.empty((3, 2, len(counters)), dtype=np.uint64)
    scratch[0], scratch[1] = np.array(counters, dtype=np.uint64).T.reshape(2, 2, -1).swapaxes(0, 1)
    even, odd = noise_cpu.philox(scratch, key)
    assert (np.stack([even[0], odd[0], even[1], odd[1]], axis=1) == expected.numpy()).all()


# -- the numbers -------------------------------------------------------------------------------------------------------


@patient
@given(
    st.integers(0, 2**128),
    st.sampled_from(noise.ROLES),
    st.lists(st.sampled_from(IDS), min_size=1, max_size=4),
    st.integers(0, 2**20),
    st.integers(1, 4),
    st.sampled_from([1, 2, 7, -1]),
    st.lists(st.integers(1, 5), max_size=3),
)
def test_every_number_is_the_reference(
    seed: int, role: str, ids: list[int], start: int, count: int, step: int, shape: list[int]
) -> None:
    """Odd shapes, ids beyond 32 bits, draws with an offset and a step: all bits agree, in both ways to make them."""
    stream, size = Stream(seed, role), math.prod(shape)
    start = start if step > 0 else start + count
    draws = range(start, start + count * step, step)
    expected = reference(stream, ids, draws, size)
    found = stream.gaussian(torch.tensor(ids), draws, tuple(shape))
    assert (found.dtype, found.shape) == (torch.float32, (len(ids), len(draws), *shape))
    assert torch.equal(found.reshape(expected.shape), expected)
    assert torch.equal(noise.plain(torch.tensor(ids), stream._words("gaussian"), draws, size), expected)


def test_negative_ids_are_their_bits() -> None:
    stream = Stream(3, "test")
    unsigned = reference(stream, [2**64 - 1, 2**64 - 2**40], range(2), 9)
    assert torch.equal(stream.gaussian(torch.tensor([-1, -(2**40)]), range(2), (9,)), unsigned)


@pytest.mark.parametrize("extra", [0.5, None], ids=["the eight bits left out", "all bits"])
def test_numbers_are_right_to_float32_rounding(extra: float | None) -> None:
    """Against Box-Muller in float64, where the angle is 2 pi and not its nearest float32: 1e-5 of at most 7.5.

    Words whose first is above 2^16 (radii below 4.7) hardly feel the eight bits that continue them: the noise is still that
    of two plain words.
    """
    stream = Stream(8, "attack")
    w = reference_words(stream, [4], range(3), 4000)
    first, second = w[..., 0::2], w[..., 1::2]
    assert int(first.min()) > 2**16
    u = (first.double() + ((second % 256 + 0.5) / 256 if extra is None else extra)) / 2**32
    radius, turn = (-2 * u.log()).sqrt(), (second.double() + 0.5) / 2**32 * (2 * math.pi)
    exact = torch.stack([radius * turn.cos(), radius * turn.sin()], dim=-1).flatten(2)
    found = stream.gaussian(torch.tensor([4]), range(3), (4000,))
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-5)


FIRST = [0, 1, 2, 77, 2**16, 2**31, 2**32 - 2**24 - 1, 2**32 - 2**24, 2**32 - 2**20, 2**32 - 300, 2**32 - 2, 2**32 - 1]


def test_small_radii_and_tails_are_right() -> None:
    """The radius of any word to a relative 1e-6, from 5e-7 to 7.5. One float32 step below 1 would make it 0 or 3e-4."""
    first = torch.tensor(FIRST).repeat_interleave(3)
    second = torch.tensor([0, 128, 255]).repeat(len(FIRST))
    rest = (2**32 - 1 - first).double() + 1 - (second.double() + 0.5) / 256  # 2^32 (1 - u)
    exact = (-2 * torch.special.log1p(-rest / 2**32)).sqrt()
    out = np.empty((len(first), 4), dtype=np.float32)
    two = [np.stack([words.numpy().astype(np.uint32)] * 2) for words in (first, second)]
    noise_cpu._box_muller(*two, out)  # angles of at most 4e-7: the cosine is 1
    torch.testing.assert_close(torch.from_numpy(out[:, 0]).double(), exact, rtol=1e-6, atol=0)
    assert (out[:, 0] == squared_radius(first, second).sqrt().numpy()).all()
    assert 7.4 < out.max() < 7.6
    assert 0 < out[:, 0].min() < 2e-6


@pytest.mark.parametrize("draws", [range(3), range(5, 60, 11)])
@pytest.mark.parametrize("size", [1, 6, 29, 64])
@pytest.mark.parametrize("piece", [1, 2, 3, 7, 40, 10**6])
def test_pieces_of_any_size_make_the_same_noise(
    piece: int, size: int, draws: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole rows, parts of a row, and what is left over at the end of either; none is larger than it should be."""
    stream, ids = Stream(1, "calibration"), torch.tensor(IDS)
    real, counters = noise_cpu.philox, []
    monkeypatch.setattr(noise_cpu, "_PIECE", piece)
    monkeypatch.setattr(noise_cpu, "philox", lambda area, key: (counters.append(area.shape[2]), real(area, key))[1])
    expected = noise.plain(ids, stream._words("gaussian"), draws, size)
    assert torch.equal(stream.gaussian(ids, draws, (size,)), expected)
    assert max(counters) <= piece
    assert sum(counters) == len(ids) * len(draws) * math.ceil(size / 4)


@pytest.mark.parametrize(("images", "count", "shape"), [(7, 17, (3, 32, 32)), (2, 1, (3, 301, 307))])
def test_calls_of_several_pieces(images: int, count: int, shape: tuple[int, ...]) -> None:
    """Many images to a piece and many pieces to an image, at the size that is used."""
    stream, ids = Stream(1, "test"), torch.arange(images) * 2**33
    counters = math.ceil(math.prod(shape) / 4)
    assert images * count * counters > noise_cpu._PIECE
    expected = noise.plain(ids, stream._words("gaussian"), range(count), math.prod(shape))
    assert torch.equal(stream.gaussian(ids, range(count), shape).flatten(2), expected)


@pytest.mark.parametrize("shape", [(0,), (2, 0, 3), (), (5,)])
@pytest.mark.parametrize("draws", [range(0), range(2)])
@pytest.mark.parametrize("images", [0, 2])
def test_nothing_asked_is_nothing_made(images: int, draws: range, shape: tuple[int, ...]) -> None:
    found = Stream(1, "test").gaussian(torch.arange(images), draws, shape)
    assert found.shape == (images, len(draws), *shape)


# -- whoever calls, from wherever --------------------------------------------------------------------------------------


@pytest.fixture
def threads_of_torch() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads_of_torch")
def test_the_number_of_threads_changes_nothing() -> None:
    stream, ids, draws = Stream(6, "test"), torch.tensor(IDS), range(1, 20, 2)
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(stream.gaussian(ids, draws, (3, 37, 31)))
        assert torch.get_num_threads() == threads
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_concurrent_calls_do_not_meet() -> None:
    """Eight threads, each with ids, draws, shape and key of its own, again and again: every result is its own."""
    tasks = [(Stream(i, "test"), torch.tensor(IDS[i:]), range(i, 9 + i), (i + 1, 31, 17)) for i in range(8)]
    expected = [stream.gaussian(ids, draws, shape) for stream, ids, draws, shape in tasks]
    start, found = threading.Barrier(len(tasks)), {}

    def work(i: int) -> None:
        stream, ids, draws, shape = tasks[i]
        start.wait()
        found[i] = all(torch.equal(stream.gaussian(ids, draws, shape), expected[i]) for _ in range(4))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(len(tasks)), True)


def test_modes_and_defaults_of_the_caller_change_nothing() -> None:
    stream, ids, images = Stream(6, "test"), torch.tensor(IDS), torch.rand(len(IDS), 2, 5)
    expected = stream.noisy(images, ids, range(3), 0.5)
    exact = images[:, None] + 0.5 * reference(stream, IDS, range(3), 10).view(-1, 3, 2, 5)
    assert torch.equal(expected, (exact * 2048 + 0.5).floor() / 2048)
    with torch.inference_mode():
        assert torch.equal(stream.noisy(images, ids.clone(), range(3), 0.5), expected)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(stream.noisy(images, ids, range(3), 0.5), expected)
    finally:
        torch.set_default_dtype(torch.float32)
