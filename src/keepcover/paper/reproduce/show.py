"""Rows beside the paper's printed values: Markdown, and cells for the HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def measured(row: dict[str, Any]) -> str:
    """Size with its deviation over splits; coverage under attack; trivial splits counted, not hidden."""
    size, coverage = row["size"], row["coverage"]
    decimals = 3 if abs(size["mean"]) < 10 else 2  # as many as are worth reading
    text = f"{size['mean']:.{decimals}f} ± {size['std']:.{decimals}f}"
    if row["attack"] != "none":
        text += f", covers {100 * coverage['mean']:.1f} ± {100 * coverage['std']:.1f} %"
    return text + (f" ({row['trivial_splits']}/{row['splits']} trivial)" if row["trivial_splits"] else "")


def printed(row: dict[str, Any]) -> str:
    """The paper's number, or nothing."""
    paper = row["paper"]
    if paper["size"] is None:
        return ""
    text = f"{paper['size']:g}" + (f" ± {paper['size_std']:g}" if paper["size_std"] is not None else "")
    return text + (f", covers {100 * paper['coverage']:.1f} %" if paper["coverage"] is not None else "")


def improvements(rows: Sequence[dict[str, Any]]) -> list[str]:
    """How many times smaller than the baseline's every certified set is, column by column."""
    lines = []
    for column in dict.fromkeys(row["column"] for row in rows if "row" in row):
        mine = {row["row"]: row for row in rows if row["column"] == column}
        base = mine.pop("Baseline", None)
        if base is None:
            continue
        parts = []
        for name, row in mine.items():
            paper = base["paper"]["size"] and row["paper"]["size"] and base["paper"]["size"] / row["paper"]["size"]
            factor = f"{name} {base['size']['mean'] / row['size']['mean']:.2f}×"
            parts.append(factor + (f" (paper {paper:.2f}×)" if paper else ""))
        lines.append(f"{column}: {', '.join(parts)}")
    return lines


def any_grid(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Head and body of whatever a result holds, each number with what the paper prints; curves have none."""
    if any(isinstance(value, list) for value in rows[0].values()):
        return [], []

    def beside(text: str, paper: str) -> str:
        return f"{text} (paper {paper})" if paper else text

    if "row" in rows[0]:  # a table of the paper: a line per row, a place per column
        cells = {(row["row"], row["column"]): beside(measured(row), printed(row)) for row in rows}
        lines, columns = (list(dict.fromkeys(place)) for place in zip(*cells, strict=True))
        return ["", *columns], [[name, *(cells.get((name, column), "") for column in columns)] for name in lines]

    def cell(row: dict[str, Any], key: str) -> str:
        value = row.get(key)
        if isinstance(value, float):
            return beside(f"{value:.6g}", (row.get("paper") or {}).get(key, ""))
        return "" if value is None else str(value)

    head = [key for key in rows[0] if key not in ("paper", "differs")]
    return head, [[cell(row, key) for key in head] for row in rows]


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table; wide ones are turned so that columns become lines."""
    if len(head) > 7 and head[0] == "":
        head, *body = zip(head, *body, strict=True)
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(line)} |" for line in body)]
    return "\n".join(lines)
