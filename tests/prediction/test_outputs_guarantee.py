"""A predictor of outputs that the caller drew says so, until inputs are known; a model without noise is not blamed for it."""

from __future__ import annotations

from pathlib import Path

import torch

import keepcover

LABELS = torch.arange(400) % 3
LOGITS = torch.randn(400, 8, 3, generator=torch.Generator().manual_seed(0)) + 4 * torch.eye(3)[LABELS][:, None]


def test_outputs_drawn_elsewhere_are_an_assumption(tmp_path: Path) -> None:
    predictor = keepcover.calibrate_outputs(LOGITS, LABELS, epsilon=0.1, sigma=0.2, draws=4, seed=0)
    (said,) = [line for line in predictor.guarantee.assumptions if "computed by the caller" in line]
    assert said in predictor.predict_outputs(LOGITS).guarantee.to_dict()["assumptions"]
    predictor.save(tmp_path / "p.safetensors")
    assert keepcover.load(tmp_path / "p.safetensors").guarantee == predictor.guarantee


def test_a_model_is_not_asked_to_tolerate_noise_that_there_is_none_of() -> None:
    """Scores of one's own are small where a label fits, so their largest entry is no label: nothing is warned of."""
    scores = -LOGITS[:, 0]
    sets = keepcover.split_conformal((scores[:300], LABELS[:300]), scores[300:], score=None)
    assert sets.measure(LABELS[300:]).coverage.high > 0.9
    assert not any("computed by the caller" in line for line in sets.guarantee.assumptions)
