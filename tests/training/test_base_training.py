"""Base models: training that stops and goes on, crops that are crops, cards that tell the truth."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from keepcover.data import Labelled, digits
from keepcover.errors import InputError
from keepcover.models import SmallCNN, load_weights
from keepcover.models.checkpoints import weights_bytes
from keepcover.training.base import Recipe, Trainer, augment, noisy_accuracy, train_base
from keepcover.training.resume import Checkpoint

RECIPE = Recipe(sigma=0.25, epochs=6, batch_size=64, lr=0.05, warmup_epochs=1, pad=1, flip=False)


@pytest.fixture(scope="module")
def parts() -> tuple[Labelled, Labelled]:
    train, test = digits().split(600, 300, seed=0)
    return train, test


def train(parts: tuple[Labelled, Labelled], out: Path, recipe: Recipe = RECIPE, **options: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    return train_base(
        SmallCNN(), *parts, recipe, out, architecture="small-cnn", progress=False, say=lambda _: None, **options
    )


def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    parts: tuple[Labelled, Labelled], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed right after a checkpoint, resumed: the same bytes as an uninterrupted run, and no checkpoint left."""
    whole = train(parts, tmp_path / "whole.safetensors")
    save = Checkpoint.save

    def save_and_die(self: Checkpoint, path: Path, recipe: dict[str, Any]) -> None:
        save(self, path, recipe)
        if self.epoch == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoint, "save", save_and_die)
    with pytest.raises(KeyboardInterrupt):
        train(parts, tmp_path / "killed.safetensors", checkpoint_seconds=0.0)
    assert [p.name for p in tmp_path.glob("killed*")] == ["killed.checkpoint.safetensors"]
    monkeypatch.setattr(Checkpoint, "save", save)
    resumed = train(parts, tmp_path / "killed.safetensors")
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


def test_another_recipe_or_a_damaged_checkpoint_is_refused(parts: tuple[Labelled, Labelled], tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    other = Recipe(sigma=0.5, batch_size=64)
    trainer = Trainer(SmallCNN(), parts[0], other, "cpu")
    Checkpoint(trainer.state(), 1, 1.0).save(tmp_path / "model.checkpoint.safetensors", asdict(other))
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
    Checkpoint(state, 1, 1.0).save(checkpoint, belongs)
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
    images = augment(padded, torch.tensor([2, 0, 1, 2]), pad=1, flip=True)
    for image, source in zip(images, padded[[2, 0, 1, 2]], strict=True):
        crops = [source[:, i : i + 6, j : j + 6].float() / 255 for i in range(3) for j in range(3)]
        assert any(torch.equal(image, c) or torch.equal(image, c.flip(-1)) for c in crops)
