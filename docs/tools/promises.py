"""The tables of the page about promises: sizes, costs and the worst class, from results/."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]
WORDS = {
    "clusters": "clusters of classes",
    "delta 0.05": "with confidence 95 %",
    "delta 0.01": "with confidence 99 %",
    "calibration epsilon 0.0625": "calibration inputs moved by 0.0625",
}


def words(name: str) -> str:
    """A promise as the table calls it."""
    return ", ".join(WORDS.get(part, part) for part in name.split(", "))


def table(head: list[str], body: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *body])


def size(row: Row) -> str:
    if "needs" in row:
        return f"needs {row['needs']} points"
    if row["trivial_splits"] == row["splits"]:
        return "every label"
    form = ".1f" if row["size"]["mean"] >= 10 else ".2f"
    cost = "" if row["cost"] == 0 else f" ({row['cost']:+.0%})"
    return f"{row['size']['mean']:{form}} ± {row['size']['std']:{form}}{cost}"


def worst(row: Row) -> str:
    if "needs" in row:
        return ""
    found = row["worst_class"]
    mark = "**" if found["high"] < 1 - row["alpha"] else ""
    return f"{mark}{found['mean']:.3f} [{found['low']:.3f}, {found['high']:.3f}]{mark}"


def costs(rows: list[Row], method: str) -> str:
    """Every promise in a line, a pair of columns for every number of calibration points."""
    mine = [row for row in rows if row["asked"] == method]
    many = list(dict.fromkeys(row["calibration"] for row in mine))
    body = []
    for name in dict.fromkeys(row["name"] for row in mine):
        found = [next(row for row in mine if (row["name"], row["calibration"]) == (name, n)) for n in many]
        body.append([words(name), *(cell for row in found for cell in (size(row), worst(row)))])
    return table(["promise", *(f"{what}, n = {n}" for n in many for what in ("size", "worst class"))], body)


def facts(about: Row, first: Row, path: Path) -> str:
    own, hardware = about["config"], about["hardware"]
    return (
        f"{own['images']:,} test images, {own['draws of each']} noisy draws of each, {first['draws']} of them per query; HPS, σ = {own['sigma']:g}, ε = "
        f"{own['epsilon']:g}, α = {first['alpha']:g}, clean images, mean ± standard deviation over {own['splits']} splits, each with a holdout of {own['holdout']}. "
        f"The worst class has an interval that holds for all classes at once (95 %); bold where all of it lies below {1 - first['alpha']:g}. "
        f"`{about['command']}`, {hardware['threads']} CPU thread (`results/{path.name}`)."
    )


def read(path: Path) -> tuple[list[Row], Row, Row]:
    found = json.loads(path.read_text())
    return found["rows"], found["manifest"], next(row for row in found["rows"] if "size" in row)


def cifar10(path: Path) -> str:
    rows, about, first = read(path)

    def one(method: str, name: str, n: int) -> Row:
        return next(r for r in rows if (r["asked"], r["name"], r["calibration"]) == (method, name, n))

    large, small = about["config"]["calibration"]
    sure = [one("auto", "delta 0.05", n)["cost"] for n in (large, small)]
    plain, fair = one("cp", "marginal", large), one("cp", "per class", large)
    return "\n\n".join(
        [
            f"CIFAR-10, ResNet-110, method `auto`. {facts(about, first, path)}",
            costs(rows, "auto"),
            f"Confidence 95 % costs {sure[0]:.1%} in size at n = {large} and {sure[1]:.1%} at n = {small}. Where points are few, promises hurt: ask for few of them, "
            "or calibrate on more points. A rule is chosen on every holdout anew, so costs of a percent are within the noise of that choice.",
            "On clean images a rule that allows for attacks has coverage to spare in every class; an attack takes it away. Plain conformal prediction (`cp`, one noisy "
            f"draw, no attack allowed for) has none to spare, and shows what the average hides: {plain['classes_below']} of {about['config']['classes']} classes lie "
            f"significantly below {1 - first['alpha']:g} under the marginal promise, {fair['classes_below']} under the promise per class. It needs no holdout and "
            "calibrates on those points too.",
            costs([row for row in rows if row["name"] in ("marginal", "per class", "clusters")], "cp"),
        ]
    )


def cifar100(path: Path) -> str:
    rows, about, first = read(path)
    kept = ("marginal", "per class", "clusters", "delta 0.05", "delta 0.05, per class", "delta 0.05, clusters")
    return "\n\n".join(
        [
            f"CIFAR-100, ResNet-110, method `auto`, {about['config']['classes']} classes. {facts(about, first, path)}",
            costs([row for row in rows if row["name"] in kept], "auto"),
            "Per class, few points make thresholds high, and a class with too few is in every set. Clusters lift the worst class at a fraction of that cost.",
        ]
    )


def sections(results: Path) -> dict[str, str]:
    return {
        name: make(results / f"promises-{name}.json") for name, make in (("cifar10", cifar10), ("cifar100", cifar100))
    }
