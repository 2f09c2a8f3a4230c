"""The tables of the page about choosing: set sizes from results/, so that the advice cannot drift from the numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Size = Callable[[Row], str]
EXACT = ("exact, 1 draw", "exact, 4 draws", "exact, 16 draws", "exact, 64 draws", "exact, 256 draws")
NAMES = {
    "PTT": "`rscp_plus_hoeffding`, PTT",
    "PTT, Bernstein": "`rscp_plus_bernstein`, PTT",
    "Baseline": "`rscp_plus_hoeffding`, no PTT",
}


def rows_of(results: Path, name: str) -> list[Row]:
    return json.loads((results / "reproduce" / f"{name}.json").read_text())["rows"]


def one(rows: list[Row], **wanted: Any) -> Row:
    (found,) = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    return found


def table(head: list[str], body: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *body])


def facts(row: Row, rest: str) -> str:
    """The setting that all rows of a table share."""
    return (
        f"Mean labels per set ± deviation over {row['splits']} splits; clean images, a ResNet-110 trained under the noise, "
        f"α = {row['alpha']:g}, {rest}."
    )


def at(row: Row) -> str:
    return f"ε = {row['epsilon']:g}, σ = {row['sigma']:g}"


def methods(results: Path, size: Size) -> str:
    """Every certified method at its own number of draws, the smallest sets first."""
    rows = [row for row in rows_of(results, "table1") if row["score"] == "hps" and row["row"] != "PTT + RCT"]
    ten = {row["row"]: row for row in rows if row["dataset"] == "cifar10"}
    body = [
        [
            NAMES.get(name, f"`{row['method']}`"),
            str(row["draws"]),
            str(row["calibration_draws"]),
            size(row),
            size(one(rows, row=name, dataset="cifar100")),
        ]
        for name, row in sorted(ten.items(), key=lambda item: item[1]["size"]["mean"])
    ]
    head = ["method", "draws per query", "draws per calibration point", "CIFAR-10, of 10", "CIFAR-100, of 100"]
    return f"{table(head, body)}\n\n{facts(rows[0], f'{at(rows[0])}, HPS')}"


def forms(results: Path, size: Size) -> str:
    """The forms of BinCP and CAS beside the exact certificate, all with 64 draws."""
    rows = json.loads((results / "evaluate-cifar10-64-draws.json").read_text())["rows"]
    certified = [row for row in rows if row["method"].startswith(("bincp", "cas", "exact", "rcp1"))]
    ordered = sorted(certified, key=lambda row: row["size"]["mean"])
    body = [[f"`{r['method']}`{', PTT' * (r['transform'] == 'ptt')}", str(r["draws"]), size(r)] for r in ordered]
    return f"{table(['method', 'draws per query', 'CIFAR-10, of 10'], body)}\n\n{facts(rows[0], f'{at(rows[0])}, HPS')}"


def draws(results: Path, size: Size) -> str:
    """What more evaluations per query buy: the exact certificates, and RSCP+ where it was run."""
    rows, more = rows_of(results, "table1"), rows_of(results, "draws-cifar100")
    exact = [row for row in rows if row["row"] in EXACT and row["score"] == "hps"]
    exact += [row for row in more if row["method"] == "exact" and row["draws"] not in (64, 256)]
    plus = [row for row in more if row["method"] == "rscp_plus_hoeffding"]
    columns = ([r for r in exact if r["dataset"] == "cifar10"], [r for r in exact if r["dataset"] == "cifar100"], plus)
    body = [
        [str(number), *(next((size(row) for row in column if row["draws"] == number), "") for column in columns)]
        for number in sorted({row["draws"] for column in columns for row in column})
    ]
    head = ["draws per query", "exact, CIFAR-10", "exact, CIFAR-100", "RSCP+ with PTT, CIFAR-100"]
    return f"{table(head, body)}\n\n{facts(rows[0], f'{at(rows[0])}, HPS')} Empty cells were not run."


def scores(results: Path, size: Size) -> str:
    """HPS beside APS, for the exact certificates."""
    rows = rows_of(results, "table1")
    columns = ("CIFAR-10 HPS", "CIFAR-10 APS", "CIFAR-100 HPS", "CIFAR-100 APS")
    body = [[name, *(size(one(rows, row=name, column=column)) for column in columns)] for name in EXACT]
    return f"{table(['certificate', *columns], body)}\n\n{facts(rows[0], at(rows[0]))}"


def sigma(results: Path, size: Size) -> str:
    """Sizes against sigma at one epsilon, and against epsilon at sigma = 2 epsilon."""
    rows = [row for name in ("sigma", "epsilon") for row in rows_of(results, name) if row["column"].startswith("RSCP+")]
    body = []
    for epsilon, noise in sorted({(row["epsilon"], row["sigma"]) for row in rows}):
        mine = {row["row"]: row for row in rows if (row["epsilon"], row["sigma"]) == (epsilon, noise)}
        cells = [size(mine[name]) for name in ("exact, 4 draws", "exact, 16 draws", "PTT")]
        body.append([f"{epsilon:g}", f"{noise:g}", f"{epsilon / noise:g}", *cells])
    head = ["ε", "σ", "ε/σ", "exact, 4 draws", "exact, 16 draws", "RSCP+ Bernstein, PTT, 256 draws"]
    return f"{table(head, body)}\n\n{facts(rows[0], 'CIFAR-10, HPS; each σ has its own model')}"


def sections(results: Path, size: Size) -> dict[str, str]:
    """Name of a section -> its table, for every section of the page."""
    return {make.__name__: make(results, size) for make in (methods, forms, draws, scores, sigma)}
