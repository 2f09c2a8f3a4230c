"""Every noise, norm, method, promise and task together: what is allowed runs on toys, what is not is refused with the reason."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import keepcover
from keepcover import InputError, Promise
from keepcover.combinations import PROMISES, SHAPE, Combination, combinations, epsilon_of, own
from keepcover.methods import get_method
from keepcover.promises import CLAUSES

N = 80
GROUPS = np.array(["a", "b"] * (N // 2))


def toys() -> dict[str, tuple[Tensor, Tensor]]:
    """Outputs of four draws, and their truth, for every task."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(N) % 3
    one = torch.nn.functional.one_hot(labels, 3)
    noise = torch.randn(N, 4, 3, 2, 2, generator=generator)
    several = one.bool() | (torch.rand(N, 3, generator=generator) < 0.3)
    return {
        "classification": (3.0 * one[:, None] + noise[..., 0, 0], labels),
        "regression": (noise[:, :, 0, 0, 0], torch.zeros(N)),
        "multilabel": (6.0 * several[:, None] - 3.0 + noise[..., 0, 0], several),
        "segmentation": (3.0 * one[:, None, :, None, None] + noise, labels[:, None, None].expand(N, 2, 2)),
        "loss": (6.0 * several[:, None] - 3.0 + noise[..., 0, 0], several),
    }


TOYS = toys()


def run(cell: Combination) -> None:
    outputs, truth = TOYS[cell.task.name]
    promise = {**PROMISES[cell.promise]}
    if cell.promise == "per group":
        promise["per"] = GROUPS
    made = keepcover.calibrate_outputs(
        outputs, truth, noise=cell.noise, epsilon=epsilon_of(cell.norm), norm=cell.norm, shape=SHAPE, alpha=0.2, task=cell.task,
        method=cell.method, promise=Promise(**promise), draws=None if cell.noise.deterministic else 2, holdout=20, seed=0,
    )  # fmt: skip
    groups: Any = GROUPS[:3] if cell.promise == "per group" else None
    sets = made.predict_outputs(outputs[:3], groups=groups)
    assert len(sets.rows()) == 3
    assert (cell.promise == "marginal") == (not made.guarantee.promise.clauses)
    assert made.guarantee.certified == cell.method.certified


CELLS = list(combinations())
ALLOWED = [cell for cell in CELLS if not cell.why_not]


def test_the_table_has_every_member() -> None:
    assert {clause for promise in PROMISES.values() for clause in promise} >= {
        name for name, clause in CLAUSES.items() if getattr(clause, "__module__", "").startswith("keepcover.")
    }
    assert len({(c.task.name, c.method.name) for c in ALLOWED}) > 20
    assert {c.task.name for c in ALLOWED} == set(TOYS)
    assert {c.method.name for c in ALLOWED} == {m.name for m in own(keepcover.METHODS)}
    assert {c.promise for c in ALLOWED} == set(PROMISES)


@pytest.mark.parametrize("task", TOYS)
def test_what_is_allowed_runs(task: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", keepcover.KeepcoverWarning)  # few points: full sets are an answer
        for cell in ALLOWED:
            if cell.task.name == task:
                run(cell)


@pytest.mark.parametrize("task", TOYS)
def test_what_is_not_is_refused_with_the_reason(task: str) -> None:
    for cell in CELLS:
        if cell.task.name == task and cell.why_not:
            with pytest.raises(InputError) as told:
                run(cell)
            assert str(told.value) == cell.why_not


@pytest.mark.parametrize("task", TOYS)
def test_auto_answers_where_a_certificate_does(task: str) -> None:
    """With the rule of a method that the table allows; elsewhere it is refused, before the network runs."""
    cells = {(c.noise, c.norm): c for c in CELLS if c.task.name == task and c.promise == "marginal"}
    certified = {(c.noise, c.norm): c.method.name for c in ALLOWED if c.task.name == task and c.method.certified}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", keepcover.KeepcoverWarning)
        for key, cell in cells.items():
            auto = replace(cell, method=get_method("auto").suited(cell.task))
            assert bool(auto.why_not) == (key not in certified)
            if key in certified:
                run(auto)
