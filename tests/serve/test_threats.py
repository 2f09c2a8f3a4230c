"""Tokens and deterministic noise behind the service."""

from __future__ import annotations

import pytest

from keepcover import Bands, calibrate
from keepcover.serve import create_app
from tests.prediction.test_any_threat import CAL, LENGTH, TEST, WORDS, text_predictor, texts, trained
from tests.serve.client import ask, refused

pytestmark = pytest.mark.filterwarnings("ignore::keepcover.errors.KeepcoverWarning")


def test_tokens_are_served_as_integers() -> None:
    tokens, labels = texts(30, 11)
    app = create_app(text_predictor())
    answer = ask(app, "POST", "/v1/predict", json={"images": tokens.tolist(), "epsilon": 2})
    assert answer.status_code == 200, answer.text
    held = [int(label) in one["indices"] for label, one in zip(labels, answer.json()["sets"], strict=True)]
    assert sum(held) >= 15  # of 30 at 80 %: fewer have a probability below 1e-5
    assert "has changed up to 2 of its 12 entries at will" in answer.json()["guarantee"]
    about = ask(app, "GET", "/v1/predictor").json()
    assert (about["image_shape"], about["pixel_range"]) == ([LENGTH], [0.0, WORDS - 1.0])
    for wrong, words in (
        ([[0.5] * LENGTH], "expected a token, a whole number, at images[0][0]"),
        ([[WORDS + 5] * LENGTH], f"expected tokens at most {WORDS - 1}, as calibrated on, got {WORDS + 5}"),
        ([[-1] * LENGTH], "expected tokens at least 0"),
        ([[1] * (LENGTH + 1)], f"has {LENGTH + 1} entries, not {LENGTH}"),
    ):
        refused(ask(app, "POST", "/v1/predict", json={"images": wrong}), 422, "invalid", words)


def test_what_is_deterministic_gets_the_same_answer_from_every_replica() -> None:
    predictor = calibrate(trained(Bands(3)), CAL, epsilon=1, noise=Bands(3), alpha=0.2)
    body = {"images": (TEST[0][:6] / 1.1).tolist()}
    answers = [ask(create_app(predictor), "POST", "/v1/predict", json=body).json()["sets"] for _ in range(2)]
    assert answers[0] == answers[1]
