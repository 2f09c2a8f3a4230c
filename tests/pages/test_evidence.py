"""Evidence: everything that is promised, assumed and known is there, and what is not about this predictor is refused."""

from __future__ import annotations

import copy
import json
import pickle
import re
import warnings
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import keepcover
from keepcover import InputError, Predictor, Promise
from keepcover.assumption import CHECKED, Assumption
from keepcover.guarantee import GENERAL
from keepcover.noise import NOISES, get_noise, get_norm
from keepcover.noise.norms import NORMS
from keepcover.pages.report import Section, Table
from keepcover.promises import CLAUSES
from tests.pages.reader import offline, parsed
from tests.toys import nearest, toy

EPSILON, SIGMA = 0.05, 0.1
ASKED: dict[str, Any] = {"epsilon": EPSILON, "sigma": SIGMA, "draws": 4, "seed": 0}


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return keepcover.calibrate(nearest(), toy(300, seed=1), method="exact", **ASKED)


@pytest.fixture(scope="module")
def audit(predictor: Predictor) -> keepcover.Audit:
    return keepcover.audit(predictor, toy(40, seed=2), steps=3, draws=4, seed=0, progress=False)


def words(page: str) -> str:
    return " ".join(unescape(" ".join(parsed(page).text)).split())


# -- assumptions -------------------------------------------------------------------------------------------------------


def test_every_assumption_in_the_library_says_how_it_is_checked() -> None:
    """Beside the sentence, in every registry: a new member cannot forget it."""
    clauses = [kind for kind in CLAUSES.values() if isinstance(kind, type)]
    stated = [*GENERAL, *(line for kind in (*NOISES.values(), *clauses) for line in kind.assumptions)]
    stated += Promise(delta=0.1, per="class").assumptions + Promise(per=["a", "b"]).assumptions
    stated += keepcover.Classification().assumptions
    assert len(stated) > 20
    for one in stated:
        assert isinstance(one, Assumption), one
        assert one.by in CHECKED
        assert len(one.how) > 20


def test_an_assumption_is_its_sentence_and_survives_copies() -> None:
    one = Assumption("It rains.", "none", "Look outside.")
    for same in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert (same, same.by, same.how) == ("It rains.", "none", "Look outside.")
    assert json.loads(json.dumps([one])) == ["It rains."]
    assert Assumption.of(one) is one
    assert Assumption.of("It snows.").by == "you"
    assert "without a way to check it" in Assumption.of("It snows.").how


def test_pages_show_assumptions_with_their_checks(predictor: Predictor) -> None:
    found = keepcover.evidence(predictor)
    rows = parsed(found.page.html()).rows
    for one in predictor.guarantee.assumptions:
        assert [str(one), CHECKED[one.by], one.how] in rows


# -- the whole ---------------------------------------------------------------------------------------------------------


def test_page_json_and_card_hold_all_that_was_given(
    predictor: Predictor, audit: keepcover.Audit, tmp_path: Path
) -> None:
    watch = keepcover.monitor(predictor)
    watch.add_outcomes([False] * 90 + [True] * 10)
    found = keepcover.evidence(predictor, data=toy(5), audits=[audit], monitor=watch, origin={"file": "<p>"})
    path = found.write(tmp_path / "new" / "evidence.html", card=tmp_path / "card.md")
    page, card, stated = (
        path.read_text(),
        (tmp_path / "card.md").read_text(),
        json.loads(path.with_suffix(".json").read_text()),
    )
    offline(page)
    text = words(page)
    assert str(predictor.guarantee) in text
    assert str(predictor.guarantee) in card
    for section in (
        "Threat model",
        "What epsilon means",
        "What is promised",
        "What the promise rests on",
        "Calibration data",
    ):
        assert f"### {section}" in card
        assert section in text
    for section in ("Audits", "In production", "Poisoning and drift", "What is not covered", "What to do"):
        assert f"### {section}" in card
        assert section in text
    assert page.count("data:image/png") == 3 * 5  # as it is, moved, attacked, difference, one draw
    assert predictor.provenance["scores"] in text
    assert predictor.digest == stated["predictor"]
    assert stated["promises"][0]["statement"] == str(predictor.guarantee)
    assert [one["assumption"] for one in stated["assumptions"]] == list(predictor.guarantee.assumptions)
    assert len(stated["audits"]) == len(audit.rows) == 3
    assert stated["monitors"][0]["promise"]["outcomes"] == 100
    assert stated["versions"]["keepcover"] == keepcover.__version__
    assert stated["origin"] == {"file": "<p>"}
    for moved in stated["moved"]:
        assert set(moved) == {"moved at random", "attacked"}
        assert 0 < moved["moved at random"]["length"] <= EPSILON * (1 + 1e-6)
        assert moved["attacked"]["length"] <= EPSILON * (1 + 1e-6)
    assert (
        stated["verdict"]
        == "3 audited observations are consistent with the promise. In production 100 outcomes raise no alarm."
    )


def test_the_file_alone_will_do(predictor: Predictor, tmp_path: Path) -> None:
    predictor.save(tmp_path / "p.safetensors")
    found = keepcover.evidence(keepcover.load(tmp_path / "p.safetensors"))
    assert found.to_dict()["predictor"] == predictor.digest
    assert found.verdict == "The promise has not been audited here. What happens in production was not given."
    assert "None was given: keepcover audit" in words(found.page.html())
    assert found.to_dict()["threat"]["spent"] == {
        "one number alone moves by": EPSILON,
        "every number moves by": pytest.approx(EPSILON / 4),
    }


def test_what_is_wrong_is_said_first(predictor: Predictor, audit: keepcover.Audit) -> None:
    watch = keepcover.monitor(predictor)
    watch.add_outcomes([True] * 60)
    broken = audit.to_dict()
    broken["rows"] = [{**row, "verdict": "violated"} for row in broken["rows"]]
    found = keepcover.evidence(predictor, audits=[broken], monitor=watch)
    assert found.verdict.startswith("An audit found a promise violated: none at 0. In production an alarm is raised")
    todo = list(found.to_dict()["what_to_do"])
    assert "the alarm on the promise (the case now)" in todo
    assert "an audit says violated (the case now)" in todo
    assert "the alarm on queries alone" in todo
    assert 'class="bad">alarm since' in found.page.html()


def test_full_sets_and_uncertified_methods_are_named() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        full = keepcover.calibrate(nearest(), toy(60, seed=1), method="rcp1", **{**ASKED, "epsilon": 1.0})
    assert full.full
    found = keepcover.evidence(full)
    assert "a set that holds everything (the case now)" in found.to_dict()["what_to_do"]
    assert "everything, always" in found.page.html()
    plain = keepcover.calibrate(nearest(), toy(60, seed=1), method="cp", epsilon=0.0, sigma=0.0)
    found = keepcover.evidence(plain, data=toy(4))
    assert "Attacks of any kind: cp promises nothing under attack." in found.to_dict()["not_covered"]
    assert "attacked" not in found.to_dict()["moved"][0]


def test_budgets_are_those_of_the_promise() -> None:
    outputs, truth = torch.randn(600, 4, 3, generator=torch.Generator().manual_seed(0)), torch.arange(600) % 3
    asked: dict[str, Any] = {"epsilon": 0.05, "sigma": 0.2, "seed": 0}
    promise = Promise(poisoned=2, drift=0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = keepcover.calibrate_outputs(outputs, truth, promise=promise, **asked)
    found = keepcover.evidence(made).to_dict()
    assert found["budgets"]["poisoned"] == "even if up to 2 calibration points were replaced, added or removed"
    assert "0.01 in total variation" in found["budgets"]["drift"]
    assert found["budgets"]["calibration_epsilon"] == "calibration inputs that were moved: by no distance"
    assert not any("replaced" in line for line in found["not_covered"])
    assert any("moved: by no distance" in line for line in found["not_covered"])


# -- other members of the seams ----------------------------------------------------------------------------------------


class Reads(nn.Module):
    """Reads images in which some pixels are absent."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nearest()

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images.nan_to_num(0.5))


@pytest.mark.parametrize(
    ("noise", "epsilon", "norm"),
    [("laplace:0.2", 0.1, "l1"), ("ablation:8", 1, "l0"), ("bands:1", 1, "patch"), ("gaussian:0.3", 0.01, "linf")],
)
def test_every_norm_says_what_its_radius_buys(noise: str, epsilon: float, norm: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = keepcover.calibrate(
            Reads(), toy(200, seed=1), noise=get_noise(noise), epsilon=epsilon, norm=norm, seed=0, alpha=0.3
        )
    found = keepcover.evidence(made, data=toy(3))
    offline(found.page.html())
    (spent, *_) = found.to_dict()["threat"]["spent"].values()
    assert 0 < spent <= 1
    rounded = 16 * 2**-24  # each of 16 pixels, when a float32 move is added
    for moved in found.to_dict()["moved"]:
        assert all(one["length"] <= epsilon * (1 + 1e-6) + rounded for one in moved.values()), moved
    assert ("the attacker may know everything" in found.card) == made.noise.deterministic


def test_a_radius_is_spent_within_the_radius() -> None:
    """Moving every number by what ``spent`` says has the length of the radius, and so has one number alone."""
    shape = (3, 8, 8)
    for name in NORMS:
        norm, radius = get_norm(name), 2.0
        spent = norm.spent(radius, shape)
        if norm.replaces:
            (share,) = spent.values()
            assert share * 64 == (2 if name == "l0" else 4)
            continue
        every = torch.full((1, *shape), spent["every number moves by"])
        assert float(norm.length(every)) == pytest.approx(radius, rel=1e-5)
        if "one number alone moves by" in spent:
            alone = torch.zeros(1, *shape)
            alone[0, 0, 0, 0] = spent["one number alone moves by"]
            assert float(norm.length(alone)) == pytest.approx(radius)


def test_regression_with_units_of_features() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(400, 3, generator=generator) * torch.tensor([1.0, 10.0, 100.0])
    model = nn.Linear(3, 1)
    truth = model(inputs).detach()[:, 0] + torch.randn(400, generator=generator)
    made = keepcover.calibrate(
        nn.Sequential(model, nn.Flatten(0)),
        (inputs, truth),
        task="regression",
        input_scale="std",
        method="exact",
        **ASKED,
    )
    found = keepcover.evidence(made, data=(inputs[:3], truth[:3]))
    page = words(found.page.html())
    assert "feature 2, alone" in page
    assert "no pictures" in page
    for moved in found.to_dict()["moved"]:
        assert all(one["length"] <= EPSILON * (1 + 1e-4) for one in moved.values())  # rounded in their own units
    assert "<img" not in found.page.html()


def test_a_model_without_gradients_is_attacked_by_queries(predictor: Predictor) -> None:
    model = nearest()

    def closed(images: Tensor) -> Tensor:
        with torch.no_grad():
            return model(images)

    made = keepcover.calibrate(closed, toy(200, seed=1), method="exact", fingerprint="closed", **ASKED)
    found = keepcover.evidence(made, data=toy(3))
    assert all("attacked" in one for one in found.to_dict()["moved"])


# -- what is not about this predictor ----------------------------------------------------------------------------------


def test_evidence_of_another_predictor_is_refused(predictor: Predictor, audit: keepcover.Audit) -> None:
    renewed = predictor.recalibrate(toy(200, seed=9), seed=3)
    with pytest.raises(InputError, match="audit of another predictor, or of this one before it was renewed"):
        keepcover.evidence(renewed, audits=[audit])
    with pytest.raises(InputError, match="watches another predictor"):
        keepcover.evidence(renewed, monitor=keepcover.monitor(predictor))
    assert keepcover.evidence(renewed, audits=[keepcover.audit(renewed, toy(20), radii=[], seed=0)]).rows


FOREIGN: dict[str, Any] = {
    "a list": "[]",
    "no JSON": "{",
    "deep": "[" * 100_000,
    "empty": "{}",
    "rows of nothing": '{"rows": [{}], "predictors": {}}',
    "rows of text": '{"rows": "abc", "predictors": {}}',
    "another program's": '{"results": [1, 2]}',
}


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_files_are_refused_in_words(predictor: Predictor, tmp_path: Path, name: str) -> None:
    path = tmp_path / "given.json"
    path.write_text(FOREIGN[name])
    with pytest.raises(InputError, match="audit"):
        keepcover.evidence(predictor, audits=[path])
    with pytest.raises(InputError, match="monitor"):
        keepcover.evidence(predictor, monitor=path)


def test_altered_audits_and_monitors_are_refused(predictor: Predictor, audit: keepcover.Audit, tmp_path: Path) -> None:
    rows = [{**row, "coverage": {"mean": "high"}} for row in audit.to_dict()["rows"]]
    with pytest.raises(InputError, match="is not an audit"):
        keepcover.evidence(predictor, audits=[{**audit.to_dict(), "rows": rows}])
    report = keepcover.monitor(predictor).report()
    with pytest.raises(InputError, match="not the state of a monitor"):
        keepcover.evidence(predictor, monitor={**report, "promise": {**report["promise"], "evidence": float("nan")}})
    with pytest.raises(InputError, match="the service has no monitor: switched off"):
        keepcover.evidence(predictor, monitor={"off": "switched off", "levels": []})
    binary = tmp_path / "monitor.sqlite"
    binary.write_bytes(b"SQLite format 3\x00\xff\xfe")
    with pytest.raises(InputError, match="it is not text"):
        keepcover.evidence(predictor, monitor=binary)
    with pytest.raises(InputError, match="cannot read"):
        keepcover.evidence(predictor, audits=[tmp_path / "none.json"])
    with pytest.raises(InputError, match=r"name the page, for instance .*evidence\.html"):
        keepcover.evidence(predictor).write(tmp_path / "evidence.json")
    with pytest.raises(InputError, match="calibrated on"):
        keepcover.evidence(predictor, data=(torch.zeros(3, 1, 9, 9), torch.zeros(3, dtype=torch.int64)))


def test_cards_are_one_table_whatever_names_say() -> None:
    nasty = "a | b\n# *c* <script> [x](y)"
    made = Section(nasty, nasty, Table(["one", nasty], [[nasty, nasty]]), points=[nasty], note=nasty).markdown()
    assert "<script" not in made.replace("\\<", "")
    assert len(made.splitlines()) == 11
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 3 for line in made.splitlines() if line.startswith("| "))
