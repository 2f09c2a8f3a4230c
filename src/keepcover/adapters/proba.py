"""Classifiers that return probabilities, from any library, as the images -> logits that keepcover runs."""

from __future__ import annotations

import functools
import hashlib
import itertools
import types
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
    function = getattr(model, "predict_proba", model)
    if not callable(function):
        wanted = "an object with predict_proba or a function array -> probabilities"
        raise InputError(f"expected {wanted}, got {type(model).__name__}")
    own = fingerprint or (None if function is model else state_digest(model))  # code has no state to compare
    return ProbabilityClassifier(function, own, flatten)


# -- the state of a fitted estimator -----------------------------------------------------------------------------------

# They change how an estimator runs, not what it computes; a search tree counts its uses, and follows from the data beside.
_SKIPPED = ("n_jobs", "verbose", "_sklearn_version", "_tree")
# Code has no state that could be compared.
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, functools.partial, np.ufunc)

_ATOMS = (np.ndarray, np.generic, types.NoneType, bool, int, float, complex, str, bytes, type)  # are never seen again


def state_digest(value: Any) -> str | None:
    """SHA-256 over a nested state of numbers, strings, arrays, containers and plain objects; None where that fails.

    Objects are read as ``copy`` reads them, and nothing is pickled or run. The digest is the same in every process, and
    changes with any value in the state.

    Example:
        >>> state_digest({"a": [1, 2.0]}) == state_digest({"a": [1, 2.0]}), state_digest([1]) == state_digest([1.0])
        (True, False)
        >>> state_digest(lambda: 0) is None
        True
    """
    try:
        return _known_digest(value)
    except (TypeError, RecursionError):  # a value that has no canonical bytes
        return None


def _known_digest(value: Any) -> str:
    digest = hashlib.sha256()
    seen: dict[int, tuple[int, Any]] = {}  # keeps what it has seen alive, so that no id is used twice

    def add(value: Any) -> None:
        if id(value) in seen:
            kind, content, parts = "again", str(seen[id(value)][0]), ()
        else:
            kind, content, parts = _apart(value)
            if not isinstance(value, _ATOMS):
                seen[id(value)] = (len(seen), value)
        content = content.encode() if isinstance(content, str) else content
        # Kind and length first, so that no two states give the same bytes.
        digest.update(f"{kind} {len(content)}\n".encode() + content)
        for part in parts:
            add(part)

    add(value)
    return digest.hexdigest()


def _apart(value: Any) -> tuple[str, str | bytes, Iterable[Any]]:
    """The kind of a value, what it says itself, and its parts; TypeError where it has no canonical bytes."""
    kind = type(value).__name__
    match value:
        case np.ndarray() | np.generic():
            array: Any = np.asarray(value)
            if array.dtype.names:  # a record's padding bytes hold anything
                return "record", repr((array.dtype.names, array.shape)), [array[name] for name in array.dtype.names]
            if array.dtype.hasobject:
                return "objects", repr(array.shape), [array.ravel().tolist()]
            return "array", repr((array.dtype.str, array.shape)), [np.ascontiguousarray(array).tobytes()]
        case None | bool() | int() | float() | complex() | str() | bytes():
            return kind, value if isinstance(value, bytes) else repr(value), ()
        case type():
            return "type", f"{value.__module__}.{value.__qualname__}", ()
        case set() | frozenset():
            return "set", "".join(sorted(map(_known_digest, value))), ()
        case list() | tuple() | dict():
            items = itertools.chain.from_iterable(value.items()) if isinstance(value, dict) else value
            return kind, str(len(value)), items
    # Through what an object gives to ``copy``: how it is made, from what, and its state.
    reduced = None if isinstance(value, _CODE) else value.__reduce_ex__(4)
    if not isinstance(reduced, tuple):  # the name of something, not its state
        raise TypeError(kind)
    make: Any = reduced[0]
    arguments, state, *more = (*reduced[1:], None, None, None)[:4]
    if isinstance(state, dict):
        state = {key: item for key, item in sorted(state.items()) if key not in _SKIPPED}
    items = (None if item is None else list(item) for item in more)
    return "object", f"{make.__module__}.{make.__qualname__}", [arguments, state, *items]
