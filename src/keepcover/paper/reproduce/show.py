"""Rows beside the paper's printed values: Markdown, and cells for the HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def digits(value: float, like: float | None = None) -> str:
    """A size with as many decimals as are worth reading."""
    return f"{value:.3f}" if abs(like if like is not None else value) < 10 else f"{value:.2f}"


def measured(row: dict[str, Any]) -> str:
    """Size with its deviation over splits; coverage under attack; trivial splits counted, not hidden."""
    size = row["size"]
    text = f"{digits(size['mean'])} ± {digits(size['std'], size['mean'])}"
    if row["attack"] != "none":
        text += f", covers {100 * row['coverage']['mean']:.1f} ± {100 * row['coverage']['std']:.1f} %"
    if row["trivial_splits"]:
        text += f" ({row['trivial_splits']}/{row['splits']} trivial)"
    return text


def printed(row: dict[str, Any]) -> str:
    """The paper's number, or nothing."""
    paper = row["paper"]
    if paper["size"] is None:
        return ""
    text = f"{paper['size']:g}" + (f" ± {paper['size_std']:g}" if paper["size_std"] is not None else "")
    if paper["coverage"] is not None:
        text += f", covers {100 * paper['coverage']:.1f} %"
    return text


def grid(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Head and body: a line per row of the table, and per column what was measured with what the paper prints."""
    columns = list(dict.fromkeys(row["column"] for row in rows))
    body = []
    for name in dict.fromkeys(row["row"] for row in rows):
        line = [name]
        for column in columns:
            found = next((row for row in rows if (row["row"], row["column"]) == (name, column)), None)
            if found is None:
                line.append("")
                continue
            paper = printed(found)
            line.append(measured(found) + (f" (paper {paper})" if paper else ""))
        body.append(line)
    return ["", *columns], body


def improvements(rows: Sequence[dict[str, Any]]) -> list[str]:
    """How many times smaller than the baseline's every certified set is, column by column."""
    lines = []
    for column in dict.fromkeys(row.get("column") for row in rows):
        mine = {row["row"]: row for row in rows if row.get("column") == column and "row" in row}
        if "Baseline" not in mine:
            continue
        base = mine["Baseline"]
        parts = []
        for name, row in mine.items():
            if name == "Baseline":
                continue
            factor = base["size"]["mean"] / row["size"]["mean"]
            paper = base["paper"]["size"] and row["paper"]["size"] and base["paper"]["size"] / row["paper"]["size"]
            parts.append(f"{name} {factor:.2f}×" + (f" (paper {paper:.2f}×)" if paper else ""))
        lines.append(f"{column}: {', '.join(parts)}")
    return lines


def plain_grid(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Rows of a closed form: every number with as many digits as the paper prints, and the paper's beside it."""
    printed = [row.get("paper") or {} for row in rows]
    columns = [key for key in rows[0] if key not in ("paper", "differs")]

    def cell(row: dict[str, Any], paper: dict[str, Any], key: str) -> str:
        value = row.get(key)
        if not isinstance(value, float):
            return "" if value is None else str(value)
        return f"{value:.6g}" + (f" (paper {paper[key]})" if key in paper else "")

    return columns, [[cell(row, paper, key) for key in columns] for row, paper in zip(rows, printed, strict=True)]


def any_grid(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Head and body of whatever a result holds; curves have none."""
    if "row" in rows[0]:
        return grid(rows)
    if any(isinstance(value, list) for value in rows[0].values()):
        return [], []
    return plain_grid(rows)


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table; wide ones are turned so that columns become lines."""
    if len(head) > 7 and head[0] == "":
        turned = [list(line) for line in zip(head, *body, strict=True)]
        head, body = ["", *turned[0][1:]], turned[1:]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(line)} |" for line in body]
    return "\n".join(lines)
