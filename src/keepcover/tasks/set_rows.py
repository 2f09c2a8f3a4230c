"""Prediction sets as rows of a file: JSON lines or CSV, with class names."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from keepcover.errors import InputError
from keepcover.tasks.sets import PredictionSets

FORMATS = ("jsonl", "csv")
SEPARATOR = ";"


def format_of(path: Path | None) -> str:
    """The format that the ending of a file's name asks for; JSON lines where there is no file.

    Example:
        >>> format_of(Path("sets.csv"))
        'csv'
    """
    if path is None:
        return "jsonl"
    form = path.suffix.lower().removeprefix(".")
    if form not in FORMATS:
        raise InputError(
            f"expected a file that ends in .jsonl or .csv, got {path}; choose one, or say --format jsonl or csv"
        )
    return form


def set_rows(sets: PredictionSets, index: Sequence[int] | None = None) -> Iterator[dict[str, Any]]:
    """One dictionary per set: row number, labels (names where they are known), size, and whether it holds every label.

    Example:
        >>> import torch
        >>> from keepcover.guarantee import Guarantee
        >>> promise = Guarantee("exact", True, alpha=0.1, epsilon=0.1, sigma=0.2, draws=4, n=99)
        >>> sets = PredictionSets(torch.tensor([[True, False, True]]), promise, ("cat", "dog", "fox"))
        >>> list(set_rows(sets))
        [{'index': 0, 'labels': ['cat', 'fox'], 'size': 2, 'trivial': False}]
    """
    numbers = range(len(sets)) if index is None else index
    for number, labels, trivial in zip(numbers, sets.labels(), sets.trivial.tolist(), strict=True):
        yield {"index": int(number), "labels": labels, "size": len(labels), "trivial": trivial}


def write_rows(sets: PredictionSets, form: str, index: Sequence[int] | None = None) -> str:
    """The rows as the text of a file; in CSV the labels of a set are joined by semicolons."""
    if form not in FORMATS:
        raise InputError(f"expected the format jsonl or csv, got {form!r}")
    rows = list(set_rows(sets, index))
    if form == "jsonl":
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    ambiguous = [name for name in sets.class_names or () if SEPARATOR in name]
    if ambiguous:
        raise InputError(
            f"CSV joins labels by semicolons, and the class {ambiguous[0]!r} holds one; use the format jsonl"
        )
    text = io.StringIO()
    writer = csv.DictWriter(text, ["index", "labels", "size", "trivial"], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(
            {**row, "labels": SEPARATOR.join(map(str, row["labels"])), "trivial": str(row["trivial"]).lower()}
        )
    return text.getvalue()
