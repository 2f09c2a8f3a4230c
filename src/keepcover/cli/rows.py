"""Sets as rows of a file: JSON lines or CSV, on top of the rows that every kind of set gives."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keepcover.errors import InputError

FORMATS = ("jsonl", "csv", "npz")
SEPARATOR = ";"


def format_of(path: Path | None) -> str:
    """The format that the ending of a file's name asks for; JSON lines where there is no file.

    Example:
        >>> format_of(Path("sets.csv"))
        'csv'
    """
    form = "jsonl" if path is None else path.suffix.lower().removeprefix(".")
    if form not in FORMATS:
        raise InputError(
            f"expected a file that ends in .jsonl, .csv or .npz, got {path}; choose one, or say --format jsonl, csv or npz"
        )
    return form


def write_rows(rows: Sequence[dict[str, Any]], form: str) -> str:
    """The rows as the text of a file; in CSV what a set holds is joined by semicolons.

    Example:
        >>> print(write_rows([{"index": 7, "labels": ["cat", "fox"], "size": 2, "trivial": False}], "csv"), end="")
        index,labels,size,trivial
        7,cat;fox,2,false
    """
    if form == "jsonl":
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(rows[0] if rows else [])
    writer.writerows([_cell(value) for value in row.values()] for row in rows)
    return text.getvalue()


def write_arrays(sets: Any) -> bytes:
    """Sets as the arrays of an .npz file, with what they promise."""
    text = io.BytesIO()
    np.savez_compressed(
        text, guarantee=str(sets.guarantee), **{name: one.cpu().numpy() for name, one in sets.arrays().items()}
    )
    return text.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        value = [f"{name}={one:.6g}" for name, one in value.items()]
    if not isinstance(value, list):
        return value
    for one in value:
        if SEPARATOR in str(one):
            raise InputError(f"CSV joins labels by semicolons, and the class {one!r} holds one; use the format jsonl")
    return SEPARATOR.join(map(str, value))
