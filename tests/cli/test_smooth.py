"""``keepcover smooth``: killed, resumed, damaged, out of space; and who reads its stores."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from keepcover.evaluation import evaluate
from keepcover.models import SmallCNN
from keepcover.noise.stream import Stream
from keepcover.store import LogitStore, read_logits
from tests.cli.runner import CLASSES, DRAWS, IMAGES, arguments, as_json, chunks, place, refused, run
from tests.toys import nearest, toy

__all__ = ["place"]  # a fixture


def content(path: Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones too."""
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def start(place: Path, words: Sequence[str], **environment: str) -> subprocess.Popen[str]:
    source = Path(__file__).resolve().parents[2] / "src"
    paths = os.pathsep.join([str(place), str(source)])
    return subprocess.Popen(
        [sys.executable, "-m", "keepcover", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment},
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # ignored by all that a shell runs in the background
    )


# -- kill -9 -----------------------------------------------------------------------------------------------------------


def test_killed_twice_and_resumed_is_as_if_never_killed(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SIGKILL once some chunks are there, twice; then the same files, byte for byte, as an uninterrupted run."""
    assert run(capsys, *arguments(place, "once"))[0] == 0
    whole = content(place / "once")
    total = len(chunks(place / "once"))
    assert total == 18
    survivors: dict[str, bytes] = {}
    for least in (2, 7):
        process = start(place, arguments(place, "killed"), KEEPCOVER_TEST_SLEEP="0.15")
        deadline = time.monotonic() + 90
        while len(chunks(place / "killed")) < least:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        found = chunks(place / "killed")
        assert least <= len(found) < total
        assert LogitStore.at(place / "killed").verify() == {}
        stored = {path.name: path.read_bytes() for path in found}
        assert stored.items() >= survivors.items()  # what was there is kept
        survivors = stored
    facts = as_json(capsys, *arguments(place, "killed"), "--resume")
    assert (facts["computed_chunks"], facts["reused_chunks"]) == (total - len(survivors), len(survivors))
    assert content(place / "killed") == whole


def test_ctrl_c_says_that_it_stopped(place: Path) -> None:
    process = start(place, arguments(place, "stopped"), KEEPCOVER_TEST_SLEEP="0.15")
    deadline = time.monotonic() + 90
    while not chunks(place / "stopped"):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.strip().splitlines()[-1] == "stopped"
    assert LogitStore.at(place / "stopped").verify() == {}


# -- a full disk -------------------------------------------------------------------------------------------------------


def test_a_full_disk_stops_it_and_the_store_goes_on_later(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The operating system refuses files above 500 bytes from the 12th pass on."""
    process = start(place, arguments(place), KEEPCOVER_TEST_FULL_AT="12")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, "")
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert "cannot write " in line
    assert "File too large" in line
    assert "run the same again" in line
    assert "Traceback" not in err
    there = chunks(place / "store")
    assert 0 < len(there) < 18
    assert not list(place.rglob("*.tmp"))
    store = LogitStore.at(place / "store")
    assert store.verify() == {}
    assert "what is stored there is intact" in line
    assert as_json(capsys, *arguments(place))["reused_chunks"] == len(there)
    assert run(capsys, *arguments(place, "once"))[0] == 0
    assert content(place / "store") == content(place / "once")


# -- what it says ------------------------------------------------------------------------------------------------------


def test_json_says_where_and_what(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = as_json(capsys, *arguments(place))
    assert set(facts) == {
        "store",
        "images",
        "draws",
        "classes",
        "chunks",
        "bytes",
        "key",
        "chunk_images",
        "chunk_draws",
        "computed_chunks",
        "reused_chunks",
        "damaged",
        "seconds",
        "noisy_images_per_second",
    }
    assert (facts["images"], facts["draws"], facts["classes"], facts["chunks"]) == (IMAGES, DRAWS, CLASSES, 18)
    assert facts["bytes"] == sum(path.stat().st_size for path in chunks(place / "store"))
    assert facts["noisy_images_per_second"] > 0
    assert Path(facts["store"]).parent == place / "store"
    assert (facts["key"]["noise"], facts["key"]["seed"], facts["key"]["device"]) == ("gaussian:0.25", 0, "cpu")
    logits, labels = read_logits(facts["store"])
    images, truth = toy(IMAGES)
    model = sys.modules["slow_models"].make()
    noisy = Stream(0, "test").noisy(images, torch.arange(IMAGES), range(DRAWS), 0.25)
    want = model(noisy.flatten(0, 1)).view(IMAGES, DRAWS, -1).detach()
    torch.testing.assert_close(logits.float(), want, rtol=2e-3, atol=2e-3)
    assert torch.equal(labels, truth)


def test_text_says_where_what_and_how_fast(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text, err = run(capsys, *arguments(place))
    assert (code, err) == (0, "")
    folder = next((place / "store").iterdir())
    lines = text.splitlines()
    assert lines[0] == f"store    {folder}"
    assert "60 images x 12 draws x 4 classes, float16" in lines[1]
    assert "18 chunks computed, 0 reused" in lines[2]
    assert lines[2].endswith("noisy images/s")
    assert lines[3] == f"next     keepcover evaluate {folder} --epsilon EPSILON"
    code, text, _ = run(capsys, *arguments(place))
    assert code == 0
    assert "nothing to do: all of it was there" in text


def test_a_finished_store_needs_no_pass(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = as_json(capsys, *arguments(place))
    before = content(place / "store")
    again = as_json(capsys, *arguments(place))
    assert (again["computed_chunks"], again["reused_chunks"], again["store"]) == (0, 18, first["store"])
    assert content(place / "store") == before
    more = as_json(capsys, *arguments(place, draws=20))
    assert (more["computed_chunks"], more["reused_chunks"], more["draws"]) == (12, 18, 20)
    fewer = as_json(capsys, *arguments(place, draws=4))
    assert (fewer["computed_chunks"], fewer["draws"]) == (0, 20)


def test_other_settings_get_their_own_store(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"sigma": 0.5},
        {"seed": 1},
        {"autocast": "bfloat16"},
        {"channels_last": True},
        {"images": 30},
    ]
    stores = [as_json(capsys, *arguments(place, draws=4, **change)) for change in changes]
    assert len({facts["store"] for facts in stores}) == len(changes)
    assert all(facts["reused_chunks"] == 0 for facts in stores)
    assert stores[-1]["images"] == 30
    first, part = LogitStore.at(stores[0]["store"]), LogitStore.at(stores[-1]["store"])
    assert torch.equal(first.read(slice(0, 30)), part.read())  # ids are positions: the same noise
    assert "holds several stores" in refused(capsys, "evaluate", place / "store", "--epsilon", "0.1")


def test_restart_begins_again(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    as_json(capsys, *arguments(place))
    before = content(place / "store")
    assert "was made with chunk_images 10" in refused(capsys, *arguments(place, chunk_images=20))
    again = as_json(capsys, *arguments(place, restart=True))
    assert (again["computed_chunks"], again["reused_chunks"]) == (18, 0)
    assert content(place / "store") == before
    assert as_json(capsys, *arguments(place, chunk_images=20, restart=True))["chunks"] == 9


# -- damage ------------------------------------------------------------------------------------------------------------


def test_a_damaged_chunk_is_named_and_computed_again(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, *arguments(place))[0] == 0
    before = content(place / "store")
    code, text, err = run(capsys, *arguments(place), "--verify")
    assert (code, err) == (0, "")
    assert "18 intact chunks, all checksums match" in text
    bad = chunks(place / "store")[4]
    honest = bad.read_bytes()
    bad.write_bytes(honest[:700] + bytes([honest[700] ^ 4]) + honest[701:])
    assert f"{bad.name} is damaged" in refused(capsys, "evaluate", bad.parent, "--epsilon", "0.1")
    code, text, err = run(capsys, *arguments(place), "--verify")
    assert code == 1
    assert f"damaged: {bad.name}: it does not match its checksum" in err
    assert "17 intact chunks, 1 damaged, 1 missing" in text
    code, text, _ = run(capsys, *arguments(place), "--verify", "--json")
    facts = json.loads(text)
    assert (code, facts["intact"], list(facts["damaged"]), facts["missing"]) == (1, False, [bad.name], [bad.name])
    assert bad.read_bytes() != honest  # looking changes nothing
    code, text, err = run(capsys, *arguments(place))
    assert code == 0
    assert f"damaged: {bad.name}: it does not match its checksum; computing it again" in err
    assert "1 chunk computed, 17 reused" in text
    assert content(place / "store") == before


# -- who reads it ------------------------------------------------------------------------------------------------------


def test_evaluate_and_plan_read_a_store(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = as_json(capsys, *arguments(place))
    ask = ["--epsilon", "0.05", "--splits", "2", "--holdout", "15", "--method", "exact", "rscp", "--alpha", "0.2"]
    rows = evaluate(
        *read_logits(facts["store"]),
        sigma=0.25,
        epsilon=0.05,
        splits=2,
        holdout=15,
        methods=["exact", "rscp"],
        alpha=0.2,
    )
    for where in (facts["store"], place / "store"):
        for sigma in ([], ["--sigma", "0.25"]):
            assert as_json(capsys, "evaluate", where, *ask, *sigma)["rows"] == [row.to_dict() for row in rows]
    code, text, _ = run(capsys, "evaluate", facts["store"], *ask)
    assert code == 0
    assert "sigma 0.25" in text
    assert "under Gaussian noise sigma 0.25, not Gaussian noise sigma 0.5" in refused(
        capsys, "evaluate", facts["store"], *ask, "--sigma", "0.5"
    )
    logits, labels = read_logits(facts["store"])
    save_file({"logits": logits, "labels": labels}, place / "file.safetensors")
    assert "expected --sigma" in refused(capsys, "evaluate", place / "file.safetensors", *ask)
    plan = ["plan", "--epsilon", "0.05", "--sigma", "0.25", "--draws", "4", "--calibration-draws", "8", "--holdout"]
    assert as_json(capsys, *plan, facts["store"]) == as_json(capsys, *plan, place / "file.safetensors")


def test_built_in_models_and_data(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    save_file(SmallCNN().state_dict(), place / "weights.safetensors")
    options = {"model": "small-cnn", "data": "digits", "images": 20, "draws": 2, "chunk_images": None}
    facts = as_json(capsys, *arguments(place, weights=place / "weights.safetensors", **options))
    assert (facts["images"], facts["classes"], facts["key"]["structure"].split("-")[0]) == (20, 10, "SmallCNN")
    assert "small-cnn needs trained weights: --weights FILE" in refused(capsys, *arguments(place, **options))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"images": 61}, "expected 1 to 60 images"),
        ({"images": 0}, "expected 1 to 60 images"),
        ({"draws": 0}, "at least 1 draw"),
        ({"sigma": -1}, "finite sigma >= 0"),
        ({"batch_size": 0}, "batch size of at least 1"),
        ({"chunk_images": 0}, "chunk_images of at least 1"),
        ({"chunk_draws": 0}, "chunk_draws of at least 1"),
        ({"seed": -1}, "non-negative integer"),
        ({"model": "slow_models:nothing"}, "cannot find"),
        ({"model": "slow_models:huge"}, "beyond the 65504 that float16 can hold"),
        ({"data": "nowhere.npz"}, "no file at"),
        ({"autocast": "float8"}, "float8"),
    ],
)
def test_bad_requests_are_one_line(
    change: dict[str, Any], match: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert match in refused(capsys, *arguments(place, **change))


def test_a_model_that_is_no_module_is_refused(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nearest()
    monkeypatch.setitem(sys.modules, "plain_models", type(sys)("plain_models"))
    sys.modules["plain_models"].make = lambda: lambda images: model(images)  # type: ignore[attr-defined]
    assert "has no fingerprint" in refused(capsys, *arguments(place, model="plain_models:make"))
