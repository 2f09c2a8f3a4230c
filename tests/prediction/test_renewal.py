"""Renewed thresholds have the law of fresh ones, the same promise, and a history that the file keeps."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from scipy import stats
from torch import Tensor

import keepcover
from keepcover import Promise
from keepcover.cli.production import _words
from keepcover.errors import InputError
from keepcover.methods.exact import HullRule
from keepcover.prediction import Predictor, calibrate, calibrate_outputs, renewal
from keepcover.prediction.artifact import load
from keepcover.prediction.collecting import chosen_rows
from keepcover.prediction.concluding import calibrated
from tests.cli.runner import as_json, refused, run
from tests.prediction.saved import rewrite
from tests.toys import nearest, toy

DRAWS = 8
ALARM = 1e-6  # of each of the few statistical tests here; together below 1e-5


def logits(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Outputs of two classes whose order score of the truth, 0, is standard normal, independently over points and draws."""
    outputs = torch.zeros(n, DRAWS, 2)
    outputs[..., 0] = torch.randn(n, DRAWS, generator=generator)
    return outputs, torch.zeros(n, dtype=torch.int64)


def place(predictor: Predictor) -> float:
    """Where P[Z <= t] of a new point lies in the law that it must have, Beta(rank, n + 1 - rank): uniform. Z is the draw of
    rank c + 1, at most t where at most c draws exceed t.
    """
    rule, n = predictor.rule, predictor.guarantee.n
    assert isinstance(rule, HullRule)
    rank = rule.asked.promise.rank(n, Fraction(rule.level))
    below = stats.binom.cdf(rule.c, DRAWS, stats.norm.sf(float(predictor.threshold)))
    return float(stats.beta.cdf(below, rank, n + 1 - rank))


def p_values(trials: int) -> dict[str, float]:
    """How well the law of P[Z <= t] after each way of renewing agrees with its exact law."""
    generator = torch.Generator().manual_seed(3)
    first = calibrate_outputs(*logits(400, generator), epsilon=0.01, sigma=0.5, alpha=0.4, method="exact", seed=1)
    seen: dict[str, list[Predictor]] = {"replace": [], "add": [], "window": []}
    for _ in range(trials):
        made = first
        for how, options in (("replace", {}), ("add", {}), ("window", {"window": 2})):
            made = made.recalibrate_outputs(*logits(40, generator), how=how, **options)
            seen[how].append(made)
    assert {how: some[0].guarantee.n for how, some in seen.items()} == {"replace": 40, "add": 80, "window": 80}
    return {how: float(stats.kstest([place(one) for one in some], "uniform").pvalue) for how, some in seen.items()}


@pytest.mark.usefixtures("untyped")
def test_renewed_thresholds_have_the_exact_law_of_fresh_ones() -> None:
    assert min(p_values(60).values()) > ALARM


def refit(rule: Any, items: Any, sample: Any, unknown: int) -> Any:
    """Chooses the rule again, on the calibration points."""
    return calibrated(rule.method.fit(rule.asked, sample), items, sample, unknown)


def selective(rule: Any, items: Any, sample: Any, unknown: int) -> Any:
    """Leaves out the points of the newest batch with the largest scores: selection by score."""
    order = items.draws.values[:, 0].argsort()[: int(0.8 * len(items.draws))]
    return calibrated(rule, items[order], sample, unknown)


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("mutant", [refit, selective])
def test_a_renewal_that_looks_at_calibration_points_is_caught(
    mutant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renewal, "calibrated", mutant)
    assert min(p_values(60).values()) < ALARM


PROMISES: dict[str, dict[str, Any]] = {
    "marginal": {},
    "pac": {"promise": Promise(delta=0.1)},
    "class": {"promise": Promise(per="class")},
    "clusters": {"promise": Promise(per="class", clusters="auto")},
    "group": {"promise": Promise(per=["a", "b"] * 200)},
    "poisoned": {"promise": Promise(poisoned=2, calibration_epsilon=0.01)},
    "drift": {"promise": Promise(drift=0.02)},
    "weights": {"promise": Promise(label_weights=(0.9, 1.1, 1.0))},
    "levels": {"alpha": (0.1, 0.3), "epsilon": (0.05, 0.0), "method": "exact_asymmetric"},
    "ptt": {"method": "rscp"},
    "bincp": {"method": "bincp_sharp"},
    "aps": {"score": "raps"},
}


@pytest.mark.usefixtures("untyped")
@pytest.mark.filterwarnings("ignore::keepcover.errors.KeepcoverWarning")  # of few points in half of them
@pytest.mark.parametrize("case", PROMISES)
def test_the_same_points_give_the_same_thresholds_whichever_way_they_came(case: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    truth = torch.randint(3, (400,), generator=generator)
    outputs = torch.randn(400, 16, 3, generator=generator) + 3 * torch.nn.functional.one_hot(truth, 3)[:, None]
    ask: dict[str, Any] = {"alpha": 0.2, "epsilon": 0.05, "sigma": 0.5, "seed": 1, **PROMISES[case]}
    first = calibrate_outputs(outputs, truth, **ask)
    held = torch.zeros(400, dtype=torch.bool)
    if first.holdout_size:
        held[chosen_rows(400, None, 1)] = True
    rows = (~held).nonzero()[:, 0]

    def take(some: Tensor, made: Predictor, **how: Any) -> Predictor:
        groups = [["a", "b"][row % 2] for row in some.tolist()] if case == "group" else None
        return made.recalibrate_outputs(outputs[some], truth[some], groups=groups, ids=some, seed=1, **how)

    half = take(rows[:200], first)
    whole = take(rows[200:], half, how="add")
    slid = take(rows[200:], take(rows[:200], whole), how="window", window=2)
    for made in (whole, slid):
        assert [level.rule for level in made.levels.values()] == [level.rule for level in first.levels.values()]
        if case != "aps":  # whose random numbers are new for every batch
            for level, one in made.levels.items():
                torch.testing.assert_close(one.threshold, first.levels[level].threshold, rtol=0, atol=0)
    assert [entry["how"] for entry in slid.history] == ["calibrate", "replace", "add", "replace", "window"]
    assert slid.provenance["of"] == [3, 4]
    slid.save(tmp_path / "p.safetensors")
    loaded = load(tmp_path / "p.safetensors")
    assert loaded.history == slid.history
    assert loaded.guarantee == slid.guarantee
    again = take(rows[:100], loaded, how="window", window=2)
    assert again.guarantee.n == len(rows) - 200 + 100
    assert torch.equal(again.threshold, take(rows[:100], slid, how="window", window=2).threshold)


@pytest.fixture(scope="module")
def first() -> Predictor:
    return calibrate(nearest(), toy(300, seed=1), epsilon=0.03, sigma=0.1, draws=8, seed=1)


def test_only_new_points_run_and_noise_is_new(first: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    new = toy(100, seed=7)
    made = first.recalibrate(new, how="add", seed=1)
    assert made.guarantee.n == first.guarantee.n + 100
    assert "100 calibration" not in str(made.guarantee)
    assert made.rule.parameters() == first.rule.parameters()
    assert made.inputs == first.inputs  # the fixed inputs that tell a model from another rest on their range
    one, two = first.recalibrate(toy(300, seed=1), seed=1), first.recalibrate(toy(300, seed=1), seed=1)
    assert torch.equal(one.items.draws.values, two.items.draws.values)
    # The first calibration had this seed and these ids too: equal scores would mean equal noise.
    assert torch.isin(one.items.draws.values, first.items.draws.values).float().mean() < 0.01
    assert made.predict(new[0][:3]).guarantee.n == made.guarantee.n


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({}, {"how": "sometimes"}, "'replace', 'add' or 'window'"),
        ({}, {"how": "window"}, "together with window"),
        ({}, {"how": "window", "window": 0}, "at least 1"),
        ({}, {"how": "add", "window": 2}, "together with window"),
        ({"n": 3}, {}, "at least .* are needed"),
        ({"classes": 5}, {}, "labels"),
        ({}, {"groups": ["a"] * 100}, "not per group"),
    ],
)
def test_what_cannot_be_renewed_is_refused(
    first: Predictor, change: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    images, labels = toy(change.get("n", 100), classes=change.get("classes", 4), seed=7)
    with pytest.raises(InputError, match=message):
        first.recalibrate((images, labels), **options)


def test_other_models_outputs_and_shapes_are_refused(first: Predictor) -> None:
    model = nearest()
    made = calibrate(model, toy(300, seed=1), epsilon=0.03, sigma=0.1, draws=8, seed=1)
    with torch.no_grad():
        model[1].weight.mul_(1.01)  # type: ignore[index]
    with pytest.raises(InputError, match="the model differs"):
        made.recalibrate(toy(100, seed=7))
    with pytest.raises(InputError, match="calibrated on inputs"):
        first.recalibrate((torch.rand(100, 1, 5, 5), torch.zeros(100, dtype=torch.int64)))
    with pytest.raises(InputError, match="4 classes"):
        first.recalibrate_outputs(torch.randn(100, 64, 3), torch.zeros(100, dtype=torch.int64))
    with pytest.raises(InputError, match="noisy outputs per point"):
        first.recalibrate_outputs(torch.randn(100, 4, 4), torch.zeros(100, dtype=torch.int64))
    with pytest.raises(InputError, match="has no model"):
        replace(first, smoother=None).recalibrate(toy(100, seed=7))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["history"][-1].update(points=99),
        lambda m: m["history"][-1].update(of=[1]),
        lambda m: m["history"][-1].update(of=[1, 0]),
        lambda m: m["history"][-1].update(of=[0, 1, 2]),
        lambda m: m["history"].pop(),
        lambda m: m["history"].clear(),
        lambda m: (m["history"][0].update(points=m["history"][0]["points"] - 5), m["history"][1].update(points=105)),
    ],
)
def test_a_history_that_does_not_fit_the_points_is_refused(
    first: Predictor, change: Callable[[dict[str, Any]], Any], tmp_path: Path
) -> None:
    path = tmp_path / "p.safetensors"
    first.recalibrate(toy(100, seed=7), how="add").save(path)
    assert keepcover.load(path, nearest()).history[1]["points"] == 100
    rewrite(path, change)
    with pytest.raises(InputError, match=r"history|batch|makes no sense|states"):
        load(path)


def test_a_long_list_shows_where_two_differ() -> None:
    one = [0.5] * 100
    assert _words([*one[:60], 0.25, *one[61:]], one) == "60: 0.25"
    assert _words([0.5, 0.25], [0.5, 0.75]) == "0.5, 0.25"
    assert _words(list(range(20)), None) == "0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6, 7: 7 and 12 more"


@pytest.mark.filterwarnings("ignore::keepcover.errors.KeepcoverWarning")
def test_a_renewed_predictor_has_another_digest_though_its_thresholds_are_the_same() -> None:
    """So a ticket, an audit and a monitor of the old one are none of the new one's."""
    logits, labels = torch.randn(90, 2, 3), torch.arange(90) % 3
    full = keepcover.calibrate_outputs(logits[:60], labels[:60], epsilon=2.0, sigma=0.1, draws=2, holdout=30, seed=0)
    new = full.recalibrate_outputs(logits[60:], labels[60:])
    assert full.full
    assert [str(one.guarantee) for one in (full, new)] == [str(full.guarantee)] * 2
    assert torch.equal(full.threshold, new.threshold)
    assert full.digest != new.digest


def test_versions_are_compared_and_renewed_from_the_command_line(
    first: Predictor, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "own", ModuleType("own"))
    sys.modules["own"].make = nearest  # type: ignore[attr-defined]
    data, old, new = (tmp_path / f"{name}.safetensors" for name in ("data", "old", "new"))
    images, labels = toy(120, seed=7)
    save_file({"images": images, "labels": labels}, data)
    first.save(old)
    renew = ["recalibrate", old, "--model", "own:make", "--data", data, "--how", "add", "--out", new]
    shown = as_json(capsys, *renew)["differences"]
    assert shown["calibration points"] == [270, 390]
    found = as_json(capsys, "diff", old, new)
    assert found["differences"] == shown
    assert {"model fingerprint", "noise", "alpha 0.1, epsilon 0.03: rule"} <= set(found["same"])
    assert any(name.endswith("expected size") for name in found["differences"])
    entry = load(new).history[1]
    assert (entry["data"], entry["points"], len(entry["data_sha256"])) == ("data.safetensors", 120, 64)
    again = ["recalibrate", new, "--model", "own:make", "--data", data, "--out", tmp_path / "third.safetensors"]
    assert "the data of batch 1" in refused(capsys, *again)  # with how="replace" too: the holdout may have seen them
    said = run(capsys, "diff", old, new)[1]
    pair = found["differences"]["alpha 0.1, epsilon 0.03: promise"]
    assert f"alpha 0.1, epsilon 0.03: promise\n  a  {pair[0]}\n  b  {pair[1]}\n" in said
    assert "calibration points\n  a  270\n  b  390\n" in said
    code, out, _ = run(capsys, "diff", old, old)
    assert (code, "nothing differs" in out) == (0, True)
    assert "add 120 points" in run(capsys, "show", new)[1]
    new.write_bytes(new.read_bytes()[:-100])
    assert "safetensors" in refused(capsys, "diff", old, new)
    assert "together with window" in refused(capsys, *renew[:-4], "--how", "window", "--out", new)
