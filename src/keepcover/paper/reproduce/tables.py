"""Every table of the paper as the cells to compute: where a number comes from and how. What is printed is in ``printed.toml``.

Where the paper writes "RSCP+" without saying which bound, the caption or the text around the table does: Hoeffding unless
said otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from keepcover.evaluation import Entry
from keepcover.methods import get_method
from keepcover.scores import PTT
from keepcover.tasks import Classification

OFF_THE_SHELF = "efficientnet-lite0"
DENOISED = f"denoised {OFF_THE_SHELF}"
TOWARDS = f"denoised@denoiser-{OFF_THE_SHELF} {OFF_THE_SHELF}"  # by a denoiser trained towards its clean outputs
HOEFFDING, BERNSTEIN, RSCP = "rscp_plus_hoeffding", "rscp_plus_bernstein", "rscp"
SCORES = ("hps", "aps")
STEEP = PTT()  # the paper's transform
TRAININGS = (("Baseline", None, "base"), ("PTT", STEEP, "base"), ("PTT + RCT", STEEP, "rct"))  # the paper's rows
HEADS = {"base": "base", "ConfTr": "conftr", "RCT": "rct", "exact-matched": "exact"}
RULES = (
    ("RSCP", RSCP, None),
    ("RSCP PTT", RSCP, STEEP),
    ("RSCP+ PTT", HOEFFDING, STEEP),
    ("RSCP+ PTT Bernstein", BERNSTEIN, STEEP),
)
# What goes beyond the paper in every table: the exact certificates from one draw on, and other published ones.
BEYOND = (
    ("exact, 1 draw", "exact_asymmetric", 1, 64),
    ("exact, 4 draws", "exact_asymmetric", 4, 64),
    ("exact, 16 draws", "exact_asymmetric", 16, 64),
    ("exact, 64 draws", "exact", 64, None),
    ("exact, 256 draws", "exact", 256, None),
    ("RCP1, 1 draw", "rcp1", 1, None),
    ("BinCP, 256 draws", "bincp", 256, None),
    ("CAS, 256 draws", "cas", 256, None),
)


@dataclass(frozen=True)
class Origin:
    """A network under noise on a dataset: its noisy outputs are all that a table needs.

    Attributes:
        dataset: ``cifar10``, ``cifar100`` or ``imagenet``.
        sigma: the noise at calibration and test; 0 runs the network as it is.
        head: ``base``, or a conformally trained last layer: ``conftr``, ``rct`` or ``exact``.
        epsilon: the radius that head was trained for.
        trained: the noise its weights were trained at, where it differs.
        network: another network than the paper's, which was not trained under noise: ``efficientnet-lite0``, and
            ``denoised efficientnet-lite0`` behind the denoiser, whose file follows an ``@`` where it is not the bundled one.
    """

    dataset: str
    sigma: float
    head: str = "base"
    epsilon: float = 0.0
    trained: float | None = None
    network: str = ""

    @property
    def weights(self) -> str:
        """The name of the base weights."""
        network = "resnet50" if self.dataset == "imagenet" else "resnet110"
        return self.network or f"{self.dataset}-{network}-sigma{self.trained or self.sigma:g}"


def head_name(base: str, kind: str, epsilon: float) -> str:
    """The file name of a head without its suffix; ConfTr knows no epsilon.

    Example:
        >>> head_name("cifar10-resnet110-sigma0.25", "rct", 0.125)
        'cifar10-resnet110-sigma0.25-rct-epsilon0.125'
    """
    return f"{base}-conftr" if kind == "conftr" else f"{base}-{kind}-epsilon{epsilon:g}"


@dataclass(frozen=True)
class Cell:
    """One place of a table: how to compute it; and what the paper prints there: size, coverage and their deviations."""

    row: str
    column: str
    origin: Origin
    entry: Entry
    attacked: bool = False
    paper: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Setting:
    """A dataset under noise and attack; makes the cells of tables about it."""

    dataset: str
    sigma: float
    epsilon: float

    @property
    def place(self) -> str:
        return f"sigma {self.sigma:g}, epsilon {self.epsilon:g}"

    def origin(self, head: str = "base", network: str = "") -> Origin:
        epsilon = 0.0 if head in ("base", "conftr") else self.epsilon
        return Origin(self.dataset, self.sigma, head, epsilon, network=network)

    def cell(
        self, row: str, column: str, method: str, score: str = "hps", head: str = "base", hit: bool = False, **how: Any
    ) -> Cell:
        """A method as the paper runs it: 256 draws, and no transform unless one is given, which methods that compare ignore."""
        transform, known = how.pop("transform", None), get_method(method)
        chosen = known if known.compares_only else get_method(known, transform=transform)
        entry = Entry(chosen, self.epsilon, **{"draws": 256, **how}, task=Classification(score))
        return Cell(row, column, self.origin(head), entry, hit)

    def trainings(self, column: str, method: str, score: str = "hps", attacked: bool = False) -> Iterator[Cell]:
        """The paper's rows: nothing, PTT, PTT + RCT, which it does not have for ImageNet."""
        for row, transform, head in TRAININGS[: 2 if self.dataset == "imagenet" else 3]:
            yield self.cell(row, column, method, score, head, attacked, transform=transform)

    def beyond(self, column: str, score: str = "hps", attacked: bool = False) -> Iterator[Cell]:
        for row, method, draws, calibration in BEYOND:
            how = {"draws": draws, "calibration_draws": calibration}
            yield self.cell(row, column, method, score, hit=attacked, **how)

    def exact(self, row: str, origin: Origin) -> Iterator[Cell]:
        """The exact certificates of another origin in a row of their own, by draws."""
        for cell in self.beyond(""):
            if cell.row.startswith("exact"):
                yield replace(cell, row=row, column=f"{cell.row}, {self.place}", origin=origin)


CIFAR10, CIFAR100 = Setting("cifar10", 0.25, 0.125), Setting("cifar100", 0.25, 0.125)
IMAGENET = Setting("imagenet", 0.5, 0.25)


def _rscp_plus(bernstein: str, settings: dict[str, Setting]) -> Iterator[Cell]:
    for score in SCORES:
        for name, setting in settings.items():
            column = f"{name}{score.upper()}"
            yield from setting.trainings(column, HOEFFDING, score)
            yield setting.cell(bernstein, column, BERNSTEIN, score, transform=STEEP)
            yield from setting.beyond(column, score)


def _by_draws(setting: Setting, rows: dict[str, str], *many: int) -> Iterator[Cell]:
    for row, method in rows.items():
        for draws in many:
            yield setting.cell(row, f"N = {draws}", method, transform=STEEP, draws=draws)


def _holdout_added(setting: Setting) -> Iterator[Cell]:
    for score in SCORES:
        yield setting.cell("Baseline", score.upper(), HOEFFDING, score)
    yield from setting.beyond("HPS")


def _conservativeness() -> Iterator[Cell]:
    for row, transform, _ in TRAININGS[:2]:
        yield CIFAR10.cell(row, "RSCP", RSCP, transform=transform)
        yield CIFAR10.cell(row, "before inflation", "cp_smoothed", transform=transform)
    yield from CIFAR10.beyond("RSCP")


def _smoothadv(setting: Setting) -> Iterator[Cell]:
    for score in reversed(SCORES):
        yield from setting.trainings(score.upper(), RSCP, score, attacked=True)
        yield from setting.beyond(score.upper(), score, attacked=True)


def _by_parameter(name: str, *pairs: tuple[float, float]) -> Iterator[Cell]:
    """Sizes of RSCP and RSCP+ by epsilon or sigma, for pairs of (sigma, epsilon)."""
    for setting in (Setting("cifar10", *pair) for pair in pairs):
        value = f"{name} {getattr(setting, name):g}"
        yield from setting.trainings(f"RSCP, {value}", RSCP)
        yield from setting.trainings(f"RSCP+, {value}", BERNSTEIN)
        yield from setting.beyond(f"RSCP+, {value}")


def _ablation() -> Iterator[Cell]:
    for score in reversed(SCORES):
        for row, head in HEADS.items():
            yield CIFAR10.cell("Baseline" if row == "base" else row, score.upper(), RSCP, score, head, hit=True)
        yield from CIFAR10.beyond(score.upper(), score, attacked=True)


def _temperature() -> Iterator[Cell]:
    for inverse in (10, 25, 50, 100, 200, 400, 800, 1600, 3200):
        for row, method in (("RSCP", RSCP), ("RSCP+, Hoeffding", HOEFFDING), ("RSCP+, Bernstein", BERNSTEIN)):
            yield CIFAR10.cell(row, f"T = 1/{inverse}", method, transform=PTT(1 / inverse))
    yield from CIFAR10.beyond("no PTT")


def _motivation() -> Iterator[Cell]:
    for column, hit in (("clean", False), ("attacked", True)):
        vanilla = CIFAR10.cell("Vanilla CP", column, "cp", "aps", hit=hit, draws=1)
        yield replace(vanilla, origin=Origin("cifar10", 0.0, trained=0.25))
        yield CIFAR10.cell("RSCP", column, RSCP, "aps", hit=hit)
        yield CIFAR10.cell("RSCP, PTT + RCT", column, RSCP, "aps", "rct", hit, transform=STEEP)
        yield from CIFAR10.beyond(column, "aps", attacked=hit)


def _heads(dataset: str, *pairs: tuple[float, float]) -> Iterator[Cell]:
    """Beyond the paper: certified sizes before and after conformal training, for pairs of (sigma, epsilon)."""
    for setting in (Setting(dataset, *pair) for pair in pairs):
        for row, head in HEADS.items():
            yield from setting.exact(row, setting.origin(head))
            for rule, method, transform in RULES:
                yield setting.cell(row, f"{rule}, {setting.place}", method, head=head, transform=transform)


def _bank() -> Iterator[Cell]:
    """Beyond the paper: does training from a bank of features give what fresh noise in every batch gives?"""
    names = {f"bank, seed {seed}": f"rct15-bank{seed}" for seed in range(3)} | {"fresh noise, seed 0": "rct15-fresh0"}
    for row, head in names.items():
        for rule, method, transform in RULES:
            if method != HOEFFDING:
                yield CIFAR10.cell(row, rule, method, head=head, transform=transform)
        for draws in (16, 256):
            yield CIFAR10.cell(row, f"exact, {draws} draws", "exact", head=head, draws=draws)


def _denoised(table: Callable[[], Iterator[Cell]], *sigmas: float) -> Iterator[Cell]:
    """A table of ImageNet with a network off the shelf behind the denoiser, at these sigmas."""
    for sigma in sigmas:
        for cell in table():
            origin = Origin("imagenet", sigma, network=DENOISED)
            yield replace(cell, column=f"{cell.column}, sigma {sigma:g}", origin=origin)


def _off_the_shelf(**networks: str) -> Iterator[Cell]:
    """Beyond the paper: such a network under the exact certificate, by draws and radius."""
    for row, network in networks.items():
        for pair in ((0.25, 0.125), (0.25, 0.25), (0.5, 0.25)):
            setting = Setting("imagenet", *pair)
            yield from setting.exact(row, setting.origin(network=network))


WITH_HOEFFDING, WITH_BERNSTEIN = {"PTT, Hoeffding": HOEFFDING}, {"PTT, Bernstein": BERNSTEIN}
EXACT, FEW = {"exact": "exact"}, (128, 256, 512, 1024)
TWICE = ((0.25, 0.125), (0.5, 0.25), (1.0, 0.5))  # sigma twice epsilon
OTHER = ((0.125, 0.125), (0.5, 0.125), (1.0, 0.125))
EACH = {"cifar10": CIFAR10, "cifar100": CIFAR100, "imagenet": IMAGENET}

TABLES: dict[str, Callable[[], Iterator[Cell]]] = {
    "table1": partial(_rscp_plus, "PTT, Bernstein", {"CIFAR-10 ": CIFAR10, "CIFAR-100 ": CIFAR100}),
    "table2": partial(_rscp_plus, "PTT + Bernstein", {"": IMAGENET}),
    "table3": partial(_by_draws, CIFAR10, WITH_HOEFFDING | WITH_BERNSTEIN | EXACT, *FEW[1:], 2048, 4096),
    "draws-cifar100": partial(_by_draws, CIFAR100, WITH_HOEFFDING | EXACT, *FEW),
    "draws-imagenet": partial(_by_draws, IMAGENET, WITH_BERNSTEIN | EXACT, *FEW),
    **{f"holdout-{name}": partial(_holdout_added, setting) for name, setting in EACH.items()},
    "conservativeness": _conservativeness,
    **{f"smoothadv-{name}": partial(_smoothadv, setting) for name, setting in EACH.items()},
    "epsilon": partial(_by_parameter, "epsilon", *TWICE),
    "sigma": partial(_by_parameter, "sigma", OTHER[0], TWICE[0], *OTHER[1:]),
    "ablation": _ablation,
    "temperature": _temperature,
    "motivation": _motivation,
    "heads-cifar10": partial(_heads, "cifar10", *TWICE, *OTHER),
    "heads-cifar100": partial(_heads, "cifar100", TWICE[0]),
    "bank": _bank,
    "imagenet-5k": partial(_off_the_shelf, alone=OFF_THE_SHELF, denoised=DENOISED),
    "imagenet-5k-towards": partial(_off_the_shelf, denoised=TOWARDS),
}
for _name in ("table2", "draws-imagenet", "holdout-imagenet"):
    TABLES[f"{_name}-5k"] = partial(_denoised, TABLES[_name], 0.5, 0.25)
TABLES["smoothadv-imagenet-5k"] = partial(_denoised, TABLES["smoothadv-imagenet"], 0.5)
