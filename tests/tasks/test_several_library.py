"""Several labels, pixels and losses through the library: networks, files, renewal, evaluation, audits, and memory."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import keepcover
from keepcover import InputError, Loss, Promise, Segmentation
from keepcover.evaluation import evaluate
from keepcover.evaluation.random_splits import random_splits
from keepcover.methods import Holdout, OneDrawControl
from keepcover.scores import GRID, Tally
from tests.methods.worst import LAWS, SIGMA
from tests.tasks.several import FORMS, above, asked_for, points


class Labels(nn.Module):
    """Three labels, each of a pixel that is bright."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(12.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (x.flatten(1)[:, :3] - 0.5)


class Pixels(nn.Module):
    """Two classes at every pixel: dark and bright."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(12.0))

    def forward(self, x: Tensor) -> Tensor:
        bright = self.scale * (x[:, 0] - 0.5)
        return torch.stack([-bright / 2, bright / 2], dim=1)


def images(n: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (
        (torch.rand(n, 1, 2, 2, generator=generator) > 0.6).float() * 0.6
        + 0.2
        + 0.1 * torch.randn(n, 1, 2, 2, generator=generator)
    )


def label_data(n: int = 400, seed: int = 0) -> tuple[Tensor, Tensor]:
    x = images(n, seed)
    return x, x.flatten(1)[:, :3] > 0.5


def pixel_data(n: int = 400, seed: int = 0) -> tuple[Tensor, Tensor]:
    x = images(n, seed)
    truth = (x[:, 0] > 0.5).long()
    truth[:, 0, 0] = 9
    return x, truth


MASKS = Segmentation(of=("bright",), ignore=9, class_names=("dark", "bright"))
KINDS: dict[str, tuple[nn.Module, Any, Any]] = {
    "multilabel": (Labels(), label_data, "multilabel"),
    "masks": (Pixels(), pixel_data, MASKS),
    "pixels": (Pixels(), pixel_data, Segmentation(ignore=9)),
    "loss": (Labels(), label_data, Loss(lambda o, y, t: above(-o, y, t), (-2.0, 0.0, 1.0, 2.0, 3.0, 5.0, 1e3))),
}


def made(kind: str, **more: Any) -> keepcover.Predictor:
    model, data, task = KINDS[kind]
    return keepcover.calibrate(
        model, data(), task=task, **{"epsilon": 0.05, "sigma": 0.1, "draws": 4, "seed": 3, **more}
    )


@pytest.mark.parametrize("kind", KINDS)
def test_from_the_network_to_a_file_and_back(kind: str, tmp_path: Path) -> None:
    model, data, _ = KINDS[kind]
    predictor = made(kind, calibration_draws=None if kind == "loss" else 16, epsilon=[0.05, 0.1])
    x, truth = data(100, 1)
    sets = predictor.predict(x, seed=5)
    predictor.save(tmp_path / "p.safetensors")
    again = keepcover.load(tmp_path / "p.safetensors", model, score=predictor.task if kind == "loss" else None)
    assert again.task == predictor.task
    assert str(again.guarantee) == str(predictor.guarantee)
    assert torch.equal(again.threshold, predictor.threshold)
    assert again.predict(x, seed=5).measure(truth) == sets.measure(truth)
    assert len(again.predict_all(x, seed=5)) == 2
    nested = again.predict(x, epsilon=0.1, nested=True, seed=5)
    assert bool((nested.size >= sets.size).all())
    assert set(sets.to_dict()) == {"guarantee", "rows"}
    json.dumps(sets.to_dict())
    assert "<table>" in sets._repr_html_()
    assert "at most 10 %" in str(again.report())
    other = keepcover.load(tmp_path / "p.safetensors", score=predictor.task if kind == "loss" else None)
    assert torch.equal(other.threshold, predictor.threshold)
    if kind == "loss":
        with pytest.raises(InputError, match=r"controls a loss of yours.*load\(path, model, score=Loss"):
            keepcover.load(tmp_path / "p.safetensors", model)


def test_a_file_whose_weights_make_no_sense_is_refused(tmp_path: Path) -> None:
    predictor = made("multilabel", calibration_draws=8)
    predictor.save(tmp_path / "p.safetensors")
    tensors = load_file(tmp_path / "p.safetensors")
    assert tensors["calibration"].shape == (1, len(GRID), 8)
    tally = predictor.items
    assert isinstance(tally, Tally)
    tally.check()
    for broken in (
        {"above": tally.above * 3},
        {"above": tally.above.flip(1)},
        {"above": tally.above.flip(2)},
        {"above": -tally.above},
        {"weight": tally.weight * 10},
        {"count": tally.count * 0},
    ):
        with pytest.raises(InputError, match="weights above thresholds"):
            Tally(**{**tally.__dict__, **broken}).check()


@pytest.mark.parametrize("kind", ["multilabel", "loss"])
def test_renewal_adds_replaces_and_slides(kind: str, tmp_path: Path) -> None:
    model, data, task = KINDS[kind]
    predictor = made(kind, calibration_draws=None if kind == "loss" else 8)
    fresh = predictor.recalibrate(data(300, 7), seed=4)
    added = predictor.recalibrate(data(300, 7), how="add", seed=4)
    n = predictor.guarantee.n
    assert (fresh.guarantee.n, added.guarantee.n) == (300, n + 300)
    assert isinstance(predictor.items, Tally)
    assert isinstance(fresh.items, Tally)
    assert isinstance(added.items, Tally)
    assert torch.allclose(added.items.above.sum(dim=0), predictor.items.above[0] + fresh.items.above[0])
    slid = added.recalibrate(data(200, 8), how="window", window=2, seed=4)
    assert slid.guarantee.n == 500
    slid.save(tmp_path / "p.safetensors")
    again = keepcover.load(tmp_path / "p.safetensors", model, score=task if kind == "loss" else None)
    assert torch.equal(again.threshold, slid.threshold)


def test_promises_per_group_are_renewed_and_saved(tmp_path: Path) -> None:
    model, data, _ = KINDS["multilabel"]
    groups = np.array(["a", "b"] * 200)
    predictor = made("multilabel", calibration_draws=8, promise=Promise(per=groups))
    assert predictor.threshold.shape == (2, 1)
    added = predictor.recalibrate(data(100, 7), how="add", groups=["a"] * 100, seed=4)
    assert isinstance(added.items, Tally)
    assert isinstance(predictor.items, Tally)
    before = dict(zip(predictor.items.group.tolist(), predictor.items.count.tolist(), strict=True))  # type: ignore[union-attr]
    summed = added.items.total(added.items.group)
    assert dict(zip(summed.group.tolist(), summed.count.tolist(), strict=True)) == {0: before[0] + 100, 1: before[1]}  # type: ignore[union-attr]
    added.save(tmp_path / "p.safetensors")
    again = keepcover.load(tmp_path / "p.safetensors", model)
    assert torch.equal(again.threshold, added.threshold)
    x, truth = data(60, 9)
    for row in keepcover.audit(added, (x, truth), groups=["a", "b"] * 30, seed=0, draws=4, steps=2).rows:
        assert row.verdict == "consistent"


@pytest.mark.parametrize("form", FORMS)
def test_evaluation_is_what_predictors_do(form: str) -> None:
    """A split's row against the threshold of its calibration points and the measure of its test points' sets."""
    outputs, truth = points(FORMS[form], LAWS["wide"], 300, 8, torch.Generator().manual_seed(0))
    task = FORMS[form].task.seen(outputs)
    asked: dict[str, Any] = {"epsilon": 0.05, "sigma": SIGMA, "holdout": 60, "alpha": 0.2, "seed": 1}
    rows = evaluate(outputs, truth, task=task, draws=4, splits=2, **asked)
    assert [row.method for row in rows] == (["one_draw"] if form == "loss" else ["exact_asymmetric", "one_draw"])
    (row,) = evaluate(outputs, truth, task=task, methods=["one_draw"], draws=1, splits=1, **asked)
    (split,) = random_splits(300, 1, 60, 1)
    rule = OneDrawControl().rule(asked_for(len(split.calibration_with_holdout), 1, 1, r=0.05 / SIGMA))
    known, u = task.check_truth(truth, 300), torch.zeros(300)
    own = split.calibration_with_holdout
    threshold = rule.threshold(task.items(outputs[own][:, :1], known[own], rule.reading, u[own]))
    prepared = task.prepare(outputs[split.test][:, :1], rule.reading, u[split.test])
    sets = task.sets(task.inside(task.summary(prepared, rule, u), rule, threshold), rule.guarantee(task))
    measured = sets.measure(truth[split.test])
    assert math.isclose(row.coverage.mean, measured.coverage.mean, abs_tol=1e-6)
    assert math.isclose(row.size.mean, measured.size, rel_tol=1e-6)
    assert math.isclose(row.to_dict()["risk"]["mean"], 1 - row.coverage.mean)
    json.dumps(row.to_dict())


def test_an_evaluation_splits_by_group() -> None:
    outputs, truth = points(FORMS["multilabel"], LAWS["wide"], 400, 4, torch.Generator().manual_seed(0))
    (row,) = evaluate(
        outputs, truth, task="multilabel", methods=["one_draw"], epsilon=0.05, sigma=SIGMA, draws=1, splits=2, holdout=40,
        promise=Promise(per=np.arange(400) % 2), alpha=0.2,
    )  # fmt: skip
    assert "worst_group" in row.to_dict()


@pytest.mark.parametrize("kind", KINDS)
def test_audits_attack_what_is_promised(kind: str) -> None:
    """A strong attack lowers what is held, and stays within the promise; far beyond epsilon it does not."""
    _, data, _ = KINDS[kind]
    predictor = made(kind, calibration_draws=None if kind == "loss" else 16)
    found = keepcover.audit(predictor, data(80, 2), radii=[0.05, 0.6], seed=1, draws=8, steps=5)
    clean, near, far = found.rows
    assert (near.attack, near.verdict) == ("random" if kind == "loss" else "margin", "consistent")
    assert far.coverage["mean"] <= near.coverage["mean"] <= clean.coverage["mean"]
    if kind != "loss":
        assert far.coverage["mean"] < 0.7
        assert far.verdict == "no promise, lost"
    with pytest.raises(InputError, match="softmax attacks the probability of the true class"):
        keepcover.audit(predictor, data(10, 2), attacks=["softmax"])


def test_an_audit_catches_a_threshold_that_the_points_do_not_support() -> None:
    from dataclasses import replace

    predictor = made("multilabel", calibration_draws=8)
    (level, one), = predictor.levels.items()  # fmt: skip
    small = replace(predictor, levels={level: replace(one, threshold=one.threshold - 1.0)})
    assert keepcover.audit(small, label_data(40, 3), attacks=[], seed=0).rows[0].verdict == "violated"


def test_early_exit_is_the_same_sets() -> None:
    predictor = made("multilabel", calibration_draws=16, draws=8)
    x, _ = label_data(100, 4)
    early, all_draws = predictor.predict(x, seed=1, early_exit=True), predictor.predict(x, seed=1)
    assert torch.equal(early.mask, all_draws.mask)
    assert early.draws_used is not None
    with pytest.raises(InputError, match="early exit decides a query label by label"):
        made("masks").predict(x, early_exit=True)


# -- memory ------------------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Three classes of 32 x 32 pixels from one number."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :, None, None] * torch.linspace(-1, 1, 3)[None, :, None, None].expand(1, 3, 32, 32)


def test_calibration_keeps_neither_pixels_nor_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 40 images with 16 draws of 3 x 32 x 32 numbers, the largest tensor that is kept is that of the grid, and the
    holdout keeps a sample of pixels.
    """
    held: list[Holdout] = []
    real = Holdout.__init__
    monkeypatch.setattr(Holdout, "__init__", lambda self, *args: (held.append(self), real(self, *args))[1])
    monkeypatch.setattr("keepcover.tasks.segmentation.PIXELS", 50)
    x, truth = torch.randn(40, 1), torch.zeros(40, 32, 32, dtype=torch.int64)
    predictor = keepcover.calibrate(
        Wide(), (x, truth), task="segmentation", epsilon=0.1, sigma=0.5, draws=2, calibration_draws=16, holdout=10, seed=0,
        alpha=0.3, input_scale=[1.0],
    )  # fmt: skip
    assert isinstance(predictor.items, Tally)
    assert predictor.items.above.shape == (1, len(GRID), 16)
    assert held[0].outputs.shape == (10, 16, 3, 1, 50)
    assert len(held[0].items().draws) == 500
    assert predictor.predict(x).mask.shape == (40, 3, 32, 32)


def test_an_evaluation_from_the_network_thins_its_holdout() -> None:
    from keepcover.evaluation import Network

    x, truth = pixel_data(120, 5)
    source = Network(keepcover.Smoother(Pixels(), 0.1, progress=False), (x, truth), 8, keepcover.Stream(0, "test"))
    (row,) = evaluate(
        source, task=MASKS, methods=["exact_asymmetric"], epsilon=0.02, draws=2, splits=2, holdout=20, alpha=0.2
    )
    assert 0.7 < row.coverage.mean <= 1


def test_a_stream_without_length_calibrates() -> None:
    x, truth = label_data(200, 6)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(x.split(50), truth.split(50), strict=True)

    predictor = keepcover.calibrate(
        Labels(), batches(), task="multilabel", epsilon=0.05, sigma=0.1, draws=2, calibration_draws=8,
        holdout=label_data(40, 16), alpha=0.2,
    )  # fmt: skip
    assert predictor.guarantee.n == 200
