"""Noise is a pure function of (seed, role, example, draw), Gaussian, and independent wherever these differ.

Each statistical test states its false-alarm rate; seeds are fixed.
"""

from __future__ import annotations

import secrets
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from keepcover.errors import InputError
from keepcover.noise.stream import ROLES, Stream, fresh_seed, philox
from tests.noise.known import KNOWN, words

patient = settings(deadline=None, derandomize=True)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_known_answers(counter: str, key: str, expected: str) -> None:
    c0, c1, c2, c3 = (torch.full((2, 3), word) for word in words(counter))
    k0, k1 = words(key)
    for word, answer in zip(philox((c0, c1, c2, c3), (k0, k1)), words(expected)):
        assert (word == answer).all()
    assert int(c0[0, 0]) == words(counter)[0]  # the counter is not written to


@patient
@given(st.permutations(range(6)), st.integers(1, 6), st.integers(0, 4), st.integers(1, 4))
def test_noise_does_not_depend_on_batch_order_or_range(order: list[int], size: int, start: int, length: int) -> None:
    stream, ids = Stream(11, "calibration"), torch.tensor([0, 7, 3, 2**20, 9, 12])
    everything = stream.gaussian(ids, range(8), (3, 5))
    chosen = torch.tensor(order[:size])
    part = stream.gaussian(ids[chosen], range(start, start + length), (3, 5))
    assert torch.equal(part, everything[chosen, start : start + length])


def test_noise_does_not_depend_on_the_chunks_it_is_made_in() -> None:
    """Large images are generated a few at a time, and a strided range of draws is still the same draws."""
    stream, ids = Stream(1, "test"), torch.arange(9)
    everything = stream.gaussian(ids, range(7), (3, 32, 32))
    for i in (0, 5, 8):
        assert torch.equal(everything[i : i + 1, 2:3], stream.gaussian(ids[i : i + 1], range(2, 3), (3, 32, 32)))
    assert torch.equal(everything[:, 1:7:2], stream.gaussian(ids, range(1, 7, 2), (3, 32, 32)))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
def test_noise_does_not_depend_on_the_integer_type_of_ids(dtype: torch.dtype) -> None:
    stream, ids = Stream(3, "test"), torch.tensor([1, 2, 100])
    assert torch.equal(stream.gaussian(ids.to(dtype), range(2), (6,)), stream.gaussian(ids, range(2), (6,)))
    assert torch.equal(stream.uniform(ids.to(dtype), "u"), stream.uniform(ids, "u"))


def test_a_larger_shape_extends_a_smaller_one() -> None:
    stream, ids = Stream(1, "test"), torch.arange(3)
    assert torch.equal(stream.gaussian(ids, range(2), (30,))[..., :7], stream.gaussian(ids, range(2), (7,)))


def test_ids_beyond_32_bits_have_their_own_noise() -> None:
    stream = Stream(0, "test")
    ids = torch.tensor([5, 5 + 2**32, 5 + 2**33, 5 + 2**62])
    noise, u = stream.gaussian(ids, range(1), (64,))[:, 0], stream.uniform(ids, "aps")
    for i, j in combinations(range(len(ids)), 2):
        assert (noise[i] != noise[j]).all()
        assert u[i] != u[j]


def test_noise_is_standard_normal() -> None:
    """Kolmogorov-Smirnov on half a million values at 1e-6, and the exact chi-square law of squared norms at 1e-6."""
    noise = Stream(2024, "test").gaussian(torch.arange(250), range(4), (512,)).double()
    assert stats.kstest(noise.flatten().numpy(), "norm").pvalue > 1e-6
    norms = stats.chi2(512).cdf(noise.square().sum(dim=-1).flatten().numpy())
    assert stats.kstest(norms, "uniform").pvalue > 1e-6


def test_the_tails_are_there() -> None:
    """P[|z| > 4] on four million values: exact binomial test at 1e-6; the largest radius Box-Muller can give is 6.8."""
    noise = Stream(5, "attack").gaussian(torch.arange(64), range(16), (4096,))
    assert stats.binomtest(int((noise.abs() > 4).sum()), noise.numel(), 2 * stats.norm.sf(4)).pvalue > 1e-6
    assert 4.5 < float(noise.abs().max()) < 6.8


def test_examples_draws_roles_seeds_and_neighbours_are_uncorrelated() -> None:
    """Pearson's exact test for Gaussian vectors over all pairs of streams, false-alarm rate 1e-5 in total."""
    size, ids = 20_000, torch.tensor([0, 1, 2**32])
    vectors = [
        *Stream(0, "test").gaussian(ids, range(3), (size,)).flatten(0, 1),
        *(Stream(0, role).gaussian(ids[:1], range(1), (size,))[0, 0] for role in ROLES if role != "test"),
        *(Stream(seed, "test").gaussian(ids[:1], range(1), (size,))[0, 0] for seed in (1, 2**64, 2**127)),
    ]
    pairs = list(combinations(vectors, 2)) + [(v[:-lag], v[lag:]) for v in vectors for lag in (1, 2, 3, 4)]
    assert min(stats.pearsonr(a.double().numpy(), b.double().numpy()).pvalue for a, b in pairs) > 1e-5 / len(pairs)


def test_every_role_and_seed_has_its_own_noise() -> None:
    ids = torch.arange(2)
    streams = [Stream(seed, role) for role in ROLES for seed in (0, 1, 2**64 + 1)]
    noise = [stream.gaussian(ids, range(2), (16,)) for stream in streams]
    for a, b in combinations(noise, 2):
        assert not (a == b).any()
    assert torch.equal(noise[3], Stream(streams[3].seed, streams[3].role).gaussian(ids, range(2), (16,)))


def test_uniform_numbers_are_uniform_and_purposes_are_independent() -> None:
    """KS and rank-correlation tests, each at 1e-6."""
    stream, ids = Stream(9, "test"), torch.arange(50_000)
    one, two = stream.uniform(ids, "aps").double().numpy(), stream.uniform(ids, "boundary").double().numpy()
    noise = stream.gaussian(ids, range(1), (1,)).flatten().double().numpy()
    for values in (one, two):
        assert stats.kstest(values, "uniform").pvalue > 1e-6
        assert values.min() >= 0
        assert values.max() <= 1
        assert stats.spearmanr(values, noise).pvalue > 1e-6
        assert stats.spearmanr(values[1:], values[:-1]).pvalue > 1e-6
    assert stats.spearmanr(one, two).pvalue > 1e-6
    assert torch.equal(stream.uniform(ids[[17, 4]], "aps"), stream.uniform(ids, "aps")[[17, 4]])


def test_seeds_come_from_the_system_and_stay_out_of_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    """``secrets`` is asked for 128 bits each time, and for nothing that anyone could guess."""
    asked: list[int] = []
    monkeypatch.setattr(secrets, "randbits", lambda bits: asked.append(bits) or len(asked))
    assert [fresh_seed() for _ in range(8)] == list(range(1, 9))
    assert asked == [128] * 8
    assert "918273" not in repr(Stream(918273, "test"))


def test_bad_streams_are_refused() -> None:
    with pytest.raises(InputError, match="role among holdout, calibration, test"):
        Stream(0, "validation")
    with pytest.raises(InputError, match="non-negative integer, got -1"):
        Stream(-1, "test")
