"""Tables of numbers: a CSV file as features and a target."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from keepcover.errors import InputError, refusing, warn


def read_csv(path: str | Path, target: str | None = None) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Features [n, columns] and target [n] in float64, and the names of the features, from a CSV file with a header.

    The target is the last column unless named. Columns of text are left out, and so are rows with a missing value, each with a
    warning: what is promised holds for rows that have them all.
    """
    path = Path(path)
    expected = "expected a CSV file with a header and as many values in every line"
    with refusing(f"{expected}, got {path}", OSError, ValueError), path.open(encoding="utf-8") as file:
        names = [name.strip().strip('"') for name in file.readline().split(",")]
        values = np.genfromtxt(file, delimiter=",", dtype=np.float64, ndmin=2)
    if target is not None and target not in names:
        raise InputError(f"expected a target among the columns {', '.join(names)}, got {target!r}")
    if values.shape[1] != len(names):
        raise InputError(f"{path} has {len(names)} names in its header and {values.shape[1]} values in a line")
    at = len(names) - 1 if target is None else names.index(target)
    text: np.ndarray = np.all(np.isnan(values), axis=0)
    if text[at]:
        raise InputError(f"the column {names[at]!r} holds no numbers; name another with --target")
    kept = [k for k in range(len(names)) if k != at and not text[k]]
    if text.any():
        warn(f"{path.name}: left out {', '.join(np.array(names)[text])}, which hold no numbers")
    whole: np.ndarray = ~np.any(np.isnan(values[:, [*kept, at]]), axis=1)
    if not whole.all():
        warn(f"{path.name}: left out {(~whole).sum()} of {len(whole)} rows with missing values")
    x, y = torch.from_numpy(values[whole][:, kept]), torch.from_numpy(values[whole][:, at])
    return x, y, tuple(names[k] for k in kept)
