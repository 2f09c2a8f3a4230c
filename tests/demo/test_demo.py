"""The demo end to end on three lines: its numbers, its page, and a predictor that loads and says the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from keepcover.demo import ENTRIES, EPSILON, DemoResult, Entry, run_demo, write_report
from keepcover.errors import InputError
from keepcover.methods import RCP1, Exact, SplitCP
from keepcover.models import SmallCNN
from keepcover.prediction.artifact import load

SHORT = (Entry("vanilla CP", SplitCP(), 1, sigma=0.0), Entry("RCP1", RCP1(), 1), Entry("exact, 8 draws", Exact(), 8))


@pytest.fixture(scope="module")
def result() -> DemoResult:
    threads = torch.get_num_threads()
    said: list[str] = []
    made = run_demo(2, said.append, SHORT, attacked=20, epochs=15)
    assert torch.get_num_threads() == threads
    assert said[0].startswith("training a small CNN on 697 digits")
    assert said[-1].startswith("attacking 20 test images")
    return made


def test_every_line_is_measured_clean_and_attacked(result: DemoResult) -> None:
    rows = result.rows()
    assert [row["name"] for row in rows] == [entry.name for entry in SHORT]
    assert len(result.audit.images) == 20
    for row, predictor in zip(rows, result.predictors.values(), strict=True):
        assert row["coverage"]["count"] == 500
        assert row["attacked_coverage"]["count"] == 20
        sets = predictor.predict(result.audit.images, seed=5)
        worst = min(
            (r for r in result.audit.rows if r.name == row["name"] and r.attack != "none"),
            key=lambda r: r.coverage["mean"],
        )
        assert (row["attack"], row["attacked_size"]) == (worst.attack, worst.size)
        assert sets.guarantee.epsilon == EPSILON == worst.radius
    vanilla, *certified = rows
    assert vanilla["verdict"].startswith("no promise")
    assert all(row["verdict"] == "consistent" for row in certified)
    assert vanilla["attacked_coverage"]["mean"] < vanilla["coverage"]["mean"]


def test_sizes_grow_with_the_radius(result: DemoResult) -> None:
    for name, curve in result.curves.items():
        sizes = [size for _, size in sorted(curve)]
        assert sizes == sorted(sizes)
        assert (sizes[-1] > sizes[0]) == (name != "vanilla CP")


def test_the_page_and_the_predictor(result: DemoResult, tmp_path: Path) -> None:
    page = write_report(result, tmp_path)
    assert page == tmp_path / "report.html"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["predictor.safetensors", "report.html", "results.json"]
    loaded, images = load(tmp_path / "predictor.safetensors", result.model), result.data.images[:50]
    again = loaded.predict_all(images, seed=1)
    for key, sets in result.best.predict_all(images, seed=1).items():
        assert torch.equal(again[key].mask, sets.mask)
    text = page.read_text()
    assert str(loaded.guarantee) in text
    assert all(entry.name in text for entry in SHORT)
    assert result.to_dict()["rows"] == json.loads((tmp_path / "results.json").read_text())["rows"]
    with pytest.raises(InputError, match="the model differs from the one calibrated"):
        load(tmp_path / "predictor.safetensors", SmallCNN())  # the file is whole: only the weights are missing


def test_the_full_demo_shows_every_kind_of_method() -> None:
    names = {entry.method.name for entry in ENTRIES}
    assert {"cp", "cp_smoothed", "rscp", "rscp_plus_hoeffding", "bincp", "cas", "rcp1", "exact", "auto"} <= names
    assert ENTRIES[-1].name == "exact, 16 draws"
