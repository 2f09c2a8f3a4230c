"""Base models: training that stops and goes on, crops that are crops, cards that tell the truth."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from keepcover.data import Labelled, digits
from keepcover.errors import InputError
from keepcover.models import SmallCNN, load_weights
from keepcover.models.checkpoints import weights_bytes
from keepcover.training.base import NoisyLoss, noisy_accuracy, train_base
from keepcover.training.loop import Checkpoint, Loop
from keepcover.training.optimise import Muon, Sgd, orthogonal
from keepcover.training.recipe import Recipe, recommended
from keepcover.training.views import Views, augment, boxes, places

RECIPE = Recipe(sigma=0.25, epochs=6, batch_size=64, lr=0.05, warmup_epochs=1, pad=1, flip=False)
RICH = replace(RECIPE, nesterov=True, copies=2, cutout=3, cutmix=0.5, average=0.2)
TURNED = replace(RECIPE, optimiser="muon", average=0.2)


@pytest.fixture(scope="module")
def parts() -> tuple[Labelled, Labelled]:
    train, test = digits().split(600, 300, seed=0)
    return train, test


def train(
    parts: tuple[Labelled, Labelled], out: Path, recipe: Recipe = RECIPE, model: nn.Module | None = None, **options: Any
) -> dict[str, Any]:
    torch.manual_seed(0)
    model = model or SmallCNN()
    return train_base(
        model, *parts, recipe, out, architecture="small-cnn", progress=False, say=lambda _: None, **options
    )


@pytest.mark.parametrize("recipe", [RECIPE, RICH, TURNED], ids=["plain", "rich", "muon"])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    recipe: Recipe, parts: tuple[Labelled, Labelled], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed right after a checkpoint, resumed: the same bytes as an uninterrupted run, and no checkpoint left."""
    whole = train(parts, tmp_path / "whole.safetensors", recipe)
    save = Checkpoint.save

    def save_and_die(self: Checkpoint, path: Path, recipe: dict[str, Any]) -> None:
        save(self, path, recipe)
        if self.epoch == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoint, "save", save_and_die)
    with pytest.raises(KeyboardInterrupt):
        train(parts, tmp_path / "killed.safetensors", recipe, checkpoint_seconds=0.0)
    assert [p.name for p in tmp_path.glob("killed*")] == ["killed.checkpoint.safetensors"]
    monkeypatch.setattr(Checkpoint, "save", save)
    resumed = train(parts, tmp_path / "killed.safetensors", recipe)
    assert resumed["sha256"] == whole["sha256"]
    assert (tmp_path / "killed.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()
    assert not (tmp_path / "killed.checkpoint.safetensors").exists()


def test_the_card_describes_the_file(parts: tuple[Labelled, Labelled], tmp_path: Path) -> None:
    """Checksum of the bytes, accuracy of the stored float16 weights, the recipe."""
    out = tmp_path / "model.safetensors"
    card = train(parts, out)
    assert json.loads(out.with_suffix(".json").read_text()) == card
    assert card["sha256"] == hashlib.sha256(out.read_bytes()).hexdigest()
    assert all(t.dtype == torch.float16 for t in load_file(out).values() if t.is_floating_point())
    model = load_weights(SmallCNN(), out)
    assert card["top1_accuracy_one_noisy_draw_test"] == noisy_accuracy(model, parts[1], 0.25, "cpu")
    assert card["top1_accuracy_one_noisy_draw_test"] > 0.2  # chance is 0.1


def test_weights_in_8_bits_are_half_the_size_and_nearly_the_same(
    parts: tuple[Labelled, Labelled], tmp_path: Path
) -> None:
    """A step of a scale is 1/127 of a row's largest weight, so no weight moves by more than half of that."""
    whole, small = tmp_path / "whole.safetensors", tmp_path / "small.safetensors"
    train(parts, whole)
    torch.manual_seed(0)
    trained = SmallCNN()
    card = train(parts, small, model=trained, bits=8)
    assert card["dtype"] == "int8"
    assert small.stat().st_size < 0.6 * whole.stat().st_size
    wide, narrow = (load_weights(SmallCNN(), path).state_dict() for path in (whole, small))
    for name, value in wide.items():
        if value.ndim > 1 and not name.startswith("normalize"):
            rows = value.flatten(1)
            moved = (narrow[name].flatten(1) - rows).abs()
            assert bool((moved <= rows.abs().amax(dim=1, keepdim=True) * (0.6 / 127)).all())  # float16 rounds, too
            assert bool((moved > 0).any())
        else:
            assert torch.equal(narrow[name], value)
    model = load_weights(SmallCNN(), small)
    assert card["top1_accuracy_one_noisy_draw_test"] == noisy_accuracy(model, parts[1], 0.25, "cpu")
    # Accuracy on a few images may not see a rounding: the network that was measured has the very weights of the file.
    stored = model.state_dict()
    assert all(torch.equal(value, stored[name]) for name, value in trained.state_dict().items())
    with pytest.raises(InputError, match="8 or 16 bits, got 4"):
        train(parts, small, bits=4)


def test_weights_in_8_bits_are_the_same_bytes_when_they_are_stored_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    path, model = tmp_path / "small.safetensors", nn.Linear(10, 5000)
    path.write_bytes(weights_bytes(model, {}, 8))
    assert weights_bytes(load_weights(nn.Linear(10, 5000), path), {}, 8) == path.read_bytes()


SCALE = "head.weight.scale_of_int8"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({SCALE: torch.ones(3)}, r"one scale per output of head\.weight"),
        ({SCALE: torch.ones(10, 1)}, r"one scale per output of head\.weight"),
        ({SCALE: torch.full((10,), torch.nan)}, "positive and finite"),
        ({SCALE: torch.full((10,), torch.inf)}, "positive and finite"),
        ({SCALE: torch.zeros(10)}, "positive and finite"),
        ({SCALE: -torch.ones(10)}, "positive and finite"),
        ({SCALE: torch.ones(10, dtype=torch.int64)}, "positive and finite, in float32"),
        ({SCALE: None}, r"head\.weight is stored in 8 bits, and its scales are missing"),
        ({"head.bias.scale_of_int8": torch.ones(10)}, r"of int8 alone, got one for 'head\.bias'"),
        ({"nothing.scale_of_int8": torch.ones(10)}, r"of int8 alone, got one for 'nothing'"),
        ({".scale_of_int8": torch.ones(10)}, "of int8 alone, got one for ''"),
    ],
)
def test_forged_weights_in_8_bits_are_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    """What would load as raw bytes, as NaN or as another network."""
    path = tmp_path / "forged.safetensors"
    path.write_bytes(weights_bytes(SmallCNN(), {}, 8))
    state = {name: value for name, value in (load_file(path) | change).items() if value is not None}
    save_file(state, path)
    with pytest.raises(InputError, match=words):
        load_weights(SmallCNN(), path)


def test_only_parameters_are_stored_in_8_bits(tmp_path: Path) -> None:
    """A mask of infinities and a grid are buffers, and stay what they are; tied and empty weights load as well."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
            self.second.weight = self.first.weight
            self.empty = nn.Parameter(torch.zeros(3, 0))
            self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
            self.register_buffer("grid", torch.arange(1000.0)[None])

    torch.manual_seed(0)
    odd, path = Odd(), tmp_path / "odd.safetensors"
    path.write_bytes(weights_bytes(odd, {}, 8))
    loaded = load_weights(Odd(), path)
    assert torch.equal(loaded.mask, odd.mask)
    assert torch.equal(loaded.grid, odd.grid)
    assert torch.allclose(loaded.second.weight, odd.first.weight, atol=0.6 / 127)
    assert {load_file(path)[f"{name}.weight"].dtype for name in ("first", "second")} == {torch.int8}


def test_muon_turns_kernels_by_the_angle_of_its_rate() -> None:
    """Lengths stay; a step of rate lr turns by about as much; what is no
    kernel moves as SGD moves it at four times the rate.
    """
    torch.manual_seed(0)
    kernels = [torch.randn(6, 4, 3, 3), torch.randn(6, 4, 3, 3), torch.randn(3, 6, 1, 1)]
    shift, plain = torch.randn(5), [torch.randn(5)]
    plain[0].copy_(shift)
    before = [kernel.clone() for kernel in kernels]
    muon, sgd = Muon([*kernels, shift], 0.9, 1e-3), Sgd(plain, 0.9, 1e-3, nesterov=True)
    for _ in range(3):
        gradients = [torch.randn_like(one) for one in (*kernels, shift)]
        start = [kernel.clone() for kernel in kernels]
        muon.lr.fill_(0.1)
        sgd.lr.fill_(0.4)
        muon.step(gradients)
        sgd.step(gradients[-1:])
        for old, new, first in zip(start, kernels, before, strict=True):
            assert float(new.norm() / first.norm()) == pytest.approx(1, abs=1e-5)
            turned = torch.acos((old * new).sum() / (old.norm() * new.norm()))
            assert 0.05 < float(turned) <= math.asin(0.1) + 1e-3
        assert torch.allclose(shift, plain[0])


def test_muon_follows_its_velocity_as_nesterov_does() -> None:
    """The same steps of one kernel, written out."""
    torch.manual_seed(0)
    kernel, velocity, momentum, lr = torch.randn(6, 4, 3, 3), torch.zeros(6, 36), 0.9, 0.1
    wanted, muon = kernel.flatten(1).clone(), Muon([kernel], momentum, 0.0)
    muon.lr.fill_(lr)
    for _ in range(3):
        gradient = torch.randn(6, 4, 3, 3)
        velocity = momentum * velocity + gradient.flatten(1)
        turn = orthogonal((gradient.flatten(1) + momentum * velocity)[None])[0]
        moved = wanted - lr * wanted.norm() * turn / turn.norm()
        wanted = wanted.norm() * moved / moved.norm()
        muon.step([gradient])
        assert torch.allclose(kernel.flatten(1), wanted, atol=1e-5)


def test_orthogonal_reaches_down_to_a_300th_of_the_length_of_a_matrix() -> None:
    """Not of its largest singular value: many that are large make all of them a small part of the length."""
    torch.manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(100, 100, dtype=torch.float64))[0] for _ in range(2))
    for least in (10 / 299, 10 / 3000):  # of a matrix of length 10 or so
        values = torch.cat([torch.ones(99), torch.tensor([least])])
        matrix = (left * values @ right).float()
        for one in (matrix, matrix[:, :60], matrix[:60]):
            found = orthogonal(one[None])[0].double()
            assert found.shape == one.shape
            assert torch.linalg.svdvals(found).max() < 1.25
        followed = float(left[:, -1] @ orthogonal(matrix[None])[0].double() @ right[-1])
        assert (followed > 0.65) == (least > 10 / 300)


def test_muon_moves_what_has_no_direction() -> None:
    """A kernel of zeros has no angle, nor has one of one output: both move as SGD moves them. The library's UNet starts so."""
    torch.manual_seed(0)
    zeros, gain, usual = torch.zeros(4, 3, 3, 3), torch.ones(1, 5, 1, 1), torch.randn(4, 3, 3, 3)
    muon = Muon([zeros, gain, usual], 0.9, 0.0)
    muon.lr.fill_(0.1)
    muon.step([torch.ones_like(one) for one in (zeros, gain, usual)])
    assert float(zeros.norm()) > 1
    assert float(gain.mean()) < 0.5


def test_a_last_batch_of_one_image_is_left_out_of_the_statistics(parts: tuple[Labelled, Labelled]) -> None:
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))
    loss = NoisyLoss(model, Views.of(parts[0][:65], replace(RECIPE, batch_size=32), "cpu"))
    loss.settle()
    assert int(model[1].num_batches_tracked) == 2  # type: ignore[arg-type]


def test_a_rate_goes_with_its_optimiser() -> None:
    assert recommended("wrn-28-6", "muon") == recommended("wrn-28-6")
    assert recommended("wrn-28-6", "sgd")["lr"] == 0.2
    assert recommended("small-cnn", "adamw")["lr"] == 0.003
    assert recommended("small-cnn", "sgd") == {}


def test_muon_goes_downhill_in_all_directions_alike() -> None:
    """Of a gradient with singular values 100 and 1 both directions are followed alike: plain descent follows one of them."""
    kernel = torch.full((2, 2, 1, 1), 1e-3)
    muon = Muon([kernel], 0.0, 0.0)
    muon.lr.fill_(1e3)  # so far that only the direction counts
    muon.step([torch.diag(torch.tensor([100.0, 1.0])).view(2, 2, 1, 1)])
    values = torch.linalg.svdvals(kernel.view(2, 2))
    assert float(values[1] / values[0]) > 0.5
    assert bool((kernel.view(2, 2).diag() < 0).all())


def test_another_recipe_or_a_damaged_checkpoint_is_refused(parts: tuple[Labelled, Labelled], tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    other = Recipe(sigma=0.5, batch_size=64)
    state = NoisyLoss(SmallCNN(), Views.of(parts[0], other, "cpu")).state()
    Checkpoint(state, 1, 80, 1.0).save(tmp_path / "model.checkpoint.safetensors", asdict(other))
    with pytest.raises(InputError, match="another recipe"):
        train(parts, out)
    (tmp_path / "model.checkpoint.safetensors").write_bytes(b"nonsense")
    with pytest.raises(InputError, match="not a readable checkpoint"):
        train(parts, out)
    assert train(parts, out, resume=False)["dataset"] == "digits"
    with pytest.raises(InputError, match=r"ends in \.safetensors"):
        train(parts, tmp_path / "model.pt")


@pytest.mark.parametrize("place", range(0, 1000, 37))
def test_one_flipped_bit_of_a_checkpoint_is_refused(
    place: int, parts: tuple[Labelled, Labelled], tmp_path: Path
) -> None:
    """From the first byte to the last; the exponent of a float among them would else go on training from nonsense."""
    out, checkpoint = tmp_path / "model.safetensors", tmp_path / "model.checkpoint.safetensors"
    belongs = {"any": "recipe"}
    state = {"weight": torch.linspace(-1, 1, 200), "step": torch.tensor(3)}
    Checkpoint(state, 1, 2, 1.0).save(checkpoint, belongs)
    assert torch.equal(Checkpoint.load(checkpoint, belongs, state).state["weight"], state["weight"])  # type: ignore[union-attr]
    content = bytearray(checkpoint.read_bytes())
    content[place * len(content) // 1000] ^= 0x40
    checkpoint.write_bytes(bytes(content))
    with pytest.raises(InputError, match=r"not a readable checkpoint .*delete it to start over") as caught:
        Checkpoint.load(checkpoint, belongs, state)
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="not a readable checkpoint"):
        train(parts, out)


def test_one_flipped_bit_of_trained_weights_is_refused(tmp_path: Path) -> None:
    """The files that training writes carry a checksum; files of other origin, which have none, still load."""
    path = tmp_path / "model.safetensors"
    content = weights_bytes(SmallCNN(), {"sigma": 0.25})
    for place in (-1, -2, len(content) // 2, len(content) // 3):
        altered = bytearray(content)
        altered[place] ^= 0x40
        path.write_bytes(bytes(altered))
        with pytest.raises(InputError, match=r"not a readable checkpoint \(it does not match its checksum\)"):
            load_weights(SmallCNN(), path)
    path.write_bytes(content)
    load_weights(SmallCNN(), path)
    save_file(load_file(path), path)
    load_weights(SmallCNN(), path)


def test_augmented_images_are_crops_and_mirrors() -> None:
    """Every result is one of the (2 pad + 1)^2 crops of the padded image, or its mirror."""
    pixels = torch.randint(0, 256, (3, 2, 6, 6), dtype=torch.uint8)
    padded = torch.nn.functional.pad(pixels, [1] * 4)
    images = augment(padded, torch.tensor([2, 0, 1, 2]), *places(4, (6, 6), (2, 2), True, torch.device("cpu")))
    for image, source in zip(images, padded[[2, 0, 1, 2]], strict=True):
        crops = [source[:, i : i + 6, j : j + 6].float() / 255 for i in range(3) for j in range(3)]
        assert any(torch.equal(image, c) or torch.equal(image, c.flip(-1)) for c in crops)


def test_minutes_become_epochs_once(
    parts: tuple[Labelled, Labelled], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The speed is measured, the number of epochs recorded; a resumed run keeps it, whatever the speed is then."""
    save, out, timed = Checkpoint.save, tmp_path / "model.safetensors", replace(RECIPE, minutes=1.0)
    clock = itertools.count(0.0, 0.05)  # a busy machine measures no other speed
    monkeypatch.setattr("keepcover.training.loop.time.monotonic", lambda: next(clock))

    def save_and_die(self: Checkpoint, path: Path, recipe: dict[str, Any]) -> None:
        save(replace(self, epochs=2), path, recipe)
        raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoint, "save", save_and_die)
    with pytest.raises(KeyboardInterrupt):
        train(parts, out, timed, checkpoint_seconds=0.0)
    monkeypatch.setattr(Checkpoint, "save", save)
    assert train(parts, out, timed)["recipe"]["epochs"] == 2
    assert train(parts, out, replace(timed, minutes=1e-6))["recipe"]["epochs"] == 1


def test_a_box_is_a_rectangle_of_the_share_asked_for() -> None:
    """Inside the image its sides have that length; at the border it is cut off; none where the share is 0."""
    torch.manual_seed(0)
    masks = boxes(torch.tensor([12 / 32] * 199 + [0.0]), 32, 32)[:, 0]
    rows, columns = masks.any(dim=2).sum(dim=1), masks.any(dim=1).sum(dim=1)
    assert torch.equal(masks.sum(dim=(1, 2)), rows * columns)
    assert rows[:199].max() <= 13
    assert (rows == 12).float().mean() > 0.4
    assert rows[:199].min() >= 6
    assert masks[199].sum() == 0


def test_weights_are_averaged_and_batch_norm_follows(parts: tuple[Labelled, Labelled]) -> None:
    """The weights are the exponential average of those of every step; the statistics are of the views that training shows."""
    torch.manual_seed(0)
    norm, head = nn.BatchNorm1d(64), nn.Linear(64, 10)
    model = nn.Sequential(nn.Flatten(), norm, head)
    recipe = replace(RECIPE, epochs=2, average=0.25, cutout=8)
    loss = NoisyLoss(model, Views.of(parts[0], recipe, "cpu"))
    loop = Loop(loss, recipe, len(parts[0]), "cpu", say=lambda _: None)
    step, seen = loop.step, [head.weight.detach().clone()]

    def watched() -> None:
        step()
        seen.append(head.weight.detach().clone())

    loop.step = watched  # type: ignore[assignment]
    loop.run(progress=False)
    average = seen[0]
    for done, weight in enumerate(seen[1:]):
        average = average + max(1 / (0.25 * 18), 9 / (10 + done)) * (weight - average)
    assert torch.allclose(head.weight, average, atol=1e-6)
    assert not torch.allclose(head.weight, seen[-1], atol=1e-4)
    loss.settle()
    assert norm.momentum == 0.1
    assert norm.running_mean is not None
    assert norm.running_var is not None
    torch.manual_seed(1)
    clean = loss.views.clean(torch.arange(600).repeat(10))
    shown = loss.views.cut(clean)[0].flatten(1)
    assert (norm.running_mean - shown.mean(dim=0)).abs().max() < 0.1
    # The grey squares lift the black border to a third or so.
    assert (norm.running_mean - clean.flatten(1).mean(dim=0)).view(8, 8)[:, 0].min() > 0.1
    assert norm.running_var.min() > 0.9 * 0.25**2


def test_a_mixed_image_has_as_much_of_its_label_as_of_its_pixels() -> None:
    """Images of one colour each: the share that is their own is the share of pixels that kept the colour."""
    torch.manual_seed(0)
    recipe = replace(RECIPE, cutmix=0.5, copies=2)
    images = torch.linspace(0, 1, 64)[:, None, None, None].expand(64, 1, 16, 16)
    mixed, own = Views(images, None, recipe, "cpu").cut(images)
    assert own is not None
    assert torch.allclose(own[::2], (mixed == images).float().mean(dim=(1, 2, 3)))
    assert torch.equal(own[::2], own[1::2])
    assert ((mixed == images) | (mixed == images.roll(1, 0))).all()
    assert 0.3 < (own == 1).float().mean() < 0.8
    assert own.min() < 0.6


def test_a_compiler_that_fails_is_done_without(
    parts: tuple[Labelled, Labelled], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bytes as without it, and one line that says so."""

    def fails(_: Any) -> Any:
        def forward(images: torch.Tensor) -> torch.Tensor:
            raise RuntimeError(f"no compiler for {len(images)} images")

        return forward

    monkeypatch.setattr(torch, "compile", fails)
    plain = train(parts, tmp_path / "plain.safetensors")
    said: list[str] = []
    torch.manual_seed(0)
    options: dict[str, Any] = {"architecture": "small-cnn", "progress": False, "say": said.append}
    card = train_base(SmallCNN(), *parts, RECIPE, tmp_path / "compiled.safetensors", compile=True, **options)
    assert card["sha256"] == plain["sha256"]
    assert "no compiler for 64 images" in said[0]
    assert "without the compiler" in said[0]


def test_a_student_learns_what_its_teachers_say(parts: tuple[Labelled, Labelled], tmp_path: Path) -> None:
    """Labels are all wrong; the teachers are right, on the mean."""
    kept = replace(RECIPE, epochs=12, lr=0.1)
    train(parts, tmp_path / "teacher.safetensors", kept)
    teacher = load_weights(SmallCNN(), tmp_path / "teacher.safetensors")
    wrong = replace(parts[0], labels=(parts[0].labels + 1) % 10)
    recipe = replace(kept, teacher_weight=1.0)
    torch.manual_seed(1)
    card = train_base(
        SmallCNN(),
        wrong,
        parts[1],
        recipe,
        tmp_path / "student.safetensors",
        architecture="small-cnn",
        teachers={"one": teacher, "same": teacher},
        progress=False,
        say=lambda _: None,
    )
    assert card["teachers"] == ["one", "same"]
    assert card["top1_accuracy_one_noisy_draw_test"] > 0.5


def test_without_labels_a_network_learns_what_it_said_without_noise(
    parts: tuple[Labelled, Labelled], tmp_path: Path
) -> None:
    """A network trained on clean images, then towards itself: labels, all wrong here, are not looked at."""
    train(parts, tmp_path / "clean.safetensors", replace(RECIPE, sigma=0.0, epochs=12, lr=0.1))
    wrong = replace(parts[0], labels=(parts[0].labels + 1) % 10)
    model = load_weights(SmallCNN(), tmp_path / "clean.safetensors")
    before = noisy_accuracy(model, parts[1], 0.5, "cpu")
    options: dict[str, Any] = {"architecture": "small-cnn", "labels": False, "progress": False, "say": lambda _: None}
    recipe = replace(RECIPE, sigma=0.5, epochs=12)
    card = train_base(model, wrong, parts[1], recipe, tmp_path / "own.safetensors", **options)
    assert card["top1_accuracy_one_noisy_draw_test"] > before + 0.05
    with pytest.raises(InputError, match="takes no teachers"):
        train_base(model, wrong, parts[1], recipe, tmp_path / "x.safetensors", teachers={"a": model}, **options)
