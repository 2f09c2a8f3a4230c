"""The benchmark scripts run, their rows can be read, and what they compare is the same mathematics. Times are not judged."""

from __future__ import annotations

import json
import math
import os
import runpy
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from benchmarks import pretrained, promises, published, threats, timing
from benchmarks.material import FourScores, logits_like_a_network
from benchmarks.run import MEASUREMENTS
from benchmarks.table import HEAD, as_markdown, as_text, cells
from keepcover.data import Labelled
from keepcover.evaluation.random_splits import random_splits
from keepcover.methods import get_method
from keepcover.noise import Gaussian, Stream
from tests.toys import nearest, toy

ROOT = Path(__file__).resolve().parents[2]
# Ray starts a cluster: its own target runs it.
ON_A_CPU = [name for name in MEASUREMENTS if name != "ray"]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Every measurement on tiny sizes, as a user runs it."""
    out = tmp_path_factory.mktemp("benchmarks")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "benchmarks/run.py", *ON_A_CPU, "--quick", "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out, done.stdout


def rows_of(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["rows"]


@pytest.mark.bench
@pytest.mark.parametrize("name", ON_A_CPU)
def test_a_quick_run_writes_rows_that_add_up(quick: tuple[Path, str], name: str) -> None:
    out, said = quick
    path = out / f"{name}-cpu.json"
    if f"{name}: skipped" in said:
        assert not path.exists()
        pytest.skip(next(line for line in said.splitlines() if line.startswith(f"{name}: skipped")))
    content = json.loads(path.read_text())
    assert content["manifest"]["config"]["quick"] is True
    assert content["manifest"]["hardware"]["threads"] >= 1
    assert content["rows"]
    for row in content["rows"]:
        assert row["name"]
        assert row["sizes"]
        assert math.isfinite(row["seconds"])
        assert row["seconds"] > 0
        if row["baseline"] is None:
            assert row["ratio"] is None
        else:
            low, high = row["spread"]
            assert 0 < low <= row["ratio"] <= high < math.inf
            assert row["baseline_seconds"] > 0
        assert len(cells(row)) == len(HEAD)
        assert row["name"] in said


@pytest.mark.bench
def test_what_is_compared_gives_the_same_sets(quick: tuple[Path, str]) -> None:
    for name in ("mapie", "early_exit"):
        path = quick[0] / f"{name}-cpu.json"
        for row in rows_of(path) if path.exists() else []:
            assert row["labels_decided_otherwise"] == 0


def test_the_published_pipeline_computes_our_statistics() -> None:
    assert published.largest_difference() < 1e-12
    assert published.largest_difference(images=3, draws=8, classes=40) < 1e-12


def test_the_published_pipelines_noise_is_keyed_by_the_image_alone() -> None:
    pipeline = published.Published(torch.nn.Flatten(), {})
    images = torch.zeros(3, 1, 2, 2)
    together = pipeline.logits(images, range(3), 5).reshape(3, 5, 4)
    assert np.array_equal(together[1], pipeline.logits(images[1:2], [1], 5))
    assert abs(together.std() / 0.25 - 1) < 0.5


def test_the_published_bound_is_bernsteins() -> None:
    logits, labels = logits_like_a_network(50, 4, 3)
    ours = FourScores.fitted(logits.double(), labels, Stream(0, "test"))
    _, variance, bound = published.rendered(torch.nn.Identity(), published.holdout_scores(ours)).statistics(
        logits.flatten(0, 1).double().numpy(), np.full(50, 0.5), 4
    )["HPS"]
    log = math.log(2 / 0.001)
    assert np.allclose(bound, np.sqrt(2 * variance * log / 4) + 7 * log / 9)


@pytest.mark.parametrize("exponent", [0.0, 1.0, 1.7])
def test_a_planted_exponent_is_found(exponent: float) -> None:
    sizes = [2.0**k for k in range(4, 12) for _ in range(3)]
    noise = np.random.default_rng(0).normal(scale=0.05, size=len(sizes))
    found = timing.fit_exponent(sizes, [3e-4 * size**exponent * math.exp(e) for size, e in zip(sizes, noise)])
    assert found.low <= exponent <= found.high
    assert found.high - found.low < 0.1


def test_an_exponent_needs_three_sizes() -> None:
    with pytest.raises(ValueError, match="three sizes"):
        timing.fit_exponent([1.0, 2.0, 2.0], [1.0, 2.0, 2.1])


def test_both_sides_run_in_turn_and_warm_ups_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    clock = iter(range(100))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(clock)))
    times = timing.in_turn({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, repeats=3, warm_up=1)
    assert "".join(order) == "abababab"
    assert times == {"a": [1.0] * 3, "b": [1.0] * 3}


def test_a_ratio_is_of_neighbours_per_unit_of_work() -> None:
    # Neighbours say 2, 4 and 1; the ratio of the medians would be 4.
    row = timing.beside("a", [2.0, 8.0, 9.0], "b", [1.0, 2.0, 9.0], {"n": 1})
    assert (row["ratio"], row["spread"]) == (2.0, [1.0, 4.0])
    row = timing.beside("a", [4.0, 8.0, 16.0], "b", [1.0, 2.0, 4.0], {"n": 1}, work=10, other_work=5)
    assert (row["ratio"], row["seconds"], row["baseline_seconds"]) == pytest.approx((2.0, 0.8, 0.4))
    faster = timing.beside("a", [1.0], "b", [10.0], {"n": 1}, inverse=True)
    assert faster["ratio"] == pytest.approx(10.0)
    assert "10x faster" in as_text([faster])


def test_goals_are_judged() -> None:
    row = timing.beside("a", [2.0], "b", [1.0], {"n": 1})
    assert timing.goal(row, at_most=2)["met"]
    assert not timing.goal(row, at_most=1.9)["met"]
    assert not timing.goal(row, at_least=2.1)["met"]
    assert "seconds <= 1: missed" in as_markdown([timing.goal(row, at_most=1, of="seconds")])


def test_kept_results_can_be_shown() -> None:
    for path in (ROOT / "results" / "benchmarks").glob("*.json"):
        assert path.stem.rsplit("-", 1)[0] in MEASUREMENTS
        assert as_markdown(rows_of(path)).count("\n") == len(rows_of(path)) + 1


# -- what help is worth ------------------------------------------------------------------------------------------------


def test_an_ordinary_network_is_judged_at_two_sigmas() -> None:
    """At 2 epsilon, and at the sigma whose sets are smallest on the holdout; labels of other points do not move the choice."""
    images, labels = toy(160, seed=4)
    data = Labelled("toy", images, labels, ("a", "b", "c", "d"))
    held = next(random_splits(160, 1, 60, seed=0)).holdout
    moved = (labels + 1) % 4
    moved[held] = labels[held]
    asked: list[float] = []

    def make(sigma: float) -> torch.nn.Module:
        asked.append(sigma)
        return nearest()

    fixed, chosen = pretrained.rows_of("alone", make, data, 0.1, splits=2, holdout=60)
    _, other = pretrained.rows_of("alone", make, replace(data, labels=moved), 0.1, splits=2, holdout=60)
    assert asked[:2] == [0.2, 0.1]
    assert (fixed["way"], fixed["sigma"], fixed["splits"]) == ("2 epsilon", 0.2, 2)
    assert chosen["size"]["mean"] <= fixed["size"]["mean"] + 0.1
    assert chosen["sigma"] == other["sigma"] != 0.2
    assert other["size"]["mean"] > chosen["size"]["mean"] + 1  # though their sets are others


@pytest.mark.parametrize(("model", "wanted"), [("wrn-10-1", 0.03 * 128 / 512), ("cifar-resnet20", 0.1 * 128 / 256)])
def test_a_rate_is_in_proportion_to_the_batch_of_any_network(model: str, wanted: float) -> None:
    options = Namespace(model=model, batch_size=128)
    assert threats.recipe_for(Gaussian(0.25), options)["lr"] == pytest.approx(wanted)


@pytest.mark.bench
def test_threats_are_trained_for_evaluated_attacked_and_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (160,), generator=generator)
    images = torch.rand(160, 3, 32, 32, generator=generator) * 0.3 + labels[:, None, None, None] / 15
    names = tuple(f"class {k}" for k in range(10))
    monkeypatch.setattr(threats, "cifar", lambda *_: Labelled("cifar10", images, labels, names))
    monkeypatch.setattr(threats, "DRAWS", (1, 4))
    words = [
        "--data",
        "unused",
        "--case",
        "ablation",
        "bands",
        "--model",
        "wrn-10-1",
        "--minutes",
        "0.01",
        "--device",
        "cpu",
    ]
    words += ["--batch-size", "32", "--images", "4", "--steps", "1", "--splits", "2", "--holdout", "40"]
    words += ["--weights", str(tmp_path / "weights"), "--out", str(tmp_path / "out")]
    threats.main(words)
    for case, architecture in (("ablation", "masked:wrn-10-1"), ("bands", "band4:wrn-10-1")):
        for kind in ("evaluated", "attacked"):
            found = json.loads((tmp_path / "out" / f"{case}-{kind}.json").read_text())
            assert found["manifest"]["config"]["network"]["architecture"] == architecture
            assert found["manifest"]["config"]["network"]["epochs"] >= 1
            asked = {*threats.CASES[case].epsilons, *([0.0] if kind == "evaluated" else [])}
            assert {row["epsilon"] for row in found["rows"]} == asked
        verdicts = {row["verdict"] for row in found["rows"] if row["attack"] != "none"}
        assert verdicts == {"consistent"}
    capsys.readouterr()
    threats.main(words)  # nothing is computed again
    assert capsys.readouterr().out == ""
    given = f"masked:wrn-10-1={tmp_path}/weights/cifar10-wrn-10-1-ablation.safetensors"
    threats.main([*words[:2], *words[9:], "--case", "uniform", "--kind", "evaluated", "--given", given])
    found = json.loads((tmp_path / "out" / "uniform-evaluated.json").read_text())
    network = found["manifest"]["config"]["network"]
    assert network["trained_under"] == "ablation:75"  # nothing is trained anew, and the result says so
    assert {row["noise"] for row in found["rows"]} == {"uniform"}
    assert len(list((tmp_path / "weights").glob("*.safetensors"))) == 2


@pytest.mark.bench
def test_the_cost_of_promises_is_beside_the_marginal_one_and_becomes_a_table(tmp_path: Path) -> None:
    generator, labels = torch.Generator().manual_seed(0), torch.arange(420) % 3
    logits = 3 * torch.nn.functional.one_hot(labels, 3)[:, None] + torch.randn(420, 8, 3, generator=generator)
    (tmp_path / "store").mkdir()
    for part in (slice(0, 200), slice(200, 420)):  # a store that is not full is read as far as it is
        chunk = tmp_path / "store" / f"images-{part.start:08d}-{part.stop:08d}.draws-000000-000008.safetensors"
        save_file({"logits": logits[part].half(), "labels": labels[part]}, chunk)
    out = tmp_path / "promises.json"
    asked = ["--splits", "2", "--holdout", "60", "--draws", "4", "--calibration", "150", "40"]
    promises.main(["--logits", str(tmp_path / "store"), "--out", str(out), *asked])
    rows, about = rows_of(out), json.loads(out.read_text())["manifest"]
    assert about["config"]["images"] == 420
    assert str(tmp_path) not in out.read_text()
    for method in ("auto", "cp"):
        for n in (150, 40):
            mine = [row for row in rows if (row["asked"], row["calibration"]) == (method, n)]
            offered = [promise for promise in promises.PROMISES if not get_method(method).refuses(promise)]
            assert [row["name"] for row in mine] == [promise.short for promise in offered]
            for row, promise in zip(mine, offered, strict=True):
                needed = promise.points_needed(promise.level(0.1))
                assert row.get("needs") == (needed if needed > n else None)
                if "needs" not in row:
                    assert row["cost"] == pytest.approx(row["size"]["mean"] / mine[0]["size"]["mean"] - 1)
                    assert 0 <= row["classes_below"] <= 3
    found = runpy.run_path(str(ROOT / "docs" / "tools" / "promises.py"))
    text = found["cifar10"](out)
    assert "needs 2009 points" in text
    assert text.count("| marginal |") == 2
