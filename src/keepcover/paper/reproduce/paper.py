"""Every table of the paper (ICLR 2024, "Provably Robust Conformal Prediction with Improved Efficiency") as data.

Printed values are the paper's, for its own weights. Where the paper writes "RSCP+" without saying which bound, the
caption or the text around the table does: Hoeffding unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from keepcover.paper.reproduce.cells import Cell, Origin, Printed, Table, beyond, entry
from keepcover.scores import PTT

HOEFFDING, BERNSTEIN, RSCP = "rscp_plus_hoeffding", "rscp_plus_bernstein", "rscp"
N = 256
STEEP = PTT()  # the paper's transform
NAMES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "imagenet": "ImageNet"}


def _training_rows(
    method: str,
    origin: Origin,
    column: str,
    score: str,
    epsilon: float,
    attacked: bool,
    printed: tuple[Printed, Printed, Printed],
) -> Iterator[Cell]:
    """The paper's three rows: nothing, PTT, PTT + RCT."""
    rct = Origin(origin.dataset, origin.sigma, "rct", epsilon)
    kinds = (("Baseline", origin, None), ("PTT", origin, STEEP), ("PTT + RCT", rct, STEEP))
    for (row, where, transform), paper in zip(kinds, printed, strict=True):
        yield Cell(row, column, where, entry(method, epsilon, score, N, transform), attacked, paper)


def _table1() -> Table:
    full = {"cifar10": 10.0, "cifar100": 100.0}
    printed = {
        ("cifar10", "hps"): (Printed(2.294, 0.051), Printed(2.294, 0.051)),
        ("cifar100", "hps"): (Printed(26.06, 15.48), Printed(18.30, 1.08)),
        ("cifar10", "aps"): (Printed(2.685, 0.037), Printed(2.824, 0.047)),
        ("cifar100", "aps"): (Printed(21.96, 1.055), Printed(20.01, 0.94)),
    }
    cells: list[Cell] = []
    for (dataset, score), (ptt, rct) in printed.items():
        origin, column = Origin(dataset, 0.25), f"{NAMES[dataset]} {score.upper()}"
        paper = (Printed(full[dataset]), ptt, rct)
        cells += _training_rows(HOEFFDING, origin, column, score, 0.125, False, paper)
        cells.append(Cell("PTT, Bernstein", column, origin, entry(BERNSTEIN, 0.125, score, N, STEEP), beyond=True))
        cells += beyond(column, origin, score, 0.125)
    return Table(
        "table1",
        "Average set size of RSCP+ (Hoeffding), epsilon 0.125, sigma 0.25",
        "Table 1, and D.6 with deviations",
        tuple(cells),
        "Improvement factors are baseline size over size.",
    )


def _table2() -> Table:
    origin, cells = Origin("imagenet", 0.5), []
    printed = {
        "hps": (Printed(1000.0), Printed(1000.0, 0.0), Printed(59.12, 135.87)),
        "aps": (Printed(1000.0), Printed(94.66, 130.97), Printed(70.87, 3.69)),
    }
    for score, (base, ptt, bernstein) in printed.items():
        column = score.upper()
        cells += [
            Cell("Baseline", column, origin, entry(HOEFFDING, 0.25, score, N), paper=base),
            Cell("PTT", column, origin, entry(HOEFFDING, 0.25, score, N, STEEP), paper=ptt),
            Cell("PTT + Bernstein", column, origin, entry(BERNSTEIN, 0.25, score, N, STEEP), paper=bernstein),
            *beyond(column, origin, score, 0.25),
        ]
    return Table(
        "table2",
        "Average set size of RSCP+ on ImageNet, epsilon 0.25, sigma 0.5",
        "Table 2, and D.6 with deviations",
        tuple(cells),
    )


def _table3() -> Table:
    origin = Origin("cifar10", 0.25)
    printed = {256: 2.294, 512: 2.094, 1024: 1.954, 2048: 1.867, 4096: 1.816}
    cells = [
        Cell(
            "PTT, Hoeffding", f"N = {draws}", origin, entry(HOEFFDING, 0.125, "hps", draws, STEEP), paper=Printed(size)
        )
        for draws, size in printed.items()
    ]
    cells += [
        Cell(row, f"N = {draws}", origin, entry(method, 0.125, "hps", draws, transform), beyond=True)
        for row, method, transform in (("PTT, Bernstein", BERNSTEIN, STEEP), ("exact", "exact", None))
        for draws in printed
    ]
    return Table(
        "table3", "Average size and number of draws, CIFAR-10, HPS, epsilon 0.125, sigma 0.25", "Table 3", tuple(cells)
    )


def _table3_more() -> list[Table]:
    rows = {
        "cifar100": (HOEFFDING, 0.25, 0.125, {128: 39.95, 256: 26.06, 512: 13.60, 1024: 12.43}),
        "imagenet": (BERNSTEIN, 0.5, 0.25, {128: 1000.0, 256: 59.12, 512: 19.68, 1024: 10.34}),
    }
    tables = []
    for dataset, (method, sigma, epsilon, printed) in rows.items():
        origin, bound = Origin(dataset, sigma), "Hoeffding" if method == HOEFFDING else "Bernstein"
        cells = [
            Cell(
                f"PTT, {bound}",
                f"N = {draws}",
                origin,
                entry(method, epsilon, "hps", draws, STEEP),
                paper=Printed(size),
            )
            for draws, size in printed.items()
        ]
        cells += [
            Cell("exact", f"N = {draws}", origin, entry("exact", epsilon, "hps", draws), beyond=True)
            for draws in printed
        ]
        tables.append(
            Table(
                f"draws-{dataset}",
                f"Average size and number of draws, {NAMES[dataset]}, HPS, epsilon {epsilon:g}, sigma {sigma:g}",
                "Appendix D.7",
                tuple(cells),
            )
        )
    return tables


def _holdout_added() -> list[Table]:
    tables = []
    for dataset, sigma, epsilon, full in (
        ("cifar10", 0.25, 0.125, 10.0),
        ("cifar100", 0.25, 0.125, 100.0),
        ("imagenet", 0.5, 0.25, 1000.0),
    ):
        origin = Origin(dataset, sigma)
        cells = [
            Cell("Baseline", score.upper(), origin, entry(HOEFFDING, epsilon, score, N), paper=Printed(full))
            for score in ("hps", "aps")
        ]
        cells += beyond("HPS", origin, "hps", epsilon)
        tables.append(
            Table(
                f"holdout-{dataset}",
                f"RSCP+ baseline with the holdout added to its calibration set, {NAMES[dataset]}",
                "Appendix B.2",
                tuple(cells),
                "Every table here gives the holdout to methods that do not look at it.",
            )
        )
    return tables


def _conservativeness() -> Table:
    origin, cells = Origin("cifar10", 0.25), []
    for row, transform, robust, vanilla in (("Baseline", None, 2.108, 1.482), ("PTT", STEEP, 1.779, 1.468)):
        cells += [
            Cell(row, "RSCP", origin, entry(RSCP, 0.125, "hps", N, transform), paper=Printed(robust)),
            Cell(
                row,
                "before inflation",
                origin,
                entry("cp_smoothed", 0.125, "hps", N, transform),
                paper=Printed(vanilla),
            ),
        ]
    cells += beyond("RSCP", origin, "hps", 0.125)
    return Table(
        "conservativeness",
        "How much of a set is the price of robustness, CIFAR-10, HPS, epsilon 0.125, sigma 0.25",
        "Appendix A.4",
        tuple(cells),
        "Conservativeness is the difference of the columns (paper: 0.626 and 0.311). The exact certificates stand in the first column.",
    )


def _smoothadv() -> list[Table]:
    printed = {
        "cifar10": {
            "aps": ((2.751, 0.031, 0.9568, 0.0030), (2.202, 0.029, 0.9206, 0.0040), (1.895, 0.033, 0.9115, 0.0048)),
            "hps": ((2.108, 0.036, 0.9354, 0.0048), (1.779, 0.029, 0.9090, 0.0061), (1.864, 0.027, 0.9119, 0.0051)),
        },
        "cifar100": {
            "aps": ((16.19, 0.47, 0.9353, 0.0044), (12.78, 0.34, 0.9126, 0.0055), (12.32, 0.38, 0.9107, 0.0059)),
            "hps": ((14.30, 0.43, 0.9343, 0.0047), (10.78, 0.36, 0.9087, 0.0061), (10.61, 0.32, 0.9083, 0.0058)),
        },
    }
    tables = []
    for dataset, scores in printed.items():
        cells: list[Cell] = []
        for score, (base, ptt, rct) in scores.items():
            origin, column = Origin(dataset, 0.25), score.upper()
            paper = (Printed(*base), Printed(*ptt), Printed(*rct))
            cells += _training_rows(RSCP, origin, column, score, 0.125, True, paper)
            cells += beyond(column, origin, score, 0.125, attacked=True)
        tables.append(
            Table(
                f"smoothadv-{dataset}",
                f"RSCP under SmoothAdv, {NAMES[dataset]}, epsilon 0.125, sigma 0.25",
                "Appendix D.2, and D.6 with deviations",
                tuple(cells),
                "Coverage and size on attacked images.",
            )
        )
    inet = {
        "aps": ((51.72, 0.819, 0.9536, 0.0014), (30.20, 0.609, 0.9117, 0.0019)),
        "hps": ((16.64, 0.387, 0.9412, 0.0021), (8.52, 0.175, 0.9053, 0.0023)),
    }
    origin, cells = Origin("imagenet", 0.5), []
    for score, (base, ptt) in inet.items():
        for row, transform, paper in (("Baseline", None, base), ("PTT", STEEP, ptt)):
            rscp = entry(RSCP, 0.25, score, N, transform)
            cells.append(Cell(row, score.upper(), origin, rscp, True, Printed(*paper)))
        cells += beyond(score.upper(), origin, score, 0.25, attacked=True)
    tables.append(
        Table(
            "smoothadv-imagenet",
            "RSCP under SmoothAdv, ImageNet, epsilon 0.25, sigma 0.5",
            "Appendix D.2, and D.6 with deviations",
            tuple(cells),
            "Coverage and size on attacked images.",
        )
    )
    return tables


def _epsilon_and_sigma() -> list[Table]:
    by_epsilon = {
        (0.25, 0.125): ((2.108, 1.779, 1.864), (10.0, 2.152, 2.152)),
        (0.5, 0.25): ((3.303, 2.578, 2.642), (10.0, 3.269, 3.413)),
        (1.0, 0.5): ((5.759, 4.222, 4.245), (10.0, 5.559, 5.603)),
    }
    by_sigma = {
        (0.125, 0.125): ((1.999, 1.622, 1.705), (10.0, 3.341, 3.282)),
        (0.25, 0.125): ((2.108, 1.779, 1.864), (10.0, 2.152, 2.152)),
        (0.5, 0.125): ((2.573, 2.244, 2.296), (10.0, 2.916, 3.059)),
        (1.0, 0.125): ((3.78, 3.434, 3.473), (10.0, 4.663, 4.735)),
    }
    tables = []
    for name, what, printed in (("epsilon", "epsilon", by_epsilon), ("sigma", "sigma", by_sigma)):
        cells: list[Cell] = []
        for (sigma, epsilon), (plain, plus) in printed.items():
            origin, value = Origin("cifar10", sigma), epsilon if name == "epsilon" else sigma
            for method, label, numbers in ((RSCP, "RSCP", plain), (BERNSTEIN, "RSCP+", plus)):
                paper = (Printed(numbers[0]), Printed(numbers[1]), Printed(numbers[2]))
                column = f"{label}, {name} {value:g}"
                cells += _training_rows(method, origin, column, "hps", epsilon, False, paper)
            cells += beyond(f"RSCP+, {name} {value:g}", origin, "hps", epsilon)
        tables.append(
            Table(
                name,
                f"Average size for different {what}, CIFAR-10, HPS; RSCP+ with Bernstein",
                "Appendix D.3",
                tuple(cells),
                "sigma is twice epsilon." if name == "epsilon" else "epsilon is 0.125.",
            )
        )
    return tables


def _ablation() -> Table:
    printed = {
        "aps": ((2.751, 0.9568), (3.509, 0.9021), (2.269, 0.9315)),
        "hps": ((2.108, 0.9354), (3.501, 0.9039), (1.929, 0.9125)),
    }
    base, cells = Origin("cifar10", 0.25), []
    conftr, rct = Origin("cifar10", 0.25, "conftr"), Origin("cifar10", 0.25, "rct", 0.125)
    for score, numbers in printed.items():
        rscp = entry(RSCP, 0.125, score, N)
        for (row, origin), (size, coverage) in zip(
            (("Baseline", base), ("ConfTr", conftr), ("RCT", rct)), numbers, strict=True
        ):
            cells.append(Cell(row, score.upper(), origin, rscp, True, Printed(size, coverage=coverage)))
        matched = Origin("cifar10", 0.25, "exact", 0.125)
        cells.append(Cell("exact-matched", score.upper(), matched, rscp, True, beyond=True))
        cells += beyond(score.upper(), base, score, 0.125, attacked=True)
    return Table(
        "ablation",
        "Which training helps RSCP: CIFAR-10 under SmoothAdv, epsilon 0.125, sigma 0.25",
        "Appendix D.4",
        tuple(cells),
        "No PTT. The paper trains ConfTr in 50 and RCT in 95 minutes on two V100s; the cards in weights/ say what it took here.",
    )


def _temperature() -> Table:
    origin, cells = Origin("cifar10", 0.25), []
    for inverse in (10, 25, 50, 100, 200, 400, 800, 1600, 3200):
        for row, method in (("RSCP", RSCP), ("RSCP+, Hoeffding", HOEFFDING), ("RSCP+, Bernstein", BERNSTEIN)):
            one = entry(method, 0.125, "hps", N, PTT(1 / inverse))
            cells.append(Cell(row, f"T = 1/{inverse}", origin, one, beyond=method == BERNSTEIN))
    cells += beyond("no PTT", origin, "hps", 0.125)
    return Table(
        "temperature",
        "Average size and PTT's temperature, CIFAR-10, HPS, epsilon 0.125, sigma 0.25",
        "Appendix D.8 (a figure without printed numbers)",
        tuple(cells),
    )


def _motivation() -> Table:
    plain, base = Origin("cifar10", 0.0, trained=0.25), Origin("cifar10", 0.25)
    rct, cells = Origin("cifar10", 0.25, "rct", 0.125), []
    for column, attacked in (("clean", False), ("attacked", True)):
        cells += [
            Cell("Vanilla CP", column, plain, entry("cp", 0.125, "aps", 1), attacked),
            Cell("RSCP", column, base, entry(RSCP, 0.125, "aps", N), attacked),
            Cell("RSCP, PTT + RCT", column, rct, entry(RSCP, 0.125, "aps", N, STEEP), attacked),
            *beyond(column, base, "aps", 0.125, attacked),
        ]
    return Table(
        "motivation",
        "Why robust sets: coverage and size before and after an attack, CIFAR-10, APS, epsilon 0.125",
        "Figure in D.2 (no printed numbers)",
        tuple(cells),
        "Each network is attacked itself: vanilla CP by plain PGD, the others by SmoothAdv.",
    )


def _heads() -> list[Table]:
    """Beyond the paper: certified sizes before and after conformal training."""
    tables = []
    pairs = {
        "cifar10": ((0.25, 0.125), (0.5, 0.25), (1.0, 0.5), (0.125, 0.125), (0.5, 0.125), (1.0, 0.125)),
        "cifar100": ((0.25, 0.125),),
    }
    for dataset, settings in pairs.items():
        cells = []
        for sigma, epsilon in settings:
            for row, head in (("base", "base"), ("ConfTr", "conftr"), ("RCT", "rct"), ("exact-matched", "exact")):
                origin = Origin(dataset, sigma, head, epsilon if head in ("rct", "exact") else 0.0)
                for cell in beyond("", origin, "hps", epsilon):
                    if cell.row.startswith("exact"):
                        place = f"{cell.row}, sigma {sigma:g}, epsilon {epsilon:g}"
                        cells.append(replace(cell, row=row, column=place))
                for label, method, transform in (
                    ("RSCP", RSCP, None),
                    ("RSCP PTT", RSCP, STEEP),
                    ("RSCP+ PTT", HOEFFDING, STEEP),
                    ("RSCP+ PTT Bernstein", BERNSTEIN, STEEP),
                ):
                    place = f"{label}, sigma {sigma:g}, epsilon {epsilon:g}"
                    cells.append(Cell(row, place, origin, entry(method, epsilon, "hps", N, transform), beyond=True))
        tables.append(
            Table(
                f"heads-{dataset}",
                f"Conformally trained last layers under every rule, {NAMES[dataset]}, HPS",
                "beyond the paper",
                tuple(cells),
                "Rows are trainings, columns are rules and settings.",
            )
        )
    return tables


def _bank() -> Table:
    """Beyond the paper: does training from a bank of features give what fresh noise in every batch gives?"""
    cells = []
    for row, head in (
        ("bank, seed 0", "rct15-bank0"),
        ("bank, seed 1", "rct15-bank1"),
        ("bank, seed 2", "rct15-bank2"),
        ("fresh noise, seed 0", "rct15-fresh0"),
    ):
        origin = Origin("cifar10", 0.25, head, 0.125)
        for column, method, transform, draws in (
            ("RSCP", RSCP, None, N),
            ("RSCP PTT", RSCP, STEEP, N),
            ("RSCP+ PTT Bernstein", BERNSTEIN, STEEP, N),
            ("exact, 16 draws", "exact", None, 16),
            ("exact, 256 draws", "exact", None, N),
        ):
            cells.append(Cell(row, column, origin, entry(method, 0.125, "hps", draws, transform), beyond=True))
    return Table(
        "bank",
        "RCT from a bank of features and under fresh noise, CIFAR-10, 15 epochs, HPS, epsilon 0.125, sigma 0.25",
        "beyond the paper",
        tuple(cells),
        "The same recipe with its milestones scaled to 15 epochs.",
    )


def tables() -> dict[str, Table]:
    """Every table, by name."""
    every = [
        _table1(),
        _table2(),
        _table3(),
        *_table3_more(),
        *_holdout_added(),
        _conservativeness(),
        *_smoothadv(),
        *_epsilon_and_sigma(),
        _ablation(),
        _temperature(),
        _motivation(),
        *_heads(),
        _bank(),
    ]
    return {table.name: table for table in every}
