"""Every noise and norm through the whole library: train, calibrate, predict, save, load, attack, evaluate; and tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import keepcover
from keepcover import (
    Ablation,
    Bands,
    Gaussian,
    InputError,
    Laplace,
    Noise,
    Predictor,
    RandomBands,
    Smoother,
    Stream,
    Uniform,
    calibrate,
    calibrate_outputs,
)
from keepcover.attacks import NoisyModel, mean_softmax, pgd
from keepcover.evaluation.plan import make_plan
from keepcover.models import Filled, SmallCNN, is_named, masked, network
from keepcover.noise import get_norm
from keepcover.training import fit_under_noise

pytestmark = pytest.mark.filterwarnings("ignore::keepcover.errors.KeepcoverWarning")
SHAPE = (1, 6, 8)


def images(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """The label is the quarter that is brighter, by a little."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (n,), generator=generator)
    quarter = torch.zeros(4, *SHAPE)
    for k in range(4):
        quarter[k, :, 3 * (k // 2) : 3 * (k // 2) + 3, 4 * (k % 2) : 4 * (k % 2) + 4] = 0.3
    return 0.7 * torch.rand(n, *SHAPE, generator=generator) + quarter[labels], labels


TRAIN, CAL, TEST = images(400, 1), images(400, 2), images(120, 3)

THREATS: dict[str, tuple[Noise, str, list[float]]] = {
    "linf": (Gaussian(0.2), "linf", [1 / 255, 3 / 255]),
    "l1, laplace": (Laplace(0.2), "l1", [0.1, 0.2]),
    "l1, uniform": (Uniform(0.4), "l1", [0.05, 0.2]),
    "l0": (Ablation(20), "l0", [1, 2]),
    "patch, ablation": (Ablation(20), "patch", [1]),
    "patch, bands": (Bands(3), "patch", [1, 2]),
    "patch, random bands": (RandomBands(3), "patch", [1, 2]),
}


@cache
def trained(noise: Noise) -> nn.Module:
    torch.manual_seed(0)
    model = SmallCNN(classes=4, width=8)
    model = masked(model) if noise.hides else model
    return fit_under_noise(model, *TRAIN, noise=noise, epochs=4, lr=1e-2, progress=False)


@cache
def calibrated(threat: str) -> Predictor:
    noise, norm, epsilon = THREATS[threat]
    draws = {} if noise.deterministic else {"draws": 8, "calibration_draws": 16}
    return calibrate(trained(noise), CAL, epsilon=epsilon, noise=noise, norm=norm, alpha=0.2, seed=1, **draws)


@pytest.mark.parametrize("threat", THREATS)
def test_every_threat_goes_through_the_whole_library(threat: str, tmp_path: Path) -> None:
    noise, norm, epsilon = THREATS[threat]
    predictor = calibrated(threat)
    sets = predictor.predict(TEST[0], seed=4)
    assert sets.measure(TEST[1]).coverage.high > 0.8
    assert sets.measure(TEST[1]).size < 3.5
    predictor.save(tmp_path / "one.safetensors")
    loaded = keepcover.load(tmp_path / "one.safetensors", trained(noise))
    assert str(loaded.guarantee) == str(predictor.guarantee)
    assert loaded.predict(TEST[0], seed=4).rows() == sets.rows()
    threats = [loaded.at(0.2, one).guarantee.threat for one in epsilon]
    assert [(one.norm, one.epsilon) for one in threats] == [(norm, one) for one in epsilon]
    assert get_norm(norm).deed(epsilon[0], threats[0].shape) in str(predictor.guarantee)
    wide = [predictor.predict(TEST[0], epsilon=one, nested=True, seed=4) for one in epsilon]
    assert all((a.size <= b.size).all() for a, b in pairwise(wide))
    some = (TEST[0][:40], TEST[1][:40])
    options: dict[str, Any] = {"steps": 4, "draws": 8, "seed": 6, "progress": False, "clip": (0.0, 1.0)}
    report = keepcover.audit(predictor, some, attacks=["softmax", "margin", "random"], **options)
    assert [row.verdict for row in report.rows] == ["consistent"] * 4
    for key, moved in report.attacked.items():
        length = get_norm(norm).length(moved.double() - some[0].double())
        assert float(length.max()) <= key[2] * (1 + 1e-6)
        assert key[1] == "none" or bool((length > 0).any())


@pytest.mark.parametrize("threat", ["l0", "patch, bands"])
def test_outputs_give_the_rows_of_evaluate(threat: str) -> None:
    noise, norm, epsilon = THREATS[threat]
    count = noise.positions(SHAPE) if noise.deterministic else 16
    outputs = Smoother(trained(noise), noise, progress=False).logits(CAL[0], count, Stream(3, "test"))
    ask: dict[str, Any] = {"epsilon": epsilon[0], "noise": noise, "norm": norm, "shape": SHAPE, "alpha": 0.2}
    rows = keepcover.evaluate(outputs, CAL[1], splits=4, holdout=80, **ask)
    names = {row.method for row in rows}
    assert ("bands" in names) == noise.deterministic
    assert ("exact" in names) == (not noise.deterministic)
    for row in rows:
        assert row.guarantee.threat.norm == norm
        assert row.to_dict()["norm"] == norm
        if row.guarantee.certified:
            assert row.coverage.mean > 0.75
    made = calibrate_outputs(outputs, CAL[1], seed=1, **ask)
    assert made.guarantee.threat.shape == SHAPE
    with_model = made.with_model(trained(noise))
    assert len(with_model.predict(TEST[0])) == len(TEST[0])
    with pytest.raises(InputError, match=r"calibrated on inputs \[n, 1, 6, 8\], got \[5, 1, 6, 7\]"):
        with_model.predict(TEST[0][:5, ..., :7])
    del ask["shape"]
    with pytest.raises(InputError, match="give shape="):
        calibrate_outputs(outputs, CAL[1], **ask)


# -- nothing random ----------------------------------------------------------------------------------------------------


def test_all_bands_are_evaluated_and_the_answer_is_the_same() -> None:
    predictor = calibrated("patch, bands")
    assert (predictor.draws, predictor.rule.method.name) == (8, "bands")
    assert predictor.predict(TEST[0]).rows() == predictor.predict(TEST[0]).rows()
    assert "8 bands per query" in str(predictor.guarantee)
    assert not any("secret" in line and "nothing is secret" not in line for line in predictor.guarantee.assumptions)
    noise, norm, _ = THREATS["patch, bands"]
    for wrong in ({"draws": 5}, {"calibration_draws": 64}):
        with pytest.raises(InputError, match="are 8 evaluations, no more and no less; leave draws out"):
            calibrate(trained(noise), CAL, epsilon=1, noise=noise, **wrong)
    loader = DataLoader(TensorDataset(*CAL), batch_size=50)
    with pytest.raises(InputError, match="as many as an image has columns"):
        calibrate(trained(noise), loader, epsilon=1, noise=noise, holdout=images(50, 9))
    with pytest.raises(InputError, match="early exit needs a rule that counts draws"):
        predictor.predict(TEST[0], early_exit=True)
    with pytest.raises(InputError, match="exact is about random draws"):
        calibrate(trained(noise), CAL, epsilon=1, noise=noise, norm=norm, method="exact")


def test_early_exit_under_ablation_gives_the_sets_of_full_drawing() -> None:
    predictor = calibrated("l0")
    full, early = (predictor.predict(TEST[0], seed=5, early_exit=early) for early in (False, True))
    assert full.rows() == early.rows()
    assert early.draws_used is not None
    assert float(early.draws_used.double().mean()) < 8


def test_plans_know_the_threat() -> None:
    def sizes(*threat: Any, **options: Any) -> dict[str, Any]:
        return {plan.method: plan for plan in make_plan(0.1, *threat, **options)}

    ablated = sizes(3, Ablation(75), 16, norm="l0", shape=(3, 32, 32))
    assert ablated["exact"].level is not None
    assert ablated["exact"].level > 0.05
    assert ablated["rcp1"].level == 0  # one draw shows a changed pixel with probability 0.2
    (only,) = make_plan(0.1, 5, Bands(4), 1, shape=(3, 32, 32))
    assert (only.method, only.draws, only.calibration_draws) == ("bands", 32, 32)


# -- what is absent ----------------------------------------------------------------------------------------------------


def test_a_model_that_does_not_expect_it_fails_at_once() -> None:
    with pytest.raises(InputError, match="NaN or infinite logits under noise"):
        calibrate(SmallCNN(classes=4, width=8), CAL, epsilon=1, noise=Ablation(20))


def test_masked_networks_read_complete_images_as_before() -> None:
    torch.manual_seed(0)
    plain = network("cifar-resnet20", 10).eval()
    whole = torch.rand(3, 3, 32, 32)
    before = plain(whole)
    torch.testing.assert_close(masked(plain)(whole), before)
    assert is_named("masked:wrn-10-1")
    assert is_named("mirrored:masked:wrn-10-1")
    hidden = torch.where(torch.rand(3, 1, 32, 32) < 0.5, whole, torch.nan)
    named = network("mirrored:masked:wrn-10-1", 10).eval()
    assert named(hidden).isfinite().all()
    black = hidden.nan_to_num(nan=0.0)
    with torch.no_grad():
        named.get_submodule("model.conv1").weight[:, -1] = 1.0
    assert not torch.allclose(named(hidden), named(black))  # absent is not black
    with pytest.raises(InputError, match=r"expected a network with its Normalize as model.normalize"):
        masked(nn.Linear(2, 2))


def test_networks_of_bands_read_the_band_alone() -> None:
    torch.manual_seed(0)
    named, image = network("band4:wrn-10-1", 10).eval(), torch.rand(1, 3, 32, 32)
    with torch.no_grad():
        named.get_submodule("conv1").weight[:, -1].normal_(std=0.1)
    bands = Bands(4).noisy(image, Stream(0, "test"), torch.tensor([0]), range(32))[0]
    read = named.get_submodule("normalize")
    for first, band in enumerate(bands):
        columns = [(first + k) % 32 for k in range(4)]
        expected = torch.cat([image[0][..., columns], torch.tensor(columns).expand(1, 32, 4) / 31 * 2 - 1])
        mean, std = (
            torch.cat([value, torch.tensor([[[extra]]])]) for value, extra in ((read.mean, 0.0), (read.std, 1.0))
        )
        torch.testing.assert_close(read(band[None])[0], (expected - mean) / std)
    alike = Bands(4).noisy(torch.full_like(image, 0.5), Stream(0, "test"), torch.tensor([0]), range(32))[0]
    assert not torch.allclose(named(alike)[0], named(alike)[16])  # places differ
    assert is_named("mirrored:band4:wrn-10-1")
    assert not is_named("band:wrn-10-1")
    assert not is_named("small-masked:cnn")
    with pytest.raises(InputError, match="at least 4 columns"):
        named(torch.rand(1, 3, 32, 3))


def test_gradients_pass_what_is_present_and_nothing_else() -> None:
    x = TEST[0][:3].clone().requires_grad_()
    model = NoisyModel(trained(Ablation(20)), Ablation(20), 1, Stream(2, "attack"))
    model.outputs(x, torch.arange(3)).square().sum().backward()
    shown = ~Ablation(20).noisy(x.detach(), Stream(2, "attack"), torch.arange(3), range(1))[:, 0].isnan()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert not x.grad[~shown].any()
    assert x.grad[shown].any()


# -- attacks reach what they can ---------------------------------------------------------------------------------------


class Linear(nn.Module):
    """Class 1 if the weighted sum of pixels is positive."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        total = (x * self.weight).flatten(1).sum(dim=1)
        return torch.stack([-total, total], dim=1)


@pytest.mark.parametrize(("name", "radius"), [("l1", 0.5), ("linf", 0.03), ("l0", 3), ("patch", 2)])
@pytest.mark.parametrize("clip", [None, (0.0, 1.0)])
def test_on_a_linear_model_attacks_reach_the_worst_case(
    name: str, radius: float, clip: tuple[float, float] | None
) -> None:
    """By hand: L1 on the heaviest pixels, Linf on all, L0 on those that can move most, patches on the best of all places."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(2, 5, 6, generator=generator)
    x = torch.rand(12, 2, 5, 6, generator=generator)
    model, y = NoisyModel(Linear(weight), 0.0, 1, Stream(0, "attack")), torch.zeros(12, dtype=torch.int64)
    found = pgd(model, x, y, radius, norm=name, clip=clip, steps=60)
    gained = ((found - x) * weight).flatten(1).sum(dim=1)
    room = torch.where(weight > 0, 1 - x, x)  # inside the pixel range
    if name == "linf":
        best = (weight.abs() * room.clamp_max(radius)).flatten(1).sum(dim=1) if clip else radius * weight.abs().sum()
    elif name == "l1" and clip is None:
        best = radius * weight.abs().max()
    elif name == "l1":
        order = weight.abs().flatten().argsort(descending=True)
        sorted_room = room.flatten(1)[:, order]
        used = (radius - sorted_room.cumsum(dim=1) + sorted_room).clamp_min(0).minimum(sorted_room)
        best = (used * weight.abs().flatten()[order]).sum(dim=1)
    else:
        reach = 4.0 / 60 * 60 * torch.ones_like(room) if clip is None else room
        pixel = (weight.abs() * reach).sum(dim=1)
        if name == "l0":
            best = pixel.flatten(1).topk(3, dim=1).values.sum(dim=1)
        else:
            best = 4 * nn.functional.avg_pool2d(pixel[:, None], 2, stride=1).flatten(1).amax(dim=1)
    assert (gained >= (0.75 if clip is None and name in ("l0", "patch") else 0.93) * best).all()
    assert (gained <= best * (1 + 1e-4)).all()


def test_searching_by_queries_finds_something_in_every_norm() -> None:
    weight = torch.randn(1, 5, 6, generator=torch.Generator().manual_seed(0))
    model, y = NoisyModel(Linear(weight), 0.0, 1, Stream(0, "attack")), torch.zeros(9, dtype=torch.int64)
    x = torch.rand(9, 1, 5, 6, generator=torch.Generator().manual_seed(1))
    for name, radius in (("l1", 1.0), ("linf", 0.1), ("l0", 2), ("patch", 2)):
        found = pgd(model, x, y, radius, norm=name, gradients=False, steps=40)
        ids = torch.arange(9)
        before, after = (mean_softmax(model.outputs(one, ids), y, ids) for one in (x, found))
        assert (after > before + 0.01).all()
        assert float(get_norm(name).length(found.double() - x.double()).max()) <= radius * (1 + 1e-6)


def test_attacks_on_features_with_units_change_no_more_than_they_may() -> None:
    """Back in the units of the data, what did not move is the same number: rounding would be a change of every feature."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(200, 6, generator=generator, dtype=torch.float64) * torch.tensor(
        [1e-3, 0.1, 1.0, 3.0, 7.0, 1e4]
    )
    labels = (features[:, 2] > 0).long()
    weight = torch.zeros(2, 6).index_fill_(1, torch.tensor([2]), 1.0) * torch.tensor([[-1.0], [1.0]])
    linear = nn.Linear(6, 2, bias=False)
    linear.weight = nn.Parameter(weight)
    predictor = calibrate(
        Filled(linear, 0.0), (features, labels), epsilon=1, noise=Ablation(3), alpha=0.2, input_scale="std", seed=1
    )
    report = keepcover.audit(
        predictor, (features[:40], labels[:40]), attacks=["margin"], steps=8, seed=2, progress=False
    )
    moved = report.attacked[report.rows[1].name, "margin", 1.0]
    assert int((moved != features[:40]).sum(dim=1).max()) == 1


# -- tokens ------------------------------------------------------------------------------------------------------------

LENGTH, WORDS = 12, 30


class Reader(nn.Module):
    """A small embedding model: the mean of what is present."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS + 1, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        present = (tokens != WORDS).unsqueeze(-1)
        return self.head((self.embedding(tokens) * present).sum(dim=1) / present.sum(dim=1).clamp_min(1))


def texts(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Each class has words of its own, which make up half of a text."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (n,), generator=generator)
    own = 10 * labels[:, None] + torch.randint(10, (n, LENGTH), generator=generator)
    other = torch.randint(WORDS, (n, LENGTH), generator=generator)
    return torch.where(torch.rand(n, LENGTH, generator=generator) < 0.5, own, other), labels


@cache
def reading() -> nn.Module:
    torch.manual_seed(0)
    model = Filled(Reader(), WORDS)
    return fit_under_noise(model, *texts(600, 1), noise=Ablation(4), epochs=20, lr=2e-2, progress=False)


@cache
def text_predictor() -> Predictor:
    return calibrate(reading(), texts(500, 2), epsilon=[1, 2], noise="ablation:4", alpha=0.2, draws=8, seed=1)


def test_tokens_pass_unchanged(tmp_path: Path) -> None:
    seen: list[Tensor] = []

    class Recording(Filled):
        def forward(self, inputs: Tensor) -> Tensor:
            seen.append(inputs)
            return super().forward(inputs)

    tokens, labels = texts(60, 3)
    model = Recording(Reader(), WORDS)
    smoother = Smoother(model, Ablation(4), progress=False)
    smoother.logits(tokens, 3, Stream(1, "test"))
    noisy = torch.cat(seen).view(60, 3, LENGTH)
    assert noisy.dtype == torch.int64
    assert torch.equal(torch.where(noisy == -1, tokens[:, None], noisy), tokens[:, None].expand_as(noisy))
    predictor = text_predictor()
    sets = predictor.predict(tokens, seed=2)
    assert predictor.predict(tokens.to(torch.int32).numpy(), seed=2).rows() == sets.rows()
    assert sets.measure(labels).size < 2.5
    assert "has changed up to 1 of its 12 entries at will" in str(predictor.guarantee)
    predictor.save(tmp_path / "reader.safetensors")
    loaded = keepcover.load(tmp_path / "reader.safetensors", reading())
    assert loaded.inputs == predictor.inputs
    assert loaded.inputs is not None
    assert loaded.inputs.tokens
    assert loaded.predict(tokens, seed=2).rows() == sets.rows()
    with pytest.raises(InputError, match="the model differs"):
        keepcover.load(tmp_path / "reader.safetensors", Filled(Reader(), WORDS))


def test_tokens_in_files_and_stores(tmp_path: Path) -> None:
    from keepcover.specs import load_data, load_inputs
    from keepcover.store import LogitStore, StoreKey

    tokens, labels = texts(50, 4)
    np.savez(tmp_path / "texts.npz", images=tokens.numpy(), labels=labels.numpy())
    assert torch.equal(load_inputs(str(tmp_path / "texts.npz")).images, tokens)
    assert torch.equal(load_data(str(tmp_path / "texts.npz")).images, tokens)
    smoother = Smoother(reading(), Ablation(4), progress=False)
    store = LogitStore.open(tmp_path / "store", StoreKey.of(smoother, (tokens, labels), seed=0))
    store.fill(smoother, (tokens, labels), 4)
    expected = smoother.logits(tokens, 4, Stream(0, "test"))
    torch.testing.assert_close(store.read(range(50), 4, torch.float32), expected.half().float())


def test_texts_of_another_length_are_refused() -> None:
    """The certificate counts positions: shorter texts are easier to attack."""
    predictor = text_predictor()
    with pytest.raises(InputError, match=r"calibrated on inputs \[n, 12\], got \[3, 9\]"):
        predictor.predict(texts(3, 5)[0][:, :9])
    with pytest.raises(InputError, match=r"calibrated on tokens \(integers\), got torch.float32"):
        predictor.predict(texts(3, 5)[0].float())
    mixed = [(texts(20, 6)[0], texts(20, 6)[1]), (texts(20, 7)[0][:, :10], texts(20, 7)[1])]
    with pytest.raises(InputError, match="depends on the shape of an input, and several came"):
        calibrate(reading(), mixed, epsilon=1, noise=Ablation(4), holdout=texts(30, 8), draws=4)
    with pytest.raises(InputError, match="tokens can be hidden"):
        calibrate(reading(), texts(100, 2), epsilon=0.1, sigma=0.1)
    forged = replace(predictor.rule.asked.threat, shape=(60,))
    assert float(forged.up(0.0)) < float(predictor.rule.asked.threat.up(0.0))


def test_words_are_exchanged_by_random_search_alone() -> None:
    predictor, (tokens, labels) = text_predictor(), texts(40, 9)
    report = keepcover.audit(predictor, (tokens, labels), attacks=["random"], steps=20, draws=8, seed=3, progress=False)
    assert [row.verdict for row in report.rows] == ["consistent"] * 2
    moved = report.attacked[report.rows[1].name, "random", 1.0]
    assert moved.dtype == tokens.dtype
    assert int((moved != tokens).sum(dim=1).max()) == 1
    with pytest.raises(InputError, match="tokens have no gradients"):
        keepcover.audit(predictor, (tokens, labels), attacks=["margin"], progress=False)
