"""``keepcover demo``: the table, the page and the file have the same numbers."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from keepcover import demo
from keepcover.demo import Entry
from keepcover.methods import RCP1, Exact, SplitCP
from tests.cli.runner import run
from tests.pages.reader import offline, parsed

SHORT = (Entry("vanilla CP", SplitCP(), 1, sigma=0.0), Entry("RCP1", RCP1(), 1), Entry("exact, 8 draws", Exact(), 8))


def test_the_demo_ends_with_a_table_a_page_a_file_and_a_predictor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "run_demo", partial(demo.run_demo, entries=SHORT, attacked=8, epochs=3))
    out = tmp_path / "demo"
    code, text, _ = run(capsys, "demo", "--out", out, "--seed", "1")
    assert code == 0
    assert sorted(path.name for path in out.iterdir()) == ["predictor.safetensors", "report.html", "results.json"]
    page = (out / "report.html").read_text()
    offline(page)
    rows = json.loads((out / "results.json").read_text())["rows"]
    assert [row["name"] for row in rows] == [entry.name for entry in SHORT]
    shown = {cells[0]: cells for cells in reversed(parsed(page).rows)}
    for row in rows:
        coverage = f"{row['coverage']['mean']:.3f} [{row['coverage']['low']:.3f}, {row['coverage']['high']:.3f}]"
        assert coverage in shown[row["name"]]
        assert any(row["name"] in line and coverage in line and row["verdict"] in line for line in text.splitlines())
    assert str(out / "report.html") in text
