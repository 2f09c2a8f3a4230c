"""The page of an evaluation over splits: its numbers are those of the rows, and its splits are counted right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from keepcover.errors import InputError
from keepcover.evaluation import Row, evaluate
from keepcover.evaluation.random_splits import random_splits
from keepcover.pages.evaluation_page import evaluation_page
from keepcover.promises import Promise
from keepcover.tasks import Spread
from tests.cli.runner import as_json, refused, run
from tests.pages.reader import offline, parsed

K, N = 5, 200


def noisy(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, K, (N,), generator=generator)
    return 3 * nn.functional.one_hot(labels, K)[:, None] + torch.randn(N, 8, K, generator=generator), labels


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return evaluate(*noisy(), sigma=0.25, epsilon=0.1, methods=("cp", "rcp1", "exact"), splits=4, holdout=40)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    logits, labels = noisy()
    np.savez(tmp_path / "logits.npz", logits=logits.numpy(), labels=labels.numpy())
    return tmp_path / "logits.npz"


def test_what_splits_saw_adds_up_to_the_row(rows: list[Row]) -> None:
    labels, splits = noisy()[1], list(random_splits(N, 4, 40, 0))
    for row in rows:
        seen = row.observed
        assert (row.size, row.coverage) == (Spread.of(seen.sizes), Spread.of(seen.coverages))
        tested = sum(len(split.test) for split in splits)
        assert int(seen.histogram.sum()) == tested
        assert len(seen.histogram) == K + 1
        total = sum(size * int(count) for size, count in enumerate(seen.histogram))
        assert total == sum(int(part.sum()) for part in seen.by_class.labels)
        assert total / tested == pytest.approx(row.size.mean, abs=1e-6)
        for split, size, coverage, count, hits, held in zip(
            splits, seen.sizes, seen.coverages, seen.by_class.count, seen.by_class.hits, seen.by_class.labels
        ):
            assert torch.equal(count, torch.bincount(labels[split.test], minlength=K))
            assert int(hits.sum()) == round(coverage * len(split.test))
            assert size == pytest.approx(int(held.sum()) / len(split.test), abs=1e-6)
        for k in range(K):
            each = [float(h[k] / n[k]) for h, n in zip(seen.by_class.hits, seen.by_class.count)]
            assert seen.by_class(k)[0] == each
        assert set(row.to_dict()).isdisjoint({"guarantee", "observed"})
        json.dumps(row.to_dict())


def test_the_page_says_what_the_rows_say(rows: list[Row]) -> None:
    names = [f"<{k}>" for k in range(K)]
    page = evaluation_page(rows, "some & more", images=N, class_names=names, origin={"seed": 7})
    html = page.html()
    offline(html)
    reader = parsed(html)
    best = min((row for row in rows if row.guarantee.certified), key=lambda row: row.size.mean)
    assert page.guarantee == best.guarantee
    by_name: dict[str, list[list[str]]] = {}
    for row in reader.rows:
        by_name.setdefault(row[0], []).append(row[1:])
    for row in rows:
        seen = row.observed
        cells = by_name[row.method][0]
        assert cells[:3] == [
            "yes" if row.guarantee.certified else "no",
            str(row.guarantee.draws),
            str(row.guarantee.calibration_draws),
        ]
        low, high = min(seen.coverages), max(seen.coverages)
        assert cells[4] == f"{row.coverage.mean:.3f} ± {row.coverage.std:.3f} [{low:.3f}, {high:.3f}]"
    for k, name in enumerate(names):
        assert by_name[name][0][0].startswith(f"{Spread.of(best.observed.by_class(k)[0]).mean:.3f} ±")
    assert by_name["seed"] == [["7"]]
    assert [figure.name for figure in page.figures] == ["size-against-coverage", "set-sizes", "coverage-by-class"]
    assert "nothing is promised per class" in html


def test_the_page_is_about_the_promise_asked_for_and_says_what_it_costs() -> None:
    """The marginal rows stand beside; classes and groups have the promise drawn in, and the worst of both are in the table."""
    groups = [f"site {i % 2}" for i in range(N)]
    promises = [Promise(), Promise(per=groups, delta=0.2)]
    rows = evaluate(*noisy(), sigma=0.25, epsilon=0.1, methods=("rcp1", "cp"), promise=promises, splits=2, holdout=40)
    page = evaluation_page(rows, "some", images=N)
    assert page.guarantee == rows[2].guarantee
    assert rows[2].guarantee.promise == promises[1]
    html = page.html()
    (costs,) = (section.table for section in page.sections if section.title == "What the promise costs")
    assert costs is not None
    table = {cells[0]: cells for cells in costs.rows}
    for at, row in enumerate(rows):
        name = row.method + (", delta 0.2, per group" if at > 1 else "")
        _, size, cost, *worst = table[name]
        assert size == f"{row.size.mean:.2f}"
        assert cost == f"{row.size.mean / rows[at % 2].size.mean - 1:+.1%}"
        shown = [f"{w['mean']:.3f} [{w['low']:.3f}, {w['high']:.3f}]" for w in row.worst.values()]
        assert list(row.worst) == ["worst_class", "worst_group"]
        assert worst == shown
    assert [figure.name for figure in page.figures][-2:] == ["coverage-by-class", "coverage-by-group"]
    assert "The promise is made to every group: each has a threshold of its own." in html
    assert "nothing is promised per class" in html


def test_without_a_certified_method_nothing_is_claimed() -> None:
    rows = evaluate(*noisy(), sigma=0.25, epsilon=0.1, methods=("cp",), splits=1, holdout=40)
    page = evaluation_page(rows, "plain", images=N)
    assert page.guarantee == rows[0].guarantee
    assert "1 random split," in page.subtitle
    assert "smallest sets here" in page.sections[0].text
    with pytest.raises(InputError, match="expected at least one clean row"):
        evaluation_page([], "nothing", images=0)


def test_evaluate_writes_the_page_and_its_figures(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, pictures = tmp_path / "page.html", tmp_path / "figures"
    base: list[Any] = [
        "evaluate",
        file,
        "--epsilon",
        "0.1",
        "--sigma",
        "0.25",
        "--splits",
        "2",
        "--holdout",
        "40",
        "--method",
        "rcp1",
        "--method",
        "cp",
    ]
    found = as_json(capsys, *base, "--report", page, "--figures", pictures, "--class-names", "a,b,c,d,e")
    assert found["report"] == str(page)
    html = page.read_text()
    offline(html)
    facts = {row[0]: row[1] for row in parsed(html).rows if len(row) == 2}
    assert facts["logits"].startswith("logits.npz, SHA-256 ")
    assert facts["splits and seed"].startswith("seed 0: 40 holdout points")
    assert str(tmp_path) not in html
    assert len(list(pictures.iterdir())) == 6
    code, out, _ = run(capsys, *base, "--report", page)
    assert code == 0
    assert str(page) in out.replace("\n", "")
    assert "report" not in as_json(capsys, *base)


def test_pages_that_cannot_be_made_are_refused_before_the_work(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base: list[Any] = ["evaluate", file, "--epsilon", "0.1", "--sigma", "0.25", "--splits", "1", "--holdout", "40"]
    assert "create it first" in refused(capsys, *base, "--report", tmp_path / "no" / "page.html")
    assert "--report FILE.html" in refused(capsys, *base, "--figures", tmp_path / "figures")
    line = refused(capsys, *base, "--method", "cp", "--report", tmp_path / "p.html", "--class-names", "a,b")
    assert "expected 5 class names" in line
    assert "--out FOLDER" in refused(capsys, "audit", "--figures", tmp_path / "figures")
