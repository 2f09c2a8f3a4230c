"""Evaluation of noisy logits by their place on the disk: a file, a store, or a store too large for memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from keepcover.errors import InputError
from keepcover.evaluation.splits import Row, evaluate_methods
from keepcover.evaluation.streaming import Question, evaluate_store
from keepcover.store import StoreReader
from keepcover.store.logits_file import read_arrays

IN_MEMORY = 2**28  # logits; scores of several kinds take a few times 4 bytes of each


class Evaluated(NamedTuple):
    """Rows, and what the logits they rest on are."""

    rows: list[Row]
    images: int
    sigma: float


def evaluate_logits(
    path: str | Path,
    *,
    sigma: float | None,
    epsilon: float,
    alpha: float,
    beta: float,
    score: str,
    methods: Sequence[str],
    transforms: Sequence[str],
    draws: int | None,
    calibration_draws: int | None,
    splits: int,
    holdout: int,
    redraw_holdout: bool,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluated:
    """:func:`evaluate_methods` on a file or a store. A store brings its sigma; a file needs one."""
    over = {"splits": splits, "holdout": holdout, "seed": seed, "progress": progress}
    asked = {
        "epsilon": epsilon,
        "alpha": alpha,
        "beta": beta,
        "score": score,
        "methods": tuple(methods),
        "transforms": tuple(transforms),
        "draws": draws,
        "calibration_draws": calibration_draws,
    }
    if not Path(path).is_dir():
        logits, labels = read_arrays(path, "logits", "labels")
        if sigma is None:
            raise InputError("expected --sigma, the noise that the logits of this file were computed with")
        rows = evaluate_methods(logits, labels, sigma=sigma, redraw_holdout=redraw_holdout, **asked, **over)
        return Evaluated(rows, len(logits), sigma)
    store = StoreReader.at(path)
    if sigma is not None and sigma != store.key.sigma:
        raise InputError(f"the store holds logits under noise of sigma {store.key.sigma:g}, not {sigma:g}")
    if store.key.images * store.draws * (store.classes or 0) > IN_MEMORY and not redraw_holdout:
        return Evaluated(evaluate_store(store, Question(**asked), **over), store.key.images, store.key.sigma)
    logits = store.read()
    rows = evaluate_methods(logits, store.labels, sigma=store.key.sigma, redraw_holdout=redraw_holdout, **asked, **over)
    return Evaluated(rows, len(logits), store.key.sigma)


def origin_of(path: str | Path) -> dict[str, str]:
    """Where noisy logits come from: everything a store knows; of a file, its checksum."""
    if not Path(path).is_dir():
        with Path(path).open("rb") as file:
            return {"logits": f"{Path(path).name}, SHA-256 {hashlib.file_digest(file, 'sha256').hexdigest()}"}
    store = StoreReader.at(path)
    key = store.key
    return {
        "logits": f"store {store.folder.name}, {store.draws} draws per image",
        "model": f"{key.structure}, fingerprint {key.model}",
        "data": f"{key.images} images, fingerprint {key.data}",
        "noise of the logits": f"sigma {key.sigma:g}, seed {key.seed}, role {key.role}",
        "numerics": f"autocast {key.autocast}, channels last {key.channels_last}, compile {key.compile}, device {key.device}",
    }
