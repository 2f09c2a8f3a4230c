"""Classification: what must not be missed, label sets, and what the task refuses."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from keepcover.errors import InputError
from keepcover.guarantee import Guarantee
from keepcover.methods import Asked, Exact
from keepcover.noise import Gaussian, Stream, Threat
from keepcover.scores import PTT, RAPS, CustomScore, Reading
from keepcover.tasks import Classification, PredictionSets, get_task
from keepcover.tasks.candidates import exceedances
from keepcover.testing import check_task

THREAT = Threat(Gaussian(0.25), 0.1)
GUARANTEE = Guarantee("exact", True, 0.1, THREAT, draws=4, n=100)


def logits(n: int = 30, draws: int = 6, classes: int = 4, seed: int = 0) -> Tensor:
    return 2 * torch.randn(n, draws, classes, generator=torch.Generator().manual_seed(seed))


def test_sets_for_notebooks_json_and_data_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = torch.tensor([[True, False], [True, True]]).repeat(15, 1)
    sets = PredictionSets(mask, GUARANTEE, ("<cat>", "dog"))
    assert json.loads(json.dumps(sets.to_dict()))["rows"][1] == {"labels": ["<cat>", "dog"], "size": 2, "trivial": True}
    page = sets._repr_html_()
    assert page.count("<tr>") == 21
    assert "10 more" in page
    assert "&lt;cat&gt;" in page
    assert "<cat>" not in page
    assert "With probability at least 90 %" in page
    assert "0 prediction sets" in sets[:0]._repr_html_()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InputError, match="a data frame needs pandas"):  # with it: tests/test_mlflow.py
        sets.to_pandas()


@pytest.mark.parametrize(
    "score", ["hps", "aps", "raps", CustomScore(lambda x: -x)], ids=lambda score: getattr(score, "name", score)
)
def test_the_suite_passes_every_score(score: Any) -> None:
    check_task(Classification(score), logits(), torch.arange(30) % 4)


@pytest.mark.parametrize(
    "score", ["hps", "aps", RAPS(0.1, 2), CustomScore(lambda x: -x)], ids=lambda score: getattr(score, "name", score)
)
@pytest.mark.parametrize("reading", ["score", "order", "ptt"])
def test_items_are_the_scores_of_the_true_label(score: Any, reading: str) -> None:
    """To the last bit those of all labels: calibration and prediction must agree where scores tie."""
    task, outputs, truth = Classification(score).seen(logits()), logits(), torch.arange(30) % 4
    u = torch.rand(30, generator=torch.Generator().manual_seed(1))
    order = reading != "score"
    steps = PTT().fit(torch.linspace(-3, 3, 50)) if reading == "ptt" else None
    read = Reading(order, steps)
    items, every = task.items(outputs, truth, read, u), task.prepare(outputs, read, u)
    assert items.weight is None
    assert items.points == 30
    assert torch.equal(items.draws.values, every.values[torch.arange(30), truth])
    own = task._score.order if order else task._score
    plain = own(outputs, u[:, None])
    assert torch.equal(every.values, (plain if steps is None else steps(plain)).transpose(1, 2))


def test_items_do_not_depend_on_the_pieces_they_are_made_in(monkeypatch: pytest.MonkeyPatch) -> None:
    task, outputs, truth = Classification("aps").seen(logits()), logits(), torch.arange(30) % 4
    u, read = torch.rand(30), Reading(order=False)
    whole = task.items(outputs, truth, read, u).draws.values
    thresholds = np.array([0.2, 0.6, np.inf])
    profile = task.profile(outputs, u, thresholds)
    monkeypatch.setattr("keepcover.scores.draws.PIECE", 50)
    assert torch.equal(task.items(outputs, truth, read, u).draws.values, whole)
    assert np.array_equal(task.profile(outputs, u, thresholds), profile)


def test_open_labels_count_as_missed() -> None:
    """-1 is a class that the model does not have: its every draw exceeds every finite threshold."""
    task, outputs = Classification(open_labels=True).seen(logits()), logits()
    truth = torch.arange(30) % 5 - 1
    known = truth >= 0
    for reading, worst in ((Reading(True), torch.inf), (Reading(False), 1.0)):
        items = task.items(outputs, task.check_truth(truth, 30), reading, torch.zeros(30))
        assert (items.draws.values[~known] == worst).all()
        closed = (
            Classification().seen(outputs).items(outputs[known], truth[known], reading, torch.zeros(int(known.sum())))
        )
        assert torch.equal(items.draws.values[known], closed.draws.values)
    assert task.assumptions == ()
    assert "one of the classes that the model has" in Classification().assumptions[0]
    with pytest.raises(InputError, match="got -1 to 3"):
        Classification().seen(outputs).check_truth(truth, 30)


def test_a_set_holds_what_its_rule_keeps() -> None:
    task, outputs = Classification().seen(logits()), logits()
    rule = Exact().rule(Asked(0.1, THREAT, 4, 100, 4), kappa=1, c=0)
    v = torch.zeros(30)
    summary = task.summary(task.prepare(outputs, rule.reading, v), rule, v)
    order = task._score.order(outputs, v[:, None])
    for t in (-1.0, 0.0, 2.0, torch.inf):
        mask = task.inside(summary, rule, torch.tensor(t))
        assert torch.equal(mask, (order[:, :4] > t).sum(dim=1) <= 1)  # the first four draws, at most one above
    each = torch.linspace(-2, 2, 30)[:, None]
    assert torch.equal(task.inside(summary, rule, each), summary <= each)  # thresholds broadcast


def test_exceedances_count_rows() -> None:
    rows = torch.randint(5, (40, 6), generator=torch.Generator().manual_seed(0)).float()
    thresholds = np.array([0.5, 2.0, 2.5, np.inf])
    found = exceedances(rows, thresholds).view(4, 7)
    for at, t in enumerate(thresholds):
        counts = (rows > t).sum(dim=1)
        assert found[at].tolist() == [int((counts == j).sum()) for j in range(7)]


def test_randomised_scores_get_their_own_uniform_numbers() -> None:
    stream, ids = Stream(3, "test"), torch.arange(50)
    assert torch.equal(Classification("aps").uniform(stream, ids), stream.uniform(ids, "aps"))
    assert (Classification("hps").uniform(stream, ids) == 0).all()


def test_tasks_survive_json_and_tell_another_score() -> None:
    task = Classification(RAPS(0.3, 2), class_names=("cat", "dog", "owl", "elk")).seen(logits())
    again = Classification.from_config(json.loads(json.dumps(task.config())))
    assert again == task
    again.check_probe(task.probe())
    with pytest.raises(InputError, match="gives other values than it did at calibration"):
        Classification(RAPS(0.2, 2)).seen(logits()).check_probe(task.probe())
    own = Classification(CustomScore(lambda x: -x, "mine")).seen(logits())
    with pytest.raises(InputError, match=r"custom score 'mine'; pass it"):
        Classification.from_config(own.config())
    with pytest.raises(InputError, match="was calibrated with score"):
        Classification.from_config(task.config(), "hps")
    same = Classification.from_config(own.config(), lambda x: -x)
    same.check_probe(own.probe())
    with pytest.raises(InputError, match="gives other values"):
        Classification.from_config(own.config(), lambda x: -2 * x).check_probe(own.probe())


def test_outputs_and_names_that_do_not_fit_are_refused() -> None:
    task = Classification(class_names=("a", "b", "c"))
    for bad in (torch.zeros(3, 4), torch.zeros(3, 4, 1), torch.zeros(3, 4, 2, dtype=torch.int64)):
        with pytest.raises(InputError, match="float logits"):
            task.seen(bad)
    with pytest.raises(InputError, match="expected 4 class names, one per output of the model, got 3"):
        task.seen(logits())
    with pytest.raises(InputError, match="calibrated on 4 classes, the model returned 3"):
        Classification().seen(logits()).seen(logits(classes=3))
    with pytest.raises(InputError, match="score 'nan' returned NaN"):
        Classification(CustomScore(lambda x: x * torch.nan, "nan")).prepare(logits(), Reading(True), torch.zeros(30))
    with pytest.raises(InputError, match=r"a task among .*classification.*, got 'clustering'"):
        get_task("clustering")


# -- sets --------------------------------------------------------------------------------------------------------------

MASK = torch.tensor([[True, False, False], [False, True, True], [False, False, False], [True, True, True]])


def test_sets_read_as_lists_rows_and_measures() -> None:
    sets = PredictionSets(MASK, GUARANTEE, ("cat", "dog", "owl"))
    assert list(sets) == [["cat"], ["dog", "owl"], [], ["cat", "dog", "owl"]]
    assert PredictionSets(MASK, GUARANTEE).labels() == [[0], [1, 2], [], [0, 1, 2]]
    assert sets.rows()[1] == {"labels": ["dog", "owl"], "size": 2, "trivial": False}
    assert [row["trivial"] for row in sets.rows()] == [False, False, False, True]
    assert sets.size.tolist() == [1, 2, 0, 3]
    truth = torch.tensor([0, 0, 2, 2])
    assert sets.covers(truth).tolist() == [True, False, False, True]
    assert sets.measure(truth).coverage.mean == 0.5
    assert list(sets[-1]) == [["cat", "dog", "owl"]]
    assert list(sets[1:3]) == [["dog", "owl"], []]
    assert len(sets[torch.tensor([0, 2])]) == 2
    assert "90 % certified within L2 0.1" in repr(sets)
    with pytest.raises(InputError, match="expected 4 labels"):
        sets.covers(truth[:2])


def test_sets_keep_the_draws_they_took() -> None:
    sets = PredictionSets(MASK, GUARANTEE, draws_used=torch.tensor([4, 8, 8, 2]))
    assert sets[1:].draws_used is not None
    assert sets[1:].draws_used.tolist() == [8, 8, 2]
