"""Every file in weights/ and its card: bytes, sizes, what it belongs to, and that it runs."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from keepcover.engine.fingerprint import fingerprint
from keepcover.errors import InputError
from keepcover.models import CifarResNet, last_linear, load_head, load_weights, network
from keepcover.models.checkpoints import SCALE
from keepcover.training.heads import ConformalRequest, HeadRecipe
from keepcover.training.recipe import Recipe
from tests.conftest import ASSETS

FOLDER = Path(__file__).resolve().parents[2] / "weights"
CARDS: dict[str, dict[str, Any]] = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
BASES = [name for name, card in CARDS.items() if "base" not in card]
HEADS = [name for name, card in CARDS.items() if "base" in card]


def base_file(name: str) -> Path:
    """Base weights: committed, or among the development assets."""
    for folder in (FOLDER, ASSETS / "models"):
        if (folder / f"{name}.safetensors").is_file():
            return folder / f"{name}.safetensors"
    pytest.skip(f"{name} is not in the repository, nor under {ASSETS}/models; set KEEPCOVER_ASSETS to its folder")


def base_model(name: str, classes: int) -> CifarResNet:
    return load_weights(CifarResNet(110, classes), base_file(name))  # type: ignore[return-value]


def test_every_file_has_a_card_and_every_card_a_file() -> None:
    assert {path.stem for path in FOLDER.glob("*.safetensors")} == set(CARDS)
    assert {path.suffix for path in FOLDER.iterdir()} == {".json", ".safetensors"}
    assert {"cifar10-resnet110-sigma0.25", "cifar100-resnet110-sigma0.25"} <= set(BASES)  # the paper's network
    assert {CARDS[name]["request"]["kind"] for name in HEADS} == {"rct", "conftr", "exact"}


@pytest.mark.parametrize("name", CARDS)
def test_a_file_matches_its_card(name: str) -> None:
    """The bytes, float16 beside kernels in 8 bits, small enough for a repository; when and on what it was made."""
    card, path = CARDS[name], FOLDER / f"{name}.safetensors"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == card["sha256"]
    assert path.stat().st_size < (16_000_000 if name in BASES else 30_000)
    kernels = torch.int8 if card.get("dtype") == "int8" else torch.float16
    for part, value in load_file(path).items():
        if not part.endswith(("num_batches_tracked", SCALE)):
            assert value.dtype == (kernels if value.ndim > 1 else torch.float16), part
    assert card["seconds"] > card.get("bank_seconds", 0) >= 0
    assert card["hardware"] == "NVIDIA H200"
    assert card["torch"]
    assert name.startswith(f"{card['dataset']}-")
    assert card["num_classes"] == {"cifar10": 10, "cifar100": 100}[card["dataset"]]


@pytest.mark.parametrize("name", BASES)
def test_a_base_says_how_it_was_trained_and_runs(name: str) -> None:
    card = CARDS[name]
    assert name == f"{card['dataset']}-{card['architecture'].removeprefix('cifar-')}-sigma{card['sigma']:g}"
    assert Recipe(**card["recipe"]).sigma == card["sigma"]
    assert card["top1_accuracy_one_noisy_draw_test"] > {"cifar10": 0.75, "cifar100": 0.45}[card["dataset"]]
    model = load_weights(network(card["architecture"], card["num_classes"]), base_file(name))
    with torch.inference_mode():
        assert model(torch.full((2, 3, 32, 32), 0.5)).isfinite().all()


@pytest.mark.parametrize("name", HEADS)
def test_a_head_says_what_it_belongs_to_and_how_it_was_trained(name: str) -> None:
    """Its card is a request that can be made again, and its name says whose head it is."""
    card = CARDS[name]
    request = ConformalRequest(**{**card["request"], "recipe": HeadRecipe(**card["request"]["recipe"])})
    assert card["base"] == f"{card['dataset']}-resnet110-sigma{request.sigma:g}"
    assert name.startswith(f"{card['base']}-{request.kind}")
    assert request.kind == "conftr" or name.endswith(f"-epsilon{request.epsilon:g}")
    assert card["loss"]["name"] == {"rct": "RCT", "conftr": "ConfTr", "exact": "ExactRCT"}[request.kind]
    assert request.kind != "rct" or card["loss"]["r"] == request.epsilon / request.sigma
    assert (request.preset, card["trains"]) == (card["dataset"], "last layer")
    assert card["noise"] == ("fresh" if request.fresh else "bank")
    assert card["history"][-1]["epoch"] == request.settings.epochs
    assert len(card["base_fingerprint"]) == 64


@pytest.mark.parametrize("base", sorted({CARDS[name]["base"] for name in HEADS}))
def test_heads_load_over_their_base_and_over_no_other(base: str) -> None:
    """The fingerprint in the card is that of the base; the head takes the place of its last layer and gives logits."""
    mine = [name for name in HEADS if CARDS[name]["base"] == base]
    model = base_model(base, CARDS[mine[0]]["num_classes"])
    found = fingerprint(model)
    other = base_model("cifar10-resnet110-sigma0.25", 10) if base != "cifar10-resnet110-sigma0.25" else None
    for name in mine:
        path = FOLDER / f"{name}.safetensors"
        assert CARDS[name]["base_fingerprint"] == found
        load_head(model, path)
        stored, (_, head) = load_file(path), last_linear(model)
        assert torch.equal(head.weight, stored["weight"].float())
        with torch.inference_mode():
            assert model(torch.full((2, 3, 32, 32), 0.5)).isfinite().all()
        if other is not None:
            with pytest.raises(InputError, match=r"another backbone|does not fit"):
                load_head(other, path)


def test_every_head_names_its_backbone() -> None:
    """Not only the card: the file itself refuses another backbone, and heads of one base name the same one."""
    named: dict[str, set[str]] = {}
    for name in HEADS:
        with safe_open(FOLDER / f"{name}.safetensors", framework="pt") as file:
            named.setdefault(CARDS[name]["base"], set()).add(json.loads(file.metadata()["keepcover"])["backbone"])
    assert all(len(backbones) == 1 for backbones in named.values())
    assert len(set.union(*named.values())) == len(named) == 5


def test_weights_of_0_1_0_are_refused_in_one_line(tmp_path: Path) -> None:
    old = tmp_path / "old.safetensors"
    save_file({"weight": torch.zeros(2, 2)}, old, {"holdfast": "{}"})
    with pytest.raises(InputError, match=r"^[^\n]*written by holdfast 0\.1\.0, as keepcover was called before[^\n]*$"):
        load_weights(torch.nn.Linear(2, 2), old)
