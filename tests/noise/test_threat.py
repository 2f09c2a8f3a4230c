"""What an attack can do: ``up`` of Gaussian noise against 50 digits, its laws, and threats as values."""

from __future__ import annotations

import json
import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from keepcover.errors import InputError
from keepcover.noise import Gaussian, Stream, Threat, get_noise, get_norm, get_threat
from keepcover.testing import check_noise

patient = settings(deadline=None, derandomize=True)
radii = st.floats(0, 4)
within = st.floats(0, 1)


def threat(r: float) -> Threat:
    return Threat(Gaussian(1.0), r)


def shifted(q: float, r: float) -> mpmath.mpf:
    """Phi(Phi^-1(q) + r) with 50 digits, the inverse by Newton's method from scipy's."""
    with mpmath.workdps(50):
        z = mpmath.mpf(float(stats.norm.ppf(q)))
        for _ in range(6):
            z -= (mpmath.ncdf(z) - mpmath.mpf(q)) / mpmath.npdf(z)
        return mpmath.ncdf(z + mpmath.mpf(r))


@pytest.mark.parametrize("r", [1e-6, 0.1, 0.5, 1.0, 3.0])
def test_up_is_the_normal_cdf_moved_and_rounded_upwards(r: float) -> None:
    """Never below the truth, and above it by at most 3e-12, over thirty orders of magnitude and up to 1 - 1e-12."""
    for q in [*np.logspace(-30, -0.35, 40), *(1 - np.logspace(-12, -0.35, 20))]:
        found, exact = mpmath.mpf(float(threat(r).up(float(q)))), shifted(float(q), r)
        assert exact <= found <= min(exact * (1 + mpmath.mpf("3e-12")), 1), q


@pytest.mark.parametrize("r", [0.0, 0.1, 0.5, 1.0, 3.0])
def test_down_is_rounded_downwards(r: float) -> None:
    for p in [*np.logspace(-3, -0.35, 10), *(1 - np.logspace(-12, -0.35, 20))]:
        found = mpmath.mpf(float(threat(r).down(float(p))))
        exact = shifted(float(p), -r) if r else mpmath.mpf(float(p))
        assert exact - mpmath.mpf("3e-12") <= found <= exact, p


@pytest.mark.parametrize("r", [0.1, 0.5, 2.0])
def test_most_is_the_largest_probability_that_stays_below(r: float) -> None:
    for alpha in (1e-6, 0.01, 0.1, 0.5, 0.9):
        most = threat(r).most(alpha)
        exact = shifted(alpha, -r)
        assert threat(r).up(most) <= alpha
        assert exact * (1 - mpmath.mpf("1e-10")) <= most <= exact
        assert threat(r).up(most * (1 + 1e-9)) > alpha
    assert threat(r).most(0.0) == 0
    assert threat(0.0).most(0.1) == 0.1


@patient
@given(within, within, radii)
def test_up_is_monotone_and_at_least_q(a: float, b: float, r: float) -> None:
    low, high = sorted((a, b))
    up = threat(r).up
    assert low <= up(low) <= up(high) <= 1
    assert up(low) <= threat(r + 0.1).up(low)
    assert 0 <= threat(r).down(low) <= low


@patient
@given(st.floats(1e-9, 1 - 1e-9), st.floats(0, 3))
def test_down_undoes_up(p: float, r: float) -> None:
    assert float(threat(r).down(threat(r).up(p))) == pytest.approx(p, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("r", [0.0, 1e-9, 1.0, 50.0, 1e6])
def test_impossible_and_certain_events_stay_what_they_are(r: float) -> None:
    assert threat(r).up(np.array([0.0, 1.0])).tolist() == [0.0, 1.0]
    assert threat(r).down(np.array([0.0, 1.0])).tolist() == [0.0, 1.0]


def test_only_the_ratio_of_epsilon_and_sigma_counts() -> None:
    q = Gaussian(1.0).grid()
    np.testing.assert_allclose(Threat(Gaussian(0.25), 0.125).up(q), threat(0.5).up(q), rtol=1e-13)
    assert Threat(Gaussian(0.25), 0.0).up(0.3) == 0.3


def test_without_noise_an_attack_does_what_it_likes() -> None:
    """Gaussian(0) certifies nothing: any set may become certain, one that the clean input is not in too."""
    silent = Gaussian(0.0)
    assert not silent.certifies
    assert silent.up(np.array([0.0, 1e-300, 0.5, 1.0]), 0.1).tolist() == [1.0, 1.0, 1.0, 1.0]
    images = torch.rand(3, 2, 2, dtype=torch.float64)
    noisy = silent.noisy(images, Stream(0, "test"), torch.arange(3), range(4))
    assert torch.equal(noisy, images.float()[:, None].expand(3, 4, 2, 2))


def test_the_grid_ascends_from_0_to_1_and_reaches_into_both_tails() -> None:
    q = Gaussian(0.3).grid()
    assert (q[0], q[-1]) == (0.0, 1.0)
    assert (np.diff(q) > 0).all()
    assert q[1] < 1e-300
    assert 1 - q[-2] < 1e-14
    assert np.diff(stats.norm.ppf(q[(q > 1e-9) & (q < 1 - 1e-9)])).max() < 0.03


@pytest.mark.parametrize("sigma", [0.1, 1.0])
@pytest.mark.parametrize("r", [0.25, 1.5])
def test_gaussian_noise_passes_the_suite(sigma: float, r: float) -> None:
    """Half-spaces before and after an attack, by Clopper-Pearson at 1e-6; laws, keys, JSON and bad input."""
    check_noise(Gaussian(sigma), r * sigma)


# -- values ------------------------------------------------------------------------------------------------------------


def test_threats_are_values() -> None:
    one = Threat(Gaussian(0.25), 0.125)
    assert one == Threat(get_noise("gaussian:0.25"), 0.125, "l2")
    assert hash(one) == hash(Threat(get_noise(0.25), 0.125, "l2", (3, 32, 32)))
    assert one != Threat(Gaussian(0.25), 0.126)
    assert get_threat(json.loads(json.dumps(one.config()))) == one
    assert (str(one), one.reach) == ("has moved it by up to 0.125 in L2 norm", "L2 0.125")
    assert Threat(Gaussian(0.25), 0.1, shape=(3, 32, 32)).shape is None  # its bound does not depend on it


def test_noises_by_sigma_text_and_dictionary() -> None:
    noise = Gaussian(0.25)
    assert noise == get_noise(noise) == get_noise(0.25) == get_noise(noise.spec) == get_noise(noise.config())
    assert (noise.spec, str(noise)) == ("gaussian:0.25", "Gaussian noise sigma 0.25")


@pytest.mark.parametrize(
    ("noise", "message"),
    [
        ("gaussian", "name:number, for instance gaussian:0.25, got 'gaussian'"),
        ("gaussian:loud", "name:number"),
        ("gaussian:0.1,0.2", "gaussian noise takes sigma, got"),
        ("pink:0.1", "a noise among .*gaussian.*, got 'pink'"),
        ({"name": "pink", "sigma": 0.1}, "got 'pink'"),
        ({"name": "gaussian"}, "gaussian noise takes sigma"),
        ({"name": "gaussian", "sigma": 0.1, "hue": 1}, "gaussian noise takes sigma"),
        (-0.1, "finite sigma >= 0"),
        (math.nan, "finite sigma >= 0"),
        (math.inf, "finite sigma >= 0"),
    ],
)
def test_what_is_no_noise_is_refused(noise: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        get_noise(noise)  # type: ignore[arg-type]


def test_impossible_threats_are_refused() -> None:
    for epsilon in (-0.1, math.inf, math.nan):
        with pytest.raises(InputError, match="finite epsilon >= 0, the radius of the attack"):
            Threat(Gaussian(0.25), epsilon)
    with pytest.raises(InputError, match="gaussian noise certifies attacks in l2, l1, linf, got 'l0'; use Ablation"):
        Threat(Gaussian(0.25), 1, "l0")
    for q in (-0.1, 1.1, math.nan):
        with pytest.raises(InputError, match=r"probabilities in \[0, 1\]"):
            threat(0.5).up(q)


# -- norms -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["l2", "l1", "linf"])
@pytest.mark.parametrize("shape", [(5,), (3, 4, 4)])
def test_norms_keep_their_laws(name: str, shape: tuple[int, ...]) -> None:
    norm, generator = get_norm(name), torch.Generator().manual_seed(0)
    delta = torch.randn(200, *shape, generator=generator, dtype=torch.float64)
    radius = float(norm.length(delta).median())
    projected = norm.project(delta, radius)
    assert (norm.length(projected) <= radius * (1 + 1e-12)).all()
    inside = norm.length(delta) <= radius
    assert inside.any()
    assert torch.equal(projected[inside], delta[inside])
    torch.testing.assert_close(norm.length(norm.direction(delta)), torch.ones(200, dtype=torch.float64))
    start = norm.random(torch.zeros(400, *shape), 0.5, generator)
    assert start.shape == (400, *shape)
    assert (norm.length(start) <= 0.5 * (1 + 1e-5)).all()
    # No random direction of length 1 climbs a linear loss faster than its own.
    climb = lambda step: (step * delta).flatten(1).sum(dim=1)  # noqa: E731
    other = norm.direction(torch.randn(200, *shape, generator=generator, dtype=torch.float64))
    assert (climb(norm.direction(delta)) >= climb(other) - 1e-12).all()
    assert norm.direction(torch.zeros(2, *shape)).isfinite().all()


def test_random_starts_are_uniform_in_the_ball() -> None:
    """The length to the power of the dimension is uniform: Kolmogorov-Smirnov at 1e-6."""
    start = get_norm("l2").random(torch.zeros(5000, 6), 2.0, torch.Generator().manual_seed(0))
    assert stats.kstest((start.norm(dim=1) / 2).pow(6).numpy(), "uniform").pvalue > 1e-6


def test_unknown_norms_are_refused() -> None:
    with pytest.raises(InputError, match=r"a norm among .*l2.*, got 'l7'"):
        get_norm("l7")


@pytest.mark.parametrize(
    ("name", "shape"),
    [("l0", (5,)), ("l0", (3, 4, 4)), ("patch", (3, 6, 5)), ("patch", (1, 2, 7)), ("patch", (2, 7, 1))],
)
def test_norms_of_replaced_positions_keep_their_laws(name: str, shape: tuple[int, ...]) -> None:
    """All channels of a pixel are one position; what is within the radius stays, what is not loses the least of it."""
    norm, generator = get_norm(name), torch.Generator().manual_seed(0)
    inputs = torch.rand(300, *shape, generator=generator)
    for radius in (1.0, 2.0, 3.0):
        move = norm.random(inputs, radius, generator)
        assert float(norm.length(move).max()) == radius
        assert torch.equal(norm.project(move, radius), move)
        wide = torch.randn(300, *shape, generator=generator)
        assert (norm.length(norm.project(wide, radius)) == radius).all()
        nearby = norm.propose(move, inputs, radius, generator)
        assert (norm.length(nearby) <= radius).all()
        assert (nearby != move).any()
    with pytest.raises(InputError, match=r"a whole number of .* for epsilon, got 1.5"):
        norm.check(1.5)


def test_channels_of_a_pixel_are_one_position() -> None:
    delta = torch.zeros(1, 3, 4, 4)
    delta[0, :, 1, 2], delta[0, 2, 3, 3] = 0.5, -0.1
    assert get_norm("l0").length(delta).tolist() == [2.0]
    assert get_norm("patch").length(delta).tolist() == [3.0]
    assert get_norm("l0").project(delta, 1).count_nonzero() == 3
    assert get_norm("l0").length(torch.tensor([[3, 0, -1, 0]])).tolist() == [2.0]


def test_random_tokens_come_from_those_there_are() -> None:
    tokens = torch.randint(5, 90, (50, 12), generator=torch.Generator().manual_seed(0))
    moved = tokens + get_norm("l0").random(tokens, 2, torch.Generator().manual_seed(1))
    assert moved.dtype == tokens.dtype
    assert tokens.min() <= moved.min() <= moved.max() <= tokens.max()
    assert (moved != tokens).sum(dim=1).max() == 2
