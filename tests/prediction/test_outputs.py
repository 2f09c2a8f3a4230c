"""Noisy outputs of any framework: calibrated, predicted, saved and given a model, with the same sets as the network's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import keepcover
from keepcover import Gaussian, LogitStore, Smoother, Stream
from keepcover.errors import InputError, KeepcoverWarning
from keepcover.methods import Exact
from keepcover.prediction import Predictor, calibrate, calibrate_outputs, source
from keepcover.prediction.predictor import DRAWN
from keepcover.store.key import StoreKey
from keepcover.tasks import Classification
from tests.toys import nearest, toy

CAL, TEST = toy(200, seed=1), toy(50, seed=3)
ASK: dict[str, Any] = {"epsilon": 0.05, "sigma": 0.1, "draws": 4, "seed": 1}


def drawn(images: Tensor, draws: int, seed: int, role: str = "test", sigma: float = 0.1) -> Tensor:
    return Smoother(nearest(), sigma).logits(images, draws, Stream(seed, role))


@pytest.fixture(scope="module")
def outputs() -> Tensor:
    return drawn(CAL[0], 32, 5, "calibration")


@pytest.fixture(scope="module")
def predictor(outputs: Tensor) -> Predictor:
    return calibrate_outputs(outputs, CAL[1], **ASK)


# -- the same sets -----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*can only return everything:keepcover.KeepcoverWarning")
@pytest.mark.parametrize("score", ["hps", "aps"])
@pytest.mark.parametrize(
    "method", ["exact", "exact_asymmetric", "auto", "rcp1", "rscp", "cp", "cas", Exact(randomize=True)]
)
def test_outputs_give_the_sets_of_the_model_that_gave_them(method: Any, score: str) -> None:
    """Calibrated and predicted through the network, and again from the outputs that it gives under the same noise."""
    ask = {**ASK, "method": method, "score": score}
    through = calibrate(nearest(), CAL, calibration_draws=4, **ask)
    held = through.holdout_size
    rows = torch.zeros(200, dtype=torch.bool)
    if held:
        rows[torch.randperm(200, generator=torch.Generator().manual_seed(1))[:held]] = True
    streams = [drawn(CAL[0], 4, 1, role) for role in ("holdout", "calibration")]
    same = torch.where(rows[:, None, None], *streams)
    predictor = calibrate_outputs(same, CAL[1], **ask)
    assert (predictor.rule, predictor.holdout_size) == (through.rule, held)
    torch.testing.assert_close(predictor.threshold, through.threshold, rtol=1e-5, atol=1e-5)
    found = predictor.predict_outputs(drawn(TEST[0], 4, 9), seed=9)
    expected = through.predict(TEST[0], seed=9)
    assert (
        float((found.mask != expected.mask).double().mean()) <= 0.01
    )  # a threshold may round to another side of a score
    attached = predictor.with_model(nearest())
    assert torch.equal(attached.predict(TEST[0], seed=9).mask, found.mask)


def test_sets_come_from_the_first_draws_and_depend_on_ids_and_seed() -> None:
    outputs = drawn(CAL[0], 8, 5)
    predictor = calibrate_outputs(
        outputs, CAL[1], **{**ASK, "score": "aps", "epsilon": [0.02, 0.05], "alpha": [0.1, 0.2]}
    )
    many, ids = drawn(TEST[0], 12, 9), torch.arange(50) + 7
    few = predictor.predict_outputs(many[:, :4], seed=3, ids=ids)
    assert torch.equal(predictor.predict_outputs(many, seed=3, ids=ids).mask, few.mask)
    assert not torch.equal(predictor.predict_outputs(many, seed=4, ids=ids).mask, few.mask)
    assert not torch.equal(predictor.predict_outputs(many, seed=3).mask, few.mask)
    every = predictor.with_model(nearest()).predict_all(TEST[0], seed=9)
    for level, sets in every.items():
        own = predictor.predict_outputs(many, alpha=level[0], epsilon=level[1], seed=9)
        assert torch.equal(own.mask, sets.mask)
        assert own.guarantee == predictor.at(*level).guarantee
    nested = predictor.predict_outputs(many, epsilon=0.05, nested=True, seed=9)
    assert torch.equal(nested.mask, every[0.1, 0.02].mask | every[0.1, 0.05].mask)


def test_every_draw_calibrates_and_few_are_spent_per_query(outputs: Tensor) -> None:
    predictor = calibrate_outputs(outputs, CAL[1], **{**ASK, "method": "exact_asymmetric"})
    assert (predictor.rule.calibration_draws, predictor.rule.test_draws, predictor.draws) == (32, 4, 4)
    assert predictor.items.draws.values.shape == (180, 32)
    default = calibrate_outputs(outputs, CAL[1], **{**ASK, "draws": None, "method": "exact"})
    assert (default.draws, default.rule.calibration_draws, default.holdout_size) == (16, 32, 20)
    assert calibrate_outputs(outputs[:, :6], CAL[1], **{**ASK, "draws": None}).draws == 6
    assert calibrate_outputs(outputs, CAL[1], holdout=50, **ASK).holdout_size == 50


def test_coverage_of_outputs_is_kept(predictor: Predictor) -> None:
    """Of 2000 fresh queries at least what the law of calibration allows: false alarm 1e-6."""
    images, labels = toy(2000, seed=8)
    sets = predictor.predict_outputs(drawn(images, 4, 11))
    covered = int(sets.covers(labels).sum())
    rank = 181 - int(181 * 0.1)
    assert stats.betabinom.cdf(covered, 2000, rank, 181 - rank) > 1e-6
    assert float(sets.size.double().mean()) < 3


# -- containers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["float32", "float64", "list", "half", "bfloat16"])
def test_outputs_of_any_framework(kind: str, outputs: Tensor, predictor: Predictor) -> None:
    make: dict[str, Any] = {
        "float32": Tensor.numpy,
        "float64": lambda x: x.double().numpy(),
        "list": Tensor.tolist,
        "half": Tensor.half,
        "bfloat16": Tensor.bfloat16,
    }
    found = calibrate_outputs(make[kind](outputs), CAL[1].tolist() if kind == "list" else CAL[1].numpy(), **ASK)
    queries = drawn(TEST[0], 4, 9)
    sets = found.predict_outputs(make[kind](queries), seed=1)
    if kind in ("half", "bfloat16"):  # rounded outputs are outputs: the same as their wider form
        rounded, queries = make[kind](outputs).float(), make[kind](queries).float()
        predictor = calibrate_outputs(rounded, CAL[1], **ASK)
    assert found.rule == predictor.rule
    assert float(found.threshold) == pytest.approx(float(predictor.threshold), abs=1e-5)
    assert torch.equal(sets.mask, predictor.predict_outputs(queries, seed=1).mask)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> LogitStore:
    smoother = Smoother(nearest(), 0.1)
    made = LogitStore.open(
        tmp_path_factory.mktemp("store"), StoreKey.of(smoother, CAL, seed=5), chunk_images=64, progress=False
    )
    made.fill(smoother, CAL, draws=32)
    return made


@pytest.mark.parametrize("method", ["exact", "rscp"])
@pytest.mark.parametrize("score", ["hps", "aps"])
def test_a_store_brings_its_truth_and_noise_and_is_read_in_pieces(
    method: str, score: str, store: LogitStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = {"epsilon": 0.05, "draws": 4, "seed": 1, "method": method, "score": score}
    whole = calibrate_outputs(store, **ask)
    assert whole.noise == Gaussian(0.1)
    given = calibrate_outputs(store.read(), store.labels, sigma=0.1, **ask)
    read: list[tuple[int, ...]] = []
    honest = LogitStore.read

    def watched(self: LogitStore, *args: Any) -> Tensor:
        read.append(tuple(honest(self, *args).shape))
        return honest(self, *args)

    monkeypatch.setattr(LogitStore, "read", watched)
    monkeypatch.setattr(source, "IN_MEMORY", 1000)
    monkeypatch.setattr(source, "PIECE", 32 * 4 * 50)  # fifty points
    pieces = calibrate_outputs(store, **ask)
    assert read == [(20, 32, 4), (50, 32, 4), (50, 32, 4), (50, 32, 4), (30, 32, 4)]
    for other in (given, pieces):
        assert other.rule == whole.rule
        assert torch.equal(other.threshold, whole.threshold)
        assert torch.equal(other.items.draws.values, whole.items.draws.values)
    with pytest.raises(
        InputError, match=r"the store holds outputs under Gaussian noise sigma 0.1, not Gaussian noise sigma 0.2"
    ):
        calibrate_outputs(store, sigma=0.2, **ask)
    with pytest.raises(InputError, match="a store brings the truth of its points along; leave truth out"):
        calibrate_outputs(store, CAL[1], **ask)


def test_open_labels_of_outputs_count_as_missed(outputs: Tensor) -> None:
    truth = CAL[1].clone()
    truth[:8] = -1
    task = Classification(open_labels=True)
    predictor = calibrate_outputs(outputs, truth, task=task, **ASK)
    assert int((predictor.items.draws.values == torch.inf).all(dim=1).sum()) <= 8
    assert float(predictor.threshold) > float(calibrate_outputs(outputs, CAL[1], **ASK).threshold)
    assert not any("one of the classes" in line for line in predictor.guarantee.assumptions)
    truth[:40] = -1
    with pytest.raises(InputError, match="have a label that the model does not know"):
        calibrate_outputs(outputs, truth, task=task, **ASK)


# -- the promise -------------------------------------------------------------------------------------------------------


def test_the_guarantee_says_that_outputs_were_drawn_under_this_noise(predictor: Predictor, tmp_path: Path) -> None:
    through = calibrate(nearest(), CAL, **ASK)
    assert DRAWN in predictor.guarantee.assumptions
    assert DRAWN not in through.guarantee.assumptions
    assert "fresh and secret" in DRAWN
    for shown in (predictor.predict_outputs(drawn(TEST[0], 4, 1)), predictor.with_model(nearest()).predict(TEST[0])):
        assert DRAWN in shown.guarantee.assumptions
        assert DRAWN in shown.guarantee.to_dict()["assumptions"]
    predictor.save(tmp_path / "p.safetensors")
    assert keepcover.load(tmp_path / "p.safetensors").guarantee == predictor.guarantee
    plain = calibrate_outputs(nearest()(CAL[0]).detach()[:, None], CAL[1], epsilon=0.0, sigma=0.0, method="cp")
    assert DRAWN not in plain.guarantee.assumptions  # there is no noise to draw


# -- with and without a model ------------------------------------------------------------------------------------------


def test_without_a_model_it_is_saved_as_such(predictor: Predictor, tmp_path: Path) -> None:
    predictor.save(tmp_path / "p.safetensors")
    loaded = keepcover.load(tmp_path / "p.safetensors")
    queries = drawn(TEST[0], 4, 9)
    assert torch.equal(loaded.predict_outputs(queries, seed=1).mask, predictor.predict_outputs(queries, seed=1).mask)
    for one in (predictor, loaded):
        with pytest.raises(
            InputError, match=r"has no model: use predict_outputs, or attach the model .*with_model\(model\)"
        ):
            one.predict(TEST[0])
        with pytest.raises(InputError, match="has no model"):
            keepcover.audit(one, TEST, steps=1, draws=1, progress=False)
    with_one = keepcover.load(tmp_path / "p.safetensors", nearest(), batch_size=7)
    assert with_one.running.batch_size == 7
    assert torch.equal(with_one.predict(TEST[0], seed=9).mask, predictor.predict_outputs(queries, seed=9).mask)


def test_a_model_that_was_attached_is_known_again(predictor: Predictor, tmp_path: Path) -> None:
    model, path = nearest(), tmp_path / "p.safetensors"
    predictor.with_model(model).save(path)
    loaded = keepcover.load(path, nearest())
    assert torch.equal(loaded.predict(TEST[0], seed=1).mask, predictor.with_model(model).predict(TEST[0], seed=1).mask)
    for wrong in (nearest(sharpness=3.0), nn.Sequential(nearest())):
        for attach in (lambda m: keepcover.load(path, m), keepcover.load(path).with_model, loaded.with_model):
            with pytest.raises(InputError, match="the model differs from the one calibrated"):
                attach(wrong)

    def box(images: Tensor) -> Tensor:
        return model(images)

    with pytest.raises(InputError, match="has no fingerprint"):
        predictor.with_model(box).save(path)
    predictor.with_model(box, fingerprint="box-1").save(path)
    assert keepcover.load(path, box, fingerprint="box-1").running.model is box
    with pytest.raises(InputError, match="the model differs"):
        keepcover.load(path, box, fingerprint="box-2")


def test_a_predictor_of_a_network_takes_no_other_model() -> None:
    through = calibrate(nearest(), CAL, **ASK)
    assert through.with_model(nearest()).predict(TEST[0], seed=1).rows() == through.predict(TEST[0], seed=1).rows()
    with pytest.raises(InputError, match="the model differs from the one calibrated"):
        through.with_model(nearest(sharpness=3.0))


def test_a_smoother_with_other_noise_is_refused(predictor: Predictor) -> None:
    with pytest.raises(
        InputError, match=r"drawn under Gaussian noise sigma 0.1, the smoother adds Gaussian noise sigma 0.2"
    ):
        predictor.with_model(Smoother(nearest(), 0.2))
    assert predictor.with_model(Smoother(nearest(), 0.1, batch_size=9)).running.batch_size == 9


# -- what is refused ---------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no-truth": ({"truth": None}, "expected the truth of every point"),
    "few-truths": ({"truth": CAL[1][:-1]}, "expected the truth of 200 points, got 199"),
    "label": ({"truth": CAL[1] + 1}, "labels between 0 and 3"),
    "no-noise": ({"sigma": None}, r"expected sigma or noise=\.\.\., under which the outputs were computed"),
    "both": ({"noise": Gaussian(0.1)}, "and not both"),
    "draws": ({"draws": 33}, "asked for 33 draws per query, 32 outputs per point are there"),
    "no-draws": ({"draws": 0}, "at least 1 draw, got 0"),
    "holdout": ({"holdout": 200}, "holdout of 1 to 199 of the 200 points"),
    "ids": ({"ids": [0] * 200}, "two examples must not share noise"),
    "few-ids": ({"ids": range(199)}, "one id per point, got 199 ids for 200 points"),
    "names": ({"class_names": ["a"]}, "expected 4 class names"),
    "flat": ({"outputs": torch.randn(200)}, r"outputs \[points, draws, ...\]"),
    "no-classes": ({"outputs": torch.randn(200, 32)}, "expected float logits"),
    "one-class": ({"outputs": torch.randn(200, 32, 1)}, "at least 2 classes"),
    "integers": ({"outputs": torch.ones(200, 32, 4).long()}, "expected float noisy outputs"),
    "object": ({"outputs": {"a": 1}}, "as a tensor or array, got dict"),
    "nothing": ({"outputs": torch.zeros(0, 32, 4), "truth": CAL[1][:0]}, "at least one of each"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_bad_outputs_are_refused_in_one_line(case: str, outputs: Tensor) -> None:
    asked = {"outputs": outputs, "truth": CAL[1], **ASK, **REFUSED[case][0]}
    with pytest.raises(InputError, match=REFUSED[case][1]) as caught:
        calibrate_outputs(asked.pop("outputs"), asked.pop("truth"), **asked)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_one_bad_number_is_found(value: float, outputs: Tensor, predictor: Predictor, store: LogitStore) -> None:
    bad = outputs.clone()
    bad[17, 3, 2] = value
    with pytest.raises(InputError, match="NaN or infinity, first at point 17"):
        calibrate_outputs(bad, CAL[1], **ASK)
    with pytest.raises(InputError, match="NaN or infinity, first at point 17"):
        predictor.predict_outputs(bad)


def test_bad_queries_are_refused(predictor: Predictor) -> None:
    queries = drawn(TEST[0], 4, 1)
    with pytest.raises(InputError, match="at least 4 noisy outputs per query, as calibrated, got 3; draw more"):
        predictor.predict_outputs(queries[:, :3])
    with pytest.raises(InputError, match="calibrated on 4 classes, the model returned 5"):
        predictor.predict_outputs(torch.randn(5, 4, 5))
    with pytest.raises(InputError, match="one id per point"):
        predictor.predict_outputs(queries, ids=torch.arange(3))
    with pytest.raises(InputError, match=r"got alpha 0\.3"):
        predictor.predict_outputs(queries, alpha=0.3)


def test_probabilities_and_useless_outputs_are_warned_about(outputs: Tensor) -> None:
    with pytest.warns(KeepcoverWarning, match="seems to return probabilities where logits are expected"):
        calibrate_outputs(outputs.softmax(dim=-1), CAL[1], **ASK)
    with pytest.warns(KeepcoverWarning, match="right on only .* of noisy draws"):
        calibrate_outputs(torch.randn(200, 32, 4), CAL[1], **ASK)


def test_arrays_are_left_as_they_were(outputs: Tensor) -> None:
    array = outputs.numpy().copy()
    before = array.copy()
    calibrate_outputs(array, CAL[1], **ASK).predict_outputs(array)
    assert np.array_equal(array, before)
