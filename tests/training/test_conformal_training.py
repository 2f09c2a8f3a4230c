"""Conformal training: the optimiser is SGD, the bank is the backbone, only what should change changes, runs go on."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from keepcover.data import Labelled, digits
from keepcover.engine.fingerprint import fingerprint
from keepcover.errors import InputError
from keepcover.models import SmallCNN, backbone, find_weights, last_linear, load_head, load_weights
from keepcover.models.checkpoints import check_head_is_last, head_bytes
from keepcover.noise import Gaussian, Threat
from keepcover.training import fit_under_noise
from keepcover.training.bank import FeatureBank
from keepcover.training.conformal import RCT, ConfTr, ExactRCT
from keepcover.training.heads import (
    PRESETS,
    ConformalRequest,
    HeadRecipe,
    matched_rule,
    train_conformal,
    train_for_sets,
)
from keepcover.training.loop import Checkpoint
from keepcover.training.optimise import AdamW, Sgd, epoch_key
from keepcover.training.recipe import Recipe
from keepcover.training.views import Views

QUICK = HeadRecipe(0.25, epochs=3, batch_size=100, pad=0, flip=False)


@pytest.fixture(scope="module")
def data() -> Labelled:
    return digits().split(600, seed=0)[0]


@pytest.fixture(scope="module")
def model(data: Labelled) -> SmallCNN:
    torch.manual_seed(0)
    network = SmallCNN()
    fit_under_noise(network, *data.pair, sigma=0.25, epochs=8, progress=False)
    return network


@pytest.fixture(scope="module")
def bank(model: SmallCNN, data: Labelled) -> FeatureBank:
    return FeatureBank.build(model, data, QUICK, views=2, progress=False)


def changed(before: nn.Module, after: nn.Module) -> set[str]:
    theirs = after.state_dict()
    return {name for name, value in before.state_dict().items() if not torch.equal(value, theirs[name])}


# -- the optimiser -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nesterov", [False, True, None])
def test_optimisers_are_torchs(nesterov: bool | None) -> None:
    """Ten steps at changing rates, with momentum and weight decay: the same parameters. None is AdamW."""
    generator = torch.Generator().manual_seed(0)
    ours = [torch.randn(3, 4, generator=generator), torch.randn(4, generator=generator)]
    theirs = [nn.Parameter(value.clone()) for value in ours]
    if nesterov is None:
        mine, reference = AdamW(ours, weight_decay=0.01), torch.optim.AdamW(theirs, lr=1.0, weight_decay=0.01)
    else:
        mine = Sgd(ours, momentum=0.9, weight_decay=0.01, nesterov=nesterov)
        reference = torch.optim.SGD(theirs, lr=1.0, momentum=0.9, weight_decay=0.01, nesterov=nesterov)
    for step in range(10):
        gradients = [torch.randn(value.shape, generator=generator) for value in ours]
        mine.lr.fill_(0.1 / (step + 1))
        mine.step(gradients)
        reference.param_groups[0]["lr"] = 0.1 / (step + 1)
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient
        reference.step()
    for value, other in zip(ours, theirs, strict=True):
        assert torch.allclose(value, other.detach(), rtol=1e-5, atol=1e-6)


def test_epochs_have_their_own_seeds() -> None:
    keys = {epoch_key(seed, epoch) for seed in range(20) for epoch in range(20)}
    assert len(keys) == 400


# -- head and backbone -------------------------------------------------------------------------------------------------


def test_the_backbone_and_the_head_are_the_model(model: SmallCNN, data: Labelled) -> None:
    images = data.images[:5]
    _, head = last_linear(model)
    with torch.no_grad():
        assert torch.equal(head(backbone(model)(images)), model(images))
    assert isinstance(model.head, nn.Linear)  # the model itself was not touched


class Tempered(SmallCNN):
    """Does something after its last layer."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images) / 2


def test_a_model_that_goes_on_after_its_head_is_refused(data: Labelled) -> None:
    model = Tempered()
    with pytest.raises(InputError, match="after its last linear layer"):
        check_head_is_last(model, data.images[:2])
    with pytest.raises(InputError, match="no linear layer"):
        last_linear(nn.Flatten())
    with pytest.raises(InputError, match="no backbone"):
        backbone(nn.Linear(2, 2))


def test_a_head_comes_back_and_only_over_its_own_backbone(model: SmallCNN, tmp_path: Path) -> None:
    path = tmp_path / "head.safetensors"
    path.write_bytes(head_bytes(model))
    other = SmallCNN()
    with pytest.raises(InputError, match="another backbone"):
        load_head(other, path)
    other.load_state_dict(model.state_dict())
    last_linear(other)[1].reset_parameters()
    load_head(other, path)
    assert torch.equal(other.head.weight, model.head.weight.half().float())
    with pytest.raises(InputError, match=r"expected bias \(7,\), weight \(7, 128\), got bias \(10,\)"):
        load_head(SmallCNN(classes=7), path)
    with pytest.raises(InputError, match="no head at"):
        load_head(other, tmp_path / "none.safetensors")
    altered = bytearray(path.read_bytes())
    altered[-1] ^= 0x40  # the exponent of the last weight
    for damaged, why in ((bytes(altered), "does not match its checksum"), (b"nonsense", "not a safetensors file")):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=f"not a readable head .*{why}"):
            load_head(other, path)


# -- the bank ----------------------------------------------------------------------------------------------------------


def test_the_bank_holds_the_backbones_features(data: Labelled, model: SmallCNN) -> None:
    """Without noise and crops every view and copy is the feature vector itself, to half precision."""
    few = data[:20]
    bank = FeatureBank.build(model, few, Recipe(0.0, copies=2, pad=0, flip=False), views=2, progress=False)
    with torch.no_grad():
        features = backbone(model)((few.images * 255).round() / 255)
    assert bank.features.shape == (20, 2, 2, 128)
    for view in range(2):
        for copy in range(2):
            assert torch.allclose(bank.features[:, view, copy].float(), features, atol=2e-3)


def test_copies_of_a_view_share_its_crop_and_nothing_else(data: Labelled, model: SmallCNN) -> None:
    """Without noise the copies of a view agree and views differ; with noise copies differ."""

    def features(sigma: float, seed: int = 0) -> Tensor:
        recipe = Recipe(sigma, copies=2, pad=2, seed=seed)
        return FeatureBank.build(model, data[:50], recipe, views=3, progress=False).features

    clean, noisy = features(0.0), features(0.25)
    assert torch.equal(clean[:, :, 0], clean[:, :, 1])
    assert not torch.equal(clean[:, 0], clean[:, 1])
    assert not torch.equal(noisy[:, :, 0], noisy[:, :, 1])
    assert torch.equal(noisy, features(0.25))
    assert not torch.equal(noisy, features(0.25, seed=1))


def test_a_pick_takes_copies_of_one_view() -> None:
    """Features that spell out (image, view, copy): every row keeps its image, one view, distinct copies."""
    n, views, copies = 6, 3, 4
    spelled = torch.stack(
        torch.meshgrid(torch.arange(n), torch.arange(views), torch.arange(copies), indexing="ij"), dim=-1
    )
    bank = FeatureBank(spelled.half(), torch.zeros(n, dtype=torch.int64), 0.0)
    torch.manual_seed(0)
    seen = set()
    for _ in range(50):
        index = torch.randperm(n)[:4]
        picked = bank.pick(index, 2).long()
        assert torch.equal(picked[:, :, 0], index[:, None].expand(4, 2))
        assert (picked[:, 0, 1] == picked[:, 1, 1]).all()
        assert (picked[:, 0, 2] != picked[:, 1, 2]).all()
        seen |= {tuple(row) for row in picked.flatten(0, 1).tolist()}
    assert len(seen) == n * views * copies
    assert sorted(bank.pick(torch.tensor([1]), 4)[0, :, 2].tolist()) == [0, 1, 2, 3]
    with pytest.raises(InputError, match="holds 4 noisy copies"):
        bank.pick(torch.tensor([0]), 5)


def test_an_empty_bank_is_refused(data: Labelled, model: SmallCNN) -> None:
    for views, images in ((0, data), (1, data[:0])):
        with pytest.raises(InputError, match=rf"at least 1 view of at least 1 image, got {views} of {len(images)}"):
            FeatureBank.build(model, images, Recipe(0.25), views=views, progress=False)


# -- training ----------------------------------------------------------------------------------------------------------


def test_only_the_head_is_trained_and_sets_shrink(model: SmallCNN, bank: FeatureBank) -> None:
    log: list[dict[str, float]] = []
    recipe = replace(QUICK, epochs=40, batch_size=200, lr=0.01, seed=1)
    trained = train_for_sets(model, bank, RCT(r=0.5), recipe, log=log.append, progress=False)
    assert changed(model, trained) == {"head.weight", "head.bias"}
    assert log[-1]["hard_size"] < log[0]["hard_size"] - 1
    assert [entry["epoch"] for entry in log] == list(range(1, 41))


def test_the_seed_decides_and_the_global_generator_is_left_alone(model: SmallCNN, bank: FeatureBank) -> None:
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    one = train_for_sets(model, bank, RCT(), QUICK, progress=False)
    assert torch.equal(torch.rand(3), wanted)
    same = train_for_sets(model, bank, RCT(), QUICK, progress=False)
    other = train_for_sets(model, bank, RCT(), replace(QUICK, seed=1), progress=False)
    assert changed(one, same) == set()
    assert changed(one, other) == {"head.weight", "head.bias"}


def test_whole_networks_train_and_frozen_ones_do_not(model: SmallCNN, data: Labelled) -> None:
    views = Views.of(data, QUICK, "cpu")
    whole = train_for_sets(model, views, RCT(), QUICK, whole=True, progress=False)
    constants = {"normalize.mean", "normalize.std"}
    assert changed(model, whole) == set(model.state_dict()) - constants
    last = train_for_sets(model, views, RCT(), QUICK, progress=False)
    assert changed(model, last) == {"head.weight", "head.bias"}


def test_batch_norm_stays_as_it_was(data: Labelled) -> None:
    """Statistics of the frozen backbone do not move, even when all its weights are trained."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
    trained = train_for_sets(net, Views.of(data, QUICK, "cpu"), RCT(), QUICK, whole=True, progress=False)
    names = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert not changed(net, trained) & names
    assert "1.weight" in changed(net, trained)


def test_a_bank_agrees_with_fresh_noise(model: SmallCNN, data: Labelled) -> None:
    """Final soft sizes of banked and fresh training differ by less than training seeds do."""
    recipe = replace(QUICK, epochs=30, batch_size=150, lr=0.01, reset=False)
    big = FeatureBank.build(model, data, replace(recipe, copies=32), views=1, progress=False)
    held = FeatureBank.build(model, data, replace(recipe, seed=9), views=1, progress=False)
    fresh = Views.of(data, recipe, "cpu")

    def size(source: Any, validation: Any, seed: int = 0) -> float:
        log: list[dict[str, float]] = []
        options: dict[str, Any] = {"validation": validation, "log": log.append, "progress": False}
        train_for_sets(model, source, RCT(), replace(recipe, seed=seed), **options)
        return sum(entry["soft_size"] for entry in log[-5:]) / 5

    banked = [size(big, held, seed) for seed in range(3)]
    assert min(banked) - 0.15 < size(fresh, fresh) < max(banked) + 0.15


def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    model: SmallCNN, bank: FeatureBank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = replace(QUICK, epochs=6)
    wanted = train_for_sets(model, bank, RCT(), recipe, progress=False)
    clock = iter(range(0, 10**6, 11))  # every epoch finds the checkpoint old
    monkeypatch.setattr("keepcover.training.loop.time.monotonic", lambda: float(next(clock)))
    save, path = Checkpoint.save, tmp_path / "head.checkpoint.safetensors"

    def save_and_die(self: Checkpoint, where: Path, facts: dict[str, Any]) -> None:
        save(self, where, facts)
        if self.epoch == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoint, "save", save_and_die)
    with pytest.raises(KeyboardInterrupt):
        train_for_sets(model, bank, RCT(), recipe, checkpoint=path, progress=False)
    monkeypatch.setattr(Checkpoint, "save", save)
    seen: list[dict[str, float]] = []
    resumed = train_for_sets(model, bank, RCT(), recipe, checkpoint=path, log=seen.append, progress=False)
    assert [entry["epoch"] for entry in seen] == [5, 6]
    assert changed(wanted, resumed) == set()
    assert not path.exists()


def test_a_checkpoint_of_another_run_is_refused(model: SmallCNN, bank: FeatureBank, tmp_path: Path) -> None:
    path = tmp_path / "head.checkpoint.safetensors"
    _, head = last_linear(model)
    state = {f"parameter.{i}": value for i, value in enumerate(head.parameters())}
    Checkpoint(state, 1, 2, 0.0).save(path, {**asdict(QUICK), "loss": "RCT", **asdict(RCT())})
    with pytest.raises(InputError, match="another recipe"):
        train_for_sets(model, bank, RCT(r=0.25), QUICK, checkpoint=path, progress=False)
    with pytest.raises(InputError, match="another architecture"):
        train_for_sets(model, bank, RCT(), QUICK, checkpoint=path, progress=False)


def test_divergence_is_said(model: SmallCNN, bank: FeatureBank) -> None:
    with pytest.raises(InputError, match="diverged"):
        train_for_sets(model, bank, ConfTr(log=False), replace(QUICK, lr=1e30, epochs=8), progress=False)


def test_presets_are_the_papers() -> None:
    """Appendix C: batch, rate, temperature, lambda, free size."""
    ten, hundred = PRESETS["cifar10"], PRESETS["cifar100"]
    assert (ten.recipe.batch_size, ten.recipe.lr) == (500, 0.05)
    assert (ten.temperature, ten.size_weight, ten.free_size) == (0.1, 1.0, 1.0)
    assert (hundred.recipe.batch_size, hundred.recipe.lr) == (100, 0.005)
    assert (hundred.temperature, hundred.size_weight, hundred.free_size) == (1.0, 0.01, 1.0)
    assert ten.recipe == replace(hundred.recipe, batch_size=500, lr=0.05)
    assert (ten.recipe.epochs, ten.recipe.momentum, ten.recipe.weight_decay, ten.recipe.copies) == (150, 0.9, 5e-4, 8)
    rates = [ten.recipe.learning_rate(epoch, 1) for epoch in range(150)]
    assert [epoch for epoch in range(1, 150) if rates[epoch] < rates[epoch - 1]] == [60, 90, 120]


# -- whole runs --------------------------------------------------------------------------------------------------------


def request(kind: Any, **changes: Any) -> ConformalRequest:
    plain: dict[str, Any] = {"views": 2, "validation": 100, "pad": 0, "flip": False, "recipe": QUICK}
    return ConformalRequest(kind, 0.25, 0.125, **{**plain, **changes})


@pytest.mark.parametrize("kind", ["rct", "conftr", "exact"])
@pytest.mark.parametrize(
    "changes", [{}, {"whole": True}, {"fresh": True, "validation": 0}], ids=["bank", "whole", "fresh"]
)
def test_a_run_writes_weights_and_card(
    kind: str, changes: dict[str, Any], model: SmallCNN, data: Labelled, tmp_path: Path
) -> None:
    out, said = tmp_path / "new" / "trained.safetensors", []
    card = train_conformal(model, data, request(kind, **changes), out, base="small", say=said.append, progress=False)
    assert json.loads(out.with_suffix(".json").read_text()) == card
    assert card["sha256"] == hashlib.sha256(out.read_bytes()).hexdigest()
    assert card["loss"]["name"] == {"rct": "RCT", "conftr": "ConfTr", "exact": "ExactRCT"}[kind]
    assert card["request"]["recipe"]["copies"] == (1 if kind == "conftr" else 8)
    assert [entry["epoch"] for entry in card["history"]] == [1, 3]
    assert any(line.startswith("epoch 3/3") for line in said)
    stuck = card["history"][-1]["hard_size"] == 10.0
    assert stuck == said[-1].startswith("warning: every set still holds every label")
    assert card["base_fingerprint"] == fingerprint(model)
    if changes.get("whole"):
        assert card["trains"] == "whole network"
        loaded = load_weights(SmallCNN(), out)
        assert changed(model, loaded) == set(model.state_dict()) - {"normalize.mean", "normalize.std"}
    else:
        assert out.stat().st_size < 4000
        other = SmallCNN()
        other.load_state_dict(model.state_dict())
        assert changed(model, load_head(other, out)) == {"head.weight", "head.bias"}


def test_conftr_sees_no_noise_and_no_attack() -> None:
    conftr, rct = request("conftr").settings, request("rct").settings
    assert (conftr.sigma, conftr.copies, rct.sigma, rct.copies) == (0.0, 1, 0.25, 8)


def test_the_matched_rule_is_certified(model: SmallCNN, bank: FeatureBank) -> None:
    """The exact loss trains for a rule that the hull certifies at this alpha and r, with as many draws as copies."""
    asked = request("exact")
    rule, loss = matched_rule(model, bank, asked), asked.loss(model, bank)
    assert isinstance(loss, ExactRCT)
    assert (rule.name, rule.asked.draws, rule.asked.alpha) == ("exact", 8, 0.1)
    assert rule.asked.threat == Threat(Gaussian(asked.sigma), asked.epsilon)
    assert (loss.c, loss.kappa, loss.level) == (rule.c, rule.kappa, rule.level)
    assert 0 < loss.level < 0.1


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"kind": "magic"}, "rct, conftr, exact"),
        ({"preset": "mnist"}, "preset among cifar10, cifar100"),
        ({"sigma": 0.0}, "sigma > 0"),
        ({"epsilon": -0.1}, "epsilon >= 0"),
        ({"alpha": 1.0}, "alpha in"),
        ({"validation": -1}, "validation"),
    ],
)
def test_bad_requests_are_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        ConformalRequest(**{"kind": "rct", "sigma": 0.25, "epsilon": 0.125, **changes})


def test_runs_that_cannot_be_are_refused(model: SmallCNN, data: Labelled, tmp_path: Path) -> None:
    out = tmp_path / "head.safetensors"
    with pytest.raises(InputError, match="leave none of 600"):
        train_conformal(model, data, request("rct", validation=600), out, base="small", progress=False)
    wide = request("rct", recipe=replace(QUICK, batch_size=501))
    with pytest.raises(InputError, match="at least one batch of 501"):
        train_conformal(model, data, wide, out, base="small", progress=False)
    with pytest.raises(InputError, match=r"ends in \.safetensors"):
        train_conformal(model, data, request("rct"), tmp_path / "head.pt", base="small", progress=False)
    with pytest.raises(InputError, match="epochs >= 1"):
        HeadRecipe(epochs=0)


# -- weights by name ---------------------------------------------------------------------------------------------------


def test_weights_are_found_by_path_name_and_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KEEPCOVER_WEIGHTS", raising=False)
    path = tmp_path / "mine.safetensors"
    path.write_bytes(b"x")
    assert find_weights(path) == path
    with pytest.raises(InputError, match=r"no weights at mine; .*cifar10-resnet110-sigma0\.25"):
        find_weights("mine")
    monkeypatch.setenv("KEEPCOVER_WEIGHTS", str(tmp_path))
    assert find_weights("mine") == find_weights("mine.safetensors") == path
    assert find_weights("cifar10-resnet110-sigma0.25").name == "cifar10-resnet110-sigma0.25.safetensors"
    with pytest.raises(InputError, match="no weights at"):
        find_weights(tmp_path / "elsewhere" / "mine")


def test_a_killed_run_does_not_go_on_over_other_weights_or_data(
    model: SmallCNN, data: Labelled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 10**6, 11))
    monkeypatch.setattr("keepcover.training.loop.time.monotonic", lambda: float(next(clock)))
    save, out = Checkpoint.save, tmp_path / "head.safetensors"

    def save_and_die(self: Checkpoint, where: Path, facts: dict[str, Any]) -> None:
        save(self, where, facts)
        raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoint, "save", save_and_die)
    with pytest.raises(KeyboardInterrupt):
        train_conformal(model, data, request("rct"), out, base="small", say=lambda _: None, progress=False)
    monkeypatch.setattr(Checkpoint, "save", save)
    for network, images in ((SmallCNN(), data), (model, data[torch.arange(len(data)).flip(0)])):
        with pytest.raises(InputError, match="another recipe, other data or other base weights"):
            train_conformal(network, images, request("rct"), out, base="small", say=lambda _: None, progress=False)
    train_conformal(model, data, request("rct"), out, base="small", say=lambda _: None, progress=False)
    assert out.is_file()
