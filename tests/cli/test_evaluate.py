"""``keepcover evaluate``: JSON with a fixed schema, a table with the same numbers, bad logits refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from keepcover.evaluation import evaluate
from keepcover.methods import usable
from keepcover.noise import Gaussian
from keepcover.tasks import Classification
from tests.cli.runner import as_json, noisy_logits, refused, run

CONDITIONS = ["--sigma", "0.25", "--epsilon", "0.05"]
SMALL = [*CONDITIONS, "--splits", "2", "--holdout", "40"]
PLAN = ["plan", "--epsilon", "0.1", "--sigma", "0.2", "--draws", "4", "--calibration-draws", "8"]


ROW = {
    "method",
    "score",
    "transform",
    "certified",
    "alpha",
    "epsilon",
    "sigma",
    "noise",
    "norm",
    "draws",
    "calibration_draws",
    "splits",
    "size",
    "coverage",
    "trivial_splits",
    "worst_class",
    "attack",
}


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_evaluate_as_json_has_the_schema_and_the_numbers(
    suffix: str, logits_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    methods = ["--method", "exact", "rscp", "--method", "cp"]
    found = as_json(capsys, "evaluate", logits_file.with_suffix(suffix), *SMALL, *methods)
    assert set(found) == {"rows"}
    for row in found["rows"]:
        assert set(row) == ROW
        assert set(row["size"]) == set(row["coverage"]) == {"mean", "std"}
    expected = evaluate(
        *noisy_logits(), sigma=0.25, epsilon=0.05, methods=["exact", "rscp", "cp"], splits=2, holdout=40
    )
    assert found["rows"] == [row.to_dict() for row in expected]
    assert [(row["method"], row["transform"]) for row in found["rows"]] == [
        ("exact", "none"),
        ("rscp", "none"),
        ("rscp", "ptt"),
        ("cp", "none"),
    ]


def test_method_takes_several_words_or_repeats(logits_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spaced = as_json(capsys, "evaluate", logits_file, *SMALL, "--method", "cp", "rcp1", "rscp")
    repeated = as_json(
        capsys, "evaluate", logits_file, *SMALL, "--method", "cp", "--method", "rcp1", "--method", "rscp"
    )
    first = as_json(capsys, "evaluate", "--method", "cp", "rcp1", "rscp", *SMALL, logits_file)
    assert spaced == repeated == first


def test_all_methods_are_the_default(logits_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fast = [*CONDITIONS, "--splits", "1", "--holdout", "40", "--draws", "2", "--calibration-draws", "2"]
    plain = as_json(capsys, "evaluate", logits_file, *fast)
    assert list(dict.fromkeys(row["method"] for row in plain["rows"])) == usable(Gaussian(0.1), Classification())
    assert as_json(capsys, "evaluate", logits_file, *fast, "--method", "all") == plain
    assert {(row["draws"], row["calibration_draws"]) for row in plain["rows"]} == {(1, 1), (2, 2)}


def test_options_of_evaluate_reach_the_evaluation(logits_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "--method",
        "exact",
        "--score",
        "aps",
        "--alpha",
        "0.2",
        "--draws",
        "4",
        "--calibration-draws",
        "8",
        "--seed",
        "3",
        "--redraw-holdout",
        "--transform",
        "none",
    ]
    found = as_json(capsys, "evaluate", logits_file, *SMALL, *options)
    expected = evaluate(
        *noisy_logits(),
        sigma=0.25,
        epsilon=0.05,
        alpha=0.2,
        score="aps",
        methods=["exact"],
        transforms=("none",),
        draws=4,
        calibration_draws=8,
        splits=2,
        holdout=40,
        redraw_holdout=True,
        seed=3,
    )
    assert found["rows"] == [row.to_dict() for row in expected]


def test_evaluate_as_text_has_the_same_numbers(logits_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "evaluate", logits_file, *SMALL, "--method", "exact")
    assert (code, err) == (0, "")
    (row,) = evaluate(*noisy_logits(), sigma=0.25, epsilon=0.05, methods=["exact"], splits=2, holdout=40)
    line = next(line for line in out.splitlines() if line.strip().startswith("exact"))
    assert str(row.size) in line
    assert str(row.coverage) in line
    assert f"{row.trivial_splits}/2" in line
    assert "noisy.safetensors" in out


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (["--method", "magic"], "method among auto, cp, "),
        (["--method", "exact", "--alpha", "1.5"], "alpha strictly between 0 and 1"),
        (["--method", "exact", "--epsilon", "-1"], "epsilon >= 0"),
        (["--method", "exact", "--sigma", "0"], "there is none; give sigma > 0"),
        (["--method", "rscp_plus_hoeffding", "--beta", "0.05"], "spend all of alpha"),
        (["--method", "exact", "--draws", "9"], "asked for 9 draws, there are 8"),
        (["--method", "exact", "--draws", "0"], "ask for 1 to 8"),
        (["--method", "exact", "--calibration-draws", "0"], "ask for 1 to 8"),
        (["--splits", "0"], "at least one split"),
        (["--holdout", "199"], "holdout of 1 to 198 of the 200 points"),
        (["--holdout", "0"], "holdout of 1 to 198"),
        (["--score", "magic"], "--score"),
        (["--transform", "magic"], "--transform"),
    ],
)
def test_bad_evaluations_are_refused(
    changes: list[str], match: str, logits_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert match in refused(capsys, "evaluate", logits_file, *SMALL, *changes)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"logits": torch.zeros(20, 4)}, "[images, draws, classes]"),
        ({"logits": torch.zeros(20, 3, 4).long()}, "float noisy outputs"),
        ({"logits": torch.full((20, 3, 4), torch.nan)}, "NaN or infinity, first at point 0"),
        ({"labels": torch.full((20,), 4)}, "labels between 0 and 3"),
        ({"labels": torch.zeros(20)}, "integer class labels"),
        ({"labels": torch.zeros(19).long()}, "expected 20 labels"),
    ],
)
def test_bad_logits_are_refused(
    change: dict[str, Tensor], match: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.safetensors"
    save_file({"logits": torch.zeros(20, 3, 4), "labels": torch.zeros(20).long(), **change}, path)
    assert match in refused(capsys, *PLAN, "--holdout", path)


@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04garbage"])
@pytest.mark.parametrize("name", ["x.safetensors", "x.npz", "x.txt"])
def test_files_that_are_none_are_refused(
    name: str, content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    assert "not a readable safetensors or npz file" in refused(capsys, "evaluate", tmp_path / name, *SMALL)
    assert "no file at" in refused(capsys, "evaluate", tmp_path / "nothing.npz", *SMALL)
