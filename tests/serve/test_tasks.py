"""The service answers for the task of its predictor: labels, intervals, masks, parameters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import keepcover
from keepcover.serve import create_app
from keepcover.serve.schemas import answer_model
from tests.serve.client import ask, refused
from tests.tasks.test_several_library import KINDS, made

pytestmark = pytest.mark.filterwarnings("ignore::keepcover.errors.KeepcoverWarning")


def images(n: int) -> Tensor:
    return KINDS["multilabel"][1](n, 3)[0].clamp(0, 1)


def predictor(kind: str) -> keepcover.Predictor:
    from dataclasses import replace

    one = made(kind, calibration_draws=None if kind == "loss" else 8)
    assert one.inputs is not None
    return replace(one, inputs=replace(one.inputs, low=0.0, high=1.0))


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1).mean(dim=1)


def regression() -> keepcover.Predictor:
    x = images(200)
    return keepcover.calibrate(
        Mean(), (x, x.flatten(1).mean(dim=1)), task="regression", epsilon=0.05, sigma=0.1, draws=4
    )


@pytest.mark.parametrize("kind", ["multilabel", "pixels", "masks", "loss", "regression"])
def test_answers_are_those_of_the_task(kind: str) -> None:
    served = regression() if kind == "regression" else predictor(kind)
    app = create_app(served)
    answer = ask(app, "POST", "/v1/predict", json={"images": images(4).tolist()})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    answer_model(served.task.name).model_validate(body, strict=True)
    assert len(body["sets"]) == 4
    assert (body["ticket"] is None) == (kind != "multilabel")  # tickets hold labels
    assert ("expected" in body["guarantee"]) == (kind != "regression")
    about = ask(app, "GET", "/v1/predictor").json()
    assert about["classes"] == served.task.candidates
    metrics = ask(app, "GET", "/metrics").text
    assert "keepcover_set_size" in metrics
    watched = ask(app, "GET", "/v1/monitor").json()
    assert len(watched["levels"]) == (kind == "multilabel")
    said = "a ticket of this service" if kind == "multilabel" else "no monitor"
    refused(ask(app, "POST", "/v1/outcomes", json={"ticket": "x", "labels": [0]}), 422, "invalid", said)
    schema = ask(app, "GET", "/openapi.json").json()["components"]["schemas"]
    wanted = {"multilabel": "Set", "pixels": "Scene", "masks": "Scene", "loss": "Parameter", "regression": "Intervals"}[
        kind
    ]
    assert wanted in schema


def test_several_true_labels_come_back_as_lists() -> None:
    """Shares of them are counted; none at all misses nothing."""
    app, share = create_app(predictor("multilabel")), 0.0

    def ticket() -> tuple[str, list[list[int]]]:
        body = ask(app, "POST", "/v1/predict", json={"images": images(4).tolist()}).json()
        return body["ticket"], [one["indices"] for one in body["sets"]]

    one, held = ticket()
    truth: list[list[int] | None] = [[0, 1, 1], [], None, [2]]
    share = 1 - sum(k in held[0] for k in (0, 1)) / 2 + (2 not in held[3])
    answer = ask(app, "POST", "/v1/outcomes", json={"ticket": one, "labels": truth}).json()
    assert answer == {"counted": 3, "missed": share}
    assert ask(app, "GET", "/v1/monitor").json()["levels"][0]["promise"]["misses"] == share
    for wrong in (0, [-1], [9], ["x"], [0] * 9):
        problem = ask(app, "POST", "/v1/outcomes", json={"ticket": ticket()[0], "labels": [wrong] * 4})
        refused(problem, 422, "invalid", "expected")


def test_masks_come_back_from_their_runs() -> None:
    served = predictor("masks")
    body = ask(create_app(served), "POST", "/v1/predict", json={"images": images(6).tolist()}).json()
    seen = 0
    for scene in body["sets"]:
        for one in scene["masks"]:
            lengths = torch.tensor(one["runs"])
            mask = (
                torch.arange(len(lengths)).remainder(2).repeat_interleave(lengths).view(scene["height"], scene["width"])
            )
            assert (one["label"], one["index"]) == ("bright", 1)
            seen += int(mask.sum())
        assert abs(scene["certain"] + scene["possible"] + scene["excluded"] - 1) < 1e-9
    assert seen > 0
