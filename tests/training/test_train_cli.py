"""``keepcover train``: files and their cards, runs killed and resumed, networks of one's own, errors in one line."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from keepcover import cli
from keepcover.data import joined as joined_data
from keepcover.errors import InputError
from keepcover.models import SmallCNN, load_head, load_weights
from keepcover.specs import load_parts
from keepcover.training.base import noisy_accuracy
from tests.cli.runner import as_json, refused, run

BASE = ["train", "base", "--sigma", "0.25"]
ATTACK = ["--sigma", "0.25", "--epsilon", "0.125"]
QUICK = ["--epochs", "3", "--batch-size", "200", "--views", "2"]

# Networks of one's own; KEEPCOVER_TEST_SLEEP makes them slow.
MODULE = """
import os, time
import torch
from torch import nn
from keepcover.models import load_weights

class Net(nn.Sequential):
    def __init__(self, classes=10):
        super().__init__(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, classes))

    def forward(self, images):
        time.sleep(float(os.environ.get("KEEPCOVER_TEST_SLEEP", "0")))
        return super().forward(images)

def make():
    return Net()

def trained():
    return load_weights(Net(), os.environ["KEEPCOVER_TEST_WEIGHTS"])

def five():
    return Net(5)

def flat():
    return nn.Linear(7, 10)

def function():
    return lambda images: torch.zeros(len(images), 10)
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small network on digits, trained by the command itself. Its name holds a dot, as those of weights/ do."""
    path = tmp_path_factory.mktemp("base") / "digits-sigma0.25.safetensors"
    assert cli.main([*BASE, "--epochs", "20", "--batch-size", "64", "--out", str(path)]) == 0
    return path


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path with a module ``own_nets``."""
    (tmp_path / "own_nets.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_nets", raising=False)
    return tmp_path


def card_of(path: Path) -> dict[str, Any]:
    card = json.loads(path.with_suffix(".json").read_text())
    assert card["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    return card


# -- files and cards ---------------------------------------------------------------------------------------------------


def test_base_prints_the_card_it_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "model.safetensors"
    card = as_json(capsys, *BASE, "--epochs", "2", "--lr", "0.05", "--seed", "3", "--out", out)
    assert card == card_of(out)
    assert sorted(path.name for path in out.parent.iterdir()) == ["model.json", "model.safetensors"]
    assert (card["architecture"], card["dataset"], card["sigma"]) == ("small-cnn", "digits", 0.25)
    asked = {"epochs": 2, "lr": 0.05, "seed": 3, "batch_size": 256, "pad": 1, "flip": False}
    assert asked.items() <= card["recipe"].items()  # digits are shifted by an eighth, never mirrored
    model = load_weights(SmallCNN(), out)
    _, test = load_parts("digits", seed=3)
    assert card["top1_accuracy_one_noisy_draw_test"] == noisy_accuracy(model, test, 0.25, "cpu")


def test_base_learns_and_says_so(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Far above chance; and a run from those weights starts where they end instead of at chance."""
    accuracy = card_of(base)["top1_accuracy_one_noisy_draw_test"]
    assert accuracy > 0.5
    out = tmp_path / "tuned.safetensors"
    code, text, err = run(
        capsys, *BASE, "--epochs", "1", "--batch-size", "64", "--lr", "1e-6", "--weights", base, "--out", out
    )
    assert code == 0
    tuned = card_of(out)["top1_accuracy_one_noisy_draw_test"]
    assert abs(tuned - accuracy) < 0.1
    assert f"noisy accuracy {tuned:.4f} under Gaussian noise sigma 0.25 on 180 images of digits" in text
    assert str(out) in text
    assert str(out.with_suffix(".json")) in text
    assert "epoch 1/1" in err


def test_data_are_joined_for_a_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One network for the classes of both, and from it one of the first kind alone, in 8 bits, its last layer afresh."""
    both, first = tmp_path / "both.safetensors", tmp_path / "first.safetensors"
    labels = torch.arange(400) % 3
    images = (labels.view(-1, 1, 1, 1) / 2).expand(-1, 1, 8, 8).contiguous()
    np.savez(tmp_path / "grey.npz", images=images.numpy(), labels=labels.numpy())
    how = ["--epochs", "3", "--batch-size", "64", "--lr", "0.05"]
    joined = as_json(capsys, *BASE, *how, "--data", f"digits+{tmp_path}/grey.npz", "--out", both)
    assert (joined["dataset"], joined["num_classes"]) == ("digits+grey", 13)
    parts = [load_parts(name) for name in ("digits", f"{tmp_path}/grey.npz", f"digits+{tmp_path}/grey.npz")]
    for one, other, all_of in zip(*parts, strict=True):
        assert torch.equal(all_of.images, torch.cat([one.images, other.images]))
        assert torch.equal(all_of.labels, torch.cat([one.labels, other.labels + 10]))
    how += ["--weights", str(both), "--bits", "8", "--optimiser", "muon", "--lr", "0.02"]
    card = as_json(capsys, *BASE, *how, "--out", first)
    assert (card["start"], card["num_classes"], card["dtype"]) == ("both", 10, "int8")
    assert card["top1_accuracy_one_noisy_draw_test"] > 0.3
    assert card["recipe"]["optimiser"] == "muon"
    for name in (f"digits+{tmp_path}/grey.npz", f"{tmp_path}/grey.npz+digits"):  # labels are there, and not looked at
        alone = as_json(
            capsys,
            *BASE,
            *how[:6],
            "--data",
            name,
            "--no-labels",
            "--weights",
            both,
            "--classes",
            "13",
            "--out",
            tmp_path / "own.safetensors",
            "--restart",
        )
        assert alone["teachers"] == ["itself, without noise"]
    odd = tmp_path / "c++"
    odd.mkdir()
    (tmp_path / "grey.npz").rename(odd / "grey+.npz")
    assert load_parts(str(odd / "grey+.npz"))[0].name == "grey+"
    one = load_parts("digits")[0]
    kind = f"{tuple(one.images.shape[1:])}, labels torch.int64 {tuple(one.labels.shape)} of 10 classes"
    for wrong, found in (
        (replace(one, labels=one.labels - 1), kind),
        (replace(one, labels=one.labels + 1), kind),
        (replace(one, labels=one.labels.float()), kind.replace("int64", "float32")),
        (replace(one, images=one.images.double()), f"torch.float64 {kind}"),
    ):
        with pytest.raises(InputError, match="images of one shape and type, each with one label") as caught:
            joined_data([one, wrong])
        assert f"torch.float32 {kind}; digits: " in str(caught.value)  # what differs is what is shown
        assert f"{found}. Make them alike" in str(caught.value)
    small = replace(one, labels=one.labels.to(torch.uint8), class_names=tuple(map(str, range(250))))
    assert int(joined_data([small, small]).labels.max()) == 259  # beyond the largest byte
    with pytest.raises(InputError, match="got no data"):
        joined_data([])


def test_an_optimiser_brings_its_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = as_json(capsys, *BASE, "--epochs", "1", "--optimiser", "adamw", "--out", tmp_path / "own.safetensors")
    assert (card["recipe"]["optimiser"], card["recipe"]["lr"]) == ("adamw", 0.003)


def test_the_seed_decides_the_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def train(name: str, *more: str) -> bytes:
        assert run(capsys, *BASE, "--epochs", "1", "--out", tmp_path / f"{name}.safetensors", *more)[0] == 0
        return (tmp_path / f"{name}.safetensors").read_bytes()

    first = train("first")
    assert train("same") == first
    assert train("other", "--seed", "1") != first


@pytest.mark.parametrize(("kind", "loss"), [("rct", "RCT"), ("conftr", "ConfTr"), ("exact", "ExactRCT")])
def test_heads_print_the_card_they_write(
    kind: str, loss: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "head.safetensors"
    before = base.read_bytes()
    card = as_json(capsys, "train", kind, *ATTACK, *QUICK, "--weights", base, "--out", out)
    assert card == card_of(out)
    assert (card["base"], card["trains"], card["loss"]["name"]) == ("digits-sigma0.25", "last layer", loss)
    assert (card["request"]["kind"], card["request"]["views"], card["request"]["validation"]) == (kind, 2, 71)
    assert (card["request"]["recipe"]["epochs"], card["request"]["recipe"]["reset"]) == (3, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head.json", "head.safetensors"]
    assert base.read_bytes() == before
    model = load_weights(SmallCNN(), base)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    load_head(model, out)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, kept[name])}
    assert changed == {"head.weight", "head.bias"}


def test_heads_say_how_large_sets_are(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "head.safetensors"
    code, text, err = run(
        capsys, "train", "rct", *ATTACK, *QUICK, "--keep-head", "--preset", "cifar100", "--weights", base, "--out", out
    )
    card = card_of(out)
    assert code == 0
    assert f"set size {card['history'][-1]['hard_size']:.3f}" in text
    assert str(out) in text
    assert "epoch 3/3" in err
    assert (card["request"]["preset"], card["loss"]["size_weight"], card["loss"]["temperature"]) == (
        "cifar100",
        0.01,
        1,
    )
    assert (card["request"]["recipe"]["reset"], card["request"]["recipe"]["lr"]) == (False, 0.005)


def test_the_whole_network_can_be_trained(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "whole.safetensors"
    card = as_json(capsys, "train", "rct", *ATTACK, *QUICK, "--whole", "--weights", base, "--out", out)
    assert (card["trains"], card["noise"], card["bank_seconds"]) == ("whole network", "fresh", 0.0)
    before, after = load_file(base), load_file(out)
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before)


def test_base_without_labels(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of images alone, judged by what the network said; labelled data, judged by their labels; any noise by its name."""
    images, out = tmp_path / "images.npz", tmp_path / "own.safetensors"
    np.savez(images, images=load_parts("digits")[0].images.numpy())
    words = ["train", "base", "--no-labels", "--weights", base, "--epochs", "3", "--batch-size", "64", "--out", out]
    card = as_json(capsys, *words, "--data", images, "--classes", "10", "--sigma", "0.5")
    assert card["dataset"] == "images, by the network's own word"
    assert card["teachers"] == ["itself, without noise"]
    assert card["top1_accuracy_one_noisy_draw_test"] > 0.3
    card = as_json(capsys, *words, "--noise", "gaussian:0.25")
    assert (card["dataset"], card["recipe"]["noise"]) == ("digits", "gaussian:0.25")
    line = refused(capsys, *words, "--data", f"digits+{images}", "--classes", "10", "--sigma", "0.5")
    assert "data without labels have no classes to join" in line
    assert "give --weights and --classes" in refused(capsys, *words, "--data", images, "--sigma", "0.5")
    assert "--sigma" in refused(capsys, *words)
    np.savez(images, images=load_parts("digits")[0].images[:20].expand(-1, 3, -1, -1).numpy())
    line = refused(capsys, *words, "--data", images, "--classes", "10", "--sigma", "0.5", "--restart")
    assert "cannot take images of shape (3, 8, 8)" in line


# -- kill -9 -----------------------------------------------------------------------------------------------------------


def test_killed_and_resumed_is_as_if_never_killed(own: Path) -> None:
    """SIGKILL twice, each time once a new checkpoint is there; then the bytes of an uninterrupted run.

    All in processes with the same threads: another number of them adds up in another order.
    """
    words = [*BASE, "--model", "own_nets:make", "--epochs", "30", "--checkpoint-seconds", "0"]
    source = Path(__file__).resolve().parents[2] / "src"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(own), str(source)]),
        "OMP_NUM_THREADS": "1",
        "KEEPCOVER_TEST_SLEEP": "0.04",
    }

    def whole(name: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "keepcover", *words, "--out", str(own / name)],
            capture_output=True,
            text=True,
            timeout=120,
            env={**environment, "KEEPCOVER_TEST_SLEEP": "0"},
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stderr

    whole("once.safetensors")
    checkpoint, seen = own / "killed.checkpoint.safetensors", b""
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-m", "keepcover", *words, "--out", str(own / "killed.safetensors")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        )
        deadline = time.monotonic() + 90
        while not checkpoint.is_file() or checkpoint.read_bytes() == seen:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert not (own / "killed.safetensors").exists()
        assert not (own / "killed.json").exists()
        seen = checkpoint.read_bytes()
    assert "going on after epoch" in whole("killed.safetensors")
    assert (own / "killed.safetensors").read_bytes() == (own / "once.safetensors").read_bytes()
    assert not checkpoint.exists()
    timed = ("seconds", "hardware")
    cards = [
        {name: value for name, value in card_of(own / f"{run_name}.safetensors").items() if name not in timed}
        for run_name in ("once", "killed")
    ]
    assert cards[0] == cards[1]


def test_restart_forgets_the_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = tmp_path / "model.checkpoint.safetensors"
    checkpoint.write_bytes(b"half a file")
    words = [*BASE, "--epochs", "1", "--out", tmp_path / "model.safetensors"]
    assert "not a readable checkpoint" in refused(capsys, *words)
    assert run(capsys, *words, "--restart")[0] == 0
    assert not checkpoint.exists()


# -- a network of one's own --------------------------------------------------------------------------------------------


def test_ones_own_network_trains_and_gets_a_head(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``package.module:function``: trained, then loaded by another function and given a last layer."""
    out = own / "mine.safetensors"
    card = as_json(capsys, *BASE, "--model", "own_nets:make", "--epochs", "10", "--batch-size", "64", "--out", out)
    assert card["architecture"] == "own_nets:make"
    assert card["top1_accuracy_one_noisy_draw_test"] > 0.5
    monkeypatch.setenv("KEEPCOVER_TEST_WEIGHTS", str(out))
    head = own / "head.safetensors"
    made = as_json(capsys, "train", "rct", *ATTACK, *QUICK, "--model", "own_nets:trained", "--out", head)
    assert made["base"] == "own_nets:trained"
    import own_nets  # pyright: ignore[reportMissingImports]

    load_head(own_nets.trained(), head)  # refused over any other backbone


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("own_nets:function", ["training needs a torch module", "own_nets:function", "function"]),
        ("own_nets:five", ["expected logits of shape (2, 10)", "got (2, 5)"]),
        ("own_nets:flat", ["Linear cannot take images of shape (1, 8, 8)"]),
        ("own_nets:none", ["cannot find", "own_nets:none"]),
        ("own_net", ["expected a model among", "small-cnn"]),
    ],
)
@pytest.mark.parametrize("command", [BASE, ["train", "rct", *ATTACK]], ids=["base", "rct"])
def test_networks_that_cannot_be_trained_are_refused(
    command: list[str], model: str, words: list[str], own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, *command, "--model", model, "--out", own / "out.safetensors")
    assert all(word in line for word in words), line
    assert not (own / "out.safetensors").exists()


@pytest.mark.parametrize("command", [BASE, ["train", "rct", *ATTACK]], ids=["base", "rct"])
def test_ones_own_function_loads_its_own_weights(
    command: list[str], own: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, *command, "--model", "own_nets:make", "--weights", base, "--out", own / "out.safetensors")
    assert "a function loads its own" in line


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--sigma", "-1"], ["sigma >= 0"]),
        (["--sigma", "nan"], ["sigma >= 0", "finite", "nan"]),
        (["--epochs", "0"], ["epochs >= 1"]),
        (["--lr", "nan"], ["lr > 0", "finite"]),
        (["--pad", "-1"], ["0 pixels or more", "-1"]),
        (["--batch-size", "2000"], ["one batch of 2000", "got 719", "make batches smaller"]),
        (["--teacher", "small-cnn"], ["small-cnn needs trained weights"]),
        (["--teacher", "mirrored:small-cnn="], ["small-cnn needs trained weights"]),
        (["--no-labels"], ["a trained network is needed", "give --weights"]),
        (["--data", "nowhere"], ["digits", "nowhere"]),
        (["--data", "cifar10"], ["--data-dir"]),
        (["--data", "digits+cifar10"], ["--data-dir"]),
        (["--data", "digits+nowhere"], ["digits", "nowhere"]),
        (["--data", "digits+"], ["joined by +", "'digits+'"]),
        (["--bits", "4"], ["8 or 16 bits", "4"]),
        (["--optimiser", "adam"], ["sgd, adamw, muon", "'adam'"]),
        (["--weights", "nowhere"], ["no weights at nowhere", "KEEPCOVER_WEIGHTS"]),
        (["--weights", "cifar10-resnet110-sigma0.25"], ["does not fit SmallCNN", "missing", "unknown"]),
        (["--device", "cuda:99"], ["cuda:99", "use cpu"]),
        (["--device", "abacus"], ["abacus", "use cpu"]),
        (["--out", "model.pt"], [".safetensors", "model.pt"]),
    ],
)
def test_bad_input_to_base_is_refused(
    options: list[str],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    line = refused(capsys, *BASE, "--epochs", "1", "--out", "out.safetensors", *options)
    assert all(word in line for word in words), line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--sigma", "0"], ["sigma > 0"]),
        (["--sigma", "inf"], ["finite sigma"]),
        (["--epsilon", "nan"], ["finite epsilon"]),
        (["--epsilon", "-1"], ["epsilon >= 0"]),
        (["--alpha", "1"], ["alpha in (0, 1)"]),
        (["--preset", "mnist"], ["preset among cifar10, cifar100", "mnist"]),
        (["--epochs", "0"], ["epochs >= 1"]),
        (["--lr", "inf"], ["lr > 0", "finite"]),
        (["--batch-size", "2000"], ["one batch of 2000", "got 648"]),
        (["--views", "0"], ["at least 1 view"]),
        (["--pad", "-1"], ["0 pixels or more"]),
        (["--validation", "-1"], ["validation images"]),
        (["--weights", "nowhere"], ["no weights at nowhere"]),
        (["--weights", "cifar10-resnet110-sigma0.25"], ["does not fit SmallCNN"]),
        (["--device", "abacus"], ["abacus", "use cpu"]),
        (["--out", "head.pt"], [".safetensors", "head.pt"]),
    ],
)
def test_bad_input_to_heads_is_refused(
    options: list[str],
    words: list[str],
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    line = refused(capsys, "train", "rct", *ATTACK, *QUICK, "--weights", base, "--out", "out.safetensors", *options)
    assert all(word in line for word in words), line
    assert not list(tmp_path.iterdir())


def test_a_head_needs_a_base_and_does_not_replace_it(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = base.read_bytes()
    line = refused(capsys, "train", "rct", *ATTACK, *QUICK, "--weights", base, "--out", base)
    assert "would replace the base weights" in line
    assert base.read_bytes() == before
    line = refused(capsys, "train", "exact", *ATTACK, "--out", base.with_name("head.safetensors"))
    assert "--weights" in line


@pytest.mark.parametrize("command", ["base", "rct", "conftr", "exact"])
def test_what_must_be_said_is_asked_for(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "Missing option" in refused(capsys, "train", command)
