"""What the network reads is computed from the exact sum x + noise alone, and the grid of floating-point numbers is hidden.

Two constructions that make attacked coverage 0 where that is not so: inputs rounded before the noise is added, and a model
that reads the low bits of the sum. Each is first shown to work on such noise, then to fail on the library's. Checks of coverage
are p-values of the audit: false-alarm rate 1e-5 each.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from keepcover.attacks.audit import Audit, AuditRow, audit
from keepcover.attacks.pgd import NoisyModel, pgd
from keepcover.engine.inputs import check_images
from keepcover.engine.smoother import Smoother
from keepcover.noise.stream import Stream, lattice, probes, to_lattice_
from keepcover.prediction.calibration import calibrate
from keepcover.serve import Settings
from keepcover.serve.reading import Reader
from keepcover.specs import load_data, load_inputs, load_parts
from keepcover.store import LogitStore, StoreKey
from keepcover.store.cluster import Cluster
from keepcover.store.cluster.ray import Pool, Recipe
from keepcover.store.folder import Filling
from keepcover.store.key import data_fingerprint
from keepcover.training.base import fit_under_noise
from tests.noise.test_cpu import angle, squared_radius
from tests.serve.serving import make_predictor
from tests.store.test_engines import Ray
from tests.toys import SHAPE, Recorder, nearest, toy

FALSE_ALARM = 1e-5


# -- the definition ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sigma", [1e-3, 0.1, 0.25, 0.9999, 1.0, 10.0, 1e4])
def test_the_step_is_a_power_of_two_near_a_thousandth_of_sigma(sigma: float) -> None:
    assert math.frexp(lattice(sigma))[0] == 0.5
    assert sigma / 2048 < lattice(sigma) <= sigma / 1024


@pytest.mark.parametrize("sigma", [0.01, 0.25, 3.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_the_exact_sum_is_rounded_once(dtype: torch.dtype, sigma: float, scale: float) -> None:
    """Against exact arithmetic: within half a step of x + n and the rounding of float32, on the lattice where float32 has it."""
    stream, ids = Stream(4, "test"), torch.arange(6)
    images = (scale * torch.rand(6, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)).to(dtype)
    found = stream.noisy(images, ids, range(5), sigma)
    assert (found.dtype, found.shape) == (torch.float32, (6, 5, 7))
    exact = images.double()[:, None] + (sigma * stream.gaussian(ids, range(5), (7,))).double()
    own = 2.0**-24 * exact.abs()  # half a step of float32
    assert ((found.double() - exact).abs() <= lattice(sigma) / 2 + 2 * own).all()
    assert torch.equal(found, found.div(lattice(sigma)).round().mul(lattice(sigma)))
    if dtype == torch.float64:
        assert torch.equal(found, (exact / lattice(sigma) + 0.5).floor().mul(lattice(sigma)).float())


def test_half_a_step_goes_up_on_either_side_of_zero() -> None:
    values = torch.tensor([-1.5, -1.0, -0.5, -0.25, 0.0, 0.5, 1.5, 2.5]) * lattice(0.25)
    assert (to_lattice_(values.clone(), 0.25) / lattice(0.25)).tolist() == [-1, -1, 0, 0, 0, 1, 2, 3]
    assert (to_lattice_(values.double(), 0.25) / lattice(0.25)).tolist() == [-1, -1, 0, 0, 0, 1, 2, 3]


def test_without_noise_nothing_is_rounded() -> None:
    images, recorder = toy(5)[0].double(), Recorder()
    Smoother(recorder, 0.0).logits(images, 4, Stream(0, "test"))
    assert torch.equal(recorder.inputs, images.float())
    NoisyModel(recorder, 0.0, 1, Stream(0, "attack")).outputs(images, torch.arange(5))
    assert torch.equal(recorder.seen[-1], images.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_attacker_reads_what_the_defender_reads(dtype: torch.dtype) -> None:
    """The same numbers from the same stream, and gradients as if there were no rounding."""
    images, stream, recorder = toy(5)[0].to(dtype), Stream(3, "attack"), Recorder()
    noisy = NoisyModel(recorder, 0.25, 4, stream)
    x = images.clone().requires_grad_()
    noisy.outputs(x, torch.arange(5)).sum().backward()
    assert torch.equal(recorder.inputs.view(5, 4, *SHAPE), stream.noisy(images, torch.arange(5), range(4), 0.25))
    assert x.grad is not None
    assert torch.equal(x.grad.flatten(1), torch.tensor([4.0] * 3 + [0.0] * 13, dtype=dtype).expand(5, 16))


# -- inputs whose float32 neighbours are far apart ---------------------------------------------------------------------


def rounding_first(self: Stream, images: Tensor, ids: Tensor, draws: range, sigma: float) -> Tensor:
    """A mutant: x to float32, then the noise."""
    return images.float()[:, None] + sigma * self.gaussian(ids, draws, tuple(images.shape[1:]))


CASES = {  # where, the step of float32 there, sigma, epsilon
    "Unix times": (1.7e9, 128.0, 10.0, 1.0),
    "UTM northings": (5.4e6, 0.5, 0.1, 0.02),
}


class HalfSpace(nn.Module):
    """Which side of the point half a float32 step above ``origin``."""

    def __init__(self, origin: float, step: float) -> None:
        super().__init__()
        self.origin, self.step = origin, step

    def forward(self, x: Tensor) -> Tensor:
        offset = ((x - self.origin) / self.step - 0.5).flatten(1)
        return torch.cat([-offset, offset], dim=1)


def on_both_sides(case: str, n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points half an epsilon below and above the border: float32 makes half a step of it."""
    origin, step, _, epsilon = CASES[case]
    labels = torch.randint(2, (n, 1), generator=torch.Generator().manual_seed(seed))
    return origin + step / 2 + epsilon * (labels.double() - 0.5), labels[:, 0]


def audited(case: str, **options: Any) -> Audit:
    origin, step, sigma, epsilon = CASES[case]
    smoother = Smoother(HalfSpace(origin, step), sigma, progress=False)
    predictor = calibrate(smoother, on_both_sides(case, 600, 1), epsilon=epsilon, draws=16, seed=1)
    across: Callable[..., Tensor] = lambda x, y, radius: x + radius * (1 - 2 * y[:, None].double())  # noqa: E731
    return audit(predictor, on_both_sides(case, 400, 2), **{"attacks": {"across": across}, "seed": 3, **options})


def row(report: Audit, attack: str) -> AuditRow:
    return next(row for row in report.rows if row.attack == attack)


@pytest.mark.filterwarnings("ignore::keepcover.errors.KeepcoverWarning")
@pytest.mark.parametrize("case", CASES)
def test_a_small_change_does_not_become_a_float32_step(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    report = audited(case)
    assert report.images.dtype == torch.float64
    assert all(images.dtype == torch.float64 for images in report.attacked.values())
    for one in report.rows:
        assert one.promised
        assert one.p_value > FALSE_ALARM, one
    monkeypatch.setattr(Stream, "noisy", rounding_first)
    broken = audited(case)
    assert row(broken, "none").coverage["mean"] > 0.9
    assert row(broken, "across").coverage["mean"] < 0.3
    assert row(broken, "across").verdict == "violated"


@pytest.mark.filterwarnings("ignore::keepcover.errors.KeepcoverWarning")
@pytest.mark.parametrize("attack", ["softmax", "margin", "random"])
def test_attacks_move_float64_inputs_by_epsilon(attack: str) -> None:
    """And not by nothing or by a whole step of float32, the only choices it has there."""
    report = audited("Unix times", attacks=[attack], steps=5, draws=8, restarts=2, progress=False)
    moved = (report.attacked["exact", attack, 1.0] - report.images).abs()
    assert 0.5 < float(moved.max()) <= 1
    assert row(report, attack).p_value > FALSE_ALARM


# -- every way in ------------------------------------------------------------------------------------------------------


X = 5.4e6 + torch.tensor(
    [[0.25, 3.1, 0.126], [0.24, -7.0, 9.3], [0.26, 1e-3, 9.0], [-0.26, 0.5, 1.4]], dtype=torch.float64
)
Y = torch.tensor([0, 1, 2, 1])


class First(nn.Module):
    """Logits that are the inputs, less what float16 cannot hold."""

    def forward(self, x: Tensor) -> Tensor:
        return x - 5.4e6


@pytest.mark.filterwarnings("ignore::keepcover.errors.KeepcoverWarning")
@pytest.mark.parametrize("early", [False, True])
def test_calibration_and_prediction_keep_float64(early: bool) -> None:
    recorder = Recorder()
    data = (X.repeat(50, 1), Y.repeat(50))
    smoother = Smoother(recorder, 1.0, progress=False)
    predictor = calibrate(smoother, data, epsilon=0.1, draws=4, calibration_draws=4, seed=1)
    roles = [Stream(1, role).noisy(data[0], torch.arange(200), range(4), 1.0) for role in ("holdout", "calibration")]
    *noisy, last = recorder.seen
    assert predictor.inputs is not None
    assert torch.equal(
        last, probes((3,), predictor.inputs.low, predictor.inputs.high)
    )  # by which a file knows the model
    seen = {tuple(image) for image in torch.cat(noisy).tolist()}
    assert seen <= {tuple(image) for role in roles for image in role.flatten(0, 1).tolist()}
    recorder.seen.clear()
    predictor.predict(X, seed=5, early_exit=early)
    expected = Stream(5, "test").noisy(X, torch.arange(4), range(4), 1.0).flatten(0, 1)
    assert {tuple(image) for image in recorder.inputs.tolist()} <= {tuple(image) for image in expected.tolist()}


def test_stores_and_workers_keep_float64(tmp_path: Path) -> None:
    """The local engine and the cluster's; and inputs that differ by less than float32 can tell are other data."""
    run = Smoother(First(), 1.0, progress=False)
    key = StoreKey.of(run, (X, Y), seed=0)
    store = LogitStore.open(tmp_path / "local", key)
    store.fill(run, (X, Y), 4)
    expected = First()(Stream(0, "test").noisy(X, torch.arange(4), range(4), 1.0))
    assert torch.equal(store.read(range(4), 4, torch.float32), expected.half().float())
    with Filling(LogitStore.open(tmp_path / "cluster", key), 4, False) as work:
        Pool(Ray(lambda *_: False, random.Random(0)), Cluster(), Recipe(key, None, 1), First, 1).run(work, (X, Y))
    assert torch.equal(work.store.read(range(4), 4, torch.float32), expected.half().float())
    assert data_fingerprint((X, Y)) != data_fingerprint((X + 1e-3, Y))
    assert data_fingerprint((X.float(), Y)) != data_fingerprint((X, Y))


def test_files_keep_float64_and_training_takes_it(tmp_path: Path) -> None:
    np.savez(tmp_path / "points.npz", images=X.numpy(), labels=Y.numpy())
    assert torch.equal(load_inputs(str(tmp_path / "points.npz")).images, X)
    images, labels = toy(40)
    np.savez(tmp_path / "images.npz", images=images.double().numpy(), labels=labels.numpy())
    assert load_inputs(str(tmp_path / "images.npz"), labelled=True).images.dtype == torch.float64
    assert load_data(str(tmp_path / "images.npz")).images.dtype == torch.float64
    assert load_parts(str(tmp_path / "images.npz"))[0].images.dtype == torch.float32
    fit_under_noise(nearest(), images.double(), labels, 0.1, epochs=1, progress=False)
    for dtype, wide in ((torch.float16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)):
        assert check_images(images.to(dtype)).dtype == wide
        assert (
            pgd(NoisyModel(nearest(), 0.1, 2, Stream(0, "attack")), images.to(dtype), labels, 0.1, steps=2).dtype
            == wide
        )


def test_json_requests_keep_float64() -> None:
    reader = Reader(make_predictor(), SHAPE, Settings())
    images = torch.rand(2, *SHAPE, dtype=torch.float64)
    read = reader._json(json.dumps({"images": images.tolist()}).encode()).images
    assert read.dtype == torch.float64
    assert torch.equal(read, images)


# -- a model that reads the low bits -----------------------------------------------------------------------------------

SIDE, SIGMA, EPSILON = 4096, 0.25, 0.125
EACH = EPSILON / math.sqrt(SIDE)  # 2^-9


def adding_alone(self: Stream, images: Tensor, ids: Tensor, draws: range, sigma: float) -> Tensor:
    """A mutant: x + noise in float32, as it comes."""
    return images[:, None] + sigma * self.gaussian(ids, draws, tuple(images.shape[1:]))


def reads_low_bits(x: Tensor) -> Tensor:
    """Whether x is 0 or 2^-9 everywhere, under any noise.

    Where x + n is nearly 0, n is nearly -x. If x is 2^-9, n and so the sum are multiples of 2^-33. If x is 0, the sum is n
    itself, a small number, whose last bits are finer. A dozen of the 4096 sums are that near to 0.
    """
    finer = (x.abs() < EACH / 2) & (x * 2.0**33 != (x * 2.0**33).round())
    zero = finer.any(dim=1).float()
    return 20 * torch.stack([zero, 1 - zero], dim=1)


def flat_images(n: int, seed: int) -> tuple[Tensor, Tensor]:
    labels = torch.randint(2, (n,), generator=torch.Generator().manual_seed(seed))
    return EACH * labels.float()[:, None].expand(-1, SIDE).contiguous(), labels


def swapped(images: Tensor, labels: Tensor, radius: float) -> Tensor:
    """The other class's image: as far away as epsilon allows."""
    return EACH - images


@pytest.mark.filterwarnings("ignore::keepcover.errors.KeepcoverWarning")
def test_low_bits_tell_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> Audit:
        smoother = Smoother(reads_low_bits, SIGMA, progress=False)
        predictor = calibrate(smoother, flat_images(150, 1), epsilon=EPSILON, draws=8, seed=1)
        return audit(predictor, flat_images(100, 2), attacks={"swapped": swapped}, seed=3)

    for one in found().rows:
        assert one.promised
        assert one.p_value > FALSE_ALARM, one
    monkeypatch.setattr(Stream, "noisy", adding_alone)
    broken = found()
    assert row(broken, "none").coverage["mean"] > 0.9
    assert row(broken, "swapped").coverage["mean"] == 0.0
    assert row(broken, "swapped").verdict == "violated"


def cell_probability(i: int, j: int) -> float:
    """Exact probability that a pair of numbers is rounded to the point (i, j) of the lattice at sigma = 1, x = 0.

    All words of the radius and the angle that can reach the cell are tried; words that give the same number are counted.
    """
    step = lattice(1.0)
    x, y = (np.array([k - 0.5, k + 0.5]) * step for k in (i, j))
    corners = [complex(a, b) for a in x for b in y]
    radii = [abs(corner) for corner in corners]
    near, far = min(radii) - 2e-6, max(radii) + 2e-6  # no cell of these tests touches an axis
    first = torch.arange(int(math.exp(-(far**2) / 2) * 2**32), int(math.exp(-(near**2) / 2) * 2**32) + 1)
    turns = [np.angle(corner) % (2 * math.pi) / (2 * math.pi) for corner in corners]
    second = torch.arange(int((min(turns) - 1e-6) * 2**32), int((max(turns) + 1e-6) * 2**32))
    radius, radius_words = squared_radius(first, torch.full_like(first, 128)).sqrt().unique(return_counts=True)
    turn, turn_words = angle(second).unique(return_counts=True)
    cos, sin, total = turn.cos(), turn.sin(), 0
    for part, words in zip(radius.split(512), radius_words.split(512), strict=True):
        inside = (to_lattice_(part[:, None] * cos, 1.0) == i * step) & (
            to_lattice_(part[:, None] * sin, 1.0) == j * step
        )
        total += int((inside.double() @ turn_words.double()).round().long() @ words)
    return total / 2.0**64


@pytest.mark.parametrize(("i", "j"), [(3100, 2400), (-901, 3377), (-4001, -58)])
def test_points_of_the_lattice_have_their_gaussian_probability(i: int, j: int) -> None:
    """To one part in 20,000. With halves rounded to even these three would be off by 1 in 5,000 to 1 in 2,000."""
    cells = [np.diff(stats.norm.cdf((np.array([k - 0.5, k + 0.5])) * lattice(1.0)))[0] for k in (i, j)]
    assert cell_probability(i, j) / (cells[0] * cells[1]) == pytest.approx(1, abs=5e-5)


# -- and nothing else changes ------------------------------------------------------------------------------------------


def test_sets_and_accuracy_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against noise as it comes: a thousandth of sigma turns few sets and fewer answers."""

    def found() -> tuple[Tensor, Tensor]:
        smoother = Smoother(nearest(), 0.15, progress=False)
        predictor = calibrate(smoother, toy(400, seed=1), epsilon=0.1, draws=16, seed=1)
        logits = smoother.logits(toy(500, seed=2)[0], 16, Stream(7, "test"))
        return predictor.predict(toy(500, seed=2)[0], seed=7).mask, logits

    mask, logits = found()
    monkeypatch.setattr(Stream, "noisy", adding_alone)
    plain_mask, plain_logits = found()
    assert 0 < float((logits - plain_logits).abs().max()) < 0.01
    assert float((logits.argmax(2) != plain_logits.argmax(2)).double().mean()) < 1e-3
    assert int((mask != plain_mask).any(dim=1).sum()) <= 2
