"""Promises from the command line: what is asked for is what is promised, by every command that makes or shows a promise."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from keepcover import Promise, load
from keepcover.cli import console as ui
from tests.cli.runner import as_json, refused, run
from tests.toys import nearest, toy

LEVEL = ["--sigma", "0.15", "--epsilon", "0.05", "--draws", "4", "--calibration-draws", "8", "--seed", "1"]
CLAUSES = ["--delta", "0.1", "--per", "class", "--poisoned", "2", "--calibration-epsilon", "0.02", "--drift", "0.01"]


def make_nearest() -> nn.Module:
    return nearest()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Data with the hospital of every point in a file beside them, and logits."""
    monkeypatch.setitem(sys.modules, "own", sys.modules[__name__])
    for name, n, seed in (("data", 600, 1), ("new", 60, 2)):
        images, labels = toy(n, seed=seed)
        np.savez(tmp_path / f"{name}.npz", images=images.numpy(), labels=labels.numpy())
        (tmp_path / f"{name}.txt").write_text("".join(f"hospital {i % 2}\n" for i in range(n)))
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(400) % 4
    logits = 4 * nn.functional.one_hot(labels, 4)[:, None] + 2 * torch.randn(400, 8, 4, generator=generator)
    np.savez(tmp_path / "logits.npz", logits=logits.numpy(), labels=labels.numpy())
    (tmp_path / "sites.txt").write_text("".join(f"site {i % 3}\n" for i in range(400)))
    return tmp_path


def saved(place: Path, capsys: pytest.CaptureFixture[str], *options: str, alpha: str = "0.2") -> Path:
    model = ["--model", "own:make_nearest", "--data", str(place / "data.npz"), "--alpha", alpha]
    code, _, err = run(capsys, "calibrate", "--out", place / "made.safetensors", *model, *LEVEL, *options)
    assert code == 0, err
    return place / "made.safetensors"


def test_every_clause_is_kept_from_calibrate_to_the_file(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = load(saved(place, capsys, *CLAUSES), nearest())
    expected = Promise(delta=0.1, per="class", poisoned=2, calibration_epsilon=0.02, drift=0.01)
    assert made.rule.asked.promise == expected
    assert tuple(made.threshold.shape) == (4,)
    for words in (
        "With confidence 90 % over the calibration data for each class on its own, with probability at least 80 % for every true",
        "even if up to 2 calibration points were replaced, added or removed",
        "even if every calibration input was moved by up to 0.02 in that norm too",
        "drifted by up to 0.01 in total variation",
    ):
        assert words in str(made.guarantee)
    clustered = load(saved(place, capsys, "--per", "class", "--clusters", "auto"), nearest())
    assert clustered.rule.asked.promise.config()["clusters"] != "auto"
    shifted = load(saved(place, capsys, "--label-weights", "1,1,0.5,2"), nearest())
    assert shifted.rule.asked.promise == Promise(label_weights=(1, 1, 0.5, 2))


def test_groups_come_from_files_at_calibration_prediction_and_in_the_report(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = saved(place, capsys, "--per", str(place / "data.txt"))
    query = ["--model", "own:make_nearest", "--data", str(place / "new.npz")]
    assert "give groups=, one per query" in refused(capsys, "predict", made, *query)
    rows = as_json(capsys, "predict", made, *query, "--groups", place / "new.txt", "--seed", "0")
    expected = load(made, nearest()).predict(
        toy(60, seed=2)[0], groups=[f"hospital {i % 2}" for i in range(60)], seed=0
    )
    assert [row["size"] for row in rows["rows"]] == expected.size.tolist()
    (place / "new.txt").write_text("hospital 1\n" * 59 + "hospital 9\n")
    assert "the group 'hospital 9' was not among" in refused(
        capsys, "predict", made, *query, "--groups", place / "new.txt"
    )
    code, *_ = run(capsys, "predict", made, *query, "--groups", place / "new.txt", "--unknown", "widest")
    assert code == 0
    found = as_json(
        capsys,
        "report",
        made,
        *query,
        "--groups",
        place / "new.txt",
        "--unknown",
        "widest",
        "--out",
        place / "page.html",
    )
    assert set(found["evaluation"]["by_group"]) == {"hospital 1", "hospital 9"}
    assert "Coverage by group" in (place / "page.html").read_text()


def test_evaluate_shows_the_promise_beside_the_marginal_one(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = ["evaluate", place / "logits.npz", "--sigma", "0.25", "--epsilon", "0.1", "--splits", "2", "--holdout", "60"]
    rows = as_json(capsys, *base, "--method", "rcp1", "--per", place / "sites.txt", "--delta", "0.1")["rows"]
    assert [row.get("promise") for row in rows] == [
        None,
        {"delta": 0.1, "per": {"groups": ["site 0", "site 1", "site 2"]}},
    ]
    assert all({"worst_class", "worst_group"} <= set(row) for row in rows)
    monkeypatch.setattr(ui.out, "width", 200)
    code, out, _ = run(capsys, *base, "--method", "rcp1", "--per", place / "sites.txt", "--delta", "0.1")
    assert code == 0
    lines = [line.split() for line in out.splitlines() if "rcp1" in line]
    assert lines[0][0] == "marginal"
    assert "+0.0%" in lines[0]
    assert lines[1][:4] == ["delta", "0.1,", "per", "group"]
    assert "does not offer delta" in refused(capsys, *base, "--method", "rscp", "--delta", "0.1")


def test_plan_says_how_many_points_each_class_needs(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["plan", "--epsilon", "0.125", "--sigma", "0.25", "--draws", "4", "--n", "5000"]
    needed = [
        {row["method"]: row["least"] for row in as_json(capsys, *base, *more)["plans"]}["rcp1"]
        for more in ([], ["--per", "class"], ["--delta", "0.05"], ["--poisoned", "7"], ["--drift", "0.02"])
    ]
    marginal, per_class, confident, poisoned, drifted = needed
    # rcp1 at alpha': the smallest n with ceil((n + 1)(1 - alpha')) <= n, and what the clauses add to it
    assert per_class == marginal
    assert confident > 2 * marginal
    assert poisoned > marginal + 7
    assert drifted > marginal
    code, out, _ = run(capsys, *base, "--per", "class")
    assert code == 0
    assert "points needed per class" in out


def test_what_does_not_hold_together_is_refused_before_anything_runs(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--model", "own:make_nearest", "--data", place / "data.npz"]
    base = ["calibrate", "--out", place / "x.safetensors", *model, *LEVEL]
    (place / "latin.txt").write_bytes(b"caf\xe9\n" * 600)
    (place / "gaps.txt").write_text("a\nb\n \n" * 200)
    for options, words in (
        (["--label-weights", "1,1,1,1", "--poisoned", "1"], "label_weights and poisoned do not hold together"),
        (["--label-weights", "1,1,1"], "expected 4 label_weights, one per class, got 3"),
        (["--clusters", "auto"], "the promise must be per class; say per='class' too"),
        (["--per", place / "data.txt", "--clusters", "auto"], "the promise must be per class"),
        (["--per", place / "latin.txt"], "expected one group per line in UTF-8"),
        (["--per", place / "gaps.txt"], "line 3 is empty"),
        (["--per", "nowhere.txt"], "expected a text file with one group per line"),
        (["--per", place / "new.txt"], "expected the group of each of 600 points"),
        (["--delta", "1.5"], "expected delta strictly between 0 and 1"),
        (["--drift", "0.1"], "the promise and the method spend all of alpha"),
        (["--poisoned", "100"], "at least 1009 are needed"),
    ):
        assert words in refused(capsys, *base, *options)
        assert not (place / "x.safetensors").exists()
    audited = ["audit", "--model", "own:make_nearest", "--data", place / "data.npz", "--per", place / "data.txt"]
    assert "audited in Python" in refused(capsys, *audited)
    page = ["explore", "--per", place / "data.txt"]
    assert "images on the page have none" in refused(capsys, *page)
