"""``keepcover demo``: a page, a file of numbers and a predictor that loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from keepcover.demo import demo, report
from keepcover.demo.demo import Entry
from keepcover.methods import RCP1, Exact, SplitCP
from keepcover.models import SmallCNN
from keepcover.prediction.artifact import load
from tests.cli.runner import run
from tests.pages.reader import offline, parsed


@pytest.fixture
def short_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three lines, few draws, few attacked images."""
    entries = (
        Entry("vanilla CP", SplitCP(), 1, sigma=0.0),
        Entry("RCP1", RCP1(), 1),
        Entry("exact, 16 draws", Exact(), 8),
    )
    fit = demo.fit_under_noise
    monkeypatch.setattr(
        demo, "fit_under_noise", lambda *data, epochs, **options: fit(*data, epochs=min(epochs, 15), **options)
    )
    monkeypatch.setattr(demo, "ENTRIES", entries)
    for module in (demo, report):
        monkeypatch.setattr(module, "ATTACKED", 20)


@pytest.mark.usefixtures("short_demo")
def test_the_demo_ends_with_a_page_a_file_and_a_predictor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    out = tmp_path / "demo"
    code, text, _ = run(capsys, "demo", "--out", out, "--seed", "1")
    assert code == 0
    assert torch.get_num_threads() == threads
    assert sorted(path.name for path in out.iterdir()) == ["predictor.safetensors", "report.html", "results.json"]
    page = (out / "report.html").read_text()
    offline(page)
    results = json.loads((out / "results.json").read_text())
    assert [row["name"] for row in results["rows"]] == ["vanilla CP", "RCP1", "exact, 16 draws"]
    assert results["audit"]["images"] == 20
    for row in results["rows"]:
        assert row["coverage"]["count"] == 500
        assert row["attacked_coverage"]["count"] == 20
        assert any(row["name"] in line and f"{row['coverage']['mean']:.3f}" in line for line in text.splitlines())
        assert any(cells[0] == row["name"] for cells in parsed(page).rows)
    assert str(out / "report.html") in text.replace("\n", "")
    with pytest.raises(Exception, match="the model differs from the one calibrated"):
        load(out / "predictor.safetensors", SmallCNN())  # the file is whole: only the weights are missing


@pytest.mark.usefixtures("short_demo")
def test_the_demos_predictor_loads_with_its_model_and_says_the_same(tmp_path: Path) -> None:
    result = demo.run_demo(2, say=lambda text: None)
    page = report.write_report(result, tmp_path)
    assert page == tmp_path / "report.html"
    original, loaded = result.predictors["exact, 16 draws"], load(tmp_path / "predictor.safetensors", result.model)
    images = result.data.images[:50]
    for key, sets in original.predict_all(images, seed=1).items():
        assert torch.equal(loaded.predict_all(images, seed=1)[key].mask, sets.mask)
    assert str(loaded.guarantee) in page.read_text()
    assert result.to_dict()["rows"] == json.loads((tmp_path / "results.json").read_text())["rows"]
