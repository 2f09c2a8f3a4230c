"""Regression on the command line: a CSV file becomes a predictor, intervals, a page and an audit."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

from keepcover import InputError, KeepcoverWarning
from keepcover.data.table import read_csv
from tests.cli.runner import as_json, run

MODEL = """
import torch

class Prices(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(2, 1)
        torch.nn.init.ones_(self.line.weight)
        torch.nn.init.zeros_(self.line.bias)

    def forward(self, x):
        return self.line(x * torch.tensor([0.001, 1.0], dtype=x.dtype))
"""


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two features of different units, a column of words, and a row without a number; the target is not the last column."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prices_of.py").write_text(MODEL)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 2)) * [1000, 1]
    y = x @ [0.001, 1.0] + 0.1 * rng.normal(size=600)
    lines = ["area,rooms,price,town", *(f"{a},{b},{c},north" for (a, b), c in zip(x, y, strict=True))]
    (tmp_path / "homes.csv").write_text("\n".join([*lines, "1.0,,2.0,south", ""]))
    return tmp_path / "homes.csv"


@pytest.mark.filterwarnings("ignore:homes.csv")
def test_a_csv_file_from_calibration_to_audit(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = ["--model", "prices_of:Prices", "--data", table.name, "--target", "price"]
    options = ["--epsilon", "0.05", "--sigma", "0.1", "--draws", "8", "--seed", "1", "--out", "p.safetensors"]
    task = ["--task", "regression", "--score", "residual", "--input-scale", "std"]
    made = as_json(capsys, "calibrate", *data, "--part", "1/2", *options, *task)
    assert made["classes"] is None
    assert 0.2 < made["levels"][0]["estimated_size"] < 2
    assert "the mean length" in run(capsys, "calibrate", *data, "--part", "1/2", *options, *task)[1]
    new = ["p.safetensors", *data, "--part", "2/2", "--seed", "2"]
    found = as_json(capsys, "predict", *new)
    assert found["coverage"]["high"] > 0.9
    low, high = found["rows"][0]["intervals"][0]
    assert low < high
    run(capsys, "predict", *new, "--out", "rows.csv")
    assert next(csv.DictReader(Path("rows.csv").read_text().splitlines()))["intervals"].startswith("[")
    assert "regression" in run(capsys, "show", "p.safetensors")[1]
    audit = [
        "--predictor",
        "p.safetensors",
        *data,
        "--part",
        "2/2",
        "--images",
        "100",
        "--steps",
        "3",
        "--out",
        "audit",
    ]
    rows = as_json(capsys, "audit", *audit)["rows"]
    assert [(row["attack"], row["verdict"]) for row in rows] == [("none", "consistent"), ("margin", "consistent")]
    assert "Audit" in Path("audit/audit.html").read_text()


def test_outputs_in_a_file_are_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    truth = torch.randn(400)
    outputs = truth[:, None] + 0.3 * torch.randn(400, 1) + 0.1 * torch.randn(400, 8)
    np.savez(tmp_path / "outputs.npz", logits=outputs.numpy(), labels=truth.numpy())
    asked = ["--task", "regression", "--epsilon", "0.05", "--sigma", "0.1", "--splits", "3", "--holdout", "80"]
    found = as_json(capsys, "evaluate", tmp_path / "outputs.npz", *asked)
    rows = {row["method"]: row for row in found["rows"]}
    assert set(rows) == {"cp", "exact", "exact_asymmetric", "rcp1"}
    assert rows["exact"]["size"]["mean"] < rows["rcp1"]["size"]["mean"]


def test_what_a_table_may_hold(table: Path) -> None:
    with pytest.warns(KeepcoverWarning) as caught:
        x, y, names = read_csv(table, "price")
    assert (x.shape, y.shape, names) == ((600, 2), (600,), ("area", "rooms"))
    assert [("town" in str(one.message), "1 of 601" in str(one.message)) for one in caught] == [
        (True, False),
        (False, True),
    ]
    with pytest.raises(InputError, match="no numbers"):
        read_csv(table)
    with pytest.raises(InputError, match="among the columns area, rooms"):
        read_csv(table, "cost")
    with pytest.raises(InputError, match="CSV file"):
        read_csv(table.with_name("absent.csv"))
