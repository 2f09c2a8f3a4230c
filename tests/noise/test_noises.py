"""Every noise: what an attack can do by brute force, the law of what is drawn, the same bits everywhere.

Each statistical test states its false-alarm rate; seeds are fixed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy import ndarray
from scipy import stats
from torch import Tensor

from keepcover.errors import InputError
from keepcover.noise import (
    NOISES,
    Ablation,
    Bands,
    Gaussian,
    Laplace,
    Noise,
    RandomBands,
    Stream,
    Threat,
    Uniform,
    get_noise,
)
from keepcover.noise.laplace import minus_log
from keepcover.noise.stream import lattice, plain_unit
from keepcover.testing import check_noise

SMALL = 1e-6  # false-alarm rate of a test
IMAGE = (3, 32, 32)
MASK = Stream(12, "test")

# -- worked examples ---------------------------------------------------------------------------------------------------


def test_worked_examples() -> None:
    np.testing.assert_allclose(Laplace(1.0).up([0.2, 0.4, 0.8], 0.5), [0.3297, 0.6209, 0.8787], atol=5e-5)
    assert Uniform(0.5).up(0.2, 0.3) == pytest.approx(0.5)
    assert Ablation(75).up(0.0, 3, shape=IMAGE) == pytest.approx(1 - math.comb(1021, 75) / math.comb(1024, 75))
    assert Ablation(75).up(0.0, 3, shape=IMAGE) == pytest.approx(0.2042, abs=5e-5)
    assert Bands(4).up(0.0, 5, shape=IMAGE) == pytest.approx(8 / 32)
    assert Gaussian(0.25).up(0.3, 1 / 255, "linf", IMAGE) == pytest.approx(Gaussian(0.25).up(0.3, 0.21736), abs=1e-5)
    assert Gaussian(0.25).up(0.3, 0.2, "l1") == Gaussian(0.25).up(0.3, 0.2)
    assert Ablation(75).up(0.0, 2, "patch", IMAGE) == Ablation(75).up(0.0, 4, "l0", IMAGE)
    assert Ablation(3).up(0.1, 2, shape=(4,)) == 1  # every subset of 3 holds a changed one
    assert Bands(4).up(0.1, 40, shape=IMAGE) == 1


@pytest.mark.parametrize(
    ("noise", "epsilon", "norm", "shape"),
    [
        (Laplace(0.3), 0.2, "l1", (3,)),
        (Uniform(0.3), 0.2, "l1", (3,)),
        (Gaussian(0.3), 0.1, "linf", (3,)),
        (Gaussian(0.3), 0.2, "l1", (3,)),
        (Ablation(2), 1, "l0", (6,)),
        (Ablation(3), 2, "l0", (2, 3, 3)),
        (Ablation(3), 1, "patch", (1, 4, 4)),
        (Bands(2), 3, "patch", (2, 5, 9)),
        (RandomBands(2), 2, "patch", (1, 4, 7)),
    ],
    ids=str,
)
def test_every_noise_passes_the_suite(noise: Noise, epsilon: float, norm: str, shape: tuple[int, ...]) -> None:
    check_noise(noise, epsilon, norm=norm, shape=shape, draws=8000)


@pytest.mark.parametrize(
    ("noise", "norm", "answer"),
    [
        (Uniform(0.5), "l2", r"certifies attacks in l1, got 'l2'; use Gaussian\(sigma\)"),
        (Laplace(0.5), "linf", r"use Gaussian\(sigma\)"),
        (Gaussian(0.5), "patch", r"use Bands\(width\)"),
        (Gaussian(0.5), "l0", r"use Ablation\(keep\)"),
        (Bands(4), "l1", r"use Laplace\(scale\) or Uniform\(half_width\)"),
    ],
)
def test_impossible_pairs_say_what_to_use(noise: Noise, norm: str, answer: str) -> None:
    for action in (lambda: noise.up(0.1, 1, norm), lambda: Threat(noise, 1, norm)):
        with pytest.raises(InputError, match=answer):
            action()


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda: Ablation(0), "whole number of positions to keep"),
        (lambda: get_noise("ablation:7.5"), "keep"),
        (lambda: get_noise("ablation:inf"), "keep"),
        (lambda: get_noise("bands:inf"), "width"),
        (lambda: get_noise("gaussian:nan"), "finite sigma >= 0, got nan"),
        (lambda: get_noise("uniform:-1"), "finite half width > 0, got -1"),
        (
            lambda: Gaussian(0.25).up(0.1, 0.1, "linf", (0,)),
            r"shape of one input, .* got \(0,\)",
        ),  # no cost at all, once
        (lambda: Gaussian(0.25).up(0.1, 0.1, "linf", ()), r"shape of one input, .* got \(\)"),
        (lambda: Threat(Gaussian(0.25), 0.1, "linf", (3, -32, 32)), "shape of one input"),
        (lambda: Bands(0), "whole number of columns"),
        (lambda: Laplace(0.0), "finite scale > 0"),
        (lambda: Uniform(math.inf), "finite half width > 0"),
        (lambda: Ablation(75).up(0.1, 2.5, shape=IMAGE), "whole number of positions for epsilon, got 2.5"),
        (lambda: Ablation(75).up(0.1, 3), r"depends on the inputs: give shape=\(3, 32, 32\)"),
        (lambda: Gaussian(0.25).up(0.1, 0.1, "linf"), "give shape="),
        (lambda: Ablation(75).up(0.1, 3, shape=(5,)), "an input .5. with 5; keep fewer"),
        (lambda: Bands(4).up(0.1, 3, shape=(20,)), "need images"),
        (lambda: Laplace(0.1).noisy(torch.ones(2, 3, dtype=torch.int64), MASK, torch.arange(2), range(2)), "tokens"),
        (lambda: Gaussian(0.1).noisy(torch.ones(2, 3, dtype=torch.int64), MASK, torch.arange(2), range(2)), "tokens"),
        (lambda: Laplace(0.1).positions(IMAGE), "is random"),
        (lambda: Bands(2).noisy(torch.ones(1, 1, 4, 4), Stream(0, "test"), torch.arange(1), range(5)), "4 bands"),
    ],
)
def test_what_makes_no_sense_is_refused(action: Callable[[], Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        action()


# -- Neyman-Pearson by brute force -------------------------------------------------------------------------------------


def neyman_pearson(clean: ndarray, attacked: ndarray, q: float) -> float:
    """The largest attacked probability of a randomised set of clean probability q: cells in the order of their ratio."""
    with np.errstate(divide="ignore"):
        order = np.argsort(-attacked / np.maximum(clean, 1e-300), kind="stable")
    spent = np.append(0.0, clean[order].cumsum())
    return float(np.interp(q, spent, np.append(0.0, attacked[order].cumsum())))


LEVELS = (0.0, 0.01, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95)
BITS = np.linspace(-30, 30, 60_001)  # cells of a thousandth; the moves below are whole cells


def cells(cdf: Callable[[ndarray], ndarray], move: float) -> ndarray:
    return np.diff(cdf(BITS - move))


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 2.0])
@pytest.mark.parametrize(
    ("noise", "law"),
    [(Laplace(1.0), stats.laplace()), (Uniform(2.0), stats.uniform(-2, 4)), (Gaussian(1.0), stats.norm())],
    ids=["laplace", "uniform", "gaussian"],
)
def test_up_is_the_neyman_pearson_curve_in_one_dimension(noise: Noise, law: Any, epsilon: float) -> None:
    clean, attacked = (cells(law.cdf, move) for move in (0.0, epsilon))
    for q in LEVELS:
        best, up = neyman_pearson(clean, attacked, q), float(noise.up(q, epsilon, "l1"))
        if q == 0 and not isinstance(noise, Uniform):  # beyond the cells
            best = 0.0
        assert best - 1e-9 <= up <= best + 2e-3, (q, best, up)


@pytest.mark.parametrize("split", [(0.6, 0.0), (0.3, 0.3), (0.1, -0.5)])
@pytest.mark.parametrize("noise", [Laplace(0.7), Uniform(1.0)], ids=str)
def test_splitting_the_attack_over_two_numbers_gains_nothing(noise: Noise, split: tuple[float, float]) -> None:
    """All sets in the plane, by the likelihood ratio on 800 x 800 cells, against up of the whole L1 length."""
    law = stats.laplace(scale=0.7) if isinstance(noise, Laplace) else stats.uniform(-1, 2)
    grid = np.linspace(-8, 8, 801)  # cells of 0.02: all moves are whole cells
    clean = np.outer(*(np.diff(law.cdf(grid)) for _ in split)).ravel()
    attacked = np.outer(*(np.diff(law.cdf(grid - move)) for move in split)).ravel()
    for q in LEVELS:
        best, up = neyman_pearson(clean, attacked, q), float(noise.up(q, sum(map(abs, split))))
        assert best <= up + 1e-4, (q, best, up)
        if 0.0 in split and q > 0:
            assert up <= best + 0.01  # one number alone attains it


@pytest.mark.parametrize(("total", "keep", "changed"), [(6, 2, 1), (6, 2, 3), (7, 4, 2), (5, 4, 2)])
def test_ablation_against_all_subsets(total: int, keep: int, changed: int) -> None:
    """Clean and attacked readings agree where no changed position is kept and are disjoint elsewhere: count the subsets."""
    subsets = list(itertools.combinations(range(total), keep))
    meets = np.array([any(i < changed for i in subset) for subset in subsets])
    share = 1 / len(subsets)
    clean = np.concatenate([np.full(len(subsets), share), np.zeros(len(subsets))])  # second half: attacked readings
    attacked = np.concatenate([np.where(meets, 0, share), np.where(meets, share, 0)])
    noise = Ablation(keep)
    for q in LEVELS:
        best = neyman_pearson(clean, attacked, q)
        # Where no set attains the sum, it is 1 that is attained.
        assert noise.up(q, changed, shape=(total,)) == pytest.approx(best, abs=1e-9)


@pytest.mark.parametrize(("width", "side", "columns"), [(1, 1, 5), (2, 3, 9), (4, 5, 32), (3, 6, 7)])
def test_bands_against_all_places_of_the_patch(width: int, side: int, columns: int) -> None:
    image = torch.zeros(1, 1, side, columns)
    places = []
    for at in range(columns - min(side, columns) + 1):
        patched = image.clone()
        patched[..., at : at + side] = 1
        seen = Bands(width).noisy(patched, Stream(0, "test"), torch.arange(1), range(columns))
        places.append((seen == 1).flatten(2).any(dim=2)[0])
    changed = torch.stack(places)
    assert int(changed.sum(dim=1).max()) == Bands(width).touched(side, (1, side, columns))
    for line in changed.tolist():  # neighbours, once around
        assert sum(a != b for a, b in zip(line, line[1:] + line[:1], strict=True)) <= 2


# -- what is drawn -----------------------------------------------------------------------------------------------------


def noise_of(noise: Noise, ids: int, draws: int, size: int) -> Tensor:
    """Noise alone, at an input of 0."""
    return noise.noisy(torch.zeros(ids, size), MASK, torch.arange(ids), range(draws)).double()


@pytest.mark.parametrize(
    ("noise", "law"),
    [(Laplace(0.3), stats.laplace(scale=0.3)), (Uniform(0.3), stats.uniform(-0.3, 0.6))],
    ids=["laplace", "uniform"],
)
def test_noise_follows_its_law(noise: Noise, law: Any) -> None:
    """Kolmogorov-Smirnov on 200,000 numbers at 1e-6, less the grid's step; neighbours, draws and ids uncorrelated at 1e-6."""
    drawn = noise_of(noise, 50, 8, 500)
    flat = drawn.flatten().numpy()
    step = lattice(0.3)
    statistic = stats.kstest(flat, law.cdf).statistic
    assert statistic - step * float(law.pdf(0.0)) < stats.kstwo.isf(SMALL, len(flat))
    limit = stats.norm.isf(SMALL / 6) / math.sqrt(flat.size - 500)
    for shifted in (drawn.roll(1, dims=axis) for axis in (0, 1, 2)):
        assert abs(np.corrcoef(flat, shifted.flatten().numpy())[0, 1]) < limit
        assert abs(np.corrcoef(np.abs(flat), shifted.abs().flatten().numpy())[0, 1]) < limit


def test_the_tails_of_laplace_noise_are_there() -> None:
    """Exceedances of 8 scales among half a million numbers: Poisson with mean 168, two-sided at 1e-6."""
    far = int((noise_of(Laplace(1.0), 100, 10, 500).abs() > 8).sum())
    mean = 500_000 * math.exp(-8)
    assert stats.poisson.cdf(far, mean) > SMALL / 2
    assert stats.poisson.sf(far - 1, mean) > SMALL / 2


def law_on_the_lattice(noise: Noise, scale: float, x: float) -> tuple[ndarray, ndarray]:
    """The exact probabilities of all lattice points, from the 2^52 numbers that a unit can be, and the edges of their cells.

    The noisy input rises with the unit, so that the first unit at which a point is reached is bisected.
    """

    class Fixed(Stream):
        values: Tensor

        def unit(self, ids: Tensor, draws: range, shape: tuple[int, ...]) -> Tensor:
            return self.values.clone().view(1, 1, -1)

    stream = Fixed(0, "test")

    def reached(bits: Tensor) -> Tensor:
        object.__setattr__(stream, "values", (bits.double() + 0.5) * 2.0**-52)
        image = torch.full((1, len(bits)), x, dtype=torch.float64)
        return noise.noisy(image, stream, torch.arange(1), range(1)).flatten().double()

    ends = reached(torch.tensor([0, 2**52 - 1]))
    step = lattice(scale)
    points = torch.arange(round(float(ends[0]) / step), round(float(ends[1]) / step) + 1).double() * step
    low, high = torch.zeros(len(points), dtype=torch.int64), torch.full((len(points),), 2**52)
    for _ in range(53):
        middle = (low + high) // 2
        there = reached(middle.clamp_max(2**52 - 1)) >= points - step / 4
        low, high = torch.where(there, low, middle + 1), torch.where(there, middle, high)
    first = torch.cat([high, torch.tensor([2**52])]).double().numpy()
    edges = (points.numpy() - step / 2).tolist()
    return np.diff(first) * 2.0**-52, np.array([*edges, edges[-1] + step])


@pytest.mark.parametrize("x", [0.0, 0.3, 0.123456789, 1.0, -2.71828])
@pytest.mark.parametrize(
    ("noise", "scale", "law", "bound"),
    [(Uniform(0.3), 0.3, stats.uniform(-0.3, 0.6), 2.0**-39), (Laplace(0.3), 0.3, stats.laplace(scale=0.3), 2.0**-33)],
    ids=["uniform", "laplace"],
)
def test_what_is_read_is_within_the_stated_total_variation(
    noise: Noise, scale: float, law: Any, bound: float, x: float
) -> None:
    """The exact law of x + noise on the lattice against the real law, integrated over the lattice's cells."""
    found, edges = law_on_the_lattice(noise, scale, x)
    inner = edges[1:-1] - x
    below, above = law.cdf(inner), law.sf(inner)
    # Differences of the smaller tail: the cdf has no digits left near 1.
    expected = np.diff(np.concatenate([[0.0], below[inner <= 0]]))
    rest = -np.diff(np.concatenate([above[inner > 0], [0.0]]))
    middle = 1 - expected.sum() - rest.sum()
    expected = np.concatenate([expected, [middle], rest])
    assert len(expected) == len(found)
    assert np.abs(found - expected).sum() / 2 < bound


def test_the_logarithm_is_right_to_its_last_bits() -> None:
    u = torch.cat([torch.rand(10_000, dtype=torch.float64), torch.logspace(-15.9, 0, 500, dtype=torch.float64)])
    torch.testing.assert_close(minus_log(u), -u.log(), rtol=1e-15, atol=1e-16)


def kept(noise: Noise, shape: tuple[int, ...], ids: int, draws: int) -> Tensor:
    noisy = noise.noisy(torch.rand(ids, *shape), MASK, torch.arange(ids), range(draws))
    return ~noisy.isnan()


def test_ablation_keeps_so_many_pixels_with_all_their_channels() -> None:
    shown = kept(Ablation(75), IMAGE, 4, 5)
    assert (shown[:, :, 0].sum(dim=(2, 3)) == 75).all()
    assert torch.equal(shown[:, :, 0], shown[:, :, 2])
    images = torch.rand(4, *IMAGE)
    noisy = Ablation(75).noisy(images, MASK, torch.arange(4), range(5))
    assert torch.equal(noisy.nan_to_num(nan=0.0), torch.where(shown, images[:, None], 0.0))


def test_subsets_are_uniform_and_drawn_anew_for_every_draw() -> None:
    """15 subsets of 2 of 6: chi-square at 1e-6. Two draws agree as often as two independent ones: binomial, two-sided at 1e-6.

    Masks drawn without replacement across draws would never agree, and binomial counts would not be binomial.
    """
    shown = kept(Ablation(2), (6,), 500, 6)
    code = (shown * 2 ** torch.arange(6)).sum(dim=2)
    _, counts = code.unique(return_counts=True)
    assert len(counts) == 15
    assert stats.chisquare(counts.numpy()).pvalue > SMALL
    same = int((code[:, 0] == code[:, 1]).sum() + (code[:, 2] == code[:, 3]).sum() + (code[:, 4] == code[:, 5]).sum())
    assert stats.binomtest(same, 1500, 1 / 15).pvalue > SMALL
    across = int((code[::2].flatten() == code[1::2].flatten()).sum())
    assert stats.binomtest(across, 1500, 1 / 15).pvalue > SMALL


def test_random_bands_are_anywhere() -> None:
    """Chi-square of the first column at 1e-6; two draws agree once in so many columns, at 1e-6."""
    shown = kept(RandomBands(3), (1, 2, 8), 500, 6)[:, :, 0]
    assert (shown.sum(dim=(2, 3)) == 6).all()
    columns = shown[:, :, 0]
    first = (columns & ~columns.roll(1, dims=2)).int().argmax(dim=2)
    assert stats.chisquare(torch.bincount(first.flatten(), minlength=8).numpy()).pvalue > SMALL
    assert stats.binomtest(int((first[:, 0] == first[:, 1]).sum()), 500, 1 / 8).pvalue > SMALL


def test_bands_go_once_around() -> None:
    shown = kept(Bands(3), (1, 2, 5), 1, 5)[0, :, 0, 0]
    assert shown.int().tolist() == [[1, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 0, 1, 1, 1], [1, 0, 0, 1, 1], [1, 1, 0, 0, 1]]


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.uint8])
def test_tokens_stay_tokens(kind: torch.dtype) -> None:
    """-1 is absent in every type of integer: among 8 bits it would be the token 255."""
    tokens = torch.randint(0, 50, (3, 9))
    noisy = Ablation(4).noisy(tokens.to(kind), MASK, torch.arange(3), range(2))
    assert noisy.dtype == tokens.dtype
    assert ((noisy != -1).sum(dim=2) == 4).all()
    assert torch.equal(torch.where(noisy == -1, tokens[:, None], noisy), tokens[:, None].expand(3, 2, 9))


# -- the same bits everywhere ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 7, 3072])
@pytest.mark.parametrize("draws", [range(3), range(5, 60, 11)])
def test_the_fast_way_gives_the_bits_of_the_definition(size: int, draws: range) -> None:
    ids = torch.tensor([0, 5, 2**40, -1])
    found = MASK.unit(ids, draws, (size,))
    assert torch.equal(found, plain_unit(ids, MASK._words("unit"), draws, size))
    assert found.dtype == torch.float64
    assert ((found > 0) & (found < 1)).all()
    assert torch.equal((found * 2.0**53) % 2, torch.ones_like(found))  # odd multiples of 2^-53


def test_units_share_nothing_with_gaussian_noise() -> None:
    assert MASK._words("unit") != MASK._words("gaussian")


@pytest.mark.parametrize("name", list(NOISES))
def test_names_and_numbers_survive(name: str) -> None:
    noise = get_noise(f"{name}:2")
    assert get_noise(noise.spec) == get_noise(noise.config()) == noise
    assert str(noise)
    assert noise.assumptions
