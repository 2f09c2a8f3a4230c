"""Classifiers that return probabilities, from any library, as the images -> logits that keepcover runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keepcover.adapters.state import state_digest
from keepcover.engine.inputs import check_probabilities
from keepcover.errors import InputError
from keepcover.scores.scores import as_logits


def log_probabilities(probs: Tensor, source: str = "the model") -> Tensor:
    """Checked probabilities [n, K] as logits: their logarithm, so that softmax gives them back and scores stay the same.

    Example:
        >>> log_probabilities(torch.tensor([[0.25, 0.75], [0.0, 1.0]])).softmax(dim=1)
        tensor([[2.5000e-01, 7.5000e-01],
                [1.0000e-30, 1.0000e+00]])
    """
    return as_logits(check_probabilities(probs, f"{source} to return probabilities").double()).float()


class ProbabilityClassifier:
    """``inputs -> probabilities`` of another library as the callable images -> logits that keepcover runs.

    Made by :func:`from_predict_proba`. It has no gradients, so audits need black-box attacks.
    """

    def __init__(
        self, function: Callable[[np.ndarray], Any], fingerprint: str | None = None, flatten: bool = True
    ) -> None:
        self.function, self.fingerprint, self.flatten = function, fingerprint, flatten

    def __call__(self, images: Tensor) -> Tensor:
        inputs = images.detach().cpu()
        inputs = inputs.flatten(1) if self.flatten else inputs
        probs = torch.as_tensor(np.asarray(self.function(inputs.numpy())))
        if probs.ndim == 0 or len(probs) != len(images):
            raise InputError(f"expected probabilities of {len(images)} inputs, got shape {tuple(probs.shape)}")
        return log_probabilities(probs, "predict_proba").to(images.device)


def from_predict_proba(model: Any, *, fingerprint: str | None = None, flatten: bool = True) -> ProbabilityClassifier:
    """A model without PyTorch for :func:`keepcover.calibrate`: a fitted estimator, or a function ``array -> probabilities``.

    Args:
        model: an object with ``predict_proba`` (scikit-learn, XGBoost, LightGBM, CatBoost ...), or a function from a
            float32 array [n, ...] to probabilities [n, K].
        fingerprint: a string that identifies the model in saved predictors. By default the SHA-256 of a fitted
            estimator's state where that can be read, else none.
        flatten: hand inputs over as vectors [n, features], which is what estimators take.

    Labels are columns of the probabilities: 0 to K - 1. Inputs may be vectors; epsilon and sigma are then in the units of
    the features, the same for all of them, so features should be on one scale.

    Example:
        >>> classifier = from_predict_proba(lambda x: np.stack([x[:, 0], 1 - x[:, 0]], axis=1))
        >>> classifier(torch.tensor([[0.25]])).exp()
        tensor([[0.2500, 0.7500]])
    """
    function = getattr(model, "predict_proba", None)
    if function is None:
        if not callable(model):
            raise InputError(
                f"expected an object with predict_proba or a function array -> probabilities, got {type(model).__name__}"
            )
        return ProbabilityClassifier(model, fingerprint, flatten)
    return ProbabilityClassifier(function, fingerprint or state_digest(model), flatten)
